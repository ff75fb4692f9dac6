"""The HTTP routes, one module per group. They parse requests, call the orchestrator and render answers."""
