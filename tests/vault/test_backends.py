"""The conformance suite of the sources of secrets: the same properties over the sealed store and each backend.

A worker's channel is the far end. Each case has its control: the value is released before what the case forbids.
"""

import asyncio
import logging
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import wire
from runtimes.spec import SuppliesConfig
from runtimes.supplies import Supplies
from tests.client_certificates import authority
from tests.vault.backends import (
    HOST,
    OTHER,
    REFRESH,
    SANDBOX,
    BackendWorld,
    CommandWorld,
    EnvironmentWorld,
    FileWorld,
    OldVaultWorld,
    RefreshWorld,
    SealedWorld,
    TokenWorld,
    VaultWorld,
    World,
    grant,
)
from vault.client import ReleaseRefusedError
from vault.secret import Secret
from wire.api import vaultd
from wire.api.fetcher import Material

pytestmark = pytest.mark.slow

FIRST, SECOND = "canary-first-51c0", "canary-second-77ab"
LOCAL: list[type[BackendWorld]] = [EnvironmentWorld, FileWorld, CommandWorld, TokenWorld, RefreshWorld]
REAL: list[type[VaultWorld]] = [VaultWorld, OldVaultWorld]
BACKENDS = [*LOCAL, *(pytest.param(world, marks=pytest.mark.system) for world in REAL)]
WORLDS = [SealedWorld, *BACKENDS]


@pytest.fixture(name="world")
async def _world(request: pytest.FixtureRequest, short_path: Path) -> AsyncIterator[World]:
    running: World = request.param(short_path)
    if isinstance(running, VaultWorld):
        running.server = request.getfixturevalue("vault_server")
    await running.start()
    yield running
    await running.stop()


every_source = pytest.mark.parametrize("world", WORLDS, indirect=True, ids=lambda kind: kind.__name__)
every_backend = pytest.mark.parametrize("world", BACKENDS, indirect=True, ids=lambda kind: kind.__name__)


async def refused(call: object) -> ReleaseRefusedError:
    """Return the refusal of a release. It has no value."""
    with pytest.raises(ReleaseRefusedError) as caught:
        await call  # type: ignore[misc]
    assert FIRST not in str(caught.value)
    return caught.value


