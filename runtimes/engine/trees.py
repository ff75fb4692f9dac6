"""Opens files of the host without following a link, and mounts exactly what was opened.

- A path is opened one name at a time, each below the descriptor of the one before. A name that is a link is refused,
  so no rename and no link that a sandbox makes meanwhile leads elsewhere.
- `mount` takes a descriptor, not a path: what was checked is what is mounted.
- A mount has one file system only: mounts below the directory are not in it. It cannot have devices and set-user-id
  bits, and no mount propagates into or out of it.

All functions block.
"""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_CLONE_TREE, _FROM_EMPTY_PATH = 1, 4
_RDONLY, _NOSUID, _NODEV = 1, 2, 4
_PRIVATE = 1 << 18
_MNT_DETACH, _NOFOLLOW = 2, 8
_MODE: Final = 0o755

_libc = ctypes.CDLL(None, use_errno=True)


class NoFile(Exception):
    """A name of the path does not exist."""


class NotPlain(Exception):
    """A name of the path is a link, or leads to neither a directory nor a plain file."""


def root() -> int:
    """Return a descriptor of the root directory."""
    return os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def descend(top: int, names: Sequence[str], made: int | None = None) -> int:
    """Return a descriptor of what `names` lead to from the directory `top`. The caller closes both.

    Args:
        made: missing directories are made from this position of `names` on; None: none is made.

    Raises:
        NoFile, NotPlain: see there.
        OSError: a directory cannot be made or opened.
    """
    here = os.dup(top)
    try:
        for position, name in enumerate(names):
            below = _open(here, name, make=made is not None and position >= made)
            os.close(here)
            here = below
        kind = os.fstat(here).st_mode
        if not stat.S_ISDIR(kind) and not stat.S_ISREG(kind):
            raise NotPlain
    except BaseException:
        os.close(here)
        raise
    return here


def _open(directory: int, name: str, *, make: bool) -> int:
    if make:
        try:
            os.mkdir(name, _MODE, dir_fd=directory)
        except FileExistsError:
            pass
        except NotADirectoryError:
            raise NotPlain from None
    try:
        found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        raise NoFile from None
    except NotADirectoryError:
        raise NotPlain from None
    if stat.S_ISLNK(os.fstat(found).st_mode):
        os.close(found)
        raise NotPlain
    return found


def identity(fd: int) -> tuple[int, int]:
    """Return the device and the inode of an open file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def is_directory(fd: int) -> bool:
    """Return whether an open file is a directory."""
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def mount(fd: int, place: Path, *, read_only: bool) -> None:
    """Mount an open directory or file at `place`, which is made as one of the same kind.

    Raises:
        OSError: the kernel cannot do it. `place` can exist.
    """
    tree = _call(_OPEN_TREE, fd, b"", _AT_EMPTY_PATH | _CLONE_TREE | os.O_CLOEXEC)
    try:
        wanted = _NOSUID | _NODEV | (_RDONLY if read_only else 0)
        attributes = struct.pack("4Q", wanted, 0, _PRIVATE, 0)
        _call(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, len(attributes))
        if is_directory(fd):
            place.mkdir(mode=0o700)
        else:
            place.touch(mode=0o600, exist_ok=False)
        _call(_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(place), _FROM_EMPTY_PATH)
    finally:
        os.close(tree)


def unmount(place: Path) -> None:
    """Unmount what is mounted at `place`, and remove `place`. This ends each copy of the mount in other namespaces.

    Raises:
        OSError: something is still mounted there.
    """
    while _libc.umount2(os.fsencode(place), _MNT_DETACH | _NOFOLLOW) == 0:
        continue
    if ctypes.get_errno() not in (errno.EINVAL, errno.ENOENT):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(place))
    try:
        place.rmdir()
    except NotADirectoryError:
        place.unlink()
    except FileNotFoundError:
        return


def _call(number: int, *arguments: int | bytes) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
