"""The verdict on the effect of one sandbox's flood on the requests of another. Pure; test_fences.py has the floods."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RATIO, WIDE = 2, 5
"""The limits of the ratio of percentiles during a flood and around it: on a calm machine, and on a busy one."""
CALM = 0.5
"""The share of the machine's time that must be idle around a turn, so that the turn counts as calm."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The neighbour's requests in one turn and around it: percentiles in milliseconds, and the idle share around it."""

    rest: float
    during: float
    idle: float

    @property
    def ratio(self) -> float:
        return round(self.during / self.rest, 2)

    @property
    def share(self) -> float:
        """Return the ratio, as a share of the limit for the machine's load around this turn."""
        return self.ratio / (RATIO if self.idle >= CALM else WIDE)


def within_bounds(turns: Sequence[Turn]) -> bool:
    """Return whether the median of the turns is within its limit."""
    return statistics.median(turn.share for turn in turns) <= 1
