"""Captures the upper directory of a container on runc, whose processes are frozen.

- Owners on disk are those of the container's user range. The layer has the ids that the sandbox sees. A file of an
  owner outside of the range is refused.
- No name is followed: each directory is opened relative to its parent, and links are read.
- A whiteout of overlayfs is a character device 0/0. Any other device is refused. A socket is left out, as by tar; what
  the image has under its name stays hidden.

Standard library only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator

from runtimes.snapshots.attributes import is_opaque, kept
from runtimes.snapshots.layer import Attributes, CaptureRefused, Extent, Layer, checked_path

RANGE = 65536
_CHUNK = 1 << 20


class _Walk:
    def __init__(self, layer: Layer, base: int, left_out: Callable[[bytes], bool]) -> None:
        self._layer = layer
        self._base = base
        self._left_out = left_out
        self._linked: dict[tuple[int, int], bytes] = {}

    def mapped(self, number: int) -> int:
        """Return the id that the sandbox sees for one on disk."""
        if not 0 <= number - self._base < RANGE:
            raise CaptureRefused("a file belongs to a user outside of the sandbox's range")
        return number - self._base

    def run(self, root: int) -> None:
        stack = [(root, b"", iter(sorted(os.listdir(f"/proc/self/fd/{root}".encode()))))]
        try:
            while stack:
                directory, prefix, names = stack[-1]
                name = next(names, None)
                if name is None:
                    stack.pop()
                    if directory != root:
                        os.close(directory)
                    continue
                path = prefix + name
                if self._left_out(path):
                    continue
                if self._add(directory, name, path):
                    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                    child = os.open(name, flags, dir_fd=directory)
                    stack.append((child, path + b"/", iter(sorted(os.listdir(f"/proc/self/fd/{child}".encode())))))
        finally:
            for directory, _, _ in stack:
                if directory != root:
                    os.close(directory)

    def _add(self, directory: int, name: bytes, path: bytes) -> bool:
        """Add one file. Return whether it is a directory."""
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        mode = status.st_mode
        if stat.S_ISCHR(mode) and status.st_rdev == 0:
            self._layer.whiteout(path)
            return False
        if stat.S_ISSOCK(mode):
            self._layer.whiteout(path)
            return False
        found = _attributes(directory, name)
        attributes = Attributes(
            stat.S_IMODE(mode),
            self.mapped(status.st_uid),
            self.mapped(status.st_gid),
            status.st_mtime_ns,
            kept(found, self.mapped),
        )
        opaque = is_opaque(found)
        if stat.S_ISDIR(mode):
            self._layer.directory(path, attributes)
            if opaque:
                self._layer.opaque(path)
            return True
        first = self._linked.get((status.st_dev, status.st_ino)) if status.st_nlink > 1 else None
        if first is not None:
            self._layer.link(path, attributes, first)
            return False
        if stat.S_ISREG(mode):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
            try:
                self._layer.file(path, attributes, status.st_size, _extents(fd, status.st_size))
            finally:
                os.close(fd)
        elif stat.S_ISLNK(mode):
            self._layer.symlink(path, attributes, os.readlink(name, dir_fd=directory))
        elif stat.S_ISFIFO(mode):
            self._layer.fifo(path, attributes)
        else:
            raise CaptureRefused("there is a device node")
        if status.st_nlink > 1:
            self._linked[(status.st_dev, status.st_ino)] = path
        return False


def capture(root: int, layer: Layer, base: int, left_out: Callable[[bytes], bool]) -> None:
    """Write what is below the open directory `root` into a layer.

    Args:
        base: the host's id of the sandbox's user 0.
        left_out: whether a path, relative to `root`, is not captured; asked for each before what is below it.

    Raises:
        CaptureRefused: something cannot be captured.
        OSError: something cannot be read or written.
    """
    _Walk(layer, base, left_out).run(root)


def _attributes(directory: int, name: bytes) -> dict[bytes, bytes]:
    checked_path(name)
    path = f"/proc/self/fd/{directory}/".encode() + name
    names = os.listxattr(path, follow_symlinks=False)
    return {os.fsencode(key): os.getxattr(path, key, follow_symlinks=False) for key in names}


def _extents(fd: int, size: int) -> Iterator[Extent]:
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: the rest is a hole
            return
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        yield start, _read(fd, start, end)
        at = end


def _read(fd: int, start: int, end: int) -> Iterator[bytes]:
    while start < end:
        data = os.pread(fd, min(_CHUNK, end - start), start)
        if not data:
            raise CaptureRefused("a file ends before its size")
        yield data
        start += len(data)
