"""The callers of the API: their attempts to authenticate, and the limits of a browser without a credential.

- A credential in a request becomes a `Claim`, and only `Caller.proves` checks claims. It counts each wrong claim, and
  compares none for a peer without attempts left. So no route can compare a credential without this limit.
- Attempts are counted for each peer and each target (the API keys, one sandbox's tokens). So guesses at one target do
  not lock other clients at the same address out of the other targets.

`edge`, `proxy` and `egress_api` decide which routes need which credential.
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
    """The counters of refused credentials per peer and target: one token bucket for each, bounded in number."""

    def __init__(self, burst: int = 20, per_second: float = 0.5, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._rate = per_second
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def seconds(self, peer: str, target: str) -> int:
        """Return the seconds that this peer must wait before its next attempt at this target; 0 for no wait."""
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
        """Return the caller at an address.

        All addresses of an IPv6 /64 are one caller, because one machine can have them all.
        """
        try:
            ip = ipaddress.ip_address(address or "")
        except ValueError:
            return cls("unknown", refusals)
        if isinstance(ip, ipaddress.IPv6Address):
            mapped = ip.ipv4_mapped
            return cls(str(mapped) if mapped is not None else f"{int(ip) >> 64:x}::/64", refusals)
        return cls(str(ip), refusals)

    def proves(self, *claims: Claim) -> bool:
        """Return whether one of the claims is right. If none is, each compared claim counts as an attempt.

        A claim at a target for which the peer has no attempts left is not compared, so that a right and a wrong claim
        get the same answer.

        Raises:
            ApiError: 429. No claim was accepted, and the peer must wait for one of the targets.
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
    """Return the host of a `host[:port]`, in lower case and without brackets; empty if it is malformed."""
    authority = authority.strip().lower()
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    host, _, port = authority.partition(":")
    return host if not port or port.isdecimal() else ""


@dataclass(frozen=True, slots=True)
class BrowserGuard:
    """The checks of a request at a server without keys, so that no web page can control the server.

    A name that an attacker's DNS resolves to this server (rebinding) is not in `hosts`. A page of another origin has an
    Origin that differs from the Host it calls.
    """

    hosts: frozenset[str]

    @classmethod
    def of(cls, hosts: Iterable[str]) -> "BrowserGuard":
        """Build from the configured names."""
        return cls(frozenset(split_authority(host) for host in hosts) - {""})

    def host_allowed(self, authority: str) -> bool:
        """Return whether the Host is an address, localhost, or a configured name."""
        host = split_authority(authority)
        if host in self.hosts or host == "localhost":
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    def origin_allowed(self, origins: Sequence[str], authority: str, scheme: str) -> bool:
        """Return whether a request with these Origin headers is allowed: none, or exactly this server."""
        return all(origin.lower() == f"{scheme}://{authority.lower()}" for origin in origins)
