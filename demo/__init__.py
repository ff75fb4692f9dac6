"""The main job, shown: an internet of our own, an attacker in it, and sandboxes that try to reach him.

The same internet and the same attempts serve `./run demo` and the security tests. Nothing here is part of the
product: no package of the product imports it.
"""
