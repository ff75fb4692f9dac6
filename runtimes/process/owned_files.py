"""Files that only Sallyport may change: the runtime wrappers, the shim, the guard's rules.

- Owner, mode and content must be those of the start. A file of which only the times changed still counts as equal.
- A file is read again only if its status in the kernel has changed.
"""

import hashlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Kept:
    changes: tuple[int, ...]
    owner: tuple[int, int]
    digest: bytes


class OwnedFiles:
    """The state of `paths` at the time of creation, for later comparison.

    Raises:
        OSError: one of them cannot be read.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._kept = {path: _read(path) for path in paths}

    def changed(self) -> tuple[str, ...]:
        """Return the names of the files that have changed."""
        return tuple(path.name for path in self._kept if not self._same(path))

    def _same(self, path: Path) -> bool:
        kept = self._kept[path]
        try:
            status = os.stat(path)
            if _changes(status) == kept.changes:
                return True
            now = _read(path)
        except OSError:
            return False
        if (now.owner, now.digest) != (kept.owner, kept.digest):
            return False
        self._kept[path] = now
        return True


def _changes(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read(path: Path) -> _Kept:
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        owner = (status.st_uid, stat.S_IMODE(status.st_mode))
        return _Kept(_changes(status), owner, hashlib.file_digest(file, "sha256").digest())
