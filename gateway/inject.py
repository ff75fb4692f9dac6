"""Injects secrets into the head of a request that policy allows to carry them.

- The binding owns its slot. Every copy of the header from the client is removed, in any letter case and with `_` in
  place of `-`. Then exactly one header is added.
- A secret is never put into a framing, routing or hop-by-hop header. A value with CR, LF, NUL or another control
  character is refused.
- Two injections into one slot are an error.

Pure. The module does not decide, lease or store anything.
"""

from collections.abc import Sequence
from functools import lru_cache

from gateway.tls.hello import TOKEN

type Headers = tuple[tuple[bytes, bytes], ...]

FORBIDDEN_SLOTS = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer", "expect", "keep-alive"}
    | {"proxy-authorization", "proxy-connection", "proxy-authenticate", "content-encoding", "content-type"}
    | {"accept-encoding", "range", "if-range", "forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"}
)


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
        if not encoded or any((byte < 0x20 and byte != 0x09) or byte == 0x7F for byte in encoded):
            raise ValueError("the secret is empty or has a control character, so it cannot be sent in a header")
        added.append((name.encode("ascii"), encoded))
    removed = owned | {"proxy-authorization"}
    return (*((name, value) for name, value in headers if slot(name) not in removed), *added)
