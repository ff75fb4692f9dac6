"""Migrations of both databases (`lifecycle/database/env.py`): complete, or the database is as it was."""

import shutil
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from backends import OWNER, database, table
from sqlalchemy import text

from lifecycle.config.serve import DatabaseConfig
from lifecycle.database import migrations
from lifecycle.database.migrations import migrate
from lifecycle.database.schema import HEAD, VERSION_TABLE, metadata
from lifecycle.sandboxes.registry import RegistryError, Sandbox, SchemaError, State

SCRIPTS = Path(migrations.__file__).parent
LATER = f"{int(HEAD) + 1:04}"
ROW = Sandbox("one", State.RUNNING, "", "", 1.0, 1.0, None, "image", ("true",), "runc")


def later(directory: Path, statements: str) -> Path:
    """Make the migrations of a release after this one: one more, with these statements."""
    scripts = directory / "scripts"
    shutil.copytree(SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    script = f"from alembic import op\nrevision = '{LATER}'\ndown_revision = '{HEAD}'\n\n\ndef upgrade():\n    "
    (scripts / "versions" / f"v{LATER}_later.py").write_text(script + statements)
    return scripts


def test_the_migrations_make_the_table_that_the_statements_use(backend: DatabaseConfig | None, tmp_path: Path) -> None:
    """`HEAD` is the newest of one line of migrations, and Alembic finds no difference."""
    assert [HEAD] == ScriptDirectory(str(SCRIPTS), version_locations=[str(SCRIPTS / "versions")]).get_heads()
    opened = database(backend, tmp_path / "state.db")
    migrate(opened, OWNER)
    with opened.statement() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        found = compare_metadata(context, metadata)
    opened.close()
    assert [] == found


def test_a_database_of_a_newer_release_is_refused(backend: DatabaseConfig | None, tmp_path: Path) -> None:
    """The message has both numbers and a remedy, and no password. Nothing is changed."""
    opened = database(backend, tmp_path / "state.db")
    migrate(opened, OWNER, scripts=later(tmp_path, "op.execute('CREATE TABLE more (id TEXT)')"), head=LATER)
    for _ in range(2):
        said = rf"has schema {LATER}, .*newer release.* schema {HEAD}\. .*put back"
        with pytest.raises(SchemaError, match=said) as caught:
            migrate(opened, OWNER)
        assert "password" not in str(caught.value)
        assert (backend is None) == (f"state.db.schema-{int(HEAD)}" in str(caught.value))
    with opened.statement() as connection:
        assert [LATER] == connection.execute(text("SELECT version_num FROM sallyport_schema")).scalars().all()
    opened.close()


def test_a_migration_that_fails_undoes_all(backend: DatabaseConfig | None, tmp_path: Path) -> None:
    """Neither the version nor the table nor a row stays between two schemas, and the database can still be used."""
    opened = database(backend, tmp_path / "state.db")
    rows = table(backend, tmp_path / "state.db")
    rows.open()
    rows.put(ROW)
    steps = ("DELETE FROM sandboxes", "ALTER TABLE sandboxes ADD COLUMN more TEXT", "DROP TABLE nowhere")
    scripts = later(tmp_path, "\n    ".join(f"op.execute('{step}')" for step in steps))
    with pytest.raises(RegistryError, match=r"the migration failed and changed nothing: .*nowhere"):
        migrate(opened, OWNER, scripts=scripts, head=LATER)
    migrate(opened, OWNER)
    assert [ROW] == rows.all()
    opened.close()
    rows.close()


def test_a_migration_that_raises_undoes_all(backend: DatabaseConfig | None, tmp_path: Path) -> None:
    opened = database(backend, tmp_path / "state.db")
    migrate(opened, OWNER)
    scripts = later(tmp_path, "op.execute('DROP TABLE sandboxes')\n    raise ZeroDivisionError('by hand')")
    with pytest.raises(SchemaError, match="the migration failed and changed nothing: by hand"):
        migrate(opened, OWNER, scripts=scripts, head=LATER)
    migrate(opened, OWNER)
    opened.close()
