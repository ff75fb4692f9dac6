"""The stand-ins of the control plane's tests answer as the real daemons do: one table of calls, made at both."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import wire
from demo.stack import Stack
from tests.audit.conftest import Auditd
from tests.contracts.daemons import AUDITD, HOSTD, VAULTD, Step, answers, expected
from tests.vault.conftest import InProcess

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


@pytest.fixture(name="place")
def _place() -> Any:
    """A directory with a short name: the paths of sockets are bounded."""
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


@pytest.mark.system
async def test_hostd_answers_as_the_table_says(stack: Stack) -> None:
    client = await wire.Client.connect(stack.run / "hostd.sock", 0)
    try:
        assert expected(HOSTD) == await answers(client.call, HOSTD)
    finally:
        await client.close()
