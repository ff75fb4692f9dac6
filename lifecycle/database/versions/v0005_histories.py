"""The histories of sandboxes. Each sandbox that exists gets one, with its present state as the only event."""

import json

import sqlalchemy as sa
from alembic import op

from lifecycle.database.schema import LONG, MOMENT

revision = "0005"
down_revision = "0004"

_COPIED = ("id", "created_at", "image", "entrypoint", "runtime", "policy_name", "policy_digest", "state", "reason")
_RAN = frozenset({"Running", "Pausing", "Paused", "Resuming", "Terminated"})
"""The states that only a sandbox that has run can have. Of others the output is not kept."""


def upgrade() -> None:
    """Create the table and fill it.

    Raises:
        LookupError: the table of sandboxes is not that of the former schema.
    """
    needed = (*_COPIED, "owner", "changed_at", "message", "pool", "idle")
    there = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("sandboxes")}
    if missing := sorted(set(needed) - there):
        raise LookupError(f"table sandboxes misses these columns: {', '.join(missing)}")
    histories = op.create_table(
        "histories",
        sa.Column("id", sa.Text, primary_key=True, nullable=True),
        sa.Column("created_at", MOMENT),
        *(sa.Column(name, sa.Text) for name in ("image", "entrypoint", "runtime", "policy_name", "policy_digest")),
        *(sa.Column(name, sa.Text) for name in ("given", "state", "reason", "events")),
        sa.Column("dropped", sa.Integer),
        sa.Column("generation", LONG),
        *(sa.Column(name, sa.Integer) for name in ("idle", "withheld", "ran", "oom", "exit_code")),
        sa.Column("output", sa.Text),
        sa.Column("output_truncated", sa.Integer),
        sa.Column("removed_at", MOMENT),
        sa.Column("owner", sa.Text),
        sqlite_strict=True,
    )
    op.create_index("histories_owner_removed", "histories", ["owner", "removed_at"])
    rows = sa.table("sandboxes", *(sa.column(name) for name in needed))
    for row in op.get_bind().execute(sa.select(rows)).mappings().all():
        event = [row["changed_at"], row["state"], row["reason"], row["message"]]
        op.execute(
            histories.insert().values(
                **{name: row[name] for name in (*_COPIED, "owner")},
                events=json.dumps([event]),
                **dict.fromkeys(("dropped", "oom", "output_truncated"), 0),
                generation=1,
                idle=row["idle"],
                withheld=int(bool(row["pool"])),
                ran=int(row["state"] in _RAN),
                output="",
            )
        )
    if op.get_context().dialect.name == "sqlite":
        op.execute("PRAGMA user_version=5")
