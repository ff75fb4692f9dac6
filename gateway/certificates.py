"""Keeps this worker's certificate authority: asks vaultd for it, and for the next one in time.

- It is asked for at birth, at half of its life, when the clock was set to before its beginning or past its end, and
  when a host needs a certificate that it may not sign: policy has changed, and vaultd knows more names.
- One that is due but not over goes on signing until there is the next one. Without a valid one there is no certificate.
- A failure is tried again with growing pauses.

Which names it may sign is vaultd's to say; the constraints are in the certificate, for clients to judge.
"""

import asyncio
import contextlib
import datetime
import logging
from collections.abc import Callable

from gateway.engine import Leaf
from gateway.identity import LeafMint
from vault.client import VaultClient, VaultError
from wire.patience import Patience

_READY_SECONDS = 5.0
_LOOK_SECONDS = 30.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 1.0

_log = logging.getLogger(__name__)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Certificates:
    """`gateway.engine.Identity` over the latest intermediate."""

    def __init__(
        self,
        vault: Callable[[], VaultClient],
        now: Callable[[], datetime.datetime] = _now,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._vault = vault
        self._now = now
        self._look_seconds = look_seconds
        self._mint: LeafMint | None = None
        self._issued = asyncio.Event()
        self._wanted = asyncio.Event()

    def leaf(self, host: str) -> Leaf:
        """See `gateway.engine.Identity`.

        Raises:
            ValueError: there is no intermediate that may sign it now.
        """
        if self._mint is None:
            raise ValueError("there is no intermediate yet")
        return self._mint.leaf(host)

    async def ready(self, host: str) -> bool:
        """Whether a certificate for `host` can be had, waiting a little for an intermediate that may sign it."""
        if self._signs(host):
            return True
        issued = self._issued
        self._wanted.set()
        with contextlib.suppress(TimeoutError):
            async with Patience(_READY_SECONDS):
                await issued.wait()
        return self._signs(host)

    async def keep(self) -> None:
        """Have a valid intermediate, for ever."""
        pause = _FIRST_PAUSE
        while True:
            self._wanted.clear()
            try:
                answer = await self._vault().intermediate()
                mint = LeafMint(answer.certificate_pem, answer.chain_pem, answer.key_pem.reveal(), now=self._now)
            except (VaultError, ValueError) as error:
                _log.warning("no intermediate: %s", type(error).__name__)
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
