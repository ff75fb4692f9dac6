"""Deadlines that a busy machine does not bring forward.

    async with Patience(5.0):
        await something()          # TimeoutError after five seconds in which this loop ran

    countdown = Countdown(5.0, connection.abort)
    countdown.cancel()

- The time is counted in ticks: timers of the caller's own loop, one after the other. A loop that gets no processor, or
  that has a long queue of callbacks, is late for a tick, and a late tick counts as one. The loop polls its sockets
  between two ticks, so an answer that has arrived is read before the deadline is judged.
- A tick at which `evidence` returns something new starts the count again: a peer that works on other requests is not
  silent. `MOST` times the seconds is the end in any case.

On a machine at rest the deadline is the same as that of `asyncio.timeout`.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

TICKS: Final = 10
MOST: Final = 4


class Countdown:
    """Calls `ended` once the time is over, unless it is cancelled before.

    Args:
        seconds: the time without evidence of progress.
        evidence: asked at each tick; a value unlike the former one is progress.
    """

    __slots__ = ("_elapsed", "_ended", "_evidence", "_known", "_seconds", "_silent", "_timer")

    def __init__(
        self, seconds: float, ended: Callable[[], object], evidence: Callable[[], object] | None = None
    ) -> None:
        self._seconds = seconds
        self._ended = ended
        self._evidence = evidence
        self._known = evidence() if evidence is not None else None
        self._silent = 0
        self._elapsed = 0
        self._timer = self._wait()

    def cancel(self) -> None:
        """End the count; may be called again."""
        self._timer.cancel()

    def _wait(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._seconds / TICKS, self._tick)

    def _tick(self) -> None:
        self._elapsed += 1
        self._silent += 1
        if self._evidence is not None:
            known, self._known = self._known, self._evidence()
            if known != self._known:
                self._silent = 0
        if self._silent >= TICKS or self._elapsed >= MOST * TICKS:
            self._ended()
        else:
            self._timer = self._wait()


class Patience:
    """Bounds what runs inside it; use each one once. `seconds` None is no bound; see `Countdown`."""

    __slots__ = ("_countdown", "_evidence", "_scope", "_seconds")

    def __init__(self, seconds: float | None, evidence: Callable[[], object] | None = None) -> None:
        self._seconds = seconds
        self._evidence = evidence
        self._scope = asyncio.timeout(None)
        self._countdown: Countdown | None = None

    async def __aenter__(self) -> Self:
        """Begin to count."""
        await self._scope.__aenter__()
        if self._seconds is not None:
            self._countdown = Countdown(self._seconds, self._end, self._evidence)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the count.

        Raises:
            TimeoutError: the time was over.
        """
        if self._countdown is not None:
            self._countdown.cancel()
        await self._scope.__aexit__(kind, error, trace)

    def _end(self) -> None:
        self._scope.reschedule(asyncio.get_running_loop().time())
