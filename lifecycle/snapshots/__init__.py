"""Snapshots of sandboxes: their rows, their creation, removal and recovery."""
