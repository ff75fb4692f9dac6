"""Distinguishes a process that hangs from one that waits. `Liveness` is pure; `ended` and `within` do IO.

- The evidence is progress: a value that only the process itself changes (`Sample.progress`). A delay alone is no
  evidence of a hang, because a busy machine delays every process.
- A process without progress is charged for the processor time that it used. An endless loop uses this time up, on a
  busy machine as much as on an idle one.
- A process that could run but gets no processor is not charged. Nor is one that waits for the kernel (its state is
  D): the machine causes its delay, and a kill would not end it.
- A process that does not request the processor (stopped, or asleep although it has a request to answer) is charged
  for the time that passed. The charge is at most `longest` for one look, because an observer that was late itself
  must not count its delay.
- Progress clears all charges. Processes that have ended are outside the scope of this module.
- `within` waits for the answer to a request by the same charges. There no other activity of the process clears them,
  because a compromised process can do anything except answer.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # the watchdog has the standard library only
    import wire

CPU_SECONDS: Final = 10.0
"""Processor time without progress. The longest turn of a correct worker's loop that was measured used about two
seconds."""
IDLE_SECONDS: Final = 10.0
"""Time without progress in which the process did not request the processor."""
_CALM_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 1.0
_WAITS: Final = ("R", "D")
_STEP_SECONDS: Final = 0.1
_STAT_BYTES: Final = 4096
MOST: Final = 4
"""`within` waits at most this multiple of its seconds, also for a process that gets no processor."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process.

    Attributes:
        at: monotonic seconds.
        progress: differs from that of the last look if the process did something meanwhile.
        cpu: seconds of processor time that it has used since its start.
        waits: it has a processor, or waits for one or for the kernel.
    """

    at: float
    progress: Hashable
    cpu: float
    waits: bool


class Liveness:
    """Judges one process by its samples.

    Args:
        longest: the most seconds between two looks of an observer that is not late.
        idle: permitted seconds without progress in which the process did not request the processor.
        cpu: permitted seconds of processor time without progress.
    """

    def __init__(self, longest: float, idle: float = IDLE_SECONDS, cpu: float = CPU_SECONDS) -> None:
        self._longest = longest
        self._idle_most = idle
        self._busy_most = cpu
        self._last: Sample | None = None
        self._idle = 0.0
        self._busy = 0.0

    @property
    def suspected(self) -> bool:
        """Whether there was no progress at the last look."""
        return self._idle > 0 or self._busy > 0

    def look(self, sample: Sample) -> str | None:
        """Take a sample; return the reason if the process counts as hung, otherwise None."""
        last, self._last = self._last, sample
        if last is None or sample.progress != last.progress:
            self._idle = self._busy = 0.0
            return None
        self._busy += max(0.0, sample.cpu - last.cpu)
        if not sample.waits and not last.waits:
            self._idle += min(max(0.0, sample.at - last.at), self._longest)
        if self._busy >= self._busy_most:
            return f"it used {self._busy:.0f} s of processor time and made no progress"
        if self._idle >= self._idle_most:
            return f"it made no progress in {self._idle:.0f} s and did not wait for a processor"
        return None


def observe(pid: int, at: float, progress: Hashable, *, whole: bool = False) -> Sample:
    """Return a sample of a process: of its first thread, which has the event loop.

    Args:
        whole: return the processor time of all its threads.

    Raises:
        OSError, ValueError, IndexError: it cannot be read, because it has ended.
    """
    stat = stat_fields(f"/proc/{pid}/task/{pid}/stat")
    used = stat_fields(f"/proc/{pid}/stat") if whole else stat
    cpu = (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")
    return Sample(at, progress, cpu, stat[0] in _WAITS)


def stat_fields(path: str) -> list[str]:
    """Return the fields of a stat file of /proc from the third on, the state.

    hostd reads hundreds of them each second. `Path.read_text` takes several times as long.

    Raises:
        OSError: there is no such process.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(fd, _STAT_BYTES)
    finally:
        os.close(fd)
    return text.decode("ascii", "replace").rpartition(")")[2].split()


async def within[T](pid: int, seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, a request to process `pid`, which has this many seconds for it.

    The seconds count in which the process used the processor or did not request it.

    Raises:
        TimeoutError: the process has used them; `work` is cancelled.
    """
    task = asyncio.ensure_future(work)
    charged, last = 0.0, None
    try:
        for _ in range(round(MOST * seconds / _STEP_SECONDS)):
            sample = None
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended: `work` raises its error
                sample = observe(pid, 0.0, None, whole=True)
            if last is not None:
                waited = sample is not None and (sample.waits or last.waits)
                charged += max(0.0 if sample is None else sample.cpu - last.cpu, 0.0 if waited else _STEP_SECONDS)
            last = sample or last
            if charged >= seconds:
                break
            if (await asyncio.wait({task}, timeout=_STEP_SECONDS))[0]:
                break
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ended(
    pid: int,
    connection: "wire.Client",
    request: "wire.Request[Any]",
    evidence: Callable[[], Hashable] = lambda: None,
) -> str | None:
    """Wait until a child process or its `connection` has ended (None), or until the process hangs (the reason).

    It gets `request` again and again, and each answer is progress. Progress is also each change of what `evidence`
    (can raise OSError) reads of the process without its help: this is seen even if this loop reads the answer too
    late.
    """
    liveness, answers = Liveness(_LOOK_SECONDS), 0
    asked: asyncio.Task[Any] | None = None
    clock = asyncio.get_running_loop().time
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS if liveness.suspected else _CALM_SECONDS):
                    await connection.closed.wait()
                    return None
            if asked is not None and asked.done():
                asked.exception()  # a refusal is a sign of life too; the code above finds a closed connection
                answers += 1
                asked = None
            try:
                hangs = liveness.look(observe(pid, clock(), (answers, evidence())))
            except (OSError, ValueError, IndexError):
                return None
            if hangs is not None:
                return hangs
            if asked is None:
                asked = asyncio.ensure_future(connection.ask(request, timeout=None))
    finally:
        if asked is not None:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
