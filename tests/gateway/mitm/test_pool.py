"""Upstream connections that the flows of one sandbox share, and what must not be shared. The server is the judge.

It tests `gateway/engines/pool.py`, `gateway/engines/http1/servers.py` and `gateway/engines/buffered.py`.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gateway.engines.buffered import BufferedConnection
from gateway.engines.port import EngineLimits
from policy.decision import AllowRequest, Deny
from policy.facts import Scheme
from policy.injection import InjectionKind
from tests.gateway.mitm.conftest import SECRET, Lab, Rig

SECONDS = 20.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class Line:
    """One connection at the server: the requests on it, and its end."""

    number: int
    writer: asyncio.StreamWriter
    heads: list[bytes] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Far:
    """A server that stores which connection carries which request. `answer` answers one request."""

    lines: list[Line] = field(default_factory=list)
    answer: Callable[["Far", Line], Any] | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(len(self.lines), writer)
        self.lines.append(line)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line.heads.append(head)
                if self.answer is not None:
                    await self.answer(self, line)
                else:
                    writer.write(OK)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError, ssl.SSLError):
            pass
        finally:
            line.ended.set()
            writer.close()

    def carried(self) -> list[int]:
        """Return the number of requests on each connection, in the order of the connections."""
        return [len(line.heads) for line in self.lines]


@dataclass
class Site:
    """A sandbox's engine and the server."""

    rig: Rig
    far: Far

    async def ask(self, path: str = "/open", headers: bytes = b"", method: str = "GET", end: bool = True) -> bytes:
        """Make one request in a flow of its own; return the response."""
        flow = await self.flow()
        answer = await flow.ask(path, headers, method)
        if end:
            await flow.end()
        return answer

    async def flow(self) -> "Caller":
        return Caller(*await self.rig.connect())

    def idle(self) -> int:
        return len(self.rig.engine._pool)

    async def settled(self, idle: int) -> None:
        """Wait until the pool has so many connections."""
        await until(lambda: self.idle() == idle)

    async def gone(self, *numbers: int) -> None:
        """Wait until the server sees the end of these connections."""
        async with asyncio.timeout(SECONDS):
            for number in numbers:
                await self.far.lines[number].ended.wait()


