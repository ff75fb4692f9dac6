"""Forwarding of a request's body to a sandbox: in few writes, complete, and without a wait for its end."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from lifecycle.proxy.exchange import Connection

PIECES = [b"%02d" % index for index in range(12)]
HEADERS = [(b"host", b"localhost"), (b"transfer-encoding", b"chunked")]


def _pair(kind: socket.SocketKind) -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


@pytest.fixture
def messages() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a socket pair on which each write is one read."""
    yield from _pair(socket.SOCK_SEQPACKET)


@pytest.fixture
def stream() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a pair of stream sockets."""
    yield from _pair(socket.SOCK_STREAM)


async def _receive(sock: socket.socket) -> bytes:
    async with asyncio.timeout(30):
        return await asyncio.get_running_loop().sock_recv(sock, 1 << 20)


async def test_small_pieces_go_on_in_one(messages: tuple[socket.socket, socket.socket]) -> None:
    """Head, a dozen chunks and the end of the body are one write."""
    ours, theirs = messages

    async def body() -> AsyncIterator[bytes]:
        for piece in PIECES:
            yield piece

    await Connection(ours).request("POST", b"/", HEADERS, body())

    received = await _receive(theirs)
    assert received.startswith(b"POST / HTTP/1.1\r\n")
    assert received.endswith(b"".join(b"2\r\n%s\r\n" % piece for piece in PIECES) + b"0\r\n\r\n")


async def test_a_piece_does_not_wait_for_the_next(messages: tuple[socket.socket, socket.socket]) -> None:
    """A client can wait for the effect of a piece before it sends the next one."""
    ours, theirs = messages
    seen = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"one"
        await seen.wait()
        yield b"two"

    request = asyncio.create_task(Connection(ours).request("POST", b"/", HEADERS, body()))
    assert (await _receive(theirs)).endswith(b"3\r\none\r\n")
    seen.set()
    await request
    assert b"3\r\ntwo\r\n0\r\n\r\n" == await _receive(theirs)


async def test_what_the_kernel_does_not_take_follows_in_order(stream: tuple[socket.socket, socket.socket]) -> None:
    """The sandbox reads late, and the socket buffers hold less than one piece."""
    ours, theirs = stream
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    piece, seen = bytes(range(256)) * 200, asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield piece
        await seen.wait()
        yield b"two"

    request = asyncio.create_task(Connection(ours).request("POST", b"/", HEADERS, body()))
    received = b""
    while not received.endswith(b"\r\nc800\r\n%s\r\n" % piece):
        received += await _receive(theirs)
    seen.set()
    await request
    assert b"3\r\ntwo\r\n0\r\n\r\n" == await _receive(theirs)


async def test_a_closed_connection_waits_for_nothing(stream: tuple[socket.socket, socket.socket]) -> None:
    """Because another connection can get its descriptor."""
    ours, theirs = stream
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    descriptor = ours.fileno()

    async def body() -> AsyncIterator[bytes]:
        yield bytes(60_000)
        await asyncio.Event().wait()

    connection = Connection(ours)
    request = asyncio.create_task(connection.request("POST", b"/", HEADERS, body()))
    await _receive(theirs)  # a part was sent, and the rest waits
    connection.close()
    assert not asyncio.get_running_loop().remove_writer(descriptor)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
