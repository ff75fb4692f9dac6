"""What policy lets one sandbox use in all: requests a minute, and bytes sent to the outside. Pure.

- Requests are tokens of one bucket: `requests_per_minute` at once, refilled evenly over each minute. A spliced flow is
  one request, an inspected flow one for each that policy allows.
- Bytes are counted as they go up on the wire, TLS included. The chunk that would go beyond `bytes_out` is not sent, and
  from then on nothing is, until a policy allows more. What was sent is never forgotten, neither by a change of policy
  nor by the end of a worker: the counts are in the sandbox's ledger.
- The limits are those in force at each call. No policy is no request and no byte.

It knows no flow and cuts none: `on_spent` is called once each time the bytes have run out. DNS queries are not counted,
they have budgets of their own.
"""

import math
from collections.abc import Callable

from gateway.effects import Over
from gateway.ledger import Ledger
from policy.rules import Limits

RULE = Over.rule


class Budget:
    """What one sandbox may use.

    Args:
        ledger: what it has used.
        limits: those of the policy in force, None before there is one.
        clock: monotonic seconds.
        on_spent: must not raise.
    """

    def __init__(
        self,
        ledger: Ledger,
        limits: Callable[[], Limits | None],
        clock: Callable[[], float],
        on_spent: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._limits = limits
        self._clock = clock
        self._on_spent = on_spent

    def request(self) -> Over | None:
        """Take one request, or say why there is none."""
        limits = self._limits()
        if limits is None:
            return Over("no policy is active yet", None)
        if self._spent(limits):
            return Over("the sandbox has sent as many bytes as its policy allows", None)
        rate = limits.requests_per_minute
        if rate is None:
            self._ledger.refill(None, 0.0)
            return None
        now = self._clock()
        held = self._ledger.tokens  # the first limit begins with a full bucket
        full = float(rate)
        tokens = full if held is None else min(full, held + max(0.0, now - self._ledger.refilled) * rate / 60)
        over = tokens < 1
        self._ledger.refill(tokens if over else tokens - 1, now)
        if not over:
            return None
        return Over(f"more than {rate} requests in a minute", max(1, math.ceil((1 - tokens) * 60 / rate)))

    def send(self, count: int) -> bool:
        """Whether `count` bytes more may be sent; if so they are counted as sent."""
        limits = self._limits()
        if limits is None:
            return False
        most = limits.bytes_out
        ledger = self._ledger
        if most is not None and (most <= ledger.exhausted_at or ledger.sent + count > most):
            if most > ledger.exhausted_at:
                ledger.exhausted_at = most
                self._on_spent()
            return False
        ledger.exhausted_at = -1
        ledger.sent += count
        return True

    def _spent(self, limits: Limits) -> bool:
        most = limits.bytes_out
        return most is not None and (most <= self._ledger.exhausted_at or self._ledger.sent > most)
