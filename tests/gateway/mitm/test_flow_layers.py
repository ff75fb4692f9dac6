"""Input that mitmproxy's layers, made strict, accept from a peer: one message at a time, without a socket."""

import asyncio
from typing import Any

import h2.events
import pytest
from mitmproxy import http
from mitmproxy.connection import Client, Connection, ConnectionState, Server
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers.http import GetHttpConnection, GetHttpConnectionCompleted, _base, _events

from gateway.engines.mitm import options
from gateway.engines.mitm.http2 import _GoingAway, _moves_nothing
from gateway.engines.mitm.layers import (
    MAX_BUFFER,
    MAX_INFORMATIONAL,
    MAX_RESPONSE_HEAD,
    StrictHttp1Client,
    StrictHttpLayer,
    _as_http1,
)
from gateway.engines.mitm.pin import Pin
from gateway.engines.port import EngineLimits
from policy.facts import FlowFacts, Scheme
from tests.gateway.mitm.conftest import Lab
from tests.gateway.mitm.test_connection import Asking
from tests.gateway.mitm.test_gate import HOST, request


def pin() -> Pin:
    return Pin(FlowFacts(HOST, 443, Scheme.HTTPS), 1000)


def context(alpn: bytes = b"http/1.1") -> Context:
    client = Client(peername=("192.0.2.2", 1), sockname=("192.0.2.1", 2), state=ConnectionState.OPEN)
    client.alpn = alpn
    made = Context(client, options.options(60))
    made.server = Server(address=(HOST, 443))
    made.server.state = ConnectionState.OPEN
    return made


class Wire:
    """One side's layer, and its commands after the peer's input."""

    def __init__(self, layer: StrictHttp1Client, peer: Connection) -> None:
        self.layer, self.peer = layer, peer
        self.done: list[commands.Command] = []
        self._give(events.Start())

    def _give(self, event: events.Event) -> None:
        self.done += self.layer.handle_event(event)

    def receive(self, data: bytes) -> None:
        self._give(events.DataReceived(self.peer, data))

    def send(self, *parts: _base.HttpEvent) -> None:
        for part in parts:
            self._give(part)

    def passed(self, kind: type[_base.HttpEvent]) -> list[Any]:
        """Return the events of that kind that reached the stream."""
        went = [one.event for one in self.done if isinstance(one, _base.ReceiveHttp)]
        return [one for one in went if isinstance(one, kind)]

    @property
    def closed(self) -> bool:
        return any(isinstance(one, commands.CloseConnection) for one in self.done)


@pytest.fixture
def server() -> Wire:
    """Return a server's layer after a request."""
    made = context()
    wire = Wire(StrictHttp1Client(made), made.server)
    wire.send(_events.RequestHeaders(1, request().request, end_stream=True), _events.RequestEndOfMessage(1))
    return wire


# A server over HTTP/1.

HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.mark.parametrize("count", [0, 1, MAX_INFORMATIONAL, MAX_INFORMATIONAL + 1])
def test_informational_answers_are_swallowed_up_to_a_number(server: Wire, count: int) -> None:
    server.receive(HINTS * count + WHOLE)
    statuses = [one.response.status_code for one in server.passed(_events.ResponseHeaders)]
    failures = server.passed(_events.ResponseProtocolError)
    if count <= MAX_INFORMATIONAL:
        assert ([200], []) == (statuses, failures)
    else:
        assert ([], 1, True) == (statuses, len(failures), server.closed)


@pytest.mark.parametrize("hint", [b"", HINTS], ids=["", "after a hint"])
def test_the_head_of_an_answer_is_bounded(server: Wire, hint: bytes) -> None:
    begin = b"HTTP/1.1 200 OK\r\nX: "
    server.receive(hint + begin + b"a" * (MAX_RESPONSE_HEAD - len(begin) - 1))
    assert not server.closed
    server.receive(b"a")
    assert server.closed and server.passed(_events.ResponseProtocolError)


