"""File system snapshots: what a sandbox wrote, as one more layer of its image."""
