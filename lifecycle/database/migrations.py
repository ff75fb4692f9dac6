"""The migrations of the state database: at the start, one server at a time, completely or not at all.

- The migrations are Alembic's (`versions`). A released one is never edited. A change of the schema is a new one.
- All missing migrations are one transaction, in which the database is locked: SQLite by `BEGIN IMMEDIATE`, PostgreSQL
  by an advisory lock. Servers that start together wait for the first one.
- A copy of an SQLite file is kept before it.
- A database of a newer release, or whose table does not match, is refused and left unchanged. It is never marked as
  current.
- Alembic is imported only if there is something to migrate.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Connection, func, inspect, select, text

from lifecycle.database.engine import Database, SQLite
from lifecycle.database.schema import HEAD, VERSION_TABLE, metadata, sandboxes
from lifecycle.sandboxes.registry import RegistryError, SchemaError

FIRST = "0001"
"""The schema of the release before Alembic. SQLite has its number as `user_version`."""
_SCRIPTS = Path(__file__).parent
_LOCK = 0x5A11_9027
_LOCK_SECONDS = 60
_MIGRATION_SECONDS = 600
_REMEDY = "Put back a copy of the database, or move it away to start without sandboxes"


def migrate(database: Database, owner: str, *, scripts: Path = _SCRIPTS, head: str = HEAD) -> None:
    """Migrate a database to the newest schema.

    Args:
        owner: the server to which rows without an owner belong.
        scripts: the directory with `env.py` and `versions`.
        head: the newest migration in it.

    Raises:
        SchemaError: a newer release migrated it, or its table does not match its schema.
        RegistryError, OSError: it could not be read, copied or changed. It is as it was.
    """
    with database.statement() as connection:
        version = _version(connection, database)
        _check_known(version, database, scripts, head)
        current = version == head
        if current:
            _check_columns(connection, database)
    if current:
        return
    if version is not None and isinstance(database, SQLite):
        database.copy(database.path.with_name(f"{database.path.name}.schema-{int(version)}"))
    with _in_order(database), database.transaction() as connection:
        _lock(connection)
        version = _version(connection, database)  # Another server may have migrated it in the meantime.
        _check_known(version, database, scripts, head)
        if version != head:
            _upgrade(connection, owner, version, scripts)
        _check_columns(connection, database)


def _version(connection: Connection, database: Database) -> str | None:
    """Return the last migration of a database; None for an empty one."""
    tables = set(inspect(connection).get_table_names())
    if VERSION_TABLE in tables:
        found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalars().all()  # noqa: S608
        if len(found) == 1:
            return str(found[0])
        raise SchemaError(f"{database.place}: {VERSION_TABLE} has {len(found)} rows and not one. {_REMEDY}")
    former = 0
    if connection.dialect.name == "sqlite":
        former = int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
    if former > int(FIRST):
        return f"{former:04}"
    if sandboxes.name not in tables:
        return None
    if connection.dialect.name != "sqlite":
        raise SchemaError(f"{database.place}: a table {sandboxes.name} of another program is there. {_REMEDY}")
    return FIRST


def _check_known(version: str | None, database: Database, scripts: Path, head: str) -> None:
    known = {match[1] for path in (scripts / "versions").glob("v*.py") if (match := re.match(r"v(\d{4})_", path.name))}
    if version is not None and version not in known:
        kept = (
            f"the copy {database.place}.schema-{int(head)} that it kept" if isinstance(database, SQLite) else "a copy"
        )
        raise SchemaError(
            f"{database.place} has schema {version}, which a newer release made; this release knows schema {head}. "
            f"Start that release, or put back {kept}"
        )


def _check_columns(connection: Connection, database: Database) -> None:
    names = set(inspect(connection).get_table_names())
    for table in metadata.sorted_tables:
        there = set[str]()
        if table.name in names:
            there = set(connection.execute(text(f"SELECT * FROM {table.name} LIMIT 0")).keys())  # noqa: S608
        if wrong := there ^ set(table.c.keys()):
            raise SchemaError(
                f"{database.place}: table {table.name} of schema {HEAD} misses these columns, or should not have "
                f"them: {', '.join(sorted(wrong))}. {_REMEDY}"
            )


def _lock(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        limits = {
            "lock_timeout": _LOCK_SECONDS,
            "statement_timeout": _MIGRATION_SECONDS,
            "idle_in_transaction_session_timeout": _MIGRATION_SECONDS,  # Alembic is imported within the transaction.
        }
        for setting, seconds in limits.items():
            connection.execute(select(func.set_config(setting, f"{seconds}s", True)))
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))


def _upgrade(connection: Connection, owner: str, version: str | None, scripts: Path) -> None:
    from alembic import command  # This import takes longer than the rest of a start without a migration.
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    config.set_main_option("version_locations", str(scripts / "versions").replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.attributes.update(connection=connection, owner=owner)
    if version == FIRST and VERSION_TABLE not in inspect(connection).get_table_names():
        command.stamp(config, FIRST)
    command.upgrade(config, "head")


@contextlib.contextmanager
def _in_order(database: Database) -> Iterator[None]:
    """Name the step in the error of a failed migration."""
    try:
        yield
    except (SchemaError, OSError):
        raise
    except RegistryError as error:
        raise RegistryError(f"the migration failed and changed nothing: {error}") from None
    except Exception as error:  # noqa: BLE001 - closes: whatever a migration raises, this release cannot start
        raise SchemaError(f"{database.place}: the migration failed and changed nothing: {error}. {_REMEDY}") from None
