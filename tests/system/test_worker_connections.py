"""Upstream connections of a real worker, shared by the flows of its sandbox. The verdict is made at the server.

It tests `gateway/engines/pool.py` and `gateway/worker.py`.
"""

import contextlib
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.system.test_worker_flow import (
    INJECTING,
    SECRET,
    TIMEOUT,
    Gate,
    Internet,
    Rig,
    auditd,
    ended,
    gate,
    internet,
    limited,
    namespaces,
    rig,
    vaultd,
    worker,
)
from wire.api import vaultd as vapi

__all__ = ["auditd", "gate", "internet", "namespaces", "rig", "vaultd"]

pytestmark = pytest.mark.system

NEXT = "tok-the-value-after-it"


@dataclass
class Line:
    """One connection at the server."""

    heads: list[bytes] = field(default_factory=list)
    sock: ssl.SSLSocket | None = None
    ended: threading.Event = field(default_factory=threading.Event)


@dataclass
class Server:
    """A server that stores which connection carries which request.

    A connection of `leaving` ends in place of a response to its second request.
    """

    internet: Internet
    context: ssl.SSLContext
    lines: list[Line] = field(default_factory=list)
    leaving: frozenset[int] = frozenset()
    closed: bool = False

    def accept(self) -> None:
        known = 0
        while not self.closed:
            while known < len(self.internet.accepted):
                line = Line()
                self.lines.append(line)
                arguments = (self.internet.accepted[known], line, known)
                threading.Thread(target=self._serve, args=arguments, daemon=True).start()
                known += 1
            self.internet.arrived.wait(0.05)
            self.internet.arrived.clear()

    def _serve(self, sock: socket.socket, line: Line, number: int) -> None:
        sock.settimeout(None)  # only the worker ends a connection
        with contextlib.suppress(OSError), self.context.wrap_socket(sock, server_side=True) as secured:
            line.sock = secured
            while head := secured.recv(65536):
                line.heads.append(head)
                if number in self.leaving and len(line.heads) > 1:
                    break
                secured.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        line.ended.set()

    def carried(self) -> list[int]:
        return [len(line.heads) for line in self.lines]


@pytest.fixture
def server(gate: Gate) -> Iterator[Server]:
    with serving(gate.rig.internet) as made:
        yield made


@contextlib.contextmanager
def serving(internet: Internet) -> Iterator[Server]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w") as pem:
        pem.write(internet.certificate + internet.key)
        pem.flush()
        context.load_cert_chain(pem.name)
    made = Server(internet, context)
    accepting = threading.Thread(target=made.accept)
    accepting.start()
    try:
        yield made
    finally:
        made.closed = True
        accepting.join(TIMEOUT)


def ask(gate: Gate, method: str = "GET") -> bytes:
    """Make one request in a flow of its own; return its response."""
    trust = ssl.create_default_context(cadata=gate.root)
    with trust.wrap_socket(gate.dial(), server_hostname="good.example.com") as client:
        client.sendall(f"{method} /v1 HTTP/1.1\r\nHost: good.example.com\r\nContent-Length: 0\r\n\r\n".encode())
        data = b""
        while not data.endswith((b"\r\n\r\nok", b".\n")):
            part = client.recv(65536)
            if not part:
                break
            data += part
        return data


def test_two_flows_use_one_connection_and_the_log_names_it_for_both(gate: Gate, server: Server) -> None:
    gate.configure(INJECTING)
    for _ in range(2):
        assert ask(gate).startswith(b"HTTP/1.1 200 ")
    assert [2] == server.carried()
    records = gate.rig.records()
    (dialled,) = [item for item in records if (item["kind"], item["decision"]) == ("connect", "allow")]
    allows = [item for item in records if (item["kind"], item["decision"]) == ("request", "allow")]
    first, second = allows
    assert first["flow"] == dialled["flow"] != second["flow"]
    assert "address" not in first
    assert (dialled["address"], "good.example.com") == (second["address"], second["peer_name"])


