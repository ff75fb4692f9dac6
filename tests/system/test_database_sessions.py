"""Real PostgreSQL clients in sandboxes: psql and psycopg, with a real server. Judged by the server and its log.

It tests `policy/sessions.py`, `gateway/prelude.py`, `gateway/engines/postgres/flow.py`,
`gateway/engines/postgres/server.py` and `gateway/engines/postgres/session.py` in real workers: with their files, system
calls and grants.
"""

import io
import os
import secrets
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typing_extensions
from opensandbox.models.execd import RunCommandOpts
from opensandbox.sync.sandbox import SandboxSync

from testbed import collect
from testbed.internet import DATABASE, DATABASE_ADDRESS, Internet
from testbed.leaks import forms_of, leaks_in
from testbed.stack import POLICY, Stack
from tests.conftest import ON_RUNC, representatives
from tests.postgresql import Cluster, programs, running
from tests.stacks import VAULTD
from tests.system.test_create_and_delete import until
from vault.client import AdminClient
from vault.secret import Secret

pytestmark = pytest.mark.system

USER, SECRET = "ledger_app", "ledger-login"
LIMIT = 1.0
"""Seconds in which a freeze or a revocation takes effect."""
IN_FORCE = 2.0
"""Seconds until a changed policy file is in force."""
_C_LIBRARY = ("ld-linux", "libc.so", "libm.so", "libresolv", "linux-vdso")
_MIB = 1 << 20

_DSN = (
    f"host={DATABASE} user=anyone connect_timeout=20 sslmode=verify-full sslrootcert=/etc/ssl/certs/ca-certificates.crt"
)
_PSYCOPG = """
import hashlib, sys, threading, time
import psycopg
connection = psycopg.connect(sys.argv[1] + " dbname=ledger application_name=the-job", autocommit=True)
assert psycopg.pq.__impl__ == "python"
def one(query, *values):
    return connection.execute(query, values).fetchone()[0]
print(one("SELECT current_user || ' ' || current_database() || ' ' || current_setting('application_name')"))
size = int(sys.argv[2])
big = "x" * size
assert one("SELECT md5(%s)", big) == hashlib.md5(big.encode()).hexdigest()
assert one("SELECT repeat('y', %s)", size) == "y" * size
connection.execute("CREATE TEMP TABLE job (number int, text text)")
with connection.cursor().copy("COPY job FROM STDIN") as copy:
    for number in range(20000):
        copy.write_row((number, "row"))
rows = 0
with connection.cursor().copy("COPY job TO STDOUT") as copy:
    for row in copy.rows():
        rows += 1
print(rows)
threading.Timer(1, connection.cancel).start()
began = time.monotonic()
try:
    one("SELECT pg_sleep(60)")
except psycopg.errors.QueryCanceled:
    print("cancelled", time.monotonic() - began < 30)
print(one("SELECT 6 * 7"))
"""


@dataclass(frozen=True)
class Database:
    """The server in the test internet, and the password of its user."""

    cluster: Cluster
    password: str

    def log(self) -> str:
        return (self.cluster.directory / "log").read_text(errors="replace")

    def ended(self, mark: str) -> bool:
        """Whether no session with this application name is left."""
        return [] == [
            one for one in self.cluster.ask("SELECT application_name FROM pg_stat_activity") if one == (mark,)
        ]


@pytest.fixture(scope="module", name="database")
def _database(internet: Internet) -> Iterator[Database]:
    password = f"canary-{secrets.token_hex(16)}"
    netns = internet.path(internet.net)
    options = {"log_connections": "on", "client_connection_check_interval": "50"}
    with running(listen=DATABASE_ADDRESS, netns=netns, **options) as cluster:
        cluster.ask(f"CREATE ROLE {USER} LOGIN PASSWORD '{password}'")
        cluster.ask(f"CREATE DATABASE ledger OWNER {USER}")
        cluster.ask(f"CREATE DATABASE payroll OWNER {USER}")
        certificate = internet.directory / f"{DATABASE}.pem"
        cluster.secure(certificate, certificate)
        yield Database(cluster, password)


