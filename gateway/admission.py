"""How many requests a worker takes on, so that those it has taken on end well.

- A request is under way from its decision to the moment in which it may be forwarded: that time is the worker's own
  and that of log and vault. How long a server takes does not count, nor how long a stream lasts.
- While the oldest request under way has waited for `PATIENCE`, or `MOST` are under way, a new one is not taken on: it
  is answered with 503 and a time to wait. Those under way are left alone.

It measures waiting with the clock on the wall: how long a client waits is what overload means.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

MOST: Final = 1024
PATIENCE: Final = 10.0
_LONGEST: Final = 60


class Admission:
    """The requests of one worker that are under way. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: dict[int, float] = {}
        self._next = 0

    def retry_after(self) -> int | None:
        """None when another request can be taken on, else in how many seconds it is worth asking again."""
        if not self._began:
            return None
        waited = self._clock() - next(iter(self._began.values()))
        if waited < PATIENCE and len(self._began) < MOST:
            return None
        return max(1, min(_LONGEST, math.ceil(waited)))

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """A request that was taken on, as long as this lasts."""
        self._next += 1
        number = self._next
        self._began[number] = self._clock()
        try:
            yield
        finally:
            del self._began[number]
