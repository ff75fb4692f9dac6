"""Client certificates from the vault, presented for real sandboxes. Judged by the TLS of the server.

It tests `vault/client_certificate.py` and `gateway/presented.py` with the `sallyport` command and curl.
"""

import base64
import contextlib
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from opensandbox.sync.sandbox import SandboxSync

from testbed import collect
from testbed.internet import REGISTRY, REGISTRY_ADDRESS, Internet, in_namespace
from testbed.leaks import forms_of, leaks_in
from testbed.stack import Stack, StackError
from tests.client_certificates import DAY, Issued, Times, authority, key_pem
from tests.conftest import ON_RUNC
from tests.system.test_create_and_delete import until

pytestmark = pytest.mark.system

CLIENT_ROOT = authority("Partners")
MIDDLE = CLIENT_ROOT.issue("Middle", ca=True)
SHORT = 12
"""Seconds until a certificate expires: long enough to store it and to ask once, on a machine with other work."""


@dataclass
class Partner:
    """A server that asks for a client certificate and needs none. It stores, for each connection, name and paths."""

    listener: socket.socket
    context: ssl.SSLContext
    shown: list[tuple[str | None, list[str]]] = field(default_factory=list)
    serials: set[int] = field(default_factory=set)

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock, self.context.wrap_socket(sock, server_side=True) as secured:
            der, name = secured.getpeercert(binary_form=True), None
            if der is not None:
                certificate = x509.load_der_x509_certificate(der)
                name = str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
                self.serials.add(certificate.serial_number)
            paths = list[str]()
            self.shown.append((name, paths))
            heard = b""
            while data := secured.recv(65536):
                heard += data
                while b"\r\n\r\n" in heard:
                    head, _, heard = heard.partition(b"\r\n\r\n")
                    paths.append(head.split(b" ")[1].decode())
                    body = f"name={name}\n".encode()
                    secured.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    def names(self, mark: str) -> dict[str, set[str | None]]:
        """Return, for each kind of path that has `mark`, the names under which it was asked for."""
        found: dict[str, set[str | None]] = {}
        for name, paths in self.shown:
            for path in paths:
                if mark in path:
                    found.setdefault(path.split("/")[1], set()).add(name)
        return found


@pytest.fixture(scope="module", name="partner")
def _partner(internet: Internet) -> Iterator[Partner]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(internet.directory / f"{REGISTRY}.pem")
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=CLIENT_ROOT.pem)
    listener = in_namespace(
        internet.path(internet.net), lambda: socket.create_server((REGISTRY_ADDRESS, 443), reuse_port=True)
    )
    made = Partner(listener, context)
    thread = threading.Thread(target=made.accept, daemon=True)
    thread.start()
    yield made
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


@contextlib.contextmanager
def stored(stack: Stack, directory: Path, **certificates: Issued) -> Iterator[None]:
    """Store the certificates by the command line, from files, and delete them at the end."""
    for name, issued in certificates.items():
        file = directory / f"{name}.pem"
        file.write_text(issued.value)
        stack.sallyport("vault", "put", f"{name}-certificate", "--host", REGISTRY, "--file", str(file))
        file.unlink()
    try:
        yield
    finally:
        for name in certificates:
            stack.sallyport("vault", "delete", f"{name}-certificate")


@contextlib.contextmanager
def sandbox_of(stack: Stack, runtime: str) -> Iterator[SandboxSync]:
    made = stack.create(runtime, policy="mutual")
    try:
        yield made
    finally:
        made.kill()
        made.close()


