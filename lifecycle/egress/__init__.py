"""Egress of one sandbox through the API: its network policy and its credential vault."""
