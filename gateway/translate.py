"""Translates the head of one HTTP/1 or HTTP/2 request into the facts for policy and the head to forward.

    RequestParts, FlowFacts of its flow  ->  Translated(facts, headers, ...) | Refused(status, reason)

- The authority of every request must equal the flow's host and port. A mismatch is a 421.
- Framing that two parsers could read differently is refused, never corrected.
- The path in the facts equals the forwarded path (`Translated.target`) byte for byte.
- On plain HTTP an offer to change to HTTP/2 (h2c), as Java's client makes, is removed. The request continues as
  HTTP/1.1.
- Removed headers: hop-by-hop, `Trailer`, proxy credentials, and headers with which some servers replace method or path.
  A name that becomes a framing or routing header when `_` is read as `-` is refused.

Pure. The module does not decide whether the request is allowed, and handles no secret.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.tls.hello import (
    MAX_HEAD,
    MAX_HEADERS,
    TOKEN,
    NeedMore,
    Refused,
    asked,
    read_head,
    split_absolute,
    split_authority,
)
from policy.facts import FlowFacts, RequestFacts, Scheme

type Headers = tuple[tuple[bytes, bytes], ...]

MAX_METHOD = 32
_DEFAULT_PORT = {Scheme.HTTP: 80, Scheme.HTTPS: 443}
_TARGET = re.compile(rb"/[\x21-\x22\x24-\x7e]*")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_CONTENT_LENGTH = re.compile(rb"0|[1-9][0-9]{0,17}")
_SINGLE = frozenset({b"content-length", b"transfer-encoding", b"content-type", b"expect", b"upgrade", b"authorization"})
_FRAMING = frozenset({b"host", b"content-length", b"transfer-encoding"})
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"proxy-authenticate", b"te"}
    | {b"trailer", b"upgrade", b"http2-settings"}
)
_REWRITING = frozenset(
    {b"x-http-method", b"x-http-method-override", b"x-method-override"}
    | {b"x-original-url", b"x-original-uri", b"x-rewrite-url", b"forwarded", b"via"}
    | {b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-port", b"x-forwarded-proto", b"x-forwarded-server"}
    | {b"x-forwarded-prefix", b"x-forwarded-uri", b"x-forwarded-method", b"x-host", b"x-real-ip"}
)
_DROPPED = _HOP_BY_HOP | _REWRITING | {b"host"}
_MEANINGFUL = _SINGLE | _FRAMING | _HOP_BY_HOP | _REWRITING
_NEVER = frozenset({b"CONNECT", b"TRACE", b"TRACK", b"PRI"})


@dataclass(frozen=True, slots=True)
class RequestParts:
    """One request head as received.

    Attributes:
        version: 10, 11 or 20.
        target: the request target as received (HTTP/1), or `:path` (HTTP/2).
        scheme, authority: the pseudo-headers of HTTP/2; empty for HTTP/1.
        headers: in order, without pseudo-headers.
        ended: the request ends with its head (HTTP/2). Over HTTP/1 the headers say it.
    """

    version: int
    method: bytes
    target: bytes
    scheme: bytes
    authority: bytes
    headers: Headers
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Translated:
    """A request with exactly one meaning.

    Attributes:
        target: origin-form target to forward.
        headers: the headers to forward, in order, without Host and hop-by-hop headers.
        host_header: the Host to forward, made from the flow's host and port.
        close: the client asked for its connection to be closed after this request.
        websocket: the request is a well-formed WebSocket handshake; `headers` lacks its Upgrade headers.
        expect_continue: the client waits for `100 Continue`.
    """

    facts: RequestFacts
    target: bytes
    headers: Headers
    host_header: bytes
    close: bool
    websocket: bool
    expect_continue: bool


def translate(parts: RequestParts, flow: FlowFacts) -> Translated | Refused:
    """Judge the form of one request that arrived on `flow`. Refused has the status and a fixed reason."""
    refusal = _check_limits(parts)
    if refusal is not None:
        return refusal
    target = _target(parts, flow)
    if isinstance(target, Refused):
        return target
    refusal = _check_authority(parts, flow)
    if refusal is not None:
        return refusal
    named = {name.lower(): value for name, value in parts.headers}
    refusal = _check_framing(parts, named)
    if refusal is not None:
        return refusal
    connection = _list(parts.headers, b"connection")
    if not _FRAMING.isdisjoint(connection):
        return Refused("Connection lists a framing header")
    websocket = _is_websocket(parts, named, connection, flow)
    if isinstance(websocket, Refused):
        return websocket
    expect = named.get(b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        return Refused("only the expectation 100-continue is supported", 417)
    path, _, query = target.partition(b"?")
    authority = flow.host if flow.port == _DEFAULT_PORT[flow.scheme] else f"{flow.host}:{flow.port}"
    return Translated(
        facts=RequestFacts(
            host=flow.host,
            port=flow.port,
            scheme=flow.scheme,
            method=parts.method.decode("ascii"),
            path=path.decode("ascii"),
            query=query.decode("ascii"),
        ),
        target=target,
        headers=_forwarded(parts, frozenset(connection)),
        host_header=authority.encode("ascii"),
        close=b"close" in connection or (parts.version == 10 and b"keep-alive" not in connection),
        websocket=websocket,
        expect_continue=expect is not None,
    )


def head_size(parts: RequestParts) -> int:
    """Return the bytes of a head: method, target, names and values of headers."""
    return len(parts.method) + len(parts.target) + sum(len(name) + len(value) for name, value in parts.headers)


def body_length(parts: RequestParts, *, websocket: bool) -> int | None:
    """Return the bytes of the body of a well-formed request. None: its head does not say them, or it is a WebSocket."""
    named = {name.lower(): value for name, value in parts.headers}
    if websocket:
        return None
    if b"content-length" in named:
        return int(named[b"content-length"])
    ends = parts.ended if parts.version == 20 else b"transfer-encoding" not in named
    return 0 if ends else None


def refusal_of_form(request: RequestFacts) -> str | None:
    """Return why a gateway refuses the form of a request with this method, path and query; None if it does not.

    The function writes the request as HTTP/1.1 with a correct Host, and reads it as if it came from a sandbox.
    """
    authority = request.host if request.port == _DEFAULT_PORT[request.scheme] else f"{request.host}:{request.port}"
    target = request.path + (f"?{request.query}" if request.query else "")
    try:
        raw = f"{request.method} {target} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode("ascii")
    except UnicodeEncodeError:
        return "the request line is not ASCII"
    head = read_head(raw)
    if isinstance(head, NeedMore):
        return "the request line does not end where it should"
    if isinstance(head, Refused):
        return head.reason
    if (head.length, head.method, head.target) != (len(raw), request.method.encode("ascii"), target.encode("ascii")):
        return "the gateway reads another method or target from this request line"
    translated = translate(RequestParts(11, head.method, head.target, b"", b"", head.headers), request.flow)
    if isinstance(translated, Refused):
        return translated.reason
    if (translated.facts.path, translated.facts.query) != (request.path, request.query):
        return "the gateway reads another path or query from this target"
    return None


def _check_limits(parts: RequestParts) -> Refused | None:
    if TOKEN.fullmatch(parts.method) is None or len(parts.method) > MAX_METHOD:
        return Refused("malformed method")
    if parts.method in _NEVER:
        return Refused("method not supported", 405)
    if len(parts.headers) > MAX_HEADERS:
        return Refused("too many headers", 431)
    if sum([len(name) + len(value) + 4 for name, value in parts.headers]) + len(parts.target) > MAX_HEAD:
        return Refused("request head over the limit", 431)
    seen: set[bytes] = set()
    for name, value in parts.headers:
        lower = name.lower()
        if TOKEN.fullmatch(name) is None or (parts.version == 20 and name != lower):
            return Refused("malformed header name")
        if _VALUE.fullmatch(value) is None or value != value.strip(b" \t"):
            return Refused("malformed header value")
        if b"_" in lower and (plain := lower.replace(b"_", b"-")) in _MEANINGFUL:
            return Refused(f"header name can be taken for {plain.decode('ascii')}")
        if lower in _SINGLE and lower in seen:
            return Refused(f"more than one {lower.decode('ascii')} header")
        seen.add(lower)
    return None


def _target(parts: RequestParts, flow: FlowFacts) -> bytes | Refused:
    target = parts.target
    if parts.version != 20 and not target.startswith(b"/"):
        absolute = split_absolute(target)
        if absolute is None:
            return Refused("target is neither a path nor an http URL")
        scheme, authority, target = absolute
        if scheme != str(flow.scheme.value).lower().encode("ascii"):
            return Refused("target names another scheme")
        if not _agrees(authority, flow):
            return Refused("target names another host", 421, asked(authority))
    if _TARGET.fullmatch(target) is None:
        return Refused("malformed path")
    return target


def _check_authority(parts: RequestParts, flow: FlowFacts) -> Refused | None:
    hosts = [value for name, value in parts.headers if name.lower() == b"host"]
    if parts.version == 20:
        if parts.scheme != str(flow.scheme.value).lower().encode("ascii"):
            return Refused(":scheme is not that of the connection")
        if not parts.authority or len(hosts) > 1 or (hosts and hosts[0] != parts.authority):
            return Refused("exactly one authority is required")
        hosts = [parts.authority]
    if len(hosts) != 1:
        return Refused("a request must have exactly one Host header")
    if split_authority(hosts[0]) is None:
        return Refused("Host is not a clean host name")
    if not _agrees(hosts[0], flow):
        return Refused("this connection serves another host", 421, asked(hosts[0]))
    return None


def _agrees(authority: bytes, flow: FlowFacts) -> bool:
    found = split_authority(authority)
    if found is None:
        return False
    host, port = found
    return (host, port or _DEFAULT_PORT[flow.scheme]) == (flow.host, flow.port)


def _check_framing(parts: RequestParts, named: dict[bytes, bytes]) -> Refused | None:
    length = named.get(b"content-length")
    coding = named.get(b"transfer-encoding")
    if length is not None and _CONTENT_LENGTH.fullmatch(length) is None:
        return Refused("malformed Content-Length")
    if coding is None:
        return None
    if parts.version != 11:
        return Refused("Transfer-Encoding belongs to HTTP/1.1")
    if length is not None:
        return Refused("both Content-Length and Transfer-Encoding")
    if coding != b"chunked":
        return Refused("unsupported Transfer-Encoding")
    return None


def _is_websocket(
    parts: RequestParts, named: dict[bytes, bytes], connection: Sequence[bytes], flow: FlowFacts
) -> bool | Refused:
    upgrade = named.get(b"upgrade")
    if upgrade is None and b"upgrade" not in connection and b"http2-settings" not in named:
        return False
    offer = {b"upgrade", b"http2-settings"} <= set(connection) and b"http2-settings" in named
    if upgrade == b"h2c" and offer and parts.version == 11 and flow.scheme is Scheme.HTTP:
        return False
    well_formed = (
        parts.version == 11
        and parts.method == b"GET"
        and upgrade is not None
        and upgrade.lower() == b"websocket"
        and b"upgrade" in connection
        and named.get(b"sec-websocket-version") == b"13"
        and len(named.get(b"sec-websocket-key", b"")) == 24
        and named.get(b"content-length", b"0") == b"0"  # as Java's client writes it
        and b"transfer-encoding" not in named
        and sum(name.lower().startswith(b"sec-websocket-key") for name, _ in parts.headers) == 1
    )
    return True if well_formed else Refused("only a well-formed WebSocket upgrade is supported")


def _list(headers: Headers, wanted: bytes) -> tuple[bytes, ...]:
    """Return the elements of a comma-separated header in lower case, over all its copies."""
    return tuple(
        [
            element.strip(b" \t").lower()
            for name, value in headers
            if name.lower() == wanted
            for element in value.split(b",")
            if element.strip(b" \t")
        ]
    )


def _forwarded(parts: RequestParts, nominated: frozenset[bytes]) -> Headers:
    dropped = _DROPPED | nominated if nominated else _DROPPED
    kept = [header for header in parts.headers if header[0].lower() not in dropped]
    if parts.version == 20 and b"trailers" in _list(parts.headers, b"te"):
        kept.append((b"te", b"trailers"))  # gRPC requires it
    return tuple(kept)
