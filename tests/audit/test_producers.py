"""Each producer writes only its own kinds of records: auditd refuses others, and verification finds them."""

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from audit.batch import ChainEntry
from audit.client import AuditClient, AuditUnavailable
from audit.producers import GATEWAY, HOSTD, KINDS, SERVE, VAULT, WRITABLE
from tests.audit.conftest import ROOT, A, Auditd, NewAuditd, verify
from tests.audit.test_epochs import opened
from wire import RemoteError, Request
from wire.api.auditd import Attach, CloseSandbox, Heads, Producer

PLACES = {GATEWAY: "gateway", VAULT: "vault", SERVE: "lifecycle", HOSTD: "runtimes"}


async def producer(daemon: Auditd, name: str) -> AuditClient:
    if name in (GATEWAY, VAULT):
        return await daemon.attach(A if name == GATEWAY else None)
    assert daemon.control is not None
    return AuditClient(daemon.control)


@pytest.mark.parametrize("name", [GATEWAY, VAULT, SERVE, HOSTD])
async def test_a_producer_writes_its_own_kinds_and_no_other(tmp_path: Path, new_auditd: NewAuditd, name: str) -> None:
    host = os.getuid() if name != SERVE else os.getuid() + 1
    daemon = await new_auditd(tmp_path, host_uid=host).start()
    client = await producer(daemon, name)
    for kind in sorted(KINDS[name]):
        await client.accept(kind, "info")
    for kind in sorted(WRITABLE - KINDS[name]):
        with pytest.raises(AuditUnavailable, match="invalid"):
            await client.accept(kind, "info")
    assert KINDS[name] == {record["kind"] for record in daemon.said(producer=name)}
    await daemon.stop()
    assert [] == daemon.verify().findings


@pytest.mark.parametrize(
    "request_", [Attach(Producer.GATEWAY, A, 1), CloseSandbox(A), Heads()], ids=["attach", "close_sandbox", "heads"]
)
async def test_a_user_that_is_not_hostd_may_record_and_nothing_else(
    tmp_path: Path, new_auditd: NewAuditd, request_: Request[Any]
) -> None:
    daemon = await new_auditd(tmp_path, host_uid=os.getuid() + 1).start()
    assert daemon.control is not None
    with pytest.raises(RemoteError, match="forbidden"):
        await daemon.control.ask(request_)
    await AuditClient(daemon.control).accept("lifecycle.create", "allow", sandbox=A)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ConnectionError):  # the connection may not pass a descriptor either
        await daemon.control.ask(request_, fds=[theirs.fileno()])
    assert ["serve"] == [record["producer"] for record in daemon.said(kind="lifecycle.create")]


@pytest.mark.parametrize(
    ("sandbox", "name"), [(A, "vault"), (A, "auditd"), (A, "root"), (None, "gateway"), (None, "x")]
)
async def test_a_channel_is_of_a_gateway_or_of_vaultd(auditd: Auditd, sandbox: str | None, name: str) -> None:
    assert auditd.control is not None
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(RemoteError, match="invalid"):
        await auditd.control.call("attach", fds=[theirs.fileno()], sandbox=sandbox, generation=1, producer=name)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"kind": "secret.release", "producer": "gateway"}, "gateway does not write records of kind 'secret.release'"),
        ({"kind": "dns", "producer": "serve"}, "serve does not write records of kind 'dns'"),
        ({"kind": "dns", "producer": "someone"}, "there is no producer 'someone'"),
        ({"kind": "alarm", "producer": "root"}, f"root does not write into chain {A}"),
    ],
)
def test_a_record_that_its_producer_cannot_have_written_is_found(
    tmp_path: Path, record: dict[str, str], why: str
) -> None:
    """The log is written without auditd's own check."""
    log = opened(tmp_path / "log")
    log.append([ChainEntry(A, {"decision": "allow", "sandbox": A, **record})])
    log.close()
    assert [text for text in verify(tmp_path / "log").findings if why in text] != []


@pytest.mark.parametrize("name", [GATEWAY, VAULT, SERVE, HOSTD])
def test_the_kinds_of_a_producer_are_those_that_its_source_names(name: str) -> None:
    """The source has only the last parts of `lifecycle.pause` and `lifecycle.resume`."""
    source = "\n".join(path.read_text() for path in (ROOT / PLACES[name]).rglob("*.py"))
    named = set(re.findall(r'"([a-z]+(?:\.[a-z_]+)?)"', source))
    if name == SERVE:
        named |= {f"lifecycle.{op}" for op in ("pause", "resume") if f'"{op}"' in source}
    elsewhere = {"gap"}  # the client of the log writes this kind
    assert set() == KINDS[name] - named - elsewhere
