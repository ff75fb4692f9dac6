"""Tests that run hostile code as each component of the product, with its user, its confinement and its descriptors.

`stack.CompromisedStack` is a whole server. An agent in each of its daemons and workers runs the Python code that a test
sends, in that same process. A test judges the result outside of that process: at the far end, in the audit log, or in
the kernel.
"""
