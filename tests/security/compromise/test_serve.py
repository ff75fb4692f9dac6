"""A compromised `serve`: what it sends to hostd and vaultd selects and narrows, and is no word of the operator's.

The hostile code runs in the process of `serve`, with its user. The verdict is taken at the far end: a server of the
attacker with an authority of its own, the demo internet's request log, and the log of what was put in force.
"""

import json
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from demo.internet import API, UP_ADDRESS, Internet, in_namespace, ip
from demo.pki import Authority, make_authority, write_host_certificate
from demo.sandboxes import Secrets
from demo.stack import IMAGE
from policy.compile import compile_named
from policy.load import load
from tests.security.compromise.stack import CompromisedStack, Hostile

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
GRANT = {"secret": "api-token", "host": API, "port": 443, "scheme": "https"}


def until[T](ask: Callable[[], T], seconds: float = 60.0) -> T:
    """What `ask` says, once that is true; the last word when the time is over."""
    deadline = time.monotonic() + seconds
    while not (answer := ask()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer


@dataclass
class Rogue:
    """A server of the attacker that says it is the API, under an authority of the attacker's."""

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
        """The control: whoever does trust the attacker's authority and goes to its address is heard."""
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
    threading.Thread(target=rogue.serve, args=(listener, context), daemon=True).start()
    mark = secrets.token_hex(8)
    rogue.ask(internet, mark)
    assert [True] == [mark.encode() in head for head in rogue.received]
    rogue.received.clear()
    yield rogue
    listener.close()


@dataclass
class Taken:
    """`serve`, obeying the test."""

    stack: CompromisedStack
    process: Hostile
    rogue: Rogue
    secret: str

    def ask(self, daemon: str, op: str, **parameters: Any) -> dict[str, Any]:
        """What hostd or vaultd answers to `serve`."""
        code = f"value = ask({str(self.stack.run / daemon)!r}, {op!r}, json.loads({json.dumps(parameters)!r}))"
        answer: dict[str, Any] = self.process.run(ASK + code)
        return answer

    def launch(self, runtime: str, command: str, **more: Any) -> tuple[str, dict[str, Any]]:
        """Launch a sandbox that runs `command`, with everything that `more` says; returns its id and the answer."""
        sandbox = f"sbx-{secrets.token_hex(8)}"
        opened = self.ask("vault.sock", "open_sandbox", sandbox=sandbox, lineage=sandbox, grants=[GRANT], inline={})
        message = self.honest(sandbox, runtime, command, opened["ok"]["root_pem"]) | more
        return sandbox, self.ask("hostd.sock", "launch", **message)

    def honest(self, sandbox: str, runtime: str, command: str, root: str) -> dict[str, Any]:
        """What `serve` sends if it is not compromised."""
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
            "ca_root": root,
            "execd_token_sha256": "0" * 64,
            "selection": {"policy_name": "agents", "network_policy": None, "bindings": []},
        }

    def remove(self, sandbox: str) -> None:
        assert [] == self.stack.host("remove", sandbox=sandbox)["residue"]
        self.ask("vault.sock", "close_sandbox", sandbox=sandbox)

    def judged(self, sandbox: str, host: str) -> list[dict[str, Any]]:
        """The records of a sandbox's flows to `host`, once there is one: what is launched here asks at once."""

        def flows() -> list[dict[str, Any]]:
            records = self.stack.audit_records()
            return [item for item in records if item.get("sandbox") == sandbox and item.get("host") == host]

        return until(flows)

    def noted(self, host: str, mark: str) -> list[dict[str, Any]]:
        """The requests to `host` that arrived, by a mark in their path."""
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
    """A worker's whole configuration, as the attacker would have it."""
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
    """What the attacker's server received, and whatever has the secret besides."""
    return [head for head in taken.rogue.received if mark.encode() in head or taken.secret.encode() in head]


def test_a_launch_that_brings_a_worker_s_configuration_brings_the_attacker_nothing(taken: Taken, runtime: str) -> None:
    """Own authorities, and a fixed address for the host of a stored secret: the message of an earlier release."""
    policy = compile_named(load(taken.stack.policy), "agents").to_json()
    mark, sandbox = secrets.token_hex(8), f"sbx-{secrets.token_hex(8)}"
    opened = taken.ask("vault.sock", "open_sandbox", sandbox=sandbox, lineage=sandbox, grants=[GRANT], inline={})
    message = taken.honest(sandbox, runtime, curl(API, mark), opened["ok"]["root_pem"])
    message |= {"generation": 1, "ca_bundle": opened["ok"]["root_pem"]}
    message |= {"gateway": complete(taken, sandbox, policy)}
    del message["selection"], message["ca_root"]

    answer = taken.ask("hostd.sock", "launch", **message)
    if "ok" in answer:
        taken.judged(sandbox, API)
        until(lambda: arrived(taken, mark), 10)
        taken.remove(sandbox)

    assert [] == arrived(taken, mark)
    assert "invalid" == answer.get("error", {}).get("code")
