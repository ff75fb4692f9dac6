"""A compromised auditd cannot change earlier records, and other compromised components cannot forge records."""

import inspect
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from io import StringIO
from pathlib import Path

import pytest

from audit import cli
from tests.audit import test_epochs
from tests.security.compromise.stack import CompromisedStack, Hostile, Refused

pytestmark = pytest.mark.system

_SECONDS = 30.0

# Operations that a component tries at auditd's socket. The value is the answer to each.
_ATTEMPTS = """
import asyncio, socket, wire

async def attempt(client, op, with_descriptor=True, **parameters):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            fds = [theirs.fileno()] if op == "attach" and with_descriptor else ()
            await client.call(op, timeout=10, fds=fds, **parameters)
        except wire.RemoteError as error:
            return error.code
        except OSError as error:
            return type(error).__name__
        return "done"

def said(kind, **fields):
    return {{"entry": {{"kind": kind, "decision": "allow", "fields": fields}}, "durable": False}}

async def attempts():
    try:
        client = await wire.Client.connect({socket!r}, 700000003)
    except OSError as error:
        return type(error).__name__
    answers = {{}}
    for producer, sandbox in (("gateway", {sandbox!r}), ("vault", None), ("auditd", {sandbox!r}), ("root", None)):
        identity = {{"sandbox": sandbox, "generation": 1, "producer": producer}}
        passing = await wire.Client.connect({socket!r}, 700000003)  # a descriptor ends the connection
        answers["pass " + producer] = await attempt(passing, "attach", **identity)
        await passing.close()
        answers["attach " + producer] = await attempt(client, "attach", with_descriptor=False, **identity)
    answers["close"] = await attempt(client, "close_sandbox", sandbox={sandbox!r})
    answers["heads"] = await attempt(client, "heads")
    for kind in ("request", "secret.release", "secret.use", "gap", "checkpoint", "drop", "vault.put"):
        answers["record " + kind] = await attempt(client, "record", **said(kind))
    for name in ("producer", "generation", "seq", "chain", "prev", "hash", "ts", "key", "heads", "closed", "next"):
        answers["field " + name] = await attempt(client, "record", **said("lifecycle.remove", **{{name: "forged"}}))
    answers["own"] = await attempt(client, "record", **said("lifecycle.remove", sandbox={sandbox!r}, reason="own"))
    await client.close()
    return answers

value = asyncio.run(attempts())
"""


def _attempts(stack: CompromisedStack, sandbox: str) -> str:
    return _ATTEMPTS.format(socket=str(stack.run / "audit.sock"), sandbox=sandbox)


def _records(stack: CompromisedStack, **wanted: object) -> list[dict[str, object]]:
    return [record for record in stack.audit_records() if wanted.items() <= record.items()]


@pytest.fixture(scope="module", name="serve")
def _serve(compromised: CompromisedStack) -> Iterator[Hostile]:
    with closing(compromised.hostile("serve")) as serve:
        yield serve


def test_a_compromised_serve_writes_its_own_kinds_only_and_ends_no_chain(
    compromised: CompromisedStack, serve: Hostile, runtime: str
) -> None:
    with compromised.create(runtime) as sandbox:
        try:
            answers = serve.run(_attempts(compromised, sandbox.id))
        finally:
            sandbox.kill()
    assert "done" == answers.pop("own")  # the control
    passed = {answers.pop(name) for name in list(answers) if name.startswith("pass ")}
    assert passed <= {"forbidden", "invalid", "ConnectionError", "ConnectionResetError", "BrokenPipeError"}
    assert {"forbidden", "invalid"} == set(answers.values())
    unknown = {"attach auditd", "attach root"}  # no such producer has a channel
    assert {"invalid"} == {answers[name] for name in unknown}
    of_hostd = {name for name in answers if name.split()[0] in ("attach", "close", "heads")} - unknown
    assert {"forbidden"} == {answers[name] for name in of_hostd}
    assert 1 == len(_records(compromised, producer="serve", reason="own", sandbox=sandbox.id))
    assert [] == [record for record in compromised.audit_records() if "forged" in record.values()]
    _ends(compromised, sandbox.id)
    assert compromised.sallyport("audit", "verify").splitlines()[-1].startswith("ok: ")


def test_a_compromised_vaultd_has_no_way_to_the_logs_socket(compromised: CompromisedStack) -> None:
    with closing(compromised.hostile("vaultd")) as vaultd:
        answers = vaultd.run(_attempts(compromised, "sbx-none"))
    assert "PermissionError" == answers
    assert "ok: " in compromised.sallyport("audit", "verify")


def test_a_compromised_worker_writes_of_its_own_sandbox_and_its_own_kinds_only(
    compromised: CompromisedStack, runtime: str
) -> None:
    with compromised.create(runtime) as sandbox, compromised.create(runtime) as other:
        worker = compromised.hostile(sandbox.id)
        try:
            with pytest.raises(Refused):
                worker.run(_CONNECT.format(socket=str(compromised.run / "audit.sock")))
            answers = worker.run(_ON_ITS_CHANNEL.format(other=other.id))
        finally:
            worker.close()
            sandbox.kill()
            other.kill()
    assert ["done"] == [answer for name, answer in answers.items() if name == "own"]
    assert {"AuditUnavailable", "RecordError"} == {answer for name, answer in answers.items() if name != "own"}
    assert [] == _records(compromised, host="forged.example")
    assert 1 == len(_records(compromised, chain=sandbox.id, host="own.example"))


