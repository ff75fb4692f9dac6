"""Limits how many requests a worker prepares at once, so that admitted requests succeed under overload.

- A request is under way from its decision until it may be forwarded. This is the time of the worker, the log and the
  vault. The server's time and the length of a stream do not count.
- A new request is refused (503 with `Retry-After`) while `MOST` requests are under way, or while the oldest of them
  has waited for `PATIENCE` seconds. Requests under way continue.

Waiting is measured in elapsed time, not processor time: the client's wait is the sign of overload.
"""

import math
from collections.abc import Callable
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
        """Return None if another request can be admitted, otherwise the seconds after which to try again."""
        if not self._began:
            return None
        waited = self._clock() - next(iter(self._began.values()))
        if waited < PATIENCE and len(self._began) < MOST:
            return None
        return max(1, min(_LONGEST, math.ceil(waited)))

    def begin(self) -> int:
        """Count one admitted request as under way, until `end` is called with the number that is returned."""
        self._next += 1
        self._began[self._next] = self._clock()
        return self._next

    def end(self, number: int) -> None:
        """Count a request as under way no longer."""
        del self._began[number]
