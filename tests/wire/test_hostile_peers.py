"""A hostile peer loses only its own connection. It blocks no event loop and uses bounded memory."""

import asyncio
import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from wire import (
    NARROW,
    WHOLE,
    Client,
    Code,
    FrameError,
    FrameLimits,
    RemoteError,
    RequestError,
    bind_unix,
    descriptors,
    frames,
    limits,
    serve_unix,
)
from wire.frames import Message, close_all, encode

_HEADER = struct.Struct("!I")
PATIENCE = 20.0


def raw(body: bytes) -> bytes:
    return _HEADER.pack(len(body)) + body


class Lingering:
    """A descriptor whose last close blocks until its far end reads, or for fifteen minutes."""

    def __init__(self) -> None:
        self.blocked = False
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sock = socket.create_connection(listener.getsockname())
            self._far, _ = listener.accept()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 900))
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(bytes(1 << 20))
        self._sock = sock
        self._timer = threading.Timer(PATIENCE, self._give_up)
        self._timer.start()

    def _give_up(self) -> None:
        self.blocked = True
        self._far.close()

    def passed(self, peer: socket.socket, data: bytes, *, nested: bool = False) -> bool:
        """Send `data` with the descriptor, and close it here. Return False if the kernel refused."""
        sent = self._sock
        if nested:
            one, sent = socket.socketpair()
            socket.send_fds(one, [b"x"], [self._sock.fileno()])
            one.close()
            self._sock.close()
        try:
            socket.send_fds(peer, [data], [sent.fileno()])
        except PermissionError:
            self._far.close()
            peer.sendall(data)
            return False
        finally:
            self._keep = sent if sent is not self._sock else None
            sent.close()
        return True

    def end(self) -> None:
        self._timer.cancel()
        self._far.close()


@pytest.fixture(name="lingering")
def _lingering() -> Iterator[Lingering]:
    made = Lingering()
    yield made
    made.end()


