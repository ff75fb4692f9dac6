"""The headers that cross the proxy, in both directions. Pure.

- No header that authenticates a caller to *this server* reaches a sandbox: neither API keys, in any header, nor the
  egress token, nor the secure-access token. execd's token is sent to execd's port only.
- `Authorization` and `Cookie` belong to the application, unless they contain one of the server's keys.
- No header that contains a signed route reaches a sandbox, such as the `Referer` of a page below it.
- The server sets the headers about the origin of a request. Those of the request are dropped.
- A sandbox can store state in a browser for its own route only. Cookies get one path, below the route, and no domain.
  Headers about the whole host are dropped, because the host belongs to the API and to every sandbox.
- A browser sends no address of a page below a signed route to other servers, unless the page itself asks for that.
"""

import re
from collections.abc import Iterable, Sequence

from lifecycle.api.credentials import API_KEY_HEADER, EGRESS_HEADER, EXECD_HEADER, SECURE_HEADER, KeyRing

type Headers = list[tuple[bytes, bytes]]

EXECD_PORT = 44772
EGRESS_PORT = 18080
RENEW_HEADER = "opensandbox-access-renew"

_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
_OURS = frozenset(
    name.encode()
    for name in (API_KEY_HEADER, EGRESS_HEADER, SECURE_HEADER, RENEW_HEADER, "open-sandbox-client-ip", "x-real-ip")
)
_WHOLE_HOST = frozenset(
    (b"strict-transport-security", b"alt-svc", b"clear-site-data", b"nel", b"report-to", b"service-worker-allowed")
)
_WEBSOCKET = (b"sec-websocket-",)
_COOKIE_ATTRIBUTES = frozenset(
    (b"expires", b"max-age", b"secure", b"httponly", b"samesite", b"partitioned", b"priority")
)
_COOKIE_PATH = re.compile(rb"/[!#-:<-~]*")
"""Printable ASCII without quotes and `;`. All clients parse it in the same way."""
_LONGEST_PATH = 800
"""With the route before it, the path stays below 1024 bytes. Browsers ignore a longer attribute."""
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_SIGNED = re.compile(rb"/signed/[^/\s]+/[0-9]+/[0-9a-z]+/[A-Za-z0-9_-]{44}")
_NO_REFERRER = (b"referrer-policy", b"no-referrer")
ISOLATION = (b"content-security-policy", b"sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts")
"""Browsers give a page of a sandbox its own origin: not the API's, not another sandbox's."""


def to_sandbox(
    headers: Iterable[tuple[bytes, bytes]],
    *,
    port: int,
    keys: KeyRing,
    scheme: str,
    host: str,
    client: str,
    request_id: str,
    signature: bytes = b"",
    websocket: bool = False,
) -> Headers:
    """Return the request's headers for the sandbox.

    Args:
        signature: that of the request's own signed route, or empty.
    """
    headers = list(headers)
    dropped = _HOP | _OURS | _named_in_connection(headers) | {b"host", b"forwarded", b"expect", b"x-request-id"}
    kept: Headers = []
    chunked = False
    for name, value in headers:
        lower = name.lower()
        chunked |= lower == b"transfer-encoding"
        if lower in dropped or lower.startswith(b"x-forwarded-"):
            continue
        if lower == EXECD_HEADER.encode() and port != EXECD_PORT:
            continue
        if websocket and (lower.startswith(_WEBSOCKET) or lower in (b"origin", b"content-length")):
            continue
        if keys.required and keys.occurs_in(value.decode("latin-1")):
            continue
        if _SIGNED.search(value) or (signature and signature in value):
            continue
        kept.append((name, value))
    if chunked and not websocket:
        kept = [(name, value) for name, value in kept if name.lower() != b"content-length"]
        kept.append((b"transfer-encoding", b"chunked"))
    if not websocket:
        kept.insert(0, (b"host", f"localhost:{port}".encode()))
    kept += [
        (b"x-forwarded-proto", scheme.encode()),
        (b"x-forwarded-host", host.encode("latin-1")),
        (b"x-forwarded-for", client.encode()),
        (b"x-request-id", request_id.encode("latin-1")),
    ]
    return kept


def to_client(headers: Sequence[tuple[bytes, bytes]], prefix: bytes, path: bytes, *, signed: bool = False) -> Headers:
    """Return the response's headers for the client.

    Args:
        prefix: the route to this port.
        path: the requested path below it, without the query.
        signed: the prefix is a credential.
    """
    dropped = (
        _HOP
        | _WHOLE_HOST
        | _named_in_connection(headers)
        | {b"server", b"date", b"set-cookie2", b"x-request-id", b"open-sandbox-origin"}
        | ({_NO_REFERRER[0]} if signed else frozenset())
    )
    kept: Headers = []
    for name, value in headers:
        lower = name.lower()
        if lower in dropped:
            continue
        if lower == b"location" and value.startswith(b"/") and not value.startswith(b"//"):
            value = prefix + value
        elif lower == b"set-cookie":
            own = _own_cookie(value, prefix, path)
            if own is None:
                continue
            value = own
        kept.append((name, value))
    kept.append(ISOLATION)
    if signed:
        kept.append(_NO_REFERRER)
    return kept


def _own_cookie(cookie: bytes, prefix: bytes, path: bytes) -> bytes | None:
    """Return a `Set-Cookie` that browsers send to the route only; None if clients could parse it in different ways.

    The result has one `Path`, below the route, no `Domain`, and no other attribute that widens it. If the program set
    no usable path, the path is the one that a browser would derive from the request (RFC 6265 5.1.4) as the program
    received it. The browser's own URL could result in the directory above the route.
    """
    if _CONTROL.search(cookie):
        return None
    pair, *attributes = cookie.split(b";")
    wanted = b""
    kept = [pair]
    for attribute in attributes:
        name, _, value = (text.strip(b" \t") for text in attribute.partition(b"="))
        if name.lower() == b"path":
            wanted = value
        elif name.lower() in _COOKIE_ATTRIBUTES:
            kept.append(attribute)
    if not _usable(wanted):
        wanted = path[: path.rfind(b"/")] or b"/"
    if not _usable(wanted):
        wanted = b"/"
    if not (wanted + b"/").startswith(prefix + b"/"):
        wanted = prefix + wanted
    return b";".join([*kept, b" Path=" + wanted])


def _usable(path: bytes) -> bool:
    return (
        _COOKIE_PATH.fullmatch(path) is not None
        and len(path) <= _LONGEST_PATH
        and {b".", b".."}.isdisjoint(path.split(b"/"))
    )


def _named_in_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    return frozenset(
        item.strip().lower() for name, value in headers if name.lower() == b"connection" for item in value.split(b",")
    )
