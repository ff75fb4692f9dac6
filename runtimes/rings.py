"""The rings through which gateway workers give their records to auditd (`wire.api.auditd.AttachRing`).

- A ring has two files: its records, which the worker writes, and its cursor, which only auditd writes. hostd makes them
  once, at launch. All workers of the sandbox and each auditd use the same files.
- As files they also outlive hostd. The records that are in a ring are part of the log. So a ring is removed only after
  auditd has ended the chain of its sandbox (`chains`).
- Only root can open them by name.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from wire.api.auditd import CURSOR_BYTES, RING_BYTES

_SIZES: Final = {"ring": RING_BYTES, "cursor": CURSOR_BYTES}


@dataclass(frozen=True, slots=True)
class RingFiles:
    """Descriptors of one ring; `close` closes all of them.

    Attributes:
        records, cursor: both for reading and writing.
        position: the cursor, for reading only.
        wake: an eventfd, with which the worker wakes auditd.
    """

    records: int
    cursor: int
    position: int
    wake: int

    @property
    def for_auditd(self) -> tuple[int, int, int]:
        """The descriptors of an `AttachRing`."""
        return self.records, self.cursor, self.wake

    @property
    def for_worker(self) -> tuple[int, int, int]:
        """The descriptors of a worker."""
        return self.records, self.position, self.wake

    def close(self) -> None:
        """Close the descriptors."""
        for fd in (self.records, self.cursor, self.position, self.wake):
            os.close(fd)


class Rings:
    """The rings of one hostd, in `directory`, which nothing else uses."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def create(self, sandbox: str) -> None:
        """Make the ring of a new sandbox, empty and closed.

        Raises:
            OSError: it cannot be made, or exists already.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for kind, size in _SIZES.items():
            fd = os.open(self._path(sandbox, kind), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)  # so that no write into the memory fails because the disk is full
            finally:
                os.close(fd)

    def open(self, sandbox: str) -> RingFiles:
        """Open a sandbox's ring.

        Raises:
            OSError: there is none.
        """
        opened: list[int] = []
        try:
            for kind, mode in (("ring", os.O_RDWR), ("cursor", os.O_RDWR), ("cursor", os.O_RDONLY)):
                opened.append(os.open(self._path(sandbox, kind), mode | os.O_NOFOLLOW | os.O_CLOEXEC))
            opened.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        return RingFiles(*opened)

    def names(self) -> frozenset[str]:
        """Return the sandboxes that have a ring, or a part of one."""
        if not self._directory.is_dir():
            return frozenset()
        return frozenset(path.stem for path in self._directory.iterdir())

    def complete(self, sandbox: str) -> bool:
        """Whether a sandbox has both files of a ring."""
        return all(self._path(sandbox, kind).is_file() for kind in _SIZES)

    def remove(self, sandbox: str) -> None:
        """Remove a sandbox's ring. Raises OSError."""
        for kind in _SIZES:
            self._path(sandbox, kind).unlink(missing_ok=True)

    def _path(self, sandbox: str, kind: str) -> Path:
        return self._directory / f"{sandbox}.{kind}"
