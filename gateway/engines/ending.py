"""How a flow of buffered connections ends: by its idle time, or when its queued bytes are sent."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from gateway.engines.buffered import BufferedConnection

_NOTHING: Callable[[], int] = int


class IdleTime(AbstractContextManager[None]):
    """The idle time of one flow. It is over when nothing has moved, and no peer has taken queued bytes, for that time.

    As a context manager it is the time in which the flow waits for something that has a limit of its own. That time
    does not count. It can be nested.

    Attributes:
        active_at: the loop's time at which bytes last moved. The flow sets it.
    """

    def __init__(self, seconds: float, unsent: Callable[[], int], end: Callable[[], object]) -> None:
        """Start the time.

        Args:
            unsent: returns the number of queued bytes of all connections.
            end: called once when the time is over.
        """
        self._seconds, self._unsent, self._end = seconds, unsent, end
        self._loop = asyncio.get_running_loop()
        self.active_at = self._loop.time()
        self._waits = 0
        self._queued = 0
        self._timer = self._loop.call_later(seconds, self._check)

    def __enter__(self) -> None:
        self._waits += 1

    def __exit__(self, *_error: object) -> None:
        self._waits -= 1
        self.active_at = self._loop.time()

    def cancel(self) -> None:
        """Stop the time, for good: it drops its references to the flow."""
        self._timer.cancel()
        self._unsent, self._end = _NOTHING, _NOTHING

    def _check(self) -> None:
        left = self.active_at + self._seconds - self._loop.time()
        unsent = self._unsent()
        if self._waits or unsent != self._queued:
            left = self._seconds
        self._queued = unsent
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self._end()


async def close_all(connections: Sequence[BufferedConnection], seconds: float) -> None:
    """Close each connection when its queued bytes are sent, or when no peer has taken any bytes for `seconds`."""
    for connection in connections:
        connection.close()
    ends = {asyncio.ensure_future(connection.closed()) for connection in connections if connection.unsent}
    left, unsent = ends, -1
    try:
        while left and unsent != sum(connection.unsent for connection in connections):
            unsent = sum(connection.unsent for connection in connections)
            _, left = await asyncio.wait(left, timeout=seconds)
    finally:
        if left:
            for connection in connections:
                connection.discard()
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
