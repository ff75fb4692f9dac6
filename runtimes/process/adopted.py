"""A process that a former hostd started and that outlived it: waited for, and signalled, through a pidfd.

- It has the part of `asyncio.subprocess.Process` that supervision uses, so what is adopted is kept as what was started.
- A pidfd is of one process for ever: a number that was used again is never waited for or hit.
- It is not our child, so its exit status is not ours to know.
"""

import asyncio
import os
import select
import signal
from typing import Protocol

UNKNOWN_STATUS = 255


class AdoptedProcess(Protocol):
    """What supervision needs of a process, ours or adopted."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        ...

    async def wait(self) -> int:
        """Wait until it has ended."""
        ...

    def send_signal(self, signal: int) -> None:
        """Signal it."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


class Adopted:
    """One adopted process; owns `pidfd`."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    def __del__(self) -> None:
        os.close(self._pidfd)

    @property
    def pidfd(self) -> int:
        """Its pidfd, which stays this object's."""
        return self._pidfd

    @property
    def returncode(self) -> int | None:
        """None while it runs, else `UNKNOWN_STATUS`."""
        return UNKNOWN_STATUS if select.select([self._pidfd], [], [], 0)[0] else None

    async def wait(self) -> int:
        """Wait until it has ended."""
        await readable(self._pidfd)
        return UNKNOWN_STATUS

    def send_signal(self, signal: int) -> None:
        """Signal it.

        Raises:
            ProcessLookupError: it has ended.
        """
        _send(self._pidfd, signal)

    def kill(self) -> None:
        """End it; one that has ended is fine."""
        try:
            _send(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return


def _send(pidfd: int, number: int) -> None:
    signal.pidfd_send_signal(pidfd, number)


async def readable(fd: int) -> None:
    """Wait until `fd` can be read: for a pidfd, until its process has ended. Any number may wait on one."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    copy = os.dup(fd)
    try:
        loop.add_reader(copy, wake)
        await ready
    finally:
        loop.remove_reader(copy)
        os.close(copy)
