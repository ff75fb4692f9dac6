"""Reads the parts of an image from an archive or a directory, without unpacking either.

- An archive is read at offsets of its entries. Nothing of it becomes a name on the host.
- In a directory, only plain files directly below a given directory are opened, and no link is followed.
- Layers are decompressed in small steps, so that a small layer cannot make much memory of it.
"""

import io
import os
import posixpath
import stat
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import zstandard

from runtimes.images.manifests import RefusedImage

CHUNK: Final = 1 << 20
_MOST_PARTS: Final = 10_000
_MOST_NAME: Final = 512
_MOST_WINDOW: Final = 1 << 27
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_OTHERS: Final = (b"BZh", b"\xfd7zXZ")


class Source(Protocol):
    """The parts of an image by name."""

    def has(self, name: str) -> bool:
        """Return whether there is a part of this name."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Return a stream of a part, from its beginning.

        Raises:
            RefusedImage: there is none.
        """
        ...


def read(source: Source, name: str, most: int) -> bytes:
    """Return a whole part of at most `most` bytes.

    Raises:
        RefusedImage: there is none, or it is larger.
    """
    with source.open(name) as stream:
        found = stream.read(most + 1)
    if len(found) > most:
        raise RefusedImage(f"{name[:100]} is larger than {most} bytes")
    return found


class Archive:
    """A tar file, by its descriptor."""

    def __init__(self, fd: int) -> None:
        """Find the entries of the archive at `fd`, which stays open.

        Raises:
            RefusedImage: it is no tar of an image.
        """
        self._fd = fd
        self._parts: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        start = os.pread(fd, 6, 0)
        if start.startswith((_GZIP, _ZSTD, *_OTHERS)):
            raise RefusedImage("the archive is compressed: decompress it first, for example with gunzip")
        try:
            with os.fdopen(os.dup(fd), "rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
                self._index(archive)
        except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError):
            raise RefusedImage("the archive is no complete tar") from None

    def _index(self, archive: tarfile.TarFile) -> None:
        count = 0
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]
            count += 1
            name = posixpath.normpath(member.name)
            if count > _MOST_PARTS or len(name) > _MOST_NAME or len(member.linkname) > _MOST_NAME:
                raise RefusedImage("the archive has too many entries, or names that are too long")
            if name.startswith(("/", "../")) or name == "..":
                raise RefusedImage("the archive has an entry outside of itself")
            if member.isreg() and not member.issparse():
                if name in self._parts or name in self._links:
                    raise RefusedImage("the archive has two entries of one name")
                self._parts[name] = member.offset_data, member.size
            elif member.issym():  # `docker save` writes a layer once, and links to it
                self._links[name] = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
            elif not member.isdir():
                raise RefusedImage("the archive has an entry that is no file, directory or link")

    def has(self, name: str) -> bool:
        """Return whether there is a part of this name."""
        return self._find(name) is not None

    def _find(self, name: str) -> tuple[int, int] | None:
        name = posixpath.normpath(name)
        return self._parts.get(self._links.get(name, name))

    def open(self, name: str) -> BinaryIO:
        """Return a stream of a part."""
        if (found := self._find(name)) is None:
            raise RefusedImage(f"the archive has no {name[:100]!a}")
        return io.BufferedReader(_Part(self._fd, *found), CHUNK)


class _Part(io.RawIOBase):
    """Some bytes of a file."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self._fd, self._at, self._end = fd, offset, offset + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        found = os.preadv(self._fd, [memoryview(buffer)[: self._end - self._at]], self._at)
        if found == 0 and self._at < self._end and len(buffer) > 0:
            raise RefusedImage("the archive ends too early")
        self._at += found
        return found


class Directory:
    """Plain files below a directory. `blobs/sha256/<digest>` of an OCI layout is one, too."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def has(self, name: str) -> bool:
        """Return whether there is a part of this name."""
        try:
            self.open(name).close()
        except RefusedImage:
            return False
        return True

    def open(self, name: str) -> BinaryIO:
        """Return a stream of a part."""
        *directories, last = name.split("/")
        fds: list[int] = []
        try:
            fds.append(os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW))
            for part in directories:
                fds.append(os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fds[-1]))
            fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fds[-1])
        except OSError:
            raise RefusedImage(f"the image has no {name[:100]!a}") from None
        finally:
            for one in fds:
                os.close(one)
        if not stat.S_ISREG(os.fstat(fd).st_mode) or last in ("", ".", ".."):
            os.close(fd)
            raise RefusedImage(f"{name[:100]!a} of the image is no plain file")
        return os.fdopen(fd, "rb")


def compression(start: bytes) -> str:
    """Return the compression of a layer, by its first bytes: `gzip`, `zstd`, or an empty text for none.

    Raises:
        RefusedImage: it is one that is not accepted.
    """
    if start.startswith(_OTHERS):
        raise RefusedImage("a layer is compressed in a way that is not accepted")
    return "gzip" if start.startswith(_GZIP) else "zstd" if start.startswith(_ZSTD) else ""


def decompressed(chunks: Iterator[bytes], kind: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of a layer, at most `CHUNK` at once.

    Raises:
        RefusedImage: they are not compressed like that, or end too early.
    """
    try:
        if kind == "gzip":
            yield from _gunzipped(chunks)
        elif kind == "zstd":
            reader = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW).stream_reader(
                io.BufferedReader(_Chunks(chunks), CHUNK), read_across_frames=True
            )
            while piece := reader.read(CHUNK):
                yield piece
        else:
            yield from chunks
    except (zlib.error, zstandard.ZstdError):
        raise RefusedImage("a layer is not compressed as its type says") from None


def _gunzipped(chunks: Iterator[bytes]) -> Iterator[bytes]:
    inflate = zlib.decompressobj(wbits=31)
    for chunk in chunks:
        waiting = chunk
        while waiting:
            if inflate.eof:  # another member follows
                inflate = zlib.decompressobj(wbits=31)
            if piece := inflate.decompress(waiting, CHUNK):
                yield piece
            waiting = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
    while not inflate.eof:
        piece = inflate.decompress(inflate.unconsumed_tail, CHUNK)
        if not piece:
            raise RefusedImage("a compressed layer ends too early")
        yield piece


class _Chunks(io.RawIOBase):
    """A stream of an iterator, for a decompressor."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._left = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        if not self._left:
            self._left = next(self._chunks, b"")
        found, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(found)] = found
        return len(found)
