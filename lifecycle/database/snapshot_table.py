"""The statements on the rows of snapshots of one server. Each call blocks; `lifecycle.snapshots.rows` makes them.

As in `table`, every statement names the owner, and no statement contains text of a caller.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import Row, bindparam, delete, func, insert, select, update

from lifecycle.database.engine import Database
from lifecycle.database.schema import snapshots
from lifecycle.snapshots.snapshot import Snapshot, SnapshotState

_NAMES = tuple(item.name for item in fields(Snapshot))
_COLUMNS = [snapshots.c[name] for name in _NAMES]
_LARGEST = (1 << 63) - 1
_OWN = snapshots.c.owner == bindparam("own")
_ONE = snapshots.c.id == bindparam("snapshot")
_GET = select(*_COLUMNS).where(_OWN, _ONE)
_ALL = select(*_COLUMNS).where(_OWN)
_UPDATE = (
    update(snapshots)
    .where(_OWN, _ONE)
    .values({name: bindparam(f"new_{name}", type_=snapshots.c[name].type) for name in _NAMES})
)
_DELETE = delete(snapshots).where(_OWN, _ONE)


class SnapshotTable:
    """The rows of the server `owner`."""

    def __init__(self, database: Database, owner: str) -> None:
        self._database = database
        self._owner = owner

    def put(self, snapshot: Snapshot) -> None:
        """Insert a row.

        Raises:
            RegistryError: also if there is a row of this id.
        """
        with self._database.statement() as connection:
            connection.execute(insert(snapshots), {**_values(snapshot), "owner": self._owner})

    def get(self, snapshot: str) -> Snapshot | None:
        """Return one row."""
        with self._database.statement() as connection:
            row = connection.execute(_GET, self._own(snapshot=snapshot)).one_or_none()
        return None if row is None else _snapshot(row)

    def update(self, snapshot: str, change: Callable[[Snapshot], Snapshot]) -> Snapshot | None:
        """Read, change and write one row in one transaction. If `change` raises, nothing is written."""
        with self._database.transaction() as connection:
            query = _GET.with_for_update() if self._database.dialect == "postgresql" else _GET
            row = connection.execute(query, self._own(snapshot=snapshot)).one_or_none()
            if row is None:
                return None
            current = _snapshot(row)
            changed = change(current)
            if changed != current:
                new = {f"new_{name}": value for name, value in _values(changed).items()}
                connection.execute(_UPDATE, self._own(snapshot=snapshot, **new))
        return changed

    def delete(self, snapshot: str) -> bool:
        """Remove one row. Return whether it existed."""
        with self._database.statement() as connection:
            return connection.execute(_DELETE, self._own(snapshot=snapshot)).rowcount > 0

    def all(self) -> list[Snapshot]:
        """Return every row."""
        with self._database.statement() as connection:
            return [_snapshot(row) for row in connection.execute(_ALL, self._own())]

    def page(
        self, sandbox: str | None, name: str | None, states: Sequence[str], page: int, size: int
    ) -> tuple[list[Snapshot], int]:
        """Return one page, newest first, and the number of all matches."""
        if any("\0" in (word or "") for word in (sandbox, name)):
            return [], 0  # No row has such a value, and PostgreSQL refuses such a parameter.
        matches = [_OWN]
        if sandbox is not None:
            matches.append(snapshots.c.sandbox == sandbox)
        if name is not None:
            matches.append(snapshots.c.name == name)
        if states:
            matches.append(snapshots.c.state.in_([state for state in SnapshotState if state in states]))
        one = select(*_COLUMNS).where(*matches).order_by(snapshots.c.created_at.desc(), snapshots.c.id)
        one = one.limit(size).offset(min((page - 1) * size, _LARGEST))
        with self._database.statement() as connection:
            query = select(func.count()).select_from(snapshots).where(*matches)
            total = int(connection.execute(query, self._own()).scalar_one())
            return [_snapshot(row) for row in connection.execute(one, self._own())], total

    def _own(self, **parameters: Any) -> dict[str, Any]:
        return {"own": self._owner, **parameters}


def _values(snapshot: Snapshot) -> dict[str, Any]:
    return {name: getattr(snapshot, name) for name in _NAMES}


def _snapshot(row: Row[Any]) -> Snapshot:
    return Snapshot(*tuple(row))
