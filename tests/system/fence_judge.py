"""Judges what a flood of one sandbox does to the requests of another. Pure; the floods are test_fences.py's."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RATIO, WIDE = 2, 5
"""Bounds of the ratio of percentiles during a flood and around it: on a calm machine, and on a busy one."""
CALM = 0.5
"""The share of the machine's time that has to be idle around a turn for it to count as calm."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The neighbour's requests in one turn and around it: percentiles in milliseconds; what was to spare there."""

    rest: float
    during: float
    idle: float

    @property
    def ratio(self) -> float:
        return round(self.during / self.rest, 2)

    @property
    def share(self) -> float:
        """The ratio, as a share of the bound for the machine as it was around this turn."""
        return self.ratio / (RATIO if self.idle >= CALM else WIDE)


def within_bounds(turns: Sequence[Turn]) -> bool:
    """Whether the turns are within their bounds in the median."""
    return statistics.median(turn.share for turn in turns) <= 1
