"""Creation, removal and restore of snapshots: the control plane's part.

- A creation is asynchronous: the row is `Creating` on the answer, and becomes `Ready` or `Failed`. hostd does the work.
- The row is written before hostd is asked, and the audit record before the row. So a crash leaves a row, never a
  snapshot without one.
- If hostd, the state database or this process goes away meanwhile, the row is unsettled. `settle` compares the
  unsettled rows with hostd: a creation is completed or `Failed`, a removal is completed or undone. No row stays
  `Creating` or `Deleting` while hostd answers.
- A removal that hostd refuses leaves the snapshot as it was, so that it can be repeated. One whose answer was lost is
  completed.
- A snapshot has no expiry. It survives its source, and a restart of the server.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import wire
from lifecycle.api.errors import ApiError, unavailable
from lifecycle.daemon_clients import Hostd, Unreachable, explained
from lifecycle.sandboxes.clock import Clock
from lifecycle.sandboxes.journal import Journal
from lifecycle.sandboxes.locks import Locks
from lifecycle.sandboxes.registry import RegistryError, State
from lifecycle.sandboxes.rows import Rows
from lifecycle.snapshots.errors import conflict, no_artifact, unknown_snapshot
from lifecycle.snapshots.rows import SnapshotRows
from lifecycle.snapshots.snapshot import Snapshot, SnapshotBounds, SnapshotState
from wire.ids import SNAPSHOT_ID

SETTLE_SECONDS = 1.0
"""The pause between two looks while a row is unsettled."""
SWEEP_SECONDS = 60.0
READY = ("snapshot_runtime_ready", "Snapshot is ready.")

_log = logging.getLogger(__name__)


class Snapshots:
    """The snapshots of one server."""

    def __init__(
        self,
        rows: SnapshotRows,
        sources: Rows,
        hostd: Hostd,
        *,
        journal: Journal,
        clock: Clock,
        bounds: SnapshotBounds,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self._rows = rows
        self._sources = sources
        self._hostd = hostd
        self._journal = journal
        self._clock = clock
        self._bounds = bounds
        self._new_id = new_id
        self._locks = Locks()
        self._accepting = asyncio.Lock()
        self._wake = asyncio.Event()
        self._making: set[str] = set()
        """The snapshots that this process is creating. The row `Creating` of any other one is unsettled."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def create(self, sandbox: str, name: str | None) -> Snapshot:
        """Accept the creation of a snapshot of a running sandbox.

        Raises:
            ApiError: it cannot be created.
        """
        source = await self._sources.get(sandbox)
        if source.state is not State.RUNNING:
            raise conflict("INVALID_SOURCE_STATE", f"Sandbox is {source.state}, not Running.")
        async with self._accepting:
            await self._check_room(sandbox)
            snapshot, now = self._new_id(), self._clock()
            row = Snapshot(
                id=snapshot,
                sandbox=sandbox,
                name=name,
                state=SnapshotState.CREATING,
                reason="snapshot_accepted",
                message="Snapshot creation accepted.",
                changed_at=now,
                created_at=now,
                image=source.image,
            )
            self._making.add(snapshot)
            try:
                await self._journal.record(
                    "lifecycle.snapshot", "allow", sandbox=sandbox, snapshot=snapshot, image=source.image
                )
                await self._rows.put(row)
            except BaseException:
                self._making.discard(snapshot)
                self._wake.set()  # the row can have been written
                raise
        task = asyncio.get_running_loop().create_task(self._make(row), name=f"snapshot:{snapshot}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._making.discard(snapshot))
        return row

    async def _check_room(self, sandbox: str) -> None:
        rows = await self._rows.all()
        if any(row.sandbox == sandbox and row.state is SnapshotState.CREATING for row in rows):
            raise conflict("RUNTIME_CREATE_CONFLICT", "Another snapshot of this sandbox is being created.")
        if len(rows) >= self._bounds.count:
            raise conflict("QUOTA_EXCEEDED", f"This server keeps {self._bounds.count} snapshots at most.")
        if sum(row.bytes for row in rows) >= self._bounds.total_bytes:
            raise conflict("QUOTA_EXCEEDED", f"All snapshots have {self._bounds.total_bytes} bytes at most.")

    async def get(self, snapshot: str) -> Snapshot:
        """Return a snapshot.

        Raises:
            ApiError: 404.
        """
        row = await self._rows.get(snapshot) if SNAPSHOT_ID.fullmatch(snapshot) else None
        if row is None:
            raise unknown_snapshot(snapshot)
        return row

    async def page(
        self, sandbox: str | None, name: str | None, states: Sequence[str], page: int, size: int
    ) -> tuple[list[Snapshot], int]:
        """Return one page, newest first, and the number of all matches."""
        return await self._rows.page(sandbox, name, states, page, size)

    async def source(self, snapshot: str) -> Snapshot:
        """Return a snapshot from which a sandbox can begin.

        Raises:
            ApiError: it does not exist, is not ready, or has no content.
        """
        row = await self.get(snapshot)
        if row.state is not SnapshotState.READY:
            raise conflict("NOT_READY", f"Snapshot is {row.state}, not Ready.")
        try:
            held = {item.snapshot for item in await self._hostd.snapshots() if item.bytes is not None}
        except (Unreachable, wire.RemoteError) as error:
            message = f"Sandboxes cannot be started now: {explained(error)}."
            raise unavailable("DOCKER::INITIALIZATION_ERROR", message) from None
        if row.id not in held:
            raise no_artifact(snapshot)
        return row

    async def delete(self, snapshot: str) -> None:
        """Remove a snapshot. On return it is removed.

        Raises:
            ApiError: 404, 409 while it is created or used, 500 if it cannot be removed, 503 without the audit log.
        """
        try:
            async with self._locks.hold(snapshot):
                await self._delete(snapshot)
        except BaseException:
            self._wake.set()  # the row can be `Deleting`
            raise

    async def _delete(self, snapshot: str) -> None:
        """Remove a snapshot. The caller holds its lock."""
        row = await self.get(snapshot)
        if row.state is SnapshotState.CREATING:
            raise conflict("INVALID_STATE", "The snapshot is being created.")
        await self._journal.record("lifecycle.snapshot_delete", "info", sandbox=row.sandbox, snapshot=snapshot)
        await self._move(row, SnapshotState.DELETING, "snapshot_delete_requested", "Snapshot deletion requested.")
        try:
            await self._hostd.remove_snapshot(snapshot)
        except Unreachable as error:  # It is possibly removed. The row stays `Deleting`, and `settle` completes it.
            said = f"The snapshot is not removed yet: {explained(error)}."
            raise ApiError(500, "DOCKER::SNAPSHOT_IMAGE_REMOVE_FAILED", said) from None
        except wire.RemoteError as error:
            before = SnapshotState.READY if row.state is SnapshotState.DELETING else row.state
            if error.code == wire.Code.BUSY:
                await self._move(row, before, row.reason, row.message)
                raise conflict("DELETE_CONFLICT", "A sandbox uses the snapshot.") from None
            said = f"The snapshot could not be removed: {explained(error)}."
            await self._move(row, before, "snapshot_delete_failed", said)
            raise ApiError(500, "DOCKER::SNAPSHOT_IMAGE_REMOVE_FAILED", said) from None
        await self._rows.delete(snapshot)

    async def run(self) -> None:
        """Settle rows until cancelled."""
        while True:
            self._wake.clear()
            pause = SETTLE_SECONDS
            try:
                if not await self.settle():
                    pause = SWEEP_SECONDS
            except (Unreachable, wire.RemoteError, RegistryError) as error:
                _log.debug("snapshots cannot be settled yet: %s", error)
            except Exception as error:  # noqa: BLE001 - closes: without this task rows would stay unsettled
                _log.error("snapshots cannot be settled: %s", type(error).__name__)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            await asyncio.sleep(0)

    async def settle(self) -> bool:
        """Compare rows that no call works on with hostd. Return whether one of them is unsettled still.

        Raises:
            Unreachable, wire.RemoteError: hostd does not answer.
            RegistryError: the rows cannot be read or written.
        """
        rows = [row for row in await self._rows.all() if row.state is not SnapshotState.READY]
        if not rows:
            return False
        held = {item.snapshot: item.bytes for item in await self._hostd.snapshots()}
        unsettled = False
        for row in rows:
            if row.id in self._making or self._locks.is_held(row.id):
                continue
            async with self._locks.hold(row.id):
                unsettled |= await self._settle(row, held)
        return unsettled

    async def _settle(self, row: Snapshot, held: dict[str, int | None]) -> bool:
        if row.id in held and held[row.id] is None:
            return True  # hostd still works on it
        match row.state:
            case SnapshotState.CREATING if row.id in held:
                await self._ready(row.id, held[row.id] or 0)
            case SnapshotState.CREATING:
                await self._fail(row, "snapshot_recovery_missing_image", "The creation was interrupted.")
            case SnapshotState.DELETING:
                return not await self._complete_removal(row)
            case _ if row.id in held:
                await self._hostd.remove_snapshot(row.id)
        return False

    async def _complete_removal(self, row: Snapshot) -> bool:
        try:
            await self._hostd.remove_snapshot(row.id)
        except wire.RemoteError as error:
            if error.code != wire.Code.BUSY:
                raise
            await self._move(row, SnapshotState.READY, "snapshot_recovery_in_use", "A sandbox uses the snapshot.")
        else:
            await self._rows.delete(row.id)
        return True

    async def close(self) -> None:
        """Cancel the creations in progress. Their rows are enough for the next start."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _make(self, row: Snapshot) -> None:
        try:
            try:
                size = await self._hostd.take_snapshot(row.sandbox, row.id)
            except wire.RemoteError as error:
                reason = "snapshot_runtime_timeout" if error.code == wire.Code.TIMEOUT else "snapshot_runtime_failed"
                said = f"The snapshot could not be taken: {explained(error)}."
                await self._journal.note(
                    "lifecycle.snapshot_failed", "info", sandbox=row.sandbox, snapshot=row.id, code=str(error.code)
                )
                await self._fail(row, reason, said)
            else:
                await self._ready(row.id, size)
        except (Unreachable, RegistryError) as error:
            _log.warning("snapshot %s is being settled: %s", row.id, type(error).__name__)
            self._wake.set()

    async def _ready(self, snapshot: str, size: int) -> None:
        now = self._clock()

        def change(current: Snapshot) -> Snapshot:
            if current.state is not SnapshotState.CREATING:
                return current
            return replace(current.moved(SnapshotState.READY, *READY, now), bytes=size)

        await self._rows.update(snapshot, change)

    async def _fail(self, row: Snapshot, reason: str, message: str) -> None:
        await self._move(row, SnapshotState.FAILED, reason, message)

    async def _move(self, row: Snapshot, state: SnapshotState, reason: str, message: str) -> None:
        now = self._clock()
        await self._rows.update(row.id, lambda current: current.moved(state, reason, message, now))
