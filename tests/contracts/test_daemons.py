"""The stand-ins of the tests answer like the real daemons: one table of calls for each kind, made to both."""

import asyncio
import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import wire
from testbed.stack import Stack
from tests.audit.conftest import Auditd
from tests.contracts.daemons import AUDIT_CHANNEL, AUDITD, COMPILER, HOSTD, VAULTD, Step, answers, expected
from tests.vault.conftest import InProcess, Log

sys.path.append(str(Path(__file__).parent.parent / "lifecycle"))

from standins import StandIn, StandInAuditd, StandInHostd, StandInVaultd


@asynccontextmanager
async def _served(daemon: StandIn, directory: Path) -> AsyncIterator[wire.Client]:
    uid = os.geteuid()
    server = await wire.serve_unix(wire.bind_unix(directory / "s"), daemon.handle, allowed_uids=frozenset({uid}))
    client = await wire.Client.connect(directory / "s", uid)
    try:
        yield client
    finally:
        await client.close()
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


@asynccontextmanager
async def _answered(sock: socket.socket, handler: Any) -> AsyncIterator[wire.Client]:
    client = await wire.serve_connection(sock, handler)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture(name="place")
def _place() -> Any:
    """Make a directory with a short name, because the length of socket paths is limited."""
    with tempfile.TemporaryDirectory(prefix="dc-") as name:
        yield Path(name)


@pytest.mark.parametrize(
    ("kind", "steps"), [(StandInVaultd, VAULTD), (StandInAuditd, AUDITD)], ids=["vaultd", "auditd"]
)
async def test_a_stand_in_answers_as_the_table_says(kind: type[StandIn], steps: tuple[Step, ...], place: Path) -> None:
    async with _served(kind(), place) as client:
        assert expected(steps) == await answers(client.call, steps)


async def test_hostds_stand_in_answers_as_the_table_says(place: Path) -> None:
    async with _served(StandInHostd(place, None), place) as client:
        assert expected(HOSTD) == await answers(client.call, HOSTD)


async def test_vaultd_answers_as_the_table_says(place: Path) -> None:
    vault = InProcess(place, frozenset())
    await vault.start()
    try:
        client = await wire.Client.connect(place / "s", os.geteuid())
        assert expected(VAULTD) == await answers(client.call, VAULTD)
        await client.close()
    finally:
        await vault.stop()


async def test_auditd_answers_as_the_table_says(place: Path) -> None:
    auditd = await Auditd(place, host_uid=os.geteuid() + 1).start()
    try:
        assert auditd.control is not None
        assert expected(AUDITD) == await answers(auditd.control.call, AUDITD)
    finally:
        await auditd.stop()


async def test_the_vaults_stand_in_for_an_audit_channel_answers_as_the_table_says() -> None:
    near, far = socket.socketpair()
    async with _answered(far, Log().handle), _answered(near, None) as client:
        assert expected(AUDIT_CHANNEL) == await answers(client.call, AUDIT_CHANNEL)


async def test_an_audit_channel_of_auditd_answers_as_the_table_says(place: Path) -> None:
    auditd = await Auditd(place).start()
    try:
        near = socket.socket(fileno=await auditd.attach_fd(None))
        async with _answered(near, None) as client:
            assert expected(AUDIT_CHANNEL) == await answers(client.call, AUDIT_CHANNEL)
    finally:
        await auditd.stop()


@pytest.mark.parametrize(
    ("module", "config"),
    [("policy.compiler", {"policy_file": None}), ("tests.runtimes.standin", {"kind": "compiler"})],
    ids=["compiler", "stand-in"],
)
async def test_a_compiler_answers_as_the_table_says(module: str, config: dict[str, Any], place: Path) -> None:
    """Both also send `changed` when they start."""
    (place / "c.json").write_text(json.dumps(config))
    near, far = socket.socketpair()
    changed = asyncio.Event()

    async def told(_client: wire.Client, op: str, _parameters: wire.Message, _fds: list[int]) -> None:
        assert "changed" == op
        changed.set()

    async with _answered(near, told) as client:
        with far:
            arguments, env = ("-m", module, str(place / "c.json")), {"SALLYPORT_CONTROL_FD": str(far.fileno())}
            process = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, pass_fds=[far.fileno()], env=os.environ | env
            )
        try:
            async with asyncio.timeout(60):
                await changed.wait()
            assert expected(COMPILER) == await answers(client.call, COMPILER)
        finally:
            process.kill()
            await process.wait()


@pytest.mark.system
async def test_hostd_answers_as_the_table_says(stack: Stack) -> None:
    client = await wire.Client.connect(stack.run / "hostd.sock", 0)
    try:
        assert expected(HOSTD) == await answers(client.call, HOSTD)
    finally:
        await client.close()
