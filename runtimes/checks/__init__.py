"""Checks of the host before a start, and of each slot while it runs."""
