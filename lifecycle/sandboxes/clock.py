"""A clock that counts elapsed seconds since 1970 and ignores steps of the system's clock.

The lifetime of a sandbox is elapsed time, suspended time included. After the system's clock was set, by hand or by a
step of NTP, `moved` returns the difference. The caller moves its stored times by the same difference and calls
`follow`. So a step of the clock neither ends a sandbox early nor extends its life. A slewed clock needs no correction.
"""

import time
from collections.abc import Callable

TOLERANCE = 1.0
"""Seconds. `moved` ignores a smaller difference until it has grown to this."""
_LONGEST_READING = 0.1


def _elapsed() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clock:
    """A clock that the whole process shares. Call it to get the seconds since 1970."""

    def __init__(self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = _elapsed) -> None:
        self._wall = wall
        self._elapsed = elapsed
        self._offset = wall() - elapsed()

    def __call__(self) -> float:
        return self._elapsed() + self._offset

    def moved(self) -> float:
        """Return the seconds by which the system's clock was set since the last `follow`; 0 if it was not set."""
        before = self()
        wall = self._wall()
        after = self()
        if after - before > _LONGEST_READING:
            return 0.0  # The process was suspended between the two readings; the next call measures again.
        moved = wall - after
        return moved if abs(moved) > TOLERANCE else 0.0

    def follow(self, moved: float) -> None:
        """Adopt the time to which the system's clock was set."""
        self._offset += moved
