"""Limits of references to backends: each only takes away, with the code that judges the bindings of sealed secrets."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.vault.backends import HOST, OTHER, SANDBOX, EnvironmentWorld, grant
from tests.vault.requests import CANARY
from tests.vault.test_channels import refusal
from vault import limit_record
from vault.client import ReleaseRefusedError
from vault.conditions import UNLIMITED, Amount, ConditionError, Selectors, UseLimits
from vault.grants import Grant, GrantError
from vault.keyring import Keyring
from vault.limit_record import ReferenceLimits, TooManyLimitsError
from vault.limits import EVERY, ReferenceLimit, limit_pattern
from vault.stores.directory import SealedDirectory
from wire.api import vaultd
from wire.api.vaultd import Used

NOW = datetime.now(UTC)
SECOND = "sbx-000000000000000000000002"
PAST, SOON = (NOW - timedelta(hours=1)).isoformat(), (NOW + timedelta(seconds=100)).isoformat()


@pytest.fixture(name="world")
async def _world(short_path: Path) -> AsyncIterator[EnvironmentWorld]:
    running = EnvironmentWorld(short_path)
    await running.start()
    await running.store(CANARY)
    yield running
    await running.stop()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[SealedDirectory]:
    """Make an empty directory for the record of limits."""
    made = SealedDirectory(tmp_path / "vault", Keyring(bytes(range(32))), "vault")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        ("env://A", {"env://A"}, {"env://AB", "file://A"}),
        ("env://A*", {"env://A", "env://AB"}, {"env://B", "file://A"}),
        ("vault://kv/agents/*", {"vault://kv/agents/a#t", "vault://kv/agents/b/c#t:u"}, {"vault://kv/agents2/a#t"}),
        ("vault://kv/agents/a#*", {"vault://kv/agents/a#t"}, {"vault://kv/agents/ab#t"}),
        (EVERY, {"env://A", "vault://kv/a#t", "token://t", "command://c", "file://f"}, set()),
    ],
)
def test_a_pattern_matches_a_reference_or_what_begins_like_it(
    pattern: str, matched: set[str], others: set[str]
) -> None:
    limit = ReferenceLimit.make(limit_pattern(pattern), expires=SOON)
    assert matched == {reference for reference in matched | others if limit.matches(reference)}


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "token",
        "sealed://a",
        "env://",
        "env://*a",
        "env://a**",
        "vault://kv/a",
        "vault://kv/a b*",
        "vaul*",
        "env://é*",
    ],
)
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(GrantError):
        limit_pattern(pattern)


def test_a_limit_says_something_that_a_binding_could_say() -> None:
    for parts in (
        {},
        {"hosts": ["*.a.test"]},
        {"hosts": []},
        {"ports": [0]},
        {"schemes": ["ftp"]},
        {"expires": "soon"},
    ):
        with pytest.raises(GrantError):
            ReferenceLimit.make("env://A", **parts)
    with pytest.raises(GrantError):
        ReferenceLimit.make("env://A", expires="2030-01-01T00:00:00")  # without its zone
    full = ReferenceLimit.make(
        "env://A", ["a.test"], [8443], ["https"], SOON, Selectors.make({"k": "v"}, ["i"]), UseLimits(3, 2, 5, 4)
    )
    assert full == ReferenceLimit.of(full.form)
    broken = vaultd.LimitForm("env://A", None, None, None, None, vaultd.ConditionForm(uses=0))
    with pytest.raises(GrantError):
        ReferenceLimit.of(broken)


def test_numbers_of_uses_together_are_the_least_of_each() -> None:
    assert UseLimits(2, 3) == UseLimits(2, None).both(UseLimits(5, 3))
    assert UseLimits(sent=7, sandbox_sent=1) == UseLimits(sent=7).both(UseLimits(sent=9, sandbox_sent=1))
    assert UNLIMITED == UNLIMITED.both(UNLIMITED)
    with pytest.raises(ConditionError):
        UseLimits(0)


WANTED = Grant.make("env://A", HOST, 443, "https")


def test_limits_are_read_back_and_replaced_by_pattern(directory: SealedDirectory) -> None:
    limits = ReferenceLimits(directory)
    limits.put(ReferenceLimit.make("env://*", [HOST]))
    limits.put(ReferenceLimit.make("env://A", limits=UseLimits(3)))
    limits.put(ReferenceLimit.make("env://A", limits=UseLimits(5)))
    again = ReferenceLimits(directory)
    assert (limits.forms, ["env://*", "env://A"]) == (again.forms, [one.pattern for one in again.forms])
    assert [None, 5] == [limit.limits.uses for limit in again.of("env://A")]
    assert ["env://*"] == [limit.pattern for limit in again.of("env://B")]
    again.remove("env://A")
    assert ["env://*"] == [one.pattern for one in ReferenceLimits(directory).forms]


def test_a_record_of_a_version_without_limits_in_bytes_is_read(directory: SealedDirectory) -> None:
    limits = ReferenceLimits(directory)
    limits.put(ReferenceLimit.make("env://A", limits=UseLimits(3, 2)))
    metadata, body = directory.read("limits")
    (written,) = json.loads(body)
    for key in ("sent", "sandbox_sent"):
        del written["conditions"][key]
    directory.write("limits", metadata, json.dumps([written]).encode())
    assert limits.forms == ReferenceLimits(directory).forms
    for damage in ({"unknown": 1}, {"uses": "3"}):
        damaged = {**written, "conditions": {**written["conditions"], **damage}}
        directory.write("limits", metadata, json.dumps([damaged]).encode())
        assert [EVERY] == [limit.pattern for limit in ReferenceLimits(directory).forms]
    del written["conditions"]["uses"]
    directory.write("limits", metadata, json.dumps([written]).encode())
    assert [EVERY] == [limit.pattern for limit in ReferenceLimits(directory).forms]


def test_a_damaged_record_ends_every_reference_until_that_is_ended(directory: SealedDirectory, tmp_path: Path) -> None:
    limits = ReferenceLimits(directory)
    limits.put(ReferenceLimit.make("env://A", limits=UseLimits(3)))
    record = tmp_path / "vault" / "=limits.sealed"
    whole = record.read_bytes()
    for content in (b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        record.write_bytes(content)
        damaged = ReferenceLimits(directory)
        for reference in ("env://A", "vault://kv/b#t"):
            (limit,) = damaged.of(reference)
            assert limit.expires is not None
            assert limit.expires < NOW
    damaged.put(ReferenceLimit.make("env://A", limits=UseLimits(3)))
    assert EVERY in ReferenceLimits(directory)
    damaged.remove(EVERY)
    assert ["env://A"] == [one.pattern for one in ReferenceLimits(directory).forms]


def test_the_number_of_limits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_record, "MOST_LIMITS", 1)
    limits = ReferenceLimits()
    for host in (HOST, OTHER):
        limits.put(ReferenceLimit.make("env://A", [host]))
    with pytest.raises(TooManyLimitsError):
        limits.put(ReferenceLimit.make("env://B", [HOST]))


async def opened(world: EnvironmentWorld, **more: Any) -> Any:
    await world.refer(world.reference)
    await world.vault.admin.open_sandbox(SANDBOX, "lin-1", [grant(world.reference, HOST)], **more)
    return await world.vault.worker(SANDBOX, 1)


def ask(world: EnvironmentWorld, worker: Any, purpose: Any = None, size: int | None = None) -> Any:
    return worker.release(world.reference, HOST, 443, "https", method="GET", path="/", purpose=purpose, size=size)


@pytest.mark.parametrize(
    ("parts", "code", "said"),
    [
        ({"hosts": [OTHER]}, "not_bound", "not bound to this host"),
        ({"ports": [8443]}, "not_bound", "not bound to this port"),
        ({"schemes": ["postgres"]}, "not_bound", "not bound to this scheme"),
        ({"expires": PAST}, "expired", "has expired"),
        ({"selectors": Selectors.make({"team": "b"})}, "not_granted", "other metadata"),
        ({"selectors": Selectors.make({}, ["another/image"])}, "not_granted", "other images"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("pattern", ["env://SALLYPORT_TEST_TOKEN", "env://*", EVERY])
async def test_a_limit_refuses_what_it_excludes_and_its_end_restores_it(
    world: EnvironmentWorld, pattern: str, parts: dict[str, Any], code: str, said: str
) -> None:
    """Its leases end with the answer. The refusal names the reference. The backend is not asked."""
    worker = await opened(world, metadata={"team": "a"})
    lease = await ask(world, worker)
    assert released(lease)
    await world.vault.admin.limit(ReferenceLimit.make("env://OTHER*", [OTHER]))  # of other references
    assert worker.current(lease)
    revoked = await world.vault.admin.limit(ReferenceLimit.make(pattern, **parts))
    assert (1, 0) == (revoked.confirmed, revoked.cut_off)
    assert not worker.current(lease)
    reads = len(world.reads)
    with pytest.raises(ReleaseRefusedError, match=re.escape(world.reference)) as caught:
        await ask(world, worker)
    assert (code, reads) == (caught.value.code, len(world.reads))
    assert said in caught.value.reason
    await world.vault.admin.unlimit(pattern)
    assert released(await ask(world, worker))
    records = [
        record["secret"] for kind in ("vault.limit", "vault.unlimit") for record in world.vault.log.of(kind, "info")
    ]
    assert ["env://OTHER*", pattern, pattern] == records
    await worker.close()


def released(lease: Any) -> bool:
    return bool(lease.value.reveal() == CANARY)


async def test_a_lease_ends_with_the_limit(world: EnvironmentWorld) -> None:
    soon = (datetime.now(UTC) + timedelta(seconds=100)).isoformat()
    worker = await opened(world)
    await world.vault.admin.limit(ReferenceLimit.make("env://*", expires=soon))
    await world.vault.admin.limit(ReferenceLimit.make(world.reference, expires=(NOW + timedelta(days=1)).isoformat()))
    lease = await ask(world, worker)
    assert lease.expires - asyncio.get_running_loop().time() <= 100
    await worker.close()


async def test_an_expired_secret_is_looked_for_in_responses_for_one_more_day(world: EnvironmentWorld) -> None:
    """The control of the refusal is an end that is not that long ago."""
    worker = await opened(world)
    await world.vault.admin.limit(ReferenceLimit.make(world.reference, expires=PAST, limits=UseLimits(1)))
    assert "expired" == await refusal(ask(world, worker))
    assert released(await ask(world, worker, "scrub"))
    long_ago = (datetime.now(UTC) - timedelta(hours=24, seconds=1)).isoformat()
    await world.vault.admin.limit(ReferenceLimit.make(world.reference, expires=long_ago, limits=UseLimits(1)))
    assert "expired" == await refusal(ask(world, worker, "scrub"))
    await worker.close()


async def test_uses_are_counted_for_each_reference_over_patterns_restarts_and_sandboxes(
    world: EnvironmentWorld,
) -> None:
    vault = world.vault
    worker = await opened(world)
    await vault.admin.limit(ReferenceLimit.make("env://*", limits=UseLimits(uses=3)))
    await vault.admin.limit(ReferenceLimit.make(world.reference, limits=UseLimits(sandbox_uses=2)))
    assert 1 == (await ask(world, worker)).permits.uses
    await worker.close()
    await vault.stop()
    await vault.start()
    await world.refer(world.reference)
    worker = await vault.worker(SANDBOX, 2)
    assert (1, None) == ((await ask(world, worker)).permits.uses, (await ask(world, worker, "scrub")).permits.uses)
    assert "exhausted" == await refusal(ask(world, worker))
    await vault.admin.open_sandbox(SECOND, "lin-2", [grant(world.reference, HOST)])
    other = await vault.worker(SECOND, 1)
    assert 1 == (await ask(world, other)).permits.uses
    assert "exhausted" == await refusal(ask(world, other))
    assert {world.reference: Used(3, 0)} == (await vault.admin.listed()).used
    await vault.admin.unlimit("env://*")
    assert 1 == (await ask(world, other)).permits.uses  # its own limit is left
    await vault.admin.reset(world.reference)
    assert {} == (await vault.admin.listed()).used
    assert 1 == (await ask(world, worker)).permits.uses
    assert "unknown_secret" == await refusal(vault.admin.reset("env://NEVER_USED"))
    await worker.close()
    await other.close()


async def test_bytes_are_counted_for_each_reference_over_patterns(world: EnvironmentWorld) -> None:
    vault = world.vault
    worker = await opened(world)
    await vault.admin.limit(ReferenceLimit.make("env://*", limits=UseLimits(sent=100)))
    await vault.admin.limit(ReferenceLimit.make(world.reference, limits=UseLimits(uses=3, sandbox_sent=70)))
    assert "exhausted" == await refusal(ask(world, worker, size=71))
    assert Amount(1, 60) == (await ask(world, worker, size=60)).permits
    assert "exhausted" == await refusal(ask(world, worker, size=11))
    assert "exhausted" == await refusal(ask(world, worker))
    assert {world.reference: Used(1, 60)} == (await vault.admin.listed()).used
    await vault.admin.unlimit(world.reference)
    assert Amount(None, 40) == (await ask(world, worker, size=40)).permits
    await vault.admin.unlimit("env://*")
    assert Amount() == (await ask(world, worker)).permits
    await worker.close()


async def test_a_use_of_a_reference_that_cannot_be_counted_is_no_release(
    world: EnvironmentWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await opened(world)
    await world.vault.admin.limit(ReferenceLimit.make("env://*", limits=UseLimits(uses=3)))
    monkeypatch.setattr("vault.budgets.MOST_COUNTED", 0)
    assert "storage" == await refusal(ask(world, worker))
    monkeypatch.undo()
    os.environ["SALLYPORT_TEST_TOKEN"] = CANARY
    assert 1 == (await ask(world, worker)).permits.uses
    await worker.close()


async def test_a_first_limit_needs_no_log_and_what_can_give_more_does(world: EnvironmentWorld) -> None:
    worker = await opened(world)
    lease = await ask(world, worker)
    admin = world.vault.admin
    await world.vault.audit.close(0)
    await admin.limit(ReferenceLimit.make("env://*", [OTHER]))
    assert not worker.current(lease)
    assert "audit_unavailable" == await refusal(admin.limit(ReferenceLimit.make("env://*", [HOST])))
    assert "audit_unavailable" == await refusal(admin.unlimit("env://*"))
    assert [("env://*", (OTHER,))] == [(one.pattern, one.hosts) for one in (await admin.listed()).limits]
    assert "invalid" == await refusal(admin.unlimit("env://A"))
    await worker.close()


async def test_a_limit_that_cannot_be_written_is_not_in_force_and_says_so(world: EnvironmentWorld) -> None:
    worker = await opened(world)
    blocked = world.directory / "vault" / "+limits.sealed"
    blocked.mkdir()
    assert "storage" == await refusal(world.vault.admin.limit(ReferenceLimit.make("env://*", [OTHER])))
    assert () == (await world.vault.admin.listed()).limits
    blocked.rmdir()
    assert released(await ask(world, worker))
    await worker.close()


@pytest.mark.parametrize("excluding", ["env://*", "env://SALLYPORT_*"])
async def test_every_limit_that_matches_must_permit_a_release(world: EnvironmentWorld, excluding: str) -> None:
    """In either order: a permission of one does not outweigh another."""
    worker = await opened(world)
    for pattern in ("env://*", "env://SALLYPORT_*"):
        hosts = [OTHER] if pattern == excluding else [HOST]
        await world.vault.admin.limit(ReferenceLimit.make(pattern, hosts))
    assert "not_bound" == await refusal(ask(world, worker))
    await world.vault.admin.limit(ReferenceLimit.make(excluding, [HOST, OTHER]))
    assert released(await ask(world, worker))
    await worker.close()
