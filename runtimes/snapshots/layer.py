"""Writes a layer of an image: an OCI layer tar, with its digest.

- The content comes from a sandbox and is hostile. Each name is checked component by component. Device nodes cannot be
  written. Numbers of entries, bytes, extended attributes and holes have limits.
- Each entry has a PAX header with its path, its time in nanoseconds and its extended attributes, so that names of any
  bytes and any length are exact.
- A removed name is a whiteout, `.wh.NAME`. An opaque directory contains `.wh..wh..opq`. A name of a sandbox that
  begins with `.wh.` cannot be written, because every reader of layers would take it for one of these.
- Docker writes a file's holes as zeros. `Layer.holes` has them, so that they can be made again.

Standard library only: the process that captures a sandbox imports nothing else.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

MOST_ENTRIES = 1_000_000
MOST_PATH = 3800
"""Docker adds the path of its own directory, and the kernel permits 4095 bytes for both."""
_MOST_XATTRS = 1 << 20
_MOST_HOLES = 100_000
_SMALLEST_HOLE = 4096
_CHUNK = 1 << 20
_BLOCK = 512
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_FILE, _LINK, _SYMLINK, _DIRECTORY, _FIFO, _PAX = b"0", b"1", b"2", b"5", b"6", b"x"
_USTAR_NUMBER = 0o7777777


class CaptureRefused(Exception):
    """The content cannot be captured. The text says why, and contains no name and no content of the sandbox."""


class TooLarge(CaptureRefused):
    """The content is over the limit of bytes."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """The attributes of one file. `mode` has permissions and the three special bits only."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: dict[bytes, bytes] = field(default_factory=dict)


type Extent = tuple[int, Iterable[bytes]]
"""An offset in a file, and the bytes from there on. What is between extents is a hole."""


def checked_path(path: bytes) -> bytes:
    """Return a path that is relative and stays below its root.

    Raises:
        CaptureRefused: it is too long, or a component of it is not a plain name.
    """
    if not 0 < len(path) <= MOST_PATH:
        raise CaptureRefused("a path is too long")
    for name in path.split(b"/"):
        if name in (b"", b".", b"..") or b"\0" in name:
            raise CaptureRefused("a name is not a plain name")
        if name.startswith(_WHITEOUT):
            raise CaptureRefused("a name begins with .wh., which a layer of an image cannot contain")
    return path


