"""The tables as this release uses them. The migrations in `versions` make them."""

import json
from dataclasses import asdict
from typing import Any

from sqlalchemy import BigInteger, Column, Index, Integer, MetaData, Table, Text
from sqlalchemy.dialects.postgresql import DOUBLE_PRECISION
from sqlalchemy.engine import Dialect
from sqlalchemy.types import REAL, TypeDecorator, TypeEngine

from lifecycle.sandboxes.history import Event, Given
from lifecycle.sandboxes.registry import State
from lifecycle.snapshots.snapshot import SnapshotState

HEAD = "0006"
"""The newest migration."""
VERSION_TABLE = "sallyport_schema"
"""The table in which Alembic keeps the number of the last migration."""
MOMENT: TypeEngine[float] = REAL().with_variant(DOUBLE_PRECISION(), "postgresql")
"""Seconds since the epoch. REAL has eight bytes in SQLite and four in PostgreSQL."""
LONG: TypeEngine[int] = BigInteger().with_variant(Integer(), "sqlite")
"""A number of 64 bits. INTEGER has them in SQLite, whose strict tables know no BIGINT."""

AMOUNT: TypeEngine[int] = Integer().with_variant(BigInteger, "postgresql")
"""Billionths of a processor, or bytes. INTEGER has eight bytes in SQLite and four in PostgreSQL."""


class Json(TypeDecorator[Any]):
    """A JSON value as text, the same in both databases. None is NULL."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class Words(TypeDecorator[tuple[str, ...]]):
    """A tuple of strings as a JSON list."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> str:
        return json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> tuple[str, ...]:
        return tuple(json.loads(value or "[]"))


class Flag(TypeDecorator[bool]):
    """True or false as 1 or 0, because strict tables of SQLite have no other type for it."""

    impl = Integer
    cache_ok = True

    def process_bind_param(self, value: bool | None, dialect: Dialect) -> int:
        return int(bool(value))

    def process_result_value(self, value: int | None, dialect: Dialect) -> bool:
        return bool(value)


class StateName(TypeDecorator[State]):
    """A state by its name."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: State | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> State:
        return State(value or "")


class Events(TypeDecorator[tuple[Event, ...]]):
    """The events of a history as a JSON list of lists."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: tuple[Event, ...] | None, dialect: Dialect) -> str:
        return json.dumps([[item.at, item.state, item.reason, item.message] for item in value or ()])

    def process_result_value(self, value: str | None, dialect: Dialect) -> tuple[Event, ...]:
        return tuple(Event(*item) for item in json.loads(value or "[]"))


class GivenByCaller(TypeDecorator[Given]):
    """What a create call has given, as a JSON object."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Given | None, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(asdict(value))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Given | None:
        if value is None:
            return None
        found = json.loads(value)
        return Given(**{**found, "variables": tuple(found["variables"])})


class SnapshotStateName(TypeDecorator[SnapshotState]):
    """A state of a snapshot by its name."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: SnapshotState | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> SnapshotState:
        return SnapshotState(value or "")


metadata = MetaData()
sandboxes = Table(
    "sandboxes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("state", StateName),
    Column("reason", Text),
    Column("message", Text),
    Column("changed_at", MOMENT),
    Column("created_at", MOMENT),
    Column("expires_at", MOMENT),
    Column("image", Text),
    Column("entrypoint", Words),
    Column("runtime", Text),
    Column("metadata", Json),
    Column("extensions", Json),
    Column("platform", Json),
    Column("policy_name", Text),
    Column("network_policy", Json),
    Column("policy_digest", Text),
    Column("credential_proxy", Flag),
    Column("secure_access", Flag),
    Column("vault", Json),
    Column("lineage", Text),
    Column("renew_seconds", Integer),
    Column("pool", Text),
    Column("idle", Flag),
    Column("owner", Text),
    Column("cpu_nanos", AMOUNT),
    Column("memory_bytes", AMOUNT),
    Column("disk_bytes", AMOUNT),
    Column("key_label", Text, server_default=""),
    Column("snapshot", Text),
    Index("sandboxes_owner", "owner", "created_at"),
    Index("sandboxes_owner_expires", "owner", "expires_at"),
    sqlite_strict=True,
)
"""One row for each sandbox. `owner` is the identity of the server that runs it."""
pools = Table(
    "pools",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("document", Json),
    sqlite_strict=True,
)
"""One row for each pool of a server."""
histories = Table(
    "histories",
    metadata,
    Column("id", Text, primary_key=True),
    Column("created_at", MOMENT),
    Column("image", Text),
    Column("entrypoint", Words),
    Column("runtime", Text),
    Column("policy_name", Text),
    Column("policy_digest", Text),
    Column("given", GivenByCaller),
    Column("state", Text),
    Column("reason", Text),
    Column("events", Events),
    Column("dropped", Integer),
    Column("generation", LONG),
    Column("idle", Flag),
    Column("withheld", Flag),
    Column("ran", Flag),
    Column("oom", Flag),
    Column("exit_code", Integer),
    Column("output", Text),
    Column("output_truncated", Flag),
    Column("removed_at", MOMENT),
    Column("owner", Text),
    Index("histories_owner_removed", "owner", "removed_at"),
    sqlite_strict=True,
)
"""One row for each sandbox, and for each one that was removed within the retention."""
snapshots = Table(
    "snapshots",
    metadata,
    Column("id", Text, primary_key=True),
    Column("sandbox", Text),
    Column("name", Text),
    Column("state", SnapshotStateName),
    Column("reason", Text),
    Column("message", Text),
    Column("changed_at", MOMENT),
    Column("created_at", MOMENT),
    Column("image", Text),
    Column("bytes", BigInteger().with_variant(Integer(), "sqlite")),
    Column("owner", Text),
    Index("snapshots_owner", "owner", "created_at"),
    sqlite_strict=True,
)
"""One row for each snapshot. `owner` is the identity of the server that has it."""
