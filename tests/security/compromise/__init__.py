"""Hostile code as each component of the product, with its user, its confinement and its descriptors.

`stack.CompromisedStack` is a whole server. An agent in each of its daemons and workers runs the Python that a test
sends, in that very process. A verdict is taken outside of it: at the far end, in the log, in the kernel.
"""
