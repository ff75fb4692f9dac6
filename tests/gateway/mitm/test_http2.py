"""HTTP/2 with peers that flood, stall or observe frame lengths.

Costs are bounded, and secrets are in no shared header table.

It tests `gateway/engines/mitm/http2.py`.
"""

import asyncio
import contextlib
import resource
import ssl
import time
from pathlib import Path

import h2.events
import h2.stream
import hpack
import httpx
import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from gateway.engines.engine import _HTTP2_SECONDS, _HTTP2_SERVERS, Http2Servers
from gateway.engines.port import EngineLimits
from policy.decision import AllowRequest, Deny
from policy.facts import Scheme
from policy.injection import InjectionKind, InjectionPlan
from testbed.ports import reserve_port

from .conftest import only

GET = [(":method", "GET"), (":scheme", "https"), (":authority", "good.test"), (":path", "/v1/x")]
API_KEY = InjectionPlan("key", "api-token", InjectionKind.API_KEY, "X-Api-Key")


def headers(stream: int, *, block: bytes = b"", ends: bool = True) -> bytes:
    """Return a HEADERS frame of an honest request, or with another block. `ends` sets END_HEADERS."""
    flags = ["END_STREAM", *(["END_HEADERS"] if ends else [])]
    return HeadersFrame(stream, data=block or hpack.Encoder().encode(GET), flags=flags).serialize()


def small_headers(number: int) -> bytes:
    if number == 0:
        return headers(1, ends=False)
    return ContinuationFrame(1, data=b"").serialize()


FLOODS = {
    "rapid resets": lambda n: headers(1 + 2 * n) + RstStreamFrame(1 + 2 * n, error_code=8).serialize(),
    "resets that we make": lambda n: headers(1 + 2 * n) + WindowUpdateFrame(1 + 2 * n, 2**31 - 1).serialize(),
    "pings": lambda _n: PingFrame(0, opaque_data=b"12345678").serialize(),
    "settings": lambda _n: SettingsFrame(0, settings={4: 65535}).serialize(),
    "priorities": lambda n: PriorityFrame(1 + 2 * n, stream_weight=3).serialize(),
    "endless header block": small_headers,
    "empty data": lambda n: (
        HeadersFrame(1, data=hpack.Encoder().encode(GET), flags=["END_HEADERS"]).serialize()
        if n == 0
        else DataFrame(1, data=b"").serialize()
    ),
}
"""Functions that each make their frame number n."""


