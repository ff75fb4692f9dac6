"""Freezes and `revoke-all`: what is refused, what ends at once, and what a restart keeps."""

import asyncio
import itertools
import re
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.vault.requests import ASK, BINDING, CANARY, GRANT, SANDBOX
from tests.vault.test_channels import opened, refusal
from vault import channels, freeze
from vault.client import ReleaseRefusedError
from vault.conditions import Amount, Selectors, UseLimits
from vault.freeze import ALL, Extent, Freezes, TooManyFreezesError
from vault.grants import Grant, SecretBinding
from vault.keyring import Keyring
from vault.secret import Secret
from vault.stores.directory import SealedDirectory
from wire.api import vaultd
from wire.api.vaultd import Used

NOW = datetime(2026, 3, 1, tzinfo=UTC)
KEYRING = Keyring(bytes(range(32)))
OTHER = "sbx-000000000000000000000002"
ASK_OTHER = ("other", "api.good.test", 443, "https")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[SealedDirectory]:
    """Make an empty directory for the record of freezes."""
    made = SealedDirectory(tmp_path / "vault", KEYRING, "vault")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("extent", "covered"),
    [
        (ALL, {("one", "a"), ("one", "b"), ("two", "a"), ("two", "b"), (None, "a")}),
        (Extent("one"), {("one", "a"), ("one", "b")}),
        (Extent(None, "a"), {("one", "a"), ("two", "a"), (None, "a")}),
        (Extent("one", "a"), {("one", "a")}),
    ],
)
def test_a_freeze_covers_exactly_its_extent(extent: Extent, covered: set[tuple[str | None, str]]) -> None:
    freezes = Freezes()
    everything = [*itertools.product(("one", "two"), ("a", "b")), (None, "a")]
    assert not any(freezes.refusal(*use) for use in everything)
    freezes.begin(extent, NOW)
    assert covered == {use for use in everything if freezes.refusal(*use)}
    freezes.remove(extent)
    assert not any(freezes.refusal(*use) for use in everything)


def test_freezes_are_read_back_and_the_end_of_one_leaves_the_others(directory: SealedDirectory) -> None:
    freezes = Freezes(directory)
    for extent in (ALL, Extent("one"), Extent(None, "a"), Extent("two", "a")):
        freezes.begin(extent, NOW)
    freezes.save()
    again = Freezes(directory)
    assert (freezes.forms, 4) == (again.forms, len(again.forms))
    again.remove(ALL)
    again.forget("two")
    left = Freezes(directory)
    assert [("one", None), (None, "a")] == [(one.sandbox, one.secret) for one in left.forms]


def test_a_damaged_record_freezes_everything_until_that_is_ended(directory: SealedDirectory, tmp_path: Path) -> None:
    """Also after another change of the freezes, and in the next process."""
    freezes = Freezes(directory)
    freezes.begin(Extent("one"), NOW)
    freezes.save()
    record = tmp_path / "vault" / "=freezes.sealed"
    whole = record.read_bytes()
    for content in (b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        record.write_bytes(content)
        damaged = Freezes(directory)
        assert damaged.refusal("two", "a") is not None
    damaged.begin(Extent("three"), NOW)
    damaged.save()
    assert Freezes(directory).refusal("two", "a") is not None
    damaged.remove(ALL)
    assert Freezes(directory).refusal("two", "a") is None


def test_the_number_of_freezes_is_bounded_and_everything_can_always_be_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freeze, "MOST_FREEZES", 2)
    freezes = Freezes()
    for name in ("one", "two", "one"):
        freezes.begin(Extent(name), NOW)
    with pytest.raises(TooManyFreezesError):
        freezes.begin(Extent("three"), NOW)
    freezes.begin(ALL, NOW)
    assert freezes.refusal("three", "a") is not None


async def two_workers(vault: Any) -> tuple[Any, Any, asyncio.Queue[Any], asyncio.Queue[Any]]:
    """Return two workers that hold leases of two secrets, and what each receives to drop."""
    told: tuple[asyncio.Queue[Any], asyncio.Queue[Any]] = (asyncio.Queue(), asyncio.Queue())
    for name in ("token", "other"):
        await vault.admin.put(name, Secret(f"{CANARY}-{name}"), BINDING)
    grants = [GRANT, Grant.make(*ASK_OTHER)]
    workers = []
    for number, sandbox in enumerate((SANDBOX, OTHER)):
        await vault.admin.open_sandbox(sandbox, f"lin-{number}", grants)
        workers.append(await vault.worker(sandbox, 1, told[number].put))
    return workers[0], workers[1], *told


