"""Captures the upper layer of a sandbox on runsc from a file system checkpoint, while its processes are paused.

`runsc fscheckpoint` writes the names and attributes of the upper layer as a tar. The content of a regular file there is
its size, and the places of its data in the file in which runsc keeps the overlay (`--overlay2=root:self`). So holes
are holes, and no file is read into the memory of the sandbox, as `runsc tar rootfs-upper` does.

- Both files are written by a process that the sandbox may have taken over. What is not exactly understood is refused:
  types and numbers of headers, names, parents, the places of data.
- Data is read only from the overlay's own file, within its size.
- runsc rounds times to seconds, and leaves out sockets and extended attributes that are not UTF-8.

Standard library only.
"""

from __future__ import annotations

import base64
import binascii
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from runtimes.snapshots.attributes import ACCESS_LISTS, is_opaque, kept
from runtimes.snapshots.layer import MOST_ENTRIES, Attributes, CaptureRefused, Extent, Layer, checked_path

_VERSION = b"\x08\x01"
"""The first bytes of the manifest, a protocol buffer: the only version of the format that is understood."""
_BLOCK = 512
_MOST_PAX = 2 << 20
_SEGMENT = struct.Struct("<QQQ")
_MOST_SEGMENTS = 4 << 20
_PAGE = 4096
_CHUNK = 1 << 20
_XATTR = b"SCHILY.xattr."


@dataclass(frozen=True, slots=True)
class _Header:
    kind: bytes
    path: bytes
    link: bytes
    attributes: Attributes
    opaque: bool
    size: int
    device: int


@dataclass(frozen=True, slots=True)
class _File:
    size: int
    segments: tuple[tuple[int, int, int], ...]


