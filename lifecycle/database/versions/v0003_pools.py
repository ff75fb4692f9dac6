"""Pools, and which sandboxes are members of them. A sandbox that exists is in no pool."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the table of pools, and two columns of sandboxes."""
    op.add_column("sandboxes", sa.Column("pool", sa.Text))
    op.add_column("sandboxes", sa.Column("idle", sa.Integer))
    rows = sa.table("sandboxes", sa.column("pool"), sa.column("idle"))
    op.execute(rows.update().values(pool="", idle=0))
    op.create_table(
        "pools",
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("document", sa.Text),
        sqlite_strict=True,
    )
    if op.get_context().dialect.name == "sqlite":
        op.execute("PRAGMA user_version=3")