@dataclass
class Caller:
    """The client of one flow."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, path: str = "/open", headers: bytes = b"", method: str = "GET") -> None:
        self.writer.write(f"{method} {path} HTTP/1.1\r\nHost: good.test\r\n".encode() + headers + b"\r\n")

    async def ask(self, path: str = "/open", headers: bytes = b"", method: str = "GET") -> bytes:
        self.send(path, headers, method)
        return await self.read()

    async def read(self) -> bytes:
        async with asyncio.timeout(SECONDS):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            return head + await self.reader.readexactly(int(length or b"0"))

    async def end(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await self.writer.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def served(
    lab: Lab, limits: EngineLimits | None = None, scheme: Scheme = Scheme.HTTPS, *, bound: bool | None = None
) -> AsyncIterator[Site]:
    far = Far()
    context = lab.tls(lab.upstream_root.leaf("good.test")) if scheme is Scheme.HTTPS else None
    running = lab.running(context, limits, scheme)
    running.rig.upstream.serve = far.serve  # type: ignore[method-assign]
    running.rig.bound = bound
    async with running as rig:
        yield Site(rig, far)


@pytest.fixture
async def site(lab: Lab) -> AsyncIterator[Site]:
    async with served(lab) as made:
        yield made


# Reuse.


@pytest.mark.parametrize("scheme", [Scheme.HTTPS, Scheme.HTTP])
async def test_flows_of_a_sandbox_use_one_connection_in_turn(lab: Lab, scheme: Scheme) -> None:
    """Each allow record names the connection, and no other record of it is made."""
    async with served(lab, scheme=scheme) as site:
        site.rig.decide = lambda _facts: AllowRequest("open")
        for _ in range(3):
            assert (await site.ask()).startswith(b"HTTP/1.1 200 ")
        assert ([3], 1) == (site.far.carried(), site.rig.dials)
    where = {"address": "127.0.0.1", "peer_name": None if scheme is Scheme.HTTP else "good.test"}
    records = [(kind, said, fields) for kind, said, fields in site.rig.audit.records if said in ("allow", "info")]
    allows = [fields for kind, said, fields in records if (kind, said) == ("request", "allow")]
    assert [None, *[where] * 2] == [
        {name: fields.get(name) for name in where} if "address" in fields else None for fields in allows
    ]
    assert 3 == len({fields["flow"] for fields in allows})
    (connect,) = [fields for kind, said, fields in records if kind == "connect"]
    assert allows[0]["request_id"] == connect["request_id"]


async def test_a_connection_in_use_is_used_by_no_other_flow(site: Site) -> None:
    go = asyncio.Event()

    async def answer(_far: Far, line: Line) -> None:
        if line.number == 0:
            await go.wait()
        line.writer.write(OK)

    site.far.answer = answer
    first = await site.flow()
    first.send()
    assert (await site.ask()).startswith(b"HTTP/1.1 200 ")
    go.set()
    assert (await first.read()).startswith(b"HTTP/1.1 200 ")
    await first.end()
    assert ([1, 1], 2) == (site.far.carried(), site.idle())


async def test_a_reserved_connection_is_returned_when_its_request_is_refused(site: Site) -> None:
    await site.ask("/v1")
    site.rig.broken_lease = True
    assert (await site.ask("/v1")).startswith(b"HTTP/1.1 503 ")
    site.rig.broken_lease = False
    await site.ask("/v1")
    assert [2] == site.far.carried()


# Secrets.


@pytest.mark.parametrize("flows", ["one flow", "flows of their own"])
async def test_a_connection_that_carried_a_secret_carries_only_requests_with_it(site: Site, flows: str) -> None:
    paths = ["/open", "/v1", "/open", "/v1"]
    if flows == "one flow":
        flow = await site.flow()
        for path in paths:
            await flow.ask(path)
        await flow.end()
    else:
        for path in paths:
            await site.ask(path)
    assert [[b"GET /open "] * 2, [b"GET /v1 "] * 2] == [
        [head.partition(b"HTTP")[0] for head in line.heads] for line in site.far.lines
    ]


async def test_another_value_of_a_secret_goes_on_another_connection(site: Site) -> None:
    """Also where no revocation has come."""
    await site.ask("/v1")
    site.rig.secret = "the-next-value-of-it"
    await site.ask("/v1")
    assert [1, 1] == site.far.carried()
    await site.gone(0)


async def test_a_secret_in_another_header_goes_on_another_connection(site: Site) -> None:
    await site.ask("/v1")
    site.rig.plan = replace(site.rig.plan, kind=InjectionKind.API_KEY, name="X-Api-Key")
    await site.ask("/v1")
    assert [1, 1] == site.far.carried()


async def test_a_response_on_a_used_connection_is_searched_for_secrets(site: Site) -> None:
    async def answer(_far: Far, line: Line) -> None:
        line.writer.write(b"HTTP/1.1 200 OK\r\nX-Seen: %s\r\nContent-Length: 18\r\n\r\n" % SECRET.encode())
        line.writer.write(SECRET.encode())

    site.far.answer = answer
    for path in ("/v1", "/v1", "/open", "/open"):
        shown = await site.ask(path)
        assert (True, True, False) == (b"[REDACTED]" in shown, shown.endswith(b"*" * 18), SECRET.encode() in shown)
    assert [2, 2] == site.far.carried()


@pytest.mark.parametrize(("names", "left"), [({"api-token"}, 1), ({"another"}, 2), (None, 1)])
async def test_a_revocation_ends_idle_connections_that_carried_the_secret(
    site: Site, names: set[str] | None, left: int
) -> None:
    await site.ask("/open")
    await site.ask("/v1")
    site.rig.engine.revoke(None if names is None else frozenset(names))
    if left == 1:
        await site.gone(1)
    assert left == site.idle()
    await site.ask("/open")
    await site.ask("/v1")
    assert ([2, 1, 1] if left == 1 else [2, 2]) == site.far.carried()


async def test_an_aborted_flow_resets_only_its_own_connections(site: Site) -> None:
    """A flow that used the secret is aborted. The connection that it has used without a secret stays in the pool."""
    flow = await site.flow()
    await flow.ask("/open")
    await flow.ask("/v1")
    assert 1 == site.rig.engine.revoke(frozenset({"api-token"}))
    await site.gone(1)
    assert not site.far.lines[0].ended.is_set()
    await site.ask("/open")
    assert [2, 1] == site.far.carried()
    await flow.end()


# Changes while a connection is in use, reserved or idle.


def rechecked(site: Site) -> None:
    site.rig.engine.recheck()


def rerooted(site: Site) -> None:
    site.rig.engine.reconfigure(upstream_roots=site.rig.upstream_root.pem)


def dropped(site: Site) -> None:
    site.rig.engine.drop_idle()


def revoked(site: Site) -> None:
    site.rig.engine.revoke(frozenset({"another"}))


CHANGES = pytest.mark.parametrize("change", [rechecked, rerooted, dropped])


@CHANGES
async def test_a_change_ends_idle_connections(site: Site, change: Callable[[Site], None]) -> None:
    await site.ask()
    change(site)
    assert 0 == site.idle()
    await site.gone(0)
    await site.ask()
    assert [1, 1] == site.far.carried()


@pytest.mark.parametrize("change", [rechecked, rerooted, dropped, revoked])
async def test_a_connection_in_use_during_a_change_is_not_kept(site: Site, change: Callable[[Site], None]) -> None:
    arrived, go = asyncio.Event(), asyncio.Event()

    async def answer(_far: Far, line: Line) -> None:
        arrived.set()
        await go.wait()
        line.writer.write(OK)

    site.far.answer = answer
    flow = await site.flow()
    flow.send()
    async with asyncio.timeout(SECONDS):
        await arrived.wait()
    change(site)
    go.set()
    assert (await flow.read()).startswith(b"HTTP/1.1 200 ")
    await site.gone(0)
    assert (await flow.ask()).startswith(b"HTTP/1.1 200 ")
    await flow.end()
    assert [1, 1] == site.far.carried()


async def test_a_connection_that_is_dialled_during_a_change_is_not_kept(site: Site) -> None:
    dialling, go = asyncio.Event(), asyncio.Event()
    dial = site.rig.dial

    async def slow(*arguments: Any) -> Any:
        dialling.set()
        await go.wait()
        return await dial(*arguments)

    site.rig.dial = slow  # type: ignore[method-assign]
    flow = await site.flow()
    flow.send()
    async with asyncio.timeout(SECONDS):
        await dialling.wait()
    rechecked(site)
    go.set()
    assert (await flow.read()).startswith(b"HTTP/1.1 200 ")
    await site.gone(0)
    await flow.end()


async def test_a_flow_under_former_roots_leaves_no_connection_to_later_flows(site: Site) -> None:
    """It dials after the change of roots, which its own requests do not follow."""
    former = await site.flow()
    await former.ask("/denied")
    rerooted(site)
    await former.ask()
    await site.ask()
    await former.ask()
    await former.end()
    assert [2, 1] == site.far.carried()


@pytest.mark.parametrize("change", [rechecked, lambda site: site.rig.engine.revoke(frozenset({"api-token"}))])
async def test_a_connection_that_is_reserved_during_a_change_carries_nothing(
    site: Site, change: Callable[[Site], None]
) -> None:
    """The request waits for the log. It then goes on a new connection, which has its own record."""
    await site.ask("/v1")
    recording, go = asyncio.Event(), asyncio.Event()
    accept = site.rig.audit.accept

    async def slow(kind: str, decision: str, **fields: object) -> None:
        if (kind, decision) == ("request", "allow"):
            recording.set()
            await go.wait()
        await accept(kind, decision, **fields)

    site.rig.audit.accept = slow  # type: ignore[method-assign]
    flow = await site.flow()
    flow.send("/v1")
    async with asyncio.timeout(SECONDS):
        await recording.wait()
    change(site)
    go.set()
    assert (await flow.read()).startswith(b"HTTP/1.1 200 ")
    await flow.end()
    assert [1, 1] == site.far.carried()
    await site.gone(0)


@pytest.mark.parametrize("how", ["end", "bytes"])
async def test_a_reserved_connection_that_its_server_ends_carries_nothing(lab: Lab, how: str) -> None:
    """The request waits for the log. It must not be sent twice, and arrives on a new connection."""
    async with served(lab, scheme=Scheme.HTTP, bound=False) as site:
        await site.ask()
        recording, go = asyncio.Event(), asyncio.Event()
        accept = site.rig.audit.accept

        async def slow(kind: str, decision: str, **fields: object) -> None:
            if (kind, decision) == ("request", "allow"):
                recording.set()
                await go.wait()
            await accept(kind, decision, **fields)

        site.rig.audit.accept = slow  # type: ignore[method-assign]
        flow = await site.flow()
        flow.send(method="POST", headers=b"Content-Length: 0\r\n")
        async with asyncio.timeout(SECONDS):
            await recording.wait()
        (line,) = site.far.lines
        if how == "end":
            line.writer.close()
        else:
            line.writer.write(OK)
        await until(lambda: any(one.at_end or one.data for each in servers(site) for one in each.connections))
        go.set()
        assert (await flow.read()).endswith(b"\r\n\r\nok")
        await flow.end()
        await site.gone(0)
        assert [1, 1] == site.far.carried()


@pytest.mark.parametrize("kept", [True, False])
async def test_no_connection_is_used_without_an_allowed_request(site: Site, kept: bool) -> None:
    flow = await site.flow()
    await flow.ask("/open" if kept else "/denied")
    (servers_,) = servers(site)
    assert kept is (servers_.reserve(frozenset()) is not None)
    with pytest.raises(RuntimeError, match="a connection without an allowed request"):
        await servers_.get((), None)
    assert int(kept) == site.rig.dials
    await flow.end()


async def test_bytes_on_a_used_connection_are_a_sign_of_life_of_its_flow(lab: Lab) -> None:
    async with served(lab, scheme=Scheme.HTTP, bound=False) as site:
        beats, seen, go = 0, asyncio.Event(), asyncio.Event()

        def beat() -> None:
            nonlocal beats
            beats += 1

        async def answer(_far: Far, line: Line) -> None:
            if len(line.heads) > 1:
                seen.set()
                await go.wait()
            line.writer.write(OK)

        site.rig.engine._ledger.beat = beat  # type: ignore[method-assign]
        site.far.answer = answer
        await site.ask()
        flow = await site.flow()
        flow.send()
        async with asyncio.timeout(SECONDS):
            await seen.wait()
        before = beats
        go.set()
        await flow.read()
        assert before + 1 == beats
        await flow.end()


# The server ends a connection, or sends what is not asked for.


@pytest.mark.parametrize("scheme", [Scheme.HTTPS, Scheme.HTTP])
@pytest.mark.parametrize("how", ["end", "reset", "bytes", "a response"])
async def test_an_idle_connection_ends_when_its_server_ends_it_or_sends_bytes(
    lab: Lab, scheme: Scheme, how: str
) -> None:
    """At once, before another request needs it."""
    async with served(lab, scheme=scheme, bound=False) as site:
        await site.ask()
        (line,) = site.far.lines
        if how == "end":
            line.writer.close()
        elif how == "reset":
            line.writer.transport.abort()
        else:
            line.writer.write(b"x" if how == "bytes" else OK)
        await site.settled(0)
        await site.gone(0)
        answer = await site.ask(method="POST", headers=b"Content-Length: 0\r\n")
        assert answer.endswith(b"\r\n\r\nok")
        assert [1, 1] == site.far.carried()


def closing(*numbers: int) -> Callable[[Far, Line], Any]:
    """Answer, but on these connections end the connection in place of the answer to a second request."""

    async def answer(_far: Far, line: Line) -> None:
        if line.number in numbers and len(line.heads) > 1:
            line.writer.close()
        else:
            line.writer.write(OK)

    return answer


async def kept(site: Site, count: int) -> None:
    """Leave so many idle connections in the pool."""
    go, former = asyncio.Event(), site.far.answer

    async def together(far: Far, line: Line) -> None:
        if len(far.lines) == count:
            go.set()
        await go.wait()
        line.writer.write(OK)

    site.far.answer = together
    await asyncio.gather(*(site.ask() for _ in range(count)))
    site.far.answer = former
    assert count == site.idle()


async def test_a_repeated_request_goes_on_a_new_connection(site: Site) -> None:
    """The pool has three connections that the server ends as soon as it is asked something."""
    site.far.answer = closing(0, 1, 2)
    await kept(site, 3)
    assert (await site.ask()).startswith(b"HTTP/1.1 200 ")
    assert ([1, 1, 1, 2], 4) == (sorted(site.far.carried()), site.rig.dials)
    assert 1 == site.far.carried()[3]


@pytest.mark.parametrize("request_", [("POST", b"Content-Length: 0\r\n"), ("PATCH", b"Content-Length: 0\r\n")])
async def test_a_request_that_may_have_been_carried_out_is_answered_with_the_reason(
    site: Site, request_: tuple[str, bytes]
) -> None:
    site.far.answer = closing(0)
    await site.ask()
    answer = await site.ask(method=request_[0], headers=request_[1])
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert b"It may have received the request, so it was not sent again." in answer
    assert [2] == site.far.carried()
    assert (await site.ask()).startswith(b"HTTP/1.1 200 ")


async def test_the_failure_of_a_new_connection_is_no_reason_to_repeat(site: Site) -> None:
    async def answer(_far: Far, line: Line) -> None:
        line.writer.close()

    site.far.answer = answer
    assert b"not sent again" not in await site.ask()
    assert [1] == site.far.carried()


async def test_a_connection_whose_reader_was_paused_is_watched_while_it_is_idle(lab: Lab) -> None:
    """More bytes than the buffer's limit arrive while the response head is judged."""
    async with served(lab, scheme=Scheme.HTTP) as site:
        size, sent = 400_000, asyncio.Event()
        asked = 0
        searched = site.rig.searched

        async def slow(use: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked > 1:
                await sent.wait()
            return await searched(use)

        async def answer(_far: Far, line: Line) -> None:
            line.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))
            # The policy now permits one more secret, so the response waits for its value.
            site.rig.plan = replace(site.rig.plan, binding="later")

        site.rig.searched = slow  # type: ignore[method-assign]
        site.far.answer = answer
        flow = await site.flow()
        flow.send()
        await until(lambda: any(one.connections and not one.connections[0]._reading for one in servers(site)))
        sent.set()
        assert len(await flow.read()) > size
        assert 1 == site.idle()
        site.far.lines[0].writer.close()
        await site.settled(0)
        await flow.end()


