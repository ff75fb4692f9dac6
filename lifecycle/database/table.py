"""The statements on the rows of one server. Each call blocks; `lifecycle.sandboxes.registry` makes them in threads.

- Every statement names the owner: a server neither sees nor changes the rows of another one in the same database.
- No statement contains text of a caller, only parameters.
- The number of statements of a list does not depend on the number of sandboxes.
- A row and the event of its change are written in one transaction.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import ColumnElement, Row, and_, bindparam, delete, func, not_, or_, select, update
from sqlalchemy import cast as sql_cast
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from lifecycle.api.errors import busy
from lifecycle.database.engine import Database, SQLite
from lifecycle.database.histories import Histories
from lifecycle.database.migrations import migrate
from lifecycle.database.resident import Resident
from lifecycle.database.schema import pools, sandboxes
from lifecycle.sandboxes import ceilings
from lifecycle.sandboxes.ceilings import Ceilings, Held
from lifecycle.sandboxes.history import Given, History, Removal
from lifecycle.sandboxes.pool import Capacity, SandboxPool
from lifecycle.sandboxes.registry import RegistryError, Sandbox, State

_NAMES = tuple(item.name for item in fields(Sandbox))
_COLUMNS = [sandboxes.c[name] for name in _NAMES]
_MOST_EXPIRED = 256
_LARGEST = (1 << 63) - 1

_OWN = sandboxes.c.owner == bindparam("own")
_GET = select(*_COLUMNS).where(_OWN, sandboxes.c.id == bindparam("sandbox"))
_ALL = select(*_COLUMNS).where(_OWN)
_EXPIRED = (
    _ALL.where(or_(sandboxes.c.expires_at <= bindparam("now"), sandboxes.c.state == State.STOPPING))
    .order_by(sandboxes.c.expires_at)
    .limit(_MOST_EXPIRED)
)
_NEXT = select(func.min(sandboxes.c.expires_at)).where(_OWN, sandboxes.c.expires_at > bindparam("after"))
_ADMISSIONS = 0x5A11_9028
"""The advisory lock of PostgreSQL that makes the admissions of all servers serial."""
_HOLDS = not_(and_(sandboxes.c.state == State.FAILED, sandboxes.c.reason.in_(ceilings.GONE)))
_SHARES = select(
    func.count(),
    *(func.coalesce(func.sum(sandboxes.c[name]), 0) for name in ("cpu_nanos", "memory_bytes", "disk_bytes")),
).where(_HOLDS)
_SHARES_OF_KEY = _SHARES.where(
    sandboxes.c.key_label == bindparam("label"),
    sandboxes.c.idle == False,  # noqa: E712 - an expression of SQL
)
_COUNT = select(func.count()).select_from(sandboxes).where(_OWN)
_UPDATE = (
    update(sandboxes)
    .where(_OWN, sandboxes.c.id == bindparam("sandbox"))
    .values({name: bindparam(f"new_{name}", type_=sandboxes.c[name].type) for name in _NAMES})
)
_IDLE = (
    select(sandboxes.c.id)
    .where(_OWN, sandboxes.c.pool == bindparam("pool"), sandboxes.c.idle == bindparam("idle"))
    .where(sandboxes.c.state == State.RUNNING)
    .order_by(sandboxes.c.created_at)
    .limit(bindparam("number"))
)
_POOLS = select(pools.c.document).where(pools.c.owner == bindparam("own"))
_POOL = _POOLS.where(pools.c.name == bindparam("pool"))
_DELETE_POOL = delete(pools).where(pools.c.owner == bindparam("own"), pools.c.name == bindparam("pool"))
_RESIZE_POOL = (
    update(pools)
    .where(pools.c.owner == bindparam("own"), pools.c.name == bindparam("pool"))
    .values(document=bindparam("new_document", type_=pools.c.document.type))
)
_DELETE = delete(sandboxes).where(_OWN, sandboxes.c.id == bindparam("sandbox"))
_SHIFT = (
    update(sandboxes)
    .where(_OWN)
    .values(
        expires_at=sandboxes.c.expires_at + bindparam("seconds"),
        changed_at=sandboxes.c.changed_at + bindparam("seconds"),
    )
)


class SandboxTable:
    """The rows of the server `owner`, and their histories.

    Args:
        now: the time of an event for which the row has none.
        keeps: whether the history of a removed sandbox stays.
    """

    def __init__(
        self, database: Database, owner: str, now: Callable[[], float] = time.time, *, keeps: bool = True
    ) -> None:
        self.database = self._database = database
        self.owner = self._owner = owner
        self._now = now
        self._keeps = keeps
        self._histories = Histories(owner)
        self._put = _put(database.dialect)
        self._add_pool = _add_pool(database.dialect)
        self._resident = Resident(self._all, database.version) if isinstance(database, SQLite) else None

    @property
    def readers(self) -> int:
        """The number of threads that may read beside the one that writes."""
        return self._database.connections - 1

    @property
    def patience(self) -> float | None:
        """The seconds after which a call has failed; None if the database itself bounds each call."""
        return self._database.patience

    def interrupt(self) -> None:
        """End the calls that exceed the bound. Callable from any thread."""
        self._database.interrupt()

    def open(self) -> None:
        """Open the database and migrate it.

        Raises:
            SchemaError: this release cannot use its schema. It was not changed.
            RegistryError, OSError: it cannot be used.
        """
        try:
            migrate(self._database, self._owner)
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def get(self, sandbox: str) -> Sandbox | None:
        """Return one row."""
        if self._resident is not None:
            return self._resident.rows().get(sandbox)
        with self._database.statement() as connection:
            row = connection.execute(_GET, self._own(sandbox=sandbox)).one_or_none()
        return None if row is None else _sandbox(row)

    def put(self, sandbox: Sandbox, given: Given | None = None) -> None:
        """Insert a row or replace it. `given` is for the history of a new one.

        Raises:
            RegistryError: also if the id is that of another server's row.
        """
        with self._changed() as connection:
            written = connection.execute(self._put, {**_values(sandbox), "owner": self._owner}).rowcount
            if written != 1:
                raise RegistryError("the state database has a sandbox of this id that belongs to another server")
            self._histories.follow(connection, sandbox, given, self._now())
        if self._resident is not None:
            self._resident.set(sandbox)

    def admit(self, sandbox: Sandbox, most: int, limits: Ceilings, given: Given | None = None) -> None:
        """Insert a row, if this server then has at most `most`, and if no ceiling is exceeded.

        The ceilings count the rows of all servers of the database. `given` is for the history of the sandbox.

        Raises:
            ApiError: the row was not inserted.
            RegistryError: also if the id is that of another row.
        """
        with self._changed() as connection:
            self._lock_admissions(connection, limits)
            if _number(connection, _COUNT, self._own()) >= most:
                raise busy("Too many sandboxes at once on this server.")
            if limits.total.limits:
                ceilings.check(_held(sandbox), _share(connection, _SHARES, {}), limits.total, "all sandboxes")
            if not sandbox.idle:
                _check_key(connection, sandbox, limits)
            values = {**_values(sandbox), "owner": self._owner}
            if connection.execute(self._put, values).rowcount != 1:
                raise RegistryError("the state database has a sandbox of this id that belongs to another server")
            self._histories.follow(connection, sandbox, given, self._now())
        if self._resident is not None:
            self._resident.set(sandbox)

    def _lock_admissions(self, connection: Connection, limits: Ceilings) -> None:
        """Make this the only admission until the end of the transaction. An SQLite transaction is that already."""
        if limits.limits and self._database.dialect == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(_ADMISSIONS)))

    def update(
        self, sandbox: str, change: Callable[[Sandbox], Sandbox], limits: Ceilings | None = None
    ) -> Sandbox | None:
        """Read, change and write one row in one transaction. If `change` raises, nothing is written.

        Args:
            limits: for the sandboxes of the row's API key after the change, which the row did not have before it.
        """
        with self._changed() as connection:
            query = _GET.with_for_update() if self._database.dialect == "postgresql" else _GET
            row = connection.execute(query, self._own(sandbox=sandbox)).one_or_none()
            if row is None:
                return None
            current = _sandbox(row)
            changed = change(current)
            if limits is not None:
                self._lock_admissions(connection, limits)
                _check_key(connection, changed, limits)
            if changed != current:
                new = {f"new_{name}": value for name, value in _values(changed).items()}
                connection.execute(_UPDATE, self._own(sandbox=sandbox, **new))
            if _told(changed) != _told(current):
                self._histories.follow(connection, changed, None, self._now())
        if self._resident is not None and changed != current:
            self._resident.set(changed)
        return changed

    def delete(self, sandbox: str, removal: Removal | None = None) -> bool:
        """Remove one row. Return whether it existed. Its history ends with `removal`, or is removed too."""
        with self._changed() as connection:
            existed: bool = connection.execute(_DELETE, self._own(sandbox=sandbox)).rowcount > 0
            if existed and removal is not None and self._keeps:
                self._histories.end(connection, sandbox, removal)
            elif existed:
                self._histories.delete(connection, sandbox)
        if self._resident is not None:
            self._resident.remove(sandbox)
        return existed

    def shift(self, seconds: float) -> None:
        """Move the expiry and the last change of every row, and the time of every removal."""
        with self._changed() as connection:
            connection.execute(_SHIFT, self._own(seconds=seconds))
            self._histories.shift(connection, seconds)
        if self._resident is not None:
            self._resident.forget()

    def history(self, sandbox: str) -> History | None:
        """Return one history, also of a removed sandbox."""
        with self._database.statement() as connection:
            return self._histories.get(connection, sandbox)

    def record(self, sandbox: str, change: Callable[[History], History]) -> None:
        """Change one history, if there is one."""
        with self._database.transaction() as connection:
            self._histories.change(connection, sandbox, change)

    def purge(self, before: float) -> None:
        """Remove the histories of sandboxes that were removed by `before`, and the oldest of very many."""
        with self._database.transaction() as connection:
            self._histories.purge(connection, before)

    def all(self) -> list[Sandbox]:
        """Return every row."""
        return self._all() if self._resident is None else list(self._resident.rows().values())

    def _all(self) -> list[Sandbox]:
        with self._database.statement() as connection:
            return [_sandbox(row) for row in connection.execute(_ALL, self._own())]

    @contextlib.contextmanager
    def _changed(self) -> Iterator[Connection]:
        """Lend a connection for a transaction that changes rows. If it fails, the rows in memory are read again.

        Not after a refusal of the block itself: the transaction has changed nothing then.
        """
        try:
            with self._database.transaction() as connection:
                yield connection
        except RegistryError:
            if self._resident is not None:
                self._resident.forget()
            raise

    def expired(self, now: float) -> list[Sandbox]:
        """Return expired rows, and those of a removal that has begun."""
        with self._database.statement() as connection:
            return [_sandbox(row) for row in connection.execute(_EXPIRED, self._own(now=now))]

    def next_expiry(self, after: float) -> float | None:
        """Return the earliest expiry later than `after`."""
        with self._database.statement() as connection:
            found: float | None = connection.execute(_NEXT, self._own(after=after)).scalar_one()
        return found

    def page(
        self, states: Sequence[str], metadata: Mapping[str, str], page: int, size: int
    ) -> tuple[list[Sandbox], int]:
        """Return one page, newest first, and the number of all matches."""
        if self._resident is not None:
            return self._resident.page(states, metadata, page, size)
        matches = [_OWN, sandboxes.c.idle == False]  # noqa: E712 - an expression of SQL
        if states:
            wanted = {state.lower() for state in states}
            matches.append(sandboxes.c.state.in_([state for state in State if state.lower() in wanted]))
        if any("\0" in word for item in metadata.items() for word in item):
            return [], 0  # No row has such a label, and PostgreSQL refuses such a parameter.
        matches += [_has_label(key, value) for key, value in metadata.items()]
        one = select(*_COLUMNS).where(*matches).order_by(sandboxes.c.created_at.desc(), sandboxes.c.id)
        one = one.limit(size).offset(min((page - 1) * size, _LARGEST))
        with self._database.statement() as connection:
            total = _number(connection, select(func.count()).select_from(sandboxes).where(*matches), self._own())
            return [_sandbox(row) for row in connection.execute(one, self._own())], total

    def count(self) -> int:
        """Return the number of rows."""
        if self._resident is not None:
            return len(self._resident.rows())
        with self._database.statement() as connection:
            return _number(connection, _COUNT, self._own())

    def idle(self, pool: str, number: int) -> list[str]:
        """Return the ids of running idle members of a pool, the oldest first."""
        with self._database.statement() as connection:
            rows = connection.execute(_IDLE, self._own(pool=pool, idle=True, number=number))
            return [str(row[0]) for row in rows]

    def pools(self) -> list[SandboxPool]:
        """Return every pool, by name."""
        with self._database.statement() as connection:
            rows = connection.execute(_POOLS.order_by(pools.c.name), self._own())
            return [SandboxPool.from_json(row[0]) for row in rows]

    def pool(self, name: str) -> SandboxPool | None:
        """Return one pool."""
        with self._database.statement() as connection:
            return _pool(connection, self._own(pool=name))

    def add_pool(self, pool: SandboxPool) -> bool:
        """Insert a pool. Return whether there was none of its name."""
        values = {"owner": self._owner, "name": pool.name, "document": pool.to_json()}
        with self._database.statement() as connection:
            return connection.execute(self._add_pool, values).rowcount > 0

    def resize_pool(self, name: str, capacity: Capacity) -> SandboxPool | None:
        """Read, change and write one pool in one transaction."""
        with self._database.transaction() as connection:
            found = _pool(connection, self._own(pool=name))
            if found is None:
                return None
            found = found.resized(capacity)
            connection.execute(_RESIZE_POOL, self._own(pool=name, new_document=found.to_json()))
        return found

    def delete_pool(self, name: str) -> bool:
        """Remove one pool. Return whether it existed."""
        with self._database.statement() as connection:
            return connection.execute(_DELETE_POOL, self._own(pool=name)).rowcount > 0

    def _own(self, **parameters: Any) -> dict[str, Any]:
        return {"own": self._owner, **parameters}


def _put(dialect: str) -> Any:
    insert = postgresql.insert(sandboxes) if dialect == "postgresql" else sqlite.insert(sandboxes)
    new = {name: insert.excluded[name] for name in _NAMES if name != "id"}
    own = sandboxes.c.owner == insert.excluded.owner
    statement = insert.on_conflict_do_update(index_elements=[sandboxes.c.id], set_=new, where=own)
    return statement.execution_options(preserve_rowcount=True)


def _add_pool(dialect: str) -> Any:
    insert = postgresql.insert(pools) if dialect == "postgresql" else sqlite.insert(pools)
    return insert.on_conflict_do_nothing().execution_options(preserve_rowcount=True)


def _pool(connection: Connection, parameters: dict[str, Any]) -> SandboxPool | None:
    row = connection.execute(_POOL, parameters).one_or_none()
    return None if row is None else SandboxPool.from_json(row[0])


def _has_label(key: str, value: str) -> ColumnElement[bool]:
    document = sql_cast(sandboxes.c["metadata"], postgresql.JSONB)
    return document.op("@>")(sql_cast(bindparam(None, {key: value}, postgresql.JSONB), postgresql.JSONB))


def _told(sandbox: Sandbox) -> tuple[str, ...]:
    """Return what a history has of a row."""
    return sandbox.state, sandbox.reason, sandbox.policy_digest, str(sandbox.idle)


def _values(sandbox: Sandbox) -> dict[str, Any]:
    return {name: getattr(sandbox, name) for name in _NAMES}


def _sandbox(row: Row[Any]) -> Sandbox:
    return Sandbox(*tuple(row))


def _held(sandbox: Sandbox) -> Held:
    return Held(1, sandbox.cpu_nanos or 0, sandbox.memory_bytes or 0, sandbox.disk_bytes or 0)


def _check_key(connection: Connection, sandbox: Sandbox, limits: Ceilings) -> None:
    """Check the ceilings of the sandbox's API key. The sandbox is not one of its sandboxes yet."""
    if limits.per_key.limits:
        used = _share(connection, _SHARES_OF_KEY, {"label": sandbox.key_label})
        ceilings.check(_held(sandbox), used, limits.per_key, "the sandboxes of this API key")


def _share(connection: Connection, query: Any, parameters: dict[str, Any]) -> Held:
    return Held(*(int(value) for value in connection.execute(query, parameters).one()))


def _number(connection: Connection, query: Any, parameters: dict[str, Any]) -> int:
    return int(connection.execute(query, parameters).scalar_one())
