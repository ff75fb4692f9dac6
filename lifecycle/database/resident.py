"""The rows of one server in memory, because most calls only read: `get`, `page`, `count` and the observer.

- They are those of the database: a write changes them after its commit. After a write that failed they are read again,
  and after a commit of another program too.
- Only for SQLite: it reports such a commit at no cost. A row of PostgreSQL is read for each call.

No call is made while another one runs; the registry sees to that.
"""

from collections.abc import Callable, Mapping, Sequence

from lifecycle.sandboxes.registry import Sandbox


class Resident:
    """The rows.

    Args:
        load: reads all rows.
        version: returns a number that changes when another program has changed the database.
    """

    def __init__(self, load: Callable[[], list[Sandbox]], version: Callable[[], int]) -> None:
        self._load = load
        self._version = version
        self._rows: dict[str, Sandbox] = {}
        self._order: list[str] | None = None
        """The ids of the rows that are listed, the newest first; None if they have to be sorted."""
        self._seen: int | None = None
        """The version of the rows; None if they have to be read."""

    def rows(self) -> Mapping[str, Sandbox]:
        """Return all rows by id.

        Raises:
            RegistryError: they cannot be read.
        """
        version = self._version()
        if version != self._seen:
            self._rows, self._order = {row.id: row for row in self._load()}, None
            self._seen = version
        return self._rows

    def forget(self) -> None:
        """Read the rows again at the next call."""
        self._seen = None

    def set(self, row: Sandbox) -> None:
        """Add or replace a row that was written."""
        former = self._rows.get(row.id)
        if former is None or (former.created_at, former.idle) != (row.created_at, row.idle):
            self._order = None
        self._rows[row.id] = row

    def remove(self, sandbox: str) -> None:
        """Remove a row that was deleted."""
        if self._rows.pop(sandbox, None) is not None:
            self._order = None

    def page(
        self, states: Sequence[str], metadata: Mapping[str, str], page: int, size: int
    ) -> tuple[list[Sandbox], int]:
        """Return one page without idle members of pools, newest first, and the number of all matches."""
        rows = self.rows()
        if self._order is None:
            shown = (row for row in rows.values() if not row.idle)
            self._order = [row.id for row in sorted(shown, key=lambda row: (-row.created_at, row.id))]
        first = (page - 1) * size
        if not states and not metadata:
            return [rows[name] for name in self._order[first : first + size]], len(self._order)
        wanted, labels = {state.lower() for state in states}, metadata.items()
        found = [
            row
            for row in map(rows.__getitem__, self._order)
            if (not wanted or row.state.lower() in wanted) and labels <= row.metadata.items()
        ]
        return found[first : first + size], len(found)
