"""`FlowEngine`: admits flows, shares what they have in common, and ends them. A flow's framing is one of three kinds.

| A client that | Framing |
|---|---|
| offers HTTP/1.1 in TLS, offers no protocol, or speaks plain HTTP | `http1` |
| offers only HTTP/2, or offers it for a server that speaks only HTTP/2 | `http2` |
| speaks PostgreSQL | `postgres` |

- Whether a server speaks only HTTP/2 is known after a flow in HTTP/1.1 failed for that reason (`Http2Servers`).

- A worker has one `FlowEngine`. The flows of the sandbox share certificates, TLS contexts and idle upstream connections
  (`gateway.engines.pool`), and nothing else. A connection in use belongs to one flow. It outlives that flow only in the
  pool: after a complete exchange, and not after a change of policy, of roots, or of the secrets that it carried.
- `handle` closes all connections of its flow in every case.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from gateway.admission import Admission
from gateway.effects import Allowance, Decider, Effects, Recorder, Secrets, Sessions
from gateway.engines.bodies import Bodies
from gateway.engines.pool import Pool
from gateway.engines.port import Dialler, EngineLimits, InspectedFlow, LeafIssuer, describe
from gateway.ledger import Ledger
from gateway.scrub.searched import KnownPatterns
from gateway.tls.contexts import POSTGRES, ClientContexts, UpstreamContext, choose_alpn
from gateway.tls.hello import Hello
from policy.facts import Scheme

_NO_APPLICATION_PROTOCOL = b"\x15\x03\x03\x00\x02\x02\x78"
_HTTP2_SERVERS = 256
_HTTP2_SECONDS = 3600.0

_log = logging.getLogger(__name__)


class Http2Servers:
    """Hosts and ports of servers that speak only HTTP/2. Keeps a limited number of them, for a limited time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[tuple[str, int], float] = {}

    def add(self, server: tuple[str, int]) -> None:
        """Add a server."""
        self._until.pop(server, None)
        self._until[server] = self._clock() + _HTTP2_SECONDS
        if len(self._until) > _HTTP2_SERVERS:
            del self._until[next(iter(self._until))]

    def __contains__(self, server: tuple[str, int]) -> bool:
        return self._clock() < self._until.get(server, 0.0)


@dataclass(frozen=True, slots=True)
class Shared:
    """The values that the flows of one engine share. `beat` is called with the bytes of a flow, as a sign of life.

    `sessions` None: there are no database sessions.
    """

    dialler: Dialler
    identity: LeafIssuer
    clients: ClientContexts
    upstream: UpstreamContext
    known: KnownPatterns
    effects: Effects
    limits: EngineLimits
    beat: Callable[[], None]
    pool: Pool[Any]
    http2: Http2Servers
    bodies: Bodies
    sessions: Sessions | None = None


class FlowSession(Protocol):
    """What a flow has under way."""

    @property
    def used(self) -> Set[str]:
        """Names of the secrets that were sent on this flow, or may come back on it."""
        ...

    def still_allowed(self) -> bool:
        """Whether the policy in force allows what is under way. An exception means no."""
        ...


class Flow(Protocol):
    """One flow with its framing. Call `run` once, and `close` after it.

    Attributes:
        session: what it has under way.
        aborted: the engine ended it; `reason` says why.
    """

    @property
    def session(self) -> FlowSession: ...

    @property
    def aborted(self) -> bool: ...

    @property
    def reason(self) -> str: ...

    async def run(self) -> None:
        """Serve the flow to its end."""
        ...

    async def close(self) -> None:
        """Close all its connections."""
        ...

    def abort(self) -> None:
        """End the flow now. Queued bytes are not sent."""
        ...

    def drop_leftovers(self) -> None:
        """Discard unsent bytes of requests whose client has ended them."""
        ...


class Framing(Protocol):
    """Makes flows of one kind. `name` is the engine's name in records."""

    name: str

    def __call__(self, flow: InspectedFlow, shared: Shared) -> Flow:
        """Make a flow that has not begun."""
        ...


class SessionFraming(Framing, Protocol):
    """Makes flows of database clients."""

    def cancellable(self, key: bytes, port: int) -> str | None:
        """See `gateway.engines.port.Engine`."""
        ...


