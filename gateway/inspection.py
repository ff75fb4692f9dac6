"""Keeps this worker's inspecting engine: its certificate authority, and the engine built for the configuration.

- There is an engine only while a configuration is active and an intermediate is at hand; without one, flows that need
  inspection are denied.
- New upstream roots or limits hold for flows that begin after them.
"""

from collections.abc import Callable

from gateway.certificates import Certificates
from gateway.config import GatewayConfig
from gateway.effects import Allowance, Decider, Recorder, Secrets
from gateway.engine import Dialler, Engine, EngineLimits, MakeEngine
from gateway.ledger import Ledger
from vault.client import VaultClient


class Inspection:
    """The engine of one worker and what it needs."""

    def __init__(
        self,
        make_engine: MakeEngine,
        decider: Decider,
        allowance: Allowance,
        secrets: Secrets,
        recorder: Recorder,
        dialler: Dialler,
        vault: Callable[[], VaultClient],
        ledger: Ledger,
    ) -> None:
        self._make_engine = make_engine
        self._ledger = ledger
        self._decider = decider
        self._allowance = allowance
        self._secrets = secrets
        self._recorder = recorder
        self._dialler = dialler
        self._certificates = Certificates(vault)
        self._built_for: tuple[str, EngineLimits] | None = None
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine, None before the first configuration."""
        return self._engine

    async def ready(self, host: str | None) -> Engine | None:
        """The engine, None when there is none; for a TLS flow also none without a certificate for its `host`."""
        if host is not None and not await self._certificates.ready(host):
            return None
        return self._engine

    def prepare(self, config: GatewayConfig) -> Callable[[], None]:
        """Build what `config` needs; the returned call puts it in place.

        Raises:
            ValueError: its upstream roots cannot be read.
        """
        wanted = (
            config.upstream_roots,
            EngineLimits(
                flows=config.limits.connections,
                idle_seconds=config.limits.idle,
                scrub_body_bytes=config.limits.scrub_body_bytes,
            ),
        )
        if wanted == self._built_for:
            return lambda: None
        roots, limits = wanted
        candidate = self._make_engine(
            decider=self._decider,
            allowance=self._allowance,
            secrets=self._secrets,
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
            else:  # its live flows stay within reach of a revocation
                self._engine.reconfigure(upstream_roots=roots, limits=limits)

        return swap

    async def keep(self) -> None:
        """Have a valid intermediate, for ever."""
        await self._certificates.keep()
