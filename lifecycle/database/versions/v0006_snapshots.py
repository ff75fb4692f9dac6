"""Snapshots have rows, and a sandbox names the snapshot with which it began."""

import sqlalchemy as sa
from alembic import op

from lifecycle.database.schema import MOMENT

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the table and the column."""
    op.add_column("sandboxes", sa.Column("snapshot", sa.Text))
    text = ("sandbox", "name", "state", "reason", "message")
    op.create_table(
        "snapshots",
        sa.Column("id", sa.Text, primary_key=True, nullable=True),
        *(sa.Column(name, sa.Text) for name in text),
        *(sa.Column(name, MOMENT) for name in ("changed_at", "created_at")),
        sa.Column("image", sa.Text),
        sa.Column("bytes", sa.BigInteger().with_variant(sa.Integer(), "sqlite")),
        sa.Column("owner", sa.Text),
        sqlite_strict=True,
    )
    op.create_index("snapshots_owner", "snapshots", ["owner", "created_at"])
    if op.get_context().dialect.name == "sqlite":
        op.execute("PRAGMA user_version=6")
