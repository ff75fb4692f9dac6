"""Which headers cross the proxy, in both directions (contract 9.3, R17, R21). Pure.

- Nothing that authenticates a caller to *us* reaches a sandbox: neither API keys, under whatever header, nor the egress
  token, nor the secure-access token. execd's token goes to execd's port only.
- `Authorization` and `Cookie` are the application's, unless one of our keys is in them.
- Where a request came from is said by us and not by the request.
- What a sandbox tells a browser to keep is kept for its own route only: cookies get its path and no domain, and headers
  that are about the whole host (which is the API's, and every sandbox's) stay here.
"""

from collections.abc import Iterable, Sequence

from lifecycle.auth import API_KEY_HEADER, EGRESS_HEADER, EXECD_HEADER, SECURE_HEADER, KeyRing

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
ISOLATION = (b"content-security-policy", b"sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts")
"""Browsers give a page from a sandbox an origin of its own: not the API's, not another sandbox's (R27)."""


def to_sandbox(
    headers: Iterable[tuple[bytes, bytes]],
    *,
    port: int,
    keys: KeyRing,
    scheme: str,
    host: str,
    client: str,
    request_id: str,
    websocket: bool = False,
) -> Headers:
    """Return the headers of the request as the sandbox may see them."""
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


def to_client(headers: Sequence[tuple[bytes, bytes]], prefix: bytes) -> Headers:
    """Return the headers of the sandbox's response as the client gets them; `prefix` is the route to this port."""
    dropped = (
        _HOP
        | _WHOLE_HOST
        | _named_in_connection(headers)
        | {b"server", b"date", b"x-request-id", b"open-sandbox-origin"}
    )
    kept: Headers = []
    for name, value in headers:
        lower = name.lower()
        if lower in dropped:
            continue
        if lower == b"location" and value.startswith(b"/") and not value.startswith(b"//"):
            value = prefix + value
        elif lower == b"set-cookie":
            value = _own_cookie(value, prefix)
        kept.append((name, value))
    kept.append(ISOLATION)
    return kept


def _own_cookie(cookie: bytes, prefix: bytes) -> bytes:
    parts = cookie.split(b";")
    for index, part in enumerate(parts[1:], start=1):
        name, _, value = (text.strip() for text in part.partition(b"="))
        if name.lower() == b"path" and value.startswith(b"/") and not (value + b"/").startswith(prefix + b"/"):
            parts[index] = b" Path=" + prefix + value
        elif name.lower() == b"domain":
            parts[index] = b""
    return b";".join(part for index, part in enumerate(parts) if part or not index)


def _named_in_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    return frozenset(
        item.strip().lower() for name, value in headers if name.lower() == b"connection" for item in value.split(b",")
    )
