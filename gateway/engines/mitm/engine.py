"""`FullEngine`: an engine with mitmproxy's protocol layers, behind `gateway.engines.port`.

- A worker has one `FullEngine`. The flows of the sandbox share certificates and TLS contexts, and nothing else. No
  upstream connection outlives its flow.
- `handle` closes both connections in every case.

`gate` connects mitmproxy's hooks with the exchange. `layers` makes mitmproxy strict.
"""

import asyncio
import contextlib
import logging
import time

from gateway.admission import Admission
from gateway.effects import Allowance, Decider, Recorder, Secrets
from gateway.engines.mitm import options
from gateway.engines.mitm.connection import FlowConnection, Ports, describe
from gateway.engines.mitm.contexts import ClientContexts, UpstreamContext, choose_alpn
from gateway.engines.mitm.gate import Gate
from gateway.engines.port import Dialler, EngineLimits, InspectedFlow, LeafIssuer
from gateway.ledger import Ledger
from gateway.scrub.sought import KnownPatterns
from policy.facts import Scheme
from wire.patience import Countdown

_NO_APPLICATION_PROTOCOL = b"\x15\x03\x03\x00\x02\x02\x78"

_log = logging.getLogger(__name__)


class FullEngine:
    """See `gateway.engines.port.Engine`. Make it inside a running loop."""

    def __init__(
        self,
        *,
        decider: Decider,
        allowance: Allowance,
        secrets: Secrets,
        recorder: Recorder,
        dialler: Dialler,
        identity: LeafIssuer,
        ledger: Ledger,
        upstream_roots: str,
        limits: EngineLimits | None = None,
    ) -> None:
        """Make an engine.

        Args:
            ledger: the counts of the sandbox.
            upstream_roots: PEM text of all certificates that servers are verified against.

        Raises:
            ValueError: `upstream_roots` has no certificate, or other content.
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

        Raises:
            ValueError: see the constructor; the old values stay in force.
        """
        upstream = self._upstream if upstream_roots is None else UpstreamContext(upstream_roots)
        self._upstream = upstream
        self._identity = identity or self._identity
        self._limits = limits or self._limits

    async def handle(self, flow: InspectedFlow) -> None:
        """See `gateway.engines.port.Engine`."""
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
        settings = options.options(self._limits.idle_seconds)
        connection = FlowConnection(flow, ports, gate, self._limits, settings, self._ledger.beat)
        deadline = Countdown(self._limits.handshake_seconds, connection.end_handshake)
        self._live.add(connection)
        try:
            await connection.handle_client()
        except asyncio.CancelledError:
            connection.abort()
            raise
        except Exception as error:  # noqa: BLE001 - fails closed: the flow is over
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
        """See `gateway.engines.port.Engine`."""
        self._known.drop()
        hit = [one for one in self._live if (one.gate.used if secrets is None else one.gate.used & secrets)]
        return self._cut(hit)

    def recheck(self) -> int:
        """See `gateway.engines.port.Engine`."""
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
    except Exception:  # noqa: BLE001 - fails closed: a policy that cannot judge does not allow
        return False
