"""Each row belongs to a server, so that several of them can share a database. Existing rows belong to the one that
migrates: they are in its own SQLite file.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the owner, and indexes that begin with it."""
    context = op.get_context()
    op.add_column("sandboxes", sa.Column("owner", sa.Text))
    rows = sa.table("sandboxes", sa.column("owner"))
    assert context.config is not None  # noqa: S101 - narrows the type: `env` sets it
    op.execute(rows.update().values(owner=context.config.attributes["owner"]))
    op.drop_index("sandboxes_created", "sandboxes")
    op.drop_index("sandboxes_expires", "sandboxes")
    op.create_index("sandboxes_owner", "sandboxes", ["owner", "created_at"])
    op.create_index("sandboxes_owner_expires", "sandboxes", ["owner", "expires_at"])
    if context.dialect.name == "sqlite":
        op.execute("PRAGMA user_version=2")  # Release 0.1 compares this number and refuses the database.