@pytest.fixture(name="kernel", params=["refuses", "passes"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a kind of kernel: one that can refuse descriptors for a socket, or an older one that cannot."""
    if request.param == "passes":
        monkeypatch.setattr(descriptors, "_SO_PASSRIGHTS", 9999)
    return str(request.param)


class Served:
    """A server with a hostile peer, which sends through `raw`, and an honest one."""

    def __init__(self, takes: FrameLimits = NARROW) -> None:
        self.handled: list[Message] = []
        self.answer: Message = {}
        self.hold = asyncio.Event()
        self.hold.set()
        self.peer, far = socket.socketpair()
        self.server = Client(far, self._handle, takes=takes)
        near, other = socket.socketpair()
        self.honest, self._honest_server = Client(near), Client(other, self._handle)
        for client in (self.server, self.honest, self._honest_server):
            client.start()

    async def _handle(self, _client: Client, op: str, parameters: Message, fds: list[int]) -> Message:
        close_all(fds)
        if op == "fail":
            raise RequestError(Code.INVALID, "no")
        if op == "count":
            self.handled.append(parameters)
            await self.hold.wait()
        return self.answer if op == "count" else {}

    async def ended(self) -> None:
        """Wait until the peer's connection has ended."""
        async with asyncio.timeout(PATIENCE):
            await self.server.closed.wait()

    async def until(self, count: int) -> None:
        """Wait until `count` requests of the peer were begun."""
        async with asyncio.timeout(PATIENCE):
            while len(self.handled) < count:
                await self.honest.call("ping")

    async def close(self) -> None:
        self.peer.close()
        for client in (self.server, self.honest, self._honest_server):
            await client.close()


@pytest.fixture(name="served")
async def _served() -> AsyncIterator[Served]:
    served = Served()
    yield served
    await served.close()


PLACES: dict[str, Callable[[Lingering, socket.socket], object]] = {
    "beside a frame": lambda item, peer: item.passed(peer, encode({"op": "ping"})),
    "inside a frame": lambda item, peer: (peer.sendall(raw(b"{}")[:5]), item.passed(peer, b"}")),
    "inside another socket": lambda item, peer: item.passed(peer, encode({"op": "ping"}), nested=True),
    "behind what ends the connection": lambda item, peer: (peer.sendall(raw(b"[]")), item.passed(peer, b"x")),
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_descriptor_with_a_blocking_close_delays_no_caller(
    kernel: str, place: str, lingering: Lingering
) -> None:
    """It is refused, or closed elsewhere. A peer that passes a descriptor to this process loses the connection."""
    served = Served()
    PLACES[place](lingering, served.peer)
    if kernel == "passes" or place in ("inside a frame", "behind what ends the connection"):
        await served.ended()
    assert {} == await served.honest.call("ping")
    await served.close()
    assert not lingering.blocked


async def test_a_listener_is_passed_no_descriptors_but_by_those_that_may(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    taken: list[int] = []

    async def handle(_client: Client, op: str, _parameters: Message, fds: list[int]) -> Message:
        taken.append(len(fds))
        close_all(fds)
        return {}

    own = frozenset({os.geteuid()})
    for trusted, expected in ((frozenset(), []), (own, [0, 1])):
        taken.clear()
        server = await serve_unix(bind_unix("s"), handle, allowed_uids=own, descriptors_from=frozenset(trusted))
        client = await Client.connect("s", os.geteuid())
        with contextlib.suppress(ConnectionError):
            await client.call("take", [0])
        assert expected == taken[: len(expected)] and sum(expected) == sum(taken)
        await client.close()
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


@pytest.mark.parametrize("takes", [NARROW, WHOLE])
@pytest.mark.parametrize("unit", [b"[]", b"{}", b'{"a":1}', b"0"])
async def test_a_frame_of_small_parts_is_refused_before_it_is_parsed(
    takes: FrameLimits, unit: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    monkeypatch.setattr("wire.rpc.decode", lambda body: parsed.append(len(body)) or frames.decode(body))
    served = Served(takes)
    body = b'{"op":"count","x":[' + b",".join([unit] * ((takes.frame - 100) // (len(unit) + 1))) + b"]}"
    sending = asyncio.get_running_loop().run_in_executor(None, _send_all, served.peer, raw(body))
    await served.ended()
    await sending
    assert ([], []) == (parsed, served.handled)
    assert {} == await served.honest.call("ping")
    await served.close()


def _send_all(peer: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        peer.sendall(data)


@pytest.mark.parametrize(
    "body",
    [
        {"text": ",:[{" * 20000},
        {"texts": ['say "[{"' * 50, "\\" * 99, 'a\\"'] * 100},
        {"records": [{"kind": "request", "fields": {"path": "/,/:[{" * 300, "host": "é" * 200}}] * 60},
    ],
)
def test_what_only_looks_like_parts_counts_as_the_text_it_is(body: Message) -> None:
    """A sandbox chooses the paths that its worker reports to auditd."""
    assert body == frames.decode(encode(body, NARROW)[4:])


async def test_requests_whose_answers_are_not_read_are_bounded_in_memory() -> None:
    """The peer can send a bounded number until it reads. Then all requests are answered."""
    served = Served()
    body = json.dumps({"id": 1, "op": "count", "x": "x" * (NARROW.frame // 2)}).encode()
    served.hold.clear()
    total = 40

    def flood() -> None:
        for _ in range(total):
            _send_all(served.peer, raw(body))

    sending = asyncio.get_running_loop().run_in_executor(None, flood)
    most = NARROW.memory // limits.cost(body)
    await served.until(most)
    for _ in range(200):  # turns of the loop in which a connection without a limit would have read more
        await served.honest.call("ping")
    assert most == len(served.handled)
    served.hold.set()
    await sending
    await served.until(total)
    await served.close()


async def test_a_peer_that_reads_no_answers_is_no_longer_read() -> None:
    served = Served()
    served.answer = {"x": "x" * 100_000}
    sending = asyncio.get_running_loop().run_in_executor(
        None, _send_all, served.peer, raw(b'{"id":1,"op":"count"}') * 2000
    )
    await served.until(NARROW.requests)
    for _ in range(200):
        await served.honest.call("ping")
    assert len(served.handled) <= NARROW.requests + 8  # and those whose answers are in the socket
    await served.close()
    await sending


async def test_a_peer_that_takes_nothing_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "SEND_SECONDS", 0.05)
    served = Served()
    with pytest.raises(ConnectionError):
        await served.server.call("ask", x="x" * 1_000_000)
    assert served.server.closed.is_set()
    await served.close()


@pytest.mark.parametrize(
    "body",
    [
        b'{"id":1,"ok":{}}',
        b'{"id":99,"error":{}}',
        b'{"id":true,"ok":{}}',
        b'{"id":[],"ok":{}}',
        b'{"ok":{}}',
        b"{}",
        b'{"id":1,"ok":[]}',
        b'{"id":1,"ok":{},"error":{}}',
        b'{"op":[]}',
        b'{"op":"%s"}' % (b"x" * 65),
        b'{"op":"ping","id":"1"}',
        b'{"op":"ping","id":1.5}',
        b'{"op":"ping","id":true}',
        b"[" * 100000,
        b"nonsense",
        b"",
    ],
)
async def test_what_is_neither_a_request_nor_an_answer_that_is_due_ends_the_connection(
    served: Served, body: bytes
) -> None:
    served.peer.sendall(raw(body))
    await served.ended()
    assert {} == await served.honest.call("ping")


async def test_the_answer_to_a_call_that_was_given_up_may_come_late_and_once(served: Served) -> None:
    with pytest.raises(TimeoutError):
        await served.server.call("ask", timeout=0.01)
    served.peer.sendall(raw(b'{"id":1,"ok":{}}') + raw(b'{"id":7,"op":"ping"}'))
    loop = asyncio.get_running_loop()
    served.peer.setblocking(False)
    await loop.sock_recv(served.peer, 65536)
    assert b'{"id":7,"ok":{}}' in await loop.sock_recv(served.peer, 65536)
    assert not served.server.closed.is_set()
    served.peer.sendall(raw(b'{"id":1,"ok":{}}'))
    await served.ended()


async def test_a_peer_that_answers_nothing_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.rpc.MOST_ABANDONED", 5)
    for _ in range(5):
        with pytest.raises(TimeoutError):
            await served.server.call("ask", timeout=0.01)
    with pytest.raises(ConnectionError):
        await served.server.call("ask")
    assert served.server.closed.is_set()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"code": "busy", "message": "wait"}, ("busy", "wait")),
        ({"code": "x" * 65, "message": "y" * 1_000_00}, ("malformed", "y" * 2000)),
        ({"code": ["busy"], "message": {"a": 1}}, ("malformed", "")),
        ({"code": "no_such\n", "message": "a\x1b[2Jb\u202ec"}, ("malformed", "a [2Jb c")),
        ({}, ("malformed", "")),
    ],
)
async def test_codes_and_messages_of_a_peer_are_bounded(served: Served, error: Any, expected: tuple[str, str]) -> None:
    call = asyncio.ensure_future(served.server.call("ask"))
    served.peer.sendall(raw(json.dumps({"id": 1, "error": error}).encode()))
    with pytest.raises(RemoteError) as refused:
        await call
    assert expected == (refused.value.code, refused.value.message)


async def test_a_sender_learns_what_the_other_end_refused() -> None:
    near, far = socket.socketpair()
    client, server = Client(near, gives=NARROW), Client(far, takes=NARROW)
    client.start()
    server.start()
    with pytest.raises(FrameError):
        await client.call("ask", x="x" * (NARROW.frame + 1))
    with pytest.raises(FrameError):
        await client.call("ask", x=[[]] * 100_000)
    assert not client.closed.is_set()
    await client.close()
    await server.close()


async def test_a_flood_gets_its_turns_and_no_more(served: Served) -> None:
    """The peer writes as fast as possible while another peer's calls are answered one after the other."""
    stop = threading.Event()
    late = threading.Timer(PATIENCE, stop.set)
    late.start()

    def flood() -> None:
        frame = raw(b'{"op":"ping"}') * 1000
        while not stop.is_set():
            _send_all(served.peer, frame)

    flooding = asyncio.get_running_loop().run_in_executor(None, flood)
    for _ in range(100):
        await served.honest.call("ping")
    assert not stop.is_set()
    stop.set()
    late.cancel()
    await flooding
