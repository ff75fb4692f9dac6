"""Policies: names, addresses, rules and the decisions about them.

- The modules are pure: no sockets, no clock, no randomness, no logging. The exceptions are `load`, `cli`,
  `operator_file` and `compiler`.
- Deny is the default: an empty policy, an absent rule and an unknown word allow nothing.

Start with `decision` (decisions at run time), `compile` (how policies are made) and `load` (the operator's file).
"""