class _Reader:
    """The headers of a tar, as Go's `archive/tar` writes it in the formats ustar and PAX."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        if len(data) != size:
            raise CaptureRefused("the checkpoint ends early")
        return data

    def content(self, size: int) -> bytes:
        data = self.read(size)
        self.read(-size % _BLOCK)
        return data

    def next(self) -> _Header | None:
        block = self.read(_BLOCK)
        if not any(block):
            if any(self.read(_BLOCK)) or self._source.read(1):
                raise CaptureRefused("the checkpoint has more than one archive")
            return None
        pax: dict[bytes, bytes] = {}
        if block[156:157] == b"x":
            size = _checked(block)
            if size > _MOST_PAX:
                raise CaptureRefused("the checkpoint has a header that is too large")
            pax = _records(self.content(size))
            block = self.read(_BLOCK)
        return _header(block, pax)


def _checked(block: bytes) -> int:
    """Check a header block, and return its size field."""
    if block[257:263] != b"ustar\0" or block[263:265] != b"00":
        raise CaptureRefused("the checkpoint has a header of an unknown format")
    if _octal(block[148:156]) != sum(block[:148]) + sum(block[156:]) + 8 * 0x20:
        raise CaptureRefused("the checkpoint has a damaged header")
    return _octal(block[124:136])


def _octal(text: bytes) -> int:
    digits = text.strip(b" \0")
    if digits and (not digits.isdigit() or b"8" in digits or b"9" in digits):
        raise CaptureRefused("the checkpoint has a number of an unknown form")
    return int(digits or b"0", 8)


def _records(data: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    while data:
        length, separator, _ = data[:12].partition(b" ")
        if not separator or not length.isdigit() or not len(length) + 4 <= int(length) <= len(data):
            raise CaptureRefused("the checkpoint has a damaged header")
        record, data = data[len(length) + 1 : int(length)], data[int(length) :]
        key, separator, value = record[:-1].partition(b"=")
        if not separator or record[-1:] != b"\n" or key in found:
            raise CaptureRefused("the checkpoint has a damaged header")
        found[key] = value
    return found


def _header(block: bytes, pax: dict[bytes, bytes]) -> _Header:
    size = _checked(block)
    name, prefix = _text(block[:100]), _text(block[345:500])
    path = pax.pop(b"path", prefix + b"/" + name if prefix else name)
    link = pax.pop(b"linkpath", _text(block[157:257]))
    size = _decimal(pax.pop(b"size", b"")) if b"size" in pax else size
    uid = _decimal(pax.pop(b"uid", b"")) if b"uid" in pax else _octal(block[108:116])
    gid = _decimal(pax.pop(b"gid", b"")) if b"gid" in pax else _octal(block[116:124])
    mtime = _nanoseconds(pax.pop(b"mtime", b"")) if b"mtime" in pax else _octal(block[136:148]) * 10**9
    xattrs = {}
    for key, value in pax.items():
        if not key.startswith(_XATTR):
            raise CaptureRefused("the checkpoint has a header of an unknown kind")
        xattrs[key[len(_XATTR) :]] = value
    for list_name in ACCESS_LISTS:
        if list_name in xattrs:
            xattrs[list_name] = _decoded(xattrs[list_name])
    attributes = Attributes(_octal(block[100:108]) & 0o7777, uid, gid, mtime, kept(xattrs, lambda number: number))
    device = _octal(block[329:337]) << 32 | _octal(block[337:345])
    return _Header(block[156:157], path, link, attributes, is_opaque(xattrs), size, device)


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 19:
        raise CaptureRefused("the checkpoint has a number of an unknown form")
    return int(text)


def _nanoseconds(text: bytes) -> int:
    sign = -1 if text.startswith(b"-") else 1
    whole, _, rest = text.removeprefix(b"-").partition(b".")
    if len(rest) > 9 or (rest and not rest.isdigit()):
        raise CaptureRefused("the checkpoint has a number of an unknown form")
    return sign * (_decimal(whole) * 10**9 + int(rest.ljust(9, b"0") if rest else 0))


def _decoded(text: bytes) -> bytes:
    """Return the bytes of an access list, which runsc writes as base64 without padding."""
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        raise CaptureRefused("an access list has an unknown form") from None


class _Checkpoint:
    def __init__(self, reader: _Reader, store: int, layer: Layer, left_out: Callable[[bytes], bool]) -> None:
        self._reader = reader
        self._store = store
        self._stored = os.fstat(store).st_size
        self._layer = layer
        self._left_out = left_out
        self._directories: set[bytes] = {b""}
        self._seen: set[bytes] = set()
        self._whiteouts: set[bytes] = set()
        self._linkable: dict[bytes, Attributes] = {}
        self._hidden: dict[bytes, tuple[Attributes, _File]] = {}
        """Files that are left out under their first name. A further name gets the content."""
        self._renamed: dict[bytes, bytes] = {}
        """The names under which those were added."""
        self._segments = 0

    def run(self) -> None:
        first = self._reader.next()
        if first is None or first.kind != b"5" or first.path != b"./":
            raise CaptureRefused("the checkpoint does not begin with its root")
        while (header := self._reader.next()) is not None:
            self._add(header, self._path(header))

    def _path(self, header: _Header) -> bytes:
        """Return the path of an entry: new, and below a directory that the checkpoint has."""
        path = header.path
        if not path.startswith(b"./") or (header.kind == b"5") != path.endswith(b"/"):
            raise CaptureRefused("the checkpoint has a path of an unknown form")
        path = checked_path(path[2:-1] if header.kind == b"5" else path[2:])
        if os.path.dirname(path) not in self._directories or path in self._seen or len(self._seen) > MOST_ENTRIES:
            raise CaptureRefused("the checkpoint has a path without its directory, or twice")
        self._seen.add(path)
        return path

    def _add(self, header: _Header, path: bytes) -> None:
        left_out = self._left_out(path)
        if header.size and header.kind != b"0":
            raise CaptureRefused("the checkpoint has an entry with content that has none")
        match header.kind:
            case b"5":
                self._directories.add(path)
                if not left_out:
                    self._layer.directory(path, header.attributes)
                    if header.opaque:
                        self._layer.opaque(path)
            case b"0":
                self._file(path, header.attributes, self._places(header.size), left_out=left_out)
            case b"1":
                self._link(path, header.link, left_out=left_out)
            case b"3" if header.device == 0:
                self._whiteouts.add(path)
                if not left_out:
                    self._layer.whiteout(path)
            case b"2" | b"6":
                self._linkable[path] = header.attributes
                if left_out:
                    return
                if header.kind == b"2":
                    self._layer.symlink(path, header.attributes, header.link)
                else:
                    self._layer.fifo(path, header.attributes)
            case b"3" | b"4":
                raise CaptureRefused("there is a device node")
            case _:
                raise CaptureRefused("the checkpoint has an entry of an unknown kind")

    def _file(self, path: bytes, attributes: Attributes, file: _File, *, left_out: bool) -> None:
        if left_out:
            self._hidden[path] = (attributes, file)
            return
        self._linkable[path] = attributes
        self._layer.file(path, attributes, file.size, self._extents(file))

    def _link(self, path: bytes, target: bytes, *, left_out: bool) -> None:
        if not target.startswith(b"./"):
            raise CaptureRefused("the checkpoint has a path of an unknown form")
        target = target[2:]
        if target in self._whiteouts:  # all of them are links of one
            self._whiteouts.add(path)
            if not left_out:
                self._layer.whiteout(path)
            return
        if left_out:
            return
        if target in self._hidden:
            attributes, file = self._hidden.pop(target)
            self._linkable[path] = attributes
            self._layer.file(path, attributes, file.size, self._extents(file))
            self._renamed[target] = path
            return
        target = self._renamed.get(target, target)
        if target not in self._linkable:
            raise CaptureRefused("the checkpoint has a link to a file that it does not have")
        self._layer.link(path, self._linkable[target], target)

    def _places(self, size: int) -> _File:
        """Read the size of a file and the places of its data."""
        number, rest = divmod(size - 8, _SEGMENT.size)
        self._segments += max(0, number)
        if number < 0 or rest or self._segments > _MOST_SEGMENTS:
            raise CaptureRefused("the checkpoint has a file of an unknown form")
        data = self._reader.content(size)
        length = int.from_bytes(data[:8], "little")
        segments = []
        at = 0
        for start, end, place in _SEGMENT.iter_unpack(data[8:]):
            if start < at or end <= start or (start | end | place) % _PAGE or place + end - start > 1 << 62:
                raise CaptureRefused("the checkpoint has a file of an unknown form")
            segments.append((start, end, place))
            at = end
        return _File(length, tuple(segments))

    def _extents(self, file: _File) -> Iterator[Extent]:
        for start, end, place in file.segments:
            last = min(end, file.size)
            if start < last:
                yield start, self._data(place, last - start)

    def _data(self, place: int, size: int) -> Iterator[bytes]:
        while size:
            wanted = min(size, _CHUNK)
            data = os.pread(self._store, wanted, place) if place < self._stored else b""
            data += bytes(wanted - len(data))  # pages that were never written are not in the file
            yield data
            place += wanted
            size -= wanted


def check_manifest(first: bytes) -> None:
    """Check the first bytes of the manifest of a checkpoint.

    Raises:
        CaptureRefused: the version of the format is another one.
    """
    if not first.startswith(_VERSION):
        raise CaptureRefused("the checkpoint has a format that this release does not know")


def capture(source: BinaryIO, store: int, layer: Layer, left_out: Callable[[bytes], bool]) -> None:
    """Write the content of a checkpoint into a layer.

    Args:
        source: its archive.
        store: the file in which runsc keeps the overlay.
        left_out: whether a path is not captured.

    Raises:
        CaptureRefused: something is not understood, or cannot be captured.
        OSError: something cannot be read or written.
    """
    _Checkpoint(_Reader(source), store, layer, left_out).run()
