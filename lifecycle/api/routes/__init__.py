"""The HTTP routes, one module per group. They parse, call the orchestrator and render."""
