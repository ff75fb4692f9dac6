"""A real worker between a real sandbox namespace and a test internet. The verdict is made at the far end.

Every namespace here is the test's own. 93.184.216.x are addresses on its loopback, and no packet leaves the machine.
It tests `gateway/accept.py`, `gateway/ingress.py`, `gateway/inspection.py` and `gateway/worker.py`.
"""

import contextlib
import datetime
import json
import os
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from policy.compiled import DENY_ALL, CompiledPolicy
from policy.facts import Scheme
from policy.injection import InjectionKind, InjectionPlan
from policy.names import HostPattern
from policy.rules import Action, DnsSettings, Endpoint, Limits, Precedence, Rule, RuleList
from runtimes.net.nft import render_gateway
from runtimes.net.plan import PLAN
from runtimes.rings import RingFiles, Rings
from testbed.internet import whole_lines
from testbed.namespaces import make as make_namespace
from testbed.namespaces import remove as remove_namespace
from tests import ring_state
from tests.conftest import representatives
from tests.stacks import INTERNET
from tests.stopping import stop
from vault import keyring
from wire import bind_unix, frames
from wire.api import vaultd as vapi
from wire.api import worker as wapi
from wire.api import zygote as zapi
from wire.codec import decode
from wire.operations import Notification, Ping, Request, answer_type, operation, parameters
from wire.sockets import LISTEN_FD

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
PREFIX = f"{INTERNET}-gwt-{os.getpid()}"
DNS = "93.184.216.53"
WEB = "93.184.216.34"
SECRET = "tok-5f1d7a90c2"
SCOPED = "scoped-88b1e0"
UID = 700003000 + os.getpid() % 1000
TIMEOUT = 60.0


def certificate(host: str = "good.example.com") -> tuple[str, str]:
    """Return a self-signed certificate and its key, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return made.public_bytes(pem).decode(), private.decode()


def run(*command: str, text: str | None = None) -> None:
    subprocess.run(command, check=True, input=text, text=True, capture_output=True, timeout=30)


def within[T](namespace: str, work: Callable[[], T]) -> T:
    """Run `work` on a separate thread in a network namespace. Sockets that it creates stay there."""

    def enter() -> T:
        with open(f"/run/netns/{namespace}", "rb") as handle:
            os.setns(handle.fileno(), os.CLONE_NEWNET)
        return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter).result(timeout=30)


@dataclass
class Internet:
    """A DNS server and a TCP server. Each records what reached it."""

    namespace: str
    dns: socket.socket
    web: socket.socket
    zone: dict[str, str]
    certificate: str
    key: str
    questions: list[str] = field(default_factory=list)
    accepted: list[socket.socket] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)

    def serve(self) -> None:
        threading.Thread(target=self._dns, daemon=True).start()
        threading.Thread(target=self._web, daemon=True).start()

    def _dns(self) -> None:
        import dnslib

        with contextlib.suppress(OSError):
            while True:
                data, peer = self.dns.recvfrom(4096)
                query = dnslib.DNSRecord.parse(data)
                name = str(query.q.qname).rstrip(".")
                self.questions.append(name)
                reply = query.reply()
                if name in self.zone:
                    reply.add_answer(dnslib.RR(query.q.qname, rdata=dnslib.A(self.zone[name]), ttl=60))
                else:
                    reply.header.rcode = 3
                self.dns.sendto(reply.pack(), peer)

    def _web(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.web.accept()
                sock.settimeout(TIMEOUT)
                self.accepted.append(sock)
                self.arrived.set()

    def forget(self) -> None:
        for sock in self.accepted:
            sock.close()
        self.accepted.clear()
        self.questions.clear()
        self.arrived.clear()

    def next_connection(self) -> socket.socket:
        assert self.arrived.wait(TIMEOUT), "nobody connected"
        self.arrived.clear()
        return self.accepted[-1]


@dataclass
class Channel:
    """hostd's end of a wire channel, blocking."""

    sock: socket.socket
    last: int = 0
    notices: list[dict[str, Any]] = field(default_factory=list)

    def call(self, op: str, fds: tuple[int, ...] = (), **parameters: Any) -> dict[str, Any]:
        self.last += 1
        frames.send(self.sock, {"id": self.last, "op": op, **parameters}, fds)
        while True:
            received = frames.receive(self.sock)
            assert received is not None, "channel ended"
            message, _ = received
            if "op" in message:
                self.notices.append(message)
            elif message.get("id") == self.last:
                assert "ok" in message, message
                return dict(message["ok"])

    def ask[Answer](self, request: Request[Answer], *fds: int) -> Answer:
        answer = self.call(operation(request), fds, **parameters(request))
        return cast(Answer, decode(answer_type(request), answer))

    def tell(self, notification: Notification, *fds: int) -> None:
        frames.send(self.sock, {"op": operation(notification), **parameters(notification)}, fds)

    def notice(self) -> dict[str, Any]:
        if self.notices:
            return self.notices.pop(0)
        received = frames.receive(self.sock)
        assert received is not None
        return received[0]


def channel(sock: socket.socket) -> Channel:
    sock.settimeout(TIMEOUT)
    return Channel(sock)


@dataclass
class Rig:
    """Everything that outlives one worker."""

    zygote: Channel
    auditd: Channel
    audit_directory: Path
    internet: Internet
    vaultd: Channel
    roots: str
    errors: int
    generation: int = 0
    ring: RingFiles | None = None
    """That of the present worker."""

    @property
    def constants(self) -> zapi.Prepare:
        """The constants of all workers. WEB is on the loopback of the same namespace that workers dial from."""
        return zapi.Prepare(self.roots, (f"{DNS}:53",), str(PLAN.inside), (f"{WEB}/32",))

    @property
    def sandbox(self) -> str:
        return f"sbx-{self.generation:08x}{os.getpid():016x}"

    def records(self) -> list[dict[str, Any]]:
        if self.ring is not None:
            ring_state.drained(self.ring)
        lines = []
        for path in sorted(self.audit_directory.rglob("*.jsonl")):
            lines += whole_lines(path)
        return [line for line in lines if line.get("generation") == self.generation]


