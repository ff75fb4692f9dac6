"""Seconds since 1970 that go on evenly when the system's clock is set.

How long a sandbox lives is time that passes, suspended time included. Where the system's clock is set, by hand or by a
step of NTP, `moved` returns by how much. The caller moves its stored moments by as much and calls `follow`. So a clock
that jumps ends no sandbox early and lets none live on. A clock that is slewed is followed as it goes.
"""

import time
from collections.abc import Callable

TOLERANCE = 1.0
"""Seconds; a smaller step is left alone until it has grown."""
_LONGEST_READING = 0.1


def _elapsed() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clock:
    """The time of the process that holds it; call it for the seconds since 1970."""

    def __init__(self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = _elapsed) -> None:
        self._wall = wall
        self._elapsed = elapsed
        self._offset = wall() - elapsed()

    def __call__(self) -> float:
        return self._elapsed() + self._offset

    def moved(self) -> float:
        """Return by how many seconds the system's clock was set since it was last followed; 0 if it was not."""
        before = self()
        wall = self._wall()
        after = self()
        if after - before > _LONGEST_READING:
            return 0.0  # held up between the two: the next reading tells
        moved = wall - after
        return moved if abs(moved) > TOLERANCE else 0.0

    def follow(self, moved: float) -> None:
        """Go over to the time that the system's clock was set to."""
        self._offset += moved
