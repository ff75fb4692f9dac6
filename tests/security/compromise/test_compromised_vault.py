"""The vault under requests of a compromised `serve` and of compromised workers, and with older copies of its files.

The module tests `vault/hardening.py`.
"""

import json
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.sandboxes import CredentialProxyConfig, NetworkPolicy, NetworkRule

from testbed.internet import API, ATTACKER, GIT, STATUS, Internet, received_field
from tests.security.compromise.stack import CompromisedStack, Hostile
from tests.system.test_create_and_delete import until
from wire.api import vaultd
from wire.operations import Request, operation, parameters

pytestmark = pytest.mark.system

ROTATING = "rotating-token"
CALL = """
import asyncio, wire
async def call(path, op, parameters):
    client = await wire.Client.connect(path, 700000002)
    try:
        await client.call(op, timeout=20, **parameters)
        return "ok"
    except wire.RemoteError as error:
        return error.code
    finally:
        await client.close()
value = asyncio.run(call({path!r}, {op!r}, {parameters!r}))
"""
RELEASE = """
import asyncio, gc
from vault.client import VaultError
from wire.api.vaultd import ReleasePurpose
purpose = {purpose!r} and ReleasePurpose({purpose!r})
loop = next(one for one in gc.get_objects() if isinstance(one, asyncio.AbstractEventLoop) and one.is_running())
async def release():
    try:
        vault = process._state.vault
        return (await vault.release({secret!r}, {host!r}, 443, "https", purpose=purpose)).value.reveal()
    except VaultError as error:
        return str(error).partition(":")[0]
value = asyncio.run_coroutine_threadsafe(release(), loop).result(20)
"""
AUTHORITY = """
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
mint = process._inspection._certificates._mint
key = mint._issuer_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
value = [mint._chain.decode(), key.decode()]
"""
JUDGE = """
import http.server, ssl, subprocess, sys, threading
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/tmp/leaf.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
threading.Thread(target=server.handle_request, daemon=True).start()
there = f"::127.0.0.1:{server.server_port}"
fetch = ["curl", "-sS", "-o", "/dev/null", "--max-time", "20", "--connect-to", there, f"https://{sys.argv[1]}/"]
print(subprocess.run(fetch).returncode)
"""
"""Serves the leaf on a port of its own and prints the exit status of a curl that fetches from the host there."""
ACCEPTED, NOT_TRUSTED = "0", "60"
VERDICTS = {
    API: ACCEPTED,
    f"below.{API}": ACCEPTED,
    STATUS: NOT_TRUSTED,
    ATTACKER: NOT_TRUSTED,
    "192.0.2.77": NOT_TRUSTED,
}


@pytest.fixture(scope="module", name="serve", autouse=True)
def _serve(compromised: CompromisedStack) -> Iterator[Hostile]:
    compromised.sallyport("vault", "put", ROTATING, "--host", STATUS, stdin=f"rotating-{secrets.token_hex(16)}")
    serve = compromised.hostile("serve")
    yield serve
    serve.close()


@pytest.fixture(name="caller")
def _caller(compromised: CompromisedStack) -> Iterator[Any]:
    """Yield a sandbox whose creator allows two hosts and can bind credentials."""
    rules = [NetworkRule(action="allow", target=host) for host in (STATUS, ATTACKER)]
    sandbox = compromised.create(
        "runc",
        policy=None,
        network_policy=NetworkPolicy(defaultAction="deny", egress=rules),
        credential_proxy=CredentialProxyConfig(enabled=True),
    )
    yield sandbox
    sandbox.kill()
    sandbox.close()


def asked(hostile: Hostile, stack: CompromisedStack, request: Request[Any]) -> str:
    """Return vaultd's answer to a compromised process: `ok` or the error code."""
    path = str(stack.run / "vault.sock")
    return str(hostile.run(CALL.format(path=path, op=operation(request), parameters=parameters(request))))


def released(worker: Hostile, secret: str, host: str, purpose: str | None = None) -> str:
    """Return vaultd's answer to a compromised worker: the value or the error code."""
    return str(worker.run(RELEASE.format(secret=secret, host=host, purpose=purpose)))