@dataclass
class Gate:
    """One worker. `root` is the authority that its sandbox trusts."""

    rig: Rig
    pid: int
    control: Channel
    guard: int
    ingress: Path
    root: str
    ledger: int
    ring: RingFiles

    def configure(self, rules: CompiledPolicy) -> str:
        return self.give(json.dumps(rules.to_json()))

    def give(self, policy: str) -> str:
        """Configure it with any text."""
        return self.control.ask(wapi.Configure(self.rig.sandbox, self.rig.generation, policy)).digest

    def dial(self, address: str = WEB, port: int = 443) -> socket.socket:
        def connect() -> socket.socket:
            return socket.create_connection((address, port), timeout=TIMEOUT)

        return within(f"{PREFIX}-sbx", connect)

    def ask(self, name: str, qtype: str = "A", server: str = "192.0.2.1", tcp: bool = False) -> Any:
        import dnslib

        query = dnslib.DNSRecord.question(name, qtype)
        query.add_ar(dnslib.EDNS0(udp_len=1232))

        def exchange() -> bytes:
            kind = socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM
            with socket.socket(socket.AF_INET, kind) as sock:
                sock.settimeout(TIMEOUT)
                sock.connect((server, 53))  # Only answers from that very address are received.
                data = query.pack()
                sock.sendall(struct.pack("!H", len(data)) + data if tcp else data)
                if not tcp:
                    return sock.recv(4096)
                with sock.makefile("rb") as stream:
                    return stream.read(struct.unpack("!H", stream.read(2))[0])

        return dnslib.DNSRecord.parse(within(f"{PREFIX}-sbx", exchange))


def policy(*hosts: str) -> CompiledPolicy:
    rules = tuple(
        Rule(
            id=f"r{number}",
            action=Action.ALLOW,
            hosts=(HostPattern(host),),
            endpoints=(Endpoint(443, Scheme.HTTPS),),
        )
        for number, host in enumerate(hosts)
    )
    return CompiledPolicy("test", (RuleList("test", Precedence.DENY_WINS, rules=rules),))


@pytest.fixture(scope="module")
def namespaces() -> Iterator[None]:
    names = [f"{PREFIX}-{part}" for part in ("sbx", "gw", "up")]
    sbx, gw, up = names
    try:
        for name in names:
            make_namespace(name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run(
            *("ip", "-n", sbx, "link", "add", "eth0", "address", PLAN.inside_mac, "type", "veth"),
            *("peer", "name", "gw0", "address", PLAN.gateway_mac, "netns", gw),
        )
        run("ip", "-n", gw, "addr", "add", f"{PLAN.gateway}/30", "dev", "gw0")
        run("ip", "-n", gw, "link", "set", "gw0", "up")
        run("ip", "-n", sbx, "addr", "add", f"{PLAN.inside}/30", "dev", "eth0")
        run("ip", "-n", sbx, "link", "set", "eth0", "up")
        # Like in a slot: the gateway drops answers to its own ARP requests, so an entry that expires would disconnect
        # it.
        for name, link, peer, mac in (
            (gw, "gw0", PLAN.inside, PLAN.inside_mac),
            (sbx, "eth0", PLAN.gateway, PLAN.gateway_mac),
        ):
            run("ip", "-n", name, "neigh", "replace", str(peer), "lladdr", mac, "dev", link, "nud", "permanent")
        run("ip", "-n", sbx, "route", "add", "default", "via", str(PLAN.gateway))
        for address in (DNS, WEB):
            run("ip", "-n", up, "addr", "add", f"{address}/32", "dev", "lo")
        run("ip", "netns", "exec", gw, "nft", "-f", "-", text=render_gateway(PLAN))
        yield
    finally:
        for name in names:
            remove_namespace(name)


@pytest.fixture(scope="module")
def internet(namespaces: None) -> Iterator[Internet]:
    def sockets() -> tuple[socket.socket, socket.socket]:
        dns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        dns.bind((DNS, 53))
        web = socket.create_server((WEB, 443))
        return dns, web

    zone = {"good.example.com": WEB, "bad.example.com": WEB, "inner.example.com": "10.0.0.7"}
    made = Internet(f"{PREFIX}-up", *within(f"{PREFIX}-up", sockets), zone, *certificate())
    made.serve()
    yield made
    made.web.shutdown(socket.SHUT_RDWR)
    made.web.close()
    made.dns.close()
    made.forget()


@pytest.fixture(scope="module")
def auditd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Channel, Path]]:
    base = tmp_path_factory.mktemp("audit")
    config = base / "audit.json"
    config.write_text(
        json.dumps({"directory": str(base / "log"), "uids": [0], "sync": "group",
                    "max_file_bytes": 1 << 24, "max_files": 0})
    )  # fmt: skip
    with daemon("audit.auditd", config, base / "audit.sock") as made:
        yield made, base / "log"


@contextlib.contextmanager
def daemon(module: str, config: Path, path: Path, **inherited: int) -> Iterator[Channel]:
    """Return a daemon of the product, once it listens on `path`."""
    with bind_unix(path) as listener:
        fds = {LISTEN_FD: listener.fileno()} | inherited
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(config)],
            cwd=ROOT,
            pass_fds=tuple(fds.values()),
            env=os.environ | {name: str(fd) for name, fd in fds.items()},
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                sock.connect(str(path))
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, f"{module} did not start"
                select.select([], [], [], 0.02)
        made = channel(sock)
        made.call("ping")  # A daemon accepts descriptors once it has accepted the connection.
        yield made
    finally:
        sock.close()
        process.terminate()
        process.wait(TIMEOUT)


