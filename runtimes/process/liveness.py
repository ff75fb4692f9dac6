"""Tells a process that hangs from one that waits for its turn. `Liveness` is pure; `ended` and `within` ask and look.

- Evidence of life is progress: something that only the process itself changes (`Sample.progress`). How late it is says
  nothing: a busy machine makes any process late.
- Without progress, a process that uses the processor is charged for the processor time it used: an endless loop uses
  it up, on a busy machine as much as on an idle one.
- A process that could run and is not given a processor is charged nothing, nor one that waits for the kernel (its
  state is D): it hangs no more than the machine does, and a kill would not end it.
- A process that does not even want the processor (stopped, or asleep although it has a request to answer) is charged
  for the time that passed, at most `longest` for one look: an observer that was late itself must not count that.
- Progress clears all charges. A process that has ended is no matter of this module.
- What a process was asked for is waited for by the same charges (`within`), and nothing that it does meanwhile clears
  them: a process that is taken over can do anything but that.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # the watchdog has the standard library only
    import wire

CPU_SECONDS: Final = 10.0
"""Processor time without progress. The longest honest turn of a worker's loop was seen at some two seconds of it."""
IDLE_SECONDS: Final = 10.0
"""Time without progress and without a wish to run."""
_CALM_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 1.0
_WAITS: Final = ("R", "D")
_STEP_SECONDS: Final = 0.1
MOST: Final = 4
"""How many times the seconds `within` waits for a process that is given no processor."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process.

    Attributes:
        at: monotonic seconds.
        progress: differs from that of the last look if the process did something meanwhile.
        cpu: seconds of processor time it used since it began.
        waits: it has a processor, or waits for one or for the kernel.
    """

    at: float
    progress: Hashable
    cpu: float
    waits: bool


class Liveness:
    """Judges one process by the samples of it.

    Args:
        longest: the most seconds that lie between two looks of an observer in time.
        idle: seconds without progress and without a wish to run.
        cpu: seconds of processor time without progress.
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
        """Take a sample; return why the process counts as hung, None while it does not."""
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
    """Look at a process: its first thread, which has the event loop; `whole`: at the time that all its threads used.

    Raises:
        OSError, ValueError, IndexError: it cannot be looked at; it has ended.
    """
    stat = _stat(f"/proc/{pid}/task/{pid}/stat")
    used = _stat(f"/proc/{pid}/stat") if whole else stat
    cpu = (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")
    return Sample(at, progress, cpu, stat[0] in _WAITS)


def _stat(path: str) -> list[str]:
    return Path(path).read_text().rpartition(")")[2].split()


async def within[T](pid: int, seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, for which process `pid` was asked and gets so many seconds.

    A second is one of its processor time, or one in which it did not want the processor.

    Raises:
        TimeoutError: it had them; `work` is cancelled.
    """
    task = asyncio.ensure_future(work)
    charged, last = 0.0, None
    try:
        for _ in range(round(MOST * seconds / _STEP_SECONDS)):
            sample = None
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended: `work` will say so
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
    """Wait until a process of ours has ended, or its `connection` has: None; or until it hangs: why.

    It is asked `request`, and an answer is progress. So is whatever else `evidence` (may raise OSError) reads of it
    without its help: that is seen even when this loop is too late to read the answer.
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
                asked.exception()  # a refusal is a sign of life, too, and a closed connection is seen above
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
