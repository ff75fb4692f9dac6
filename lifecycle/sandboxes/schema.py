"""The schema of the state database, and the ordered migration steps between its versions.

- `PRAGMA user_version` is the number of the schema. Step n converts schema n-1 to schema n.
- Schema 0 is a new database, or one whose first schema was not completed.
- A released step is never edited. A change of the schema is a new step.
- All missing steps and the new number are one transaction. A copy of the database is kept before it.
- A database that does not match afterwards is refused and left unchanged. It is never marked as current.
"""

import os
import sqlite3
from collections.abc import Sequence

STEPS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE IF NOT EXISTS sandboxes (
            id TEXT PRIMARY KEY, state TEXT, reason TEXT, message TEXT, changed_at REAL, created_at REAL,
            expires_at REAL, image TEXT, entrypoint TEXT, runtime TEXT, metadata TEXT, extensions TEXT, platform TEXT,
            policy_name TEXT, network_policy TEXT, policy_digest TEXT, credential_proxy INTEGER,
            secure_access INTEGER, vault TEXT, lineage TEXT, renew_seconds INTEGER
        ) STRICT""",
        "CREATE INDEX IF NOT EXISTS sandboxes_created ON sandboxes (created_at DESC, id)",
        "CREATE INDEX IF NOT EXISTS sandboxes_expires ON sandboxes (expires_at) WHERE expires_at IS NOT NULL",
    ),
)

_REMEDY = "Put back a copy of the file, or move it away to start without sandboxes"


class SchemaError(sqlite3.DatabaseError):
    """This release cannot use the database's schema. The database was not changed."""


def migrate(
    database: sqlite3.Connection, path: str, columns: Sequence[str], steps: Sequence[Sequence[str]] = STEPS
) -> None:
    """Migrate a database to the newest schema.

    Args:
        path: of the database.
        columns: that the table `sandboxes` must have afterwards.
        steps: the statements of each step.

    Raises:
        SchemaError: a newer release created it, or its table does not match its schema.
        sqlite3.Error, OSError: it could not be copied or changed. It is as it was.
    """
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version > len(steps):
        raise SchemaError(
            f"{path} has schema {version}, which a newer release made; this release knows schema {len(steps)}. "
            f"Start that release, or put back the copy {path}.schema-{len(steps)} that it kept"
        )
    if version < len(steps) and _columns(database):
        _keep_copy(database, f"{path}.schema-{version}")
    database.execute("BEGIN IMMEDIATE")
    try:
        for number, step in enumerate(steps[version:], version + 1):
            for statement in step:
                database.execute(statement)
            database.execute(f"PRAGMA user_version={number}")
        if wrong := set(columns) ^ set(_columns(database)):
            raise SchemaError(
                f"{path}: the table of schema {version} misses these columns, or should not have them: "
                f"{', '.join(sorted(wrong))}. {_REMEDY}"
            )
        database.execute("COMMIT")
    except sqlite3.OperationalError as error:
        database.rollback()
        if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:  # For example a full disk, which is no fault of the schema.
            raise
        raise SchemaError(f"{path} is not of schema {version}: {error}. {_REMEDY}") from None
    except BaseException:
        database.rollback()
        raise


def _columns(database: sqlite3.Connection) -> list[str]:
    return [str(row[1]) for row in database.execute("PRAGMA table_info(sandboxes)")]


def _keep_copy(database: sqlite3.Connection, path: str) -> None:
    temporary = f"{path}.new"
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
    copy = sqlite3.connect(temporary)
    try:
        database.backup(copy)
    finally:
        copy.close()
    fd = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)
