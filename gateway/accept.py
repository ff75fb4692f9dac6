"""Accepts the sandbox's redirected TCP connections and judges each of them.

Order: first bytes -> protocol -> facts -> verdict -> audit record -> upstream connection.

- The protocol comes from the bytes and the port from the packet (SO_ORIGINAL_DST). The packet's destination address is
  recorded. The worker dials it only if the client sends no server name and policy allows that literal address.
- A connection is reset if its first bytes are neither a strict ClientHello, nor a strict request head, nor a packet of
  a PostgreSQL client (`gateway.prelude` answers it until the client sends its ClientHello). A client that waits for the
  server's first byte gets nothing until its deadline, and causes nothing upstream.
- Each verdict is one record, which the audit log accepts before the verdict takes effect. If the log does not answer,
  the flow is denied, and its record is sent when the log is back. Each dialled address is one more record (`connect`),
  accepted before the dial. `gateway.described` defines its fields.
- The client sees a denial: a 403 with rule and reason in HTTP, an alert in TLS, an error message in PostgreSQL, a reset
  otherwise.
- A spliced flow counts as one request of the sandbox's budget. Each byte that it sends is counted before it is sent.
- A flow with ECH is not spliced. A flow without a name is spliced only to a literal address that policy allows.
- Every connection is closed at the end, also after an error.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from audit.client import AuditClient, AuditUnavailable
from gateway.budget import RULE, Budget
from gateway.config import GatewayConfig
from gateway.described import Announce, of_address, of_policy
from gateway.engines.port import InspectedFlow
from gateway.flows import FlowRegistry, LiveFlow
from gateway.inspection import Inspection
from gateway.prelude import POSTGRES_RULE, Prelude, answer_prelude
from gateway.refusal import ACCESS_DENIED, DECODE_ERROR, UNRECOGNIZED_NAME, alert, http_answer, refuse
from gateway.splice import Traffic, relay, reset
from gateway.startup import CancelRequest, GssRequest, NotPostgres, Packet, SslRequest, Startup, read_packet
from gateway.startup import denial as postgres_denial
from gateway.state import WorkerState
from gateway.tls.contexts import POSTGRES
from gateway.tls.hello import Hello, NeedMore, NoSni, NotTls, Refused, RequestHead, read_head, read_hello
from gateway.upstream import DialError, UpstreamConnection, UpstreamDialler, judge, judge_flow, literal
from policy.decision import AllowAddress, AllowFlow, Deny, Treatment
from policy.facts import FlowFacts, Scheme
from policy.sessions import session_ports
from wire.patience import Patience

_SO_ORIGINAL_DST = 80
_READ = 16384
_MAX_FIRST = 64 * 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Client:
    """An accepted connection and its addresses: the client's, and the one that the client dialled."""

    sock: socket.socket
    peer: tuple[str, int]
    destination: tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Opening:
    """The first bytes of a connection, and what they are."""

    data: bytes
    verdict: Hello | NoSni | RequestHead | Refused | Packet


