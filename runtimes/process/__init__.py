"""Processes of ours: start, adoption, limits, output, liveness and end."""
