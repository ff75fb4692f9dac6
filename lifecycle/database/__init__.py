"""The state database behind the registry, with SQLAlchemy Core: SQLite, or PostgreSQL by DSN.

Only this package imports SQLAlchemy, Alembic and a driver. `serve` imports it when it composes a server, so that no
command of `sallyport` pays for it.
"""