def test_what_waits_to_be_parsed_is_bounded(server: Wire) -> None:
    """No limit of the parser ends the line before a chunk."""
    server.receive(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    server.receive(b"2;" + b"a" * (MAX_BUFFER - 2))
    assert not server.closed
    server.receive(b"a")
    assert server.closed and server.passed(_events.ResponseProtocolError)


def test_bytes_after_an_early_answer_are_no_second_one() -> None:
    made = context()
    server = Wire(StrictHttp1Client(made), made.server)
    server.send(_events.RequestHeaders(1, request(b"POST").request, end_stream=False))
    server.receive(WHOLE)
    server.receive(WHOLE)
    assert server.closed
    assert 1 == len(server.passed(_events.ResponseHeaders))


def test_trailers_of_a_server_go_no_further(server: Wire) -> None:
    server.receive(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Token: secret\r\n\r\n")
    assert [b"ok"] == [one.data for one in server.passed(_events.ResponseData)]
    ends = server.passed(_events.ResponseEndOfMessage)
    assert (1, []) == (len(ends), server.passed(_events.ResponseTrailers))


# Between protocols.


@pytest.mark.parametrize("whole", [True, False])
def test_a_request_over_http2_becomes_one_over_http1_that_is_alone(*, whole: bool) -> None:
    sent = request(b"POST", headers=((b"host", b"evil.test"), (b"te", b"trailers"), (b"x-own", b"1"))).request
    sent.headers = http.Headers([*sent.headers.fields, (b"cookie", b"a=1"), (b"cookie", b"b=2")])
    made = _as_http1(_events.RequestHeaders(1, sent, end_stream=whole))
    framing = () if whole else ((b"Transfer-Encoding", b"chunked"),)
    cookies, close = (b"cookie", b"a=1; b=2"), (b"Connection", b"close")
    assert ((b"Host", HOST.encode()), (b"x-own", b"1"), cookies, *framing, close) == made.headers.fields
    assert ("HTTP/1.1", "") == (made.http_version, made.authority)


@pytest.mark.parametrize(
    ("spoken", "there", "taken"),
    [
        (b"h2", b"h2", True),
        (b"h2", b"http/1.1", False),
        (b"h2", None, False),
        (b"h2", "closed", False),
        (b"h2", "broken", False),
    ],
)
def test_a_connection_is_used_again_by_those_it_can_serve(
    spoken: bytes, there: bytes | str | None, *, taken: bool
) -> None:
    made = context(spoken)
    layer = StrictHttpLayer(made, pin())
    kept = Server(address=(HOST, 443))
    kept.tls = True
    kept.alpn = there if isinstance(there, bytes) else None
    kept.state = ConnectionState.CLOSED if there == "closed" else ConnectionState.OPEN
    kept.error = "reset" if there == "broken" else None
    layer.connections[kept] = Asking(made)
    command, asking = GetHttpConnection((HOST, 443), True, None), Asking(made)
    layer.command_sources[command] = asking
    opened = [one for one in layer.get_connection(command) if isinstance(one, commands.OpenConnection)]
    answers = [one.reply for one in asking.heard if isinstance(one, GetHttpConnectionCompleted)]
    assert (([(kept, None)], 0) if taken else ([], 1)) == (answers, len(opened))


MOVING = [
    (h2.events.PingReceived, True),
    (h2.events.RemoteSettingsChanged, True),
    (h2.events.PriorityUpdated, True),
    (h2.events.UnknownFrameReceived, True),
    (h2.events.InformationalResponseReceived, True),
    (h2.events.RequestReceived, False),
    (h2.events.WindowUpdated, False),
]


@pytest.mark.parametrize(("kind", "nothing"), MOVING, ids=[kind.__name__ for kind, _ in MOVING])
def test_frames_that_move_nothing_are_counted(kind: type[Any], *, nothing: bool) -> None:
    assert nothing is _moves_nothing(kind.__new__(kind))


@pytest.mark.parametrize(("data", "ends", "nothing"), [(b"", False, True), (b"", True, False), (b"a", False, False)])
def test_empty_data_that_ends_nothing_moves_nothing(data: bytes, *, ends: bool, nothing: bool) -> None:
    event = h2.events.DataReceived.__new__(h2.events.DataReceived)
    event.data, event.stream_ended = data, h2.events.StreamEnded.__new__(h2.events.StreamEnded) if ends else None
    assert nothing is _moves_nothing(event)
    assert _moves_nothing(_GoingAway(1))


# Buffers.


async def test_a_body_that_is_searched_whole_is_bounded_while_it_arrives(lab: Lab) -> None:
    """Its server never ends it."""
    stop = asyncio.Event()

    async def reply(_head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 9000000\r\n\r\n" + b"a" * 5000)
        await writer.drain()
        await stop.wait()

    running = lab.running(lab.tls(lab.upstream_root.leaf(HOST)), EngineLimits(scrub_body_bytes=4000))
    running.rig.upstream.reply = reply
    async with running as rig:
        reader, writer = await rig.connect()
        writer.write(b"GET /open HTTP/1.1\r\nHost: good.test\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 502 ")
        writer.close()
        stop.set()
