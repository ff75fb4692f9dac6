"""Signed routes: `/signed/{id}/{port}/{expires}/{signature}/…` leads to a port of a sandbox without a token.

- The signature covers sandbox, port and expiry. A route with a changed part, of a key that was removed, or after its
  expiry gets the same refusal as any other text.
- `expires` is the time in seconds since 1970 in base 36, lower case, without leading zeros.
- A route is a credential: no header that contains one reaches a sandbox (`lifecycle.proxy.headers`), and no log and no
  audit record has it.
"""

import re
from dataclasses import dataclass

from lifecycle.api.auth import Caller
from lifecycle.api.credentials import RouteKeys
from lifecycle.api.errors import ApiError
from wire.ids import SANDBOX_ID

ROUTE = re.compile(
    rb"(?P<prefix>(?:/v1)?/signed/(?P<sandbox>[^/]+)/(?P<port>[^/]+)/(?P<expires>[^/]+)/(?P<signature>[^/]+))"
    rb"(?P<path>/.*)?",
    re.DOTALL,
)
LATEST = (1 << 64) - 1
"""The latest expiry of a signed route."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_CANONICAL = (
    SANDBOX_ID,
    re.compile(r"[1-9][0-9]{0,4}", re.ASCII),
    re.compile(r"[1-9a-z][0-9a-z]{0,12}", re.ASCII),
)


@dataclass(frozen=True, slots=True)
class SignedRoute:
    """The content of a route whose signature is right."""

    sandbox: str
    port: int
    expires: int


def refused() -> ApiError:
    """Return the one answer to a route that does not permit the request."""
    return ApiError(401, "MISSING_OR_INVALID_SECURE_ACCESS", "This signed route is not valid, or no longer valid.")


def signed(keys: RouteKeys, sandbox: str, port: int, expires: int) -> str:
    """Return the path of a signed route, without a mount prefix and a slash at its begin."""
    parts = (sandbox, str(port), base36(expires))
    return "/".join(("signed", *parts, keys.sign(*parts)))


def read(keys: RouteKeys, match: re.Match[bytes], caller: Caller, now: float) -> SignedRoute:
    """Return the content of a requested route.

    Raises:
        ApiError: its signature is wrong, it has expired, or the caller must wait after too many wrong signatures.
    """
    parts = tuple(match[name].decode("latin-1") for name in ("sandbox", "port", "expires"))
    if not all(form.fullmatch(part) for form, part in zip(_CANONICAL, parts, strict=True)):
        parts = ("", "", "")  # Such a route was never signed. Its signature is compared in any case.
    proven = caller.proves(keys.claim(match["signature"].decode("latin-1"), *parts))
    if not (proven and all(parts) and int(parts[2], 36) > now):
        raise refused()
    return SignedRoute(parts[0], int(parts[1]), int(parts[2], 36))


def base36(number: int) -> str:
    """Return a positive number in base 36."""
    text = ""
    while number:
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
    return text
