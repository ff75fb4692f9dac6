"""The paths of the host that the operator allows as volumes.

- A path is allowed if it is an entry of the list or below one. Links in it are resolved for this check. The resolved
  path is then opened again without following any link (`trees`), so what was allowed is what is opened.
- A path that contains a directory of Sallyport or of Docker, or lies in one, is refused, whatever the list says. So is
  a file system that shows the kernel.
- A missing directory is made, but only below an entry of the list.

Blocks, on a network file system that does not answer for ever.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import wire
from runtimes.engine import trees

_KERNEL: Final = ("/proc", "/sys", "/dev")
_OF_KERNEL: Final = frozenset(
    (
        *("proc", "sysfs", "cgroup", "cgroup2", "devtmpfs", "devpts", "debugfs", "tracefs", "securityfs", "bpf"),
        *("nsfs", "configfs", "efivarfs", "pstore", "fusectl", "mqueue", "binfmt_misc", "hugetlbfs", "autofs"),
    )
)


class HostPaths:
    """The allow-list of one hostd."""

    def __init__(self, allowed: Sequence[str], own: Sequence[str]) -> None:
        """Store the operator's list, and the files and directories that no sandbox may see."""
        self._allowed = tuple(allowed)
        self._own = (*own, *_KERNEL)

    def open(self, path: str) -> int:
        """Return a descriptor of an allowed directory or plain file.

        Raises:
            wire.RequestError: it is not allowed (`path_forbidden`), does not exist (`path_missing`), is of another kind
                (`path_kind`), or cannot be opened or made (`path`).
        """
        real = os.path.realpath(path)
        entry = self._entry(real)
        self._keep_out(real)
        names = _names(real)
        top = trees.root()
        try:
            return self._open(top, names, len(_names(entry)), real)
        finally:
            os.close(top)

    def _entry(self, real: str) -> str:
        """Return the entry of the list that allows a path."""
        entries = [os.path.realpath(entry) for entry in self._allowed]
        found = [entry for entry in entries if _is_within(real, entry)]
        if not found:
            raise wire.RequestError(wire.Code.PATH_FORBIDDEN, "the operator does not allow this path of the host")
        return min(found, key=len)

    def _keep_out(self, real: str) -> None:
        for own in map(os.path.realpath, self._own):
            if _is_within(real, own) or _is_within(own, real):
                raise wire.RequestError(wire.Code.PATH_FORBIDDEN, "this path of the host is not for sandboxes")

    def _open(self, top: int, names: Sequence[str], made: int, real: str) -> int:
        try:
            found = trees.descend(top, names, made)
        except trees.NoFile:
            raise wire.RequestError(wire.Code.PATH_MISSING, "there is no such path on the host") from None
        except trees.NotPlain:
            raise wire.RequestError(
                wire.Code.PATH_KIND, "the path leads to no directory and no plain file, or was changed meanwhile"
            ) from None
        except OSError as error:
            raise wire.RequestError(wire.Code.PATH, f"the path cannot be opened: {error.strerror}") from error
        try:
            if os.readlink(f"/proc/self/fd/{found}") != real:
                raise wire.RequestError(wire.Code.PATH_FORBIDDEN, "the path was changed meanwhile")
            if _file_system(trees.identity(found)[0]) in _OF_KERNEL:
                raise wire.RequestError(wire.Code.PATH_FORBIDDEN, "a file system of the kernel is not for sandboxes")
        except BaseException:
            os.close(found)
            raise
        return found


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def _is_within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory if directory.endswith("/") else f"{directory}/")


def _file_system(device: int) -> str:
    """Return the type of the mounted file system with this device number, or an empty text."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        if before.split(" ")[2] == number:
            return after.split(" ")[0]
    return ""
