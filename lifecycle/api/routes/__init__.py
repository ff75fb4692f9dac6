"""The HTTP routes, one module per group; thin: parse, call the orchestrator, render."""
