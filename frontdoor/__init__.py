"""The front door: the commands of `./run` after a Python environment exists. Standard library only.

A tool of the checkout, not a part of the installed product. It imports nothing of Sallyport; it starts the product
and the tests as processes. `clean` also runs on Debian's own Python (3.11), even if no environment was ever made.
"""
