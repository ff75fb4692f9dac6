"""A client, an engine and upstream servers, all on loopback, with real TLS between them."""

import asyncio
import datetime
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import h2.config
import h2.connection
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gateway.budget import Over
from gateway.effects import SecretRefused
from gateway.engines.engine import FlowEngine
from gateway.engines.http1.flow import Http1Flow
from gateway.engines.mitm.connection import FlowConnection
from gateway.engines.port import EngineLimits, InspectedFlow
from gateway.ledger import Ledger
from gateway.placeholders import NONE, Placeholders
from gateway.tls.contexts import UpstreamContext
from gateway.tls.hello import Hello, NeedMore, RequestHead, read_head, read_hello
from gateway.tls.identity import LeafMint
from policy.compiled import SecretAt
from policy.decision import AllowRequest, Deny
from policy.facts import RequestFacts, Scheme
from policy.injection import InjectionKind, InjectionPlan, SecretPlan
from policy.rules import Endpoint
from tests.gateway.record_forms import PlainForms
from vault.secret import Secret

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
SECRET = "tok/en+3v4l-UE_9~x"
PLAN = InjectionPlan("api", "api-token", InjectionKind.BEARER, "Authorization")


@dataclass
class Authority:
    """A certificate and its key, which can sign others."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def root(cls, name: str) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(_sign(name, key, name, key, ca=True, path_length=None), key)

    def intermediate(self, name: str) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.certificate.subject.rfc4514_string().removeprefix("CN=")
        return Authority(_sign(name, key, issuer, self.key, ca=True, path_length=0), key)

    def leaf(self, host: str, *, since: datetime.timedelta = -DAY, until: datetime.timedelta = DAY) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self.certificate.subject.rfc4514_string().removeprefix("CN=")
        return Authority(_sign(host, key, issuer, self.key, ca=False, path_length=None, since=since, until=until), key)

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def key_pem(self) -> str:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()


def _sign(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    ca: bool,
    path_length: int | None,
    since: datetime.timedelta = -DAY,
    until: datetime.timedelta = DAY,
) -> x509.Certificate:
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + since)
        .not_valid_after(NOW + until)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=path_length), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if ca:
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        builder = builder.add_extension(usage, critical=True)
    else:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def server_context(leaf: Authority, directory: Path, alpn: list[str] | None = None) -> ssl.SSLContext:
    path = directory / f"{leaf.certificate.serial_number}.pem"
    path.write_text(leaf.pem + leaf.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    if alpn:
        context.set_alpn_protocols(alpn)
    return context


type Reply = Callable[[bytes, bytes, asyncio.StreamWriter], Awaitable[None]]


async def hello_reply(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


@dataclass
class Upstream:
    """A server that stores every byte that it receives above TLS, and answers with `reply`."""

    reply: Reply = hello_reply
    received: list[bytearray] = field(default_factory=list)
    bodies: list[int] = field(default_factory=list)
    keep: bool = True
    port: int = 0

    @property
    def data(self) -> bytes:
        return b"".join(self.received)

    @property
    def requests(self) -> int:
        return self.data.count(b" HTTP/1.1\r\n")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        log = bytearray()
        self.received.append(log)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                log += head
                body = await self._body(head.lower(), reader, log)
                await self.reply(head, body, writer)
                await writer.drain()
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, OSError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def _body(self, head: bytes, reader: asyncio.StreamReader, log: bytearray) -> bytes:
        if b"transfer-encoding: chunked" in head:
            body = b""
            while True:
                line = await reader.readuntil(b"\r\n")
                chunk = await reader.readexactly(int(line, 16) + 2)
                log += line + chunk
                body += chunk[:-2]
                if line == b"0\r\n":
                    return body
        if b"content-length: " in head:
            left = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            self.bodies.append(left)
            body = b""
            while left:
                part = await reader.read(min(left, 65536))
                if not part:
                    raise asyncio.IncompleteReadError(b"", left)
                left -= len(part)
                if self.keep:
                    log += part
                    body += part
            return body
        return b""


@dataclass
class Audit(PlainForms):
    """An audit log that accepts records into a list, or fails."""

    records: list[tuple[str, str, dict[str, object]]] = field(default_factory=list)
    failing: frozenset[str] = frozenset()

    async def accept(self, kind: str, decision: str, **fields: object) -> None:
        if kind in self.failing:
            raise ConnectionError("the log is gone")
        self.records.append((kind, decision, fields))

    def note(self, kind: str, decision: str, **fields: object) -> None:
        self.records.append((kind, decision, fields))

    def kinds(self) -> list[tuple[str, str]]:
        return [(kind, decision) for kind, decision, _ in self.records if decision != "info"]


@dataclass
class Rig:
    """The parts around one engine. A test can replace `decide` and `lease`."""

    directory: Path
    upstream: Upstream
    upstream_root: Authority
    sandbox_root: Authority
    audit: Audit = field(default_factory=Audit)
    secret: str = SECRET
    plan: InjectionPlan = PLAN
    dials: int = 0
    dial_port: int = 0
    port: int = 0
    scheme: Scheme = Scheme.HTTPS
    facts: list[RequestFacts] = field(default_factory=list)
    decide: Callable[[RequestFacts], AllowRequest | Deny] | None = None
    flows: list[asyncio.Task[None]] = field(default_factory=list)
    engine: FlowEngine = None  # type: ignore[assignment]
    trusted: UpstreamContext | None = None
    broken_lease: bool = False
    over: Over | None = None
    leased: list[RequestFacts] = field(default_factory=list)
    sizes: list[int | None] = field(default_factory=list)
    refuse_lease: Callable[[RequestFacts], str | None] = lambda _facts: None

    def decide_request(self, facts: RequestFacts) -> AllowRequest | Deny:
        self.facts.append(facts)
        if self.decide is not None:
            return self.decide(facts)
        if facts.path.startswith("/denied"):
            return Deny("no-denied", "this path is closed")
        if facts.path.startswith("/open"):
            return AllowRequest("open")
        return AllowRequest("api", (self.plan,))

    def request(self) -> Over | None:
        return self.over

    async def lease(self, plan: SecretPlan, facts: RequestFacts, size: int | None) -> Secret:
        if self.broken_lease:
            raise ConnectionError("the vault is gone")
        assert (self.plan, "good.test") == (plan, facts.host)
        self.leased.append(facts)
        self.sizes.append(size)
        if refused := self.refuse_lease(facts):
            raise SecretRefused(refused)
        return Secret(self.secret)

    bound: bool | None = None
    """Whether policy binds a secret to the host. None: as `decide_request` does, unless a test decides itself."""
    former: tuple[str, ...] = ()
    broken_sought: bool = False
    sought_for: list[SecretAt] = field(default_factory=list)

    def secrets_to(self, host: str) -> tuple[SecretAt, ...]:
        bound = self.decide is None if self.bound is None else self.bound
        return (SecretAt(self.plan, host, Endpoint(443, Scheme.HTTPS)),) if bound else ()

    def placeholders(self) -> Placeholders:
        return NONE

    async def searched(self, use: SecretAt) -> tuple[Secret, ...]:
        if self.broken_sought:
            raise ConnectionError("the vault is gone")
        self.sought_for.append(use)
        return tuple(map(Secret, (self.secret, *self.former)))

    async def dial(
        self, host: str, port: int, scheme: Scheme, flow: Mapping[str, object]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        self.dials += 1
        reader, writer = await asyncio.open_connection("127.0.0.1", self.dial_port)
        return reader, writer, "127.0.0.1"

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Act as a worker: read until the host is known, then hand the flow to the engine."""
        task = asyncio.current_task()
        assert task is not None
        self.flows.append(task)
        first = b""
        verdict: object = NeedMore(1)
        while isinstance(verdict, NeedMore):
            part = await reader.read(65536)
            if not part:
                writer.close()
                return
            first += part
            verdict = read_hello(first) if self.scheme is Scheme.HTTPS else read_head(first)
        if not isinstance(verdict, Hello | RequestHead):
            writer.close()
            return
        host = verdict.sni if isinstance(verdict, Hello) else verdict.host
        await self.engine.handle(
            InspectedFlow(
                reader=reader,
                writer=writer,
                first_bytes=first,
                host=host,
                port=443 if self.scheme is Scheme.HTTPS else 80,
                scheme=self.scheme,
                original_destination=("203.0.113.9", 443),
                hello=verdict if isinstance(verdict, Hello) else None,
                peer=("192.0.2.2", 40000),
                flow_id=f"f{len(self.flows)}",
            )
        )

    def only_h2(self) -> ssl.SSLContext:
        context = _OnlyH2(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=self.sandbox_root.pem)
        return context

    async def speak_h2(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, h2.connection.H2Connection]:
        context = self.only_h2()
        context.set_alpn_protocols([])
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=context, server_hostname="good.test")
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        client.initiate_connection()
        return reader, writer, client

    def client_context(self, *alpn: str) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.sandbox_root.pem)
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context

    async def connect(
        self, host: str = "good.test", alpn: tuple[str, ...] = ("http/1.1",)
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.scheme is Scheme.HTTP:
            return await asyncio.open_connection("127.0.0.1", self.port)
        return await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.client_context(*alpn), server_hostname=host
        )

    async def exchange(self, raw: bytes, host: str = "good.test") -> bytes:
        """Send `raw`, then read until the other side closes or is silent for a moment.

        The moment is short as soon as there is a complete answer to each request.
        """
        reader, writer = await self.connect(host)
        writer.write(raw)
        try:
            return await read_all(reader, asked=raw)
        finally:
            writer.close()


