"""The demonstration: a separate internet, an attacker in it, and sandboxes that try to reach the attacker.

`./run demo` and the security tests use the same internet and the same attempts. Nothing here is part of the product:
no package of the product imports it.
"""
