"""The rings through which gateway workers give their records to auditd (`wire.api.auditd.AttachRing`).

- Each worker has a ring of two files: its records, which the worker writes, and its cursor, which only auditd writes.
- As files they outlive hostd. The records in a ring are part of the log. So a ring is removed only after auditd has
  written them (`chains`), and only when no worker can write into it any more.
- A worker can outlive a killed hostd for a moment. The ring of a worker of a former hostd counts as over
  `OUTLIVES_SECONDS` after this hostd has seen it.
- Only root can open the files by name.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from wire.api.auditd import CURSOR_BYTES, RING_BYTES

OUTLIVES_SECONDS: Final = 10.0
_SIZES: Final = {"ring": RING_BYTES, "cursor": CURSOR_BYTES}

type RingKey = tuple[str, int]
"""The worker of a ring: its sandbox and generation."""


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
    """The rings of one hostd, in `directory`, which nothing else uses. `clock` gives monotonic seconds."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._live: set[RingKey] = set()
        self._seen: dict[RingKey, float] = {}

    def create(self, key: RingKey) -> RingFiles:
        """Make the ring of a new worker, empty and closed. It is over when `ended` is called.

        Raises:
            OSError: it cannot be made, or exists already.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._live.add(key)
        for kind, size in _SIZES.items():
            fd = os.open(self._path(key, kind), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)  # so that no write into the memory fails because the disk is full
            finally:
                os.close(fd)
        return self.open(key)

    def open(self, key: RingKey) -> RingFiles:
        """Open the ring of a worker.

        Raises:
            OSError: there is none.
        """
        opened: list[int] = []
        try:
            for kind, mode in (("ring", os.O_RDWR), ("cursor", os.O_RDWR), ("cursor", os.O_RDONLY)):
                opened.append(os.open(self._path(key, kind), mode | os.O_NOFOLLOW | os.O_CLOEXEC))
            opened.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        return RingFiles(*opened)

    def ended(self, key: RingKey) -> None:
        """The worker of this ring has ended, or was never made."""
        self._live.discard(key)
        self._seen[key] = float("-inf")

    def left(self) -> list[RingKey]:
        """Return the rings whose worker is not one of this hostd, the oldest of each sandbox first."""
        if not self._directory.is_dir():
            return []
        names = (path.stem.rpartition(".") for path in self._directory.iterdir())
        return sorted({(sandbox, int(number)) for sandbox, _, number in names if number.isdigit()} - self._live)

    def over(self, key: RingKey) -> bool:
        """Whether no worker can write into this ring any more."""
        return key not in self._live and self._clock() - self._seen.setdefault(key, self._clock()) >= OUTLIVES_SECONDS

    def complete(self, key: RingKey) -> bool:
        """Whether a ring has both files, of their size."""
        paths = {self._path(key, kind): size for kind, size in _SIZES.items()}
        return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())

    def remove(self, key: RingKey) -> None:
        """Remove a ring. Raises OSError."""
        for kind in _SIZES:
            self._path(key, kind).unlink(missing_ok=True)
        self._seen.pop(key, None)

    def _path(self, key: RingKey, kind: str) -> Path:
        return self._directory / f"{key[0]}.{key[1]}.{kind}"
