"""Deadlines that do not expire early on a busy machine.

    async with Patience(5.0):
        await something()          # TimeoutError after five seconds in which this loop ran

    countdown = Countdown(5.0, connection.abort)
    countdown.cancel()

- The time is counted in ticks: consecutive timers of the caller's event loop. If the loop gets no processor time, or
  has a long queue of callbacks, a tick is late, and still counts as one. The loop polls its sockets between two ticks.
  So an answer that has arrived is read before the deadline.
- If `evidence` returns a new value at a tick, the count starts again: a peer that works on other requests is not
  silent. After `MOST` times the seconds the deadline expires in any case.

On an idle machine the deadline equals that of `asyncio.timeout`.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

TICKS: Final = 10
MOST: Final = 4


class Countdown:
    """Calls `ended` after the time, unless it is cancelled before.

    Args:
        seconds: the time without evidence of progress.
        evidence: called at each tick; a changed value means progress.
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
        """Stop the count. Repeated calls are permitted."""
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
    """Limits the time of the code inside it. Use each object once. `seconds` None means no limit; see `Countdown`."""

    __slots__ = ("_countdown", "_evidence", "_scope", "_seconds")

    def __init__(self, seconds: float | None, evidence: Callable[[], object] | None = None) -> None:
        self._seconds = seconds
        self._evidence = evidence
        self._scope = asyncio.timeout(None)
        self._countdown: Countdown | None = None

    async def __aenter__(self) -> Self:
        """Start the count."""
        await self._scope.__aenter__()
        if self._seconds is not None:
            self._countdown = Countdown(self._seconds, self._end, self._evidence)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the count.

        Raises:
            TimeoutError: the deadline has expired.
        """
        if self._countdown is not None:
            self._countdown.cancel()
            self._countdown = None  # it refers to this object
        await self._scope.__aexit__(kind, error, trace)

    def _end(self) -> None:
        self._scope.reschedule(asyncio.get_running_loop().time())