def resident() -> int:
    """Return the bytes of memory of this process: engine, server and client together."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def ended(reader: asyncio.StreamReader) -> None:
    """Return when the other side has ended the connection, by close or by error."""
    try:
        while await reader.read(65536):
            pass
    except (ConnectionError, ssl.SSLError):
        pass


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_ends_its_connection_and_no_other(flood, rig):
    reader, writer, client = await rig.speak_h2()
    writer.write(client.data_to_send())
    make = FLOODS[flood]
    end = asyncio.create_task(ended(reader))
    sent = 0
    while not end.done() and sent < 20_000:
        writer.write(make(sent))
        sent += 1
        if sent % 50 == 0:
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await end
    writer.transport.abort()

    assert rig.upstream.requests <= 110
    assert (await rig.exchange(b"GET /v1/x HTTP/1.1\r\nHost: good.test\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_ordinary_pings_and_settings_are_answered(rig):
    reader, writer, client = await rig.speak_h2()
    for _ in range(200):
        client.ping(b"12345678")
    writer.write(client.data_to_send())
    answered = 0
    while answered < 200:
        for event in client.receive_data(await asyncio.wait_for(reader.read(65536), 10)):
            answered += isinstance(event, h2.events.PingAckReceived)
        writer.write(client.data_to_send())
    writer.close()
    assert 200 == answered


HALVES = {
    "half a request line": b"GET /v1/x HT",
    "a head without its end": b"GET /v1/x HTTP/1.1\r\nHost: good.test\r\nX-A: b\r\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
async def test_a_request_head_that_stalls_ends_the_flow(half, lab, upstream_root):
    context = lab.tls(upstream_root.leaf("good.test"))
    async with lab.running(context, EngineLimits(handshake_seconds=1.5, idle_seconds=60)) as rig:
        reader, writer = await rig.connect()
        writer.write(b"GET /v1/x HTTP/1.1\r\nHost: good.test\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(1.7)  # between two requests no time limit applies
        began = time.monotonic()
        writer.write(HALVES[half])
        async with asyncio.timeout(20):
            await ended(reader)
            await asyncio.wait(rig.flows)
        writer.transport.abort()

        assert time.monotonic() - began > 1.4
        assert 1 == rig.upstream.requests
        assert "a request head was not complete in time" in [one[2].get("reason") for one in rig.audit.records]


STALLS = {
    "a preface without its end": b"PRI * HT",
    "a frame header without its end": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize() + b"\0\0",
    "half a HEADERS frame": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize() + headers(1)[:12],
    "a block without its end": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + SettingsFrame(0).serialize()
    + headers(1, ends=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("stall", STALLS)
async def test_an_http2_head_that_stalls_ends_the_flow(stall, lab, upstream_root):
    context = lab.tls(upstream_root.leaf("good.test"))
    async with lab.running(context, EngineLimits(handshake_seconds=1.5, idle_seconds=60)) as rig:
        reader, writer, _ = await rig.speak_h2()
        writer.write(STALLS[stall])
        async with asyncio.timeout(20):
            await ended(reader)
        writer.transport.abort()
        assert 0 == rig.dials


class Http2Far:
    """A server that speaks HTTP/2, answers 200 and stores each header block as received."""

    def __init__(self) -> None:
        self.decoder = hpack.Decoder()
        self.blocks: list[list[hpack.HeaderTuple]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)
        writer.write(SettingsFrame(0).serialize())
        try:
            while True:
                header = await reader.readexactly(9)
                frame, length = Frame.parse_frame_header(memoryview(header))
                frame.parse_body(memoryview(await reader.readexactly(length)))
                if isinstance(frame, HeadersFrame):
                    self.blocks.append(list(self.decoder.decode(frame.data, raw=True)))
                    answer = hpack.Encoder().encode([(":status", "200")])
                    reply = HeadersFrame(frame.stream_id, data=answer, flags=["END_HEADERS", "END_STREAM"])
                    writer.write(reply.serialize())
        except (asyncio.IncompleteReadError, OSError):
            writer.close()


@pytest.mark.parametrize("plan", [None, API_KEY], ids=["bearer", "api key"])
async def test_a_secret_enters_no_compression_table(plan, lab, upstream_root):
    context = lab.tls(upstream_root.leaf("good.test"))
    context.set_alpn_protocols(["h2"])
    far = Http2Far()
    async with lab.running(context) as rig:
        rig.plan = plan or rig.plan
        server = await asyncio.start_server(far.serve, "127.0.0.1", 0, ssl=context)
        rig.dial_port = server.sockets[0].getsockname()[1]
        reader, writer, client = await rig.speak_h2()
        for stream in (1, 3):
            client.send_headers(stream, [*GET, ("x-own", "the sandbox's")], end_stream=True)
        writer.write(client.data_to_send())
        done = 0
        while done < 2:
            for event in client.receive_data(await asyncio.wait_for(reader.read(65536), 20)):
                done += isinstance(event, h2.events.StreamEnded)
            writer.write(client.data_to_send())
        writer.close()
        server.close()

    name = rig.plan.slot.encode()
    secret = rig.secret.encode()
    carrying = [field for block in far.blocks for field in block if secret in bytes(field[1])]
    assert [name, name] == [bytes(field[0]) for field in carrying]
    assert [False, False] == [field.indexable for field in carrying]
    assert secret not in b" ".join(bytes(value) for _, value in far.decoder.header_table.dynamic_entries)
    assert b"x-own" in [bytes(name) for name, _ in far.decoder.header_table.dynamic_entries]  # the table is in use


async def test_an_observed_request_is_forwarded_as_it_is(rig):
    rig.decide = lambda _facts: AllowRequest("observe:p", (), Deny("p/no", "would be denied"))
    await rig.exchange(b"GET /v1/x HTTP/1.1\r\nHost: good.test\r\n\r\n")

    assert rig.secret.encode() not in rig.upstream.data
    assert 1 == rig.upstream.requests
    assert [("request", "observe")] == rig.audit.kinds()
    assert [] == rig.leased


_HEAD = len("GET/v1/x")


@pytest.mark.parametrize(
    ("fields", "body", "size"),
    [
        ([], None, _HEAD),
        ([("content-length", "0")], b"", _HEAD + len("content-length0")),
        ([("content-length", "4")], b"body", _HEAD + len("content-length4") + 4),
        ([], b"body", None),
        ([], b"", None),
        ([("x-own", "the sandbox's")], None, _HEAD + len("x-ownthe sandbox's")),
    ],
)
async def test_the_bytes_of_a_request_are_known_if_its_head_says_them(fields, body, size, rig):
    """`body` is None for a request that ends with its head. Others send a frame of data after it."""
    reader, writer, client = await rig.speak_h2()
    client.send_headers(1, [*GET, *fields], end_stream=body is None)
    writer.write(client.data_to_send())
    if body is not None:
        client.send_data(1, body, end_stream=True)
        writer.write(client.data_to_send())
    answered = False
    while not answered:
        for event in client.receive_data(await asyncio.wait_for(reader.read(65536), 20)):
            answered = answered or isinstance(event, h2.events.StreamEnded)
        writer.write(client.data_to_send())
    writer.close()
    assert [size] == rig.sizes
    assert 1 == rig.upstream.requests


@pytest.mark.parametrize("library", [True, False], ids=["checked by the library too", "checked by the exchange"])
async def test_no_more_than_the_known_bytes_of_a_request_are_sent(library, rig, monkeypatch):
    """Of a body that is longer than its head says, and than its secret was leased for, no byte is sent."""
    if not library:
        monkeypatch.setattr(h2.stream.H2Stream, "_track_content_length", lambda *_arguments: None)
    for body in (b"body", b"body and canary"):
        reader, writer, client = await rig.speak_h2()
        client.send_headers(1, [*GET, ("content-length", "4")])
        writer.write(client.data_to_send() + DataFrame(1, data=body, flags=["END_STREAM"]).serialize())
        over = False
        while not over:
            data = await asyncio.wait_for(reader.read(65536), 20)
            over = not data or any(isinstance(event, h2.events.StreamEnded) for event in client.receive_data(data))
        writer.close()
    assert 1 == rig.upstream.data.count(b"body")


BOMB = hpack.Encoder().encode([("x-filling", "a" * 4000)]) + bytes([0x80 | 62]) * 12_000
"""A header block of 16 KB that expands to 48 MB: it repeats one entry of the table."""


def answer(stream: int, *, ends: bool = False, block: bytes = b"") -> bytes:
    flags = ["END_HEADERS", *(["END_STREAM"] if ends else [])]
    return HeadersFrame(stream, data=block or hpack.Encoder().encode([(":status", "200")]), flags=flags).serialize()


SERVER_FLOODS = {
    "pings": lambda _n: PingFrame(0, opaque_data=b"12345678").serialize(),
    "settings": lambda _n: SettingsFrame(0, settings={4: 65535}).serialize(),
    "empty data": lambda n: answer(1) if n == 0 else DataFrame(1, data=b"").serialize(),
    "an endless header block": lambda n: (
        HeadersFrame(1, data=b"", flags=[]).serialize() if n == 0 else ContinuationFrame(1, data=b"").serialize()
    ),
    "a window beyond the largest": lambda _n: WindowUpdateFrame(0, 2**31 - 1).serialize(),
    "a stream that nobody asked for": lambda n: answer(2 + 2 * n, ends=True),
    "pushes": lambda n: PushPromiseFrame(
        1, 2 + 2 * n, data=hpack.Encoder().encode(GET), flags=["END_HEADERS"]
    ).serialize(),
    "early hints": lambda _n: answer(1, block=hpack.Encoder().encode([(":status", "103"), ("link", "</a>")])),
    "a block that grows": lambda _n: answer(1, block=BOMB),
}
"""Functions that each make frame number n, which the server sends instead of its answer to stream 1."""


@pytest.mark.parametrize("flood", SERVER_FLOODS)
async def test_a_server_that_floods_loses_its_connection_and_its_client_gets_an_error(flood, lab, upstream_root):
    context = lab.tls(upstream_root.leaf("good.test"))
    context.set_alpn_protocols(["h2"])
    make, left = SERVER_FLOODS[flood], asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)
        writer.write(SettingsFrame(0).serialize())
        await reader.read(65536)
        end = asyncio.create_task(ended(reader))
        for number in range(20_000):
            if end.done():
                break
            writer.write(make(number))
            if number % 50 == 0:
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await end
        left.set()
        writer.transport.abort()

    running = lab.running(context)
    running.rig.upstream.serve = serve
    before = resident()
    async with running as rig:
        reader, writer, client = await rig.speak_h2()
        client.send_headers(1, GET, end_stream=True)
        writer.write(client.data_to_send())
        statuses: list[bytes] = []
        async with asyncio.timeout(20):
            while not statuses and (data := await reader.read(65536)):
                for event in client.receive_data(data):
                    if isinstance(event, h2.events.ResponseReceived):
                        statuses.append(only(event.headers, b":status"))
                    if isinstance(event, h2.events.StreamReset):
                        statuses.append(b"reset")
            await left.wait()
        assert flood == "empty data" or [b"502"] == statuses
        assert resident() - before < 32 << 20
        writer.close()


async def test_a_header_block_that_grows_ends_its_connection(rig):
    reader, writer, client = await rig.speak_h2()
    before = resident()
    writer.write(client.data_to_send() + headers(1, block=hpack.Encoder().encode(GET) + BOMB))
    async with asyncio.timeout(20):
        await ended(reader)
    writer.transport.abort()

    assert (0, b"") == (rig.dials, rig.upstream.data)
    assert resident() - before < 32 << 20


# Servers that speak only HTTP/2.


HOST = {"host": "good.test"}


async def _both(rig):
    """Send one request over a new connection of a client that offers both protocols."""
    async with httpx.AsyncClient(http2=True, verify=rig.client_context()) as client:
        return await client.get(
            f"https://127.0.0.1:{rig.port}/v1", extensions={"sni_hostname": "good.test"}, headers=HOST
        )


async def test_a_client_that_offers_both_gets_http2_after_the_server_refused_http1(lab, upstream_root):
    context = lab.tls(upstream_root.leaf("good.test"))
    context.set_alpn_protocols(["h2"])
    far = Http2Far()
    async with lab.running(context) as rig:
        server = await asyncio.start_server(far.serve, "127.0.0.1", 0, ssl=context)
        rig.dial_port = server.sockets[0].getsockname()[1]
        first = await _both(rig)
        assert (502, "HTTP/1.1") == (first.status_code, first.http_version)
        assert "speaks only HTTP/2" in first.text
        assert [] == far.blocks
        second = await _both(rig)
        assert (200, "HTTP/2") == (second.status_code, second.http_version)
        assert 1 == len(far.blocks)
        _, writer = await rig.connect(alpn=("http/1.1",))
        assert "http/1.1" == writer.get_extra_info("ssl_object").selected_alpn_protocol()
        writer.close()
        server.close()


async def test_a_server_that_refuses_http1_in_its_handshake_is_remembered(lab, upstream_root, tmp_path):
    leaf = upstream_root.leaf("good.test")
    pem = tmp_path / "server.pem"
    pem.write_text(leaf.pem + leaf.key_pem)
    async with lab.running(lab.tls(leaf)) as rig:
        rig.dial_port = reserve_port()
        options = (
            "-accept",
            f"127.0.0.1:{rig.dial_port}",
            "-cert",
            str(pem),
            "-key",
            str(pem),
            "-alpn",
            "h2",
            "-quiet",
        )
        server = await asyncio.create_subprocess_exec("openssl", "s_server", *options)
        try:
            async with asyncio.timeout(20):
                while not await _listens(rig.dial_port):  # noqa: ASYNC110 - the state of another process
                    await asyncio.sleep(0.05)
            assert "speaks only HTTP/2" in (await _both(rig)).text
            _, writer = await rig.connect(alpn=("h2", "http/1.1"))
            assert "h2" == writer.get_extra_info("ssl_object").selected_alpn_protocol()
            writer.close()
        finally:
            server.kill()
            await server.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.close()
    return True


def test_what_is_known_of_servers_is_bounded_and_ends():
    now = 0.0
    known = Http2Servers(lambda: now)
    for number in range(_HTTP2_SERVERS + 1):
        known.add((f"{number}.test", 443))
    assert ("0.test", 443) not in known and ("1.test", 443) in known and ("1.test", 8443) not in known
    now = _HTTP2_SECONDS
    assert ("1.test", 443) not in known


async def test_a_plain_server_that_speaks_only_http2_is_no_reason_to_connect_again(lab):
    """Without TLS a client has nothing to choose, and the same port over TLS is another server."""
    async with lab.running(None, scheme=Scheme.HTTP) as rig:
        rig.bound = False
        server = await asyncio.start_server(Http2Far().serve, "127.0.0.1", 0)
        rig.dial_port = server.sockets[0].getsockname()[1]
        answer = await rig.exchange(b"GET /open HTTP/1.1\r\nHost: good.test\r\nAccept: */*\r\n\r\n")
        server.close()
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert b"new connection" not in answer
    assert ("good.test", 80) not in rig.engine._http2


@pytest.mark.parametrize("secrets", [frozenset({"api-token"}), None, frozenset({"other"})])
async def test_a_revocation_ends_streams_of_http2_that_are_under_way(secrets, lab, upstream_root):
    """At the client and at the server, of the flow that sent the secret. Another secret ends nothing: the control."""
    context = lab.tls(upstream_root.leaf("good.test"))
    context.set_alpn_protocols(["h2"])
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)
        writer.write(SettingsFrame(0).serialize() + answer(1))
        end = asyncio.create_task(ended(reader))
        while not end.done():
            writer.write(DataFrame(1, data=b"a part of the stream. ").serialize())
            await asyncio.sleep(0.01)
        left.set()
        writer.transport.abort()

    running = lab.running(context)
    running.rig.upstream.serve = serve
    async with running as rig:
        reader, writer, client = await rig.speak_h2()
        client.send_headers(1, GET, end_stream=True)
        writer.write(client.data_to_send())
        async with asyncio.timeout(20):
            got = 0
            while got < 3:
                got += sum(
                    isinstance(one, h2.events.DataReceived) for one in client.receive_data(await reader.read(999))
                )
        cut = rig.engine.revoke(secrets)
        if secrets == frozenset({"other"}):
            assert 0 == cut
            assert await reader.read(999)
        else:
            assert 1 == cut
            async with asyncio.timeout(1):
                await ended(reader)
                await left.wait()
        writer.close()
