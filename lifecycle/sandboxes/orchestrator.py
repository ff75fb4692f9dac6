"""Reading, changing and removing sandboxes that exist. Module `transaction` creates them.

- All writes to one sandbox are serial (`locks`).
- The control plane records its own changes in the audit log before it makes them. Only a removal does not wait for its
  record: a refused removal would leave more processes running, not fewer.
- hostd decides whether a sandbox is paused. The row follows: it is written after hostd's answer, and the observer
  corrects it.
- A sandbox that cannot be removed at once stays as a row `Stopping`. The reaper retries until it is removed.

This module does not use HTTP. Refusals are `ApiError`s because the contract defines their codes.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import wire
from lifecycle.api.errors import ApiError, unknown_sandbox
from lifecycle.daemon_clients import Hostd, Unreachable, Vaultd, explained
from lifecycle.sandboxes.clock import Clock
from lifecycle.sandboxes.creation import MAX_TIMEOUT
from lifecycle.sandboxes.history import OUTPUT_LINES, Removal
from lifecycle.sandboxes.journal import Journal
from lifecycle.sandboxes.labels import patched
from lifecycle.sandboxes.locks import Locks
from lifecycle.sandboxes.registry import Registry, RegistryError, Sandbox, State
from lifecycle.sandboxes.rows import Rows
from wire.api.hostd import Printed
from wire.ids import SANDBOX_ID

_GONE = frozenset({wire.Code.NOT_RUNNING, wire.Code.UNKNOWN_SANDBOX})
_ENDED = "The sandbox has ended."

_log = logging.getLogger(__name__)


class Orchestrator:
    """The operations that change and remove sandboxes.

    Attributes:
        expiry_changed: set when an expiry changed or a removal is unfinished. The reaper waits for it.
        forget: called with the id of each removed sandbox, so that other parts drop their data about it.
        output_lines: how many lines of the output stay in the history of a removed sandbox.
    """

    def __init__(
        self,
        registry: Registry,
        rows: Rows,
        hostd: Hostd,
        vaultd: Vaultd,
        *,
        journal: Journal,
        locks: Locks,
        clock: Clock,
        expiry_changed: asyncio.Event,
        forget: Sequence[Callable[[str], Awaitable[None]]],
        output_lines: int = OUTPUT_LINES,
    ) -> None:
        self._registry = registry
        self._rows = rows
        self._hostd = hostd
        self._vaultd = vaultd
        self._journal = journal
        self._locks = locks
        self._clock = clock
        self._expiry_changed = expiry_changed
        self._forget = tuple(forget)
        self._output_lines = output_lines
        self._printed: dict[str, Printed] = {}
        """The outputs of sandboxes whose removal is unfinished elsewhere."""
        self._moving: asyncio.Task[None] | None = None

    # -- removal

    async def remove(
        self,
        sandbox: str,
        reason: str,
        *,
        unless: Callable[[Sandbox], bool] = lambda current: False,
        idle: bool = True,
    ) -> None:
        """Remove a sandbox and all its resources. On return it is removed.

        Args:
            unless: checked while the sandbox's lock is held. If it is true, the sandbox is not removed (409).
            idle: whether an idle member of a pool is known to the caller. For a caller of the API it does not exist.

        Raises:
            ApiError: 404, 409, or 500 if a part of the sandbox is left. The reaper then retries.
            RegistryError: its row was not changed, or not removed. In the second case the reaper retries.
        """
        if not SANDBOX_ID.fullmatch(sandbox):
            raise unknown_sandbox(sandbox)
        async with self._locks.hold(sandbox):
            now = self._clock()

            def change(current: Sandbox) -> Sandbox:
                if current.idle and not idle:
                    raise unknown_sandbox(sandbox)
                if unless(current):
                    raise ApiError(409, "DOCKER::SANDBOX_DELETE_FAILED", "The sandbox is not to be removed any more.")
                return current.moved(State.STOPPING, "REMOVING", f"Removing: {reason}.", now)

            row = await self._registry.update(sandbox, change)
            if row is None:
                raise unknown_sandbox(sandbox)
            await self._journal.note("lifecycle.remove", "info", sandbox=sandbox, reason=reason)
            try:
                removed = await self._hostd.remove(sandbox, self._output_lines)
                if removed.printed is not None:
                    self._printed[sandbox] = removed.printed
                await self._vaultd.close_sandbox(sandbox)
            except (Unreachable, wire.RemoteError) as error:
                self._expiry_changed.set()
                _log.warning("removal of %s is being retried: %s", sandbox, error)
                said = f"Removal is being retried: {explained(error)}."
                raise ApiError(500, "DOCKER::SANDBOX_DELETE_FAILED", said) from None
            if removed.residue:
                left = len(removed.residue)
                self._expiry_changed.set()
                _log.warning("removal of %s left %d things behind", sandbox, left)
                raise ApiError(
                    500, "DOCKER::SANDBOX_DELETE_FAILED", f"Removal is being retried: {left} things are left."
                )
            try:
                await self._registry.delete(sandbox, self._removal(sandbox, reason))
            except RegistryError:
                self._expiry_changed.set()
                raise  # The row is left as Stopping, and the reaper retries.
            self._printed.pop(sandbox, None)
        for forget in self._forget:
            await forget(sandbox)

    def _removal(self, sandbox: str, cause: str) -> Removal:
        printed = self._printed.get(sandbox)
        return Removal(self._clock(), cause, *(("", False) if printed is None else (printed.text, printed.truncated)))

    # -- changes

    async def patch_metadata(self, sandbox: str, patch: Mapping[str, str | None]) -> Sandbox:
        """Apply a merge patch to the metadata. The change is atomic, also among concurrent changes."""
        await self._rows.get(sandbox)

        def change(row: Sandbox) -> Sandbox:
            return replace(row, metadata=patched(row.metadata, patch))

        row = await self._registry.update(sandbox, change)
        if row is None:
            raise unknown_sandbox(sandbox)
        return row

    async def renew(self, sandbox: str, expires_at: datetime) -> Sandbox:
        """Set the expiry: later, earlier or the same, but in the future."""
        await self.keep_time()  # The caller's time is a time of the system's clock as it is now.
        await self._rows.get(sandbox)
        moment = (expires_at if expires_at.tzinfo else expires_at.replace(tzinfo=UTC)).timestamp()
        now = self._clock()
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

        row = await self._registry.update(sandbox, change)
        if row is None:
            raise unknown_sandbox(sandbox)
        self._expiry_changed.set()
        return row

    async def keep_time(self) -> None:
        """After the system's clock was set, move every expiry by the same difference, so that the remaining times stay
        the same.

        Raises:
            RegistryError: the rows were not changed.
        """
        if self._moving is None:
            moved = self._clock.moved()
            if not moved:
                return
            self._moving = asyncio.create_task(self._move_expiries(moved), name="clock")
            self._moving.add_done_callback(self._have_moved)
        await asyncio.shield(self._moving)  # Rows and clock move together, even if a caller is cancelled.

    def _have_moved(self, moving: asyncio.Task[None]) -> None:
        self._moving = None
        if not moving.cancelled() and moving.exception() is None:
            self._expiry_changed.set()

    async def _move_expiries(self, moved: float) -> None:
        _log.warning("the system's clock was set by %+.0f s: expiries move with it", moved)
        if moved < 0:  # In this order no sandbox seems to be expired in between.
            self._clock.follow(moved)
        try:
            await self._registry.shift(moved)
        except RegistryError:
            if moved < 0:
                self._clock.follow(-moved)
            raise
        if moved > 0:
            self._clock.follow(moved)

    async def pause(self, sandbox: str) -> None:
        """Freeze a running sandbox. On return none of its processes runs, and its gateway forwards nothing.

        The row is `Pausing` meanwhile, so that no call gets into the sandbox any more. If the caller leaves, or hostd
        or the registry does not answer, the observer sets the row to what hostd reports.

        Raises:
            ApiError: 404, 409 if it does not run, 500 if it cannot be paused, 503 without the audit log.
        """
        async with self._locks.hold(sandbox):
            row = await self._in_state(sandbox, State.RUNNING, "DOCKER::SANDBOX_NOT_RUNNING")
            await self._journal.record("lifecycle.pause", "info", sandbox=sandbox)
            await self._move(row, State.PAUSING, "CONTAINER_PAUSING", "The sandbox is being paused.")
            try:
                await self._hostd.pause(sandbox)
            except wire.RemoteError as error:
                await self._move(row, row.state, row.reason, row.message)
                if error.code in _GONE:
                    raise ApiError(409, "DOCKER::SANDBOX_NOT_RUNNING", _ENDED) from None
                raise _failed("SANDBOX_PAUSE_FAILED", sandbox, "paused", error) from None
            except Unreachable as error:
                raise _failed("SANDBOX_PAUSE_FAILED", sandbox, "paused", error) from None
            await self._move(row, State.PAUSED, "CONTAINER_PAUSED", "The sandbox is paused.")

    async def resume(self, sandbox: str) -> None:
        """Let a paused sandbox run. On return it runs.

        Raises:
            ApiError: 404, 409 if it is not paused, 500 if it cannot be resumed, 503 without the audit log.
        """
        async with self._locks.hold(sandbox):
            row = await self._in_state(sandbox, State.PAUSED, "DOCKER::SANDBOX_NOT_PAUSED")
            await self._journal.record("lifecycle.resume", "info", sandbox=sandbox)
            try:
                await self._hostd.resume(sandbox)
            except wire.RemoteError as error:
                if error.code in _GONE:
                    raise ApiError(409, "DOCKER::SANDBOX_NOT_PAUSED", _ENDED) from None
                raise _failed("SANDBOX_RESUME_FAILED", sandbox, "resumed", error) from None
            except Unreachable as error:
                raise _failed("SANDBOX_RESUME_FAILED", sandbox, "resumed", error) from None
            await self._move(row, State.RUNNING, "CONTAINER_RUNNING", "Sandbox container started successfully.")

    async def _in_state(self, sandbox: str, state: State, code: str) -> Sandbox:
        row = await self._rows.get(sandbox)
        if row.state is not state:
            raise ApiError(409, code, f"Sandbox is {row.state}, not {state}.")
        return row

    async def _move(self, row: Sandbox, state: State, reason: str, message: str) -> None:
        now = self._clock()
        if await self._registry.update(row.id, lambda current: current.moved(state, reason, message, now)) is None:
            raise unknown_sandbox(row.id)


def _failed(code: str, sandbox: str, done: str, error: Unreachable | wire.RemoteError) -> ApiError:
    _log.warning("%s could not be %s: %s", sandbox, done, error)
    return ApiError(500, f"DOCKER::{code}", f"Sandbox could not be {done}: {explained(error)}.")
