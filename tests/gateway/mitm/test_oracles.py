"""A program in the sandbox uses an echoing server to guess the secret character by character.

It observes the bytes that arrive before the server continues, and the bytes that are scrubbed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import h2.events
import pytest

from gateway.ledger import Ledger
from gateway.scrub.searched import MAX_MATCHES, MAX_PARTIAL
from policy.decision import AllowRequest

from .conftest import Lab, Rig, only, read_all
from .test_streams import POST, Caller, Server

pytestmark = pytest.mark.slow

SECRET = "QXZJVWQQZXZJVWJZQXJVVWXZ"
"""A secret of letters that occur nowhere else in a response."""
WRONG = "Y"
KNOWN = 4
"""The number of characters that the attacker knows, such as the fixed beginning of a token."""
QUIET = 0.2


@dataclass
class Echo:
    """A server that sends the first part of a body, waits, and then ends its response. `kind` is its Content-Type."""

    kind: str = "text/plain"
    body: bytes = b""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def over_http1(self, _head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {self.kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode() + b"%x\r\n%s\r\n" % (len(self.body), self.body))
        await writer.drain()
        await self.go_on.wait()
        writer.write(b"0\r\n\r\n")

    async def over_http2(self, server: Server, event: h2.events.Event) -> None:
        if not isinstance(event, h2.events.StreamEnded):
            return
        server.state.send_headers(event.stream_id, [(":status", "200"), ("content-type", self.kind)])
        server.state.send_data(event.stream_id, self.body)
        server.writer.write(server.state.data_to_send())
        self.tasks.append(asyncio.create_task(self._end(server, event.stream_id)))

    async def _end(self, server: Server, stream: int) -> None:
        await self.go_on.wait()
        server.state.end_stream(stream)
        server.writer.write(server.state.data_to_send())


async def seen(rig: Rig, echo: Echo, over: str) -> tuple[bytes, bytes]:
    """Return the bytes of a response that arrive before the server continues, and those after."""
    echo.go_on.clear()
    if over == "HTTP/1.1":
        reader, writer = await rig.connect()
        writer.write(b"POST /open HTTP/1.1\r\nHost: good.test\r\nContent-Length: 0\r\n\r\n")
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
        await _settled()
        before = head + await read_all(reader, QUIET, first=QUIET)
        echo.go_on.set()
        after = await read_all(reader, QUIET, first=QUIET)
        writer.close()
        return before, after
    caller = Caller(await rig.speak_h2())
    caller.call(1, [*POST[:3], (":path", "/open")])
    with contextlib.suppress(AssertionError):  # the connection ended
        await caller.hear(h2.events.ResponseReceived, 1)
    await _settled()
    with contextlib.suppress(TimeoutError, AssertionError):
        await caller.hear(h2.events.StreamEnded, 1, QUIET * 2)
    before = caller.body(1)
    status = [only(one.headers, b":status") for one in caller.heard if isinstance(one, h2.events.ResponseReceived)]
    echo.go_on.set()
    with contextlib.suppress(TimeoutError, AssertionError):
        await caller.hear(h2.events.StreamEnded, 1, QUIET * 2)
    caller.close()
    return b" ".join(status) + before, caller.body(1)[len(before) :]


async def _settled() -> None:
    """Wait until this loop, which runs server, gateway and client, has no work except timers."""
    loop: Any = asyncio.get_running_loop()
    calm = 0
    async with asyncio.timeout(30):
        while calm < 3:
            await asyncio.sleep(0)
            calm = 0 if loop._ready or loop._selector.select(0) else calm + 1


async def learn(rig: Rig, echo: Echo, over: str, shape: str, *, wanted: int, ends: bool) -> int:
    """Return the number of characters the attacker learns: those for which a right and a wrong guess look different.

    Args:
        ends: the attacker also observes the bytes that come with the end.
    """
    for count in range(KNOWN, KNOWN + wanted):
        answers = []
        for last in (SECRET[count], WRONG):
            echo.body = shaped(shape, SECRET[:count] + last)
            parts = (await seen(rig, echo, over))[: 1 + ends]
            answers.append(b"".join(parts).replace(last.encode(), b"?"))
        if answers[0] == answers[1]:
            return count - KNOWN
    return wanted


def shaped(shape: str, guess: str) -> bytes:
    text = f"id: {guess}".encode()
    return {
        "tail": text,
        "message": b"\0" + len(text).to_bytes(4, "big") + text,
        "within a message": b"\0\0\1\0\0" + text,
        "line": text + b"\n",
        "base64 line": b"A" * 30 + guess.encode() + b"\n",
    }[shape]


@pytest.fixture(params=["HTTP/1.1", "HTTP/2"])
async def asked(request: pytest.FixtureRequest, lab: Lab, monkeypatch) -> AsyncIterator[tuple[Rig, Echo, str]]:
    echo = Echo()
    context = lab.tls(lab.upstream_root.leaf("good.test"))
    if request.param == "HTTP/2":
        context.set_alpn_protocols(["h2"])
    running = lab.running(context)
    running.rig.secret = SECRET
    running.rig.upstream.reply = echo.over_http1
    if request.param == "HTTP/2":
        running.rig.upstream.serve = Server(echo.over_http2).serve
    async with running as rig:
        yield rig, echo, request.param
        for task in echo.tasks:
            task.cancel()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("text/plain", "line"),
        ("text/event-stream", "line"),
        ("application/octet-stream", "base64 line"),
        ("application/grpc", "within a message"),
    ],
)
async def test_nothing_is_learned_from_when_it_arrives(asked, kind, shape):
    rig, echo, over = asked
    echo.kind = kind
    assert 0 == await learn(rig, echo, over, shape, wanted=2, ends=False)


@pytest.mark.parametrize("spent", [MAX_PARTIAL - 2, pytest.param(0, marks=pytest.mark.extended)])
@pytest.mark.parametrize(("kind", "shape"), [("application/grpc", "tail"), ("application/grpc+proto", "message")])
async def test_what_ends_tell_is_bounded_and_then_nothing_is_answered(asked, kind, shape, spent):
    """For the end of a body and of a message."""
    rig, echo, over = asked
    echo.kind = kind
    rig.engine._effects.disclosures.reflections = spent
    learned = await learn(rig, echo, over, shape, wanted=MAX_PARTIAL - spent + 4, ends=True)
    assert learned <= MAX_PARTIAL - spent
    if learned:  # otherwise the protocol was refused before any answer
        before, _ = await seen(rig, echo, over)
        assert b"403" in before


async def test_matches_are_answered_up_to_a_rate_and_then_refused(rig):
    """For requests of a host that is sent secrets, also those that carry none; honest ones get their answers."""
    ledger = Ledger.fresh()
    rig.engine._effects = replace(rig.engine._effects, disclosures=ledger)

    async def reply(head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        body = rig.secret.encode() if b"/me" in head else b"fine"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    rig.upstream.reply = reply
    get = b"GET %s HTTP/1.1\r\nHost: good.test\r\n\r\n"
    now = asyncio.get_running_loop().time()
    for _ in range(MAX_MATCHES - 2):
        ledger.match(now, 0)
    for _ in range(2):
        assert b"*" * len(rig.secret) in await rig.exchange(get % b"/open/me")
        ledger.match(now, 0)
    refused = await rig.exchange(get % b"/open/me")
    assert refused.startswith(b"HTTP/1.1 403 ") and b"reflection: too many responses held a secret" in refused
    assert (await rig.exchange(get % b"/v1")).startswith(b"HTTP/1.1 403 ")
    rig.decide = lambda _facts: AllowRequest("elsewhere")
    assert (await rig.exchange(get % b"/open/other")).endswith(b"fine")


async def test_an_answer_that_is_under_way_ends_at_the_bound(rig):
    rig.engine._effects.disclosures.reflections = MAX_PARTIAL - 1
    go_on = asyncio.Event()

    async def reply(_head: bytes, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nbegun\n\r\n")
        await writer.drain()
        await go_on.wait()
        tail = rig.secret.encode()[:9]
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(tail), tail))

    rig.upstream.reply = reply
    ends = [await rig.connect() for _ in range(2)]
    for reader, writer in ends:
        writer.write(b"GET /open HTTP/1.1\r\nHost: good.test\r\n\r\n")
        await reader.readuntil(b"begun\n\r\n")
    go_on.set()
    answers = sorted([await read_all(reader) for reader, _ in ends])
    assert [b"", b"9\r\n*********\r\n0\r\n\r\n"] == answers
    for _, writer in ends:
        writer.close()


async def test_a_message_of_grpc_arrives_when_it_is_whole_and_one_with_the_secret_without_it(asked):
    """Over HTTP/2 with honest peers. Over HTTP/1.1 the same bytes are held until more bytes or the end arrive."""
    rig, echo, over = asked
    echo.kind = "application/grpc"
    echo.body = shaped("message", f"{SECRET}, then more of it")
    before, after = await seen(rig, echo, over)
    masked = echo.body.replace(SECRET.encode(), b"*" * len(SECRET))
    assert (masked in before) is (over == "HTTP/2")
    assert masked in before or after.count(b"*") == len(SECRET)
    assert SECRET.encode() not in before + after
