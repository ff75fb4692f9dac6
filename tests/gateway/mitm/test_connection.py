"""The destinations and hooks of a flow, one condition at a time, and the server's trailers and gRPC messages."""

import asyncio
import contextlib
import gzip
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import h2.events
import pytest
from mitmproxy.connection import Client, Server
from mitmproxy.flow import Error
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers.http import GetHttpConnection, GetHttpConnectionCompleted, HttpRequestHeadersHook
from mitmproxy.proxy.layers.websocket import WebsocketStartHook
from OpenSSL import SSL, crypto

from gateway.engines.engine import _still_allowed
from gateway.engines.mitm import options
from gateway.engines.mitm.connection import FlowConnection
from gateway.engines.mitm.layers import RootLayer, StrictHttpLayer, StrictStream
from gateway.engines.mitm.pin import PRESENTED, Commands, Pin
from gateway.engines.port import InspectedFlow
from gateway.tls.contexts import ClientContexts, UpstreamContext, verified
from gateway.tls.hello import Hello
from gateway.tls.identity import LeafMint
from policy.decision import Deny
from policy.facts import FlowFacts, Scheme
from tests.gateway.mitm.conftest import SECRET, Lab, Rig, only
from tests.gateway.mitm.test_gate import Bench, request
from tests.gateway.mitm.test_streams import GET, Caller
from tests.gateway.mitm.test_streams import Server as Http2Server

HOST = "good.test"


@dataclass
class Dials:
    """A dialler that counts its calls and reaches nothing."""

    asked: int = 0

    async def dial(
        self, _host: str, _port: int, _scheme: Scheme, _flow: Mapping[str, object]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        self.asked += 1
        raise ConnectionError("nothing is there")


@dataclass
class Made:
    """A flow that has not begun."""

    connection: FlowConnection
    bench: Bench
    dials: Dials


def mint(lab: Lab) -> LeafMint:
    intermediate = lab.sandbox_root.intermediate("Worker")
    return LeafMint(intermediate.pem, "", intermediate.key_pem)


@pytest.fixture
async def made(lab: Lab) -> AsyncIterator[Made]:
    near, far = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=near)
    hello = Hello(HOST, (), False, 1)
    where, peer = ("203.0.113.9", 443), ("192.0.2.2", 40000)
    flow = InspectedFlow(reader, writer, b"", HOST, 443, Scheme.HTTPS, where, hello, peer, "f1")
    bench, dials = Bench(), Dials()
    upstream = UpstreamContext(lab.upstream_root.pem)
    connection = FlowConnection(flow, replace(bench.shared, dialler=dials, identity=mint(lab), upstream=upstream))
    bench.gate = connection.gate
    yield Made(connection, bench, dials)
    await connection.shutdown()
    writer.transport.abort()
    far.close()


# Opening connections.

type Change = Callable[[Made, Server], None]
NOT_OPENED: dict[str, Change] = {
    "another host": lambda _made, server: setattr(server, "address", ("evil.test", 443)),
    "another port": lambda _made, server: setattr(server, "address", (HOST, 8443)),
    "a datagram": lambda _made, server: setattr(server, "transport_protocol", "udp"),
    "a proxy": lambda _made, server: setattr(server, "via", ("http", ("evil.test", 80))),
    "a flow that was cut": lambda made, _server: made.connection.abort(),
    "no request": lambda made, _server: made.bench.gate.active.clear(),
}


@pytest.mark.parametrize("case", [None, *NOT_OPENED])
async def test_a_connection_is_opened_to_the_one_destination_for_an_allowed_request(
    made: Made, case: str | None
) -> None:
    await made.bench.asked()
    server = Server(address=(HOST, 443))
    if case is not None:
        NOT_OPENED[case](made, server)
    await made.connection.open_connection(commands.OpenConnection(server))
    assert int(case is None) == made.dials.asked


async def test_a_denied_request_opens_nothing(made: Made) -> None:
    made.bench.ports.decision = Deny("r", "denied")
    denied = await made.bench.asked()
    assert denied.response is not None
    assert 403 == denied.response.status_code
    await made.connection.open_connection(commands.OpenConnection(Server(address=(HOST, 443))))
    assert 0 == made.dials.asked


class Asking(StrictStream):
    """A stream that stores the answers it receives. Its request has a verdict, and presents no certificate."""

    def __init__(self, context: Context) -> None:
        super().__init__(context, 1, Pin(FlowFacts(HOST, 443, Scheme.HTTPS), 1000))
        self.heard: list[events.Event] = []
        self.flow = request()
        self.flow.metadata[PRESENTED] = None

    def handle_event(self, event: events.Event) -> Commands[None]:
        self.heard.append(event)
        yield from ()