class _OnlyH2(ssl.SSLContext):
    """A context without http/1.1: httpx always offers that too, for any options."""

    def set_alpn_protocols(self, alpn_protocols: object) -> None:
        super().set_alpn_protocols(["h2"])


_SOON, _FIRST = 0.1, 10.0
_REQUEST = re.compile(rb"^([A-Z]+) \S+ HTTP/1\.[01]\r\n", re.MULTILINE)
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)


def only(headers: Iterable[tuple[bytes, bytes]] | None, name: bytes) -> bytes:
    """Return the value of a field that occurs exactly once."""
    (value,) = [value for found, value in headers or () if found == name]
    return value


def answered(asked: bytes, data: bytes) -> bool:
    """Return whether `data` has a complete final HTTP/1.1 answer to each request in `asked`.

    It returns False if that is uncertain.
    """
    methods = _REQUEST.findall(asked)
    while methods:
        head, found, rest = data.partition(b"\r\n\r\n")
        status = head[9:12]
        if not found or not status.isdigit() or status == b"101":
            return False
        data = rest
        if status.startswith(b"1"):
            continue
        if methods.pop(0) == b"HEAD" or status in (b"204", b"304"):
            continue
        if _CHUNKED.search(head):
            _, found, data = rest.partition(b"0\r\n\r\n")
            if not found:
                return False
            continue
        length = _LENGTH.search(head)
        if length is None or len(rest) < int(length[1]):
            return False
        data = rest[int(length[1]) :]
    return True


