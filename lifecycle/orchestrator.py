"""Sandboxes after they were made: reading, changing, removing. Making them is `transaction`'s.

- All writes to one sandbox are serial (`lock`).
- The control plane's own changes are in the audit log before they happen; removal alone does not wait for it, since
  to refuse a removal would leave more running, not less.
- What cannot be removed at once stays as a row `Stopping` that the reaper works on until it is gone.

It knows no HTTP; refusals are `ApiError`s because their codes are the contract's.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import wire
from lifecycle.clock import Clock
from lifecycle.creation import MAX_TIMEOUT
from lifecycle.errors import ApiError, unavailable, unknown_sandbox
from lifecycle.labels import patched
from lifecycle.peers import Auditd, Hostd, Unreachable, Vaultd, explained
from lifecycle.policies import Policies
from lifecycle.registry import Registry, RegistryError, Sandbox, State
from wire.ids import SANDBOX_ID

_log = logging.getLogger(__name__)


class Orchestrator:
    """Changes and removes sandboxes; holds what all parts of the control plane work with."""

    def __init__(
        self,
        registry: Registry,
        hostd: Hostd,
        vaultd: Vaultd,
        auditd: Auditd,
        policies: Policies,
        *,
        clock: Clock,
    ) -> None:
        self.registry = registry
        self.hostd = hostd
        self.vaultd = vaultd
        self.auditd = auditd
        self.policies = policies
        self.clock = clock
        self._moving: asyncio.Task[None] | None = None
        self.expiry_changed: Callable[[], None] = lambda: None
        self.forget: list[Callable[[str], Awaitable[None]]] = []
        """Called with the id of each sandbox that is gone, to drop what is kept for it."""
        self.unsettled: Callable[[str], Awaitable[None]] = _nothing
        """Called with the id of a sandbox whose policy may not be in force; on return it is, if it can be."""
        self.making: set[str] = set()
        """The sandboxes that are being created now: a row `Pending` of any other was left behind."""
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    # -- reading

    async def get(self, sandbox: str) -> Sandbox:
        """Return a sandbox.

        Raises:
            ApiError: 404.
        """
        row = await self.registry.get(sandbox) if SANDBOX_ID.fullmatch(sandbox) else None
        if row is None or self._is_over(row):
            raise unknown_sandbox(sandbox)
        return row

    def _is_over(self, row: Sandbox) -> bool:
        return row.expires_at is not None and row.expires_at <= self.clock()

    # -- removal

    async def remove(
        self, sandbox: str, reason: str, *, unless: Callable[[Sandbox], bool] = lambda current: False
    ) -> None:
        """Remove a sandbox and everything that was made for it; on return it is gone.

        Args:
            unless: looked at when no more change to the sandbox can come between; if true, it is not removed (409).

        Raises:
            ApiError: 404, 409, or 500 if something of it is left; the reaper will then go on.
        """
        if not SANDBOX_ID.fullmatch(sandbox):
            raise unknown_sandbox(sandbox)
        async with self.lock(sandbox):
            now = self.clock()

            def change(current: Sandbox) -> Sandbox:
                if unless(current):
                    raise ApiError(409, "DOCKER::SANDBOX_DELETE_FAILED", "The sandbox is not to be removed any more.")
                return current.moved(State.STOPPING, "REMOVING", f"Removing: {reason}.", now)

            row = await self.registry.update(sandbox, change)
            if row is None:
                raise unknown_sandbox(sandbox)
            await self.note("lifecycle.remove", "info", sandbox=sandbox, reason=reason)
            try:
                residue = await self.hostd.remove(sandbox)
                await self.vaultd.close_sandbox(sandbox)
            except (Unreachable, wire.RemoteError) as error:
                self.expiry_changed()
                _log.warning("removal of %s is being retried: %s", sandbox, error)
                said = f"Removal is being retried: {explained(error)}."
                raise ApiError(500, "DOCKER::SANDBOX_DELETE_FAILED", said) from None
            if residue:
                self.expiry_changed()
                _log.warning("removal of %s left %d things behind", sandbox, len(residue))
                raise ApiError(
                    500, "DOCKER::SANDBOX_DELETE_FAILED", f"Removal is being retried: {len(residue)} things are left."
                )
            try:
                await self.registry.delete(sandbox)
            except RegistryError:
                self.expiry_changed()
                raise ApiError(
                    500, "DOCKER::SANDBOX_DELETE_FAILED", "Removal is being retried: the state database failed."
                ) from None
        for forget in self.forget:
            await forget(sandbox)

    # -- changes

    async def patch_metadata(self, sandbox: str, patch: Mapping[str, str | None]) -> Sandbox:
        """Apply a merge patch to the metadata; atomic, also among concurrent ones."""
        await self.get(sandbox)

        def change(row: Sandbox) -> Sandbox:
            return replace(row, metadata=patched(row.metadata, patch))

        row = await self.registry.update(sandbox, change)
        if row is None:
            raise unknown_sandbox(sandbox)
        return row

    async def renew(self, sandbox: str, expires_at: datetime) -> Sandbox:
        """Set the expiry: later, earlier or the same, but in the future."""
        await self.keep_time()  # the caller's moment is one of the clock as it is now
        await self.get(sandbox)
        moment = (expires_at if expires_at.tzinfo else expires_at.replace(tzinfo=UTC)).timestamp()
        now = self.clock()
        if moment <= now:
            raise ApiError(400, "DOCKER::INVALID_EXPIRATION", "expiresAt must be in the future.")
        if moment > now + MAX_TIMEOUT:
            raise ApiError(400, "DOCKER::INVALID_EXPIRATION", "expiresAt is more than a century away.")

        def change(row: Sandbox) -> Sandbox:
            if row.expires_at is None:
                raise ApiError(409, "DOCKER::INVALID_EXPIRATION", "This sandbox has manual cleanup and no expiry.")
            if row.expires_at <= now or row.state is State.STOPPING:
                raise unknown_sandbox(sandbox)
            return replace(row, expires_at=moment)

        row = await self.registry.update(sandbox, change)
        if row is None:
            raise unknown_sandbox(sandbox)
        self.expiry_changed()
        return row

    async def touch(self, row: Sandbox) -> None:
        """Count an access: move the expiry of a running sandbox that asked for it, never back."""
        moment = self.clock() + (row.renew_seconds or 0)
        if row.renew_seconds is None or row.expires_at is None or row.state is not State.RUNNING:
            return

        def change(current: Sandbox) -> Sandbox:
            if current.expires_at is None or current.expires_at >= moment:
                return current
            return replace(current, expires_at=moment)

        await self.registry.update(row.id, change)

    async def keep_time(self) -> None:
        """Where the system's clock was set, move every expiry as far: what is left of each life stays the same.

        Raises:
            RegistryError: they could not be moved; nothing has changed.
        """
        if self._moving is None:
            moved = self.clock.moved()
            if not moved:
                return
            self._moving = asyncio.create_task(self._move_expiries(moved), name="clock")
            self._moving.add_done_callback(self._have_moved)
        await asyncio.shield(self._moving)  # rows and clock move together, whoever stops waiting

    def _have_moved(self, moving: asyncio.Task[None]) -> None:
        self._moving = None
        if not moving.cancelled() and moving.exception() is None:
            self.expiry_changed()

    async def _move_expiries(self, moved: float) -> None:
        _log.warning("the system's clock was set by %+.0f s: expiries move with it", moved)
        if moved < 0:  # in this order no sandbox looks expired meanwhile
            self.clock.follow(moved)
        try:
            await self.registry.shift(moved)
        except RegistryError:
            if moved < 0:
                self.clock.follow(-moved)
            raise
        if moved > 0:
            self.clock.follow(moved)

    async def pause(self, sandbox: str) -> None:
        """Refuse to freeze a running sandbox: hostd has no such operation."""
        await self._not_offered(sandbox, "pause", State.RUNNING, "SANDBOX_NOT_RUNNING")

    async def resume(self, sandbox: str) -> None:
        """Refuse to thaw a paused sandbox: hostd has no such operation."""
        await self._not_offered(sandbox, "resume", State.PAUSED, "SANDBOX_NOT_PAUSED")

    async def _not_offered(self, sandbox: str, op: str, before: State, wrong: str) -> None:
        """Nothing is recorded: nothing is done."""
        row = await self.get(sandbox)
        if row.state is not before:
            raise ApiError(409, f"DOCKER::{wrong}", f"Sandbox is {row.state}, not {before}.")
        raise ApiError(501, "SANDBOX::API_NOT_SUPPORTED", f"This server cannot {op} sandboxes.")

    # -- for the others

    @contextlib.asynccontextmanager
    async def lock(self, sandbox: str) -> AsyncIterator[None]:
        """Hold the sandbox's lock: all that changes it does."""
        lock, users = self._locks.get(sandbox, (asyncio.Lock(), 0))
        self._locks[sandbox] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[sandbox]
            if users == 1:
                del self._locks[sandbox]
            else:
                self._locks[sandbox] = (lock, users - 1)

    async def record(self, kind: str, decision: str, **fields: Any) -> None:
        """Have a change recorded before it is made.

        Raises:
            ApiError: 503, and it must not be made.
        """
        try:
            await self.auditd.record(kind, decision, **fields)
        except (Unreachable, wire.RemoteError) as error:
            _log.warning("audit refused %s: %s", kind, error)
            raise unavailable("AUDIT::UNAVAILABLE", "The audit log does not accept records.") from None

    async def note(self, kind: str, decision: str, **fields: Any) -> None:
        """Have something recorded that happens in any case."""
        try:
            await self.auditd.record(kind, decision, **fields)
        except (Unreachable, wire.RemoteError) as error:
            _log.warning("audit did not take %s: %s", kind, error)


async def _nothing(_sandbox: str) -> None:
    """Stands in until there is a part that does it."""
