"""The credentials of the API: their headers, the operators' keys and the sandboxes' tokens. Pure.

- Keys are stored as SHA-256 digests only. A comparison checks all of them in constant time.
- The tokens of a sandbox are derived from one key by HMAC. So they need no storage, are the same after a restart, and
  differ per purpose. A sandbox's execd token does not reveal its egress token.
- The signature of a signed route is an HMAC over sandbox, port and expiry, with the id of its key. Other keys can
  verify while one signs, so keys rotate.
- A credential in a request becomes a `Claim`. Only `lifecycle.api.auth.Caller.proves` checks it.
"""

import base64
import contextlib
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

API_KEY_HEADER = "open-sandbox-api-key"
EXECD_HEADER = "x-execd-access-token"
EGRESS_HEADER = "opensandbox-egress-auth"
SECURE_HEADER = "opensandbox-secure-access"

KEY_ID = re.compile(r"[0-9a-z]", re.ASCII)
"""The id of a key of signed routes."""
LEAST_ROUTE_KEY = 16
"""Bytes of a key of signed routes."""

_API = "api"
_NO_KEY = b"\0" * 32


def digest(key: str) -> str:
    """Return the stored form of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True)
class Claim:
    """A presented credential, and its target. Only `Caller.proves` checks it."""

    target: str
    presented: bool
    _is_right: Callable[[], bool] = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The digests of the API keys. Without any, authentication is off."""

    digests: tuple[str, ...]

    @property
    def required(self) -> bool:
        """Return whether callers must present a key."""
        return bool(self.digests)

    def claim(self, key: str) -> Claim:
        """Return the claim that `key` is one of the API keys. Without API keys it counts as not presented."""
        return Claim(_API, self.required and bool(key), lambda: self._accepts(key))

    def _accepts(self, key: str) -> bool:
        presented = digest(key).encode()
        found = False
        for known in self.digests:
            found |= hmac.compare_digest(presented, known.encode())
        return found and bool(key)

    def label(self, key: str) -> str:
        """Return the label of an accepted key, by which its sandboxes are counted; empty without API keys."""
        if not self.required:
            return ""
        return hashlib.sha256(f"sallyport key label {digest(key)}".encode()).hexdigest()[:16]

    def occurs_in(self, value: str) -> bool:
        """Return whether a header value contains one of the keys.

        The key can be the whole value, follow a scheme word, be a cookie's value, or be a part of Basic credentials.
        """
        candidates = {value, *value.split()}
        candidates |= {part.partition("=")[2].strip().strip('"') for part in value.split(";")}
        if value[:6].lower() == "basic ":
            with contextlib.suppress(ValueError):  # The value is no Basic credentials.
                candidates |= set(base64.b64decode(value[6:], validate=True).decode().split(":"))
        return any(self._accepts(candidate) for candidate in candidates if candidate)


class Purpose(StrEnum):
    """The purpose of a sandbox's token."""

    EXECD = "execd"
    EGRESS = "egress"
    SECURE = "secure"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The derivation of sandbox tokens from `key` (at least 32 random bytes)."""

    key: bytes

    def __post_init__(self) -> None:
        if len(self.key) < 32:
            raise ValueError("the token key is too short")

    def __repr__(self) -> str:
        return "Tokens()"

    def execd(self, sandbox: str) -> str:
        """Return the token that execd of this sandbox requires."""
        return self._derive(Purpose.EXECD, sandbox)

    def egress(self, sandbox: str) -> str:
        """Return the token of this sandbox's egress API."""
        return self._derive(Purpose.EGRESS, sandbox)

    def secure(self, sandbox: str) -> str:
        """Return the token for all ports of a sandbox created with `secureAccess`."""
        return self._derive(Purpose.SECURE, sandbox)

    def claim(self, purpose: Purpose, sandbox: str, token: str) -> Claim:
        """Return the claim that `token` is this sandbox's token for `purpose`."""
        return Claim(sandbox, bool(token), lambda: _same(token, self._derive(purpose, sandbox)))

    def _derive(self, purpose: Purpose, sandbox: str) -> str:
        mac = hmac.new(self.key, f"{purpose}{sandbox}".encode(), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(mac).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class RouteKeys:
    """The keys of signed routes by their ids: `active` signs, each of them verifies.

    A signature is 43 characters of URL-safe base64, the whole HMAC-SHA-256, and the id of its key.
    """

    active: str
    keys: Mapping[str, bytes] = field(repr=False)

    def __post_init__(self) -> None:
        if self.active not in self.keys:
            raise ValueError("the active key of signed routes is not one of the keys")
        for name, key in self.keys.items():
            if not KEY_ID.fullmatch(name):
                raise ValueError("the id of a key of signed routes must be one of 0-9 and a-z")
            if len(key) < LEAST_ROUTE_KEY:
                raise ValueError(f"a key of signed routes has fewer than {LEAST_ROUTE_KEY} bytes")

    def sign(self, *parts: str) -> str:
        """Return the signature of a route. No part contains a line feed."""
        return _signature(self.keys[self.active], parts) + self.active

    def claim(self, signature: str, *parts: str) -> Claim:
        """Return the claim that `signature` is that of a route.

        Refused ones are counted per key, so that clients with routes of a removed key delay no other client.
        """
        name = signature[-1:] if KEY_ID.fullmatch(signature[-1:]) else ""
        key = self.keys.get(name)
        expected = _signature(_NO_KEY if key is None else key, parts) + name
        return Claim(f"signed {name}", True, lambda: _same(signature, expected) and key is not None)


def _signature(key: bytes, parts: tuple[str, ...]) -> str:
    text = "\n".join(("sallyport signed route 1", *parts))
    mac = hmac.new(key, text.encode("utf-8", "surrogateescape"), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(mac).decode().rstrip("=")


def _same(presented: str, expected: str) -> bool:
    """Compare two tokens in constant time. Their digests have equal lengths, so the time does not disclose a length."""
    return hmac.compare_digest(
        hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest(),
        hashlib.sha256(expected.encode()).digest(),
    )
