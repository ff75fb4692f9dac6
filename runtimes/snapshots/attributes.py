"""Extended attributes that name users: from the ids of one user namespace to those that the sandbox sees. Pure.

- Kept are `user.*`, file capabilities and POSIX access lists. The others are properties of the host's file system or
  of its security modules, and not of the sandbox's files.
- The attributes with which overlayfs marks its own upper directory are judged by `marks`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from runtimes.snapshots.layer import CaptureRefused

CAPABILITY = b"security.capability"
ACCESS_LISTS = (b"system.posix_acl_access", b"system.posix_acl_default")
_USER = b"user."
_OVERLAY = b"trusted.overlay."
_INERT = frozenset(_OVERLAY + name for name in (b"origin", b"impure", b"nlink", b"uuid", b"upper", b"protattr"))
_OPAQUE = _OVERLAY + b"opaque"
_NAMED = (0x02, 0x08)
"""The tags of the entries of an access list that have an id: a user's and a group's."""
_VERSIONS = {1: 12, 2: 20, 3: 24}
"""Revisions of file capabilities, and their sizes. Only the third one names a user."""


def kept(found: Mapping[bytes, bytes], mapped: Callable[[int], int]) -> dict[bytes, bytes]:
    """Return the attributes of a file as the sandbox sees them. `mapped` returns the sandbox's id of a stored one.

    Raises:
        CaptureRefused: an attribute has a form that is not known.
    """
    result = {}
    for name, value in found.items():
        if name.startswith(_USER):
            result[name] = value
        elif name == CAPABILITY:
            result[name] = _capability(value, mapped)
        elif name in ACCESS_LISTS:
            result[name] = _access_list(value, mapped)
    return result


def is_opaque(found: Mapping[bytes, bytes]) -> bool:
    """Return whether overlayfs hides what is below a directory.

    Raises:
        CaptureRefused: overlayfs marks the file in a way that this release does not capture.
    """
    for name in found:
        if name.startswith(_OVERLAY) and name not in _INERT and name != _OPAQUE:
            raise CaptureRefused("overlayfs refers to another file (redirect_dir or metacopy)")
    value = found.get(_OPAQUE)
    if value not in (None, b"y"):
        raise CaptureRefused("overlayfs marks a directory in an unknown way")
    return value is not None


def _capability(value: bytes, mapped: Callable[[int], int]) -> bytes:
    if len(value) < 4:
        raise CaptureRefused("file capabilities have an unknown form")
    (magic,) = struct.unpack_from("<I", value)
    if _VERSIONS.get(magic >> 24) != len(value):
        raise CaptureRefused("file capabilities have an unknown form")
    if magic >> 24 != 3:
        return value
    (root,) = struct.unpack_from("<I", value, 20)
    if mapped(root) != 0:
        raise CaptureRefused("file capabilities belong to another user namespace")
    return struct.pack("<I", 0x02000000 | (magic & 0xFFFFFF)) + value[4:20]


def _access_list(value: bytes, mapped: Callable[[int], int]) -> bytes:
    if len(value) % 8 != 4 or len(value) < 4 or struct.unpack_from("<I", value) != (2,):
        raise CaptureRefused("an access list has an unknown form")
    result = value[:4]
    for tag, permissions, name in struct.iter_unpack("<HHI", value[4:]):
        result += struct.pack("<HHI", tag, permissions, mapped(name) if tag in _NAMED else name)
    return result
