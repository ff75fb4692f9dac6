"""Stores of secrets: the port, and its implementations."""
