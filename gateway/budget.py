"""The limits that policy sets for one sandbox: requests per minute, and bytes sent upstream. Pure.

- Requests are tokens of one bucket. It holds `requests_per_minute` tokens and refills evenly over each minute. A
  spliced flow takes one token. An inspected flow takes one for each allowed request.
- Bytes are counted as they are sent, TLS included. A chunk that would exceed `bytes_out` is not sent. After it nothing
  is sent until a policy allows more. The counts are in the sandbox's ledger, so a change of policy or the end of a
  worker does not reset them.
- Each call uses the limits in force. Without a policy no request and no byte is allowed.

The module aborts no flow. It calls `on_spent` once each time the bytes run out. DNS queries have their own budget
(`gateway.dns.names`).
"""

import math
from collections.abc import Callable
from typing import Protocol

from gateway.effects import Over
from gateway.ledger import Ledger
from policy.rules import Limits

RULE = Over.rule


class InForce(Protocol):
    """Access to the limits in force."""

    @property
    def limits(self) -> Limits | None:
        """Return the limits of the policy in force, None before the first policy."""
        ...


class Budget:
    """The budget of one sandbox.

    Args:
        ledger: the counts of requests and bytes used.
        state: gives the limits in force.
        clock: monotonic seconds.
        on_spent: called when the bytes run out; must not raise.
    """

    def __init__(
        self,
        ledger: Ledger,
        state: InForce,
        clock: Callable[[], float],
        on_spent: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._state = state
        self._clock = clock
        self._on_spent = on_spent

    def request(self) -> Over | None:
        """Take one request. Return None, or the limit that it exceeds."""
        limits = self._state.limits
        if limits is None:
            return Over("no policy is active yet", None)
        if self._spent(limits):
            return Over("the sandbox has sent as many bytes as its policy allows", None)
        rate = limits.requests_per_minute
        if rate is None:
            self._ledger.refill(None, 0.0)
            return None
        now = self._clock()
        held = self._ledger.tokens  # the bucket is full when the first limit comes into force
        full = float(rate)
        tokens = full if held is None else min(full, held + max(0.0, now - self._ledger.refilled) * rate / 60)
        over = tokens < 1
        self._ledger.refill(tokens if over else tokens - 1, now)
        if not over:
            return None
        return Over(f"more than {rate} requests in a minute", max(1, math.ceil((1 - tokens) * 60 / rate)))

    def send(self, count: int) -> bool:
        """Count `count` bytes as sent and return True, or return False if they exceed the limit."""
        limits = self._state.limits
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
