"""Limits how many bytes each sandbox writes into the log: a token bucket for each chain. Pure.

- A chain may write while its bucket is not empty. Its bytes are taken afterwards. If the bucket is then negative, the
  chain waits.
- The control chain has no limit: only root and `serve` write to it.
"""

from collections.abc import Callable
from typing import Final

from audit.chain import CONTROL

BURST_SECONDS: Final = 8


class Pace:
    """The buckets of all chains.

    Args:
        rate: bytes per second for each chain, with bursts of `BURST_SECONDS`; 0 for no limit.
        clock: monotonic seconds.
    """

    def __init__(self, rate: int, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait(self, chain: str) -> float:
        """Return the seconds until `chain` may write again, 0 if it may now."""
        if not self._rate or chain not in self._buckets:
            return 0.0
        return max(0.0, -self._held(chain) / self._rate)

    def charge(self, chain: str, size: int) -> None:
        """Take `size` bytes that `chain` has written."""
        if self._rate and chain != CONTROL:
            self._buckets[chain] = (self._held(chain) - size, self._clock())

    def forget(self, chain: str) -> None:
        """Drop the bucket of `chain`, which has ended."""
        self._buckets.pop(chain, None)

    def _held(self, chain: str) -> float:
        most = float(self._rate * BURST_SECONDS)
        held, at = self._buckets.get(chain, (most, self._clock()))
        return min(most, held + (self._clock() - at) * self._rate)
