"""Takes the sandbox's redirected TCP connections and decides each of them.

First bytes -> what the client really speaks -> facts -> verdict -> audit -> and only then anything upstream.

- The protocol is read from the bytes, the port from the packet (SO_ORIGINAL_DST); the packet's destination is
  recorded and never dialled, but for a literal address that policy allows by name of that address.
- A connection whose first bytes are neither a strict ClientHello nor a strict request head is reset. A client that
  waits for the server to speak first gets nothing until its deadline, and nothing upstream happens meanwhile.
- Each verdict is one record, accepted by the audit log before it takes effect; without the log the verdict is deny,
  and its record is sent when the log is back. Each address that is dialled is one more (`connect`), accepted before the
  dial; `gateway.described` has the names of its fields.
- A denial is seen: 403 with rule and reason in HTTP, an alert in TLS, a reset elsewhere.
- A spliced flow counts as one request of the sandbox's budget, and each byte it sends up is counted before it goes.
- A flow that is spliced hides no name: with ECH, or without a name, it is not spliced.
- Every connection ends closed, whatever fails.
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
from gateway.engine import Engine, InspectedFlow
from gateway.farewell import ACCESS_DENIED, DECODE_ERROR, UNRECOGNIZED_NAME, alert, farewell, http_answer
from gateway.flows import FlowRegistry, LiveFlow
from gateway.hello import Hello, NeedMore, NoSni, NotTls, Refused, RequestHead, read_head, read_hello
from gateway.splice import Traffic, relay, reset
from gateway.upstream import Connection, DialError, Dialler, judge, literal
from policy.decision import AllowAddress, AllowFlow, Deny, Treatment, decide_flow
from policy.facts import FlowFacts, Scheme
from wire.patience import Patience

_SO_ORIGINAL_DST = 80
_READ = 16384
_MAX_FIRST = 64 * 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Client:
    """An accepted connection and what the kernel says of it."""

    sock: socket.socket
    peer: tuple[str, int]
    destination: tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Opening:
    """What a client said first."""

    data: bytes
    verdict: Hello | NoSni | RequestHead | Refused


class Acceptor:
    """Serves the proxy listener of one worker.

    Args:
        config: the active configuration, None before the first one: every connection is reset then.
        engine: what inspects flows to a host (None: without TLS); None while there is none: they are denied.
        budget: what the sandbox may use in all.
        bounded: counts a name that is about to be resolved; returns the bound on names that it is over.
    """

    def __init__(
        self,
        audit: AuditClient,
        dialler: Dialler,
        registry: FlowRegistry,
        config: Callable[[], GatewayConfig | None],
        engine: Callable[[str | None], Awaitable[Engine | None]],
        budget: Budget,
        bounded: Callable[[str], Deny | None],
    ) -> None:
        self._audit = audit
        self._dialler = dialler
        self._registry = registry
        self._config = config
        self._engine = engine
        self._budget = budget
        self._bounded = bounded

    async def serve(self, listener: socket.socket) -> None:
        """Accept for ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError:  # no descriptors left, or the client is gone already
                await asyncio.sleep(0.05)
                continue
            config = self._config()
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
            except Exception as error:  # noqa: BLE001 - closes: the connection is reset, nothing of it goes on
                reset(sock)
                _log.error("flow failed: %s", type(error).__name__)

    async def _flow(self, client: _Client, live: LiveFlow) -> None:
        config = self._config()
        if config is None or client.destination == client.sock.getsockname():
            reset(client.sock)  # unconfigured, or dialled the proxy itself
            return
        try:
            async with Patience(config.limits.first_bytes):
                opening = await read_opening(client.sock)
        except TimeoutError:
            await self._deny_quietly(client, live, "first-bytes", "client did not say in time what it wants")
            return
        if opening is None:
            await self._deny_quietly(client, live, "first-bytes", "client left or speaks neither TLS nor HTTP")
            return
        match opening.verdict:
            case Hello() as hello:
                await self._tls(client, live, opening.data, hello)
            case NoSni():
                await self._nameless(client, live, opening.data)
            case RequestHead() as head:
                await self._http(client, live, opening.data, head)
            case Refused(reason, status, asked_host):
                if opening.data[:1] == b"\x16":
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
            decision = Deny("ech", "encrypted ClientHello hides the name of a flow that is not inspected")
        if isinstance(decision, Deny):
            await self._deny(client, live, decision, alert(UNRECOGNIZED_NAME), facts)
            return
        live.still_allowed = self._same_treatment(facts, decision.treatment)
        if decision.treatment is Treatment.SPLICE:
            if await self._over(client, live, facts):
                return
            if not await self._allow(client, live, decision, facts):
                await farewell(client.sock, alert(ACCESS_DENIED))
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
        """TLS without a server name: only a literal address that policy names may be spliced."""
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
            await farewell(client.sock, alert(ACCESS_DENIED))
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

    async def _inspect(
        self, client: _Client, live: LiveFlow, data: bytes, facts: FlowFacts, decision: AllowFlow, hello: Hello | None
    ) -> None:
        engine = await self._engine(None if hello is None else facts.host)
        if engine is None:
            denial = Deny("engine", "no inspecting engine is ready")
            answer = http_answer(503, denial) if hello is None else alert(ACCESS_DENIED)
            await self._deny(client, live, denial, answer, facts)
            return
        if not await self._allow(client, live, decision, facts):
            denial = Deny("audit", "the audit log does not accept records")
            await farewell(client.sock, http_answer(503, denial) if hello is None else alert(ACCESS_DENIED))
            return
        # The streams take the descriptor over: when the engine closes them the client sees it at once.
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
        dial: Callable[[Announce], Awaitable[Connection]],
    ) -> None:
        traffic = Traffic()
        fields = self._fields(client, live, facts)

        async def announce(address: IPv4Address | IPv6Address, allowed: AllowAddress | None) -> None:
            decision, verdict = of_address(allowed)
            policy = of_policy(self._config(), verdict.get("rule"))
            await self._audit.accept("connect", decision, address=str(address), **verdict, **fields, **policy)

        end: str | None = "cut"
        upstream: Connection | None = None
        try:
            try:
                upstream = await dial(announce)
            except AuditUnavailable:
                end = None
                await farewell(client.sock, alert(ACCESS_DENIED))
                return
            except DialError as error:
                end = None
                denial = Deny(error.rule, error.reason)
                await self._deny(client, live, denial, alert(ACCESS_DENIED), facts)
                return
            live.still_allowed = self._still_reachable(live.still_allowed, upstream)
            limits = self._active().limits
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
        """Take a request for a flow that is about to be spliced; True when there was none, and the client was told."""
        over = self._budget.request()
        if over is not None:
            await self._deny(client, live, Deny(RULE, over.reason), alert(ACCESS_DENIED), facts)
        return over is not None

    def _decide(self, config: GatewayConfig, facts: FlowFacts) -> AllowFlow | Deny:
        """Judge a flow, and hold the name of an allowed one to the bounds that its DNS question has."""
        decision = decide_flow(config.policy, facts)
        if isinstance(decision, Deny):
            return decision
        return self._bounded(facts.host) or decision

    def _active(self) -> GatewayConfig:
        config = self._config()
        if config is None:
            raise ConnectionResetError
        return config

    def _same_treatment(self, facts: FlowFacts, treatment: Treatment) -> Callable[[], bool]:
        def still() -> bool:
            decision = decide_flow(self._active().policy, facts)
            return isinstance(decision, AllowFlow) and decision.treatment is treatment

        return still

    def _still_reachable(self, flow: Callable[[], bool] | None, upstream: Connection) -> Callable[[], bool]:
        """Whether policy, as it is now, allows the flow and the address that it is connected to."""

        def still() -> bool:
            allowed = isinstance(judge(self._active(), upstream.destination), AllowAddress)
            return allowed and flow is not None and flow()

        return still

    async def _allow(self, client: _Client, live: LiveFlow, decision: AllowFlow, facts: FlowFacts) -> bool:
        """Record an allowed flow; False when the log did not accept it: then the flow is over."""
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
                **of_policy(self._config(), decision.rule),
            )
        except AuditUnavailable:
            return False
        # The policy may have changed while the record was on its way.
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
        await farewell(client.sock, answer)

    async def _deny_quietly(self, client: _Client, live: LiveFlow, rule: str, reason: str) -> None:
        await self._record_denial(client, live, Deny(rule, reason), None)
        reset(client.sock)

    async def _record_denial(
        self, client: _Client, live: LiveFlow, denial: Deny, facts: FlowFacts | None, asked_host: str | None = None
    ) -> None:
        policy = of_policy(self._config(), denial.rule)
        fields = {"rule": denial.rule, "reason": denial.reason, **self._fields(client, live, facts), **policy}
        fields["asked_host"] = asked_host
        try:
            await self._audit.accept("flow", "deny", **fields)
        except AuditUnavailable:
            self._audit.note("flow", "deny", **fields)  # it is denied all the same; the log is told when it is back

    def _fields(self, client: _Client, live: LiveFlow, facts: FlowFacts | None) -> dict[str, Any]:
        return {
            "flow": live.flow_id,
            "host": facts.host if facts is not None else None,
            "port": client.destination[1],
            "scheme": facts.scheme.value if facts is not None else None,
            "destination": client.destination[0],
        }


def _connections(config: GatewayConfig) -> int:
    return min(config.limits.connections, config.policy.limits.connections)


def original_destination(sock: socket.socket) -> tuple[str, int]:
    """Where the client's packets were addressed before the redirect.

    Raises:
        OSError: the connection was not redirected.
    """
    raw = sock.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
    port, address = struct.unpack("!2xH4s8x", raw)
    return str(IPv4Address(address)), port


async def read_opening(sock: socket.socket) -> _Opening | None:
    """Read until the first bytes have a verdict; None when they are of no protocol we know or end too early."""
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
    """Whether an HTTP answer makes sense to this client: its first line says HTTP/1."""
    return b" HTTP/1." in data.split(b"\n", 1)[0][:_READ]
