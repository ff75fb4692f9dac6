"""The share of each sandbox in the ceilings, and the API key that it counts for.

Existing rows have none: each counts as one sandbox, of no key and without resources.
"""

import sqlalchemy as sa
from alembic import op

from lifecycle.database.schema import AMOUNT

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the columns."""
    for name in ("cpu_nanos", "memory_bytes", "disk_bytes"):
        op.add_column("sandboxes", sa.Column(name, AMOUNT))
    op.add_column("sandboxes", sa.Column("key_label", sa.Text, server_default=""))
    if op.get_context().dialect.name == "sqlite":
        op.execute("PRAGMA user_version=4")