async def ended(reader: asyncio.StreamReader) -> bool:
    """Wait for the end of a connection. Return False if bytes arrive before it.

    Raises:
        TimeoutError: the connection does not end.
    """
    async with asyncio.timeout(_FIRST):
        try:
            return not await reader.read(1)
        except (OSError, ssl.SSLError):
            return True


async def read_all(
    reader: asyncio.StreamReader, quiet: float = 0.7, asked: bytes = b"", first: float = _FIRST
) -> bytes:
    """Read until the end or a silence of `quiet` seconds; with `asked`, a short silence is enough after its answer.

    The first byte is awaited for `first` seconds, because a busy machine is silent, too.
    """
    data = b""
    try:
        while True:
            if asked and answered(asked, data):
                quiet = _SOON
            async with asyncio.timeout(quiet if data else first):
                part = await reader.read(65536)
            if not part:
                return data
            data += part
    except (TimeoutError, OSError, ssl.SSLError):
        return data


@pytest.fixture(scope="session")
def upstream_root() -> Authority:
    return Authority.root("Upstream Root")


@pytest.fixture(scope="session")
def sandbox_root() -> Authority:
    return Authority.root("Sandbox Root")


@pytest.fixture
async def rig(tmp_path: Path, upstream_root: Authority, sandbox_root: Authority) -> AsyncIterator[Rig]:
    upstream = Upstream()
    rig = Rig(tmp_path, upstream, upstream_root, sandbox_root)
    context = server_context(upstream_root.leaf("good.test"), tmp_path)
    async with running(rig, context):
        yield rig


class running:
    """A context that serves `rig` with `context` upstream (None: plain TCP)."""

    def __init__(self, rig: Rig, context: ssl.SSLContext | None, limits: EngineLimits | None = None) -> None:
        self.rig, self.context, self.limits = rig, context, limits

    async def __aenter__(self) -> Rig:
        rig = self.rig
        intermediate = rig.sandbox_root.intermediate("Sandbox Worker")
        rig.engine = FlowEngine(
            http1=Http1Flow,
            http2=FlowConnection,
            decider=rig,
            allowance=rig,
            secrets=rig,
            recorder=rig.audit,
            dialler=rig,
            identity=LeafMint(intermediate.pem, "", intermediate.key_pem),
            ledger=Ledger.fresh(),
            upstream_roots=rig.upstream_root.pem,
            limits=self.limits,
            trusted=rig.trusted,
        )
        self.upstream = await asyncio.start_server(rig.upstream.serve, "127.0.0.1", 0, ssl=self.context)
        self.front = await asyncio.start_server(rig.accept, "127.0.0.1", 0)
        rig.dial_port = self.upstream.sockets[0].getsockname()[1]
        rig.port = self.front.sockets[0].getsockname()[1]
        return rig

    async def __aexit__(self, *_: object) -> None:
        self.front.close()
        self.upstream.close()
        for task in self.rig.flows:
            task.cancel()
        await asyncio.gather(*self.rig.flows, return_exceptions=True)
        assert self.rig.engine.flows == 0
        self.rig.engine.drop_idle()


@dataclass
class Lab:
    """Parts for tests that need another server, limit or protocol than those of `rig`."""

    directory: Path
    upstream_root: Authority
    sandbox_root: Authority

    def tls(self, leaf: Authority) -> ssl.SSLContext:
        return server_context(leaf, self.directory)

    def running(
        self, context: ssl.SSLContext | None, limits: EngineLimits | None = None, scheme: Scheme = Scheme.HTTPS
    ) -> running:
        return running(
            Rig(self.directory, Upstream(), self.upstream_root, self.sandbox_root, scheme=scheme),
            context,
            limits,
        )

    def stranger(self, name: str) -> Authority:
        return Authority.root(name)


@pytest.fixture
def lab(tmp_path: Path, upstream_root: Authority, sandbox_root: Authority) -> Lab:
    return Lab(tmp_path, upstream_root, sandbox_root)