class Acceptor:
    """Serves the proxy listener of one worker.

    Args:
        state: while it has no configuration, every connection is reset.
        inspection: while it has no engine, flows that need one are denied.
        budget: the sandbox's limits of requests and bytes.
        bounded: counts a name before it is resolved; returns a denial if the name exceeds a bound.
    """

    def __init__(
        self,
        audit: AuditClient,
        dialler: UpstreamDialler,
        registry: FlowRegistry,
        state: WorkerState,
        inspection: Inspection,
        budget: Budget,
        bounded: Callable[[str], Deny | None],
    ) -> None:
        self._audit = audit
        self._dialler = dialler
        self._registry = registry
        self._state = state
        self._inspection = inspection
        self._budget = budget
        self._bounded = bounded

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError:  # no descriptors are left, or the client has disconnected
                await asyncio.sleep(0.05)
                continue
            await self._state.moving.wait()  # of a paused sandbox; others wait in the listener
            config = self._state.config
            if config is None or len(self._registry) >= _connections(config):
                if config is not None:
                    self._audit.count("flow", "deny", rule="connections", reason="too many connections at once")
                reset(sock)
                sock.close()
                continue
            entered: asyncio.Future[LiveFlow] = loop.create_future()
            task = loop.create_task(self._connection(sock, peer, entered), name="flow")
            entered.set_result(self._registry.enter(task))

    async def _connection(self, sock: socket.socket, peer: tuple[str, int], entered: asyncio.Future[LiveFlow]) -> None:
        with sock:
            try:
                client = _Client(sock, peer, original_destination(sock))
                await self._flow(client, await entered)
            except (OSError, TimeoutError):
                reset(sock)
            except asyncio.CancelledError:
                reset(sock)
                raise
            except Exception as error:  # noqa: BLE001 - fails closed: the connection is reset
                reset(sock)
                _log.error("flow failed: %s", type(error).__name__)

    async def _flow(self, client: _Client, live: LiveFlow) -> None:
        config = self._state.config
        if config is None or client.destination == client.sock.getsockname():
            reset(client.sock)  # no configuration, or the client dialled the proxy itself
            return
        try:
            async with Patience(config.constants.limits.first_bytes):
                opening = await read_opening(client.sock)
        except TimeoutError:
            await self._deny_quietly(client, live, "first-bytes", "no complete ClientHello or request head in time")
            return
        if opening is None:
            reason = "the client left, or sent neither TLS nor HTTP nor PostgreSQL"
            await self._deny_quietly(client, live, "first-bytes", reason)
            return
        match opening.verdict:
            case Hello() as hello if POSTGRES in hello.alpn and self._has_sessions(hello.sni, client.destination[1]):
                await self._session(client, live, opening.data, hello.sni, hello)
            case Hello() as hello:
                await self._tls(client, live, opening.data, hello)
            case SslRequest() | GssRequest() | CancelRequest() | Startup() as packet:
                await self._postgres(client, live, opening.data, packet)
            case NoSni():
                await self._nameless(client, live, opening.data)
            case RequestHead() as head:
                await self._http(client, live, opening.data, head)
            case Refused(reason, status, asked_host):
                if opening.data[:1] == b"\0":
                    denial = Deny(POSTGRES_RULE, reason)
                    await self._deny(client, live, denial, postgres_denial(denial.rule, denial.reason))
                elif opening.data[:1] == b"\x16":
                    denial = Deny("client-hello", reason)
                    await self._deny(client, live, denial, alert(DECODE_ERROR))
                else:
                    denial = Deny("request-head", reason)
                    await self._deny(client, live, denial, http_answer(status, denial), asked_host=asked_host)

    async def _tls(self, client: _Client, live: LiveFlow, data: bytes, hello: Hello) -> None:
        config = self._active()
        facts = FlowFacts(hello.sni, client.destination[1], Scheme.HTTPS)
        decision = self._decide(config, facts)
        if isinstance(decision, AllowFlow) and decision.treatment is Treatment.SPLICE and hello.ech:
            decision = Deny("ech", "an encrypted ClientHello hides the server name, and this flow is not inspected")
        if isinstance(decision, Deny):
            await self._deny(client, live, decision, alert(UNRECOGNIZED_NAME), facts)
            return
        live.still_allowed = self._same_treatment(facts, decision.treatment)
        if decision.treatment is Treatment.SPLICE:
            if await self._over(client, live, facts):
                return
            if not await self._allow(client, live, decision, facts):
                await refuse(client.sock, alert(ACCESS_DENIED))
                return
            await self._splice(
                client,
                live,
                data,
                facts,
                lambda announce: self._dialler.dial(facts.host, facts.port, facts.scheme, announce),
            )
        else:
            await self._inspect(client, live, data, facts, decision, hello)

    async def _nameless(self, client: _Client, live: LiveFlow, data: bytes) -> None:
        """Judge TLS without a server name: it is spliced if policy allows its literal address, otherwise denied."""
        config = self._active()
        address, port = IPv4Address(client.destination[0]), client.destination[1]
        judged = judge(config, literal(address, port))
        if isinstance(judged, Deny):
            await self._deny(client, live, judged, alert(UNRECOGNIZED_NAME))
            return
        facts = FlowFacts(str(address), port, Scheme.HTTPS)

        def still() -> bool:
            return isinstance(judge(self._active(), literal(address, port)), AllowAddress)

        live.still_allowed = still
        if await self._over(client, live, facts):
            return
        decision = AllowFlow(judged.rule, Treatment.SPLICE, judged.observed)
        if not await self._allow(client, live, decision, facts):
            await refuse(client.sock, alert(ACCESS_DENIED))
            return
        await self._splice(
            client, live, data, facts, lambda announce: self._dialler.dial_address(address, port, announce)
        )

    async def _http(self, client: _Client, live: LiveFlow, data: bytes, head: RequestHead) -> None:
        config = self._active()
        facts = FlowFacts(head.host, client.destination[1], Scheme.HTTP)
        decision = self._decide(config, facts)
        if isinstance(decision, Deny):
            await self._deny(client, live, decision, http_answer(403, decision), facts)
            return
        live.still_allowed = self._same_treatment(facts, decision.treatment)
        await self._inspect(client, live, data, facts, decision, None)

    async def _postgres(self, client: _Client, live: LiveFlow, data: bytes, packet: Packet) -> None:
        """Serve a PostgreSQL client up to its ClientHello, which names the host."""
        config, port = self._active(), client.destination[1]
        first: Prelude
        if isinstance(packet, CancelRequest):
            first = packet
        else:
            try:
                async with Patience(config.constants.limits.first_bytes):
                    first = await answer_prelude(client.sock, data, packet, tls=session_ports(config.policy, port))
            except TimeoutError:
                await self._deny_quietly(client, live, "first-bytes", "the client did not begin TLS in time")
                return
        match first:
            case None:
                await self._deny_quietly(client, live, POSTGRES_RULE, "the client left, or sent another packet")
            case CancelRequest(key):
                engine = self._inspection.engine
                host = None if engine is None else engine.cancellable(key, port)
                if host is None:
                    await self._deny_quietly(client, live, POSTGRES_RULE, "a cancel request for no live session")
                else:
                    await self._session(client, live, data, host, None)
            case Refused(reason):
                denial = Deny(POSTGRES_RULE, reason)
                await self._deny(client, live, denial, postgres_denial(denial.rule, denial.reason))
            case (Hello() as hello, begun):
                await self._session(client, live, begun, hello.sni, hello)
            case (NoSni(), _):
                denial = Deny(POSTGRES_RULE, "the client's TLS names no server; libpq 14 and later do")
                await self._deny(client, live, denial, alert(UNRECOGNIZED_NAME))
            case (Refused(reason), _):
                await self._deny(client, live, Deny("client-hello", reason), alert(DECODE_ERROR))

    async def _session(self, client: _Client, live: LiveFlow, data: bytes, host: str, hello: Hello | None) -> None:
        """Judge the flow of a database client. `hello` None: a cancel request in the clear."""
        config = self._active()
        facts = FlowFacts(host, client.destination[1], Scheme.POSTGRES)
        decision = self._decide(config, facts)
        if isinstance(decision, Deny):
            await self._deny(client, live, decision, b"" if hello is None else alert(UNRECOGNIZED_NAME), facts)
            return
        live.still_allowed = self._same_treatment(facts, decision.treatment)
        await self._inspect(client, live, data, facts, decision, hello)

    def _has_sessions(self, host: str, port: int) -> bool:
        """Whether policy has database sessions with this host and port. Otherwise ALPN changes nothing."""
        return isinstance(judge_flow(self._active(), FlowFacts(host, port, Scheme.POSTGRES)), AllowFlow)

    async def _inspect(
        self, client: _Client, live: LiveFlow, data: bytes, facts: FlowFacts, decision: AllowFlow, hello: Hello | None
    ) -> None:
        def answer(denial: Deny) -> bytes:
            if hello is not None:
                return alert(ACCESS_DENIED)
            return http_answer(503, denial) if facts.scheme is Scheme.HTTP else b""

        engine = await self._inspection.ready(None if hello is None else facts.host)
        if engine is None:
            denial = Deny("engine", "the gateway has no engine or no certificate for this host yet")
            await self._deny(client, live, denial, answer(denial), facts)
            return
        if not await self._allow(client, live, decision, facts):
            await refuse(client.sock, answer(Deny("audit", "the audit log does not accept records")))
            return
        # The streams own the descriptor from here on: when the engine closes them, the client sees it at once.
        owned = socket.socket(fileno=client.sock.detach())
        owned.setblocking(False)
        try:
            reader, writer = await asyncio.open_connection(sock=owned, limit=_MAX_FIRST)
        except BaseException:
            owned.close()
            raise
        try:
            await engine.handle(
                InspectedFlow(
                    reader=reader,
                    writer=writer,
                    first_bytes=data,
                    host=facts.host,
                    port=facts.port,
                    scheme=facts.scheme,
                    original_destination=client.destination,
                    hello=hello,
                    peer=client.peer,
                    flow_id=live.flow_id,
                )
            )
        except BaseException:
            writer.transport.abort()
            raise
        writer.close()

    async def _splice(
        self,
        client: _Client,
        live: LiveFlow,
        data: bytes,
        facts: FlowFacts,
        dial: Callable[[Announce], Awaitable[UpstreamConnection]],
    ) -> None:
        traffic = Traffic()
        fields = self._fields(client, live, facts)

        async def announce(address: IPv4Address | IPv6Address, allowed: AllowAddress | None) -> None:
            decision, verdict = of_address(allowed)
            policy = of_policy(self._state.config, verdict.get("rule"))
            await self._audit.accept("connect", decision, address=str(address), **verdict, **fields, **policy)

        end: str | None = "cut"
        upstream: UpstreamConnection | None = None
        try:
            try:
                upstream = await dial(announce)
            except AuditUnavailable:
                end = None
                await refuse(client.sock, alert(ACCESS_DENIED))
                return
            except DialError as error:
                end = None
                denial = Deny(error.rule, error.reason)
                await self._deny(client, live, denial, alert(ACCESS_DENIED), facts)
                return
            live.still_allowed = self._still_reachable(live.still_allowed, upstream)
            limits = self._active().constants.limits
            end = await relay(
                client.sock,
                upstream.sock,
                traffic,
                first=data,
                idle=limits.idle,
                total=limits.total,
                may_send=self._budget.send,
            )
        finally:
            if upstream is not None:
                if end == "cut":
                    reset(upstream.sock)
                upstream.sock.close()
            if end is not None:
                self._audit.note(
                    "flow",
                    "info",
                    **fields,
                    address=None if upstream is None else str(upstream.address),
                    reason=str(end),
                    bytes_up=traffic.up,
                    bytes_down=traffic.down,
                )

    async def _over(self, client: _Client, live: LiveFlow, facts: FlowFacts) -> bool:
        """Count a request before a flow is spliced. True if the budget is used up; the flow is then denied."""
        over = self._budget.request()
        if over is not None:
            await self._deny(client, live, Deny(RULE, over.reason), alert(ACCESS_DENIED), facts)
        return over is not None

    def _decide(self, config: GatewayConfig, facts: FlowFacts) -> AllowFlow | Deny:
        """Judge a flow. The name of an allowed flow has the same bounds as the name of a DNS query."""
        decision = judge_flow(config, facts)
        if isinstance(decision, Deny):
            return decision
        return self._bounded(facts.host) or decision

    def _active(self) -> GatewayConfig:
        config = self._state.config
        if config is None:
            raise ConnectionResetError
        return config

    def _same_treatment(self, facts: FlowFacts, treatment: Treatment) -> Callable[[], bool]:
        def still() -> bool:
            decision = judge_flow(self._active(), facts)
            return isinstance(decision, AllowFlow) and decision.treatment is treatment

        return still

    def _still_reachable(self, flow: Callable[[], bool] | None, upstream: UpstreamConnection) -> Callable[[], bool]:
        """Return a function: does the policy in force allow the flow and the address that it is connected to?"""

        def still() -> bool:
            allowed = isinstance(judge(self._active(), upstream.destination), AllowAddress)
            return allowed and flow is not None and flow()

        return still

    async def _allow(self, client: _Client, live: LiveFlow, decision: AllowFlow, facts: FlowFacts) -> bool:
        """Record an allowed flow. False if the log does not accept the record, or policy no longer allows the flow."""
        observed = decision.observed
        try:
            await self._audit.accept(
                "flow",
                "allow" if observed is None else "observe",
                rule=decision.rule,
                observed=None if observed is None else observed.rule,
                reason=None if observed is None else observed.reason,
                treatment=decision.treatment.value,
                **self._fields(client, live, facts),
                **of_policy(self._state.config, decision.rule),
            )
        except AuditUnavailable:
            return False
        # The policy may have changed during the wait for the record.
        return live.still_allowed is not None and live.still_allowed()

    async def _deny(
        self,
        client: _Client,
        live: LiveFlow,
        denial: Deny,
        answer: bytes,
        facts: FlowFacts | None = None,
        asked_host: str | None = None,
    ) -> None:
        await self._record_denial(client, live, denial, facts, asked_host)
        await refuse(client.sock, answer)

    async def _deny_quietly(self, client: _Client, live: LiveFlow, rule: str, reason: str) -> None:
        await self._record_denial(client, live, Deny(rule, reason), None)
        reset(client.sock)

    async def _record_denial(
        self, client: _Client, live: LiveFlow, denial: Deny, facts: FlowFacts | None, asked_host: str | None = None
    ) -> None:
        policy = of_policy(self._state.config, denial.rule)
        fields = {"rule": denial.rule, "reason": denial.reason, **self._fields(client, live, facts), **policy}
        fields["asked_host"] = asked_host
        try:
            await self._audit.accept("flow", "deny", **fields)
        except AuditUnavailable:
            self._audit.note(
                "flow", "deny", **fields
            )  # denied without the log; the record is sent when the log is back

    def _fields(self, client: _Client, live: LiveFlow, facts: FlowFacts | None) -> dict[str, Any]:
        return {
            "flow": live.flow_id,
            "host": facts.host if facts is not None else None,
            "port": client.destination[1],
            "scheme": facts.scheme.value if facts is not None else None,
            "destination": client.destination[0],
        }


