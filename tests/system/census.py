"""The census of the tests is the soak's: see `demo.census`."""

from demo.census import Census, command_lines, daemons, descriptors, take

__all__ = ["Census", "command_lines", "daemons", "descriptors", "take"]
