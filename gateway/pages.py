"""Pages that the gateway sends in place of the server's response.

- A denial names the rule, the reason and the access to ask for. A failure gives no details.
- No page contains a secret, a query, a header value, an address or the name of a software.
"""

import json
from collections.abc import Iterable
from http import HTTPStatus

type Fields = list[tuple[bytes, bytes]]

_GENERIC = {
    400: "The request was not understood.",
    413: "The request is too large.",
    421: "This connection serves another host.",
    502: "The server could not be reached securely, or did not answer properly.",
    503: "credential proxy unavailable",
}
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


def reason_phrase(status: int) -> str:
    """Return the standard phrase of `status`, or an empty string."""
    return _PHRASES.get(status, "")


def failure(status: int) -> tuple[Fields, bytes]:
    """Return headers and body of an answer without details."""
    return _page("text/plain; charset=utf-8", f"{_GENERIC.get(status, reason_phrase(status))}\n".encode())


def refusal(status: int, reason: str) -> tuple[Fields, bytes]:
    """Return headers and body for a malformed request. `reason` is a fixed sentence and quotes nothing."""
    return _page("text/plain; charset=utf-8", f"{reason}\n".encode())


def denial(rule: str, reason: str, what: str, accepts: Iterable[bytes]) -> tuple[Fields, bytes]:
    """Return headers and body of a 403. `what` names the request: method, host and path."""
    ask = f"To get access, ask the operator of this sandbox to allow: {what}"
    if any(b"json" in value.lower() for value in accepts):
        body = json.dumps({"error": "denied by policy", "rule": rule, "reason": reason, "request": what, "help": ask})
        return _page("application/json", body.encode() + b"\n")
    return _page("text/plain; charset=utf-8", f"Denied by policy rule {rule}: {reason}\n{ask}\n".encode())


def over(reason: str, retry_after: int) -> tuple[Fields, bytes]:
    """Return headers and body of a 429. `retry_after` is in seconds."""
    fields, body = _page("text/plain; charset=utf-8", f"Over the limits of this sandbox: {reason}\n".encode())
    return [*fields, (b"retry-after", str(retry_after).encode())], body


def suspended(reason: str) -> tuple[Fields, bytes]:
    """Return headers and body of a 503 for a request to a host whose secret is frozen or cannot be read."""
    return _page("text/plain; charset=utf-8", f"Not sent: {reason}. Other hosts are not affected.\n".encode())


def busy(retry_after: int) -> tuple[Fields, bytes]:
    """Return headers and body of a 503 for an overloaded worker. `retry_after` is in seconds."""
    fields, body = _page("text/plain; charset=utf-8", b"The gateway of this sandbox has too many requests under way.\n")
    return [*fields, (b"retry-after", str(retry_after).encode())], body


def http1(status: int, page: tuple[Fields, bytes]) -> bytes:
    """Return a complete HTTP/1.1 response that announces the end of the connection."""
    fields, body = page
    head = f"HTTP/1.1 {status} {reason_phrase(status)}\r\n".encode()
    lines = b"".join(b"%s: %s\r\n" % field for field in [*fields, (b"connection", b"close")])
    return head + lines + b"\r\n" + body


def _page(content_type: str, body: bytes) -> tuple[Fields, bytes]:
    return [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ], body
