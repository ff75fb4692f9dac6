"""Directories of probes, which may hold mounts. Those of a killed process are removed by the next one.

A directory is in use while its lock is held. The kernel releases the lock when its process dies, however it dies.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from runtimes.net import netns

_ESCAPE = re.compile(r"\\([0-7]{3})")
_ATTEMPTS = 100
_PREFIX = "sallyport-doctor-"


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Lend a new directory in `parent`, which only root can read. Remove it at the end, with all that is mounted there.

    Raises:
        OSError: it cannot be made.
    """
    _sweep(parent)
    directory, lock = _made(parent)
    try:
        yield directory
    finally:
        _remove(directory)
        os.close(lock)


def _made(parent: Path) -> tuple[Path, int]:
    """Return a new directory, and the descriptor that holds its lock."""
    for _ in range(_ATTEMPTS):  # another process can sweep it before it is locked
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if directory.is_dir():
            return directory, lock
        os.close(lock)
    raise OSError(errno.EBUSY, "other processes remove each directory", str(parent))


def _sweep(parent: Path) -> None:
    """Remove the directories in `parent` whose processes have died."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(directory)
            finally:
                os.close(lock)


def _remove(directory: Path) -> None:
    table = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [Path(_ESCAPE.sub(lambda found: chr(int(found[1], 8)), line.split(" ")[4])) for line in table]
    for point in reversed([point for point in points if point.is_relative_to(directory.resolve())]):
        netns.unmount(point)
    shutil.rmtree(directory, ignore_errors=True)
