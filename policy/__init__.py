"""What a sandbox may do: names, addresses, rules and the decisions about them.

- Everything here is pure: no sockets, no clock, no randomness, no logging; `load` and `cli` alone read the file they
  are given.
- Deny is the zero value: an empty policy, an absent rule and an unknown word allow nothing.

Begin with `decision` (what is asked at run time), `compile` (where policies come from) and `load` (the operator's
file).
"""
