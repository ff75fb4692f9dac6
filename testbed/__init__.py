"""The common parts of demo, bench, chaos and tests: a separate internet, attacks, and captures at the far ends."""
