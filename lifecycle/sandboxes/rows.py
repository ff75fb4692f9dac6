"""Access to the row of a sandbox, for all parts that serve a request about it."""

from dataclasses import replace

from lifecycle.api.errors import unknown_sandbox
from lifecycle.sandboxes.clock import Clock
from lifecycle.sandboxes.registry import Registry, Sandbox, State
from wire.ids import SANDBOX_ID


class Rows:
    """The rows of sandboxes that have not expired."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock

    async def get(self, sandbox: str) -> Sandbox:
        """Return a sandbox.

        Raises:
            ApiError: 404.
        """
        row = await self._registry.get(sandbox) if SANDBOX_ID.fullmatch(sandbox) else None
        if row is None or row.idle or (row.expires_at is not None and row.expires_at <= self._clock()):
            raise unknown_sandbox(sandbox)
        return row

    async def touch(self, row: Sandbox) -> None:
        """Record an access: move the expiry of a running sandbox that has this option. It never moves back."""
        moment = self._clock() + (row.renew_seconds or 0)
        if row.renew_seconds is None or row.expires_at is None or row.state is not State.RUNNING:
            return

        def change(current: Sandbox) -> Sandbox:
            if current.expires_at is None or current.expires_at >= moment:
                return current
            return replace(current, expires_at=moment)

        await self._registry.update(row.id, change)
