"""SQLite files of the former release, which had no Alembic: adopted after a copy, or refused without a change.

The migrations are `lifecycle/database/versions/v0001_sandboxes.py`, `lifecycle/database/versions/v0002_owner.py`,
`lifecycle/database/versions/v0004_shares.py` and `lifecycle/database/versions/v0005_histories.py`.
"""

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from backends import OWNER, table

from lifecycle.database import migrations
from lifecycle.database.engine import SQLite
from lifecycle.database.migrations import migrate
from lifecycle.database.schema import HEAD, VERSION_TABLE, metadata, sandboxes
from lifecycle.database.versions.v0001_sandboxes import COLUMNS as FORMER
from lifecycle.sandboxes.registry import Sandbox, SchemaError, State

SCRIPTS = Path(migrations.__file__).parent
DUMP = Path(__file__).with_name("release-0.1.sql")
"""A database of release 0.1, which had no Alembic: as `sqlite3 sallyport.db .dump` prints it, with its version."""
FIRST = Sandbox(
    id="sbx-000000000000000000000001",
    state=State.RUNNING,
    reason="CONTAINER_RUNNING",
    message="Sandbox container started successfully.",
    changed_at=1795569601.25,
    created_at=1795569600.5,
    expires_at=1795573200.5,
    image="sallyport/base",
    entrypoint=("sleep", "infinity"),
    runtime="runsc",
    metadata={"team": "treasury", "note": "grüße"},
    extensions={"sallyport.policy": "agents"},
    platform={"os": "linux", "arch": "amd64"},
    policy_name="agents",
    network_policy={"defaultAction": "deny", "egress": [{"action": "allow", "target": "api.example.org"}]},
    policy_digest="ab" * 32,
    credential_proxy=True,
    secure_access=True,
    vault={"revision": 2, "credentials": {"one": 1}, "bindings": []},
    lineage="sbx-000000000000000000000001",
    renew_seconds=600,
)
SECOND = Sandbox(
    id="sbx-000000000000000000000002",
    state=State.STOPPING,
    reason="CLEANUP_PENDING",
    message='it\'s "left"',
    changed_at=1795569700.0,
    created_at=1795569650.0,
    expires_at=None,
    image="sallyport/base",
    entrypoint=("true",),
    runtime="runc",
    lineage="sbx-000000000000000000000002",
)


def former(path: Path, *, version: int = 1) -> Path:
    """Make the database of the former release. It executed the statements before it set the version to 1."""
    with closing(sqlite3.connect(path)) as made:
        made.execute("PRAGMA journal_mode=WAL")
        made.executescript(DUMP.read_text())
        made.execute(f"PRAGMA user_version={version}")
    return path