@pytest.mark.parametrize(
    ("address", "tls", "via", "transport"),
    [
        (("evil.test", 443), True, None, "tcp"),
        ((HOST, 80), True, None, "tcp"),
        ((HOST, 443), False, None, "tcp"),
        ((HOST, 443), True, ("http", ("evil.test", 80)), "tcp"),
        ((HOST, 443), True, None, "udp"),
        ((HOST, 443), True, None, "tcp"),
    ],
)
async def test_a_stream_gets_a_connection_to_the_destination_of_its_flow_only(
    address: tuple[str, int], *, tls: bool, via: Any, transport: Any
) -> None:
    context = Context(Client(peername=("192.0.2.2", 1), sockname=("192.0.2.1", 2)), options.options(60))
    http = StrictHttpLayer(context, Pin(FlowFacts(HOST, 443, Scheme.HTTPS), 1000))
    command, asking = GetHttpConnection(address, tls, via, transport), Asking(context)
    http.command_sources[command] = asking
    asked = [one for one in http.get_connection(command) if isinstance(one, commands.OpenConnection)]
    honest = (address, tls, via, transport) == ((HOST, 443), True, None, "tcp")
    assert int(honest) == len(asked)
    if honest:
        assert ((HOST, 443), HOST) == (asked[0].connection.address, asked[0].connection.sni)
    else:
        (answer,) = asking.heard
        assert isinstance(answer, GetHttpConnectionCompleted) and answer.reply[0] is None


# Hooks.


async def test_a_hook_that_is_not_known_ends_the_flow(made: Made) -> None:
    flow = request()
    await made.connection.handle_hook(WebsocketStartHook(flow))
    assert made.connection.aborted
    assert flow.error is not None and Error.KILLED_MESSAGE == flow.error.msg
    assert made.bench.gate.over


async def test_a_hook_that_raises_ends_the_flow_and_is_the_last_one(made: Made) -> None:
    made.bench.ports.decision = None
    flow = request()
    await made.connection.handle_hook(HttpRequestHeadersHook(flow))
    assert made.connection.aborted
    assert flow.error is not None and Error.KILLED_MESSAGE == flow.error.msg
    assert ["decide"] == made.bench.ports.steps
    await made.connection.handle_hook(HttpRequestHeadersHook(request()))
    assert ["decide"] == made.bench.ports.steps


async def test_a_request_without_a_stamp_ends_the_flow_in_its_last_add_on(made: Made) -> None:
    """An add-on that does nothing gives no permission."""
    setattr(made.bench.gate, "requestheaders", lambda _flow: None)  # noqa: B010
    await made.connection.handle_hook(HttpRequestHeadersHook(request()))
    assert made.connection.aborted


async def test_an_exception_that_mitmproxy_logs_ends_the_flow_and_a_line_does_not(made: Made) -> None:
    made.connection.log("a line")
    assert not made.connection.aborted
    made.connection.log("a line", 40, (ValueError, ValueError(), None))
    assert made.connection.aborted


async def test_a_layer_that_raises_ends_the_flow() -> None:
    class Broken(Asking):
        def handle_event(self, event: events.Event) -> Commands[None]:
            raise ValueError
            yield

    context = Context(Client(peername=("192.0.2.2", 1), sockname=("192.0.2.1", 2)), options.options(60))
    crashes: list[int] = []
    root = RootLayer(context, lambda: crashes.append(1))
    root.child = Broken(context)
    assert ([], [1]) == (list(root.handle_event(events.Start())), crashes)


async def test_a_flow_that_was_cut_takes_no_event(made: Made) -> None:
    asking = Asking(made.connection.layer.context)
    made.connection.layer = asking
    await made.connection.server_event(events.Start())
    assert 1 == len(asking.heard)
    made.connection.abort()
    await made.connection.server_event(events.Start())
    assert 1 == len(asking.heard)


# Handshakes.


@pytest.mark.parametrize("sni", [None, "", "evil.test", "good.test.evil.test", HOST, "Good.Test."])
async def test_the_client_hello_is_the_one_that_was_decided_on(made: Made, sni: str | None) -> None:
    data: Any = SimpleNamespace(client_hello=SimpleNamespace(sni=sni), establish_server_tls_first=True)
    if sni in (HOST, "Good.Test."):
        made.connection.on_tls_clienthello(data)
        assert data.establish_server_tls_first is False  # a handshake alone causes no dial
    else:
        with pytest.raises(RuntimeError, match="the ClientHello differs from the one that was judged"):
            made.connection.on_tls_clienthello(data)


