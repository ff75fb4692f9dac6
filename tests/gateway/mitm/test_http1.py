"""Connections of the HTTP/1.1 framing: reuse, repetition, early ends, and clients of HTTP/1.0.

It tests `gateway/engines/http1/transaction.py`, `gateway/engines/http1/servers.py` and `gateway/engines/http1/flow.py`.
"""

import asyncio
import gc
import time

import pytest

from gateway.engines.ending import IdleTime
from gateway.engines.http1.flow import Http1Flow
from gateway.engines.http1.framing import Response
from gateway.engines.http1.transaction import Transaction
from gateway.engines.port import EngineLimits
from gateway.exchange import Exchange
from gateway.tls.contexts import UpstreamContext
from policy.facts import Scheme
from wire.patience import Patience

from .conftest import Lab, Reply, Rig, read_all, server_context

GET = b"GET /open/%d HTTP/1.1\r\nHost: good.test\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def closing_after(count: int, last: bytes = b"") -> Reply:
    """Answer so many requests, then close without notice; the request after them gets `last`."""
    served = 0

    async def reply(_head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        if served != count + 1:
            writer.write(OK)
        else:
            writer.write(last)
            writer.close()

    return reply


def outcomes(rig: Rig) -> list[object]:
    """The status of each request's outcome; None for a failure."""
    return [f.get("status") for kind, decision, f in rig.audit.records if (kind, decision) == ("request", "info")]


async def test_a_connection_carries_one_request_after_another(rig: Rig) -> None:
    answer = await rig.exchange(b"".join(GET % number for number in range(5)))
    assert (5, 5, 1) == (answer.count(b"200 OK"), rig.upstream.requests, rig.dials)


@pytest.mark.parametrize("same", [True, False])
async def test_roots_that_were_read_before_the_fork_count_only_if_they_are_the_configured_ones(
    same: bool, lab: Lab
) -> None:
    """Otherwise the engine reads the configured ones, and no server of the others is trusted."""
    before = UpstreamContext((lab.upstream_root if same else lab.stranger("Other")).pem)
    entered = lab.running(lab.tls(lab.upstream_root.leaf("good.test")))
    entered.rig.trusted = before
    async with entered as rig:
        assert b" 200 " in await rig.exchange(GET % 1)
    stranger = lab.stranger("Other")
    entered = lab.running(lab.tls(stranger.leaf("good.test")))
    entered.rig.trusted = before if same else UpstreamContext(stranger.pem)
    async with entered as rig:
        assert b" 502 " in await rig.exchange(GET % 1)


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"])
async def test_a_request_without_a_body_is_sent_again_when_a_kept_connection_is_gone(method: bytes, rig: Rig) -> None:
    rig.upstream.reply = closing_after(1)
    answer = await rig.exchange(GET % 1 + b"%s /open/2 HTTP/1.1\r\nHost: good.test\r\n\r\n" % method)
    assert (2, 2) == (answer.count(b"200 OK"), rig.dials)
    assert 2 == rig.upstream.data.count(b" /open/2 ")
    assert [200, 200] == outcomes(rig)


@pytest.mark.parametrize(
    ("count", "last", "request_"),
    [
        (1, b"", b"POST /open/2 HTTP/1.1\r\nHost: good.test\r\n\r\n"),
        (1, b"", b"PUT /open/2 HTTP/1.1\r\nHost: good.test\r\nContent-Length: 1\r\n\r\na"),
        (1, b"HTTP/1.1 2", GET % 2),
        (0, b"", GET % 2),
    ],
    ids=["no repeatable method", "a body", "a response that began", "a new connection"],
)
async def test_no_other_request_is_sent_twice(count: int, last: bytes, request_: bytes, rig: Rig) -> None:
    rig.upstream.reply = closing_after(count, last)
    answer = await rig.exchange(GET % 1 * count + request_)
    assert (count, 1) == (answer.count(b"200 OK"), answer.count(b"HTTP/1.1 502 "))
    assert 1 == rig.upstream.data.count(b" /open/2 ")
    assert [*[200] * count, None] == outcomes(rig)


@pytest.mark.parametrize("unasked", [b"", OK])
async def test_a_kept_connection_that_its_server_ended_before_the_next_request_is_not_used(
    unasked: bytes, rig: Rig
) -> None:
    """So a request that must not be sent twice arrives, too."""
    left = asyncio.Event()

    async def reply(head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        if b"/open/1 " in head:
            await writer.drain()
            await left.wait()
            writer.write(unasked)
            if not unasked:
                writer.close()

    rig.upstream.reply = reply
    reader, writer = await rig.connect()
    writer.write(GET % 1)
    assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200 ")
    left.set()
    async with asyncio.timeout(10):
        while len(rig.engine._pool):  # noqa: ASYNC110 - a pool has no event
            await asyncio.sleep(0.01)
    writer.write(b"POST /open/2 HTTP/1.1\r\nHost: good.test\r\nContent-Length: 1\r\n\r\na")
    async with asyncio.timeout(10):
        assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200 ")
    assert (2, 2) == (rig.dials, rig.upstream.requests)
    writer.close()


async def test_a_request_is_sent_again_once(rig: Rig) -> None:
    async def reply(head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        if b"/open/1 " in head:
            writer.write(OK)
        else:
            writer.close()

    rig.upstream.reply = reply
    answer = await rig.exchange(GET % 1 + GET % 2)
    assert (1, 1) == (answer.count(b"200 OK"), answer.count(b"HTTP/1.1 502 "))
    assert (2, 2) == (rig.dials, rig.upstream.data.count(b"/open/2 "))


@pytest.mark.parametrize("extra", [b"x", OK])
async def test_a_connection_with_bytes_behind_a_response_carries_no_other_request(extra: bytes, rig: Rig) -> None:
    async def reply(_head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + extra)

    rig.upstream.reply = reply
    answer = await rig.exchange(GET % 1 + GET % 2)
    assert (2, 2) == (answer.count(b"200 OK"), rig.dials)
    assert answer.endswith(b"\r\n\r\nok")


@pytest.mark.parametrize("connection", [b"", b"Connection: keep-alive\r\n"])
async def test_a_client_of_http_1_0_gets_a_body_without_chunks(connection: bytes, rig: Rig) -> None:
    async def reply(_head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")

    rig.upstream.reply = reply
    reader, writer = await rig.connect()
    writer.write(b"GET /open/1 HTTP/1.0\r\nHost: good.test\r\n" + connection + b"\r\n")
    async with asyncio.timeout(10):
        answer = await reader.read()
    assert answer.endswith(b"\r\n\r\nok")
    assert b"chunked" not in answer.lower()
    writer.close()


async def test_a_client_that_leaves_during_a_wait_ends_the_request_at_its_server(rig: Rig) -> None:
    ended = asyncio.Event()
    asked = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        assert b"" == await reader.read()
        ended.set()
        writer.close()

    rig.upstream.serve = serve  # type: ignore[method-assign]
    async with running_again(rig):
        _, writer = await rig.connect()
        writer.write(GET % 1)
        async with asyncio.timeout(10):
            await asked.wait()
            writer.close()
            await ended.wait()
    assert [None] == outcomes(rig)


class running_again:
    """Serve the rig's present `upstream.serve`, in the place of the one that the fixture has started."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    async def __aenter__(self) -> None:
        context = server_context(self.rig.upstream_root.leaf("good.test"), self.rig.directory)
        self.server = await asyncio.start_server(self.rig.upstream.serve, "127.0.0.1", 0, ssl=context)
        self.rig.dial_port = self.server.sockets[0].getsockname()[1]

    async def __aexit__(self, *_: object) -> None:
        self.server.close()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before a request", "in a request", "in a response"])
async def test_a_flow_ends_after_the_idle_time(when: str, lab: Lab) -> None:
    running = lab.running(None, EngineLimits(idle_seconds=1), Scheme.HTTP)
    released = asyncio.Event()

    async def reply(_head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        if when == "before a request":
            writer.write(OK)
            return
        if when == "in a response":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok")
        await released.wait()

    running.rig.upstream.reply = reply
    async with running as rig:
        reader, writer = await rig.connect()
        began = time.monotonic()
        writer.write(GET % 1)
        async with asyncio.timeout(30):
            await read_all(reader, quiet=30.0)
        assert time.monotonic() - began > 0.9
        writer.close()
        released.set()
    ends = [fields["reason"] for kind, decision, fields in rig.audit.records if (kind, decision) == ("flow", "deny")]
    assert ["idle"] == ends


async def test_a_flow_leaves_nothing_for_the_garbage_collector(rig: Rig) -> None:
    """Collections are pauses of all flows of the sandbox."""
    of_a_flow = Http1Flow | IdleTime | Patience | Response | Transaction | Exchange
    gc.collect()
    gc.disable()
    try:
        reader, writer = await rig.connect()
        for _ in range(3):
            writer.write(b"GET /v1 HTTP/1.1\r\nHost: good.test\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert b"ok" == await reader.readexactly(2)
        kept = [one for one in gc.get_objects() if isinstance(one, Response | Transaction | Exchange)]
        writer.close()
        await asyncio.wait(rig.flows)
        rig.flows.clear()
        left = [one for one in gc.get_objects() if isinstance(one, of_a_flow)]
        assert ([], []) == (kept, left)
    finally:
        gc.enable()