def test_after_a_change_of_policy_a_flow_gets_another_connection(gate: Gate, server: Server) -> None:
    gate.configure(INJECTING)
    ask(gate)
    gate.configure(limited(INJECTING, requests_per_minute=60))
    assert server.lines[0].ended.wait(TIMEOUT)
    assert ask(gate).startswith(b"HTTP/1.1 200 ")
    assert [1, 1] == server.carried()


def test_a_dead_guard_ends_idle_connections(gate: Gate, server: Server) -> None:
    """No later flow reaches the server, with or without a dial."""
    gate.configure(INJECTING)
    ask(gate)
    os.close(gate.guard)
    assert server.lines[0].ended.wait(TIMEOUT)
    assert ask(gate).startswith(b"HTTP/1.1 502 ")
    assert [1] == server.carried()
    gate.guard = os.open(os.devnull, os.O_RDONLY)


def test_idle_connections_end_with_their_worker(rig: Rig, tmp_path: Path) -> None:
    """The next worker, under the same policy, dials for itself."""
    rig.internet.forget()
    with serving(rig.internet) as server:
        for number in range(2):
            with worker(rig, tmp_path) as gate:
                gate.configure(INJECTING)
                ask(gate)
                assert not server.lines[number].ended.is_set()
            assert server.lines[number].ended.wait(TIMEOUT)
        assert [1, 1] == server.carried()


def test_the_byte_too_many_ends_idle_connections(gate: Gate, server: Server) -> None:
    """A connection that carried a secret is idle while a request without one exceeds the limit."""
    (rules,) = INJECTING.lists
    (api,) = rules.rules
    both = replace(api, methods=("GET",)), replace(api, id="open", methods=("POST",), inspect=True, injections=())
    gate.configure(limited(replace(INJECTING, lists=(replace(rules, rules=both),)), bytes_out=20_000))
    assert ask(gate).startswith(b"HTTP/1.1 200 ")
    trust = ssl.create_default_context(cadata=gate.root)
    with trust.wrap_socket(gate.dial(), server_hostname="good.example.com") as client:
        with contextlib.suppress(OSError):
            client.sendall(
                b"POST /v1 HTTP/1.1\r\nHost: good.example.com\r\nContent-Length: 60000\r\n\r\n" + bytes(60_000)
            )
        ended(client)
    assert server.lines[0].ended.wait(TIMEOUT)
    assert 2 == len(server.lines)


def test_the_server_may_end_a_connection_at_any_time(gate: Gate, server: Server) -> None:
    """Before the next request; and in place of a response, where only a safe request is repeated."""
    gate.configure(INJECTING)
    ask(gate)
    first = server.lines[0].sock
    assert first is not None
    first.shutdown(socket.SHUT_RDWR)
    assert server.lines[0].ended.wait(TIMEOUT)
    assert ask(gate, "POST").startswith(b"HTTP/1.1 200 ")
    assert [1, 1] == server.carried()

    server.leaving = frozenset({1})
    assert ask(gate, "GET").startswith(b"HTTP/1.1 200 ")
    assert [1, 2, 1] == server.carried()

    server.leaving = frozenset({2})
    answer = ask(gate, "POST")
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert b"so it was not sent again" in answer
    assert [1, 2, 2] == server.carried()


def test_after_a_rotation_a_flow_gets_another_connection(gate: Gate, server: Server) -> None:
    """The last test of the module: it changes the secret."""
    gate.configure(INJECTING)
    ask(gate)
    gate.rig.vaultd.ask(vapi.Rotate("api-token", vapi.Value(NEXT)))
    assert server.lines[0].ended.wait(TIMEOUT)
    assert ask(gate).startswith(b"HTTP/1.1 200 ")
    assert [[SECRET], [NEXT]] == [
        [head.partition(b"Bearer ")[2].partition(b"\r\n")[0].decode() for head in line.heads] for line in server.lines
    ]
