"""PostgreSQL clients, an engine, and servers on loopback, with real TLS between them.

The database server is the one of Debian's package. `Rig` acts as the worker's acceptor, with the product's functions.
"""

import asyncio
import contextlib
import os
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gateway.effects import Over, SecretRefused, SecretsSuspended
from gateway.engines.engine import FlowEngine
from gateway.engines.http1.flow import Http1Flow
from gateway.engines.mitm.connection import FlowConnection
from gateway.engines.port import EngineLimits, InspectedFlow
from gateway.engines.postgres.flow import PostgresFraming
from gateway.ledger import Ledger
from gateway.prelude import answer_prelude
from gateway.startup import CancelRequest, GssRequest, SslRequest, Startup, denial, read_packet
from gateway.tls.hello import Hello, NeedMore, Refused, read_hello
from gateway.tls.identity import LeafMint
from policy.compiled import CompiledPolicy
from policy.decision import Deny
from policy.facts import Scheme, SessionFacts
from policy.logins import LoginPlan
from policy.names import HostPattern
from policy.rules import Action, Endpoint, Precedence, Rule, RuleList
from policy.sessions import AllowSession, decide_session
from testbed.ports import reserve_port
from tests.gateway.mitm.conftest import Audit, Authority
from tests.postgresql import Cluster, running
from vault.secret import Secret

HOST = "db.test"
PORT = 5432
USER = "app"
PASSWORD = "canary/5f1d-7a90c2 é"
SECRET = f"{USER}:{PASSWORD}"


def allowing(*databases: str, username: str | None = None) -> CompiledPolicy:
    """Return a policy that allows sessions with these databases of `HOST`, or with all."""
    login = LoginPlan("agents/db", "db-login", username)
    endpoint = Endpoint(PORT, Scheme.POSTGRES)
    rule = Rule(
        "agents/db", Action.ALLOW, (HostPattern(HOST),), endpoints=(endpoint,), login=login, databases=databases
    )
    return CompiledPolicy("agents", (RuleList("agents", Precedence.DENY_WINS, rules=(rule,)),))


@dataclass
class Rig:
    """The parts around one engine. A test can replace most of them.

    Attributes:
        port: of the gateway; `upstream` is the port of the server.
        on_login: called before a secret is given.
    """

    directory: Path
    upstream: int
    upstream_root: Authority
    sandbox_root: Authority
    policy: CompiledPolicy = field(default_factory=allowing)
    secret: str = SECRET
    audit: Audit = field(default_factory=Audit)
    port: int = 0
    refused: str | None = None
    suspended: str | None = None
    broken_vault: bool = False
    over: Over | None = None
    on_login: Callable[[], object] = lambda: None
    logged_in: asyncio.Event = field(default_factory=asyncio.Event)
    dials: int = 0
    flows: list[asyncio.Task[None]] = field(default_factory=list)
    framing: PostgresFraming = field(default_factory=PostgresFraming)
    engine: FlowEngine = None  # type: ignore[assignment]
    limits: EngineLimits | None = None

    # The ports of the engine.

    def decide_session(self, facts: SessionFacts) -> AllowSession | Deny:
        return decide_session(self.policy, facts)

    async def login(self, plan: LoginPlan, facts: SessionFacts) -> Secret:
        self.on_login()
        self.logged_in.set()
        if self.broken_vault:
            raise ConnectionError("the vault is gone")
        if self.refused is not None:
            raise SecretRefused(self.refused)
        if self.suspended is not None:
            raise SecretsSuspended(self.suspended)
        assert ("db-login", HOST) == (plan.secret, facts.host)
        return Secret(self.secret)

    def request(self) -> Over | None:
        return self.over

    async def dial(
        self, host: str, port: int, scheme: Scheme, _flow: Mapping[str, object]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        assert (HOST, PORT, Scheme.POSTGRES) == (host, port, scheme)
        self.dials += 1
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        return reader, writer, "127.0.0.1"

    def decide_request(self, _facts: object) -> Any:
        raise AssertionError("there are no requests")

    secrets_to = lease = searched = decide_request

    # The acceptor.

    async def serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listener)
            self.flows.append(loop.create_task(self._accept(sock)))

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        first = b""
        with sock:
            while True:
                part = await loop.sock_recv(sock, 65536)
                if not part:
                    return
                first += part
                packet = read_hello(first) if first[:1] == b"\x16" else read_packet(first)
                if not isinstance(packet, NeedMore):
                    break
            host, hello = HOST, None
            if isinstance(packet, SslRequest | GssRequest | Startup):
                begun = await answer_prelude(sock, first, packet, tls=True)
                if isinstance(begun, Refused):
                    await loop.sock_sendall(sock, denial("postgres", begun.reason))
                    return
                assert isinstance(begun, tuple), begun
                packet, first = begun
            if isinstance(packet, Hello):
                host, hello = packet.sni, packet
            elif isinstance(packet, CancelRequest):
                found = self.engine.cancellable(packet.key, PORT)
                if found is None:
                    return
                host = found
            else:
                return
            owned = socket.socket(fileno=sock.detach())
        reader, writer = await asyncio.open_connection(sock=owned)
        await self.engine.handle(
            InspectedFlow(reader, writer, first, host, PORT, Scheme.POSTGRES, ("93.184.216.34", PORT), hello,
                          ("192.0.2.2", 40000), os.urandom(8).hex())
        )  # fmt: skip
        writer.close()

    # The client.

    @property
    def root(self) -> Path:
        path = self.directory / "sandbox-root.pem"
        path.write_text(self.sandbox_root.pem)
        return path

    def dsn(self, **more: str) -> str:
        options = {
            "host": HOST,
            "hostaddr": "127.0.0.1",
            "port": str(self.port),
            "user": "anyone",
            "dbname": "postgres",
            "sslmode": "verify-full",
            "sslrootcert": str(self.root),
            "connect_timeout": "20",
            "gssencmode": "disable",
            **more,
        }
        return " ".join(f"{name}='{value}'" for name, value in options.items())

    async def connect(self, **more: str) -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(self.dsn(**more), autocommit=True)

    async def refusal(self, **more: str) -> str:
        """Return the text with which a client's connection fails."""
        with pytest.raises(psycopg.OperationalError) as caught:
            await self.connect(**more)
        return str(caught.value)

    def records(self, kind: str, decision: str) -> list[dict[str, object]]:
        return [
            {name: value for name, value in fields.items() if value is not None}
            for one, verdict, fields in self.audit.records
            if (one, verdict) == (kind, decision)
        ]