@pytest.fixture(name="vault")
async def _vault(stack: Stack) -> AsyncIterator[AdminClient]:
    client = await AdminClient.connect(stack.run / "vault.sock", VAULTD)
    yield client
    await client.close()


@pytest.fixture(scope="module", autouse=True, name="stored")
def _stored(stack: Stack, database: Database) -> Iterator[None]:
    login = f"{USER}:{database.password}"
    stack.sallyport("vault", "put", SECRET, "--host", DATABASE, "--scheme", "postgres", stdin=login)
    yield
    stack.sallyport("vault", "delete", SECRET)


@pytest.fixture(scope="module", name="clients")
def _clients() -> bytes:
    """A tar archive with Debian's psql and libpq, and psycopg, to be unpacked at /."""
    psql = programs() / "psql"
    listed = subprocess.run(["ldd", str(psql)], capture_output=True, text=True, check=True).stdout
    libraries = [line.split()[2] for line in listed.splitlines() if "=>" in line]
    package = Path(str(psycopg.__file__)).parent
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        archive.add(psql, "usr/local/bin/psql")
        for library in libraries:
            if not Path(library).name.startswith(_C_LIBRARY):
                archive.add(os.path.realpath(library), f"usr/local/lib/{Path(library).name}")
        archive.add(package, "opt/clients/psycopg")
        archive.add(Path(typing_extensions.__file__), "opt/clients/typing_extensions.py")
    return file.getvalue()


@contextmanager
def client(stack: Stack, runtime: str, clients: bytes) -> Iterator[SandboxSync]:
    """Run a sandbox that has the clients."""
    made = stack.create(runtime, policy="databases")
    try:
        made.files.write_file("/tmp/clients.tar.gz", clients)
        made.files.write_file("/tmp/job.py", _PSYCOPG)
        unpacked = made.commands.run("tar -C / -xzf /tmp/clients.tar.gz && ldconfig && psql --version")
        assert "psql (PostgreSQL)" in unpacked.text, said(unpacked)
        yield made
    finally:
        made.kill()
        made.close()


def said(execution: Any) -> str:
    return "".join(message.text for message in (*execution.logs.stdout, *execution.logs.stderr))


def psql(sandbox: SandboxSync, query: str, database: str = "ledger", **more: str) -> str:
    """Return what psql prints."""
    options = " ".join(f"{name}={value}" for name, value in more.items())
    command = f'psql -X -A -t -w "{_DSN} dbname={database} {options}" -c "{query}" 2>&1'
    return said(sandbox.commands.run(command)).strip()


def records(stack: Stack, sandbox: SandboxSync, kind: str, decision: str) -> list[dict[str, Any]]:
    return [
        record
        for record in stack.audit_records()
        if (record["kind"], record.get("decision"), record.get("sandbox")) == (kind, decision, str(sandbox.id))
        and record.get("scheme") == "postgres"
    ]


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_unmodified_clients_work_without_a_password_and_see_none(
    stack: Stack, database: Database, clients: bytes, runtime: str
) -> None:
    """Large values in both directions, COPY, a cancelled query. The server has verified TLS with channel binding."""
    with client(stack, runtime, clients) as sandbox:
        began = time.time()
        ssl = "SELECT current_user, ssl, version FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
        assert f"{USER}|t|TLSv1.3" == psql(sandbox, ssl)
        environment = {"PYTHONPATH": "/opt/clients", "PSYCOPG_IMPL": "python"}
        job = sandbox.commands.run(f"python3 /tmp/job.py '{_DSN}' {16 * _MIB}", opts=RunCommandOpts(envs=environment))
        assert [f"{USER} ledger the-job", "20000", "cancelled True", "42"] == said(job).split("\n")[:4], said(job)
        uses = records(stack, sandbox, "secret.use", "allow")
        assert [(SECRET, "ledger", USER)] * 2 == [(one["secret"], one["database"], one["user"]) for one in uses]
        ends = records(stack, sandbox, "request", "info")
        assert [] == [one for one in ends if one.get("error")]
        assert max(one["bytes_up"] for one in ends) > 16 * _MIB < max(one["bytes_down"] for one in ends)
        assert {DATABASE} == {one["peer_name"] for one in ends if "peer_name" in one}
        planted = f"planted-{secrets.token_hex(8)}"
        source = Path(str(collect.__file__)).read_text()
        sandbox.files.write_file("/tmp/collect.py", source)
        sandbox.files.write_file("/tmp/planted", planted)
        sandbox.commands.run(f"python3 /tmp/collect.py /tmp/collection {began - 60:.0f}")
        collection = [sandbox.files.read_bytes("/tmp/collection"), said(job).encode()]
        assert 1 == leaks_in(collection, forms_of(planted))
        assert 0 == leaks_in(collection, forms_of(database.password))


