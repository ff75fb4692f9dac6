"""How a denied connection is told so: a TLS alert or an HTTP answer, and then an end that does not lose it.

- An answer carries the rule and its reason, nothing of what the client sent.
- Bytes the client still sends are read and dropped for a bounded while: closing on unread bytes would be a reset, and
  the reset would overtake the answer.
"""

import asyncio
import json
import socket

from gateway.splice import reset
from policy.decision import Deny

_READ = 16384
_FAREWELL_SECONDS = 2.0
_FAREWELL_BYTES = 256 * 1024

DECODE_ERROR = 50
ACCESS_DENIED = 49
UNRECOGNIZED_NAME = 112


def alert(code: int) -> bytes:
    """A fatal TLS alert in a record of its own."""
    return bytes((21, 3, 3, 0, 2, 2, code))


def http_answer(status: int, denial: Deny) -> bytes:
    reasons = {400: "Bad Request", 403: "Forbidden", 414: "URI Too Long", 431: "Request Header Fields Too Large"}
    body = json.dumps({"code": "EGRESS_DENIED", "rule": denial.rule, "message": denial.reason}).encode() + b"\n"
    head = (
        f"HTTP/1.1 {status} {reasons.get(status, 'Service Unavailable')}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


async def farewell(sock: socket.socket, answer: bytes) -> None:
    """Say why and close: the answer must not be lost to a reset for bytes that nobody read."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_FAREWELL_SECONDS):
            await loop.sock_sendall(sock, answer)
            sock.shutdown(socket.SHUT_WR)
            left = _FAREWELL_BYTES
            while left > 0 and (part := await loop.sock_recv(sock, _READ)):
                left -= len(part)
    except (OSError, TimeoutError):
        reset(sock)
