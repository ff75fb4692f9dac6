"""The refusal of a denied connection: a TLS alert or an HTTP answer, then an orderly close.

- The answer has the rule and its reason. It quotes nothing from the client.
- Before the close, further bytes from the client are read and dropped, up to a limit. A close with unread bytes would
  send a reset, and the client would lose the answer.
"""

import asyncio
import json
import socket

from gateway.splice import reset
from policy.decision import Deny

_READ = 16384
_REFUSAL_SECONDS = 2.0
_REFUSAL_BYTES = 256 * 1024

DECODE_ERROR = 50
ACCESS_DENIED = 49
UNRECOGNIZED_NAME = 112


def alert(code: int) -> bytes:
    """Return a fatal TLS alert in one record."""
    return bytes((21, 3, 3, 0, 2, 2, code))


def http_answer(status: int, denial: Deny) -> bytes:
    """Return a complete HTTP/1.1 response with a JSON body: code, rule and message."""
    reasons = {400: "Bad Request", 403: "Forbidden", 414: "URI Too Long", 431: "Request Header Fields Too Large"}
    body = json.dumps({"code": "EGRESS_DENIED", "rule": denial.rule, "message": denial.reason}).encode() + b"\n"
    head = (
        f"HTTP/1.1 {status} {reasons.get(status, 'Service Unavailable')}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


async def refuse(sock: socket.socket, answer: bytes) -> None:
    """Send the answer and shut the connection down. The caller closes the socket."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_REFUSAL_SECONDS):
            await loop.sock_sendall(sock, answer)
            sock.shutdown(socket.SHUT_WR)
            left = _REFUSAL_BYTES
            while left > 0 and (part := await loop.sock_recv(sock, _READ)):
                left -= len(part)
    except (OSError, TimeoutError):
        reset(sock)