@pytest.mark.parametrize(
    ("sandbox", "secret", "ended"),
    [
        (None, None, {(0, "token"), (0, "other"), (1, "token"), (1, "other")}),
        (SANDBOX, None, {(0, "token"), (0, "other")}),
        (None, "token", {(0, "token"), (1, "token")}),
        (SANDBOX, "token", {(0, "token")}),
    ],
)
@pytest.mark.parametrize("action", ["freeze", "revoke_all"])
async def test_leases_of_the_extent_end_before_the_answer_and_no_others(
    vault: Any, action: str, sandbox: str | None, secret: str | None, ended: set[tuple[int, str]]
) -> None:
    """A freeze refuses new ones, in the extent alone; after `revoke-all` the grants still give new ones."""
    one, two, *_ = await two_workers(vault)
    asks = {"token": ASK, "other": ASK_OTHER}
    leases = {
        (number, name): await worker.release(*ask)
        for number, worker in enumerate((one, two))
        for name, ask in asks.items()
    }
    revoked = await getattr(vault.admin, action)(sandbox, secret)
    assert (len({number for number, _ in ended}), 0) == (revoked.confirmed, revoked.cut_off)
    workers = (one, two)
    assert ended == {use for use, lease in leases.items() if not workers[use[0]].current(lease)}
    for number, name in leases:
        asked = workers[number].release(*asks[name])
        if action == "freeze" and (number, name) in ended:
            assert "frozen" == await refusal(asked)
        else:
            assert Secret(f"{CANARY}-{name}") == (await asked).value
    kind = {"freeze": "vault.freeze", "revoke_all": "vault.revoke_all"}[action]
    await vault.audit.drain()
    (record,) = vault.log.of(kind, "info")
    assert (sandbox, secret) == (record.get("sandbox"), record.get("secret"))
    for worker in workers:
        await worker.close()


async def test_nothing_of_a_frozen_secret_is_released_also_not_to_search_for_it(vault: Any) -> None:
    """Not after a restart of vaultd either. Certificates are issued, secrets are put and rotated meanwhile."""
    await opened(vault)
    await vault.admin.freeze()
    for _ in range(2):
        worker = await vault.worker(SANDBOX, 1)
        assert "frozen" == await refusal(worker.release(*ASK))
        assert "frozen" == await refusal(worker.release(*ASK, purpose="scrub"))
        assert (await worker.intermediate()).chain_pem
        await worker.close()
        await vault.stop()
        await vault.start()
    assert [(None, None)] == [(one.sandbox, one.secret) for one in (await vault.admin.listed()).frozen]
    await vault.admin.rotate("token", Secret("rotated-while-frozen"))
    await vault.admin.unfreeze()
    worker = await vault.worker(SANDBOX, 1)
    assert Secret("rotated-while-frozen") == (await worker.release(*ASK)).value
    await worker.close()


async def test_a_release_that_waits_for_the_log_during_a_freeze_is_refused(vault: Any) -> None:
    worker = await opened(vault)
    vault.log.asked.clear()
    vault.log.open.clear()
    asking = asyncio.create_task(refusal(worker.release(*ASK)))
    await asyncio.wait_for(vault.log.asked.wait(), 20)
    await vault.admin.freeze()
    vault.log.open.set()
    assert "frozen" == await asking
    await worker.close()


async def test_a_freeze_needs_no_log_and_its_end_does(vault: Any) -> None:
    worker = await opened(vault)
    await vault.audit.close(0)
    await vault.admin.freeze()
    assert "audit_unavailable" == await refusal(vault.admin.unfreeze())
    assert 1 == len((await vault.admin.listed()).frozen)
    await worker.close()


async def test_a_freeze_that_cannot_be_written_is_in_force_nevertheless_and_says_so(vault: Any) -> None:
    worker = await opened(vault)
    lease = await worker.release(*ASK)
    (vault.directory / "vault" / "+freezes.sealed").mkdir()
    assert "storage" == await refusal(vault.admin.freeze())
    assert not worker.current(lease)
    assert "frozen" == await refusal(worker.release(*ASK))
    (vault.directory / "vault" / "+freezes.sealed").rmdir()
    await worker.close()


