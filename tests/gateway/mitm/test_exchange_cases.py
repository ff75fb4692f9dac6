"""mitmproxy's engine carries out each case of the exchange as the pure one does, over TLS on both sides."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import h2.events
import h11
import pytest

from gateway.effects import Over
from gateway.engines.mitm.http2 import WINDOW
from gateway.engines.port import EngineLimits
from gateway.placeholders import NONE, Placeholders
from policy.compiled import SecretAt
from policy.decision import AllowRequest, Deny
from policy.facts import RequestFacts
from policy.injection import SecretPlan
from tests.gateway.exchange_cases import (
    CASES,
    HOST,
    KNOWN,
    MAX_BODY,
    MAX_DECODED,
    OPEN,
    PLACEHOLDER,
    SECRET,
    Case,
    Fields,
    Ports,
    Seen,
    check,
)
from tests.gateway.mitm.conftest import Authority, Rig, Upstream, only, running, server_context
from tests.gateway.mitm.test_pool import until
from tests.gateway.mitm.test_streams import Caller, Server
from tests.gateway.signature_cases import SIGNED
from vault.secret import Secret

LIMITS = replace(EngineLimits(), scrub_body_bytes=MAX_DECODED, request_body_bytes=MAX_BODY)
SECONDS = 20.0
_FRAMING = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection"})


@dataclass
class CaseRig(Rig):
    """A rig with the policy, budget, vault and log of a case."""

    ports: Ports = field(default_factory=Ports)

    def decide_request(self, facts: RequestFacts) -> AllowRequest | Deny:
        return self.ports.decide_request(facts)

    def secrets_to(self, host: str) -> tuple[SecretAt, ...]:
        return self.ports.secrets_to(host)

    def placeholders(self) -> Placeholders:
        return self.ports.placeholders()

    def request(self) -> Over | None:
        return self.ports.request()

    async def lease(self, plan: SecretPlan, facts: RequestFacts, size: int | None) -> Secret:
        return await self.ports.lease(plan, facts, size)

    async def searched(self, use: SecretAt) -> tuple[Secret, ...]:
        return await self.ports.searched(use)


def fields(headers: object) -> Fields:
    """Return the headers without framing and pseudo-headers."""
    named = [(bytes(name).lower(), bytes(value)) for name, value in headers]  # type: ignore[attr-defined]
    return tuple((name, value) for name, value in named if name not in _FRAMING and not name.startswith(b":"))


@dataclass
class Far:
    """The server of a case.

    It stores what it receives, and answers piece by piece. Its reason phrase holds the secret.
    """

    case: Case
    seen: Seen

    async def over_http1(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        case = self.case
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, ssl.SSLError):
            line, *lines = (await reader.readuntil(b"\r\n\r\n")).strip().split(b"\r\n")
            named = [(name.lower(), value) for name, _, value in (one.partition(b": ") for one in lines)]
            self.seen.target, self.seen.authority = line.split(b" ")[1], dict(named)[b"host"]
            self.seen.length, self.seen.chunked = (
                dict(named).get(b"content-length"),
                b"transfer-encoding" in dict(named),
            )
            self.seen.body_sent = await _body(reader, self.seen)
            self.seen.sent = fields(named)
            head = [b"HTTP/1.1 %d %s" % (case.status, SECRET.encode())]
            head += [b"%s: %s" % one for one in case.answer]
            writer.write(b"\r\n".join([*head, *([b"Transfer-Encoding: chunked"] * (case.status != 101)), b"", b""]))
            for piece in case.pieces:
                writer.write(piece if case.status == 101 else b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(b"0\r\n\r\n" if case.status != 101 else b"")
            await reader.read()
        writer.close()

    async def over_http2(self, server: Server, event: h2.events.Event) -> None:
        case = self.case
        if isinstance(event, h2.events.RequestReceived):
            named = {bytes(name): bytes(value) for name, value in event.headers}
            self.seen.target, self.seen.authority = named[b":path"], named[b":authority"]
            self.seen.sent, self.seen.length = fields(event.headers), named.get(b"content-length")
        elif isinstance(event, h2.events.DataReceived):
            self.seen.body_sent += event.data
            server.state.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        if not isinstance(event, h2.events.StreamEnded):
            return
        server.state.send_headers(event.stream_id, [(b":status", b"%d" % case.status), *case.answer])
        for piece in case.pieces:
            server.state.send_data(event.stream_id, piece)
            server.writer.write(server.state.data_to_send())
            await asyncio.sleep(0)
        if case.trailers:
            server.state.send_headers(event.stream_id, list(case.trailers), end_stream=True)
        else:
            server.state.end_stream(event.stream_id)


async def _body(reader: asyncio.StreamReader, seen: Seen) -> bytes:
    if not seen.chunked:
        return await reader.readexactly(int(seen.length or b"0"))
    body = b""
    while (size := int(await reader.readuntil(b"\r\n"), 16)) or not await reader.readexactly(2):
        body += (await reader.readexactly(size + 2))[:-2]
    return body


async def ask_http1(rig: Rig, case: Case, seen: Seen) -> None:
    reader, writer = await rig.connect()
    client = h11.Connection(h11.CLIENT)
    framing = [(b"content-length", b"%d" % len(case.body))] if case.body else []
    framing = [(b"transfer-encoding", b"chunked")] if case.chunked else framing
    request = h11.Request(method=case.method, target=case.path, headers=[(b"Host", case.host), *case.headers, *framing])
    parts = [client.send(request), client.send(h11.Data(data=case.body)) if case.body else b""]
    writer.write(b"".join(part or b"" for part in [*parts, client.send(h11.EndOfMessage())]))
    try:
        async with asyncio.timeout(SECONDS):
            while True:
                event = client.next_event()
                if event is h11.NEED_DATA:
                    client.receive_data(await reader.read(65536))
                elif isinstance(event, h11.InformationalResponse | h11.Response):
                    seen.status, seen.reason, seen.headers = event.status_code, event.reason, fields(event.headers)
                    if event.status_code == 101:
                        seen.body = client.trailing_data[0]
                        while len(seen.body) < len(case.text or b""):
                            seen.body += await reader.readexactly(1)
                        seen.whole = case.whole or await reader.read() != b""
                        return
                elif isinstance(event, h11.Data):
                    seen.body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    seen.trailers = fields(event.headers)
                    break
                else:
                    raise h11.RemoteProtocolError("the connection ended")
            seen.whole = True
    except (h11.RemoteProtocolError, OSError, ssl.SSLError, asyncio.IncompleteReadError):
        seen.whole = False
    finally:
        writer.close()


async def ask_http2(rig: Rig, case: Case, seen: Seen) -> None:
    caller = Caller(await rig.speak_h2())
    pseudo = [(b":method", case.method), (b":scheme", b"https"), (b":authority", case.host), (b":path", case.path)]
    caller.call(1, [(name.decode(), value.decode()) for name, value in (*pseudo, *case.headers)], ends=not case.body)
    if case.body:
        caller.state.send_data(1, case.body, end_stream=True)
        caller.flush()
    with contextlib.suppress(AssertionError, OSError, ssl.SSLError):  # the flow ended
        await caller.hear(h2.events.StreamEnded, 1, SECONDS)
        seen.whole = True
    for event in caller.heard:
        if isinstance(event, h2.events.ResponseReceived):
            seen.status, seen.headers = int(only(event.headers, b":status")), fields(event.headers)
        elif isinstance(event, h2.events.TrailersReceived):
            seen.trailers = fields(event.headers)
    seen.body = caller.body(1)
    caller.close()


@pytest.mark.parametrize("case", [*CASES, *SIGNED], ids=lambda case: case.name)
async def test_the_case(case: Case, tmp_path: Path, upstream_root: Authority, sandbox_root: Authority) -> None:
    ports = case.ports()
    seen, rig = Seen(ports), CaseRig(tmp_path, Upstream(), upstream_root, sandbox_root, ports=ports)
    rig.audit = ports  # type: ignore[assignment]
    far = Far(case, seen)
    rig.upstream.serve = Server(far.over_http2).serve if case.http2 else far.over_http1  # type: ignore[method-assign]
    context = server_context(upstream_root.leaf(HOST), tmp_path, ["h2"] if case.http2 else None)
    async with running(rig, context, LIMITS):
        ports.ledger = rig.engine._ledger
        ports.revoke = lambda: rig.engine.revoke(frozenset({"api-token"}))
        await (ask_http2 if case.http2 else ask_http1)(rig, case, seen)
    check(case, seen)


UPLOAD = [(":method", "PUT"), (":scheme", "https"), (":authority", HOST), (":path", "/v1")]
TEXT = next(case for case in CASES if case.name == "a text")


@contextlib.asynccontextmanager
async def collecting(
    http2: bool, place: Path, upstream_root: Authority, sandbox_root: Authority, body: bytes
) -> AsyncIterator[tuple[CaseRig, Case, Seen]]:
    """Run an engine with the default limits, whose rule replaces a placeholder in a body."""
    far = body.replace(PLACEHOLDER.encode(), SECRET.encode())
    case = replace(TEXT, http2=http2, body=body, far=far)
    ports = case.ports()
    seen, rig = Seen(ports), CaseRig(place, Upstream(), upstream_root, sandbox_root, ports=ports)
    rig.audit = ports  # type: ignore[assignment]
    server = Far(case, seen)
    rig.upstream.serve = Server(server.over_http2).serve if http2 else server.over_http1  # type: ignore[method-assign]
    async with running(rig, server_context(upstream_root.leaf(HOST), place, ["h2"] if http2 else None)):
        yield rig, case, seen


@pytest.mark.parametrize("http2", [False, True])
async def test_a_body_of_many_windows_is_collected_and_then_forgotten(
    http2: bool, tmp_path: Path, upstream_root: Authority, sandbox_root: Authority
) -> None:
    """Its first and its last bytes are a placeholder."""
    body = PLACEHOLDER.encode() + b"x" * (5 * WINDOW) + PLACEHOLDER.encode()
    async with collecting(http2, tmp_path, upstream_root, sandbox_root, body) as (rig, case, seen):
        if http2:
            caller = Caller(await rig.speak_h2())
            caller.call(1, UPLOAD, ends=False)
            left = body
            while left:
                if count := min(16384, len(left), caller.state.local_flow_control_window(1)):
                    caller.state.send_data(1, left[:count], end_stream=count == len(left))
                    left = left[count:]
                    await caller.drain()
                else:
                    with contextlib.suppress(TimeoutError):
                        await caller.hear(h2.events.StreamEnded, 1, 0.02)
            await caller.hear(h2.events.StreamEnded, 1, SECONDS)
            caller.close()
        else:
            await ask_http1(rig, case, seen)
        held = rig.engine._bodies.held
    assert case.far == seen.body_sent
    assert 0 == held


@pytest.mark.parametrize("http2", [False, True])
@pytest.mark.parametrize("aborted", [False, True])
async def test_a_body_that_is_broken_off_is_forgotten_and_nothing_is_sent(
    http2: bool, aborted: bool, tmp_path: Path, upstream_root: Authority, sandbox_root: Authority
) -> None:
    """By its client, or because the flow is aborted."""
    body = PLACEHOLDER.encode() + b"x" * 1000
    async with collecting(http2, tmp_path, upstream_root, sandbox_root, body) as (rig, _, seen):
        if http2:
            caller = Caller(await rig.speak_h2())
            caller.call(1, UPLOAD, ends=False)
            caller.state.send_data(1, body)
            await caller.drain()
            close = caller.close
        else:
            _, writer = await rig.connect()
            writer.write(b"PUT /v1 HTTP/1.1\r\nHost: " + HOST.encode() + b"\r\nContent-Length: 2000\r\n\r\n" + body)
            await writer.drain()
            close = writer.close
        await until(lambda: rig.engine._bodies.held == len(body))
        if aborted:
            for flow in tuple(rig.engine._live):
                flow.abort()
        else:
            close()
        await until(lambda: rig.engine._bodies.held == 0)
    assert (["decide", "count"], None) == (seen.ports.steps, seen.sent)


@pytest.mark.parametrize("http2", [False, True])
async def test_a_body_with_a_placeholder_of_the_sandbox_ends_the_flow(
    tmp_path: Path, upstream_root: Authority, sandbox_root: Authority, http2: bool
) -> None:
    """The server gets nothing of the piece that has it. Without it the request is answered: the control."""
    answered = []
    for known in (NONE, KNOWN):
        case = Case(
            "b", [], None, OPEN, (), http2=http2, method=b"POST", body=b"x" * 10_000 + b"__TOKEN__", known=known
        )
        ports = case.ports()
        seen, rig = Seen(ports), CaseRig(tmp_path, Upstream(), upstream_root, sandbox_root, ports=ports)
        rig.audit = ports  # type: ignore[assignment]
        far = Far(case, seen)
        rig.upstream.serve = Server(far.over_http2).serve if http2 else far.over_http1  # type: ignore[method-assign]
        context = server_context(upstream_root.leaf(HOST), tmp_path, ["h2"] if http2 else None)
        async with running(rig, context, LIMITS):
            ports.ledger = rig.engine._ledger
            await (ask_http2 if http2 else ask_http1)(rig, case, seen)
        answered.append(seen.status)
        assert (known is NONE) is (b"__TOKEN__" in seen.body_sent)
        assert (["placeholder"] if known is KNOWN else []) == ports.denials()
    assert [200, None] == answered