def sent(internet: Internet, sandbox: Any, host: str) -> str | None:
    """Return the Authorization field of a request of the sandbox as it arrived at `host`.

    The result is None if the request has no such field, and `nothing` if no request arrived.
    """
    mark = f"m{secrets.token_hex(8)}"
    print(sandbox.commands.run(f"curl -sS --max-time 20 'https://{host}/{mark}'"))
    for note in internet.notes():
        if mark in str(note.get("target")):
            return received_field(note, "Authorization")
    return "nothing"


def test_serve_moves_no_inline_secret_to_another_host(
    compromised: CompromisedStack, serve: Hostile, caller: Any
) -> None:
    """`serve` relayed the value before it was compromised. As the control, it can move a value that it sets itself."""
    value, own, name = f"bound-{secrets.token_hex(20)}", f"own-{secrets.token_hex(20)}", "inline:1/own"
    caller.credential_vault.create(
        credentials=[{"name": "own", "source": {"type": "inline", "value": value}}],
        bindings=[{"name": "b", "match": {"hosts": [STATUS]}, "auth": {"type": "bearer", "credential": "own"}}],
    )
    worker, internet = compromised.hostile(caller.id), compromised.internet
    try:
        here, there = (vaultd.GrantForm(name, host, 443, "https") for host in (STATUS, ATTACKER))
        wanted = vaultd.Regrant(caller.id, (here, there), names=("*",))
        for more in (
            wanted,
            replace(wanted, keep=(name,)),
            replace(wanted, bounds=(here, there)),
            replace(wanted, keep=(name,), bounds=(there,)),
        ):
            assert "not_bound" == asked(serve, compromised, more)
        other = vaultd.OpenSandbox("sbx-hostile", "hostile", (there,), names=("*",))
        assert "unknown_secret" == asked(serve, compromised, other)
        assert "forbidden" == asked(serve, compromised, vaultd.Rekey())
        assert "not_granted" == released(worker, name, ATTACKER)
        assert "not_granted" == released(worker, name, ATTACKER, "scrub")
        assert (f"Bearer {value}", None) == (sent(internet, caller, STATUS), sent(internet, caller, ATTACKER))
        assert not [note for note in internet.notes() if note["host"] != STATUS and value in json.dumps(note)]
        given = replace(wanted, inline={name: vaultd.Value(own)}, bounds=(here, there))
        assert "ok" == asked(serve, compromised, given)
        assert own == released(worker, name, ATTACKER)
    finally:
        worker.close()


def test_a_worker_is_given_what_its_own_sandbox_was_granted_and_no_more(compromised: CompromisedStack) -> None:
    """A worker gets no secret of another sandbox, and none of its own for another host.

    The control is a granted secret.
    """
    with compromised.create("runc") as mine, compromised.create("runc", policy="rotating") as other:
        workers = [compromised.hostile(sandbox.id) for sandbox in (mine, other)]
        try:
            assert not released(workers[0], "api-token", API).startswith("not_")
            for secret, host in (("api-token", GIT), ("api-token", ATTACKER), (ROTATING, STATUS)):
                assert "not_granted" == released(workers[0], secret, host)
            assert not released(workers[1], ROTATING, STATUS).startswith("not_")
            assert "not_granted" == released(workers[1], "api-token", API)
        finally:
            for worker in workers:
                worker.close()
            mine.kill()
            other.kill()


