"""Put secrets into the head of a request that policy allowed to have them.

- The binding owns its slot: every copy the client sent is removed, in any case and with `_` for `-`, then exactly
  one header is added.
- A secret never enters a framing, routing or hop-by-hop header, and never with CR, LF or NUL in it.
- Two plans for one slot are an error, never a choice.

Pure. It does not decide, lease or remember anything.
"""

from collections.abc import Sequence

from gateway.hello import TOKEN

type Headers = tuple[tuple[bytes, bytes], ...]

FORBIDDEN_SLOTS = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer", "expect", "keep-alive"}
    | {"proxy-authorization", "proxy-connection", "proxy-authenticate", "content-encoding", "content-type"}
    | {"accept-encoding", "range", "if-range", "forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"}
)


class InjectionError(Exception):
    """The rendered headers cannot be applied; the text holds no value."""


def slot(name: str | bytes) -> str:
    """The identity of a header name for the purpose of owning it."""
    text = name.decode("ascii", "replace") if isinstance(name, bytes) else name
    return text.lower().replace("_", "-")


def inject(headers: Headers, rendered: Sequence[tuple[str, str]]) -> Headers:
    """Return `headers` with each (name, value) of `rendered` as the only header of its slot.

    Values are sent as UTF-8. Proxy credentials of the client are removed in any case.

    Raises:
        InjectionError: a name or value must not be sent, or two of them claim one slot.
    """
    owned = {slot(name) for name, _ in rendered}
    if len(owned) != len(rendered):
        raise InjectionError("two injections claim one header")
    added: list[tuple[bytes, bytes]] = []
    for name, value in rendered:
        if slot(name) in FORBIDDEN_SLOTS or TOKEN.fullmatch(name.encode("utf-8", "replace")) is None:
            raise InjectionError("a secret cannot be sent in this header")
        encoded = value.encode("utf-8", "surrogateescape")
        if not encoded or any((byte < 0x20 and byte != 0x09) or byte == 0x7F for byte in encoded):
            raise InjectionError("the value cannot be a header value")
        added.append((name.encode("ascii"), encoded))
    removed = owned | {"proxy-authorization"}
    return (*((name, value) for name, value in headers if slot(name) not in removed), *added)
