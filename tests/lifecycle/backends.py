"""The two state databases under the same tests: SQLite in the server's directory, and a real PostgreSQL."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import standins

from lifecycle.config.serve import DatabaseConfig
from lifecycle.database.engine import Database, PostgreSQL, SQLite
from lifecycle.database.table import SandboxTable
from tests.postgresql import Cluster, running

BACKENDS = ("sqlite", "postgresql")
OWNER = "srv-000000000000000000000001"
ON_BOTH = frozenset(
    {
        "test_ceilings",
        "test_clock",
        "test_diagnostics",
        "test_faults_at_each_step",
        "test_lifecycle_shapes",
        "test_races",
        "test_registry",
        "test_schema",
        "test_snapshots",
        "test_transactions",
    }
)
"""The test modules whose servers run on each of them."""
EXTENDED = frozenset({"test_diagnostics", "test_faults_at_each_step", "test_lifecycle_shapes"})
"""Modules of these that run on PostgreSQL with --all only: forms of requests and answers, and faults at each step.
`test_postgresql.py` has faults at each step in each run."""


def described(dsn: str, *, connect: int = 5, statement: int = 5) -> DatabaseConfig:
    """Return a server's configuration of a PostgreSQL."""
    return DatabaseConfig(dsn, connections=4, connect_seconds=connect, statement_seconds=statement)


def database(config: DatabaseConfig | None, path: Path) -> Database:
    """Return the database of a configuration; `path` is that of an SQLite file."""
    if config is None:
        return SQLite(path)
    return PostgreSQL(
        config.dsn,
        connections=config.connections,
        connect_seconds=config.connect_seconds,
        statement_seconds=config.statement_seconds,
    )


def table(config: DatabaseConfig | None, path: Path, owner: str = OWNER) -> SandboxTable:
    """Return the rows of a server in the database of a configuration."""
    return SandboxTable(database(config, path), owner)


class Template:
    """A PostgreSQL with a migrated database, of which each test gets a copy."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.name = cluster.create()
        rows = table(described(cluster.dsn(self.name)), Path())
        rows.open()
        rows.close()


@pytest.fixture(scope="session", name="template")
def _template() -> Iterator[Template]:
    with running() as cluster:
        yield Template(cluster)


@pytest.fixture(name="cluster")
def _cluster(template: Template) -> Iterator[Cluster]:
    """Return the PostgreSQL of the session. It runs again after a test that has killed it."""
    yield template.cluster
    template.cluster.resume()
    template.cluster.restart()


@pytest.fixture(autouse=True, name="backend")
def _backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[DatabaseConfig | None]:
    """Select the database of the servers that a test starts. None is SQLite."""
    if getattr(request, "param", BACKENDS[0]) == BACKENDS[0]:
        yield None
        return
    template: Template = request.getfixturevalue("template")
    name = template.cluster.create(template.name)
    config = described(template.cluster.dsn(name))
    monkeypatch.setattr(standins, "DATABASE", config)
    yield config
    template.cluster.drop(name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of `ON_BOTH` once for each database."""
    module = metafunc.module.__name__.rpartition(".")[2]
    if module in ON_BOTH and "backend" in metafunc.fixturenames:
        first, second = BACKENDS
        marks = [pytest.mark.extended] if module in EXTENDED else []
        metafunc.parametrize("backend", [first, pytest.param(second, marks=marks)], indirect=True)