@pytest.mark.parametrize("action", ["freeze", "revoke_all"])
async def test_a_worker_that_does_not_confirm_an_operators_call_loses_its_channel_early(
    vault: Any, action: str
) -> None:
    """Earlier than at other revocations. It delays no other worker, and its lease is not current any more."""
    dropped: asyncio.Queue[Any] = asyncio.Queue()

    async def silent(_secrets: frozenset[str] | None) -> None:
        await asyncio.Event().wait()

    await opened(vault)
    await vault.admin.open_sandbox(OTHER, "lin-2", [GRANT])
    worker, quick = await vault.worker(SANDBOX, 1, silent), await vault.worker(OTHER, 1, dropped.put)
    lease, other = await worker.release(*ASK), await quick.release(*ASK)
    began = time.monotonic()
    call = asyncio.create_task(getattr(vault.admin, action)())
    await asyncio.wait_for(dropped.get(), 20)
    assert not call.done()
    revoked = await call
    assert time.monotonic() - began < channels.REVOKE_TIMEOUT
    assert channels.URGENT_TIMEOUT < 1.0
    assert (1, 1) == (revoked.confirmed, revoked.cut_off)
    async with asyncio.timeout(20):
        while worker.current(lease):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not quick.current(other)
    await quick.close()


async def test_a_misspelled_name_freezes_nothing_and_says_so(vault: Any) -> None:
    await opened(vault)
    for action in ("freeze", "revoke_all"):
        assert "unknown_secret" == await refusal(getattr(vault.admin, action)(None, "tokem"))
        assert "unknown_sandbox" == await refusal(getattr(vault.admin, action)("sbx-9", None))
        assert "invalid" == await refusal(getattr(vault.admin, action)("SBX", None))
    assert "invalid" == await refusal(vault.admin.unfreeze(None, "token"))
    await vault.admin.open_sandbox(OTHER, "lin-2", [Grant.make("later", "api.good.test", 443, "https")])
    await vault.admin.freeze(None, "later")  # granted already, and not in the vault yet


async def test_a_removed_sandbox_leaves_no_freeze(vault: Any) -> None:
    await opened(vault)
    await vault.admin.freeze(SANDBOX)
    await vault.admin.close_sandbox(SANDBOX)
    assert () == (await vault.admin.listed()).frozen


async def test_a_limited_secret_is_released_as_often_as_its_limit_says_over_restarts(vault: Any) -> None:
    """Each lease permits one use, counted before the value leaves. A search in responses uses nothing."""
    binding = SecretBinding.make(["api.good.test"], limits=UseLimits(uses=3, sandbox_uses=2))
    worker = await opened(vault, binding)
    assert 1 == (await worker.release(*ASK)).permits.uses
    await vault.stop()
    await vault.start()
    worker = await vault.worker(SANDBOX, 1)
    assert Amount(1) == (await worker.release(*ASK)).permits
    assert Amount() == (await worker.release(*ASK, purpose="scrub")).permits
    assert "exhausted" == await refusal(worker.release(*ASK))
    assert Secret(CANARY) == (await worker.release(*ASK, purpose="scrub")).value
    await vault.admin.open_sandbox(OTHER, "lin-2", [GRANT])
    other = await vault.worker(OTHER, 1)
    assert 1 == (await other.release(*ASK)).permits.uses
    assert "exhausted" == await refusal(other.release(*ASK))
    assert {"token": Used(3, 0)} == (await vault.admin.listed()).used
    await vault.admin.reset("token")
    assert 1 == (await other.release(*ASK)).permits.uses
    await worker.close()
    await other.close()


async def test_a_secret_is_released_for_as_many_bytes_as_its_limit_says_over_restarts(vault: Any) -> None:
    """A request of unknown length is refused. A search in responses needs none, also when all bytes are used up."""
    binding = SecretBinding.make(["api.good.test"], limits=UseLimits(sent=100, sandbox_sent=70))
    worker = await opened(vault, binding)
    assert "exhausted" == await refusal(worker.release(*ASK))
    assert "exhausted" == await refusal(worker.release(*ASK, size=71))
    assert [] == vault.log.of("secret.release", "allow")  # refused before the record of a release
    assert Amount(None, 60) == (await worker.release(*ASK, size=60)).permits
    await vault.stop()
    await vault.start()
    worker = await vault.worker(SANDBOX, 1)
    assert "exhausted" == await refusal(worker.release(*ASK, size=11))
    assert Amount(None, 10) == (await worker.release(*ASK, size=10)).permits
    assert Amount() == (await worker.release(*ASK, purpose="scrub")).permits
    await vault.admin.open_sandbox(OTHER, "lin-2", [GRANT])
    other = await vault.worker(OTHER, 1)
    assert "exhausted" == await refusal(other.release(*ASK, size=31))
    assert Amount(None, 30) == (await other.release(*ASK, size=30)).permits
    assert {"token": Used(0, 100)} == (await vault.admin.listed()).used
    assert Secret(CANARY) == (await other.release(*ASK, purpose="scrub")).value
    await vault.admin.reset("token")
    assert Amount(None, 70) == (await other.release(*ASK, size=70)).permits
    await worker.close()
    await other.close()


