"""Keeps this worker's inspecting engine: its certificate authority, and the engine built for the configuration.

- There is an engine only while a configuration is active and an intermediate is at hand; without one, flows that need
  inspection are denied.
- The intermediate is asked for at birth and again at half of its life; a failure is tried again with growing pauses.
- New upstream roots or limits hold for flows that begin after them.
"""

import asyncio
import datetime
import logging
from collections.abc import Callable

from gateway.config import GatewayConfig
from gateway.engine import Allowance, Decider, Dialler, Engine, EngineLimits, Leaf, Recorder, Secrets
from gateway.full.engine import FullEngine
from gateway.full.identity import LeafMint
from gateway.ledger import Ledger
from vault.client import VaultClient, VaultError
from wire.patience import Patience

_READY_SECONDS = 5.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 1.0

_log = logging.getLogger(__name__)


class _CurrentIdentity:
    """`gateway.engine.Identity` over the latest intermediate."""

    def __init__(self) -> None:
        self.mint: LeafMint | None = None

    def leaf(self, host: str) -> Leaf:
        if self.mint is None:
            raise ValueError("there is no intermediate yet")
        return self.mint.leaf(host)


class Inspection:
    """The engine of one worker and what it needs."""

    def __init__(
        self,
        decider: Decider,
        allowance: Allowance,
        secrets: Secrets,
        recorder: Recorder,
        dialler: Dialler,
        vault: Callable[[], VaultClient],
        ledger: Ledger,
    ) -> None:
        self._ledger = ledger
        self._decider = decider
        self._allowance = allowance
        self._secrets = secrets
        self._recorder = recorder
        self._dialler = dialler
        self._vault = vault
        self._identity = _CurrentIdentity()
        self._identified = asyncio.Event()
        self._built_for: tuple[str, EngineLimits] | None = None
        self._engine: FullEngine | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine, None before the first configuration."""
        return self._engine

    async def ready(self) -> Engine | None:
        """The engine, waiting a little for the intermediate; None when there is none."""
        try:
            async with Patience(_READY_SECONDS):
                await self._identified.wait()
        except TimeoutError:
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
        candidate = FullEngine(
            decider=self._decider,
            allowance=self._allowance,
            secrets=self._secrets,
            recorder=self._recorder,
            dialler=self._dialler,
            identity=self._identity,
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
        pause = _FIRST_PAUSE
        while True:
            try:
                issued = await self._vault().intermediate()
                mint = LeafMint(issued.certificate_pem, issued.chain_pem, issued.key_pem.reveal())
            except (VaultError, ValueError) as error:
                _log.warning("no intermediate: %s", type(error).__name__)
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)
                continue
            pause = _FIRST_PAUSE
            self._identity.mint = mint
            self._identified.set()
            left = (mint.expires - datetime.datetime.now(datetime.UTC)).total_seconds()
            await asyncio.sleep(max(1.0, left / 2))
