"""Reads a response head: framing, charset and encodings, and which headers are hop-by-hop.

Pure. It knows no secret.
"""

import base64
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from gateway.scrub.charsets import searchable
from gateway.translate import Headers
from gateway.verdicts import ResponseHead

_KEPT_HEADS = 128
_MAX_KEPT_HEAD = 4096
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te"}
    | {b"trailer", b"upgrade", b"alt-svc", b"http2-settings"}
)
_GRPC = re.compile(r"application/grpc(?:[+; ]|\Z)")
_WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What the exchange reads from a response head that it relays.

    Attributes:
        plain: see `plainly_framed`.
        unsearchable: see `unsearchable`.
        headers: see `end_to_end`.
        own: see `own_fields`.
        coded: the body has a content coding.
        grpc: see `is_grpc`.
    """

    plain: bool
    unsearchable: str | None
    headers: Headers
    own: Headers
    coded: bool
    grpc: bool


def head_facts(head: ResponseHead, *, keep: bool) -> HeadFacts:
    """Return the facts of a head. Those of small heads are kept, since servers repeat them.

    Args:
        keep: False for a head with a secret: no copy of it stays behind.
    """
    size = sum([len(name) + len(value) for name, value in head.headers]) if keep else _MAX_KEPT_HEAD + 1
    return _facts_before(head) if size <= _MAX_KEPT_HEAD else _facts(head)


def _facts(head: ResponseHead) -> HeadFacts:
    headers = end_to_end(head)
    coded = encodings(headers) not in ([], ["identity"])
    return HeadFacts(plainly_framed(head), unsearchable(head), headers, own_fields(head), coded, is_grpc(head))


_facts_before = lru_cache(maxsize=_KEPT_HEADS)(_facts)


def accepts_websocket(head: ResponseHead, key: bytes | None) -> bool:
    """Whether a 101 completes the WebSocket handshake with `key` (None if the request was no handshake)."""
    if key is None:
        return False
    digest = hashlib.sha1(key + _WEBSOCKET_GUID, usedforsecurity=False).digest()
    accepted = _values(head.headers, b"sec-websocket-accept") == [base64.b64encode(digest)]
    return accepted and joined(head.headers, b"upgrade").lower() == b"websocket"


def plainly_framed(head: ResponseHead) -> bool:
    """Whether the body has no transfer coding other than `chunked`."""
    return [value.lower() for value in _values(head.headers, b"transfer-encoding")] in ([], [b"chunked"])


def unsearchable(head: ResponseHead) -> str | None:
    """Return why the body cannot be searched for a text, None if it can."""
    if not searchable(map(_text, _values(head.headers, b"content-type"))):
        return "a response in this charset cannot be searched for secrets"
    if _values(head.headers, b"grpc-encoding") not in ([], [b"identity"]):
        return "compressed messages cannot be searched for secrets"
    return None


def is_grpc(head: ResponseHead) -> bool:
    """Whether the body consists of gRPC messages."""
    return _GRPC.match(_text(joined(head.headers, b"content-type")).lower()) is not None


def encodings(headers: Headers) -> list[str]:
    """Return the content codings of a body, in the order in which they were applied.

    `aws-chunked` is none: object stores name it for objects that were uploaded so, and send them without it.
    """
    values = map(_text, _values(headers, b"content-encoding"))
    parts = [part.strip().lower() for value in values for part in value.split(",")]
    return [part for part in parts if part not in ("", "aws-chunked")]


def end_to_end(head: ResponseHead) -> Headers:
    """Return the end-to-end headers, each value on one line."""
    return tuple((name, _one_line(value)) for name, value in head.headers if name.lower() not in _HOP_BY_HOP)


def own_fields(head: ResponseHead) -> Headers:
    """Return the hop-by-hop headers for the client's connection: upgrade, close or none."""
    if head.status == 101:
        return (b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")
    closes = b"close" in joined(head.headers, b"connection").lower()
    return ((b"Connection", b"close"),) if closes else ()


def joined(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """Return all values of one header, joined by commas; empty if there is none."""
    return b", ".join(_values(headers, name))


def _one_line(value: bytes) -> bytes:
    lines = value.replace(b"\0", b" ").split(None) if b"\r" in value or b"\n" in value else [value]
    return b" ".join(lines).replace(b"\0", b"")


def _values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for one, value in headers if one.lower() == name]


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")
