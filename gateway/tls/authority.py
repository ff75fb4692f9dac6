"""Keeps a valid intermediate certificate for this worker: requests it from vaultd, and renews it in time.

- The worker requests an intermediate at its start, at half of the lifetime, after a change of the clock that puts the
  time outside of its validity, and if a host needs a leaf that the present one may not sign. The last happens after a
  change of policy: vaultd then has more names.
- An old intermediate signs until the next one arrives or its validity ends. Without a valid intermediate there is no
  leaf.
- A failed request is repeated with growing pauses.

vaultd chooses the names that an intermediate may sign. They are name constraints in the certificate, which clients
check.
"""

import asyncio
import contextlib
import datetime
import logging
from collections.abc import Callable

from gateway.engines.port import Leaf
from gateway.state import WorkerState
from gateway.tls.identity import LeafMint
from vault.client import VaultError
from wire.patience import Patience

_READY_SECONDS = 5.0
_LOOK_SECONDS = 30.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 1.0

_log = logging.getLogger(__name__)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Certificates:
    """`gateway.engines.port.LeafIssuer` over the latest intermediate."""

    def __init__(
        self,
        state: WorkerState,
        now: Callable[[], datetime.datetime] = _now,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._state = state
        self._now = now
        self._look_seconds = look_seconds
        self._mint: LeafMint | None = None
        self._issued = asyncio.Event()
        self._wanted = asyncio.Event()

    def leaf(self, host: str) -> Leaf:
        """See `gateway.engines.port.LeafIssuer`.

        Raises:
            ValueError: no valid intermediate may sign a leaf for `host`.
        """
        if self._mint is None:
            raise ValueError("vaultd has issued no intermediate certificate yet")
        return self._mint.leaf(host)

    async def ready(self, host: str) -> bool:
        """Whether a leaf for `host` can be made. Waits for a short time for an intermediate that may sign it."""
        if self._signs(host):
            return True
        issued = self._issued
        self._wanted.set()
        with contextlib.suppress(TimeoutError):
            async with Patience(_READY_SECONDS):
                await issued.wait()
        return self._signs(host)

    async def keep(self) -> None:
        """Keep a valid intermediate until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            self._wanted.clear()
            try:
                answer = await self._state.vault.intermediate()
                mint = LeafMint(answer.certificate_pem, answer.chain_pem, answer.key_pem.reveal(), now=self._now)
            except (VaultError, ValueError) as error:
                _log.warning("vaultd issued no intermediate certificate, the worker retries: %s", type(error).__name__)
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)
                continue
            pause = _FIRST_PAUSE
            self._mint = mint
            issued, self._issued = self._issued, asyncio.Event()
            issued.set()
            while not (mint.due or self._wanted.is_set()):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wanted.wait(), self._look_seconds)

    def _signs(self, host: str) -> bool:
        return self._mint is not None and self._mint.signs(host)
