"""Long-lived and bidirectional traffic of honest peers: no stream waits for another one, and none is truncated.

It tests `gateway/engines/http1/flow.py`, `gateway/engines/buffered.py` and `gateway/engines/mitm/layers.py`.
"""

import asyncio
import contextlib
import fcntl
import gc
import os
import socket
import ssl
import struct
import termios
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import pytest
from hyperframe.frame import GoAwayFrame, RstStreamFrame
from mitmproxy.proxy.layer import Layer

from gateway.engines.mitm import http2
from gateway.engines.mitm.http2 import MAX_RESETS, WINDOW, StrictHttp2Client, StrictHttp2Server
from gateway.engines.port import EngineLimits
from policy.decision import AllowRequest, Deny
from policy.facts import Scheme

from .conftest import Rig, only

pytestmark = pytest.mark.slow

GET = [(":method", "GET"), (":scheme", "https"), (":authority", "good.test"), (":path", "/open/x")]
POST = [(":method", "POST"), *GET[1:]]
ANSWER = [(":status", "200"), ("content-type", "application/grpc")]

type OnEvent = Callable[["Server", h2.events.Event], Awaitable[None]]


def layers_in_memory() -> int:
    gc.collect()
    return sum(isinstance(one, Layer) for one in gc.get_objects())