def servers(site: Site) -> list[Any]:
    return [flow._servers for flow in site.rig.engine._live]  # type: ignore[attr-defined]


# Connections that are not kept.


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokx",
        OK + OK,
    ],
    ids=["close", "HTTP/1.0", "a byte more", "a second response"],
)
async def test_a_connection_after_such_a_response_carries_no_other_request(site: Site, raw: bytes) -> None:
    async def answer(_far: Far, line: Line) -> None:
        line.writer.write(raw)

    site.far.answer = answer
    for _ in range(2):
        assert (await site.ask()).endswith(b"\r\n\r\nok")
    assert [1, 1] == site.far.carried()
    await site.gone(0, 1)


async def test_a_connection_of_an_incomplete_response_is_not_kept(site: Site) -> None:
    async def answer(_far: Far, line: Line) -> None:
        line.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok")

    site.far.answer = answer
    flow = await site.flow()
    flow.send()
    await flow.reader.readuntil(b"\r\n\r\n")
    await flow.end()
    await site.gone(0)
    assert 0 == site.idle()


async def test_a_connection_with_an_early_response_is_not_kept(site: Site) -> None:
    """The server answers before the body has arrived. The rest of the body goes nowhere."""
    flow = await site.flow()
    flow.send(method="POST", headers=b"Content-Length: 5\r\n")
    async with asyncio.timeout(SECONDS):
        await flow.reader.readuntil(b"\r\n\r\nok")
    flow.writer.write(b"12345")
    assert (await flow.ask()).startswith(b"HTTP/1.1 200 ")
    await flow.end()
    assert [1, 1] == site.far.carried()
    await site.gone(0)


