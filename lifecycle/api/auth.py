"""The callers of the API: their attempts to prove a credential, and what a browser may do without one.

- What a caller presents becomes a `Claim`, and only `Caller.proves` says whether a claim is right: it counts each wrong
  one, and of a peer that has used up its attempts it compares none. No route can compare a credential without it.
- Attempts are counted for each peer and each target (the API keys, one sandbox's tokens): guesses at one target do not
  shut other clients at the same address out of the rest.

It does not decide which routes need which credential: see `edge`, `proxy` and `egress_api`.
"""

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lifecycle.api.credentials import Claim
from lifecycle.api.errors import ApiError

_MAX_COUNTED = 8192


class Refusals:
    """Counts refused credentials per peer and target; a token bucket for each, bounded in number."""

    def __init__(self, burst: int = 20, per_second: float = 0.5, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._rate = per_second
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def seconds(self, peer: str, target: str) -> int:
        """How long this peer has to wait before its next attempt at this target; 0 is not at all."""
        missing = 1 - self._level((peer, target))
        return math.ceil(missing / self._rate) if missing > 0 else 0

    def count(self, peer: str, target: str) -> None:
        """Take one attempt from the peer."""
        bucket = (peer, target)
        self._buckets[bucket] = (max(0.0, self._level(bucket) - 1), self._clock())
        self._buckets.move_to_end(bucket)
        while len(self._buckets) > _MAX_COUNTED:
            self._buckets.popitem(last=False)

    def _level(self, bucket: tuple[str, str]) -> float:
        level, when = self._buckets.get(bucket, (float(self._burst), self._clock()))
        return min(float(self._burst), level + (self._clock() - when) * self._rate)


@dataclass(frozen=True, slots=True)
class Caller:
    """The peer of one request, which presents credentials."""

    peer: str
    refusals: Refusals = field(repr=False)

    @classmethod
    def at(cls, address: str | None, refusals: Refusals) -> "Caller":
        """Return the caller at an address; all of an IPv6 /64, which one machine may have, are one caller."""
        try:
            ip = ipaddress.ip_address(address or "")
        except ValueError:
            return cls("unknown", refusals)
        if isinstance(ip, ipaddress.IPv6Address):
            mapped = ip.ipv4_mapped
            return cls(str(mapped) if mapped is not None else f"{int(ip) >> 64:x}::/64", refusals)
        return cls(str(ip), refusals)

    def proves(self, *claims: Claim) -> bool:
        """Tell whether one of the claims is right. If none is, each of them was an attempt and is counted.

        A claim at a target for which the peer has no attempts left is not compared: the answer to a right one and to a
        wrong one are the same.

        Raises:
            ApiError: 429, nothing is proven and an attempt at one of the targets has to wait.
        """
        presented = [claim for claim in claims if claim.presented]
        waits = {claim.target: self.refusals.seconds(self.peer, claim.target) for claim in presented}
        compared = [claim for claim in presented if not waits[claim.target]]
        if any([claim._is_right() for claim in compared]):  # noqa: C419 - all are compared
            return True
        for claim in compared:
            self.refusals.count(self.peer, claim.target)
        if wait := max(waits.values(), default=0):
            raise ApiError(
                429, "SANDBOX::TOO_MANY_REQUESTS", "Too many refused credentials.", {"Retry-After": str(wait)}
            )
        return False


def split_authority(authority: str) -> str:
    """Return the host of a `host[:port]`, lower case and without brackets; empty if it is malformed."""
    authority = authority.strip().lower()
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    host, _, port = authority.partition(":")
    return host if not port or port.isdecimal() else ""


@dataclass(frozen=True, slots=True)
class BrowserGuard:
    """What a server without keys asks of a request, so that no web page can drive it.

    A name that an attacker's DNS points at us (rebinding) is not in `hosts`, and a page from elsewhere has an Origin
    that is not the Host it calls.
    """

    hosts: frozenset[str]

    @classmethod
    def of(cls, hosts: Iterable[str]) -> "BrowserGuard":
        """Build from the configured names."""
        return cls(frozenset(split_authority(host) for host in hosts) - {""})

    def host_allowed(self, authority: str) -> bool:
        """Tell whether the Host is an address, localhost, or a configured name."""
        host = split_authority(authority)
        if host in self.hosts or host == "localhost":
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    def origin_allowed(self, origins: Sequence[str], authority: str, scheme: str) -> bool:
        """Tell whether a request with these Origin headers may act: none, or exactly this server."""
        return all(origin.lower() == f"{scheme}://{authority.lower()}" for origin in origins)
