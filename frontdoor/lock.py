"""Only one of demo, soak, chaos, bench, test and serve at a time: they share the home's Docker data directory."""

import fcntl
import os

from frontdoor.places import Places
from frontdoor.steps import Failure

DESCRIPTOR = 9
"""Holds the lock. What this process becomes inherits it."""


def only_one(places: Places) -> None:
    """Take the lock of the home.

    Raises:
        Failure: another process has it.
    """
    path = f"{places.home}/lock"
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), DESCRIPTOR)
    try:
        fcntl.flock(DESCRIPTOR, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Failure(f"another ./run is at work (lock {path})") from None