async def test_a_use_that_cannot_be_counted_is_no_release(vault: Any) -> None:
    worker = await opened(vault, SecretBinding.make(["api.good.test"], limits=UseLimits(uses=9)))
    blocked = vault.directory / "vault" / "budgets" / "+token.sealed"
    blocked.mkdir()
    assert "storage" == await refusal(worker.release(*ASK))
    blocked.rmdir()
    assert 1 == (await worker.release(*ASK)).permits.uses
    await worker.close()


async def test_a_new_secret_of_an_old_name_is_counted_from_zero(vault: Any) -> None:
    binding = SecretBinding.make(["api.good.test"], limits=UseLimits(uses=1))
    worker = await opened(vault, binding)
    await worker.release(*ASK)
    await vault.admin.delete("token")
    await vault.admin.put("token", Secret(CANARY), binding)
    assert 1 == (await worker.release(*ASK)).permits.uses
    await worker.close()


async def test_a_secret_is_for_the_sandboxes_that_its_selectors_choose(vault: Any) -> None:
    """By the metadata of the create call, which `serve` reports, and by the image, which only root can report."""
    selectors = Selectors.make({"team": "a"}, ["sallyport/base"])
    await vault.admin.put("token", Secret(CANARY), SecretBinding.make(["api.good.test"], selectors=selectors))
    metadata = {"team": "a", "more": "x"}
    await vault.admin.open_sandbox(SANDBOX, "lin-1", [GRANT], metadata=metadata)
    await vault.admin.open_sandbox(OTHER, "lin-2", [GRANT], metadata={"team": "b"})

    async def answer(sandbox: str, generation: int) -> str:
        worker = await vault.worker(sandbox, generation)
        try:
            await worker.release(*ASK)
        except ReleaseRefusedError as refused:
            return refused.code
        finally:
            await worker.close()
        return ""

    assert "not_granted" == await answer(SANDBOX, 1)  # nothing was said about its image
    near, far = socket.socketpair()
    with near, far:
        for sandbox in (SANDBOX, OTHER):
            await vault.admin.attach(sandbox, 2, far.fileno(), ["sallyport/base", "sha256:1"])
    assert ("", "not_granted") == (await answer(SANDBOX, 3), await answer(OTHER, 3))
    await vault.stop()
    await vault.start()
    assert "" == await answer(SANDBOX, 4)
    await vault.admin.regrant(SANDBOX, [GRANT])
    assert "" == await answer(SANDBOX, 5)
    await vault.admin.ask(vaultd.Regrant(SANDBOX, (GRANT.form,), metadata={"team": "b"}))
    assert "not_granted" == await answer(SANDBOX, 6)
    await vault.admin.close_sandbox(SANDBOX)
    await vault.admin.open_sandbox(SANDBOX, "lin-1", [GRANT], metadata=metadata)
    assert "not_granted" == await answer(SANDBOX, 7)  # `serve` can open it again, and knows no way to its image


async def test_a_missing_secret_affects_what_uses_it_and_the_refusal_says_who_adds_it(vault: Any) -> None:
    later = Grant.make("later", "api.good.test", 8443, "http")
    await vault.admin.put("token", Secret(CANARY), BINDING)
    await vault.admin.open_sandbox(SANDBOX, "lin-1", [GRANT, later])
    worker = await vault.worker(SANDBOX, 1)
    assert Secret(CANARY) == (await worker.release(*ASK)).value
    add = "the operator adds it: sallyport vault put later --host api.good.test --port 8443 --scheme http"
    with pytest.raises(ReleaseRefusedError, match=re.escape(add)):
        await worker.release("later", "api.good.test", 8443, "http")
    await vault.admin.put("later", Secret(CANARY), SecretBinding.make(["api.good.test"], [8443], ["http"]))
    assert Secret(CANARY) == (await worker.release("later", "api.good.test", 8443, "http")).value
    await worker.close()
