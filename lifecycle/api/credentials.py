"""The credentials of the API: the headers that carry them, the keys of operators and the tokens of sandboxes. Pure.

- Keys are kept as SHA-256 digests only; comparison looks at all of them and takes the same time for each.
- Tokens of a sandbox are derived from one key by HMAC: nothing to store, the same after a restart, different per
  purpose. Knowing a sandbox's execd token says nothing of its egress token.
- What a caller presents becomes a `Claim`; only `lifecycle.api.auth.Caller.proves` says whether a claim is right.
"""

import base64
import contextlib
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

API_KEY_HEADER = "open-sandbox-api-key"
EXECD_HEADER = "x-execd-access-token"
EGRESS_HEADER = "opensandbox-egress-auth"
SECURE_HEADER = "opensandbox-secure-access"

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