@dataclass
class Server:
    """An HTTP/2 server that calls `on_event` for each event."""

    on_event: OnEvent
    state: h2.connection.H2Connection = field(init=False)
    writer: asyncio.StreamWriter = field(init=False)
    connections: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.writer = writer
        connection = self.state
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        try:
            while data := await reader.read(65536):
                for event in connection.receive_data(data):
                    await self.on_event(self, event)
                writer.write(connection.data_to_send())
                await writer.drain()
        except (OSError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def pour(self, stream: int, total: int) -> None:
        """Send `total` bytes as the windows permit."""
        while total:
            count = min(total, self.state.local_flow_control_window(stream), self.state.max_outbound_frame_size)
            if count:
                self.state.send_data(stream, bytes(count))
                total -= count
                self.writer.write(self.state.data_to_send())
                await self.writer.drain()
            await asyncio.sleep(0 if count else 0.01)
        self.state.end_stream(stream)
        self.writer.write(self.state.data_to_send())


class Caller:
    """An HTTP/2 client that stores the events it received."""

    def __init__(self, ends: tuple[asyncio.StreamReader, asyncio.StreamWriter, h2.connection.H2Connection]) -> None:
        self._reader, self._writer, self.state = ends
        self.heard: list[h2.events.Event] = []
        self.deaf: set[int] = set()
        """Streams whose data is not acknowledged."""
        self.pings = False
        """Whether the client sends a PING for each piece of data, as gRPC does."""

    def call(self, stream: int, headers: list[tuple[str, str]] = GET, *, ends: bool = True) -> None:
        self.state.send_headers(stream, headers, end_stream=ends)
        self.flush()

    def flush(self) -> None:
        self._writer.write(self.state.data_to_send())

    async def drain(self) -> None:
        self.flush()
        await self._writer.drain()

    async def hear(self, kind: type[h2.events.Event], stream: int, seconds: float = 20) -> None:
        """Read until an event of `kind` has arrived for `stream`."""
        async with asyncio.timeout(seconds):
            while not any(isinstance(one, kind) and getattr(one, "stream_id", 0) == stream for one in self.heard):
                data = await self._reader.read(65536)
                assert data, f"the connection ended after {self.heard[-1:]}"
                for event in self.state.receive_data(data):
                    self.heard.append(event)
                    if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.deaf:
                        self.state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                        if self.pings:
                            self.state.ping(b"estimate")
                self.flush()

    def body(self, stream: int) -> bytes:
        data = [one for one in self.heard if isinstance(one, h2.events.DataReceived) and one.stream_id == stream]
        return b"".join(one.data for one in data)

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
def over_h2(lab, upstream_root):
    """Return a function that makes a running rig with the given server."""

    def make(server):
        context = lab.tls(upstream_root.leaf("good.test"))
        context.set_alpn_protocols(["h2"])
        running = lab.running(context)
        running.rig.upstream.serve = server.serve
        running.rig.bound = False
        return running

    return make


async def test_a_stream_that_is_not_read_delays_no_other(over_h2):
    async def on_event(server: Server, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            server.state.send_headers(event.stream_id, ANSWER)
            if event.stream_id == 1:
                server.tasks.append(asyncio.create_task(server.pour(1, 16 * WINDOW)))
            else:
                server.state.send_data(event.stream_id, b"quick", end_stream=True)

    server = Server(on_event)
    async with over_h2(server) as rig:
        caller = Caller(await rig.speak_h2())
        caller.state.increment_flow_control_window(64 * WINDOW)
        caller.deaf.add(1)
        caller.call(1)
        with pytest.raises(TimeoutError):
            await caller.hear(h2.events.StreamEnded, 1, seconds=1)
        assert 0 == server.state.local_flow_control_window(1)
        caller.call(3)
        await caller.hear(h2.events.StreamEnded, 3)
        assert b"quick" == caller.body(3)

        caller.deaf.clear()
        caller.state.acknowledge_received_data(len(caller.body(1)), 1)
        caller.flush()
        await caller.hear(h2.events.StreamEnded, 1)
        assert 16 * WINDOW == len(caller.body(1))
        caller.close()


async def test_what_a_server_does_not_take_stays_with_the_client(over_h2):
    async def on_event(server: Server, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            server.state.increment_flow_control_window(4 * WINDOW)
            server.state.send_headers(event.stream_id, ANSWER)
        if isinstance(event, h2.events.DataReceived) and event.stream_id != 1:
            server.state.send_data(event.stream_id, event.data, end_stream=True)

    async with over_h2(Server(on_event)) as rig:
        caller = Caller(await rig.speak_h2())
        caller.call(1, POST, ends=False)
        await caller.hear(h2.events.ResponseReceived, 1)
        sent = 0
        while count := min(16384, caller.state.local_flow_control_window(1)):
            caller.state.send_data(1, bytes(count))
            sent += count
            await caller.drain()
            with pytest.raises(TimeoutError):
                await caller.hear(h2.events.StreamEnded, 1, seconds=0.02)
        assert sent <= 2 * WINDOW

        caller.call(3, POST, ends=False)
        caller.state.send_data(3, b"quick")
        caller.flush()
        await caller.hear(h2.events.StreamEnded, 3)
        assert b"quick" == caller.body(3)
        caller.close()


@pytest.mark.parametrize("last", ["all of them", "one of them"])
async def test_a_server_that_goes_away_still_ends_what_it_has_begun(last, over_h2):
    async def rest(server: Server, connection: h2.connection.H2Connection, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.3)
        connection.send_data(1, b"second")
        connection.send_headers(1, [("grpc-status", "0")], end_stream=True)
        writer.write(connection.data_to_send())

    async def on_event(server: Server, event: h2.events.Event) -> None:
        if not isinstance(event, h2.events.RequestReceived):
            return
        if server.connections > 1:
            server.state.send_headers(event.stream_id, ANSWER, end_stream=True)
        elif event.stream_id == 1:
            server.state.send_headers(1, ANSWER)
            server.state.send_data(1, b"first, ")
        else:
            if last == "all of them":
                server.state.send_headers(event.stream_id, ANSWER, end_stream=True)
            server.writer.write(server.state.data_to_send())
            ends = 1 if last == "one of them" else event.stream_id
            server.writer.write(GoAwayFrame(0, last_stream_id=ends, error_code=0).serialize())
            server.tasks.append(asyncio.create_task(rest(server, server.state, server.writer)))

    server = Server(on_event)
    async with over_h2(server) as rig:
        caller = Caller(await rig.speak_h2())
        caller.call(1)
        await caller.hear(h2.events.DataReceived, 1)
        caller.call(3)
        await caller.hear(h2.events.StreamEnded, 3)
        caller.call(5)
        await caller.hear(h2.events.StreamEnded, 5)
        await caller.hear(h2.events.TrailersReceived, 1)
        answers = {
            one.stream_id: only(one.headers, b":status")
            for one in caller.heard
            if isinstance(one, h2.events.ResponseReceived)
        }
        caller.close()

    assert b"first, second" == caller.body(1)
    assert {1: b"200", 3: b"502" if last == "one of them" else b"200", 5: b"200"} == answers
    assert 2 == server.connections


@pytest.mark.parametrize("ends", ["data", "trailers"])
async def test_an_answer_ends_before_its_request_does_and_leaving_it_frees_the_server(ends, over_h2):
    left = asyncio.Event()

    async def on_event(server: Server, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            server.state.send_headers(event.stream_id, ANSWER)
            server.state.send_data(event.stream_id, b"no more, please", end_stream=ends == "data")
            if ends == "trailers":
                server.state.send_headers(event.stream_id, [("grpc-status", "3")], end_stream=True)
        if isinstance(event, h2.events.StreamReset):
            left.set()

    async with over_h2(Server(on_event)) as rig:
        caller = Caller(await rig.speak_h2())
        caller.call(1, POST, ends=False)
        await caller.hear(h2.events.StreamEnded, 1)
        assert b"no more, please" == caller.body(1)
        caller.state.reset_stream(1, 8)
        caller.flush()
        async with asyncio.timeout(10):
            await left.wait()
        caller.close()


async def test_a_client_that_goes_away_still_gets_its_answer(over_h2):
    async def on_event(server: Server, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            await asyncio.sleep(0.3)
            server.state.send_headers(event.stream_id, ANSWER, end_stream=True)

    async with over_h2(Server(on_event)) as rig:
        caller = Caller(await rig.speak_h2())
        caller.call(1)
        caller._writer.write(GoAwayFrame(0, last_stream_id=0, error_code=0).serialize())
        await caller.hear(h2.events.StreamEnded, 1)
        caller.close()


async def test_a_client_may_leave_as_many_answered_streams_as_it_likes(over_h2):
    left: list[int] = []

    async def on_event(server: Server, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            server.state.send_headers(event.stream_id, ANSWER)
            server.state.send_data(event.stream_id, b"first of many")
        if isinstance(event, h2.events.StreamReset):
            left.append(event.stream_id)

    async with over_h2(Server(on_event)) as rig:
        caller = Caller(await rig.speak_h2())
        for stream in range(1, 2 * (2 * MAX_RESETS), 2):
            caller.call(stream)
            await caller.hear(h2.events.DataReceived, stream)
            caller.state.reset_stream(stream, 8)
        caller.call(2 * (2 * MAX_RESETS) + 1)
        await caller.hear(h2.events.DataReceived, 2 * (2 * MAX_RESETS) + 1)
        assert 2 * MAX_RESETS == len(left)
        caller.close()


async def test_a_client_may_not_leave_that_many_before_they_are_answered(over_h2):
    async def on_event(server: Server, event: h2.events.Event) -> None:
        """Answer nothing."""

    async with over_h2(Server(on_event)) as rig:
        caller = Caller(await rig.speak_h2())
        with pytest.raises(AssertionError, match="the connection ended"):
            for stream in range(1, 4 * MAX_RESETS, 2):
                caller.call(stream)
                caller._writer.write(RstStreamFrame(stream, error_code=8).serialize())
            await caller.hear(h2.events.ConnectionTerminated, 0)
            await caller.hear(h2.events.ResponseReceived, 1)
        caller.close()


async def test_a_ping_for_each_message_is_no_flood(over_h2):
    messages = 3000

    async def stream(server: Server) -> None:
        for number in range(messages):
            server.state.send_data(1, b"message")
            server.writer.write(server.state.data_to_send())
            if number % 3 == 0:
                await asyncio.sleep(0.001)
        server.state.end_stream(1)
        server.writer.write(server.state.data_to_send())

    async def on_event(server: Server, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            server.state.send_headers(1, ANSWER)
            server.tasks.append(asyncio.create_task(stream(server)))

    async with over_h2(Server(on_event)) as rig:
        caller = Caller(await rig.speak_h2())
        caller.pings = True
        caller.call(1)
        await caller.hear(h2.events.StreamEnded, 1)
        assert messages * len(b"message") == len(caller.body(1))
        caller.close()


async def test_an_upload_waits_where_it_is_until_there_is_a_connection_for_it(rig: Rig):
    rig.upstream.keep = False
    dial, ready = rig.dial, asyncio.Event()

    async def later(
        host: str, port: int, scheme: Scheme, flow: Mapping[str, object]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        await ready.wait()
        return await dial(host, port, scheme, flow)

    rig.dial = later  # type: ignore[method-assign]
    total, sent = 64 << 20, 0
    reader, writer = await rig.connect()
    writer.write(b"POST /open/x HTTP/1.1\r\nHost: good.test\r\nContent-Length: %d\r\n\r\n" % total)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2):
            while sent < total:
                writer.write(bytes(1 << 18))
                sent += 1 << 18
                await writer.drain()
    assert sent < total // 2
    ready.set()
    while sent < total:
        writer.write(bytes(1 << 18))
        sent += 1 << 18
        await writer.drain()
    answer = await reader.read(100)
    writer.close()

    assert answer.startswith(b"HTTP/1.1 200")
    assert [total] == rig.upstream.bodies


async def test_a_client_that_sends_all_before_it_reads_is_not_kept_from_sending(lab, upstream_root):
    total = 32 << 20

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def answer() -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
            for _ in range(total >> 16):
                writer.write(bytes(1 << 16))
                await writer.drain()

        await reader.readuntil(b"\r\n\r\n")
        async with asyncio.TaskGroup() as group:
            group.create_task(answer())
            left = total
            while left:
                left -= len(await reader.read(left))
        writer.close()

    running = lab.running(lab.tls(upstream_root.leaf("good.test")))
    running.rig.upstream.serve = serve
    async with running as rig:
        reader, writer = await rig.connect()
        writer.write(b"POST /open/x HTTP/1.1\r\nHost: good.test\r\nContent-Length: %d\r\n\r\n" % total)
        async with asyncio.timeout(30):
            for _ in range(total >> 16):
                writer.write(bytes(1 << 16))
                await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(total)
        writer.close()
    assert head.startswith(b"HTTP/1.1 200")


async def test_a_client_that_got_100_continue_learns_that_the_server_is_down(rig: Rig):
    async def dial(
        host: str, port: int, scheme: Scheme, flow: Mapping[str, object]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        raise ConnectionError

    rig.dial = dial  # type: ignore[method-assign]
    head = b"POST /open/x HTTP/1.1\r\nHost: good.test\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    answer = await rig.exchange(head)

    assert [b"HTTP/1.1 100 Continue", b"HTTP/1.1 502 Bad Gateway"] == [
        line for line in answer.split(b"\r\n") if line.startswith(b"HTTP/")
    ]


@pytest.mark.parametrize("who", ["policy", "a server that reads on", "a server that says it has ended"])
async def test_a_client_that_sends_all_before_it_reads_gets_an_early_answer(who, lab):
    size = 8 << 20

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        ends = who == "a server that says it has ended"
        close = b"Connection: close\r\n" if ends else b""
        writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n" + close + b"\r\nno")
        await writer.drain()
        if ends:
            writer.write_eof()
        while await reader.read(65536):
            pass
        writer.close()

    running = lab.running(None, scheme=Scheme.HTTP)
    running.rig.upstream.serve = serve
    async with running as rig:
        rig.decide = lambda facts: Deny("r", "no") if facts.path == "/denied" else AllowRequest("r")
        reader, writer = await rig.connect()
        path = b"/denied" if who == "policy" else b"/open"
        writer.write(b"POST %s HTTP/1.1\r\nHost: good.test\r\nContent-Length: %d\r\n\r\n" % (path, size))
        async with asyncio.timeout(30):
            for _ in range(size >> 16):
                writer.write(bytes(1 << 16))
                await writer.drain()
            answer = await reader.readuntil(b"\r\n")
            assert answer.startswith(b"HTTP/1.1 403 " if who == "policy" else b"HTTP/1.1 413 ")
        writer.close()


async def test_the_name_of_a_transfer_coding_has_no_case(rig: Rig):
    async def reply(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")

    rig.upstream.reply = reply
    answer = await rig.exchange(b"GET /open/x HTTP/1.1\r\nHost: good.test\r\n\r\n")

    assert answer.endswith(b"\r\n\r\n2\r\nok\r\n0\r\n\r\n")


@pytest.mark.parametrize("broken", [False, True])
async def test_a_response_that_was_cut_off_is_not_taken_for_a_whole_one(broken: bool, rig: Rig):
    async def reply(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nas far as it goes")
        await writer.drain()
        await asyncio.sleep(0.3)
        if broken:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()

    rig.upstream.reply = reply
    reader, writer = await rig.connect()
    writer.write(b"GET /open/x HTTP/1.1\r\nHost: good.test\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    if broken:
        with pytest.raises(ConnectionResetError):
            await reader.read()
    else:
        assert b"as far as it goes" == await reader.read()
    writer.close()


async def test_a_long_connection_does_not_remember_each_one_behind_it(rig: Rig):
    async def reply(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    rig.upstream.reply = reply
    caller = Caller(await rig.speak_h2())
    counts = []
    for stream in range(1, 120, 2):
        caller.call(stream)
        await caller.hear(h2.events.StreamEnded, stream)
        if stream in (19, 119):  # the count examines all objects of the process
            counts.append(layers_in_memory())
    caller.close()

    assert 60 == rig.dials
    assert counts[1] <= counts[0] + 10


def streams_in_memory() -> int:
    kept = [vars(one) for one in gc.get_objects() if isinstance(one, StrictHttp2Server | StrictHttp2Client)]
    return sum(
        len(one.get(name, ())) for one in kept for name in ("streams", "_answered", "our_stream_id", "their_stream_id")
    )


async def test_a_long_connection_does_not_remember_its_streams(over_h2, monkeypatch):
    """A long stream is not affected meanwhile. Data for an ended stream reaches no other stream."""
    monkeypatch.setattr(http2, "REMEMBERED", 8)
    monkeypatch.setattr(StrictHttp2Server, "_remembered", 8)
    monkeypatch.setattr(StrictHttp2Client, "_remembered", 8)
    bodies: dict[int, bytearray] = {}

    async def on_event(server: Server, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            bodies[event.stream_id] = bytearray()
            if len(bodies) == 2:
                server.state.send_headers(event.stream_id, ANSWER, end_stream=True)
                server.state.reset_stream(event.stream_id, 0)
        if isinstance(event, h2.events.DataReceived):
            bodies[event.stream_id] += event.data
        if isinstance(event, h2.events.StreamEnded):
            server.state.send_headers(event.stream_id, ANSWER)
            server.state.send_data(event.stream_id, bytes(bodies[event.stream_id]) or b"ok", end_stream=True)

    async with over_h2(Server(on_event)) as rig:
        caller = Caller(await rig.speak_h2())
        caller.call(1, POST, ends=False)
        caller.call(3, POST, ends=False)
        await caller.hear(h2.events.StreamEnded, 3)
        gc.collect()
        counts = []
        for stream in range(5, 125, 2):
            caller.state.send_data(1, b"%d " % stream)
            caller.call(stream)
            await caller.hear(h2.events.StreamEnded, stream)
            if stream % 20 == 1:  # the count examines all objects of the process
                counts.append(streams_in_memory())
        caller.state.send_data(3, b"late")
        caller.call(125, POST, ends=False)
        caller.state.send_data(3, b"later", end_stream=True)
        caller.state.send_data(125, b"mine", end_stream=True)
        caller.state.end_stream(1)
        caller.flush()
        await caller.hear(h2.events.StreamEnded, 125)
        await caller.hear(h2.events.StreamEnded, 1)

        assert b"mine" == caller.body(125)
        assert b"".join(b"%d " % stream for stream in range(5, 125, 2)) == caller.body(1)
        assert 63 == len(bodies)
        assert max(counts) <= 4 * 10
        caller.close()


@pytest.mark.parametrize(("way", "cut"), [("goes on", 1), ("ends", 0), ("is left", 0)])
async def test_an_upload_that_goes_on_after_its_answer_is_in_progress(way, cut, over_h2):
    received = asyncio.Event()

    async def on_event(server: Server, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            server.state.send_headers(event.stream_id, ANSWER, end_stream=True)
        if isinstance(event, h2.events.DataReceived):
            received.set()

    async with over_h2(Server(on_event)) as rig:
        caller = Caller(await rig.speak_h2())
        caller.call(1, POST, ends=False)
        await caller.hear(h2.events.StreamEnded, 1)
        caller.state.send_data(1, b"more", end_stream=way == "ends")
        if way == "is left":
            caller.state.reset_stream(1, 8)
        caller.call(3)
        await caller.hear(h2.events.StreamEnded, 3)
        await received.wait()

        assert 0 == rig.engine.recheck()
        rig.decide = lambda _facts: Deny("new", "closed")
        assert cut == rig.engine.recheck()
        caller.close()


class DeafServer:
    """A server that accepts one connection on plain TCP, and reads nothing before the test requests it."""

    def __init__(self) -> None:
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]

    async def accept(self) -> socket.socket:
        connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        self._listener.close()
        return connection


def queued(connection: socket.socket) -> int:
    """Return the number of bytes that have arrived and were not read."""
    return int(struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))[0])


async def all_that_comes(connection: socket.socket) -> int:
    """Read until the connection ends in any way. Return the number of bytes."""
    count = 0
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(20):
            while part := await asyncio.get_running_loop().sock_recv(connection, 65536):
                count += len(part)
    return count


@pytest.mark.parametrize("cut", ["policy", "secret", "worker"])
async def test_what_a_server_was_not_sent_when_a_flow_is_cut_it_is_never_sent(cut, lab):
    server = DeafServer()
    async with lab.running(None, scheme=Scheme.HTTP) as rig:
        rig.dial_port = server.port
        _, writer = await rig.connect()
        writer.write(b"POST /v1/x HTTP/1.1\r\nHost: good.test\r\nContent-Length: %d\r\n\r\n" % (1 << 30))
        connection = await server.accept()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                while True:
                    writer.write(bytes(1 << 16))
                    await writer.drain()
        match cut:
            case "secret":
                assert 1 == rig.engine.revoke(frozenset({"api-token"}))
            case "policy":
                rig.decide = lambda _facts: Deny("new", "closed")
                assert 1 == rig.engine.recheck()
            case _:
                for task in rig.flows:
                    task.cancel()
        await asyncio.wait(rig.flows, timeout=10)
        arrived = queued(connection)
        assert 0 < arrived
        assert await all_that_comes(connection) <= arrived
        connection.close()
        writer.close()


@pytest.mark.parametrize("changed", [True, False])
async def test_what_is_left_of_a_request_whose_client_has_gone_is_sent_unless_policy_changes(changed, lab):
    size, server = 60_000, DeafServer()
    running = lab.running(None, scheme=Scheme.HTTP)
    dial = running.rig.dial

    async def narrow(
        host: str, port: int, scheme: Scheme, flow: Mapping[str, object]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        reader, writer, address = await dial(host, port, scheme, flow)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return reader, writer, address

    noted = asyncio.Event()

    def note(kind: str, decision: str, **fields: object) -> None:
        if "error" in fields:  # the client's end was detected
            noted.set()

    running.rig.dial = narrow
    running.rig.audit.note = note
    async with running as rig:
        rig.dial_port = server.port
        _, writer = await rig.connect()
        writer.write(b"POST /open HTTP/1.1\r\nHost: good.test\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))
        connection = await server.accept()
        writer.close()
        async with asyncio.timeout(10):
            await noted.wait()
        if changed:
            assert 0 == rig.engine.recheck()
        arrived = queued(connection)
        came = await all_that_comes(connection)
        assert came <= arrived if changed else came > size
        connection.close()


@pytest.mark.parametrize("reads", [True, False])
async def test_a_flow_lasts_until_its_client_has_taken_what_is_left(reads, lab):
    size, idle = 65536, 1
    running = lab.running(None, EngineLimits(idle_seconds=idle), Scheme.HTTP)
    accept = running.rig.accept

    async def narrow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        await accept(reader, writer)

    async def reply(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % size + bytes(size))

    running.rig.accept = narrow
    running.rig.upstream.reply = reply
    loop = asyncio.get_running_loop()
    async with running as rig:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", rig.port))
            began = time.monotonic()
            await loop.sock_sendall(client, b"GET /open HTTP/1.1\r\nHost: good.test\r\n\r\n")
            received = len(await loop.sock_recv(client, 100))
            with contextlib.suppress(ConnectionResetError):
                while reads and (part := await loop.sock_recv(client, 8192)):
                    received += len(part)
                    await asyncio.sleep(0.2)
            await asyncio.wait(rig.flows, timeout=10)
            lasted = time.monotonic() - began
            received += await all_that_comes(client)

    assert lasted > idle
    assert (received > size) == reads


async def test_a_response_that_ends_with_its_connection_ends_in_tls_too(rig: Rig):
    async def reply(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nas far as it goes")
        writer.close()

    def ask() -> bytes:
        with (
            socket.create_connection(("127.0.0.1", rig.port), 20) as plain,
            rig.client_context("http/1.1").wrap_socket(
                plain, server_hostname="good.test", suppress_ragged_eofs=False
            ) as wrapped,
        ):
            wrapped.sendall(b"GET /open HTTP/1.1\r\nHost: good.test\r\n\r\n")
            answer = b""
            while part := wrapped.recv(65536):  # raises if TLS ends without close_notify
                answer += part
            return answer

    rig.upstream.reply = reply
    assert (await asyncio.to_thread(ask)).endswith(b"\r\n\r\nas far as it goes")


WEBSOCKET = (
    b"GET /open HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
ACCEPTED = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)


@pytest.fixture
def websocket(lab, upstream_root):
    """Return a function that makes a running rig whose server accepts a WebSocket and then runs `serve`."""

    def make(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]):
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ACCEPTED)
            await serve(reader, writer)
            writer.close()

        running = lab.running(lab.tls(upstream_root.leaf("good.test")))
        running.rig.upstream.serve = accept
        running.rig.bound = False
        return running

    return make


async def opened(rig: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await rig.connect()
    writer.write(WEBSOCKET)
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def test_a_websocket_carries_many_small_frames_each_way_at_once(websocket):
    frames = [b"\x82\x10" + os.urandom(16) for _ in range(20_000)]

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1024):
            writer.write(data)
            await writer.drain()

    async with websocket(echo) as rig:
        reader, writer = await opened(rig)

        async def send() -> None:
            for frame in frames:
                writer.write(frame)
                await writer.drain()

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(send())
            back = await reader.readexactly(sum(map(len, frames)))
        assert b"".join(frames) == back
        writer.close()


async def test_what_is_sent_before_a_websocket_ends_arrives(websocket):
    async def pour(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(64):
            writer.write(bytes(1 << 16))
            await writer.drain()

    async with websocket(pour) as rig:
        reader, writer = await opened(rig)
        async with asyncio.timeout(30):
            assert 64 << 16 == len(await reader.read())
        writer.close()


async def test_a_websocket_that_is_not_read_stops_its_sender(websocket):
    done = asyncio.Event()

    async def deaf(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await done.wait()

    async with websocket(deaf) as rig:
        _, writer = await opened(rig)
        sent, ping = 0, b"\x89\x80\0\0\0\0"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                while sent < 256 << 20:
                    writer.write(ping * 10_000)
                    sent += len(ping) * 10_000
                    await writer.drain()
        assert sent < 32 << 20
        done.set()
        writer.transport.abort()