@pytest.fixture(scope="module")
def vaultd(auditd: tuple[Channel, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Channel]:
    base = tmp_path_factory.mktemp("vault")
    keyring.create(base / "master.key")
    config = base / "vault.json"
    (base / "store").mkdir(mode=0o700)
    config.write_text(
        json.dumps(
            {
                "directory": str(base / "store"),
                "uids": [0],
                "master_key_file": str(base / "master.key"),
            }
        )
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        auditd[0].call("attach", (ours.fileno(),), sandbox=None, generation=1, producer="vault")
        with daemon("vault.vaultd", config, base / "vault.sock", SALLYPORT_AUDIT_FD=theirs.fileno()) as made:
            anything, narrow = vapi.Scope(), vapi.Scope(("GET",), ("/v1/*",))
            for name, value, scope in (("api-token", SECRET, anything), ("scoped", SCOPED, narrow)):
                binding = vapi.BindingForm(("good.example.com",), (443,), ("https",), scope, None)
                made.ask(vapi.Put(name, vapi.Value(value), binding))
            yield made


@pytest.fixture(scope="module")
def rig(
    internet: Internet,
    auditd: tuple[Channel, Path],
    vaultd: Channel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    config = tmp_path_factory.mktemp("zygote") / "zygote.json"
    config.write_text("{}")
    ours, theirs = socket.socketpair()
    log, refused = config.with_name("stderr"), config.with_name("refused")
    stderr = log.open("wb")
    zygote = [sys.executable, "-m", "tests.system.calls", str(config), str(refused), "refused"]
    process = subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{PREFIX}-up", *zygote],
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
        env={"PATH": os.environ["PATH"], "SALLYPORT_CONTROL_FD": str(theirs.fileno())},
        stderr=stderr,
    )
    theirs.close()
    made = Rig(channel(ours), *auditd, internet, vaultd, internet.certificate, stderr.fileno())
    try:
        made.zygote.call("ping")
        with pytest.raises(AssertionError, match="fork comes after prepare"):
            made.zygote.ask(zapi.Fork(made.sandbox, 1, UID, UID, ()))
        with pytest.raises(AssertionError, match="unknown limit"):
            made.zygote.ask(replace(made.constants, limits={"surprise": 1}))
        yield made
    finally:
        ours.close()
        stderr.close()
        status = process.wait(TIMEOUT)
        sys.stderr.write(log.read_text())
        assert status == 0
    # No worker of these tests tried to import a module that the zygote had not imported.
    assert [] == [line for line in log.read_text().splitlines() if "is not preloaded" in line]
    # None of them made a system call that it is not allowed.
    assert "" == refused.read_text()


@contextlib.contextmanager
def worker(rig: Rig, directory: Path, uid: int = UID, **constants: Any) -> Iterator[Gate]:
    rig.generation += 1
    rig.zygote.ask(replace(rig.constants, **constants))
    control, control_child = socket.socketpair()
    audit, audit_child = socket.socketpair()
    vault, vault_child = socket.socketpair()
    grants = tuple(vapi.GrantForm(secret, "good.example.com", 443, "https") for secret in ("api-token", "scoped"))
    opened = rig.vaultd.ask(vapi.OpenSandbox(rig.sandbox, "l-1", grants))
    rig.vaultd.ask(vapi.Attach(rig.sandbox, rig.generation), vault.fileno())
    rig.auditd.call("attach", (audit.fileno(),), sandbox=rig.sandbox, generation=rig.generation, producer="gateway")
    rings = Rings(directory / f"rings-{rig.generation}")
    ring = rings.create((rig.sandbox, rig.generation))
    rig.auditd.call("attach_ring", ring.for_auditd, sandbox=rig.sandbox, generation=rig.generation)
    namespace = os.open(f"/run/netns/{PREFIX}-gw", os.O_RDONLY)
    guard_read, guard_write = os.pipe()
    path = directory / f"ingress-{rig.generation}.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(16)
        ledger = os.memfd_create("ledger")
        os.ftruncate(ledger, 4096)
        channels = (control_child, audit_child, vault_child)
        fds = (*channels, namespace, guard_read, listener, ledger, *ring.for_worker, rig.errors)
        fork = zapi.Fork(rig.sandbox, rig.generation, uid, uid, ())
        forked = rig.zygote.ask(fork, *(item if isinstance(item, int) else item.fileno() for item in fds))
    for item in (control_child, audit_child, vault_child, audit, vault):
        item.close()
    os.close(namespace)
    os.close(guard_read)
    gate = Gate(rig, forked.pid, channel(control), guard_write, path, opened.root_pem, ledger, ring)
    rig.ring = ring
    try:
        yield gate
    finally:
        rig.ring = None
        control.close()
        os.close(ledger)
        ring.close()
        with contextlib.suppress(OSError):
            os.close(guard_write)
        notice = rig.zygote.notice()
        assert notice["op"] == "exited" and notice["pid"] == gate.pid, notice


@pytest.fixture
def gate(rig: Rig, tmp_path: Path) -> Iterator[Gate]:
    rig.internet.forget()
    with worker(rig, tmp_path) as made:
        made.control.ask(Ping())
        yield made


def hello(name: str | None) -> bytes:
    """The first bytes of a real TLS client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def ended(sock: socket.socket) -> bytes:
    """Return the bytes until the end, a reset included."""
    data = b""
    with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
        while part := sock.recv(65536):
            data += part
    return data


def test_an_allowed_flow_is_relayed_byte_for_byte_in_both_directions_with_half_close(gate: Gate) -> None:
    gate.configure(policy("good.example.com"))
    first = hello("good.example.com")
    up, down = os.urandom(3_000_000), os.urandom(3_000_000)
    with gate.dial() as client:
        client.sendall(first)
        server = gate.rig.internet.next_connection()

        def send() -> None:
            client.sendall(up)
            client.shutdown(socket.SHUT_WR)

        with ThreadPoolExecutor(2) as pool:
            sending = pool.submit(send)
            received = pool.submit(ended, server)
            assert first + up == received.result(TIMEOUT)
            sending.result(TIMEOUT)
            answering = pool.submit(lambda: (server.sendall(down), server.shutdown(socket.SHUT_WR)))
            assert down == ended(client)
            answering.result(TIMEOUT)


def test_the_flow_is_dialled_where_the_gateway_resolves_and_not_where_the_sandbox_aimed(gate: Gate) -> None:
    gate.configure(policy("good.example.com"))
    with gate.dial("198.18.0.1") as client:
        client.sendall(hello("good.example.com"))
        assert WEB == gate.rig.internet.next_connection().getsockname()[0]


def test_a_denied_name_is_blocked_in_dns_and_nothing_of_it_reaches_the_upstream(gate: Gate) -> None:
    gate.configure(policy("good.example.com"))
    denied = gate.ask("bad.example.com")
    assert (3, []) == (denied.header.rcode, denied.rr)
    assert b"\x00\x0f" in gate.ask("bad.example.com").pack()
    assert [] == gate.rig.internet.questions
    assert [WEB] == [str(item.rdata) for item in gate.ask("good.example.com").rr]
    assert ["good.example.com"] == gate.rig.internet.questions


def test_dns_answers_come_from_whatever_resolver_was_asked_over_udp_and_tcp(gate: Gate) -> None:
    gate.configure(policy("good.example.com"))
    for tcp in (False, True):
        answer = gate.ask("good.example.com", server="8.8.8.8", tcp=tcp)
        assert [WEB] == [str(item.rdata) for item in answer.rr]


def test_questions_beyond_the_rate_are_counted_together_and_end_their_connection(gate: Gate) -> None:
    import dnslib

    gate.configure(replace(policy("good.example.com"), dns=DnsSettings(query_rate=1, query_burst=2)))
    with ThreadPoolExecutor(40) as pool:
        began = time.monotonic()
        answers = list(pool.map(lambda _: gate.ask("bad.example.com").header.rcode, range(40)))
        lasted = time.monotonic() - began
    assert 1 < lasted  # Some waited for their turn.
    refused = answers.count(dnslib.RCODE.REFUSED)
    assert 2 < 40 - refused <= 2 + lasted  # The burst, and one a second.
    question = dnslib.DNSRecord.question("bad.example.com").pack()
    with gate.dial(port=53) as client:
        client.sendall(100 * (struct.pack("!H", len(question)) + question))
        rest, codes = ended(client), []
    while rest:
        size = struct.unpack_from("!H", rest)[0] + 2
        codes.append(dnslib.DNSRecord.parse(rest[2:size]).header.rcode)
        rest = rest[size:]
    # There may have been time for one or the other that is within the rate.
    assert [dnslib.RCODE.NXDOMAIN] * (len(codes) - 1) + [dnslib.RCODE.REFUSED] == codes
    assert len(codes) < 50
    deadline = time.monotonic() + TIMEOUT
    while sum(item["count"] for item in of_rule(gate, "dns.query_rate")) < refused + 1:
        assert time.monotonic() < deadline
        select.select([], [], [], 0.02)
    assert len(of_rule(gate, "dns.query_rate")) < refused // 2


def test_a_private_address_is_neither_answered_nor_dialled(gate: Gate) -> None:
    gate.configure(policy("inner.example.com"))
    assert [] == gate.ask("inner.example.com").rr
    with gate.dial() as client:
        client.sendall(hello("inner.example.com"))
        assert bytes((21, 3, 3, 0, 2, 2, 49)) == ended(client)


@pytest.mark.parametrize(
    "first",
    [hello("bad.example.com"), b"GET / HTTP/1.1\r\nHost: bad.example.com\r\n\r\n"],
    ids=["tls", "http"],
)
def test_a_denied_host_gets_an_answer_and_no_upstream_connection(gate: Gate, first: bytes) -> None:
    gate.configure(policy("good.example.com"))
    with gate.dial() as client:
        client.sendall(first)
        answer = ended(client)
    assert answer == bytes((21, 3, 3, 0, 2, 2, 112)) or answer.startswith(b"HTTP/1.1 403 ")
    assert ([], []) == (gate.rig.internet.accepted, gate.rig.internet.questions)
    verdicts = [item for item in gate.rig.records() if item["kind"] == "flow"]
    assert [("deny", "bad.example.com")] == [(item["decision"], item["host"]) for item in verdicts]


def test_tls_without_a_name_is_denied_and_nothing_is_dialled(gate: Gate) -> None:
    gate.configure(policy("good.example.com"))
    with gate.dial() as client:
        client.sendall(hello(None))
        assert bytes((21, 3, 3, 0, 2, 2, 112)) == ended(client)
    assert [] == gate.rig.internet.accepted


def test_a_hello_in_single_bytes_has_the_verdict_of_the_whole(gate: Gate) -> None:
    gate.configure(policy("good.example.com"))
    with gate.dial() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        first = hello("good.example.com")
        for byte in first[:-1]:
            client.sendall(bytes((byte,)))
        assert [] == gate.rig.internet.accepted
        client.sendall(first[-1:])
        server = gate.rig.internet.next_connection()
        with server.makefile("rb") as stream:
            assert first == stream.read(len(first))


UNKNOWN = {
    "SSH": b"SSH-2.0-x\r\n",
    "zeros": b"\x00\x01\x02\x03",
    "Redis": b"*1\r\n$4\r\nPING\r\n",
    "SSL 2": b"\x80\x2e\x01",
}


@pytest.mark.parametrize("name", representatives(UNKNOWN, "SSH", "zeros", "SSL 2"))
def test_bytes_of_no_known_protocol_are_reset_without_an_upstream_connection(gate: Gate, name: str) -> None:
    first = UNKNOWN[name]
    gate.configure(policy("good.example.com"))
    with gate.dial() as client:
        client.sendall(first)
        with pytest.raises(ConnectionResetError):
            assert b"" != client.recv(1)
            raise AssertionError("closed without a reset")
    assert [] == gate.rig.internet.accepted


def test_everything_is_refused_before_the_first_configuration(gate: Gate) -> None:
    with (
        contextlib.suppress(ConnectionResetError, BrokenPipeError),
        gate.dial() as client,
    ):  # A reset can overtake the connect.
        client.sendall(hello("good.example.com"))
        assert b"" == ended(client)
    assert 5 == gate.ask("good.example.com").header.rcode
    assert ([], []) == (gate.rig.internet.accepted, gate.rig.internet.questions)


def test_a_new_policy_cuts_the_live_flows_it_no_longer_permits_and_keeps_the_others(gate: Gate) -> None:
    gate.configure(policy("good.example.com", "bad.example.com"))
    with gate.dial() as good, gate.dial() as bad:
        good.sendall(hello("good.example.com"))
        kept = gate.rig.internet.next_connection()
        bad.sendall(hello("bad.example.com"))
        cut = gate.rig.internet.next_connection()
        good_only = policy("good.example.com")
        assert good_only.digest == gate.configure(good_only)
        assert b"" == ended(bad)
        ended(cut)
        kept.sendall(b"still here")
        assert b"still here" == good.recv(100)


@pytest.mark.parametrize("mapped", [{}, {"good.example.com": (WEB,)}], ids=["DNS", "the operator's map"])
def test_a_new_policy_cuts_live_flows_to_an_address_that_it_denies_and_opens_no_other(
    rig: Rig, tmp_path: Path, mapped: dict[str, tuple[str, ...]]
) -> None:
    """For every source of the address."""
    rig.internet.forget()
    with worker(rig, tmp_path, host_addresses=mapped) as gate:
        gate.configure(policy("good.example.com"))
        with gate.dial() as client:
            client.sendall(hello("good.example.com"))
            cut = gate.rig.internet.next_connection()
            assert cut.recv(1)  # the flow is live
            gate.configure(replace(policy("good.example.com"), always_deny=(f"{WEB}/32",)))
            assert b"" == ended(client)
            ended(cut)
        known = len(gate.rig.internet.accepted)
        with gate.dial() as client:
            client.sendall(hello("good.example.com"))
            assert bytes((21, 3, 3, 0, 2, 2, 49)) == ended(client)
        assert known == len(gate.rig.internet.accepted)
        assert [] == gate.ask("good.example.com").rr
        assert of_rule(gate, "always-deny:1")


def test_a_dead_guard_cuts_live_flows_and_stops_dialling_until_a_new_one(gate: Gate) -> None:
    gate.configure(policy("good.example.com"))
    with gate.dial() as client:
        client.sendall(hello("good.example.com"))
        assert gate.rig.internet.next_connection().recv(1)  # the flow is live
        os.close(gate.guard)
        assert b"" == ended(client)
    with gate.dial() as client:
        client.sendall(hello("good.example.com"))
        assert bytes((21, 3, 3, 0, 2, 2, 49)) == ended(client)
    assert 1 == len(gate.rig.internet.accepted)
    new_read, gate.guard = os.pipe()
    gate.control.tell(wapi.Guarded(), new_read)
    gate.control.ask(Ping())  # Its answer follows the notification.
    os.close(new_read)
    with gate.dial() as client:
        client.sendall(hello("good.example.com"))
        gate.rig.internet.next_connection()


def test_a_killed_worker_leaves_refused_connections_and_the_zygote_says_so(gate: Gate) -> None:
    gate.configure(policy("good.example.com"))
    os.kill(gate.pid, signal.SIGKILL)
    received = gate.rig.zygote.notice()
    assert {"op": "exited", "pid": gate.pid, "status": -9} == received
    gate.rig.zygote.notices.append(received)
    with pytest.raises(ConnectionRefusedError):
        gate.dial()


def filters(pid: int) -> str:
    """Return the line of a process's status with the number of its system call filters."""
    return next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "Seccomp_filters" in line)


def test_a_worker_killed_before_its_calls_are_recorded_leaves_the_next_one_alone(rig: Rig, tmp_path: Path) -> None:
    zygote = rig.zygote.ask(zapi.Identify()).pid
    (recorder,) = map(int, Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split())
    with worker(rig, tmp_path) as gate:
        gate.control.ask(Ping())
        confined = filters(gate.pid)
    stop(recorder)
    try:
        with worker(rig, tmp_path) as gate:
            deadline = time.monotonic() + TIMEOUT
            while filters(gate.pid) != confined:
                assert time.monotonic() < deadline
            os.kill(gate.pid, signal.SIGKILL)
            received = rig.zygote.notice()
            assert {"op": "exited", "pid": gate.pid, "status": -9} == received
            rig.zygote.notices.append(received)
    finally:
        os.kill(recorder, signal.SIGCONT)
    with worker(rig, tmp_path) as gate:
        gate.control.ask(Ping())


def test_a_configuration_that_is_not_one_changes_nothing(gate: Gate) -> None:
    digest = gate.configure(policy("good.example.com"))
    for text in ("", "{}", "null", json.dumps(DENY_ALL.to_json() | {"surprise": 1})):
        with pytest.raises(AssertionError, match="error"):
            gate.give(text)
    gate.rig.generation += 1
    with pytest.raises(AssertionError, match="of another sandbox or generation"):
        gate.configure(DENY_ALL)
    gate.rig.generation -= 1
    assert digest == gate.control.ask(wapi.Beat()).digest


def test_ingress_reaches_the_sandbox_and_only_with_a_port_that_listens(gate: Gate) -> None:
    gate.configure(DENY_ALL)
    inside = within(f"{PREFIX}-sbx", lambda: socket.create_server(("0.0.0.0", 8080)))
    inside.settimeout(TIMEOUT)
    with inside, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(TIMEOUT)
        client.connect(str(gate.ingress))
        client.sendall(struct.pack("!H", 8080))
        assert b"\x00" == client.recv(1)
        peer, address = inside.accept()
        with peer:
            assert str(PLAN.gateway) == address[0]
            client.sendall(b"ping")
            assert b"ping" == peer.recv(10)
            peer.sendall(b"pong")
            assert b"pong" == client.recv(10)
    for port in (0, 8081):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(TIMEOUT)
            client.connect(str(gate.ingress))
            client.sendall(struct.pack("!H", port))
            assert b"\x01" == client.recv(1)


def status_of(pid: int, thread: str) -> dict[str, str]:
    text = Path(f"/proc/{pid}/task/{thread}/status").read_text()
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def test_every_thread_of_a_worker_is_unprivileged_and_confined(gate: Gate) -> None:
    threads = os.listdir(f"/proc/{gate.pid}/task")
    assert len(threads) >= 2
    for thread in threads:
        status = status_of(gate.pid, thread)
        assert ["0" * 16] * 3 == [status[name].strip() for name in ("CapEff", "CapPrm", "CapAmb")]
        assert ("1", "2") == (status["NoNewPrivs"].strip(), status["Seccomp"].strip())
        assert [str(UID)] * 4 == status["Uid"].split()
        assert [str(UID)] * 4 == status["Gid"].split()
        assert "" == status["Groups"].strip()
    targets = [os.readlink(f"/proc/{gate.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{gate.pid}/fd")]
    assert 0 == sum(target.startswith("net:") for target in targets)


def mounts_of(pid: int, thread: str) -> list[list[str]]:
    lines = Path(f"/proc/{pid}/task/{thread}/mountinfo").read_text().splitlines()
    return [line.split() for line in lines]


def test_no_thread_of_a_worker_sees_a_file_system(gate: Gate) -> None:
    """One mount, read-only, closed and empty. The zygote that forked it still has all of its own."""
    gate.configure(policy("good.example.com"))
    zygote = gate.rig.zygote.ask(zapi.Identify()).pid
    assert len(mounts_of(zygote, str(zygote))) > 1
    assert [] != os.listdir(f"/proc/{zygote}/root")
    for thread in os.listdir(f"/proc/{gate.pid}/task"):
        (mount,) = mounts_of(gate.pid, thread)
        assert ["/", "ro,nosuid,nodev,noexec", "tmpfs"] == [mount[4], ",".join(mount[5].split(",")[:4]), mount[-3]]
        root = Path(f"/proc/{gate.pid}/task/{thread}/root")
        assert ([], 0, 0) == (os.listdir(root), root.stat().st_mode & 0o777, root.stat().st_uid)
        assert ["/", "/"] == [os.readlink(f"/proc/{gate.pid}/task/{thread}/{name}") for name in ("root", "cwd")]
        assert os.stat(root).st_ino == os.stat(f"/proc/{gate.pid}/task/{thread}/cwd").st_ino
    for fd in os.listdir(f"/proc/{gate.pid}/fd"):
        assert not Path(f"/proc/{gate.pid}/fd/{fd}").is_dir()


def limited(source: CompiledPolicy, **limits: int) -> CompiledPolicy:
    return replace(source, limits=Limits(**limits))


def of_rule(gate: Gate, rule: str) -> list[dict[str, Any]]:
    return [item for item in gate.rig.records() if item["decision"] == "deny" and item.get("rule") == rule]


def denials(gate: Gate, rule: str) -> list[tuple[str, str]]:
    return [(item["kind"], item["reason"]) for item in of_rule(gate, rule)]


def eventual_denials(gate: Gate, rule: str, count: int = 1) -> list[tuple[str, str]]:
    """Return the denials of `rule` once there are `count`, because a note can reach the log after the event."""
    deadline = time.monotonic() + TIMEOUT
    while len(found := denials(gate, rule)) < count:
        assert time.monotonic() < deadline, f"no denial by {rule}"
        select.select([], [], [], 0.02)
    return found


def test_a_spliced_flow_is_one_request_and_the_one_too_many_is_not_dialled(gate: Gate) -> None:
    gate.configure(limited(policy("good.example.com"), requests_per_minute=1))
    with gate.dial() as client:
        client.sendall(hello("good.example.com"))
        gate.rig.internet.next_connection()
        with gate.dial() as second:
            second.sendall(hello("good.example.com"))
            assert bytes((21, 3, 3, 0, 2, 2, 49)) == ended(second)
    assert 1 == len(gate.rig.internet.accepted)
    assert [("flow", "more than 1 requests in a minute")] == denials(gate, "limits")


def test_an_inspected_request_too_many_is_a_429(gate: Gate) -> None:
    gate.configure(limited(INJECTING, requests_per_minute=1))
    request = b"GET /v1 HTTP/1.1\r\nHost: good.example.com\r\nConnection: close\r\n\r\n"
    assert converse(gate, request)[1].startswith(b"HTTP/1.1 200 ")
    trust = ssl.create_default_context(cadata=gate.root)
    with trust.wrap_socket(gate.dial(), server_hostname="good.example.com") as client:
        client.sendall(request)
        answer = ended(client)
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"\r\nretry-after: " in answer
    assert 1 == len(gate.rig.internet.accepted)
    assert [("request", "more than 1 requests in a minute")] == denials(gate, "limits")


def test_the_byte_too_many_cuts_all_flows_and_is_not_sent(gate: Gate) -> None:
    first = hello("good.example.com")
    gate.configure(limited(policy("good.example.com"), bytes_out=2 * len(first) + 1000))
    with gate.dial() as one, gate.dial() as two:
        one.sendall(first)
        at_one = gate.rig.internet.next_connection()
        two.sendall(first)
        at_two = gate.rig.internet.next_connection()
        one.sendall(bytes(1000))
        with at_one.makefile("rb") as stream:
            assert first + bytes(1000) == stream.read(len(first) + 1000)
        two.sendall(b"X")
        assert [b"", b""] == [ended(one), ended(two)]
        assert [b"", first] == [ended(at_one), ended(at_two)]
    with gate.dial() as client:
        client.sendall(first)
        assert bytes((21, 3, 3, 0, 2, 2, 49)) == ended(client)
    assert 2 == len(gate.rig.internet.accepted)
    spent = ("flow", "the sandbox has sent as many bytes as its policy allows")
    assert [spent, spent] == eventual_denials(gate, "limits", 2)


def test_bytes_of_inspected_flows_count_too(gate: Gate) -> None:
    gate.configure(limited(INJECTING, bytes_out=20_000))
    trust = ssl.create_default_context(cadata=gate.root)
    upstream = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w") as pem:
        pem.write(gate.rig.internet.certificate + gate.rig.internet.key)
        pem.flush()
        upstream.load_cert_chain(pem.name)

    def serve() -> int:
        with upstream.wrap_socket(gate.rig.internet.next_connection(), server_side=True) as server:
            return len(ended(server))

    head = b"POST /v1 HTTP/1.1\r\nHost: good.example.com\r\nContent-Length: 60000\r\n\r\n"
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        with trust.wrap_socket(gate.dial(), server_hostname="good.example.com") as client:
            with contextlib.suppress(OSError):
                client.sendall(head + bytes(60_000))
            assert b"" == ended(client)
        assert serving.result(TIMEOUT) < 20_000
    assert [("flow", "the sandbox has sent as many bytes as its policy allows")] == eventual_denials(gate, "limits")


@pytest.mark.parametrize(("of_policy", "of_gateway"), [(1, 512), (512, 1)])
def test_the_smaller_cap_on_connections_holds(rig: Rig, tmp_path: Path, of_policy: int, of_gateway: int) -> None:
    rig.internet.forget()
    with worker(rig, tmp_path, limits={"connections": of_gateway}) as gate:
        _second_connection_is_refused(gate, of_policy)


def _second_connection_is_refused(gate: Gate, of_policy: int) -> None:
    gate.configure(limited(policy("good.example.com"), connections=of_policy))
    with gate.dial() as client:
        client.sendall(hello("good.example.com"))
        gate.rig.internet.next_connection()
        with contextlib.suppress(ConnectionResetError), gate.dial() as second:  # The reset can overtake the connect.
            assert b"" == ended(second)
    assert 1 == len(gate.rig.internet.accepted)
    assert [("flow", "too many connections at once")] == eventual_denials(gate, "connections")


def test_a_scoped_secret_goes_to_its_method_and_path_and_nowhere_else(rig: Rig, tmp_path: Path) -> None:
    rig.internet.forget()
    rule = INJECTING.rules[0]
    scoped = replace(rule, injections=(InjectionPlan("api", "scoped", InjectionKind.BEARER, "Authorization"),))
    with worker(rig, tmp_path) as gate:
        gate.configure(CompiledPolicy("scoped", (RuleList("scoped", Precedence.DENY_WINS, rules=(scoped,)),)))
        trust = ssl.create_default_context(cadata=gate.root)
        for method, path, inside in (
            ("POST", "/v1/x", False),  # vaultd refuses: no lease exists yet.
            ("GET", "/v1/x", True),
            ("GET", "/v2/x", False),  # The lease refuses.
            ("GET", "/v1/y", True),
        ):
            request = f"{method} {path} HTTP/1.1\r\nHost: good.example.com\r\nConnection: close\r\n\r\n".encode()
            if inside:
                assert b"Bearer " + SCOPED.encode() in converse(gate, request)[0]
                continue
            with trust.wrap_socket(gate.dial(), server_hostname="good.example.com") as client:
                client.sendall(request)
                assert ended(client).startswith(b"HTTP/1.1 403 ")
        assert 2 == len(rig.internet.accepted)
        expected = [f"scoped: the secret is not bound to this {what}" for what in ("method", "path")]
        assert [("request", reason) for reason in expected] == denials(gate, "api")


def test_each_decision_is_one_record_before_its_effect(gate: Gate) -> None:
    gate.configure(policy("good.example.com"))
    with gate.dial() as client:
        client.sendall(hello("good.example.com"))
        gate.rig.internet.next_connection()
        kinds = [(item["kind"], item["decision"], item.get("rule")) for item in gate.rig.records()]
        expected = [("gateway.configure", "info", None), ("flow", "allow", "r0"), ("connect", "allow", "resolved")]
        assert expected == kinds


def test_without_the_audit_log_nothing_passes(rig: Rig, tmp_path: Path) -> None:
    rig.internet.forget()
    with worker(rig, tmp_path) as gate:
        gate.configure(policy("good.example.com"))
        ours, theirs = socket.socketpair()
        gate.control.ask(wapi.Rebind(wapi.ChannelName.AUDIT), theirs.fileno())
        theirs.close()
        ours.close()
        ring_state.close(gate.ring)
        with gate.dial() as client:
            client.sendall(hello("good.example.com"))
            assert bytes((21, 3, 3, 0, 2, 2, 49)) == ended(client)
        assert 2 == gate.ask("good.example.com").header.rcode
    assert ([], []) == (rig.internet.accepted, rig.internet.questions)


def test_a_denial_answered_without_the_log_is_recorded_once_it_is_back(rig: Rig, tmp_path: Path) -> None:
    with worker(rig, tmp_path) as gate:
        gate.configure(policy("good.example.com"))
        ours, theirs = socket.socketpair()
        gate.control.ask(wapi.Rebind(wapi.ChannelName.AUDIT), theirs.fileno())
        theirs.close()
        ours.close()
        ring_state.close(gate.ring)
        with gate.dial() as client:
            client.sendall(hello("bad.example.com"))
            assert bytes((21, 3, 3, 0, 2, 2, 112)) == ended(client)
        assert 3 == gate.ask("worse.example.com").header.rcode
        assert "deny" not in {item["decision"] for item in rig.records()}

        ours, theirs = socket.socketpair()
        rig.auditd.call("attach", (ours.fileno(),), sandbox=rig.sandbox, generation=rig.generation, producer="gateway")
        gate.control.ask(wapi.Rebind(wapi.ChannelName.AUDIT), theirs.fileno())
        theirs.close()
        ours.close()
        wanted = {("flow", "deny", "bad.example.com"), ("dns", "deny", "worse.example.com")}
        deadline = time.monotonic() + TIMEOUT
        while not wanted <= {(item["kind"], item["decision"], item.get("host")) for item in rig.records()}:
            assert time.monotonic() < deadline, rig.records()
            time.sleep(0.05)


INJECTING = CompiledPolicy(
    "injecting",
    (
        RuleList(
            "injecting",
            Precedence.DENY_WINS,
            rules=(
                Rule(
                    id="api",
                    action=Action.ALLOW,
                    hosts=(HostPattern("good.example.com"),),
                    endpoints=(Endpoint(443, Scheme.HTTPS),),
                    injections=(InjectionPlan("api", "api-token", InjectionKind.BEARER, "Authorization"),),
                ),
            ),
        ),
    ),
)


def converse(gate: Gate, request: bytes) -> tuple[bytes, bytes, bytes]:
    """Make one inspected request. Return what the upstream got, what the client got, and the client's leaf."""
    trust = ssl.create_default_context(cadata=gate.root)
    upstream = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w") as pem:
        pem.write(gate.rig.internet.certificate + gate.rig.internet.key)
        pem.flush()
        upstream.load_cert_chain(pem.name)

    def serve() -> bytes:
        with upstream.wrap_socket(gate.rig.internet.next_connection(), server_side=True) as server:
            got = server.recv(65536)
            token = got.partition(b"Bearer ")[2].partition(b"\r\n")[0]
            server.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nyou sent %s" % (9 + len(token), token))
            return got

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        with trust.wrap_socket(gate.dial(), server_hostname="good.example.com") as client:
            leaf = client.getpeercert(binary_form=True)
            assert leaf is not None
            client.sendall(request)
            answer = ended(client)
        return serving.result(TIMEOUT), answer, leaf


def test_a_secret_is_injected_upstream_and_scrubbed_from_what_the_sandbox_sees(gate: Gate) -> None:
    gate.configure(INJECTING)
    request = b"GET /v1 HTTP/1.1\r\nHost: good.example.com\r\nConnection: close\r\nAuthorization: Bearer mine\r\n\r\n"
    upstream, answer, _ = converse(gate, request)
    assert [b"Bearer " + SECRET.encode()] == [
        line.partition(b": ")[2] for line in upstream.split(b"\r\n") if line.lower().startswith(b"authorization:")
    ]
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert SECRET.encode() not in answer
    text = json.dumps(gate.rig.records())
    assert SECRET not in text
    kinds = {(item["kind"], item["decision"]) for item in gate.rig.records()}
    assert {("flow", "allow"), ("request", "allow"), ("secret.use", "allow")} <= kinds


def test_two_workers_never_make_the_same_key(rig: Rig, tmp_path: Path) -> None:
    keys = set()
    for _ in range(2):
        rig.internet.forget()
        with worker(rig, tmp_path) as gate:
            gate.configure(INJECTING)
            leaf = converse(gate, b"GET / HTTP/1.1\r\nHost: good.example.com\r\nConnection: close\r\n\r\n")[2]
            keys.add(
                x509.load_der_x509_certificate(leaf)
                .public_key()
                .public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
            )
    assert 2 == len(keys)


def test_each_place_of_a_spliced_flow_has_its_own_name_in_the_log_when_the_worker_is_killed(
    rig: Rig, tmp_path: Path
) -> None:
    """The worker ends as soon as the far end has a byte. Everything on the wire is in the log already."""
    rig.internet.forget()
    with worker(rig, tmp_path) as gate:
        gate.configure(policy("good.example.com"))
        with gate.dial("198.18.0.1") as client:
            client.sendall(hello("good.example.com"))
            assert rig.internet.next_connection().recv(1)
            os.kill(gate.pid, signal.SIGKILL)
            ended(client)
        (record,) = [item for item in rig.records() if item["kind"] == "connect"]
    assert {
        "decision": "allow",
        "host": "good.example.com",
        "port": 443,
        "scheme": "https",
        "destination": "198.18.0.1",
        "address": WEB,
        "policy_name": "test",
    }.items() <= record.items()


def test_the_entry_of_the_operator_that_denied_is_in_the_log(gate: Gate) -> None:
    """Its text, in every record of its denials, for each protocol."""
    gate.configure(replace(policy("good.example.com"), always_deny=("other.example.com", "*.bad.example.com")))
    with gate.dial() as client:
        client.sendall(hello("a.bad.example.com"))
        assert bytes((21, 3, 3, 0, 2, 2, 112)) == ended(client)
    assert 3 == gate.ask("b.bad.example.com").header.rcode
    denied = [item for item in gate.rig.records() if item["decision"] == "deny"]
    assert {"flow", "dns"} == {item["kind"] for item in denied}
    assert {("always-deny:2", "*.bad.example.com", "test")} == {
        (item["rule"], item["entry"], item["policy_name"]) for item in denied
    }
