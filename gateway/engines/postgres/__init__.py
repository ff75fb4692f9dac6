"""Database sessions: the engine that logs in to a PostgreSQL server in place of its client."""
