"""Answers what a PostgreSQL client sends before TLS: requests for encryption, one of each kind.

- TLS is accepted only if policy has a database session on the client's port. The name of the server comes with the
  ClientHello, so nothing is allowed here.
- A request for GSSAPI encryption is declined. The client then asks for TLS, or goes on without.
- A client that goes on without encryption gets an error message, after its startup packet: it shows no other.
- A client that sends bytes before it has the answer to its request is refused: they would be read as its TLS.
"""

import asyncio
import socket

from gateway.startup import (
    ACCEPTED,
    DECLINED,
    CancelRequest,
    GssRequest,
    NotPostgres,
    Packet,
    SslRequest,
    Startup,
    read_packet,
)
from gateway.tls.hello import MAX_HELLO, Hello, NeedMore, NoSni, NotTls, Refused, read_hello

POSTGRES_RULE = "postgres"
"""The rule of a denial because of the form of a connection."""
_READ = 16384
_NO_TLS = "a database session needs TLS with the name of the server (sslmode=require, or verify-full)"
_NO_SESSIONS = "no rule allows database sessions on this port"

type Prelude = tuple[Hello | NoSni | Refused, bytes] | CancelRequest | Refused | None
"""The client's ClientHello with its bytes, a cancel request, or why there is neither. None: the client left."""


async def answer_prelude(sock: socket.socket, data: bytes, packet: Packet, *, tls: bool) -> Prelude:
    """Answer a client until it begins TLS.

    Args:
        data: all bytes received so far; `packet` is what they begin with.
        tls: whether policy has database sessions on this port.
    """
    loop = asyncio.get_running_loop()
    seen: set[type] = set()
    while True:
        if isinstance(packet, CancelRequest):
            return packet
        if isinstance(packet, Startup):
            return Refused(_NO_TLS if tls else _NO_SESSIONS)
        if len(data) > packet.length or type(packet) in seen:
            return Refused("the client sent data before the answer to its request for encryption")
        seen.add(type(packet))
        accepted = isinstance(packet, SslRequest) and tls
        await loop.sock_sendall(sock, ACCEPTED if accepted else DECLINED)
        if accepted:
            return await _hello(sock)
        found = await _next_packet(sock)
        if not isinstance(found, tuple):
            return found
        data, packet = found


async def _next_packet(sock: socket.socket) -> tuple[bytes, Packet] | Refused | None:
    loop = asyncio.get_running_loop()
    data = b""
    while part := await loop.sock_recv(sock, _READ):
        data += part
        verdict = read_packet(data)
        if isinstance(verdict, NotPostgres):
            return None
        if isinstance(verdict, Refused):
            return verdict
        if isinstance(verdict, SslRequest | GssRequest | CancelRequest | Startup):
            return data, verdict
    return None


async def _hello(sock: socket.socket) -> Prelude:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) <= MAX_HELLO and (part := await loop.sock_recv(sock, _READ)):
        data += part
        verdict = read_hello(data)
        if isinstance(verdict, NotTls):
            return None
        if not isinstance(verdict, NeedMore):
            return verdict, data
    return None
