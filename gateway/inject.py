"""Injects secrets into the head of a request that policy allows to carry them.

- The binding owns its slot. Every copy of the header from the client is removed, in any letter case and with `_` in
  place of `-`. Then exactly one header is added.
- A binding of a query parameter or a cookie owns that name. Every copy from the client is removed; a parameter in any
  percent-encoding and letter case. All other parameters and cookies stay byte for byte, in their order.
- A secret is never put into a framing, routing or hop-by-hop header. A value with CR, LF, NUL or another control
  character is refused.
- Two injections into one slot are an error.

Pure. The module does not decide, lease or store anything.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from gateway.tls.hello import TOKEN

type Headers = tuple[tuple[bytes, bytes], ...]

FORBIDDEN_SLOTS = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer", "expect", "keep-alive"}
    | {"proxy-authorization", "proxy-connection", "proxy-authenticate", "content-encoding", "content-type"}
    | {"accept-encoding", "range", "if-range", "forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"}
)


_FIELD_VALUE = re.compile(rb"[^\0-\x08\x0a-\x1f\x7f]+")


def slot(name: str | bytes) -> str:
    """Return the slot of a header name: lower case, with `-` in place of `_`."""
    return _known(name) if len(name) <= _MAX_KNOWN else _slot(name)


def _slot(name: str | bytes) -> str:
    text = name.decode("ascii", "replace") if isinstance(name, bytes) else name
    return text.lower().replace("_", "-")


_MAX_KNOWN = 64
_known = lru_cache(maxsize=256)(_slot)


def inject(headers: Headers, rendered: Sequence[tuple[str, str]]) -> Headers:
    """Return `headers` with each (name, value) of `rendered` as the only header of its slot.

    Values are sent as UTF-8. Proxy credentials of the client are removed in any case.

    Raises:
        ValueError: a name or value must not be sent, or two of them have the same slot. The text contains no secret.
    """
    owned = {slot(name) for name, _ in rendered}
    if len(owned) != len(rendered):
        raise ValueError("two injections have the same header")
    added: list[tuple[bytes, bytes]] = []
    for name, value in rendered:
        if slot(name) in FORBIDDEN_SLOTS or TOKEN.fullmatch(name.encode("utf-8", "replace")) is None:
            raise ValueError("a secret cannot be sent in this header")
        encoded = value.encode("utf-8", "surrogateescape")
        if _FIELD_VALUE.fullmatch(encoded) is None:
            raise ValueError("the secret is empty or has a control character, so it cannot be sent in a header")
        added.append((name.encode("ascii"), encoded))
    removed = owned | {"proxy-authorization"}
    return (*[header for header in headers if slot(header[0]) not in removed], *added)


_SEPARATOR = re.compile(rb"([&;])")


def inject_query(target: bytes, parameters: Sequence[tuple[str, str]]) -> bytes:
    """Return a request target with each (name, encoded value) as the only parameter of its name, at the end.

    Some servers also split a query at `;`. A copy of the name between those is removed, too.
    """
    path, _, query = target.partition(b"?")
    owned = {name.lower().encode("ascii") for name, _ in parameters}
    left: bytes | None = None
    before = b""
    for place, piece in enumerate(_SEPARATOR.split(query)):
        if place % 2:
            before = piece
        elif _parameter(piece) not in owned:
            left = piece if left is None else left + before + piece
    added = b"&".join(f"{name}={value}".encode("ascii") for name, value in parameters)
    return path + b"?" + (left + b"&" if left else b"") + added


def _parameter(piece: bytes) -> bytes:
    name = piece.partition(b"=")[0].replace(b"+", b" ")
    return unquote_to_bytes(name).strip(b" \t").lower()


def inject_cookies(headers: Headers, cookies: Sequence[tuple[str, str]]) -> Headers:
    """Return `headers` with each (name, value) as the only cookie of its name.

    All cookies are in one header, at the place of the first one, as HTTP/1.1 requires.
    """
    owned = {name.encode("ascii") for name, _ in cookies}
    kept: list[bytes] = []
    first: int | None = None
    others: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if slot(name) != "cookie":
            others.append((name, value))
            continue
        first = len(others) if first is None else first
        pieces = [piece for piece in value.split(b";") if piece.partition(b"=")[0].strip(b" \t") not in owned]
        if left := b";".join(pieces).strip(b" \t"):
            kept.append(left)
    kept += [f"{name}={value}".encode("ascii") for name, value in cookies]
    others.insert(len(others) if first is None else first, (b"Cookie", b"; ".join(kept)))
    return tuple(others)
