"""The rows of snapshots, in the state database. Each call is made in the registry's thread, in the order of all."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lifecycle.sandboxes.registry import Registry
from lifecycle.snapshots.snapshot import Snapshot

if TYPE_CHECKING:
    from lifecycle.database.snapshot_table import SnapshotTable


class SnapshotRows:
    """The rows of one server."""

    def __init__(self, registry: Registry, table: "SnapshotTable") -> None:
        self._registry = registry
        self._table = table

    async def put(self, snapshot: Snapshot) -> None:
        """Insert the row of a new snapshot."""
        await self._registry.call(lambda: self._table.put(snapshot))

    async def get(self, snapshot: str) -> Snapshot | None:
        """Return the row of one snapshot, or None."""
        return await self._registry.call(lambda: self._table.get(snapshot))

    async def update(self, snapshot: str, change: Callable[[Snapshot], Snapshot]) -> Snapshot | None:
        """Change one row atomically. Return the new row, or None if there is no such row."""
        return await self._registry.call(lambda: self._table.update(snapshot, change))

    async def delete(self, snapshot: str) -> bool:
        """Remove a row. Return whether it existed."""
        return await self._registry.call(lambda: self._table.delete(snapshot))

    async def all(self) -> list[Snapshot]:
        """Return every snapshot."""
        return await self._registry.call(self._table.all)

    async def page(
        self, sandbox: str | None, name: str | None, states: Sequence[str], page: int, size: int
    ) -> tuple[list[Snapshot], int]:
        """Return one page, newest first, and the number of all matches."""
        return await self._registry.call(lambda: self._table.page(sandbox, name, states, page, size))