def _connections(config: GatewayConfig) -> int:
    return min(config.constants.limits.connections, config.policy.limits.connections)


def original_destination(sock: socket.socket) -> tuple[str, int]:
    """Return the IPv4 address and the port that the client dialled, before the redirect.

    Raises:
        OSError: the connection was not redirected.
    """
    raw = sock.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
    port, address = struct.unpack("!2xH4s8x", raw)
    return str(IPv4Address(address)), port


async def read_opening(sock: socket.socket) -> _Opening | None:
    """Read until the first bytes have a verdict; None if the protocol is unknown or the stream ends."""
    loop = asyncio.get_running_loop()
    data = b""
    wanted = 1
    while len(data) <= _MAX_FIRST:
        part = await loop.sock_recv(sock, _READ)
        if not part:
            return None
        data += part
        if len(data) < wanted:
            continue
        packet = read_packet(data)
        if not isinstance(packet, NotPostgres):
            if not isinstance(packet, NeedMore):
                return _Opening(data, packet)
            wanted = packet.total
            continue
        verdict = read_hello(data)
        if isinstance(verdict, NotTls):
            head = read_head(data)
            if isinstance(head, Refused) and not _looks_like_http(data):
                return None
            verdict_or_more: Hello | NoSni | RequestHead | Refused | NeedMore = head
        else:
            verdict_or_more = verdict
        if not isinstance(verdict_or_more, NeedMore):
            return _Opening(data, verdict_or_more)
        wanted = verdict_or_more.total
    return None


def _looks_like_http(data: bytes) -> bool:
    """Whether the client understands an HTTP answer: its first line names HTTP/1."""
    return b" HTTP/1." in data.split(b"\n", 1)[0][:_READ]
