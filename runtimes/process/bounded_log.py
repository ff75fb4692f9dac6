"""Lines that are kept on disk within a bound: in a file and its predecessor.

A file that would exceed its bound is renamed to the predecessor, which loses its own content. An appended line is on
disk when `append` returns. An incomplete last line, left by a crash, is not returned.
"""

import os
from pathlib import Path
from typing import Final

ANCHORS_NAME: Final = "anchors.jsonl"
"""The name of the file in hostd's directory that holds anchors of the audit log."""


class BoundedLog:
    """The lines of `path` and of `path` with `.old` appended; `most` is the bound of each file, in bytes."""

    def __init__(self, path: Path, most: int) -> None:
        self._path = path
        self._old = path.with_name(f"{path.name}.old")
        self._most = most

    def read(self) -> list[bytes]:
        """Return all complete lines, oldest first.

        Raises:
            OSError: a file cannot be read.
        """
        lines: list[bytes] = []
        for path in (self._old, self._path):
            if path.exists():
                lines += [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        return lines

    def append(self, line: bytes, first: bytes) -> None:
        """Append `line`, or `first` if it is the first of a file.

        Raises:
            OSError: it may not be on disk.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._path, flags, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size and size + len(line) > self._most:
                os.close(fd)
                self._path.rename(self._old)
                fd = os.open(self._path, flags, 0o600)
                size = 0
            if size and os.pread(fd, 1, size - 1) != b"\n":  # a crash left an incomplete last line
                line = b"\n" + line
            data = first if not size else line
            if os.write(fd, data) != len(data):
                os.ftruncate(fd, size)
                raise OSError("short write")
            os.fdatasync(fd)
        finally:
            os.close(fd)