_CONNECT = "import socket; socket.socket(socket.AF_UNIX).connect({socket!r})"
_ON_ITS_CHANNEL = """
import asyncio

async def attempt(kind, **fields):
    try:
        client = process._audit._client
        entry = {{"kind": kind, "decision": "allow", "fields": fields}}
        await client.call("record", timeout=10, entry=entry, durable=False)
    except Exception as error:
        return "AuditUnavailable" if type(error).__name__ == "RemoteError" else type(error).__name__
    return "done"

async def record_error():
    try:
        await process._audit.accept("checkpoint", "info")
    except Exception as error:
        return type(error).__name__

async def attempts():
    answers = {{"checkpoint": await record_error()}}
    for kind in ("secret.release", "lifecycle.create", "vault.put", "alarm", "drop", "checkpoint"):
        answers["record " + kind] = await attempt(kind, host="forged.example")
    answers["other"] = await attempt("dns", sandbox={other!r}, host="forged.example")
    answers["own"] = await attempt("dns", host="own.example")
    return answers

value = asyncio.run_coroutine_threadsafe(attempts(), process._audit._client._reader.get_loop()).result(30)
"""


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # polling for another process's state


def _ends(stack: CompromisedStack, sandbox: str) -> None:
    _until(lambda: _records(stack, chain=sandbox, kind="checkpoint", closed=True))


# Forge a copy of the log in a directory of auditd's: change a value in one record, and repair all hashes and
# signatures for which a key is available.
_FORGE = """
import json, shutil
from pathlib import Path
log, forged = Path({log!r}), Path({forged!r})
shutil.rmtree(forged, ignore_errors=True)
forged.mkdir()
for path in log.iterdir():
    if path.name != forged.name and path.is_file():
        shutil.copy(path, forged)
shutil.copytree(log / "keys", forged / "keys")

def put_other(record):
    if record.get("reason") == {reason!r}:
        record["reason"] = "forged"

found = private_keys(log / "keys")
rewrite(forged, put_other, found[0])
value = [len(found), sum(b'"forged"' in line for line in lines(forged))]
"""


def _forge(stack: CompromisedStack, auditd: Hostile, reason: str) -> Path:
    forged = stack.state / "audit" / "forged"
    source = "\n".join(
        inspect.getsource(function)
        for function in (test_epochs.private_keys, test_epochs.lines, test_epochs.rewrite, test_epochs._changed)
    )
    head = (
        "from __future__ import annotations\nimport json\nfrom collections.abc import Callable\n"
        "from pathlib import Path\nfrom typing import Any\n"
        "from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey\n"
        "from audit.chain import ZERO, ChainHead, SignedAnchor, extend_log, seal, seal_checkpoint, sign_anchor\n"
    )
    body = _FORGE.format(log=str(stack.state / "audit"), forged=str(forged), reason=reason)
    assert [1, 1] == auditd.run(head + source + body)
    return forged


def _says(stack: CompromisedStack, serve: Hostile, reason: str) -> bool:
    try:
        _say(stack, serve, reason)
    except Refused:
        return False
    return True


def _say(stack: CompromisedStack, serve: Hostile, reason: str) -> None:
    code = f"""
import asyncio, wire
async def say():
    client = await wire.Client.connect({str(stack.run / "audit.sock")!r}, 700000003)
    fields = {{"reason": {reason!r}}}
    entry = {{"kind": "lifecycle.remove", "decision": "info", "fields": fields}}
    await client.call("record", timeout=10, entry=entry, durable=True)
    await client.close()
value = asyncio.run(say())
"""
    serve.run(code)


def _verdict(directory: Path, *anchors: Path) -> tuple[int, str]:
    out = StringIO()
    return cli.verify(directory, anchors=anchors, out=out), out.getvalue()


def test_a_compromised_auditd_cannot_rewrite_what_was_signed_or_anchored_before(
    compromised: CompromisedStack, serve: Hostile
) -> None:
    """auditd has every key that it can find, and can write every file of its user."""
    log, kept = compromised.state / "audit", compromised.state / "hostd" / "anchors.jsonl"
    with closing(compromised.hostile("auditd")) as auditd:
        _say(compromised, serve, "of a former epoch")
        os.kill(auditd.pid, signal.SIGKILL)
    with closing(compromised.hostile("auditd")) as auditd:
        _rewrites_nothing(compromised, serve, auditd, log, kept)
    said = compromised.sallyport("audit", "verify")  # the control; the command uses hostd's anchors by default
    assert "ok: " in said
    assert " 0 anchors" not in said


def _rewrites_nothing(compromised: CompromisedStack, serve: Hostile, auditd: Hostile, log: Path, kept: Path) -> None:
    _until(lambda: compromised.healthy() and _says(compromised, serve, "of this epoch"))
    size = (log / "audit-000001.jsonl").stat().st_size
    _until(lambda: json.loads(kept.read_bytes().splitlines()[-1])["offset"] >= size)

    code, said = _verdict(_forge(compromised, auditd, "of a former epoch"))
    assert 1 == code
    assert "checkpoint is signed by the key of epoch 2, in epoch 1" in said
    forged = _forge(compromised, auditd, "of this epoch")
    assert 0 == _verdict(forged)[0]  # the limit of signatures: the key of this epoch is available
    code, said = _verdict(forged, kept)
    assert 1 == code
    assert "is not as it was anchored" in said
    for mode in ("rb", "ab"):
        with pytest.raises(Refused) as refused:
            auditd.run(f"open({str(kept)!r}, {mode!r})")
        assert "PermissionError" == refused.value.kind
