"""Who may call the API: keys of operators, tokens of sandboxes, and what a browser may do without either.

- Keys are kept as SHA-256 digests only; comparison looks at all of them and takes the same time for each.
- Tokens of a sandbox are derived from one key by HMAC: nothing to store, the same after a restart, different per
  purpose. Knowing a sandbox's execd token says nothing of its egress token.
- What a caller presents becomes a `Claim`, and only `Caller.proves` says whether a claim is right: it counts each wrong
  one, and of a peer that has used up its attempts it compares none. No route can compare a credential without it.
- Attempts are counted for each peer and each target (the API keys, one sandbox's tokens): guesses at one target do not
  shut other clients at the same address out of the rest.

It does not decide which routes need which credential: see `edge`, `proxy` and `egress_api`.
"""

import base64
import contextlib
import hashlib
import hmac
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lifecycle.errors import ApiError

API_KEY_HEADER = "open-sandbox-api-key"
EXECD_HEADER = "x-execd-access-token"
EGRESS_HEADER = "opensandbox-egress-auth"
SECURE_HEADER = "opensandbox-secure-access"

_MAX_COUNTED = 8192
_API = "api"


def digest(key: str) -> str:
    """Return the form in which a key is stored."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class Claim:
    """A credential as presented, and what it is to open. `Caller.proves` alone asks whether it is right."""

    target: str
    presented: bool
    _is_right: Callable[[], bool] = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The API keys, as digests; empty means authentication is off."""

    digests: tuple[str, ...]

    @property
    def required(self) -> bool:
        """Tell whether callers must bring a key."""
        return bool(self.digests)

    def claim(self, key: str) -> Claim:
        """The claim that `key` is one of ours; without keys there is nothing to claim."""
        return Claim(_API, self.required and bool(key), lambda: self._accepts(key))

    def _accepts(self, key: str) -> bool:
        presented = digest(key).encode()
        found = False
        for known in self.digests:
            found |= hmac.compare_digest(presented, known.encode())
        return found and bool(key)

    def occurs_in(self, value: str) -> bool:
        """Tell whether a header value carries one of our keys: itself, after a scheme word, or as a cookie's value."""
        candidates = {value, *value.split()}
        candidates |= {part.partition("=")[2].strip().strip('"') for part in value.split(";")}
        if value[:6].lower() == "basic ":
            with contextlib.suppress(ValueError):  # no Basic credentials, then
                candidates |= set(base64.b64decode(value[6:], validate=True).decode().split(":"))
        return any(self._accepts(candidate) for candidate in candidates if candidate)


class Purpose(StrEnum):
    """What a token of a sandbox is for."""

    EXECD = "execd"
    EGRESS = "egress"
    SECURE = "secure"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Derives the tokens of sandboxes from `key` (at least 32 random bytes)."""

    key: bytes

    def __post_init__(self) -> None:
        if len(self.key) < 32:
            raise ValueError("the token key is too short")

    def __repr__(self) -> str:
        return "Tokens()"

    def execd(self, sandbox: str) -> str:
        """The token execd of this sandbox asks for."""
        return self._derive(Purpose.EXECD, sandbox)

    def egress(self, sandbox: str) -> str:
        """The token of this sandbox's egress API."""
        return self._derive(Purpose.EGRESS, sandbox)

    def secure(self, sandbox: str) -> str:
        """The token a caller needs for any port of a sandbox created with `secureAccess`."""
        return self._derive(Purpose.SECURE, sandbox)

    def claim(self, purpose: Purpose, sandbox: str, token: str) -> Claim:
        """The claim that `token` is this sandbox's for `purpose`."""
        return Claim(sandbox, bool(token), lambda: _same(token, self._derive(purpose, sandbox)))

    def _derive(self, purpose: Purpose, sandbox: str) -> str:
        mac = hmac.new(self.key, f"{purpose}{sandbox}".encode(), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(mac).decode().rstrip("=")


def _same(presented: str, expected: str) -> bool:
    """Compare two tokens in constant time, their length included."""
    return hmac.compare_digest(
        hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest(),
        hashlib.sha256(expected.encode()).digest(),
    )


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
    """What a server without keys asks of a request, so that no web page can drive it (R25).

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
