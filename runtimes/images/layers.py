"""The entries of a layer: what a tar of a file system may contain, before Docker unpacks it as root.

- A name is relative and stays below the root. So does the target of a hard link. A symbolic link may be absolute: it
  means a place inside the sandbox. A relative one must not lead above the root.
- Device nodes are those that each container has anyway. Others could be devices of the host.
- The number of entries and the length of names are bounded.
- Behind the last entry are zeros only. So no other reader of the tar finds entries that were not checked here.
"""

import posixpath
import tarfile
from typing import IO, Final

from runtimes.images.manifests import RefusedImage

MOST_ENTRIES: Final = 1_000_000
"""Of one image."""
_MOST_NAME: Final = 4096
_BLOCK: Final = 1 << 20
_USUAL_DEVICES: Final = frozenset(((1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2)))
"""null, zero, full, random, urandom, tty, console, ptmx."""


def check_entries(file: IO[bytes], most: int) -> int:
    """Check each entry of an uncompressed tar, and return their number; `most` is its limit.

    Raises:
        RefusedImage: an entry is not accepted, or the file is no tar.
    """
    count = 0
    try:
        with tarfile.open(fileobj=file, mode="r:", errorlevel=2) as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # otherwise each entry stays in memory
                count += 1
                if count > most:
                    raise RefusedImage(f"the image has more than {MOST_ENTRIES} files")
                check_entry(member)
            file.seek(archive.offset)
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError):
        raise RefusedImage("a layer is no complete tar") from None
    while block := file.read(_BLOCK):
        if block.count(0) != len(block):
            raise RefusedImage("a layer goes on behind its end")
    return count


def check_entry(member: tarfile.TarInfo) -> None:
    """Check one entry.

    Raises:
        RefusedImage: it is not accepted.
    """
    if len(member.name) > _MOST_NAME or len(member.linkname) > _MOST_NAME:
        raise RefusedImage("a layer has a name that is too long")
    _check_place(member.name, "a file")
    if member.islnk():
        _check_place(member.linkname, "a hard link")
    elif member.issym():
        if not member.linkname.startswith("/"):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))
            if target.split("/")[0] == "..":
                raise RefusedImage(f"a layer has a symbolic link out of the root: {_shown(member.name)}")
    elif member.isblk() or (member.ischr() and (member.devmajor, member.devminor) not in _USUAL_DEVICES):
        raise RefusedImage(f"a layer has a device node: {_shown(member.name)}")
    elif not (member.isreg() or member.isdir() or member.isfifo() or member.ischr()):
        raise RefusedImage(f"a layer has an entry of an unknown type: {_shown(member.name)}")


def _check_place(name: str, what: str) -> None:
    if "\0" in name or name.startswith("/") or ".." in name.split("/"):
        raise RefusedImage(f"a layer has {what} outside of the root: {_shown(name)}")


def _shown(name: str) -> str:
    return ascii(name[:100])
