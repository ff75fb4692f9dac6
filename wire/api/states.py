"""The states of a sandbox as hostd describes it in the answers of `list` and `inspect`."""

from enum import StrEnum


class HostState(StrEnum):
    """`CREATING` and the last three are hostd's own; the others are Docker's states of a container."""

    CREATING = "creating"
    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    RESTARTING = "restarting"
    REMOVING = "removing"
    EXITED = "exited"
    DEAD = "dead"
    GONE = "gone"
    """The container was removed by another program."""
    UNKNOWN = "unknown"
    """Docker did not answer, or with a state that is not in this list."""
    ALARM = "alarm"
    """hostd has cut the sandbox off and removed it."""
