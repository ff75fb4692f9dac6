"""A sandbox's answer in very many small pieces takes time from that sandbox's callers only."""

import asyncio
import base64
import hashlib
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from lifecycle.proxy.exchange import MAX_INTERIM, BrokenExchangeError, Connection
from lifecycle.proxy.server import _handshake, _to_downstream

INTERIM = b"HTTP/1.1 100 \r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECES = 900
MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return the server's and the sandbox's end of a connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


class Others:
    """A counter of the turns of another task of the loop."""

    def __init__(self) -> None:
        self.turns = 0

    async def run(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)


@pytest.fixture
async def others() -> Others:
    """Return a counter whose task is always ready to run."""
    return Others()


async def _requested(ours: socket.socket, turns: asyncio.Lock | None = None) -> Connection:
    connection = Connection(ours, turns)
    await connection.request("GET", b"/", [(b"host", b"localhost")], None)
    return connection


async def test_small_pieces_leave_others_their_turns(ends: tuple[socket.socket, socket.socket], others: Others) -> None:
    """All pieces are available at once, but the server does not read all of them in one turn. No byte is lost."""
    ours, theirs = ends
    connection = await _requested(ours)
    theirs.send(INTERIM * PIECES + HEAD + b"1\r\na\r\n" * PIECES + b"0\r\n\r\n")
    running = asyncio.create_task(others.run())
    assert 200 == (await connection.response()).status_code
    at_head = others.turns
    body = b"".join([chunk async for chunk in connection.chunks()])
    running.cancel()
    assert b"a" * PIECES == body
    assert at_head >= PIECES // 20
    assert others.turns - at_head >= PIECES // 20
    assert connection.reusable


async def test_small_pieces_before_a_fault_are_given(ends: tuple[socket.socket, socket.socket]) -> None:
    """The client receives the part of an answer before the fault."""
    ours, theirs = ends
    connection = await _requested(ours)
    theirs.send(HEAD + b"1\r\na\r\n" * 5 + b"nonsense\r\n")
    await connection.response()
    body = b""
    with pytest.raises(BrokenExchangeError):
        async for chunk in connection.chunks():
            body += chunk
    assert b"aaaaa" == body


async def test_many_floods_have_one_turn_at_a_time(others: Others) -> None:
    """Other tasks have about as many turns as all sixteen bursts together, not one turn for sixteen bursts."""
    pairs = [socket.socketpair() for _ in range(16)]
    turns = asyncio.Lock()
    try:
        connections = []
        for ours, theirs in pairs:
            ours.setblocking(False)
            connections.append(await _requested(ours, turns))
            theirs.send(INTERIM * PIECES + b"HTTP/1.1 204 \r\n\r\n")
        running = asyncio.create_task(others.run())
        await asyncio.gather(*(connection.response() for connection in connections))
        running.cancel()
        assert others.turns >= len(pairs) * PIECES // 20
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


async def test_heads_before_an_answer_are_bounded(ends: tuple[socket.socket, socket.socket]) -> None:
    """A server that sends only interim responses causes an error."""
    ours, theirs = ends
    connection = await _requested(ours)
    theirs.send(INTERIM * MAX_INTERIM)
    with pytest.raises(BrokenExchangeError):
        await asyncio.wait_for(connection.response(), 30)


@pytest.mark.parametrize("frame", [b"\x81\x00", b"\x8a\x00"], ids=["messages", "pongs"])
async def test_small_frames_leave_others_their_turns(
    ends: tuple[socket.socket, socket.socket], others: Others, frame: bytes
) -> None:
    """WebSocket frames are parsed a few kilobytes at a time, and messages are relayed a few at a time."""
    ours, theirs = ends
    sent: list[object] = []
    last = asyncio.Event()

    async def send(message: object) -> None:
        sent.append(message)
        if message == {"type": "websocket.send", "text": "z"}:
            last.set()

    handshake = asyncio.create_task(_handshake(ours, "ws://localhost:1/", [], None, []))
    await _accept(theirs)
    upstream = await handshake
    frames = 30_000
    flood = asyncio.create_task(asyncio.get_running_loop().sock_sendall(theirs, frame * frames + b"\x81\x01z"))
    running = asyncio.create_task(others.run())
    relay = asyncio.create_task(_to_downstream(upstream, send, asyncio.Lock()))
    async with asyncio.timeout(60):
        await last.wait()
    assert (frames if frame[0] == 0x81 else 0) + 1 == len(sent)
    # one turn for each 4 KiB of frames, or for each 16 messages
    assert others.turns >= frames // (20 if frame[0] == 0x81 else 2048)
    await flood
    for task in (relay, running):
        task.cancel()
    with suppress(asyncio.CancelledError):
        await relay
    theirs.close()
    await upstream.close()


async def _accept(theirs: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    head = b""
    while b"\r\n\r\n" not in head:
        head += await loop.sock_recv(theirs, 65536)
    key = next(line.split(b": ", 1)[1] for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key"))
    accept = base64.b64encode(hashlib.sha1(key + MAGIC, usedforsecurity=False).digest())
    lines = [b"HTTP/1.1 101 ", b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Accept: " + accept]
    await loop.sock_sendall(theirs, b"\r\n".join(lines) + b"\r\n\r\n")
