"""The demonstration: an internet of its own, an attacker in it, and sandboxes that try to reach the attacker.

The same internet and the same attempts serve `./run demo` and the security tests. Nothing here is part of the
product: no package of the product imports it.
"""