@contextlib.asynccontextmanager
async def served(rig: Rig) -> AsyncIterator[Rig]:
    """Run the gateway's side of `rig`."""
    intermediate = rig.sandbox_root.intermediate("Sandbox Worker")
    rig.engine = FlowEngine(
        http1=Http1Flow,
        http2=FlowConnection,
        postgres=rig.framing,
        decider=rig,
        allowance=rig,
        secrets=rig,
        sessions=rig,
        recorder=rig.audit,
        dialler=rig,
        identity=LeafMint(intermediate.pem, "", intermediate.key_pem),
        ledger=Ledger.fresh(),
        upstream_roots=rig.upstream_root.pem,
        limits=rig.limits,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        rig.port = listener.getsockname()[1]
        front = asyncio.get_running_loop().create_task(rig.serve(listener))
        try:
            yield rig
        finally:
            front.cancel()
            for task in rig.flows:
                task.cancel()
            await asyncio.gather(front, *rig.flows, return_exceptions=True)
            assert 0 == rig.engine.flows
            assert 0 == len(rig.framing.keys)


@pytest.fixture(scope="session")
def database_root() -> Authority:
    return Authority.root("Database Root")


@pytest.fixture(scope="session")
def database(database_root: Authority) -> Iterator[Cluster]:
    """A server with TLS. Its users log in in different ways."""
    leaf = database_root.leaf(HOST)
    with running(port=reserve_port(), listen="127.0.0.1") as cluster, tempfile.TemporaryDirectory() as kept:
        key, certificate = Path(kept, "server.key"), Path(kept, "server.crt")
        key.write_text(leaf.key_pem)
        certificate.write_text(leaf.pem)
        cluster.ask(f"CREATE ROLE {USER} LOGIN PASSWORD '{PASSWORD}'")
        cluster.ask("CREATE DATABASE other OWNER app")
        cluster.ask("SET password_encryption = md5; CREATE ROLE hashed LOGIN PASSWORD 'canary-of-hashed'")
        cluster.secure(key, certificate)
        access = cluster.data / "pg_hba.conf"
        ways = (("hashed", "md5"), ("cleartext", "password"), ("trusted", "trust"))
        lines = "".join(f"hostssl all {user} 127.0.0.1/32 {way}\n" for user, way in ways)
        access.write_text(f"{lines}{access.read_text()}")
        cluster.ask("CREATE ROLE cleartext LOGIN PASSWORD 'canary-in-the-clear'; CREATE ROLE trusted LOGIN")
        cluster.ask("SELECT pg_reload_conf()")
        yield cluster


@pytest.fixture(scope="session")
def sandbox_ca() -> Authority:
    return Authority.root("Sandbox Root")


@pytest.fixture
async def rig(tmp_path: Path, database: Cluster, database_root: Authority, sandbox_ca: Authority) -> AsyncIterator[Rig]:
    async with served(Rig(tmp_path, database.port, database_root, sandbox_ca)) as made:
        yield made


type Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Impostor:
    """A server of the test's own. `heard` is everything that its clients sent inside TLS."""

    rig: Rig
    heard: bytearray = field(default_factory=bytearray)


@contextlib.asynccontextmanager
async def impostor(
    rig: Rig, talk: Talk, leaf: Authority | None = None, answer: bytes = b"S"
) -> AsyncIterator[Impostor]:
    """Have `rig` dial a server that accepts TLS, and then does what `talk` does."""
    made = Impostor(rig)
    shown = leaf or rig.upstream_root.leaf(HOST)
    path = rig.directory / "impostor.pem"
    path.write_text(shown.pem + shown.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, ssl.SSLError):
            await reader.readexactly(8)
            writer.write(answer)
            await writer.drain()
            if answer == b"S":
                await writer.start_tls(context)
                read = reader.read

                async def heard(count: int = -1) -> bytes:
                    part = await read(count)
                    made.heard += part
                    return part

                reader.read = heard  # type: ignore[method-assign]
                await talk(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    rig.upstream = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
