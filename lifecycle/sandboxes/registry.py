"""The state database: one row per sandbox, in SQLite.

- One connection serves one call at a time, in its own thread. So writes are serial, a read-modify-write (`update`) is
  atomic, and no call blocks the event loop. Only `get`, which every request uses, reads in the caller's thread while no
  call is in progress. It sees all committed rows, also those of other writers, and a WAL reader does not wait for a
  writer.
- WAL with `synchronous=FULL`: an answered write survives a crash of the process and of the host.
- Filters and paging are SQL. The number of statements of a list does not depend on the number of sandboxes.
- The database contains no secret, no token and no environment.
"""

import asyncio
import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from lifecycle.sandboxes.schema import migrate

RegistryError = sqlite3.Error
"""The database could not be read or written. It is unknown whether a write was done."""


class State(StrEnum):
    """The states of the lifecycle API."""

    PENDING = "Pending"
    RUNNING = "Running"
    PAUSING = "Pausing"
    PAUSED = "Paused"
    RESUMING = "Resuming"
    STOPPING = "Stopping"
    TERMINATED = "Terminated"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The row of a sandbox. Times are seconds since the epoch. JSON values are plain lists and dicts."""

    id: str
    state: State
    reason: str
    message: str
    changed_at: float
    created_at: float
    expires_at: float | None
    image: str
    entrypoint: tuple[str, ...]
    runtime: str
    metadata: dict[str, str] = field(default_factory=dict)
    extensions: dict[str, str] = field(default_factory=dict)
    platform: dict[str, str] | None = None
    policy_name: str | None = None
    network_policy: dict[str, Any] | None = None
    """The policy that the caller reads back at `/policy`: `{"egress": [...], "defaultAction": ...}`; None without a
    policy.
    """
    policy_digest: str = ""
    credential_proxy: bool = False
    secure_access: bool = False
    vault: dict[str, Any] | None = None
    """The credential vault without its values; None if there is no vault."""
    lineage: str = ""
    renew_seconds: int | None = None
    """Seconds by which an access moves the expiry; None if an access does not move it."""

    def moved(self, state: State, reason: str, message: str, now: float) -> "Sandbox":
        """Return the same sandbox in another state."""
        return replace(self, state=state, reason=reason, message=message, changed_at=now)


_JSON = frozenset({"entrypoint", "metadata", "extensions", "platform", "network_policy", "vault"})
_COLUMNS = tuple(item.name for item in fields(Sandbox))
_PUT = f"INSERT OR REPLACE INTO sandboxes ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"  # noqa: S608
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM sandboxes"  # noqa: S608 - names of our own fields


class Registry:
    """The database of one server."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="registry")
        self._database: sqlite3.Connection | None = None
        self._calls: list[Future[Any]] = []
        """Calls that the thread has and that can be in progress."""

    async def open(self) -> None:
        """Open or create the database.

        Raises:
            SchemaError: a newer release created it, or its table does not match its schema.
            sqlite3.Error, OSError: it cannot be used.
        """
        await self._run(self._open)

    async def close(self) -> None:
        """Close the database after the pending calls."""
        await self._run(self._close)
        self._thread.shutdown()

    async def put(self, sandbox: Sandbox) -> None:
        """Insert a sandbox or replace its whole row."""
        await self._run(lambda: self._put(sandbox))

    async def get(self, sandbox: str) -> Sandbox | None:
        """Return the row of one sandbox, or None."""
        if all(call.done() for call in self._calls):
            return self._get(sandbox)
        return await self._run(lambda: self._get(sandbox))

    async def update(self, sandbox: str, change: Callable[[Sandbox], Sandbox]) -> Sandbox | None:
        """Change one row atomically. Return the new row, or None if there is no such row.

        `change` runs in the database's thread. If it raises, the caller gets the exception and nothing is written.
        """

        def run() -> Sandbox | None:
            current = self._get(sandbox)
            if current is None:
                return None
            changed = change(current)
            if changed != current:
                self._put(changed)
            return changed

        return await self._run(run)

    async def delete(self, sandbox: str) -> bool:
        """Remove a row. Return whether it existed."""

        def run() -> bool:
            with self._db as database:
                return database.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox,)).rowcount > 0

        return await self._run(run)

    async def shift(self, seconds: float) -> None:
        """Move the expiry and the last change of every sandbox after the clock was set."""

        def run() -> None:
            with self._db as database:
                database.execute(
                    "UPDATE sandboxes SET expires_at = expires_at + ?, changed_at = changed_at + ?", (seconds, seconds)
                )

        await self._run(run)

    async def all(self) -> list[Sandbox]:
        """Return every sandbox, for the comparison with hostd."""
        return await self._run(lambda: [_row(row) for row in self._db.execute(_SELECT)])

    async def expired(self, now: float) -> list[Sandbox]:
        """Return the expired sandboxes, and those whose removal has begun."""
        return await self._run(
            lambda: [
                _row(row)
                for row in self._db.execute(
                    f"{_SELECT} WHERE expires_at <= ? OR state = ? ORDER BY expires_at LIMIT 256",
                    (now, State.STOPPING),
                )
            ]
        )

    async def next_expiry(self, after: float) -> float | None:
        """Return the earliest expiry later than `after`."""

        def run() -> float | None:
            row = self._db.execute("SELECT min(expires_at) FROM sandboxes WHERE expires_at > ?", (after,)).fetchone()
            return None if row is None else row[0]

        return await self._run(run)

    async def page(
        self, states: Sequence[str], metadata: dict[str, str], page: int, size: int
    ) -> tuple[list[Sandbox], int]:
        """Return one page, newest first, and the number of all matches."""
        where: list[str] = ["TRUE"]
        values: list[str] = []
        if states:
            where.append(f"lower(state) IN ({', '.join('?' * len(states))})")
            values += [state.lower() for state in states]
        for key, value in metadata.items():
            where.append("EXISTS (SELECT 1 FROM json_each(sandboxes.metadata) AS m WHERE m.key = ? AND m.value = ?)")
            values += [key, value]
        condition = " AND ".join(where)

        def run() -> tuple[list[Sandbox], int]:
            database = self._db
            total = database.execute(f"SELECT count(*) FROM sandboxes WHERE {condition}", values).fetchone()[0]  # noqa: S608
            rows = database.execute(
                f"{_SELECT} WHERE {condition} ORDER BY created_at DESC, id LIMIT ? OFFSET ?",
                [*values, size, min((page - 1) * size, 1 << 62)],
            )
            return [_row(row) for row in rows], total

        return await self._run(run)

    async def count(self) -> int:
        """Return the number of rows."""
        return await self._run(lambda: int(self._db.execute("SELECT count(*) FROM sandboxes").fetchone()[0]))

    async def _run[T](self, work: Callable[[], T]) -> T:
        call = self._thread.submit(work)
        self._calls = [*(earlier for earlier in self._calls if not earlier.done()), call]
        return await asyncio.wrap_future(call)

    @property
    def _db(self) -> sqlite3.Connection:
        if self._database is None:
            raise sqlite3.ProgrammingError("the registry is not open")
        return self._database

    def _open(self) -> None:
        database = sqlite3.connect(self._path, timeout=5, check_same_thread=False)
        try:
            os.chmod(self._path, 0o600)
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            migrate(database, self._path, _COLUMNS)
        except BaseException:
            database.close()
            raise
        self._database = database

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _get(self, sandbox: str) -> Sandbox | None:
        row = self._db.execute(f"{_SELECT} WHERE id = ?", (sandbox,)).fetchone()
        return None if row is None else _row(row)

    def _put(self, sandbox: Sandbox) -> None:
        values = [
            json.dumps(value) if name in _JSON and value is not None else value
            for name in _COLUMNS
            for value in (getattr(sandbox, name),)
        ]
        with self._db as database:
            database.execute(_PUT, values)


def _row(row: Sequence[Any]) -> Sandbox:
    values = dict(zip(_COLUMNS, row, strict=True))
    for name in _JSON:
        if values[name] is not None:
            values[name] = json.loads(values[name])
    values["state"] = State(values["state"])
    values["entrypoint"] = tuple(values["entrypoint"])
    values["credential_proxy"] = bool(values["credential_proxy"])
    values["secure_access"] = bool(values["secure_access"])
    return Sandbox(**values)
