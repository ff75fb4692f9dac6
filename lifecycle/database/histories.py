"""The statements on the histories of one server's sandboxes. `SandboxTable` makes them in its transactions.

Every statement names the owner, as those on the rows do.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from sqlalchemy import bindparam, delete, insert, or_, select, update
from sqlalchemy.engine import Connection

from lifecycle.database.schema import histories
from lifecycle.sandboxes.history import Given, History, Removal
from lifecycle.sandboxes.registry import Sandbox

MOST_REMOVED = 5000
"""The histories of removed sandboxes that are kept at most: the last ones."""
_NAMES = tuple(item.name for item in fields(History))
_OWN = histories.c.owner == bindparam("own")
_ONE = (_OWN, histories.c.id == bindparam("sandbox"))
_GET = select(*(histories.c[name] for name in _NAMES)).where(*_ONE)
_ADD = insert(histories)
_UPDATE = (
    update(histories)
    .where(*_ONE)
    .values({name: bindparam(f"new_{name}", type_=histories.c[name].type) for name in _NAMES})
)
_DELETE = delete(histories).where(*_ONE)
_OLDEST = (
    select(histories.c.removed_at)
    .where(_OWN, histories.c.removed_at.is_not(None))
    .order_by(histories.c.removed_at.desc())
    .limit(1)
    .offset(MOST_REMOVED)
)
_PURGE = delete(histories).where(
    _OWN, or_(histories.c.removed_at <= bindparam("before"), histories.c.removed_at <= bindparam("oldest"))
)
_SHIFT = update(histories).where(_OWN).values(removed_at=histories.c.removed_at + bindparam("seconds"))


class Histories:
    """The histories of the sandboxes of server `owner`. Each call is a part of the caller's transaction."""

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def get(self, connection: Connection, sandbox: str) -> History | None:
        """Return one history."""
        row = connection.execute(_GET, self._own(sandbox=sandbox)).one_or_none()
        return None if row is None else History(*tuple(row))

    def follow(self, connection: Connection, row: Sandbox, given: Given | None, now: float) -> None:
        """Add what a written row has that its history has not."""
        current = self.get(connection, row.id)
        if current is None:
            begun = {name: getattr(History.begun(row, given), name) for name in _NAMES}
            connection.execute(_ADD, {**begun, "owner": self._owner})
        else:
            self._write(connection, current, current.followed(row, now))

    def change(self, connection: Connection, sandbox: str, change: Callable[[History], History]) -> None:
        """Change one history, if there is one."""
        current = self.get(connection, sandbox)
        if current is not None:
            self._write(connection, current, change(current))

    def _write(self, connection: Connection, current: History, changed: History) -> None:
        if changed != current:
            new = {f"new_{name}": getattr(changed, name) for name in _NAMES}
            connection.execute(_UPDATE, self._own(sandbox=current.id, **new))

    def end(self, connection: Connection, sandbox: str, removal: Removal) -> None:
        """End one history. That of an idle member of a pool is removed."""
        current = self.get(connection, sandbox)
        if current is not None and current.idle:
            self.delete(connection, sandbox)
        elif current is not None:
            self._write(connection, current, current.ended(removal))

    def delete(self, connection: Connection, sandbox: str) -> None:
        """Remove one history."""
        connection.execute(_DELETE, self._own(sandbox=sandbox))

    def purge(self, connection: Connection, before: float) -> None:
        """Remove those of sandboxes that were removed by `before`, and the oldest of very many."""
        oldest = connection.execute(_OLDEST, self._own()).scalar_one_or_none()
        connection.execute(_PURGE, self._own(before=before, oldest=before if oldest is None else oldest))

    def shift(self, connection: Connection, seconds: float) -> None:
        """Move the time of each removal."""
        connection.execute(_SHIFT, self._own(seconds=seconds))

    def _own(self, **parameters: Any) -> dict[str, Any]:
        return {"own": self._owner, **parameters}
