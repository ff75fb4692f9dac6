"""Secrets of backends in sandboxes of a whole server, which these modules share."""
