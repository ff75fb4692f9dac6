"""`FullEngine`: inspection with mitmproxy's protocol layers, behind the seam of `gateway.engine`.

- One `FullEngine` per worker. It shares certificates and TLS contexts among the flows of one sandbox, and nothing else:
  no upstream connection outlives its flow.
- `handle` closes both ends, whatever happens.

See `gate` for what is decided about a request, `layers` for how mitmproxy is made strict.
"""

import asyncio
import contextlib
import logging
import time

from gateway.admission import Admission
from gateway.effects import Allowance, Decider, Recorder, Secrets
from gateway.engine import Dialler, EngineLimits, Identity, InspectedFlow
from gateway.full import mitm
from gateway.full.connection import FlowConnection, Ports, describe
from gateway.full.contexts import ClientContexts, UpstreamContext, choose_alpn
from gateway.full.gate import Gate
from gateway.ledger import Ledger
from gateway.sought import KnownPatterns
from policy.facts import Scheme
from wire.patience import Countdown

_NO_APPLICATION_PROTOCOL = b"\x15\x03\x03\x00\x02\x02\x78"

_log = logging.getLogger(__name__)


class FullEngine:
    """See `gateway.engine.Engine`. Make it inside a running loop."""

    def __init__(
        self,
        *,
        decider: Decider,
        allowance: Allowance,
        secrets: Secrets,
        recorder: Recorder,
        dialler: Dialler,
        identity: Identity,
        ledger: Ledger,
        upstream_roots: str,
        limits: EngineLimits | None = None,
    ) -> None:
        """Wire an engine.

        Args:
            ledger: what the sandbox has used up.
            upstream_roots: PEM text of all certificates that servers are verified against.

        Raises:
            ValueError: `upstream_roots` holds no certificate, or something else.
        """
        self._decider = decider
        self._allowance = allowance
        self._secrets = secrets
        self._recorder = recorder
        self._dialler = dialler
        self._limits = limits or EngineLimits()
        self._identity = identity
        self._clients = ClientContexts()
        self._upstream = UpstreamContext(upstream_roots)
        self._live: set[FlowConnection] = set()
        self._ledger = ledger
        self._known = KnownPatterns()
        self._admission = Admission(time.monotonic)

    @property
    def flows(self) -> int:
        """How many flows are being served."""
        return len(self._live)

    def reconfigure(
        self,
        *,
        identity: Identity | None = None,
        upstream_roots: str | None = None,
        limits: EngineLimits | None = None,
    ) -> None:
        """Use other certificates, roots or limits for flows that begin from now on.

        Raises:
            ValueError: see the constructor; nothing has changed then.
        """
        upstream = self._upstream if upstream_roots is None else UpstreamContext(upstream_roots)
        self._upstream = upstream
        self._identity = identity or self._identity
        self._limits = limits or self._limits

    async def handle(self, flow: InspectedFlow) -> None:
        """See `gateway.engine.Engine`."""
        refusal = self._refusal(flow)
        if refusal is not None:
            self._recorder.note("flow", "deny", rule="engine", reason=refusal, **describe(flow))
            with contextlib.suppress(OSError):
                flow.writer.close()
            return
        gate = Gate(
            flow,
            self._decider,
            self._allowance,
            self._secrets,
            self._recorder,
            self._limits,
            self._ledger,
            self._known,
            self._admission,
        )
        ports = Ports(self._dialler, self._identity, self._clients, self._upstream)
        options = mitm.options(self._limits.idle_seconds)
        connection = FlowConnection(flow, ports, gate, self._limits, options, self._ledger.beat)
        deadline = Countdown(self._limits.handshake_seconds, connection.end_handshake)
        self._live.add(connection)
        try:
            await connection.handle_client()
        except asyncio.CancelledError:
            connection.abort()
            raise
        except Exception as error:  # noqa: BLE001 - closes: the flow is over
            _log.error("an inspected flow failed: %s", type(error).__name__)
        finally:
            deadline.cancel()
            try:
                await connection.shutdown()
            finally:
                self._live.discard(connection)
        if connection.aborted:
            self._recorder.note("flow", "deny", rule="engine", reason=connection.reason, **describe(flow))

    def _refusal(self, flow: InspectedFlow) -> str | None:
        if len(self._live) >= self._limits.flows:
            return "too many flows"
        if (flow.scheme is Scheme.HTTPS) != (flow.hello is not None):
            return "scheme and first bytes disagree"
        if flow.hello is not None:
            if flow.hello.sni != flow.host:
                return "server name is not the flow's host"
            if flow.hello.alpn and choose_alpn(flow.hello.alpn) is None:
                flow.writer.write(_NO_APPLICATION_PROTOCOL)
                return "no common application protocol"
        return None

    def revoke(self, secrets: frozenset[str] | None) -> int:
        """See `gateway.engine.Engine`."""
        self._known.drop()
        hit = [one for one in self._live if (one.gate.used if secrets is None else one.gate.used & secrets)]
        return self._cut(hit)

    def recheck(self) -> int:
        """See `gateway.engine.Engine`."""
        for one in self._live:
            one.drop_leftovers()
        return self._cut([one for one in self._live if not _still_allowed(one)])

    def _cut(self, connections: list[FlowConnection]) -> int:
        for connection in connections:
            connection.abort()
        return len(connections)


def _still_allowed(connection: FlowConnection) -> bool:
    try:
        return connection.gate.still_allowed()
    except Exception:  # noqa: BLE001 - cuts: a policy that cannot judge does not allow
        return False
