"""Storage of the log."""