@pytest.mark.parametrize("left", ["bytes to send", "received bytes", "an end", "nothing"])
async def test_only_a_connection_without_a_byte_left_comes_to_rest(left: str) -> None:
    near, far = socket.socketpair()
    with far:
        far.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=near)
        connection = await BufferedConnection.over(reader, writer, 1000, lambda: None)
        if left == "bytes to send":
            connection.write(bytes(10_000_000))
        elif left == "received bytes":
            far.send(b"x")
            await connection.fill()
        elif left == "an end":
            far.shutdown(socket.SHUT_WR)
            assert not await connection.fill()
        assert (left == "nothing") is connection.rest(lambda: None)
        connection.abort()
        await connection.closed()


@pytest.mark.parametrize(
    ("buffer", "changed", "whole"),
    [(4096, False, True), (1_000_000, False, True), (1_000_000, True, False)],
    ids=["in the worker", "in the kernel", "in the kernel, and the policy changes"],
)
async def test_a_body_that_was_answered_early_is_sent_under_its_own_policy_only(
    lab: Lab, buffer: int, changed: bool, whole: bool
) -> None:
    """The server answers, then reads. A connection with bytes left in the worker is not kept, and ends after them.

    Args:
        buffer: the bytes that the kernel takes.
    """
    size, go = 60_000, asyncio.Event()
    loop = asyncio.get_running_loop()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)

        async def serve() -> int:
            sock, _ = await loop.sock_accept(listener)
            with sock:
                sock.setblocking(False)
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += await loop.sock_recv(sock, 1)
                await loop.sock_sendall(sock, OK)
                await go.wait()
                received = 0
                with contextlib.suppress(ConnectionResetError):
                    while received < size and (part := await loop.sock_recv(sock, 65536)):
                        received += len(part)
                return received

        async def dial(*_: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
            sock.setblocking(False)
            await loop.sock_connect(sock, listener.getsockname())
            return *await asyncio.open_connection(sock=sock), "127.0.0.1"

        async with served(lab, scheme=Scheme.HTTP, bound=False) as site:
            site.rig.dial = dial  # type: ignore[method-assign]
            serving = asyncio.create_task(serve())
            flow = await site.flow()
            flow.send(method="PUT", headers=b"Content-Length: %d\r\n" % size)
            flow.writer.write(bytes(size))
            assert (await flow.read()).startswith(b"HTTP/1.1 200 ")
            assert int(buffer > size) == site.idle()
            if changed:
                rechecked(site)
            go.set()
            async with asyncio.timeout(SECONDS):
                assert whole is (size == await serving)
            await flow.end()


# Authentication of connections.

NTLM = b"Authorization: NTLM TlRMTVNTUAABAAAA\r\n"
BOUND = {
    "NTLM is asked for": (b"", b"WWW-Authenticate: NTLM\r\n"),
    "Negotiate is one of several": (b"", b'www-authenticate: Basic realm="a", Negotiate\r\n'),
    "Negotiate is in a second field": (b"", b"WWW-Authenticate: Basic\r\nWWW-Authenticate: negotiate YII=\r\n"),
    "a proxy asks": (b"", b"Proxy-Authenticate: Basic\r\n"),
    "the connection stays authenticated": (b"", b"Persistent-Auth: true\r\n"),
    "the client sends NTLM": (NTLM, b""),
    "the client sends Negotiate": (b"authorization: negotiate YII=\r\n", b""),
}


@pytest.mark.parametrize("case", BOUND)
async def test_an_authenticated_connection_belongs_to_its_flow(site: Site, case: str) -> None:
    """It carries all requests of the flow, none of another flow, and ends with the flow."""
    asked, answered = BOUND[case]

    async def answer(_far: Far, line: Line) -> None:
        line.writer.write(
            OK.replace(b"\r\n", b"\r\n" + answered, 1) if line.number == 0 and len(line.heads) == 1 else OK
        )

    site.far.answer = answer
    flow = await site.flow()
    await flow.ask(headers=asked)
    await site.ask()
    await flow.ask()
    await flow.ask()
    assert [3, 1] == site.far.carried()
    await flow.end()
    await site.gone(0)
    await site.ask()
    assert [3, 2] == site.far.carried()


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        (b"Authorization: Bearer abc\r\n", b""),
        (b"Authorization: Basic eA==\r\n", b'WWW-Authenticate: Digest realm="a"\r\n'),
        (b"", b"WWW-Authenticate: Bearer\r\n"),
    ],
)
async def test_authentication_of_single_requests_binds_no_connection(site: Site, asked: bytes, answered: bytes) -> None:
    async def answer(_far: Far, line: Line) -> None:
        line.writer.write(OK.replace(b"\r\n", b"\r\n" + answered, 1))

    site.far.answer = answer
    for _ in range(2):
        await site.ask(headers=asked)
    assert [2] == site.far.carried()


