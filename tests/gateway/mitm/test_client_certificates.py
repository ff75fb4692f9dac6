"""A client certificate is presented on connections of its own, for the requests of its rule. The server is the judge.

It tests `gateway/presented.py`, `gateway/tls/contexts.py` and both framings.
"""

import asyncio
import base64
import contextlib
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import h2.events
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from gateway.presented import Presented, read
from gateway.tls.contexts import UpstreamContext
from policy.compiled import SecretAt
from policy.decision import AllowRequest
from policy.facts import RequestFacts, Scheme
from policy.injection import InjectionKind, InjectionPlan, SecretPlan, SubstitutionPlan, Surface
from policy.rules import Endpoint
from tests.client_certificates import DAY, Times, authority, key_pem
from tests.gateway.exchange_cases import ACCEPTED, HANDSHAKE
from tests.gateway.mitm.conftest import Lab, Rig, Upstream, running
from tests.gateway.mitm.test_streams import GET, Server
from tests.gateway.mitm.test_streams import Caller as Http2Caller
from vault.secret import Secret

SECONDS = 20.0
ROOT = authority("Client Root")
MIDDLE = ROOT.issue("Middle", ca=True)
A, B = MIDDLE.issue("a", rsa.generate_private_key(65537, 2048)), MIDDLE.issue("b")
PLANS = {
    f"/{name}": InjectionPlan(f"p/{name}", name, InjectionKind.CLIENT_CERTIFICATE, "") for name in ("a", "b", "token")
}
PLANS["/both"] = PLANS["/a"]
PLACEHOLDER = SubstitutionPlan("p/both", "token", "{TOKEN}", (Surface.BODY,))
"""A request to `/both` has a certificate, and waits for its whole body."""
PLANS["/token"] = InjectionPlan("p/token", "token", InjectionKind.BEARER, "Authorization")

type Shown = tuple[str | None, list[str]]


@dataclass
class CertificateRig(Rig):
    """A rig with a rule for each path of `PLANS`, and the values of their secrets. Other paths get no secret."""

    values: dict[str, str] = field(default_factory=dict)

    def decide_request(self, facts: RequestFacts) -> AllowRequest:
        plan = PLANS.get(facts.path)
        substitutions = (PLACEHOLDER,) if facts.path == "/both" else ()
        return AllowRequest("open") if plan is None else AllowRequest(plan.binding, (plan,), None, substitutions)

    def secrets_to(self, host: str) -> tuple[SecretAt, ...]:
        return tuple(SecretAt(plan, host, Endpoint(443, Scheme.HTTPS)) for plan in (*PLANS.values(), PLACEHOLDER))

    async def lease(self, plan: SecretPlan, _facts: RequestFacts, _size: int | None) -> Secret:
        return Secret(self.values[plan.secret])

    async def searched(self, use: SecretAt) -> tuple[Secret, ...]:
        return (Secret(self.values[use.plan.secret]),)


