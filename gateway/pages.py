"""What a sandbox is told when the gateway answers in the place of the server.

- A denial says which rule, why, and what to ask for. Failures say nothing but that they happened.
- No page holds a secret, a query, a header value, an address or a word about the software behind it.
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


def reason_phrase(status: int) -> str:
    """The standard phrase of `status`, or nothing."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def failure(status: int) -> tuple[Fields, bytes]:
    """Headers and body of an answer that explains nothing."""
    return _page("text/plain; charset=utf-8", f"{_GENERIC.get(status, reason_phrase(status))}\n".encode())


def refusal(status: int, reason: str) -> tuple[Fields, bytes]:
    """Headers and body for a request whose form is refused. `reason` is a fixed sentence, not the client's words."""
    return _page("text/plain; charset=utf-8", f"{reason}\n".encode())


def denial(rule: str, reason: str, what: str, accepts: Iterable[bytes]) -> tuple[Fields, bytes]:
    """Headers and body of a 403. `what` names the request: method, host and path."""
    ask = f"To get access, ask the operator of this sandbox to allow: {what}"
    if any(b"json" in value.lower() for value in accepts):
        body = json.dumps({"error": "denied by policy", "rule": rule, "reason": reason, "request": what, "help": ask})
        return _page("application/json", body.encode() + b"\n")
    return _page("text/plain; charset=utf-8", f"Denied by policy rule {rule}: {reason}\n{ask}\n".encode())


def over(reason: str, retry_after: int) -> tuple[Fields, bytes]:
    """Headers and body of a 429."""
    fields, body = _page("text/plain; charset=utf-8", f"Over the limits of this sandbox: {reason}\n".encode())
    return [*fields, (b"retry-after", str(retry_after).encode())], body


def busy(retry_after: int) -> tuple[Fields, bytes]:
    """Headers and body of a 503 for a request that was not taken on."""
    fields, body = _page("text/plain; charset=utf-8", b"The gateway of this sandbox has too many requests under way.\n")
    return [*fields, (b"retry-after", str(retry_after).encode())], body


def http1(status: int, page: tuple[Fields, bytes]) -> bytes:
    """A whole HTTP/1.1 response after which the connection is closed."""
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
