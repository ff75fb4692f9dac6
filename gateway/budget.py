"""What policy lets one sandbox use in all: requests a minute, and bytes sent to the outside. Pure.

- Requests are tokens of one bucket: `requests_per_minute` at once, refilled evenly over each minute. A spliced flow is
  one request, an inspected flow one for each that policy allows.
- Bytes are counted as they go up on the wire, TLS included. The chunk that would go beyond `bytes_out` is not sent, and
  from then on nothing is, until a policy allows more. What was sent is never forgotten by a change of policy.
- The limits are those in force at each call. No policy is no request and no byte.

It knows no flow and cuts none: `on_spent` is called once each time the bytes have run out. DNS queries are not counted,
they have budgets of their own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from policy.rules import Limits

RULE = "limits"


@dataclass(frozen=True, slots=True)
class Over:
    """A request that is one too many. `retry_after` is in whole seconds, None where waiting does not help."""

    reason: str
    retry_after: int | None


class Budget:
    """The account of one sandbox and generation.

    Args:
        limits: those of the policy in force, None before there is one.
        clock: monotonic seconds.
        on_spent: must not raise.
    """

    def __init__(
        self, limits: Callable[[], Limits | None], clock: Callable[[], float], on_spent: Callable[[], None]
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._on_spent = on_spent
        self._tokens = math.inf  # the first limit begins with a full bucket
        self._refilled = 0.0
        self._sent = 0
        self._spent_at = -1  # the `bytes_out` that was found too small, until something was sent again

    def request(self) -> Over | None:
        """Take one request, or say why there is none."""
        limits = self._limits()
        if limits is None:
            return Over("no policy is active yet", None)
        if self._spent(limits):
            return Over("the sandbox has sent as many bytes as its policy allows", None)
        rate = limits.requests_per_minute
        if rate is None:
            self._tokens = math.inf
            return None
        now = self._clock()
        self._tokens = min(float(rate), self._tokens + (now - self._refilled) * rate / 60)
        self._refilled = now
        if self._tokens < 1:
            wait = math.ceil((1 - self._tokens) * 60 / rate)
            return Over(f"more than {rate} requests in a minute", max(1, wait))
        self._tokens -= 1
        return None

    def send(self, count: int) -> bool:
        """Whether `count` bytes more may be sent; if so they are counted as sent."""
        limits = self._limits()
        if limits is None:
            return False
        most = limits.bytes_out
        if most is not None and (most <= self._spent_at or self._sent + count > most):
            if most > self._spent_at:
                self._spent_at = most
                self._on_spent()
            return False
        self._spent_at = -1
        self._sent += count
        return True

    def _spent(self, limits: Limits) -> bool:
        return limits.bytes_out is not None and (limits.bytes_out <= self._spent_at or self._sent > limits.bytes_out)