# Limits.


@pytest.mark.parametrize("limits", [EngineLimits(idle_per_destination=2), EngineLimits(idle_connections=2)])
async def test_the_connection_that_is_idle_for_longest_ends_first(lab: Lab, limits: EngineLimits) -> None:
    async with served(lab, limits) as site:
        go = [asyncio.Event() for _ in range(4)]

        async def answer(_far: Far, line: Line) -> None:
            await go[line.number].wait()
            line.writer.write(OK)

        site.far.answer = answer
        flows = []
        for _ in range(4):
            flow = await site.flow()
            flow.send()
            flows.append(flow)
            await until(lambda: site.far.carried() == [1] * len(flows))
        for number in (2, 0, 3, 1):
            go[number].set()
            await flows[number].read()
        assert 4 == site.idle()  # one for each live flow
        for flow in flows:
            await flow.end()
        await site.gone(2, 0)
        assert (2, False, False) == (site.idle(), *(site.far.lines[number].ended.is_set() for number in (1, 3)))


async def test_as_many_flows_as_there_may_be_dial_once_each(lab: Lab) -> None:
    """Their connections rest between their requests. The limits of idle connections do not end these."""
    async with served(lab, EngineLimits(idle_per_destination=1, idle_connections=1)) as site:
        flows = [await site.flow() for _ in range(12)]
        await together(site, flows)
        for _ in range(3):
            for flow in flows:
                await flow.ask()
        assert (12, 4 * 12) == (len(site.far.lines), sum(site.far.carried()))
        for flow in flows:
            await flow.end()
        await site.settled(1)