class FlowEngine:
    """See `gateway.engines.port.Engine`. Make it inside a running loop."""

    def __init__(
        self,
        *,
        http1: Framing,
        http2: Framing,
        postgres: SessionFraming | None = None,
        decider: Decider,
        allowance: Allowance,
        secrets: Secrets,
        sessions: Sessions | None = None,
        recorder: Recorder,
        dialler: Dialler,
        identity: LeafIssuer,
        ledger: Ledger,
        upstream_roots: str,
        limits: EngineLimits | None = None,
        trusted: UpstreamContext | None = None,
    ) -> None:
        """Make an engine.

        Args:
            postgres, sessions: None if there are no database sessions.
            ledger: the counts of the sandbox.
            upstream_roots: PEM text of all certificates that servers are verified against.
            trusted: used if its certificates are `upstream_roots`: the zygote has read them before the fork.

        Raises:
            ValueError: `upstream_roots` has no certificate, or other content.
        """
        self._framings = (http1, http2)
        self._postgres = postgres
        self._sessions = sessions
        self._recorder = recorder
        self._dialler = dialler
        self._limits = limits or EngineLimits()
        self._identity = identity
        self._clients = ClientContexts()
        if trusted is None or trusted.roots_pem != upstream_roots:
            trusted = UpstreamContext(upstream_roots)
        self._upstream = trusted
        self._pool: Pool[Any] = Pool(self._limits, lambda: len(self._live))
        self._http2 = Http2Servers(time.monotonic)
        self._bodies = Bodies(self._limits)
        self._live: set[Flow] = set()
        self._ledger = ledger
        self._known = KnownPatterns()
        admission = Admission(time.monotonic)
        date = partial(datetime.now, UTC)
        self._effects = Effects(decider, allowance, secrets, recorder, ledger, admission, time.monotonic, date)

    @property
    def flows(self) -> int:
        """The number of live flows."""
        return len(self._live)

    def reconfigure(
        self,
        *,
        identity: LeafIssuer | None = None,
        upstream_roots: str | None = None,
        limits: EngineLimits | None = None,
    ) -> None:
        """Use other certificates, roots or limits for flows that begin from now on.

        Other roots or limits end the idle upstream connections.

        Raises:
            ValueError: see the constructor; the old values stay in force.
        """
        upstream = self._upstream if upstream_roots is None else UpstreamContext(upstream_roots)
        self._upstream = upstream
        self._identity = identity or self._identity
        self._limits = self._pool.limits = self._bodies.limits = limits or self._limits
        if upstream_roots is not None or limits is not None:
            self._pool.drop()

    async def handle(self, flow: InspectedFlow) -> None:
        """See `gateway.engines.port.Engine`."""
        framing = self._framing(flow)
        refusal = self._refusal(flow)
        if refusal is not None:
            self._recorder.note("flow", "deny", rule="engine", reason=refusal, **describe(flow, framing.name))
            with contextlib.suppress(OSError):
                flow.writer.close()
            return
        shared = Shared(
            self._dialler,
            self._identity,
            self._clients,
            self._upstream,
            self._known,
            self._effects,
            self._limits,
            self._ledger.beat,
            self._pool,
            self._http2,
            self._bodies,
            self._sessions,
        )
        served = framing(flow, shared)
        self._live.add(served)
        work = asyncio.ensure_future(served.run())
        try:
            await asyncio.wait({work})
            if (error := None if work.cancelled() else work.exception()) is not None:
                _log.error("an inspected flow failed: %s", type(error).__name__)
        except asyncio.CancelledError:
            served.abort()
            work.cancel()
            await asyncio.wait({work})
            raise
        finally:
            try:
                await served.close()
            finally:
                self._live.discard(served)
                self._pool.trim()
        if served.aborted:
            self._recorder.note("flow", "deny", rule="engine", reason=served.reason, **describe(flow, framing.name))

    def _refusal(self, flow: InspectedFlow) -> str | None:
        if len(self._live) >= self._limits.flows:
            return "too many flows"
        if flow.scheme is Scheme.POSTGRES:
            return self._refusal_of_session(flow)
        if (flow.scheme is Scheme.HTTPS) != (flow.hello is not None):
            return "scheme and first bytes disagree"
        if flow.hello is not None:
            if flow.hello.sni != flow.host:
                return "server name is not the flow's host"
            if flow.hello.alpn and self._choose(flow, flow.hello) is None:
                flow.writer.write(_NO_APPLICATION_PROTOCOL)
                return "no common application protocol"
        return None

    def _refusal_of_session(self, flow: InspectedFlow) -> str | None:
        if self._postgres is None or self._sessions is None:
            return "there are no database sessions"
        if flow.hello is not None and flow.hello.sni != flow.host:
            return "server name is not the flow's host"
        if flow.hello is not None and flow.hello.alpn and POSTGRES not in flow.hello.alpn:
            flow.writer.write(_NO_APPLICATION_PROTOCOL)
            return "no common application protocol"
        return None

    def _framing(self, flow: InspectedFlow) -> Framing:
        if flow.scheme is Scheme.POSTGRES and self._postgres is not None:
            return self._postgres
        return self._framings[flow.hello is not None and self._choose(flow, flow.hello) == b"h2"]

    def cancellable(self, key: bytes, port: int) -> str | None:
        """See `gateway.engines.port.Engine`."""
        return None if self._postgres is None else self._postgres.cancellable(key, port)

    def _choose(self, flow: InspectedFlow, hello: Hello) -> bytes | None:
        return choose_alpn(hello.alpn, http2=(flow.host, flow.port) in self._http2)

    def revoke(self, secrets: frozenset[str] | None) -> int:
        """See `gateway.engines.port.Engine`."""
        self._known.drop()
        self._pool.revoke(secrets)
        hit = [one for one in self._live if (one.session.used if secrets is None else one.session.used & secrets)]
        return self._abort(hit)

    def recheck(self) -> int:
        """See `gateway.engines.port.Engine`."""
        self._pool.drop()
        for one in self._live:
            one.drop_leftovers()
        return self._abort([one for one in self._live if not _still_allowed(one)])

    def drop_idle(self) -> None:
        """See `gateway.engines.port.Engine`."""
        self._pool.drop()

    def _abort(self, flows: list[Flow]) -> int:
        for flow in flows:
            flow.abort()
        return len(flows)


def _still_allowed(flow: Flow) -> bool:
    try:
        return flow.session.still_allowed()
    except Exception:  # noqa: BLE001 - fails closed: a policy that cannot judge does not allow
        return False
