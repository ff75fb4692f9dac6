"""Removes secrets from responses to a sandbox: forms of a secret, and the search in streams and messages."""
