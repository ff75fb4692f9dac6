"""State databases of other releases: they are migrated after a copy, or refused without a change."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from lifecycle.sandboxes.registry import Registry, Sandbox, State
from lifecycle.sandboxes.schema import STEPS, SchemaError, migrate

FORMER = """
CREATE TABLE IF NOT EXISTS sandboxes (
  id TEXT PRIMARY KEY, state TEXT, reason TEXT, message TEXT, changed_at REAL, created_at REAL, expires_at REAL,
  image TEXT, entrypoint TEXT, runtime TEXT, metadata TEXT, extensions TEXT, platform TEXT, policy_name TEXT,
  network_policy TEXT, policy_digest TEXT, credential_proxy INTEGER, secure_access INTEGER, vault TEXT, lineage TEXT,
  renew_seconds INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS sandboxes_created ON sandboxes (created_at DESC, id);
CREATE INDEX IF NOT EXISTS sandboxes_expires ON sandboxes (expires_at) WHERE expires_at IS NOT NULL;
"""
"""The statements of the former release, which had no steps. It executed them before it set the version to 1."""
ROW = (
    "INSERT INTO sandboxes VALUES ('one', 'Running', '', '', 1.0, 1.0, NULL, 'image', '[\"true\"]', 'runc', '{}', "
    "'{}', NULL, NULL, NULL, '', 0, 0, NULL, 'one', NULL)"
)
KEPT = Sandbox("one", State.RUNNING, "", "", 1.0, 1.0, None, "image", ("true",), "runc", lineage="one")
NEXT = (*STEPS, ("ALTER TABLE sandboxes ADD COLUMN owner TEXT", "UPDATE sandboxes SET owner = 'root'"))
"""The steps of a release after this one."""


def made(path: Path, script: str, version: int) -> Path:
    """Make a database as another release would leave it."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.executescript(script)
        database.execute(f"PRAGMA user_version={version}")
    return path


def schema(path: Path) -> tuple[int, list[str]]:
    """Return the version, and the columns of the table."""
    with closing(sqlite3.connect(path)) as database:
        names = [str(row[1]) for row in database.execute("PRAGMA table_info(sandboxes)")]
        return database.execute("PRAGMA user_version").fetchone()[0], names


COLUMNS = [word.split()[0] for word in FORMER.split("(", 1)[1].split(") STRICT")[0].split(",")]


@pytest.mark.parametrize("version", [0, 1])
async def test_a_database_of_the_former_release_keeps_its_rows(tmp_path: Path, version: int) -> None:
    """Also a database from between the creation of the table and the setting of its version."""
    path = made(tmp_path / "state.db", f"{FORMER}{ROW};", version)
    registry = Registry(path)
    await registry.open()
    assert [KEPT] == await registry.all()
    await registry.close()
    assert (1, COLUMNS) == schema(path)


async def test_a_new_database_has_the_schema_of_the_former_release(tmp_path: Path) -> None:
    """The first step creates the same schema as that release. An empty database is not copied."""
    registry = Registry(tmp_path / "state.db")
    await registry.open()
    await registry.close()
    made(tmp_path / "former.db", FORMER, 1)
    found = []
    for name in ("state.db", "former.db"):
        with closing(sqlite3.connect(tmp_path / name)) as database:
            rows = database.execute("SELECT name, sql FROM sqlite_schema ORDER BY name").fetchall()
        found.append([(label, "".join((sql or "").split())) for label, sql in rows])
    assert found[0] == found[1]
    assert ["former.db", "state.db"] == sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("version", [0, 1])
async def test_a_table_of_another_shape_is_not_marked_current(tmp_path: Path, version: int) -> None:
    """The refusal names file and columns, and does not change the rows."""
    older = "CREATE TABLE sandboxes (id TEXT PRIMARY KEY, state TEXT, created_at REAL, expires_at REAL)"
    row = "INSERT INTO sandboxes VALUES ('a', 'b', 1, 2)"
    path = made(tmp_path / "state.db", f"{older}; {row}", version)
    with pytest.raises(SchemaError, match=r"state\.db: .*changed_at.*entrypoint.* move it away"):
        await Registry(path).open()
    assert (version, ["id", "state", "created_at", "expires_at"]) == schema(path)
    with closing(sqlite3.connect(path)) as database:
        assert [("a", "b", 1.0, 2.0)] == database.execute("SELECT * FROM sandboxes").fetchall()


async def test_a_database_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    """The message has both numbers and a remedy. Nothing is changed."""
    path = made(tmp_path / "state.db", FORMER, 2)
    with pytest.raises(SchemaError, match=r"state\.db has schema 2, .*newer release.* schema 1\..*state\.db\.schema-1"):
        await Registry(path).open()
    assert (2, COLUMNS) == schema(path)


def test_steps_run_in_order_after_a_copy_is_kept(tmp_path: Path) -> None:
    """From the former release's database to that of a later release. The copy is the former database."""
    path = made(tmp_path / "state.db", f"{FORMER}{ROW};", 1)
    with closing(sqlite3.connect(path)) as database:
        migrate(database, str(path), [*COLUMNS, "owner"], NEXT)
        assert [("one", "root")] == database.execute("SELECT id, owner FROM sandboxes").fetchall()
    assert (2, [*COLUMNS, "owner"]) == schema(path)
    copy = tmp_path / "state.db.schema-1"
    assert 0o600 == copy.stat().st_mode & 0o777
    with closing(sqlite3.connect(copy)) as database:
        assert [("one",)] == database.execute("SELECT id FROM sandboxes").fetchall()
    assert (1, COLUMNS) == schema(copy)


def test_a_step_that_fails_undoes_all(tmp_path: Path) -> None:
    """Neither the version nor the table stays between two schemas."""
    path = made(tmp_path / "state.db", f"{FORMER}{ROW};", 1)
    broken = (*NEXT, ("DELETE FROM sandboxes", "INSERT INTO nowhere VALUES (1)"))
    with (
        closing(sqlite3.connect(path)) as database,
        pytest.raises(SchemaError, match="is not of schema 1: no such table: nowhere"),
    ):
        migrate(database, str(path), COLUMNS, broken)
    assert (1, COLUMNS) == schema(path)
    with closing(sqlite3.connect(path)) as database:
        assert [("one",)] == database.execute("SELECT id FROM sandboxes").fetchall()


def test_without_a_copy_nothing_is_changed(tmp_path: Path) -> None:
    """For example because a directory has the copy's name."""
    path = made(tmp_path / "state.db", f"{FORMER}{ROW};", 1)
    (tmp_path / "state.db.schema-1").mkdir()
    with closing(sqlite3.connect(path)) as database, pytest.raises(OSError, match="schema-1"):
        migrate(database, str(path), [*COLUMNS, "owner"], NEXT)
    assert (1, COLUMNS) == schema(path)
