"""The state of one worker: configuration, guard and vault channel. The worker writes it, and all its parts read it.

A part reads the state at each use. It keeps no copy, except a configuration for the duration of one step.
"""

import asyncio
import select
from dataclasses import dataclass, field

from gateway.config import GatewayConfig
from policy.rules import Limits
from vault.client import VaultClient


class Guard:
    """The guard of the upstream namespace, observed through its pidfd."""

    def __init__(self, fd: int) -> None:
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self.fd = fd
        self._gone = False

    @property
    def alive(self) -> bool:
        """Whether the guard runs. Each call asks the kernel, so a death is seen without delay."""
        if not self._gone and self._poll.poll(0):
            self._gone = True
        return not self._gone


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True)
class WorkerState:
    """The state of one worker. Only the worker writes it.

    Attributes:
        guard: the present guard of the upstream namespace.
        vault: the present channel to vaultd.
        config: the configuration in force. None before the first one; then everything is refused.
        moving: set unless the sandbox is paused. What comes meanwhile waits for it.
    """

    guard: Guard
    vault: VaultClient
    config: GatewayConfig | None = None
    moving: asyncio.Event = field(default_factory=_set)

    @property
    def guarded(self) -> bool:
        """Whether the guard of the upstream namespace runs. If not, the worker dials and resolves nothing."""
        return self.guard.alive

    @property
    def may_resolve(self) -> bool:
        """Whether the worker may send queries: the guard runs, and the sandbox is not paused."""
        return self.guarded and self.moving.is_set()

    @property
    def limits(self) -> Limits | None:
        """The limits of the policy in force; None before the first policy."""
        return None if self.config is None else self.config.policy.limits
