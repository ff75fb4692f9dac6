"""The front door: what `./run COMMAND` does once there is a Python environment. Standard library only.

A tool of the checkout, not a part of the installed product. It imports nothing of ours; it starts the product and the
tests as processes. `clean` also runs on Debian's own Python (3.11), where no environment was ever made.
"""
