"""Passes the references of the operator's policy file from the compiler to vaultd.

vaultd releases a backend's secret only for a host that this list has. `serve` is no part of the way: the compiler reads
the file, and only root may tell vaultd.

- It is passed at each start of vaultd and after each change of the file.
- If the compiler refuses, vaultd gets an empty list. If a daemon does not answer, it is tried again until it does.
"""

import asyncio
import logging
from typing import Final, Protocol

import wire
from wire.api import compiler, vaultd

_AGAIN_SECONDS: Final = 0.5
_ASK_SECONDS: Final = 10.0

_log = logging.getLogger(__name__)


class Clients(Protocol):
    """The part of `runtimes.daemons.Daemons` that is used here."""

    async def reachable(self, name: str) -> None:
        """Wait until a daemon can be reached."""
        ...

    def client(self, name: str) -> wire.Client:
        """Return the connection to a daemon. Raises ConnectionError."""
        ...


class ReferenceFollower:
    """Keeps vaultd's list equal to the file."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._due = False
        self._task: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """The file, or vaultd's process, is another one."""
        self._due = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow(), name="follow-references")

    async def close(self) -> None:
        """End the work."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while self._due:
            self._due = False
            try:
                await self._pass_on()
            except (OSError, wire.RemoteError, wire.FrameError) as error:  # ConnectionError, TimeoutError are OSErrors
                _log.warning("vaultd has not the references of the policy file yet: %s", type(error).__name__)
                self._due = True
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _pass_on(self) -> None:
        await self._clients.reachable("compiler")
        await self._clients.reachable("vaultd")
        try:
            answer = await self._clients.client("compiler").ask(compiler.References(), timeout=_ASK_SECONDS)
            uses = answer.uses
        except wire.RemoteError as error:
            _log.error("no reference of the policy file is in force: %s", error.message[:300])
            uses = ()
        await self._clients.client("vaultd").ask(vaultd.Refer(uses), timeout=_ASK_SECONDS)
