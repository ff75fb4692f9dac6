"""The output of child processes: standard output and error are read from a pipe and logged within bounds.

- No child has hostd's own standard error. With it a child could fill the journal, change the flags of a file
  description that it shares with hostd, or write escape sequences to a terminal.
- A child that writes more than its pace loses lines. The next logged line says how many of the lines that were read
  are missing. The child never waits, because its end of the pipe does not block. What the child does to that end
  affects only itself.
- A line is truncated at `LINE_CHARACTERS`; unprintable characters are escaped; each line begins with the child's
  name.
- The rate of reading is limited too: a flood costs one read of `_CHUNK` in `_PAUSE_SECONDS`.
- While there is no hostd, a process writes into a pipe without a reader; Python's logging ignores the error. The next
  hostd opens the same pipe again.
"""

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from runtimes.process.adopted import Adopted

LINE_CHARACTERS: Final = 1000
_CHUNK: Final = 16384
_PAUSE_SECONDS: Final = 0.05
_PIPE_READS: Final = 5
"""The number of reads that empty a pipe of the default size (64 KiB) after its writers have closed it."""

_log = logging.getLogger("hostd.output")


@dataclass(frozen=True, slots=True)
class OutputPace:
    """The number of lines of a child that are logged: `burst` at once, then `each_second`."""

    burst: int
    each_second: float


DAEMON: Final = OutputPace(1000, 20.0)
WORKER: Final = OutputPace(50, 0.5)


def pipe() -> tuple[int, int]:
    """Return the ends of a pipe, for reading and for writing; neither blocks, both are close-on-exec."""
    return os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)


class Output:
    """Logs one child's output; owns `fd`, the end for reading. Must be created inside a running loop."""

    def __init__(self, name: str, fd: int, pace: OutputPace, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._fd = fd
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._allowed, self._since = float(pace.burst), self._clock()
        self._left_out = 0
        self._partial = b""
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(fd, self._readable)

    @classmethod
    def of(cls, process: Adopted, name: str, pace: OutputPace) -> "Output | None":
        """Continue to log a process that a former hostd started; None if its standard error is no pipe."""
        fd = _reopened(process)
        return None if fd is None else cls(name, fd, pace)

    def close(self) -> None:
        """Log what is in the pipe and close it. Can be called again."""
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        if self._timer is not None:
            self._timer.cancel()
        for _ in range(_PIPE_READS):
            if not (data := _read(self._fd)):
                break
            self._take(data)
        os.close(self._fd)
        self._fd = -1
        if self._partial:
            self._line(self._partial)
        if self._left_out:
            _log.info("%s| (%d lines left out)", self._name, self._left_out)

    def _readable(self) -> None:
        self._loop.remove_reader(self._fd)
        data = _read(self._fd)
        if data == b"":
            self.close()
            return
        self._take(data or b"")
        self._timer = self._loop.call_later(_PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._fd, self._readable)

    def _take(self, data: bytes) -> None:
        *lines, rest = (self._partial + data).split(b"\n")
        for line in lines:
            self._line(line)
        self._partial = rest[: LINE_CHARACTERS + 1]  # the rest of a line that is too long is dropped

    def _line(self, line: bytes) -> None:
        now = self._clock()
        grown = self._allowed + (now - self._since) * self._pace.each_second
        self._allowed, self._since = min(float(self._pace.burst), grown), now
        if self._allowed < 1:
            self._left_out += 1
            return
        self._allowed -= 1
        before, self._left_out = self._left_out, 0
        _log.info("%s| %s%s", self._name, f"({before} lines left out) " if before else "", printable(line))


def printable(line: bytes) -> str:
    """Return the text of a line: one line, without control characters, truncated."""
    text = line[: LINE_CHARACTERS + 1].decode("utf-8", "backslashreplace")
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    return escaped if len(escaped) <= LINE_CHARACTERS else f"{escaped[:LINE_CHARACTERS]}..."


def _read(fd: int) -> bytes | None:
    """Return what can be read: nothing at the end, None if there is nothing now."""
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _reopened(process: Adopted) -> int | None:
    """Open the pipe that is a process's standard error, for reading; None if it is no pipe.

    The process can have put any file in its place. So the file is inspected without being opened, and only a pipe is
    opened.
    """
    ours = pipe()
    held = -1
    try:
        held = os.open(f"/proc/{process.pid}/fd/2", os.O_PATH | os.O_CLOEXEC)
        found, own = os.fstat(held), os.fstat(ours[0])
        if not stat.S_ISFIFO(found.st_mode) or found.st_dev != own.st_dev or process.returncode is not None:
            return None
        return os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    finally:
        for fd in (*ours, held):
            if fd >= 0:
                os.close(fd)