def shape(path: Path) -> tuple[int, list[str], list[str]]:
    """Return the version for the former release, the columns of the table, and the names of all tables."""
    with closing(sqlite3.connect(path)) as there:
        names = [str(row[1]) for row in there.execute("PRAGMA table_info(sandboxes)")]
        tables = [row[0] for row in there.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")]
        return there.execute("PRAGMA user_version").fetchone()[0], names, tables


@pytest.mark.parametrize("version", [0, 1])
def test_a_database_of_the_former_release_is_adopted(tmp_path: Path, version: int) -> None:
    """Its rows belong to the server that migrates. A copy of the former database is kept."""
    path = former(tmp_path / "state.db", version=version)
    rows = table(None, path)
    rows.open()
    assert [FIRST, SECOND] == sorted(rows.all(), key=lambda row: row.id)
    assert ([SECOND], 1) == rows.page(["stopping"], {}, 1, 10)
    first, second = rows.history(FIRST.id), rows.history(SECOND.id)
    assert first is not None
    assert second is not None
    assert [(FIRST.changed_at, "Running", FIRST.message)] == [
        (event.at, event.state, event.message) for event in first.events
    ]
    assert (True, FIRST.entrypoint, None, 1) == (first.ran, first.entrypoint, first.removed_at, first.generation)
    assert (False, SECOND.message) == (second.ran, second.events[0].message)
    rows.close()
    other = table(None, path, "srv-000000000000000000000002")
    other.open()
    assert [] == other.all()
    other.close()
    version_now, columns, tables = shape(path)
    assert (int(HEAD), {*sandboxes.c.keys()}, {VERSION_TABLE, *metadata.tables}) == (version_now, {*columns}, {*tables})
    assert [*FORMER] == columns[: len(FORMER)]
    copy = tmp_path / "state.db.schema-1"
    assert 0o600 == copy.stat().st_mode & 0o777
    assert (version, [*FORMER], ["sandboxes"]) == shape(copy)
    with closing(sqlite3.connect(copy)) as kept:
        assert [(FIRST.id,), (SECOND.id,)] == kept.execute("SELECT id FROM sandboxes ORDER BY id").fetchall()


def test_the_first_migration_makes_the_schema_of_the_former_release(tmp_path: Path) -> None:
    """Types, constraints, strictness and indexes."""
    scripts = tmp_path / "scripts"
    shutil.copytree(SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__", "v000[2-9]*"))
    opened = SQLite(tmp_path / "state.db")
    with pytest.raises(SchemaError, match=r"misses these columns.*owner"):
        migrate(opened, OWNER, scripts=scripts, head="0001")
    with opened.transaction() as connection:
        migrations._upgrade(connection, OWNER, None, scripts)
    opened.close()
    former(tmp_path / "former.db")
    found = []
    for name in ("state.db", "former.db"):
        with closing(sqlite3.connect(tmp_path / name)) as there:
            found.append(
                [
                    there.execute(f"PRAGMA {query}").fetchall()
                    for query in (
                        *("table_xinfo(sandboxes)", "index_list(sandboxes)", "index_xinfo(sandboxes_created)"),
                        "index_xinfo(sandboxes_expires)",
                    )
                ]
                + [there.execute("SELECT strict FROM pragma_table_list WHERE name = 'sandboxes'").fetchall()]
            )
    assert found[1] == found[0]


def test_a_new_database_is_not_copied(tmp_path: Path) -> None:
    rows = table(None, tmp_path / "state.db")
    rows.open()
    rows.close()
    assert ["state.db"] == [path.name for path in tmp_path.iterdir()]
    assert 0o600 == (tmp_path / "state.db").stat().st_mode & 0o777


def test_a_start_without_a_migration_does_not_load_alembic(tmp_path: Path) -> None:
    """Its import takes longer than the rest of the start."""
    path = tmp_path / "state.db"
    rows = table(None, path)
    rows.open()
    rows.close()
    program = (
        "import sys; from pathlib import Path; import lifecycle.serve; from lifecycle.database.engine import SQLite; "
        "from lifecycle.database.migrations import migrate; migrate(SQLite(Path(sys.argv[1])), 'srv-1'); "
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'alembic', 'mako', 'psycopg'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False, cwd=SCRIPTS.parents[1]
    )
    assert ("[]\n", "") == (done.stdout, done.stderr)


@pytest.mark.parametrize("version", [0, 1])
def test_a_table_of_another_shape_is_not_marked_current(tmp_path: Path, version: int) -> None:
    """The refusal names file and columns, and does not change the rows."""
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as made, made:
        made.execute("CREATE TABLE sandboxes (id TEXT PRIMARY KEY, state TEXT, created_at REAL, expires_at REAL)")
        made.execute("CREATE INDEX sandboxes_created ON sandboxes (created_at)")
        made.execute("CREATE INDEX sandboxes_expires ON sandboxes (expires_at)")
        made.execute("INSERT INTO sandboxes VALUES ('a', 'b', 1, 2)")
        made.execute(f"PRAGMA user_version={version}")
    with pytest.raises(SchemaError, match=r"state\.db: .*changed_at.*entrypoint.* move it away"):
        table(None, path).open()
    assert (version, ["id", "state", "created_at", "expires_at"], ["sandboxes"]) == shape(path)
    with closing(sqlite3.connect(path)) as there:
        assert [("a", "b", 1.0, 2.0)] == there.execute("SELECT * FROM sandboxes").fetchall()


def test_the_former_release_refuses_a_migrated_database(tmp_path: Path) -> None:
    """It compares `user_version` with the number of its steps, which is 1."""
    path = former(tmp_path / "state.db")
    rows = table(None, path)
    rows.open()
    rows.close()
    assert 1 < shape(path)[0]


def test_a_database_of_an_unknown_release_without_alembic_is_refused(tmp_path: Path) -> None:
    path = former(tmp_path / "state.db", version=7)
    with pytest.raises(SchemaError, match="has schema 0007, which a newer release made"):
        table(None, path).open()
    assert (7, [*FORMER], ["sandboxes"]) == shape(path)


def test_without_a_copy_nothing_is_changed(tmp_path: Path) -> None:
    """For example because a directory has the copy's name."""
    path = former(tmp_path / "state.db")
    (tmp_path / "state.db.schema-1").mkdir()
    with pytest.raises(OSError, match="schema-1"):
        table(None, path).open()
    assert (1, [*FORMER], ["sandboxes"]) == shape(path)