REFUSED = {
    "another database": ({"database": "payroll"}, "Denied by policy rule default"),
    "no TLS": ({"sslmode": "disable"}, "needs TLS"),
    "replication": ({"replication": "database"}, "replication are not supported"),
    "options": ({"options": "-cwork_mem=1MB"}, "parameter options is not relayed"),
}


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_session_that_no_rule_allows_does_not_reach_the_server(
    stack: Stack, database: Database, clients: bytes, runtime: str
) -> None:
    with client(stack, runtime, clients) as sandbox:
        assert "1" == psql(sandbox, "SELECT 1")
        before = database.log().count("connection received")
        for name, (options, expected) in REFUSED.items():
            assert expected in psql(sandbox, "SELECT 1", **options), name
        assert before == database.log().count("connection received")
        denials = records(stack, sandbox, "request", "deny")
        assert ["payroll"] == [one["database"] for one in denials if "database" in one]
        assert "1" == psql(sandbox, "SELECT 1")
        assert before + 1 == database.log().count("connection received")


@pytest.mark.parametrize("runtime", ON_RUNC)
@pytest.mark.timed
@pytest.mark.parametrize("action", representatives(("freeze", "revoke_all", "policy"), "freeze", "policy"))
async def test_a_live_session_ends_with_its_secret_or_its_rule(
    stack: Stack, database: Database, clients: bytes, vault: AdminClient, runtime: str, action: str
) -> None:
    mark = f"mark-{secrets.token_hex(8)}"
    with client(stack, runtime, clients) as sandbox:
        command = f'psql -X -w "{_DSN} dbname=ledger application_name={mark}" -c "SELECT pg_sleep(600)" >/tmp/out 2>&1'
        sandbox.commands.run(command, opts=RunCommandOpts(background=True))
        assert until(lambda: not database.ended(mark))
        try:
            began = time.monotonic()
            if action == "policy":
                stack.policy.write_text(POLICY.read_text().replace("[ledger]", "[payroll]"))
            else:
                await getattr(vault, action)(sandbox=str(sandbox.id))
            gone = until(lambda: database.ended(mark), 20)
            took = time.monotonic() - began
            after = psql(sandbox, "SELECT 1")
        finally:
            if action == "freeze":
                await vault.unfreeze(sandbox=str(sandbox.id))
            stack.policy.write_text(POLICY.read_text())
        assert gone
        assert took < (IN_FORCE if action == "policy" else LIMIT) + 1.0
        assert "connection to server was lost" in said(sandbox.commands.run("sleep 1; cat /tmp/out"))
        expected = {"freeze": "frozen the secret", "revoke_all": "1", "policy": "but not this database"}[action]
        assert expected in after
        assert until(lambda: "1" == psql(sandbox, "SELECT 1"), 20)


@pytest.mark.parametrize("runtime", ON_RUNC)
async def test_a_wrong_login_is_explained_without_the_secret(
    stack: Stack, database: Database, clients: bytes, vault: AdminClient, runtime: str
) -> None:
    wrong = f"wrong-{secrets.token_hex(16)}"
    with client(stack, runtime, clients) as sandbox:
        await vault.rotate(SECRET, Secret(f"{USER}:{wrong}"))
        try:
            answer = psql(sandbox, "SELECT 1")
        finally:
            await vault.rotate(SECRET, Secret(f"{USER}:{database.password}"))
        assert f'password authentication failed for user "{USER}"' in answer
        assert SECRET in answer
        assert 0 == leaks_in([answer.encode()], forms_of(wrong))
        assert "1" == psql(sandbox, "SELECT 1")
