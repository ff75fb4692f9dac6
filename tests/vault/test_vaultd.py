"""vaultd as a process with its own uid, with the real auditd."""

import asyncio
import json
import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

import wire
from tests.stopping import stop
from tests.vault.requests import ADMINISTRATION, ASK
from vault.client import AdminClient, ReleaseRefusedError, VaultClient
from vault.config import VaultConfig
from vault.grants import Grant, SecretBinding
from vault.keyring import KEY_FD, NEXT_KEY_FD, create
from vault.secret import Secret
from wire.api import vaultd
from wire.errors import ConfigError
from wire.operations import parameters

CANARY = "canary-b60f2c19aa"
SANDBOX = "sbx-0123456789abcdef01234567"
SERVE = 700000001
BINDING = SecretBinding.make(["api.good.test"])
GRANT = Grant.make("token", "api.good.test", 443, "https")


async def worker(daemons: Any, generation: int = 1) -> VaultClient:
    """Return a worker's end of a channel."""
    near, far = socket.socketpair()
    with far:
        await daemons.admin.attach(SANDBOX, generation, far.fileno())
    return VaultClient.from_fd(near.detach())


def records(daemons: Any) -> list[dict[str, Any]]:
    """Return all records of auditd's files."""
    found = []
    for path in sorted((daemons.path / "audit").rglob("*")):
        if path.is_file() and path.suffix in (".jsonl", ".log", ""):
            for line in path.read_bytes().splitlines():
                if line.startswith(b"{"):
                    found.append(json.loads(line))
    return found


@pytest.mark.system
async def test_a_release_is_in_the_log_and_the_value_nowhere_but_at_the_worker(daemons: Any) -> None:
    """Files, stderr, environment, command line and log of both daemons contain no secret in any form."""
    await daemons.admin.put("token", Secret(CANARY), BINDING)
    await daemons.admin.open_sandbox(SANDBOX, "lin-1", [GRANT], {"inline:a": Secret(CANARY + "-inline")})
    client = await worker(daemons)
    assert Secret(CANARY) == (await client.release(*ASK)).value
    with pytest.raises(ReleaseRefusedError):
        await client.release("token", "evil.test", 443, "https")
    releases = [
        (item["decision"], item["secret"], item["sandbox"])
        for item in records(daemons)
        if item.get("kind") == "secret.release"
    ]
    assert [("allow", "token", SANDBOX), ("deny", "token", SANDBOX)] == releases
    places = [path.read_bytes() for path in daemons.path.rglob("*") if path.is_file()]
    for process in daemons.processes:
        places += [Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("environ", "cmdline")]
    key = (daemons.path / "key").read_bytes().strip()
    for place in places:
        assert CANARY.encode() not in place
    assert 1 == sum(key in place for place in places)  # its own file
    vaults = [path for path in (daemons.path / "vault").rglob("*") if path.is_file()]
    assert not any(b"PRIVATE KEY" in path.read_bytes() for path in vaults)
    await client.close()


@pytest.mark.system
async def test_with_a_stopped_auditd_no_byte_of_the_secret_reaches_the_worker(daemons: Any) -> None:
    """I5 with real processes: while auditd is stopped, the release is refused. When it runs again, releases work."""
    await daemons.admin.put("token", Secret(CANARY), BINDING)
    await daemons.admin.open_sandbox(SANDBOX, "lin-1", [GRANT])
    near, far = socket.socketpair()
    await daemons.admin.attach(SANDBOX, 1, far.fileno())
    far.close()
    near.setblocking(False)
    loop = asyncio.get_running_loop()
    request = {"op": "release", **parameters(vaultd.Release(*ASK))}
    stop(daemons.auditd.pid)
    try:
        await loop.sock_sendall(near, wire.frames.encode({"id": 1, **request}))
        answer = await asyncio.wait_for(loop.sock_recv(near, 65536), 20)
    finally:
        daemons.auditd.send_signal(signal.SIGCONT)
    assert b"audit_unavailable" in answer
    assert CANARY.encode() not in answer
    deadline = loop.time() + 30
    while b"audit_unavailable" in answer:  # auditd treats the pause as a stalled disk and refuses until a sync
        assert loop.time() < deadline
        await loop.sock_sendall(near, wire.frames.encode({"id": 2, **request}))
        answer = await asyncio.wait_for(loop.sock_recv(near, 65536), 20)
    assert CANARY.encode() in answer
    near.close()


@pytest.mark.system
async def test_vaultd_ends_with_its_audit_channel_and_continues_when_started_again(daemons: Any) -> None:
    """Status 75 after the end of auditd. A new vaultd has the sandbox, its grants and its generation."""
    await daemons.admin.put("token", Secret(CANARY), BINDING)
    await daemons.admin.open_sandbox(SANDBOX, "lin-1", [GRANT])
    client = await worker(daemons, 2)
    daemons.auditd.kill()
    assert 75 == await asyncio.to_thread(daemons.vaultd.wait, 20)
    await client.closed.wait()
    await daemons.admin.close()
    await daemons.start()
    again = await worker(daemons, 3)
    assert Secret(CANARY) == (await again.release(*ASK)).value
    daemons.vaultd.terminate()
    assert 0 == await asyncio.to_thread(daemons.vaultd.wait, 20)
    await again.closed.wait()