class Layer:
    """One layer, written to a file descriptor.

    Attributes:
        holes: the holes of each file that has any, as (offset, length).
    """

    def __init__(self, out: int, most_bytes: int) -> None:
        self._out = out
        self._most = most_bytes
        self._hash = hashlib.sha256()
        self._entries = 0
        self._holes = 0
        self.bytes = 0
        self.holes: dict[bytes, list[tuple[int, int]]] = {}

    def directory(self, path: bytes, attributes: Attributes) -> None:
        """Add a directory. Its parent was added before, or exists in the image."""
        self._header(_DIRECTORY, checked_path(path) + b"/", attributes)

    def file(self, path: bytes, attributes: Attributes, size: int, extents: Iterable[Extent]) -> None:
        """Add a file. The extents are in order and end before `size`."""
        if size < 0:
            raise CaptureRefused("a file has an impossible size")
        self._header(_FILE, checked_path(path), attributes, size=size)
        at, holes = 0, []
        for offset, chunks in extents:
            if offset < at:
                raise CaptureRefused("the parts of a file overlap")
            if offset > at:
                self._zeros(offset - at)
                holes.append((at, offset - at))
                at = offset
            for chunk in chunks:
                at += len(chunk)
                if at > size:
                    raise CaptureRefused("a file is longer than its size")
                self._write(chunk)
        if at < size:
            self._zeros(size - at)
            holes.append((at, size - at))
        self._write(bytes(-size % _BLOCK))
        kept = [hole for hole in holes if hole[1] >= _SMALLEST_HOLE]
        if kept and self._holes + len(kept) <= _MOST_HOLES:
            self._holes += len(kept)
            self.holes[path] = kept

    def symlink(self, path: bytes, attributes: Attributes, target: bytes) -> None:
        """Add a symbolic link. No target is followed, here or by what reads the layer."""
        if not target or b"\0" in target:
            raise CaptureRefused("a symbolic link has no usable target")
        self._header(_SYMLINK, checked_path(path), attributes, link=target)

    def link(self, path: bytes, attributes: Attributes, target: bytes) -> None:
        """Add a further name of a file that was added as `target`; the attributes are that file's."""
        self._header(_LINK, checked_path(path), attributes, link=checked_path(target))

    def fifo(self, path: bytes, attributes: Attributes) -> None:
        """Add a named pipe."""
        self._header(_FIFO, checked_path(path), attributes)

    def whiteout(self, path: bytes) -> None:
        """Add the removal of a name."""
        directory, name = os.path.split(checked_path(path))
        self._header(_FILE, os.path.join(directory, _WHITEOUT + name), _MARK)

    def opaque(self, path: bytes) -> None:
        """Hide what the image has in a directory that was added before."""
        self._header(_FILE, os.path.join(checked_path(path), _OPAQUE), _MARK)

    def close(self) -> str:
        """Write the end. Return the digest of the layer."""
        self._write(bytes(2 * _BLOCK))
        os.ftruncate(self._out, self.bytes)  # the last part can be a hole
        return f"sha256:{self._hash.hexdigest()}"

    def _header(self, kind: bytes, path: bytes, attributes: Attributes, *, size: int = 0, link: bytes = b"") -> None:
        self._entries += 1
        if self._entries > MOST_ENTRIES:
            raise CaptureRefused(f"there are more than {MOST_ENTRIES} files")
        records = _record(b"path", path) + _record(b"mtime", _seconds(attributes.mtime_ns))
        if link:
            records += _record(b"linkpath", link)
        if size > 0o77777777777:
            records += _record(b"size", b"%d" % size)
        for name, number in ((b"uid", attributes.uid), (b"gid", attributes.gid)):
            if not 0 <= number < 0xFFFFFFFF:
                raise CaptureRefused("a file has an impossible owner")
            if number > _USTAR_NUMBER:
                records += _record(name, b"%d" % number)
        if sum(len(key) + len(value) for key, value in attributes.xattrs.items()) > _MOST_XATTRS:
            raise CaptureRefused("the extended attributes of a file are too large")
        for key, value in sorted(attributes.xattrs.items()):
            if not key or b"=" in key or b"\0" in key:
                raise CaptureRefused("an extended attribute has an impossible name")
            records += _record(b"SCHILY.xattr." + key, value)
        self._write(_block(_PAX, b"PaxHeaders/0", 0o644, 0, 0, len(records)))
        self._write(records + bytes(-len(records) % _BLOCK))
        short = path[-99:] if len(path) > 99 else path
        self._write(_block(kind, short, attributes.mode & 0o7777, attributes.uid, attributes.gid, size))

    def _write(self, data: bytes) -> None:
        self._count(len(data))
        self._hash.update(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._out, view) :]

    def _zeros(self, number: int) -> None:
        """Add zeros, which are a hole in the file too."""
        self._count(number)
        zeros = bytes(min(number, _CHUNK))
        for size in _pieces(number):
            self._hash.update(zeros if size == len(zeros) else zeros[:size])
        os.lseek(self._out, number, os.SEEK_CUR)

    def _count(self, number: int) -> None:
        self.bytes += number
        if self.bytes > self._most:
            raise TooLarge(f"it is larger than {self._most} bytes")


_MARK = Attributes(0o600, 0, 0, 0)


def _pieces(number: int) -> Iterator[int]:
    while number > 0:
        yield min(number, _CHUNK)
        number -= _CHUNK


def _seconds(nanoseconds: int) -> bytes:
    """Return a time as PAX writes it. The fraction belongs to the absolute value."""
    whole, rest = divmod(abs(nanoseconds), 10**9)
    return b"%s%d.%09d" % (b"-" if nanoseconds < 0 else b"", whole, rest)


def _record(key: bytes, value: bytes) -> bytes:
    """Return a PAX record, which begins with its own length."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + len(str(len(rest)))
    if len(str(length)) + len(rest) != length:
        length += 1
    return str(length).encode() + rest


def _block(kind: bytes, name: bytes, mode: int, uid: int, gid: int, size: int) -> bytes:
    """Return a ustar header. What does not fit into it is in the PAX header."""

    def octal(number: int, width: int) -> bytes:
        limit = 8 ** (width - 1) - 1
        return b"%0*o\0" % (width - 1, number if number <= limit else 0)

    head = name.replace(b"\0", b"").ljust(100, b"\0") + octal(mode, 8) + octal(uid, 8) + octal(gid, 8)
    head += octal(size, 12) + octal(0, 12) + b" " * 8 + kind + bytes(100) + b"ustar\x0000"
    head = head.ljust(_BLOCK, b"\0")
    return head[:148] + b"%06o\0 " % sum(head) + head[156:]
