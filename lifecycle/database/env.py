"""Alembic's environment. `migrations` runs it on an open connection, in a transaction that has begun."""

from alembic import context

from lifecycle.database.schema import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    transaction_per_migration=False,
)
context.run_migrations()