@pytest.mark.system
async def test_serve_gets_the_sandbox_operations_and_no_others(daemons: Any) -> None:
    """The kernel reports the caller's uid: only root can administrate, and a third uid is not answered."""
    path = daemons.path / "run" / "vault.sock"

    for name in (path.parent, path):
        name.chmod(0o777)  # also for a user that hostd's mode excludes

    async def connect(uid: int) -> AdminClient:
        os.setegid(uid)
        os.seteuid(uid)
        try:
            return await AdminClient.connect(path, daemons.uid)
        finally:
            os.seteuid(0)
            os.setegid(0)

    serve = await connect(SERVE)
    await serve.open_sandbox(SANDBOX, "lin-1")
    for request in ADMINISTRATION.values():
        with pytest.raises(wire.RemoteError, match="forbidden"):
            await serve.ask(request)
    await serve.close_sandbox(SANDBOX)
    await serve.close()
    stranger = await connect(700000077)
    with pytest.raises(ConnectionError):
        await stranger.ask(wire.Ping())
    await stranger.close()


@pytest.mark.system
async def test_the_process_is_hardened(daemons: Any) -> None:
    """No core file, no new privileges, no capability, and its own uid. Its own uid cannot read its memory.

    Its memory is locked as far as its limit allows.
    """
    pid = daemons.vaultd.pid
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    assert ["0", "0"] == next(line for line in limits if line.startswith("Max core file size")).split()[4:6]
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert "1" == status["NoNewPrivs"]
    assert "0000000000000000" == status["CapEff"]
    locked = next(line for line in limits if line.startswith("Max locked memory")).split()[-2]
    resident = int(status["VmRSS"].split()[0])
    if locked == "unlimited" or int(locked) > 4096 * resident:
        assert int(status["VmLck"].split()[0]) >= resident
    else:
        assert int(status["VmLck"].split()[0]) * 1024 <= int(locked)
    assert [str(daemons.uid)] * 4 == status["Uid"].split()
    assert 0 == Path(f"/proc/{pid}/environ").stat().st_uid  # root's, because the process is not dumpable


@pytest.mark.system
async def test_a_wrong_key_stops_the_start(daemons: Any) -> None:
    """vaultd with another key ends with status 78 and does not change the directory."""
    await daemons.admin.put("token", Secret(CANARY), BINDING)
    daemons.vaultd.terminate()
    await asyncio.to_thread(daemons.vaultd.wait, 20)
    await daemons.admin.close()
    before = {path: path.read_bytes() for path in (daemons.path / "vault").rglob("*") if path.is_file()}
    key = daemons.path / "key"
    right = key.read_bytes()
    key.write_bytes(b"A" * 43 + b"=\n")
    near, far = socket.socketpair()
    with near, far:
        process = daemons.spawn_vaultd(near.fileno())
        assert 78 == await asyncio.to_thread(process.wait, 20)
    assert before == {path: path.read_bytes() for path in (daemons.path / "vault").rglob("*") if path.is_file()}
    assert b"sealed with another master key" in daemons.log()
    key.write_bytes(right)


async def again(daemons: Any) -> None:
    """End vaultd, and start it with what is in `given`."""
    daemons.vaultd.terminate()
    await asyncio.to_thread(daemons.vaultd.wait, 20)
    await daemons.admin.close()
    await daemons.start_vaultd()


@pytest.mark.system
async def test_a_credential_that_only_root_can_read_is_the_key(daemons: Any) -> None:
    """hostd opens it, as systemd gives it to root. Beside a successor everything is sealed with that one."""
    files = [daemons.path / name for name in ("credential", "credential-next")]
    for file in files:
        create(file)
        file.chmod(0o400)
    fds = [os.open(file, os.O_RDONLY) for file in files]
    try:
        for path in (daemons.path / "vault").iterdir():  # it was sealed with the key of a file
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        daemons.without_key_file()
        daemons.given = {KEY_FD: fds[0]}
        await again(daemons)
        await daemons.admin.put("token", Secret(CANARY), BINDING)
        await again(daemons)
        assert ["token"] == [each.name for each in await daemons.admin.list_secrets()]
        opened = [os.readlink(path) for path in Path(f"/proc/{daemons.vaultd.pid}/fd").iterdir()]
        assert not [path for path in opened if "credential" in path]
        daemons.given = {KEY_FD: fds[0], NEXT_KEY_FD: fds[1]}
        await again(daemons)
        daemons.given = {KEY_FD: fds[1]}
        await again(daemons)
        assert ["token"] == [each.name for each in await daemons.admin.list_secrets()]
        daemons.vaultd.terminate()
        await asyncio.to_thread(daemons.vaultd.wait, 20)
        daemons.given = {KEY_FD: fds[0]}
        near, far = socket.socketpair()
        with near, far:
            assert 78 == await asyncio.to_thread(daemons.spawn_vaultd(near.fileno()).wait, 20)
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize(
    "change",
    [
        {"nonsense": 1},
        {"wrapping": {"source": "file"}},
        {"uids": []},
        {"uids": "0"},
        {"uids": [True]},
        {"uids": [-1]},
        {"directory": None},
    ],
)
def test_a_wrong_configuration_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "vaultd.json"
    right = {"directory": "/var/lib/vault", "uids": [0]}
    path.write_text(json.dumps(right))
    assert frozenset({0}) == VaultConfig.read(path).uids
    path.write_text(json.dumps(right | change))
    with pytest.raises(ConfigError):
        VaultConfig.read(path)
