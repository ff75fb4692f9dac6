"""The egress of one sandbox in the API: its network policy and its credential vault."""
