"""The schema of release 0.1, which had no Alembic: one row for each sandbox, in SQLite.

A database of that release is marked with this migration and not changed by it (`lifecycle.database.migrations`).
"""

import sqlalchemy as sa
from alembic import op

from lifecycle.database.schema import MOMENT

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the table and its indexes."""
    text = {name: sa.Column(name, sa.Text, primary_key=name == "id", nullable=True) for name in _TEXT}
    moments = {name: sa.Column(name, MOMENT) for name in ("changed_at", "created_at", "expires_at")}
    numbers = {name: sa.Column(name, sa.Integer) for name in ("credential_proxy", "secure_access", "renew_seconds")}
    columns = text | moments | numbers
    op.create_table("sandboxes", *(columns[name] for name in COLUMNS), sqlite_strict=True)
    op.create_index("sandboxes_created", "sandboxes", [sa.text("created_at DESC"), "id"])
    present = sa.text("expires_at IS NOT NULL")
    op.create_index("sandboxes_expires", "sandboxes", ["expires_at"], sqlite_where=present, postgresql_where=present)


COLUMNS = (
    *("id", "state", "reason", "message", "changed_at", "created_at", "expires_at", "image", "entrypoint", "runtime"),
    *("metadata", "extensions", "platform", "policy_name", "network_policy", "policy_digest", "credential_proxy"),
    *("secure_access", "vault", "lineage", "renew_seconds"),
)
_TEXT = frozenset(COLUMNS) - {
    *("changed_at", "created_at", "expires_at", "credential_proxy", "secure_access", "renew_seconds")
}