@every_source
async def test_a_value_is_released_after_its_durable_record_and_is_in_no_other_place(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The control of this file."""
    caplog.set_level(logging.DEBUG)
    await world.store(FIRST)
    worker = await world.opened(world.reference)
    lease = await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
    assert Secret(FIRST) == lease.value
    assert worker.current(lease)
    (record,) = world.vault.log.of("secret.release", "allow")
    assert (True, world.reference, SANDBOX, HOST) == tuple(
        record[key] for key in ("durable", "secret", "sandbox", "host")
    )
    assert FIRST not in repr(world.vault.log.records) + caplog.text
    assert FIRST.encode() not in b"".join(path.read_bytes() for path in (world.directory / "vault").rglob("*.sealed"))
    await worker.close()


@every_source
async def test_nothing_is_released_before_the_record_is_confirmed(world: World) -> None:
    """I5: the source has its value already, and the log does not confirm."""
    await world.store(FIRST)
    worker = await world.opened(world.reference)
    world.vault.log.open.clear()
    world.vault.audit._timeout = 0.3
    error = await refused(worker.release(world.reference, HOST, 443, "https", method="GET", path="/"))
    assert wire.Code.AUDIT_UNAVAILABLE == error.code
    await worker.close()


@every_source
async def test_a_secret_that_the_source_does_not_have_is_refused_with_a_reason(world: World) -> None:
    """Only uses of that secret fail. The record of the denial has the reason, too."""
    await world.store(FIRST)
    if isinstance(world, SealedWorld):
        worker = await world.opened(world.reference)
        await world.remove()
        absent = world.reference
    else:
        worker = await world.opened(world.reference, world.absent)
        await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
        absent = world.absent
    error = await refused(worker.release(absent, HOST, 443, "https", method="GET", path="/"))
    assert wire.Code.UNKNOWN_SECRET == error.code
    (record,) = world.vault.log.of("secret.release", "deny")
    assert (wire.Code.UNKNOWN_SECRET, error.reason) == (record["code"], record["reason"])
    await worker.close()


@every_backend
async def test_a_backends_secret_goes_only_to_hosts_that_the_operators_file_names(world: BackendWorld) -> None:
    """`serve` has granted the other host, too. The backend is not even asked."""
    await world.store(FIRST)
    worker = await world.opened(world.reference)
    error = await refused(worker.release(world.reference, OTHER, 443, "https", method="GET", path="/"))
    assert wire.Code.NOT_BOUND == error.code
    assert [] == world.reads
    await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
    await worker.close()


@every_backend
async def test_without_the_operators_list_no_reference_is_released(world: BackendWorld) -> None:
    """vaultd after a restart, until hostd has passed the list on; then under a list that names it no more."""
    await world.store(FIRST)
    ended: list[object] = []

    async def note(names: object) -> None:
        ended.append(names)

    await world.vault.admin.open_sandbox(SANDBOX, "lin-1", [grant(world.reference, HOST)])
    worker = await world.vault.worker(SANDBOX, 1, note)
    error = await refused(worker.release(world.reference, HOST, 443, "https", method="GET", path="/"))
    assert wire.Code.UNAVAILABLE == error.code
    await world.refer(world.reference)
    await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
    await world.refer()
    assert [frozenset({world.reference})] == ended
    error = await refused(worker.release(world.reference, HOST, 443, "https", method="GET", path="/"))
    assert wire.Code.NOT_BOUND == error.code
    await worker.close()


@every_backend
async def test_serve_gives_a_sandbox_no_value_of_its_own_under_the_name_of_a_backends_secret(
    world: BackendWorld,
) -> None:
    with pytest.raises(wire.RemoteError, match="name of a backend's secret"):
        await world.vault.admin.open_sandbox(
            SANDBOX, "lin-1", [grant(world.reference, OTHER)], {world.reference: Secret(FIRST)}
        )


@every_source
async def test_a_replaced_value_ends_the_leases_of_the_former_one_which_is_still_looked_for(world: World) -> None:
    ended: list[object] = []

    async def note(names: object) -> None:
        ended.append(names)

    await world.store(FIRST)
    worker = await world.opened(world.reference, on_revoke=note)
    before = await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
    await world.store(SECOND)
    await world.follow()
    assert [frozenset({world.reference})] == ended
    assert not worker.current(before)
    after = await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
    assert (Secret(SECOND), (Secret(FIRST),)) == (after.value, after.former)
    await worker.close()


@every_source
async def test_a_removed_secret_ends_its_leases(world: World) -> None:
    await world.store(FIRST)
    worker = await world.opened(world.reference)
    lease = await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
    await world.remove()
    await world.follow()
    assert not worker.current(lease)
    error = await refused(worker.release(world.reference, HOST, 443, "https", method="GET", path="/"))
    assert wire.Code.UNKNOWN_SECRET == error.code
    await worker.close()


@every_backend
async def test_a_backend_that_is_away_disturbs_no_valid_lease_and_none_lives_longer(world: BackendWorld) -> None:
    """The fetcher is away for longer than a refresh: releases go on at once, until the value's own end."""
    await world.store(FIRST)
    worker = await world.opened(world.reference)
    await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
    await world.stop_fetcher()
    for _ in range(4):
        await world.follow()
        lease = await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
        assert Secret(FIRST) == lease.value
    world.offset += REFRESH
    error = await refused(worker.release(world.reference, HOST, 443, "https", method="GET", path="/"))
    assert wire.Code.BACKEND == error.code
    await world.start_fetcher()
    world.offset += 2
    await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
    await worker.close()


@every_backend
async def test_a_value_that_ends_while_its_record_is_written_is_not_released(world: BackendWorld) -> None:
    await world.store(FIRST)
    worker = await world.opened(world.reference)
    await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
    world.vault.log.open.clear()
    world.vault.log.asked.clear()
    asked = asyncio.create_task(worker.release(world.reference, HOST, 443, "https", method="GET", path="/"))
    await world.vault.log.asked.wait()
    world.offset += 301
    world.vault.log.open.set()
    assert wire.Code.BACKEND == (await refused(asked)).code
    await worker.close()


@every_backend
async def test_requests_at_once_and_later_ones_ask_the_backend_once(world: BackendWorld) -> None:
    await world.store(FIRST)
    worker = await world.opened(world.reference)
    asks = [worker.release(world.reference, HOST, 443, "https", method="GET", path="/") for _ in range(8)]
    for ask in [*asks, worker.release(world.reference, HOST, 443, "https", method="GET", path="/")]:
        await ask
    assert [world.reference] == world.reads
    await worker.close()


@every_backend
async def test_a_value_that_could_not_be_taken_out_of_responses_is_refused(world: BackendWorld) -> None:
    await world.store("short")
    worker = await world.opened(world.reference)
    error = await refused(worker.release(world.reference, HOST, 443, "https", method="GET", path="/"))
    assert wire.Code.BACKEND == error.code
    assert "shorter than 8 characters" in error.reason
    await worker.close()


@every_backend
async def test_a_client_certificate_is_a_value_and_a_broken_one_is_refused(world: BackendWorld) -> None:
    """PEM has many lines. The line break at its end does not matter."""
    value = authority("Root").issue("agent").value.rstrip()
    await world.store(value)
    worker = await world.opened(world.reference)
    lease = await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
    assert Secret(value) == lease.value
    await world.store(value.replace("BEGIN CERTIFICATE", "BEGIN NOTHING"))
    with pytest.raises(wire.RemoteError) as caught:
        world.forget()
        await world.vault.admin.ask(vaultd.CheckReference(world.reference))
    assert wire.Code.BACKEND == caught.value.code
    await worker.close()


@every_backend
async def test_an_operator_can_check_a_reference_without_its_value(world: BackendWorld) -> None:
    await world.store(FIRST)
    assert vaultd.Checked(REFRESH, 300) == await world.vault.admin.ask(vaultd.CheckReference(world.reference))
    with pytest.raises(wire.RemoteError) as caught:
        await world.vault.admin.ask(vaultd.CheckReference(world.absent))
    assert wire.Code.UNKNOWN_SECRET == caught.value.code
    ((line,),) = ((await world.vault.admin.ask(vaultd.ListBackends())).backends,)
    assert (world.reference.partition("://")[0], "") == (line.name, line.problem)


async def test_a_reference_to_a_backend_that_is_not_configured_says_what_to_set(short_path: Path) -> None:
    world = FileWorld(short_path)
    await world.start()
    worker = await world.opened("env://TOKEN")
    error = await refused(worker.release("env://TOKEN", HOST, 443, "https", method="GET", path="/"))
    assert "set sallyport.vault.environment" in error.reason
    await worker.close()
    await world.stop()


@pytest.mark.parametrize("link", ["/etc/hostname", "../outside", "/proc/self/environ"])
async def test_a_link_out_of_the_directory_is_refused(short_path: Path, link: str) -> None:
    """The control is the link below the directory, which the world itself has."""
    world = FileWorld(short_path)
    (short_path / "outside").write_text(FIRST)
    await world.start()
    await world.store(FIRST)
    (world.mount / "leaves").symlink_to(link)
    worker = await world.opened(world.reference, "file://leaves")
    await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
    error = await refused(worker.release("file://leaves", HOST, 443, "https", method="GET", path="/"))
    assert "below sallyport.vault.file_directories" in error.reason
    await worker.close()
    await world.stop()


@pytest.mark.parametrize(
    ("material", "name"),
    [
        (Material.ENVIRONMENT, "PATH"),
        (Material.FILE, "../outside"),
        (Material.FILE, ".."),
        (Material.FILE, "fifo"),
        (Material.FILE, "directory"),
    ],
)
async def test_hostd_opens_only_what_the_settings_permit(short_path: Path, material: Material, name: str) -> None:
    """Also for a fetcher that has been taken over."""
    world = FileWorld(short_path)
    (short_path / "outside").write_text(FIRST)
    os.mkfifo(world.mount / "fifo")
    (world.mount / "directory").mkdir()
    with pytest.raises(wire.RequestError) as caught:
        Supplies(world.supplies).open(material, name)
    assert wire.Code.PATH_FORBIDDEN == caught.value.code


def test_programs_that_hostd_starts_do_not_inherit_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control is a variable that the settings do not name."""
    for name in ("CANARY_NAMED", "CANARY_OTHER"):
        monkeypatch.setenv(name, FIRST)
    supplies = Supplies(SuppliesConfig(environment=["CANARY_NAMED"], directories=[], credential=None))
    inherited = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    assert ("CANARY_OTHER" in inherited, "CANARY_NAMED" in inherited) == (True, False)
    with open(supplies.open(Material.ENVIRONMENT, "CANARY_NAMED")) as file:
        assert FIRST == file.read()


@every_backend
async def test_a_probe_says_whether_there_is_a_secret_and_makes_none(world: BackendWorld) -> None:
    """No value leaves the fetcher. Nothing is obtained, and no command is run: the control is a read, which does."""
    await world.store(FIRST)
    if isinstance(world, CommandWorld):
        world.value.unlink()  # a run would fail
    if isinstance(world, TokenWorld):
        await world.store("")  # an issue would fail
    await world.vault.admin.probe(world.reference)
    assert ([], {}) == (world.reads, world.vault.readings._held)
    if isinstance(world, CommandWorld | TokenWorld):
        with pytest.raises(wire.RemoteError):
            await world.vault.admin.check(world.reference)
    with pytest.raises(wire.RemoteError) as caught:
        await world.vault.admin.probe(world.absent)
    assert caught.value.code in (wire.Code.UNKNOWN_SECRET, wire.Code.FORBIDDEN)
    others = ("token://x", "env://X", "vault://kv/x#y")
    other = next(each for each in others if not world.reference.startswith(each.partition("://")[0]))
    with pytest.raises(wire.RemoteError, match="is configured: set sallyport"):
        await world.vault.admin.probe(other)


@every_backend
async def test_the_refusal_of_a_missing_secret_names_it_and_affects_no_other_one(world: BackendWorld) -> None:
    await world.store(FIRST)
    worker = await world.opened(world.reference, world.absent)
    error = await refused(worker.release(world.absent, HOST, 443, "https", method="GET", path="/"))
    assert error.reason.startswith(f"{world.absent} has no value; for the operator: missing: ")
    lease = await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
    assert Secret(FIRST) == lease.value
    await worker.close()