async def together(site: Site, flows: list[Caller]) -> None:
    """Ask in all flows at once: no response comes before the last request."""
    go = asyncio.Event()

    async def answer(far: Far, line: Line) -> None:
        if len(far.lines) == len(flows):
            go.set()
        await go.wait()
        line.writer.write(OK)

    site.far.answer = answer
    await asyncio.gather(*(flow.ask() for flow in flows))
    site.far.answer = None


async def test_a_limit_counts_each_destination_on_its_own(lab: Lab) -> None:
    """One destination cannot push out the connections to another."""
    async with served(lab, EngineLimits(idle_per_destination=1), Scheme.HTTP) as site:
        site.rig.decide = lambda _facts: AllowRequest("open")
        await site.ask()
        flow = await site.flow()
        flow.writer.write(b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n")
        await flow.read()
        assert 2 == site.idle()
        await flow.end()
        assert [1, 1] == site.far.carried()


async def test_an_idle_connection_ends_after_its_time(lab: Lab) -> None:
    async with served(lab, EngineLimits(connection_idle_seconds=0.05)) as site:
        await site.ask()
        await site.gone(0)
        assert 0 == site.idle()


@pytest.mark.parametrize(("age", "carried"), [(0.0, [1, 1]), (600.0, [2])])
async def test_an_old_connection_carries_no_other_request(lab: Lab, age: float, carried: list[int]) -> None:
    async with served(lab, EngineLimits(connection_age_seconds=age)) as site:
        await site.ask()
        await site.ask()
        assert carried == site.far.carried()


async def test_a_denied_request_takes_nothing_from_the_pool(site: Site) -> None:
    await site.ask()
    site.rig.decide = lambda _facts: Deny("new", "closed")
    assert (await site.ask()).startswith(b"HTTP/1.1 403 ")
    assert ([1], 1) == (site.far.carried(), site.idle())


async def test_a_client_that_closes_its_connection_leaves_the_upstream_one_for_others(site: Site) -> None:
    """`Connection: close` is a matter of one connection: the server does not get it, and the client's is closed."""
    for _ in range(3):
        flow = await site.flow()
        answer = await flow.ask("/open", b"Connection: close\r\n")
        assert b"\r\nconnection: close\r\n" in answer.lower()
        assert b"" == await flow.reader.read()
        await flow.end()
        await site.settled(1)
    assert [3] == site.far.carried()
    assert not [head for head in site.far.lines[0].heads if b"close" in head.lower()]
