"""Who may call the API: keys of operators, tokens of sandboxes, and what a browser may do without either.

- Keys are kept as SHA-256 digests only; comparison looks at all of them and takes the same time for each.
- Tokens of a sandbox are derived from one key by HMAC: nothing to store, the same after a restart, different per
  purpose. Knowing a sandbox's execd token says nothing of its egress token.
- Wrong keys are counted per peer; after a burst the peer waits.

It does not decide which routes need which credential: see `edge` and `egress_api`.
"""

import base64
import contextlib
import hashlib
import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

API_KEY_HEADER = "open-sandbox-api-key"
EXECD_HEADER = "x-execd-access-token"
EGRESS_HEADER = "opensandbox-egress-auth"
SECURE_HEADER = "opensandbox-secure-access"

_MAX_PEERS = 4096


def digest(key: str) -> str:
    """Return the form in which a key is stored."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The API keys, as digests; empty means authentication is off."""

    digests: tuple[str, ...]

    @property
    def required(self) -> bool:
        """Tell whether callers must bring a key."""
        return bool(self.digests)

    def accepts(self, key: str) -> bool:
        """Tell whether `key` is one of ours."""
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
        return any(self.accepts(candidate) for candidate in candidates if candidate)


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
        return self._derive("execd", sandbox)

    def egress(self, sandbox: str) -> str:
        """The token of this sandbox's egress API."""
        return self._derive("egress", sandbox)

    def secure(self, sandbox: str) -> str:
        """The token a caller needs for any port of a sandbox created with `secureAccess`."""
        return self._derive("secure", sandbox)

    def _derive(self, purpose: str, sandbox: str) -> str:
        mac = hmac.new(self.key, f"{purpose}{sandbox}".encode(), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(mac).decode().rstrip("=")


def same(presented: str, expected: str) -> bool:
    """Compare two tokens in constant time, their length included."""
    return hmac.compare_digest(
        hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest(),
        hashlib.sha256(expected.encode()).digest(),
    )


class Failures:
    """Counts refused keys per peer address; a token bucket for each, bounded in number."""

    def __init__(self, burst: int = 20, per_second: float = 0.5, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._rate = per_second
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def blocked(self, peer: str) -> bool:
        """Tell whether this peer has used up its attempts."""
        return self._level(peer) < 1

    def count(self, peer: str) -> None:
        """Take one attempt from the peer."""
        self._buckets[peer] = (self._level(peer) - 1, self._clock())
        self._buckets.move_to_end(peer)
        while len(self._buckets) > _MAX_PEERS:
            self._buckets.popitem(last=False)

    def _level(self, peer: str) -> float:
        level, when = self._buckets.get(peer, (float(self._burst), self._clock()))
        return min(float(self._burst), level + (self._clock() - when) * self._rate)


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