def asked(sandbox: SandboxSync, path: str, options: str = "") -> str:
    """Return page and status of a request."""
    done = sandbox.commands.run(f"curl -sS --max-time 20 {options} -w '%{{http_code}}' https://{REGISTRY}{path} 2>&1")
    return done.text.replace("\n", " ").strip()


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_rules_certificate_is_presented_for_its_requests_and_its_key_is_nowhere_in_the_sandbox(
    stack: Stack, partner: Partner, tmp_path: Path, runtime: str
) -> None:
    """Over HTTP/1.1 and HTTP/2, in one flow and in several. A certificate of the client's own does not arrive.

    The search covers what the sandbox can read, its answers, the server's files, the log and Docker's metadata.
    """
    mark, one, other = secrets.token_hex(8), MIDDLE.issue("agent"), MIDDLE.issue("other")
    own = CLIENT_ROOT.issue("of the sandbox")
    with stored(stack, tmp_path, partner=one, other=other), sandbox_of(stack, runtime) as sandbox:
        began = time.time()
        paths = [f"/{kind}/{mark}" for kind in ("v1", "open", "other", "v1", "open")]
        sandbox.files.write_file("/tmp/own.pem", own.value)
        answers = [
            asked(sandbox, path, f"{version} {cert}")
            for path in paths
            for version in ("--http1.1", "--http2-prior-knowledge")
            for cert in ("", "--cert /tmp/own.pem")
        ]
        urls = " ".join(f"https://{REGISTRY}{path}" for path in paths)
        answers.append(sandbox.commands.run(f"curl -sS --max-time 20 {urls} 2>&1").text)
        assert ["200"] * 20 == [answer[-3:] for answer in answers[:20]]
        assert ["agent", "None", "other", "agent", "None"] == [
            line.removeprefix("name=") for line in answers[-1].split()
        ]
        assert {"v1": {"agent"}, "open": {None}, "other": {"other"}} == partner.names(mark)

        # The search. Its control finds what was planted.
        sandbox.files.write_file("/tmp/collect.py", Path(collect.__file__).read_text())
        sandbox.files.write_file("/tmp/planted", f"planted-{mark}")
        sandbox.commands.run(f"python3 /tmp/collect.py /tmp/collection {began - 60:.0f}")
        collection = bytes(sandbox.files.read_bytes("/tmp/collection"))
        assert 1 == leaks_in([collection], forms_of(f"planted-{mark}"))
        host = content_of(stack)
        assert any(mark.encode() in content for content in host)
        docker = stack.docker("inspect", stack.container(str(sandbox.id))).stdout.encode()
        for issued in (one, other):
            assert 0 == leaks_in(
                [collection, docker, *(answer.encode() for answer in answers), *host], key_forms(issued)
            )
        assert 1 == leaks_in([issued.value.encode()], key_forms(issued))
    uses = [
        record
        for record in stack.audit_records()
        if record["kind"] == "secret.use" and mark in record.get("path", "") and record["sandbox"] == str(sandbox.id)
    ]
    assert {
        ("partner-certificate", "mutual/partner"),
        ("other-certificate", "mutual/other"),
    } == {(record["secret"], record["binding"]) for record in uses}


def content_of(stack: Stack) -> list[bytes]:
    """Return the server's own files: state, run directory, log, settings, and what Docker knows of containers."""
    found: list[bytes] = []
    for place in (stack.directory, stack.run, stack.stores[1] / "containers"):
        for directory, _, names in os.walk(place):
            for path in (Path(directory) / name for name in names):
                with contextlib.suppress(OSError):  # a namespace is mounted as a file that cannot be read
                    if path.is_file() and path.stat().st_size < 1 << 26:
                        found.append(path.read_bytes())
    return found


def key_forms(issued: Issued) -> list[bytes]:
    """Return the forms of a key: the lines of its PEM, and its private number in the usual encodings."""
    lines = [line.encode() for line in key_pem(issued.key).splitlines() if not line.startswith("-")]
    number = issued.key.private_numbers().private_value.to_bytes(32, "big")  # type: ignore[union-attr]
    return [*lines, number, number.hex().encode(), base64.b64encode(number)[:40]]


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_rotated_certificate_is_presented_at_once_and_an_expired_one_never(
    stack: Stack, partner: Partner, tmp_path: Path, runtime: str
) -> None:
    """`put` and `rotate` refuse what cannot be used. What expires later is refused at the request, with the reason."""
    mark = secrets.token_hex(8)
    with stored(stack, tmp_path, partner=MIDDLE.issue("first")), sandbox_of(stack, runtime) as sandbox:
        assert asked(sandbox, f"/v1/{mark}-a").endswith("name=first 200")
        stack.sallyport("vault", "rotate", "partner-certificate", stdin=MIDDLE.issue("second").value)
        assert asked(sandbox, f"/v1/{mark}-b").endswith("name=second 200")
        past = Times(datetime.now(UTC) - 3 * DAY, datetime.now(UTC) - 2 * DAY)
        for value, reason in (
            (MIDDLE.issue("late", times=past).value, "the client certificate expired at"),
            (key_pem(CLIENT_ROOT.key) + MIDDLE.issue("x").chain_pem, "does not belong to the first certificate"),
        ):
            with pytest.raises(StackError, match=reason):
                stack.sallyport("vault", "rotate", "partner-certificate", stdin=value)
            with pytest.raises(StackError, match=reason):
                stack.sallyport("vault", "put", "third", "--host", REGISTRY, stdin=value)
        assert asked(sandbox, f"/v1/{mark}-c").endswith("name=second 200")
        ends = datetime.now(UTC) + timedelta(seconds=SHORT)
        short = MIDDLE.issue("short", times=Times(ends - DAY, ends))
        stack.sallyport("vault", "rotate", "partner-certificate", stdin=short.value)
        assert asked(sandbox, f"/v1/{mark}-d").endswith("name=short 200")
        assert until(lambda: asked(sandbox, f"/v1/{mark}-e").endswith("403"), SHORT + 30)
        assert "the client certificate expired at" in asked(sandbox, f"/v1/{mark}-f")
        assert asked(sandbox, f"/open/{mark}-g").endswith("name=None 200")
    assert {"second"} == partner.names(f"{mark}-c")["v1"]
    assert {} == partner.names(f"{mark}-f")
    assert [] == [True for name, paths in partner.shown if name == "late"]