async def test_an_upstream_handshake_is_for_the_host_of_the_flow(made: Made) -> None:
    def data(sni: str | None, *, is_dtls: bool = False) -> Any:
        return SimpleNamespace(conn=Server(address=(HOST, 443), sni=sni), is_dtls=is_dtls, ssl_conn=None)

    for wrong in (data("evil.test"), data(None), data(HOST, is_dtls=True)):
        with pytest.raises(RuntimeError, match="the upstream handshake is for another host than the flow's"):
            made.connection.on_tls_start_server(wrong)
        assert wrong.ssl_conn is None
    right = data(HOST)
    made.connection.on_tls_start_server(right)
    assert HOST.encode() == right.ssl_conn.get_servername()


@pytest.mark.parametrize("trusts", ["verified", "stranger", "nothing"])
async def test_an_upstream_connection_is_verified_a_second_time(made: Made, lab: Lab, trusts: str) -> None:
    """Even with a context that accepts every server. The product has no such context."""
    leaf = mint(lab).leaf(HOST)
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_verify(SSL.VERIFY_NONE)
    store = context.get_cert_store()
    assert store is not None
    if trusts != "nothing":
        root = lab.sandbox_root if trusts == "verified" else lab.stranger("Stranger")
        store.add_cert(crypto.X509.from_cryptography(root.certificate))
    near, far = SSL.Connection(context), ClientContexts().accept(leaf, http2=True)
    near.set_connect_state()
    for _ in range(4):
        for one, other in ((near, far), (far, near)):
            with contextlib.suppress(SSL.WantReadError):
                one.do_handshake()
            with contextlib.suppress(SSL.WantReadError):
                other.bio_write(one.bio_read(65536))
    data: Any = SimpleNamespace(ssl_conn=near)
    assert (trusts == "verified") is verified(near)
    if trusts == "verified":
        made.connection.on_tls_established_server(data)
    else:
        with pytest.raises(RuntimeError, match="the upstream certificate was not verified"):
            made.connection.on_tls_established_server(data)
    with pytest.raises(RuntimeError, match="the upstream certificate was not verified"):
        made.connection.on_tls_established_server(SimpleNamespace(ssl_conn=None))  # type: ignore[arg-type]


async def test_a_connection_that_mitmproxy_would_make_itself_ends_the_flow(made: Made) -> None:
    with pytest.raises(RuntimeError, match="mitmproxy opened a connection by itself"):
        made.connection.on_server_connect(SimpleNamespace())  # type: ignore[arg-type]


async def test_a_handshake_that_is_not_over_in_time_ends_the_flow(made: Made) -> None:
    made.connection.client.timestamp_tls_setup = 1.0
    made.connection.end_handshake()
    assert not made.connection.aborted
    made.connection.client.timestamp_tls_setup = None
    made.connection.end_handshake()
    assert made.connection.aborted


# Limits of the engine's work.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"host": "evil.test"}, "server name is not the flow's host"),
        ({"hello": None}, "scheme and first bytes disagree"),
        ({"scheme": Scheme.HTTP}, "scheme and first bytes disagree"),
        ({"hello": Hello(HOST, (b"smtp",), False, 1)}, "no common application protocol"),
    ],
)
async def test_a_flow_whose_opening_does_not_fit_is_not_served(
    rig: Rig, made: Made, change: dict[str, Any], reason: str
) -> None:
    flow = made.connection._flow
    await rig.engine.handle(replace(flow, **change))
    assert [("flow", "deny", reason)] == [(kind, said, fields["reason"]) for kind, said, fields in rig.audit.records]
    assert flow.writer.is_closing()


async def test_what_cannot_be_judged_again_is_not_allowed_any_more(made: Made) -> None:
    await made.bench.asked()
    assert _still_allowed(made.connection)

    def broken(_number: int, _step: str) -> None:
        raise RuntimeError("no decision")

    made.bench.ports.on_step = broken
    assert not _still_allowed(made.connection)


# Trailers.

CLOSING = b"GET /open HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n\r\n"


