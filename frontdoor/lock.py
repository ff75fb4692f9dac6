"""The lock for demo, soak, chaos, bench, test and serve: one at a time, since they share the home's Docker data."""

import fcntl
import os

from frontdoor.places import Places
from frontdoor.steps import Failure

DESCRIPTOR = 9
"""The descriptor that holds the lock. The program that this process executes inherits it."""


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