@dataclass
class Far:
    """A server that stores, for each connection, the name in the client's certificate and the paths of its requests."""

    shown: list[Shown] = field(default_factory=list)
    ended: list[asyncio.Event] = field(default_factory=list)
    body: bytes = b"ok"
    received: list[bytes] = field(default_factory=list)
    """The bodies of the requests that have one."""

    def _begin(self, writer: asyncio.StreamWriter) -> tuple[list[str], asyncio.Event]:
        paths, ended = list[str](), asyncio.Event()
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        self.shown.append((None if certificate is None else common_name(certificate), paths))
        self.ended.append(ended)
        return paths, ended

    async def over_http1(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        paths, ended = self._begin(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, ssl.SSLError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                paths.append(head.split(b" ")[1].decode())
                if length := int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0"):
                    self.received.append(await reader.readexactly(length))
                if b"upgrade: websocket" in head.lower():
                    fields = b"".join(b"%s: %s\r\n" % one for one in ACCEPTED)
                    writer.write(b"HTTP/1.1 101 Switching Protocols\r\n" + fields + b"\r\n\x81\x02hi")
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(self.body) + self.body)
                await writer.drain()
        ended.set()
        writer.close()

    async def over_http2(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        paths, ended = self._begin(writer)

        async def answer(server: Server, event: h2.events.Event) -> None:
            if isinstance(event, h2.events.DataReceived):
                self.received.append(event.data)
            if isinstance(event, h2.events.RequestReceived):
                paths.append(dict(event.headers)[b":path"].decode())
                server.state.send_headers(event.stream_id, [(":status", "200")])
                server.state.send_data(event.stream_id, self.body, end_stream=True)

        await Server(answer).serve(reader, writer)
        ended.set()

    def by_name(self) -> dict[str | None, set[str]]:
        """Return the paths that were asked for under each name."""
        found: dict[str | None, set[str]] = {}
        for name, paths in self.shown:
            found.setdefault(name, set()).update(paths)
        return found


def common_name(der: bytes) -> str:
    (name,) = x509.load_der_x509_certificate(der).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(name.value)


class Client:
    """A client of one flow, over either protocol."""

    def __init__(self, rig: Rig, http2: bool) -> None:
        self._rig, self._http2, self._stream = rig, http2, -1
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._caller: Http2Caller | None = None

    async def ask(self, path: str) -> tuple[int, bytes]:
        """Return the status and body of one request."""
        async with asyncio.timeout(SECONDS):
            return await (self._over_http2(path) if self._http2 else self._over_http1(path))

    async def _over_http1(self, path: str) -> tuple[int, bytes]:
        reader, writer = self._ends = self._ends or await self._rig.connect()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: good.test\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return int(head.split(b" ")[1]), await reader.readexactly(int(length or b"0"))

    async def _over_http2(self, path: str) -> tuple[int, bytes]:
        stream = await self.send(path)
        return await self.read(stream)

    async def send(self, path: str) -> int:
        if self._caller is None:
            self._caller = Http2Caller(await self._rig.speak_h2())
        self._stream += 2
        self._caller.call(self._stream, [*GET[:3], (":path", path)])
        return self._stream

    async def read(self, stream: int) -> tuple[int, bytes]:
        assert self._caller is not None
        await self._caller.hear(h2.events.StreamEnded, stream)
        (head,) = [
            one for one in self._caller.heard if isinstance(one, h2.events.ResponseReceived) and one.stream_id == stream
        ]
        return int(dict(head.headers)[b":status"]), self._caller.body(stream)

    def close(self) -> None:
        if self._caller is not None:
            self._caller.close()
        if self._ends is not None:
            self._ends[1].close()


@dataclass
class Site:
    """A sandbox's engine, the server, and a maker of clients."""

    rig: CertificateRig
    far: Far
    http2: bool
    clients: list[Client] = field(default_factory=list)

    def client(self) -> Client:
        self.clients.append(Client(self.rig, self.http2))
        return self.clients[-1]


@contextlib.asynccontextmanager
async def served(
    lab: Lab,
    client: str = "http/1.1",
    server: str = "http/1.1",
    change: Callable[[ssl.SSLContext], object] | None = None,
) -> AsyncIterator[Site]:
    """Serve a site whose server asks for a client certificate of `ROOT`, and needs none unless `change` says so."""
    far = Far()
    context = lab.tls(lab.upstream_root.leaf("good.test"))
    context.set_alpn_protocols([server])
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=ROOT.pem)
    if change is not None:
        change(context)
    values = {"a": A.value, "b": B.value, "token": "token-of-this-site"}
    rig = CertificateRig(lab.directory, Upstream(), lab.upstream_root, lab.sandbox_root, values=values)
    rig.upstream.serve = far.over_http2 if server == "h2" else far.over_http1  # type: ignore[method-assign]
    site = Site(rig, far, client == "h2")
    async with running(rig, context):
        yield site
        for one in site.clients:
            one.close()


PROTOCOLS = [("http/1.1", "http/1.1"), ("h2", "http/1.1"), ("h2", "h2")]
"""Those of client and server."""


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(("client", "server"), PROTOCOLS)
async def test_each_rule_has_connections_with_its_own_certificate_and_the_others_have_none(
    lab: Lab, client: str, server: str, version: ssl.TLSVersion
) -> None:
    """In one flow and over two flows. The server verifies the chain up to the root that it knows."""

    def only(context: ssl.SSLContext) -> None:
        context.minimum_version = context.maximum_version = version

    async with served(lab, client, server, only) as site:
        for _ in range(2):
            one = site.client()
            for path in ("/open", "/a", "/token", "/b", "/a", "/open", "/b"):
                assert (200, b"ok") == await one.ask(path)
    assert {None: {"/open", "/token"}, "a": {"/a"}, "b": {"/b"}} == site.far.by_name()
    if server == client:  # HTTP/1.1: one for each set of secrets, in both flows; HTTP/2: one for each name and flow
        assert {"http/1.1": 4, "h2": 2 * 3}[client] == len(site.far.shown)


@pytest.mark.parametrize(("client", "server"), [("http/1.1", "http/1.1"), ("h2", "h2")])
async def test_the_log_names_the_connection_of_each_request(lab: Lab, client: str, server: str) -> None:
    """A request on a new connection has a `connect` record. The allow record of a later one names its connection."""
    async with served(lab, client, server) as site:
        one = site.client()
        for path in ("/open", "/a", "/a", "/b"):
            await one.ask(path)
        records = site.rig.audit.records
    allows = [fields for kind, said, fields in records if (kind, said) == ("request", "allow")]
    connects = [fields["request_id"] for kind, _, fields in records if kind == "connect"]
    assert [allows[number]["request_id"] for number in (0, 1, 3)] == connects
    assert [False, False, True, False] == ["address" in fields for fields in allows]
    assert ["a", "a", "b"] == [fields["secret"] for kind, _, fields in records if kind == "secret.use"]


async def test_requests_at_the_same_time_in_one_http2_flow_do_not_share_a_connection(lab: Lab) -> None:
    """Also while the connections are being opened."""
    paths = ["/a", "/open", "/b"] * 8
    async with served(lab, "h2", "h2") as site:
        one = site.client()
        streams = [await one.send(path) for path in paths]
        async with asyncio.timeout(SECONDS):
            assert {(200, b"ok")} == {await one.read(stream) for stream in streams}
    assert {None: {"/open"}, "a": {"/a"}, "b": {"/b"}} == site.far.by_name()
    assert 3 == len(site.far.shown)


@pytest.mark.parametrize(("client", "server"), PROTOCOLS)
async def test_a_request_that_waits_for_its_body_has_its_certificate(lab: Lab, client: str, server: str) -> None:
    """A placeholder in the body is replaced. A connection without a certificate is open before."""
    body = b'{"token": "{TOKEN}"}'
    fields = [("content-type", "application/json"), ("content-length", str(len(body)))]
    async with served(lab, client, server) as site:
        if client == "h2":
            caller = Http2Caller(await site.rig.speak_h2())
            caller.call(1, GET)
            await caller.hear(h2.events.StreamEnded, 1)
            caller.call(3, [(":method", "POST"), *GET[1:3], (":path", "/both"), *fields], ends=False)
            caller.state.send_data(3, body, end_stream=True)
            caller.flush()
            await caller.hear(h2.events.StreamEnded, 3)
            caller.close()
        else:
            reader, writer = await site.rig.connect()
            for head in ("GET /open", "POST /both"):
                more = "".join(f"{name}: {value}\r\n" for name, value in fields) if head.startswith("POST") else ""
                writer.write(f"{head} HTTP/1.1\r\nHost: good.test\r\n{more}\r\n".encode())
                writer.write(body if more else b"")
                async with asyncio.timeout(SECONDS):
                    assert (await reader.readuntil(b"\r\n\r\nok")).startswith(b"HTTP/1.1 200 ")
            writer.close()
    assert ["a"] == [name for name, paths in site.far.shown if "/both" in paths]
    assert b'{"token": "token-of-this-site"}' == b"".join(site.far.received)
    assert 2 == len(site.far.shown)


@pytest.mark.parametrize(("client", "server"), PROTOCOLS)
async def test_a_server_that_needs_a_certificate_gets_no_request_of_another_rule(
    lab: Lab, client: str, server: str
) -> None:
    def needs(context: ssl.SSLContext) -> None:
        context.verify_mode = ssl.CERT_REQUIRED

    async with served(lab, client, server, needs) as site:
        one = site.client()
        assert (200, b"ok") == await one.ask("/a")
        assert 502 == (await one.ask("/open"))[0]
        assert (200, b"ok") == await site.client().ask("/a")
    assert {"a": {"/a"}} == site.far.by_name()


@pytest.mark.parametrize(("client", "server"), PROTOCOLS)
async def test_another_certificate_of_a_secret_goes_on_another_connection(lab: Lab, client: str, server: str) -> None:
    """Also where no revocation has come."""
    async with served(lab, client, server) as site:
        one = site.client()
        assert (200, b"ok") == await one.ask("/a")
        site.rig.values["a"] = MIDDLE.issue("next").value
        assert (200, b"ok") == await one.ask("/a")
    assert [("a", ["/a"]), ("next", ["/a"])] == site.far.shown


@pytest.mark.parametrize(("client", "server"), PROTOCOLS)
async def test_a_revocation_ends_the_connections_that_presented_the_certificate(
    lab: Lab, client: str, server: str
) -> None:
    async with served(lab, client, server) as site:
        one = site.client()
        await one.ask("/a")
        site.rig.engine.revoke(frozenset({"a"}))
        async with asyncio.timeout(SECONDS):
            await site.far.ended[0].wait()
        assert (200, b"ok") == await site.client().ask("/a")
    assert [("a", ["/a"]), ("a", ["/a"])] == site.far.shown


NOW = datetime.now(UTC)
UNUSABLE = {
    "expired": (ROOT.issue("a", times=Times(NOW - 2 * DAY, NOW - DAY)).value, "the client certificate expired at 20"),
    "not valid yet": (ROOT.issue("a", times=Times(NOW + DAY, NOW + 2 * DAY)).value, "is not valid before 20"),
    "the key of another one": (
        key_pem(B.key) + A.chain_pem,
        "the private key does not belong to the first certificate",
    ),
    "a token": ("token-that-is-no-certificate", "the value of the secret is no client certificate"),
}


@pytest.mark.parametrize("case", UNUSABLE)
@pytest.mark.parametrize("client", ["http/1.1", "h2"])
async def test_a_certificate_that_cannot_be_used_denies_the_request_with_the_reason(
    lab: Lab, client: str, case: str
) -> None:
    """Nothing is dialled, the page and the record have the reason, and other requests of the flow continue."""
    value, reason = UNUSABLE[case]
    async with served(lab, client, client) as site:
        site.rig.values["a"] = value
        one = site.client()
        status, page = await one.ask("/a")
        assert (403, 0) == (status, site.rig.dials)
        assert reason.encode() in page
        assert value[:40].encode() not in page
        assert (200, b"ok") == await one.ask("/open")
        (denied,) = [fields for kind, said, fields in site.rig.audit.records if (kind, said) == ("request", "deny")]
        assert ("p/a", "a") == (denied["rule"], denied["secret"])
        assert reason in str(denied["reason"])
    assert {None: {"/open"}} == site.far.by_name()


@pytest.mark.parametrize("client", ["http/1.1", "h2"])
async def test_a_pooled_connection_does_not_outlive_its_certificate(lab: Lab, client: str) -> None:
    """The validity is judged at each request, also where a connection is open that has presented the certificate."""
    async with served(lab, client, client) as site:
        one, ends = site.client(), NOW + 10 * DAY
        site.rig.values["a"] = MIDDLE.issue("a", times=Times(NOW - DAY, ends)).value
        assert (200, b"ok") == await one.ask("/a")
        effects = site.rig.engine._effects
        site.rig.engine._effects = late = replace(effects, date=lambda: ends)
        for flow in site.rig.engine._live:
            flow.session.effects = late
        status, page = await one.ask("/a")
        assert 403 == status
        assert b"the client certificate expired at" in page
        assert 403 == (await site.client().ask("/a"))[0]
    assert [("a", ["/a"])] == site.far.shown


@pytest.mark.parametrize("client", ["http/1.1", "h2"])
async def test_a_response_with_the_key_is_scrubbed(lab: Lab, client: str) -> None:
    """The private part of it, in a response to any request to the host. The certificate itself is no secret."""
    async with served(lab, client, client) as site:
        site.far.body = B.value.encode()
        for path in ("/b", "/open"):
            status, shown = await site.client().ask(path)
            assert (200, len(site.far.body)) == (status, len(shown))
            assert B.chain_pem.encode() in shown
            key = B.key.private_bytes(
                serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
            )
            der = base64.b64decode(b"".join(key_pem(B.key).encode().split(b"\n")[1:-2]))
            assert key[7:39] in der
            at = der.index(key[7:39])
            text = base64.b64encode(der)
            assert text[(at + 2) // 3 * 4 : (at + 30) // 3 * 4] not in shown.replace(b"\n", b"")
            assert b"*" * 30 in shown


async def test_a_websocket_presents_the_certificate_of_its_rule(lab: Lab) -> None:
    async with served(lab) as site:
        reader, writer = await site.rig.connect()
        fields = b"".join(b"%s: %s\r\n" % one for one in HANDSHAKE)
        writer.write(b"GET /a HTTP/1.1\r\nHost: good.test\r\n" + fields + b"\r\n")
        async with asyncio.timeout(SECONDS):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
            assert b"\x81\x02hi" == await reader.readexactly(4)
        assert (200, b"ok") == await site.client().ask("/open")
        writer.close()
    assert [("a", ["/a"]), (None, ["/open"])] == site.far.shown


_written: list[str] | None = None


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _written is not None and event == "open" and arguments[1] is not None and "r" not in str(arguments[1]):
        _written.append(str(arguments[0]))


async def test_the_key_is_used_from_memory(lab: Lab) -> None:
    """No file is opened for writing while a certificate is presented. The control writes one."""
    global _written
    sys.addaudithook(_hook)
    async with served(lab) as site:
        _written = []
        try:
            assert (200, b"ok") == await site.client().ask("/a")
            assert [] == _written
            (lab.directory / "control").write_text("x")
            assert [str(lab.directory / "control")] == _written
        finally:
            _written = None
    assert [("a", ["/a"])] == site.far.shown


# The TLS of one connection, without an engine.


def handshake(
    upstream: UpstreamContext, server: ssl.SSLContext, presented: Presented | None
) -> tuple[bytes, bytes | None, bool]:
    """Run a handshake in memory. Return what the server received, the client's certificate, and the success."""
    client = upstream.connect("good.test", [b"http/1.1"], presented)
    arrived, left = ssl.MemoryBIO(), ssl.MemoryBIO()
    far = server.wrap_bio(arrived, left, server_side=True)
    log, done = b"", False
    for _ in range(8):
        with contextlib.suppress(Exception):
            client.do_handshake()
        with contextlib.suppress(Exception):
            part = client.bio_read(1 << 20)
            log += part
            arrived.write(part)
        with contextlib.suppress(ssl.SSLError):
            far.do_handshake()
            done = True
        if data := left.read():
            client.bio_write(data)
    return log, far.getpeercert(binary_form=True) if done else None, done


@pytest.mark.parametrize("wrong", ["nothing", "the name", "the root", "the end"])
def test_a_server_that_is_not_verified_does_not_see_the_certificate(
    lab: Lab, upstream_root: object, wrong: str
) -> None:
    """In TLS 1.2 a certificate is sent in the clear, so the server's bytes show whether it was sent."""
    leaves = {
        "nothing": lambda: lab.upstream_root.leaf("good.test"),
        "the name": lambda: lab.upstream_root.leaf("other.test"),
        "the root": lambda: lab.stranger("Other Root").leaf("good.test"),
        "the end": lambda: lab.upstream_root.leaf("good.test", since=-2 * DAY, until=-DAY),
    }
    presented = read(PLANS["/b"], Secret(B.value), NOW, None).presented
    upstream = UpstreamContext(lab.upstream_root.pem)
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        server = lab.tls(leaves[wrong]())
        server.verify_mode = ssl.CERT_OPTIONAL
        server.load_verify_locations(cadata=ROOT.pem)
        server.minimum_version = server.maximum_version = version
        log, seen, done = handshake(upstream, server, presented)
        der = B.certificate.public_bytes(serialization.Encoding.DER)
        assert (wrong == "nothing") is done
        assert (der if wrong == "nothing" else None) == seen
        if version is ssl.TLSVersion.TLSv1_2:
            assert (wrong == "nothing") is (der in log)


def test_a_connection_without_a_certificate_has_none_after_one_with_it(lab: Lab) -> None:
    """Both are made from one `UpstreamContext`."""
    presented = read(PLANS["/b"], Secret(B.value), NOW, None).presented
    upstream = UpstreamContext(lab.upstream_root.pem)
    server = lab.tls(lab.upstream_root.leaf("good.test"))
    server.verify_mode = ssl.CERT_OPTIONAL
    server.load_verify_locations(cadata=ROOT.pem)
    seen = [handshake(upstream, server, one)[1] for one in (presented, None, presented)]
    assert [False, True, False] == [one is None for one in seen]
