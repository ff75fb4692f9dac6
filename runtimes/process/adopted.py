"""A process that a former hostd started and that still runs. It is awaited and signalled through a pidfd.

- It has the part of `asyncio.subprocess.Process` that supervision uses, so adopted processes are supervised like
  those that this hostd has started.
- A pidfd always refers to the same process. So a process that reuses the number is never awaited or signalled.
- It is not a child of this hostd, so its exit status is unknown.
"""

import asyncio
import os
import select
import signal
from typing import Protocol

UNKNOWN_STATUS = 255


class AdoptedProcess(Protocol):
    """The interface that supervision needs of a process, started or adopted."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        ...

    async def wait(self) -> int:
        """Wait until it has ended."""
        ...

    def send_signal(self, signal: int) -> None:
        """Send a signal to the process."""
        ...

    def kill(self) -> None:
        """Kill the process."""
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
        """The pidfd; this object keeps its ownership."""
        return self._pidfd

    @property
    def returncode(self) -> int | None:
        """None while it runs, else `UNKNOWN_STATUS`."""
        return UNKNOWN_STATUS if readable_within(self._pidfd, 0) else None

    async def wait(self) -> int:
        """Wait until it has ended."""
        await readable(self._pidfd)
        return UNKNOWN_STATUS

    def send_signal(self, signal: int) -> None:
        """Send a signal to the process.

        Raises:
            ProcessLookupError: it has ended.
        """
        _send(self._pidfd, signal)

    def kill(self) -> None:
        """Kill the process, if it has not ended."""
        try:
            _send(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return


def _send(pidfd: int, number: int) -> None:
    signal.pidfd_send_signal(pidfd, number)


def readable_within(fd: int, seconds: float) -> bool:
    """Return whether `fd` can be read within this time: a pidfd, whether its process has ended.

    `select` takes no descriptor above 1023, and hostd has several for each sandbox.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


async def readable(fd: int) -> None:
    """Wait until `fd` can be read: for a pidfd, until its process has ended. Several callers can wait for one `fd`."""
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