async def trailing(_head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n")
    writer.write(
        b"X-Checksum: 77\r\nX-Token: %s\r\nX-%s: 1\r\n\r\n" % (SECRET.encode(), SECRET.encode().hex().encode())
    )


@pytest.mark.parametrize("client", ["HTTP/1.1", "HTTP/2"])
async def test_the_trailers_of_an_http1_server_are_dropped(rig: Rig, client: str) -> None:
    rig.upstream.reply = trailing
    if client == "HTTP/1.1":
        answer = await rig.exchange(CLOSING)
        assert answer.endswith(b"\r\n\r\n4\r\nbody\r\n0\r\n\r\n")
        assert SECRET.encode() not in answer
        return
    caller = Caller(await rig.speak_h2())
    caller.call(1)
    await caller.hear(h2.events.StreamEnded, 1)
    caller.close()
    assert b"body" == caller.body(1)
    assert not [one for one in caller.heard if isinstance(one, h2.events.TrailersReceived)]


@pytest.fixture
async def over_http2(lab: Lab) -> AsyncIterator[tuple[Rig, Caller, Http2Server]]:
    """Run a client and a server that speak HTTP/2. Policy binds a secret to the server's host."""

    async def nothing(_server: Http2Server, _event: h2.events.Event) -> None:
        return None

    context = lab.tls(lab.upstream_root.leaf(HOST))
    context.set_alpn_protocols(["h2"])
    running, server = lab.running(context), Http2Server(nothing)
    running.rig.upstream.serve = server.serve
    async with running as rig:
        caller = Caller(await rig.speak_h2())
        yield rig, caller, server
        caller.close()


async def test_the_trailers_of_an_http2_server_are_searched(
    over_http2: tuple[Rig, Caller, Http2Server],
) -> None:
    _, caller, server = over_http2

    async def answer(server: Http2Server, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            server.state.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
            server.state.send_data(1, b"\0\0\0\0\2ok")
            fields = [("grpc-status", "0"), ("grpc-message", f"for {SECRET}"), (f"x-{SECRET.encode().hex()}", "1")]
            server.state.send_headers(1, fields, end_stream=True)

    server.on_event = answer
    caller.call(1)
    await caller.hear(h2.events.StreamEnded, 1)
    (trailers,) = [one for one in caller.heard if isinstance(one, h2.events.TrailersReceived)]
    assert [(b"grpc-status", b"0"), (b"grpc-message", b"for [REDACTED]")] == list(trailers.headers or ())
    assert b"\0\0\0\0\2ok" == caller.body(1)


# Compressed gRPC.

PACKED = gzip.compress(SECRET.encode())
MESSAGE = b"\1" + len(PACKED).to_bytes(4, "big") + PACKED


@pytest.mark.parametrize("said", [True, False], ids=["said in the head", "in the message only"])
async def test_compressed_messages_of_grpc_are_refused(
    over_http2: tuple[Rig, Caller, Http2Server], *, said: bool
) -> None:
    """If the head declares the compression, the client gets a page with the reason.

    Otherwise the message ends the flow.
    """
    rig, caller, server = over_http2

    async def answer(server: Http2Server, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            fields = [(":status", "200"), ("content-type", "application/grpc")]
            server.state.send_headers(1, [*fields, ("grpc-encoding", "gzip")] if said else fields)
            server.state.send_data(1, MESSAGE, end_stream=True)

    server.on_event = answer
    caller.call(1, [*GET, ("grpc-accept-encoding", "gzip")])
    if said:
        await caller.hear(h2.events.StreamEnded, 1)
        (head,) = [one for one in caller.heard if isinstance(one, h2.events.ResponseReceived)]
        assert b"502" == only(head.headers, b":status")
        assert b"compressed messages cannot be searched for secrets" in caller.body(1)
    else:
        with pytest.raises((AssertionError, OSError)):
            await caller.hear(h2.events.StreamEnded, 1)
    assert PACKED[10:] not in caller.body(1)
    denials = [
        fields["rule"] for kind, decision, fields in rig.audit.records if (kind, decision) == ("request", "deny")
    ]
    assert ["scrub"] == denials


async def test_a_compressed_message_of_grpc_over_http1_is_refused_where_its_head_says_so(rig: Rig) -> None:
    async def answer(_head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\nGrpc-Encoding: gzip\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(MESSAGE), MESSAGE))

    rig.upstream.reply = answer
    shown = await rig.exchange(CLOSING.replace(b"\r\n\r\n", b"\r\nGrpc-Accept-Encoding: gzip\r\n\r\n"))
    assert shown.startswith(b"HTTP/1.1 502 ")
    assert b"compressed messages cannot be searched for secrets" in shown
    assert PACKED[10:] not in shown
    assert b"grpc-accept-encoding" not in rig.upstream.data.lower()
