"""Freezes the processes of containers with the kernel's freezer; cgroup v1 and v2.

- A frozen process executes no instruction. This holds for each process in the container's group: for runc those of the
  workload, for runsc also the sandbox's kernel, its network stack and its file server.
- The kernel keeps the state. It survives the death of every process of Sallyport and of Docker. So it is the only
  record of whether a sandbox is paused.
- On cgroup v1 a frozen process does not take a signal, SIGKILL included. What ends the processes of a container calls
  `end` first: the processes get SIGKILL and are then thawed, so none of them runs once more.
"""

import asyncio
import contextlib
import errno
import os
import signal
import time
from enum import StrEnum
from pathlib import Path

from runtimes.process.cgroups import container_group, controller_mounts

FREEZE_SECONDS = 15.0
"""The limit for the processes of a container to stop. A process of a group with little processor time needs its turn
for that."""
_TICK_SECONDS = 0.001
_REPEAT = 64


class Freeze(StrEnum):
    """The state of a group: `PARTLY` is between a request to freeze and its end."""

    THAWED = "thawed"
    PARTLY = "partly"
    FROZEN = "frozen"


class NoProcesses(Exception):
    """The container has no process."""


class Freezer:
    """The freezer of one host. A call reads and writes some small files of the kernel; only `freeze` waits."""

    def __init__(self, mountinfo: str | None = None) -> None:
        """Find the freezer in the text of /proc/self/mountinfo, by default this process's.

        On a host without one no container can be frozen.
        """
        table = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
        unified, legacy = controller_mounts(table)
        self._version = 1 if "freezer" in legacy else 2
        self._point = legacy.get("freezer", None if "memory" in legacy else unified)

    @property
    def available(self) -> bool:
        """Whether this host has a freezer."""
        return self._point is not None

    def state(self, container: str) -> Freeze:
        """Return the state of a container. A container without a group is thawed.

        Raises:
            OSError: the state cannot be read.
        """
        try:
            group = self._group(container)
            if self._version == 1:
                text = (group / "freezer.state").read_text().strip()
                return {"FROZEN": Freeze.FROZEN, "FREEZING": Freeze.PARTLY}.get(text, Freeze.THAWED)
            if (group / "cgroup.freeze").read_text().strip() != "1":
                return Freeze.THAWED
            return Freeze.FROZEN if "frozen 1" in (group / "cgroup.events").read_text() else Freeze.PARTLY
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):  # no group, or it is being removed
                raise
            return Freeze.THAWED

    async def freeze(self, container: str) -> None:
        """Freeze a container and wait until every process of it has stopped. After an error it is thawed.

        Raises:
            NoProcesses: it has no process.
            OSError: it cannot be frozen.
            TimeoutError: a process did not stop in time.
        """
        if not self.available:
            raise OSError(errno.ENOTSUP, "this host has no freezer")
        if not self._processes(container):
            raise NoProcesses
        deadline = time.monotonic() + FREEZE_SECONDS
        try:
            for number in range(1 << 30):
                if number % _REPEAT == 0:  # On v1 a process that is forked meanwhile can need another request.
                    self._write(container, frozen=True)
                if self.state(container) is Freeze.FROZEN:
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError("a process of the container did not stop")
                await asyncio.sleep(_TICK_SECONDS)  # no thread is held: many containers can be slow at once
        except BaseException:
            with contextlib.suppress(OSError):
                self.thaw(container)
            raise

    def thaw(self, container: str) -> None:
        """Let the processes of a container run. A container that is not frozen is no error.

        Raises:
            FileNotFoundError: it has no group.
            OSError: it cannot be thawed.
        """
        self._write(container, frozen=False)

    def end(self, container: str) -> None:
        """Kill the processes of a frozen container. Does nothing to another container, and does not wait."""
        if self.state(container) is Freeze.THAWED:
            return
        for pid in self._processes(container):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.thaw(container)

    def _write(self, container: str, *, frozen: bool) -> None:
        group = self._group(container)
        if self._version == 1:
            (group / "freezer.state").write_text("FROZEN" if frozen else "THAWED")
        else:
            (group / "cgroup.freeze").write_text("1" if frozen else "0")

    def _group(self, container: str) -> Path:
        if self._point is None:
            raise FileNotFoundError(errno.ENOENT, "no cgroup hierarchy can freeze processes")
        return container_group(self._point, container)

    def _processes(self, container: str) -> tuple[int, ...]:
        """Return the processes of a container, those in groups below its group too."""
        found: list[int] = []
        try:
            group = self._group(container)
            for procs in (group / "cgroup.procs", *group.rglob("*/cgroup.procs")):
                found += map(int, procs.read_text().split())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):  # no group, or it is being removed
                raise
        return tuple(found)
