"""Limits the bytes a second between a sandbox and its disk: reads, and writes.

- cgroup v2: `io.max` of the container's group. The kernel charges writes from the page cache to it.
- cgroup v1: the container's group bounds what its processes wait for: reads, direct writes, `fsync`. All other writes
  come from the page cache, and the kernel makes them in the root group. So the sandbox's device, which nothing else
  uses, has the same limit there, too. Both together bound a sandbox to twice the rate.
- The limit in the root group belongs to a device number, which the kernel gives to another disk later. It is removed
  before the container, whose removal writes the rest of its page cache. A file with the number is made before the
  limit, so that the next hostd removes what a killed one left.

All functions block for milliseconds: call them in a worker thread.
"""

import contextlib
import errno
import re
from pathlib import Path

from runtimes.process.cgroups import container_group, controller_mounts

_KINDS = ("read", "write")
_NUMBER = re.compile(r"[0-9]{1,4}:[0-9]{1,8}")


class DiskRate:
    """The limits of one hostd.

    Args:
        directory: for the numbers of limited devices; nothing else uses it.
        rate: bytes a second, for reads and for writes; None is no limit.

    Raises:
        OSError: the host has no controller for a limit.
    """

    def __init__(self, directory: Path, rate: int | None, mountinfo: str | None = None) -> None:
        self._directory = directory
        self._rate = rate
        unified, legacy = controller_mounts(
            Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
        )
        self._legacy = legacy.get("blkio")
        self._unified = unified
        if rate is not None and self._legacy is None and not self._has_io():
            raise OSError("disk_bandwidth needs the controller blkio of cgroup v1, or io of cgroup v2")

    def _has_io(self) -> bool:
        return self._unified is not None and "io" in (self._unified / "cgroup.controllers").read_text().split()

    def limit(self, container: str, number: str) -> None:
        """Limit a running container and its device, which has this number (`7:2`).

        Raises:
            OSError: it is not limited, or not completely. `clear` removes what was set.
        """
        if self._rate is None:
            return
        if self._legacy is None:
            group = container_group(self._unified or Path(), container)
            (group / "io.max").write_text(f"{number} rbps={self._rate} wbps={self._rate}")
            return
        self._directory.mkdir(mode=0o700, exist_ok=True)
        (self._directory / number).touch()
        for group in (self._legacy, container_group(self._legacy, container)):
            _set(group, number, self._rate)

    def clear(self, number: str) -> None:
        """Remove the limit of a device, if it has one.

        Raises:
            OSError: it could not be removed.
        """
        if self._legacy is not None and _NUMBER.fullmatch(number) and (self._directory / number).exists():
            try:
                _set(self._legacy, number, 0)
            except OSError as error:
                if error.errno != errno.ENODEV:  # the limit of a device ends with the device
                    raise
            (self._directory / number).unlink(missing_ok=True)

    def sweep(self, keep: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """Remove the limits of all devices except those of `keep`; return what is left."""
        left = []
        if self._directory.is_dir():
            for path in self._directory.iterdir():
                if path.name not in keep:
                    with contextlib.suppress(OSError):
                        self.clear(path.name)
                    left += [f"disk limit of {path.name}"] if path.exists() else []
        return tuple(left)


def _set(group: Path, number: str, rate: int) -> None:
    for kind in _KINDS:
        (group / f"blkio.throttle.{kind}_bps_device").write_text(f"{number} {rate}")
