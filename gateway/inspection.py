"""Owns this worker's engine and the certificates that the engine presents.

- The engine exists from the first configuration on. A TLS flow also needs a certificate for its host. Without either,
  a flow that needs inspection is denied.
- New upstream roots or limits apply to flows that begin after the change.
"""

from collections.abc import Callable

from gateway.config import GatewayConfig
from gateway.effects import Allowance, Decider, Recorder, Secrets, Sessions
from gateway.engines.port import Dialler, Engine, EngineLimits, MakeEngine
from gateway.ledger import Ledger
from gateway.state import WorkerState
from gateway.tls.authority import Certificates


class Inspection:
    """The engine of one worker, and its certificates."""

    def __init__(
        self,
        make_engine: MakeEngine,
        decider: Decider,
        allowance: Allowance,
        secrets: Secrets,
        sessions: Sessions,
        recorder: Recorder,
        dialler: Dialler,
        state: WorkerState,
        ledger: Ledger,
    ) -> None:
        self._make_engine = make_engine
        self._ledger = ledger
        self._decider = decider
        self._allowance = allowance
        self._secrets = secrets
        self._sessions = sessions
        self._recorder = recorder
        self._dialler = dialler
        self._certificates = Certificates(state)
        self._built_for: tuple[str, EngineLimits] | None = None
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine, None before the first configuration."""
        return self._engine

    async def ready(self, host: str | None) -> Engine | None:
        """Return the engine, or None. For a TLS flow to `host` also None if there is no certificate for that host."""
        if host is not None and not await self._certificates.ready(host):
            return None
        return self._engine

    def prepare(self, config: GatewayConfig) -> Callable[[], None]:
        """Build the engine that `config` needs; the returned function puts it in force.

        Raises:
            ValueError: the upstream roots cannot be read.
        """
        wanted = (
            config.constants.upstream_roots,
            EngineLimits(
                flows=config.constants.limits.connections,
                idle_seconds=config.constants.limits.idle,
                scrub_body_bytes=config.constants.limits.scrub_body_bytes,
                request_body_bytes=config.constants.limits.request_body_bytes,
            ),
        )
        if wanted == self._built_for:
            return lambda: None
        roots, limits = wanted
        candidate = self._make_engine(
            decider=self._decider,
            allowance=self._allowance,
            secrets=self._secrets,
            sessions=self._sessions,
            recorder=self._recorder,
            dialler=self._dialler,
            identity=self._certificates,
            ledger=self._ledger,
            upstream_roots=roots,
            limits=limits,
        )

        def swap() -> None:
            self._built_for = wanted
            if self._engine is None:
                self._engine = candidate
            else:  # keep the engine: revocations must find its live flows
                self._engine.reconfigure(upstream_roots=roots, limits=limits)

        return swap

    async def keep(self) -> None:
        """Keep a valid intermediate certificate until cancelled."""
        await self._certificates.keep()