@pytest.mark.parametrize(
    "whole", [pytest.param(False, marks=pytest.mark.extended), True], ids=["its file", "the whole directory"]
)
def test_a_rotated_secret_does_not_come_back_with_the_files_it_was_in(
    compromised: CompromisedStack, tmp_path: Path, whole: bool
) -> None:
    """vaultd uses no older copy of a file: nothing is sent, and the log has the reason.

    The newest files work again.
    """
    name, value = ROTATING, f"rotated-{secrets.token_hex(16)}"
    vault = compromised.state / "vault"
    place = vault if whole else vault / "secrets" / f"={name}.sealed"
    internet = compromised.internet
    with compromised.create("runc", policy="rotating") as sandbox:
        try:
            former = sent(internet, sandbox, STATUS)
            assert former is not None
            assert former.startswith("Bearer ")
            _copy(place, tmp_path / "former")
            compromised.sallyport("vault", "rotate", name, stdin=value)
            assert f"Bearer {value}" == sent(internet, sandbox, STATUS)
            _copy(place, tmp_path / "latest")
            said = compromised.log.stat().st_size
            _put_back(tmp_path / "former", place)
            _kill_vaultd(compromised)
            reason = b"are an older copy" if whole else b"is an older copy, or was changed"
            assert until(lambda: reason in compromised.log.read_bytes()[said:])
            assert "nothing" == sent(internet, sandbox, STATUS)
            _put_back(tmp_path / "latest", place)
            if not whole:  # with the whole directory vaultd does not run: hostd tries to start it repeatedly
                _kill_vaultd(compromised)
            assert until(lambda: f"Bearer {value}" == sent(internet, sandbox, STATUS), 30)
        finally:
            if (tmp_path / "latest").exists():
                _put_back(tmp_path / "latest", place)
            sandbox.kill()


def test_a_workers_authority_signs_for_the_inspected_names_only(compromised: CompromisedStack) -> None:
    """curl in the sandbox, which trusts the sandbox's root, is the judge. An inspected name is the control."""
    with compromised.create("runc") as sandbox:
        worker = compromised.hostile(sandbox.id)
        try:
            assert sandbox.commands.run(f"curl -sS --max-time 20 https://{API}/v1/x").exit_code == 0
            chain, key = worker.run(AUTHORITY)
            sandbox.files.write_file("/tmp/judge.py", JUDGE)
            outcomes = {}
            for host in VERDICTS:
                sandbox.files.write_file("/tmp/leaf.pem", _leaf(chain, key, host))
                limit = RunCommandOpts(timeout=timedelta(seconds=60))
                outcomes[host] = sandbox.commands.run(f"python3 /tmp/judge.py {host}", opts=limit)
        finally:
            worker.close()
            sandbox.kill()
    assert VERDICTS == {host: said.text.strip() for host, said in outcomes.items()}, outcomes


def _leaf(chain: str, key_pem: str, host: str) -> str:
    """Return a certificate for `host` with its chain and key, as an attacker with a worker's CA key would make it."""
    issuer = x509.load_pem_x509_certificates(chain.encode())[0]
    issuer_key = load_pem_private_key(key_pem.encode(), None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    try:
        name: x509.GeneralName = x509.IPAddress(ip_address(host))
    except ValueError:
        name = x509.DNSName(host)
    leaf = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(issuer.not_valid_before_utc)
        .not_valid_after(issuer.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName([name]), critical=True)
        .sign(issuer_key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return (leaf.public_bytes(Encoding.PEM) + chain.encode() + private).decode()


def _kill_vaultd(stack: CompromisedStack) -> None:
    """Kill the vaultd that runs."""
    pid = int((stack.run / "config" / "vaultd.pid").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)


def _copy(source: Path, target: Path) -> None:
    copy: Callable[..., Any] = shutil.copytree if source.is_dir() else shutil.copy2
    copy(source, target)


def _put_back(source: Path, target: Path) -> None:
    """Copy the files back as root, in place, so that owner and mode do not change."""
    if not source.is_dir():
        target.write_bytes(source.read_bytes())
        return
    for path in [one for one in target.rglob("*") if one.is_file() and one.name != "lock"]:
        if not (source / path.relative_to(target)).exists():
            path.unlink()
    for path in [one for one in source.rglob("*") if one.is_file() and one.name not in ("lock", "master-key")]:
        place = target / path.relative_to(source)
        new = not place.exists()
        place.write_bytes(path.read_bytes())
        if new:
            owner = target.stat()
            os.chown(place, owner.st_uid, owner.st_gid)
            place.chmod(0o600)
