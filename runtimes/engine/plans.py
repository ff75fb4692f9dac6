"""The directory of launch plans, and the check that it has only what hostd wrote.

- Only the shim changes it: the shim renames a plan to claim it, and does not change its content.
- The directory is the one of the start, and belongs to root. No plan is written into another directory.

All of this runs on hostd's event loop, so a plan is not read during its write.
"""

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SUFFIXES = (".json", ".claimed")
_GONE = "is gone"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Deviation:
    """A deviation of the directory from what was written. `container` is None if no plan of this hostd is concerned."""

    reason: str
    container: str | None = None


class Plans:
    """The plans of one hostd."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: dict[str, bytes] = {}
        self._claimed: set[str] = set()
        status = os.stat(directory, follow_symlinks=False)
        self._identity = (status.st_dev, status.st_ino)

    def write(self, container: str, plan: Mapping[str, Any]) -> None:
        """Write the plan of `container`, which can then start once.

        Raises:
            OSError: the plan cannot be written, or the directory is another one.
        """
        if wrong := self.directory_changed():
            raise OSError(f"launch plans: {wrong}")
        content = json.dumps(plan).encode()
        path = self._directory / f"{container}.json"
        temporary = path.with_suffix(".new")
        temporary.touch(mode=0o600, exist_ok=False)
        temporary.write_bytes(content)
        temporary.rename(path)
        self._written[container] = hashlib.sha256(content).digest()

    def adopt(self, container: str) -> None:
        """Adopt the claimed plan of a container that a former hostd launched. A missing plan is a deviation."""
        try:
            content = (self._directory / f"{container}.claimed").read_bytes()
        except OSError:
            content = b""
        self._written[container] = hashlib.sha256(content).digest()
        self._claimed.add(container)

    def forget(self, container: str) -> None:
        """Remove the plan of `container` in each of its forms."""
        self._written.pop(container, None)
        self._claimed.discard(container)
        for suffix in (*_SUFFIXES, ".new"):
            with contextlib.suppress(NotADirectoryError):
                (self._directory / f"{container}{suffix}").unlink(missing_ok=True)

    def directory_changed(self) -> str:
        """Return the deviation of the directory itself, or an empty text."""
        try:
            status = os.stat(self._directory, follow_symlinks=False)
        except OSError as error:
            return f"the directory cannot be read: {error.strerror}"
        if not stat.S_ISDIR(status.st_mode) or (status.st_dev, status.st_ino) != self._identity:
            return "the directory was replaced"
        if status.st_uid != 0 or stat.S_IMODE(status.st_mode) != 0o700:
            return "the directory is not root's alone"
        return ""

    def deviations(self) -> tuple[Deviation, ...]:
        """Compare the files with what was written. Foreign files are removed."""
        found: list[Deviation] = []
        if wrong := self.directory_changed():
            found.append(Deviation(wrong))
        else:
            found += self._foreign()
        for container, digest in self._written.items():
            if wrong := self._wrong(container, digest):
                found.append(Deviation(f"the launch plan {wrong}", container))
        return tuple(found)

    def _wrong(self, container: str, digest: bytes) -> str:
        """Return the deviation of a plan. This order of the look-ups finds a plan also during its claim."""
        claimed = self._state(container, ".claimed", digest)
        fresh = self._state(container, ".json", digest)
        if claimed == fresh == _GONE:
            claimed = self._state(container, ".claimed", digest)
        if claimed != _GONE:
            self._claimed.add(container)
            return claimed or ("" if fresh == _GONE else "can be used again")
        return "can be used again" if container in self._claimed and fresh == "" else fresh

    def _state(self, container: str, suffix: str, digest: bytes) -> str:
        try:
            fd = os.open(self._directory / f"{container}{suffix}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return _GONE
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if status.st_uid != 0 or stat.S_IMODE(status.st_mode) != 0o600:
                return "is not root's alone"
            return "" if hashlib.sha256(file.read(_MOST_BYTES)).digest() == digest else "was changed"

    def _foreign(self) -> list[Deviation]:
        found = []
        for entry in list(os.scandir(self._directory)):
            container, suffix = os.path.splitext(entry.name)
            if container in self._written and suffix in _SUFFIXES:
                continue
            try:
                os.rmdir(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
                done = "removed"
            except OSError as error:
                done = f"cannot be removed: {error.strerror}"
            found.append(Deviation(f"a file that is not ours: {entry.name[:80]} ({done})"))
        return found
