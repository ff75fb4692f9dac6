"""Properties of workers' channels and of vaultd's socket, in one process, with a log that can be delayed."""

import asyncio
import contextlib
import inspect
import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

import wire
from tests.vault.requests import ADMINISTRATION, ASK, BINDING, CANARY, GRANT, SANDBOX, SANDBOXES
from vault.client import ReleaseRefusedError, VaultClient, VaultUnavailableError
from vault.grants import MAX_GRANTS, Grant, SecretBinding
from vault.keyring import Keyring, MasterKeyError
from vault.secret import Secret
from vault.vaultd import Vault
from wire.api import vaultd
from wire.operations import parameters


async def opened(vault: Any, binding: SecretBinding = BINDING) -> Any:
    """Return the channel of a worker with a grant of the one stored secret."""
    await vault.admin.put("token", Secret(CANARY), binding)
    await vault.admin.open_sandbox(SANDBOX, "lin-1", [GRANT])
    return await vault.worker(SANDBOX, 1)


async def refusal(call: Any) -> str:
    """Return the code with which a call was refused."""
    with pytest.raises((ReleaseRefusedError, wire.RemoteError)) as caught:
        await call
    assert CANARY not in str(caught.value)
    assert isinstance(caught.value, ReleaseRefusedError | wire.RemoteError)
    return caught.value.code


async def test_a_granted_secret_is_released_after_its_durable_record(vault: Any) -> None:
    """The control of this file: value, lease, and one durable record that names the secret without its value."""
    worker = await opened(vault)
    lease = await worker.release(*ASK)
    assert Secret(CANARY) == lease.value
    assert worker.current(lease)
    (record,) = vault.log.of("secret.release", "allow")
    assert (True, "token", SANDBOX, 1, "api.good.test") == tuple(
        record[key] for key in ("durable", "secret", "sandbox", "target_generation", "host")
    )
    assert CANARY not in repr(vault.log.records)
    await worker.close()


async def test_no_byte_of_a_secret_leaves_before_its_record_is_confirmed(vault: Any) -> None:
    """I5: if the log takes the record but never confirms it, the worker's socket receives only a refusal."""
    await vault.admin.put("token", Secret(CANARY), BINDING)
    await vault.admin.open_sandbox(SANDBOX, "lin-1", [GRANT])
    near, far = socket.socketpair()
    await vault.admin.attach(SANDBOX, 1, far.fileno())
    far.close()
    vault.log.open.clear()
    vault.audit._timeout = 0.3
    near.setblocking(False)
    loop = asyncio.get_running_loop()
    request = {"id": 1, "op": "release", **parameters(vaultd.Release(*ASK))}
    await loop.sock_sendall(near, wire.frames.encode(request))
    first = await loop.sock_recv(near, 65536)
    assert b"audit_unavailable" in first
    assert CANARY.encode() not in first
    assert 1 == len(vault.log.of("secret.release", "allow"))
    vault.log.open.set()  # the late confirmation must change nothing
    await loop.sock_sendall(near, wire.frames.encode({"id": 2, "op": "ping"}))
    assert b'{"id":2,"ok":{}}' == (await loop.sock_recv(near, 65536))[4:]
    near.close()


async def test_an_ended_log_means_no_release_and_no_authority(vault: Any) -> None:
    """Without the audit channel every operation that gives is refused. Operations that remove still work."""
    worker = await opened(vault)
    await vault.audit._client.close()
    assert "audit_unavailable" == await refusal(worker.release(*ASK))
    assert "audit_unavailable" == await refusal(worker.intermediate())
    assert "audit_unavailable" == await refusal(vault.admin.put("other", Secret("other-value"), BINDING))
    assert "audit_unavailable" == await refusal(vault.admin.rotate("token", Secret("other-value")))
    assert "audit_unavailable" == await refusal(vault.admin.open_sandbox("sbx-2", "lin-2"))
    assert "audit_unavailable" == await refusal(vault.admin.regrant(SANDBOX, [GRANT], {"inline:a": Secret("x")}))
    await vault.admin.narrow(SANDBOX, [], [], None)
    await vault.admin.regrant(SANDBOX, [])
    await vault.admin.delete("token")
    await vault.admin.close_sandbox(SANDBOX)


@pytest.mark.parametrize("change", ["delete", "regrant", "close", "replace"])
async def test_a_change_while_the_record_is_written_prevents_the_release(vault: Any, change: str) -> None:
    """vaultd decides again after the record: a secret withdrawn in between is not released."""
    worker = await opened(vault)
    vault.log.asked.clear()
    vault.log.open.clear()
    release = asyncio.create_task(worker.release(*ASK))
    await vault.log.asked.wait()
    match change:
        case "delete":
            await vault.admin.delete("token")
        case "regrant":
            await vault.admin.regrant(SANDBOX, [])
        case "close":
            await vault.admin.close_sandbox(SANDBOX)
        case "replace":
            newer = await vault.worker(SANDBOX, 2)
    vault.log.open.set()
    with pytest.raises((ReleaseRefusedError, VaultUnavailableError)) as caught:
        await release
    assert CANARY not in str(caught.value)
    if change == "replace":
        assert Secret(CANARY) == (await newer.release(*ASK)).value
        await newer.close()
    await worker.close()


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("request_", [vaultd.Release(*ASK), vaultd.Intermediate()], ids=["release", "intermediate"])
async def test_a_replaced_channel_gets_neither_a_secret_nor_an_intermediate(
    vault: Any, request_: vaultd.Release | vaultd.Intermediate, generation: int
) -> None:
    """Neither a channel replaced while the record was written, nor one that asks later, even on an open socket."""
    worker = await opened(vault)
    former = vault.channels._channels[SANDBOX]
    assert isinstance(await vault.channels.answer(former, request_), vaultd.Released | vaultd.IssuedAuthority)
    vault.log.asked.clear()
    vault.log.open.clear()
    asking = asyncio.create_task(vault.channels.answer(former, request_))
    await asyncio.wait_for(vault.log.asked.wait(), 20)
    newer = await vault.worker(SANDBOX, generation)
    vault.log.open.set()
    for answer in (asking, vault.channels.answer(former, request_)):
        with pytest.raises(wire.RequestError) as caught:
            await answer
        assert "stale_generation" == caught.value.code
    assert former.leases <= {"token"}
    assert set() == vault.channels._channels[SANDBOX].leases
    assert Secret(CANARY) == (await newer.release(*ASK)).value
    await newer.close()
    await worker.close()


@pytest.mark.parametrize(
    ("ask", "code"),
    [
        (("token", "other.test", 443, "https"), "not_granted"),
        (("token", "api.good.test", 8443, "https"), "not_granted"),
        (("token", "api.good.test", 443, "http"), "not_granted"),
        (("other", "api.good.test", 443, "https"), "not_granted"),
        (("token", "*.good.test", 443, "https"), "invalid"),
        (("token", "", 443, "https"), "invalid"),
        (("token", "api.good.test", 0, "https"), "invalid"),
    ],
)
async def test_other_destinations_are_refused_and_the_refusal_is_on_record(
    vault: Any, ask: tuple[Any, ...], code: str
) -> None:
    """Host, port, scheme and name are each part of the grant."""
    worker = await opened(vault)
    assert code == await refusal(worker.release(*ask))
    await vault.audit.drain()
    assert [code] == [record["code"] for record in vault.log.of("secret.release", "deny")]
    assert [] == vault.log.of("secret.release", "allow")
    await worker.close()


@pytest.mark.parametrize(
    ("grants", "code"),
    [
        ([Grant.make("inline:absent", "api.good.test", 443, "https")], "unknown_secret"),
        ([Grant.make("absent", "*.good.test", 443, "https")], "unknown_secret"),
        ([Grant.make("token", "evil.test", 443, "https")], "not_bound"),
        ([Grant.make("token", "*.good.test", 443, "https")], "not_bound"),
        ([Grant.make("token", "api.good.test", 80, "http")], "not_bound"),
    ],
)
async def test_a_grant_outside_of_a_binding_cannot_be_given(vault: Any, grants: list[Grant], code: str) -> None:
    """Neither when a sandbox is opened nor later. Nothing of it remains."""
    await opened(vault)
    assert code == await refusal(vault.admin.open_sandbox("sbx-2", "lin-2", grants))
    assert code == await refusal(vault.admin.regrant(SANDBOX, grants))
    assert [SANDBOX] == vault.vault.custody.names()


async def test_rotation_calls_leases_back_and_the_next_release_is_the_new_value(vault: Any) -> None:
    """When `rotate` returns, the worker was notified and its lease is no longer current."""
    revoked: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
    await opened(vault)
    worker = await vault.worker(SANDBOX, 1, revoked.put)
    lease = await worker.release(*ASK)
    assert 2 == await vault.admin.rotate("token", Secret("new-value"))
    assert frozenset({"token"}) == await revoked.get()
    assert not worker.current(lease)
    assert Secret("new-value") == (await worker.release(*ASK)).value
    await vault.admin.delete("token")
    assert frozenset({"token"}) == await revoked.get()
    assert "unknown_secret" == await refusal(worker.release(*ASK))
    await worker.close()


async def test_a_rotation_is_answered_once_the_worker_has_dropped_the_old_value(vault: Any) -> None:
    asked, dropped = asyncio.Event(), asyncio.Event()

    async def on_revoke(_: frozenset[str] | None) -> None:
        asked.set()
        await dropped.wait()

    await opened(vault)
    worker = await vault.worker(SANDBOX, 1, on_revoke)
    await worker.release(*ASK)
    rotation = asyncio.create_task(vault.admin.rotate("token", Secret("new-value")))
    await asyncio.wait_for(asked.wait(), 20)
    await vault.admin.ask(wire.Ping())
    assert not rotation.done()
    dropped.set()
    assert 2 == await rotation


async def test_a_worker_that_does_not_confirm_a_rotation_loses_its_channel(
    vault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vault.channels.REVOKE_TIMEOUT", 0.2)

    async def on_revoke(_: frozenset[str] | None) -> None:
        await asyncio.Event().wait()

    await opened(vault)
    worker = await vault.worker(SANDBOX, 1, on_revoke)
    lease = await worker.release(*ASK)
    assert 2 == await vault.admin.rotate("token", Secret("new-value"))
    async with asyncio.timeout(20):
        while worker.current(lease):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_worker_without_a_lease_is_not_told(vault: Any) -> None:
    """A revocation goes only to workers that hold the secret."""
    revoked: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
    await opened(vault)
    worker = await vault.worker(SANDBOX, 1, revoked.put)
    await vault.admin.rotate("token", Secret("new-value"))
    await worker.release(*ASK)
    assert revoked.empty()
    await worker.close()


async def test_regranting_ends_what_was_taken_away(vault: Any) -> None:
    """Changed grants and inline secrets are revoked, the others stay."""
    revoked: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
    await vault.admin.put("token", Secret(CANARY), BINDING)
    mine = Grant.make("inline:a", "*.mine.test", 443, "https")
    await vault.admin.open_sandbox(SANDBOX, "lin-1", [GRANT, mine], {"inline:a": Secret("one")})
    worker = await vault.worker(SANDBOX, 1, revoked.put)
    kept = await worker.release(*ASK)
    ended = await worker.release("inline:a", "x.mine.test", 443, "https")
    assert Secret("one") == ended.value
    await vault.admin.regrant(SANDBOX, [GRANT, mine], {"inline:a": Secret("two")})
    assert frozenset({"inline:a"}) == await revoked.get()
    assert (True, False) == (worker.current(kept), worker.current(ended))
    assert Secret("two") == (await worker.release("inline:a", "x.mine.test", 443, "https")).value
    await vault.admin.regrant(SANDBOX, [])
    assert frozenset({"token", "inline:a"}) == await revoked.get()
    assert "not_granted" == await refusal(worker.release(*ASK))
    await worker.close()


async def test_kept_inline_secrets_stay_beside_the_new_ones_and_their_leases_go_on(vault: Any) -> None:
    """serve replaces a credential in two calls.

    The first adds the new value beside the old one, the second drops the old one.
    """
    revoked: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
    grants = [Grant.make(f"inline:{name}", "mine.test", 443, "https") for name in ("1/a", "1/b", "2/a")]
    old_a, old_b, new_a = (Secret(text) for text in ("value of 1/a", "value of 1/b", "value of 2/a"))
    await vault.admin.open_sandbox(SANDBOX, "lin-1", grants[:2], {"inline:1/a": old_a, "inline:1/b": old_b})
    worker = await vault.worker(SANDBOX, 1, revoked.put)
    leases = {name: await worker.release(f"inline:{name}", "mine.test", 443, "https") for name in ("1/a", "1/b")}
    await vault.admin.regrant(SANDBOX, grants, {"inline:2/a": new_a}, ["inline:1/a", "inline:1/b"])
    values = [(await worker.release(grant.secret, "mine.test", 443, "https")).value for grant in grants]
    assert [old_a, old_b, new_a] == values
    assert [True, True] == [worker.current(lease) for lease in leases.values()]
    assert revoked.empty()
    await vault.admin.regrant(SANDBOX, grants[1:], {}, ["inline:1/b", "inline:2/a"])
    assert frozenset({"inline:1/a"}) == await revoked.get()
    assert [False, True] == [worker.current(lease) for lease in leases.values()]
    assert "not_granted" == await refusal(worker.release("inline:1/a", "mine.test", 443, "https"))
    assert new_a == (await worker.release("inline:2/a", "mine.test", 443, "https")).value
    await vault.admin.regrant(SANDBOX, grants[2:], {"inline:2/a": old_a}, ["inline:2/a"])
    assert old_a == (await worker.release("inline:2/a", "mine.test", 443, "https")).value
    await worker.close()


async def test_keeping_an_inline_secret_that_is_not_there_changes_nothing(vault: Any) -> None:
    """It cannot keep stored secrets or those of other sandboxes either."""
    await vault.admin.put("token", Secret(CANARY), BINDING)
    mine = Grant.make("inline:1/a", "mine.test", 443, "https")
    await vault.admin.open_sandbox(SANDBOX, "lin-1", [mine], {"inline:1/a": Secret("one")})
    await vault.admin.open_sandbox("sbx-2", "lin-2", [], {"inline:9/z": Secret("two")})
    for name in ("inline:2/a", "token", "inline:9/z"):
        refused = vault.admin.regrant(SANDBOX, [], {"inline:2/b": Secret("new")}, ["inline:1/a", name])
        assert "unknown_secret" == await refusal(refused)
    worker = await vault.worker(SANDBOX, 1)
    assert Secret("one") == (await worker.release("inline:1/a", "mine.test", 443, "https")).value
    for keep in ("inline:1/a", [5], [""], ["inline:1/a"] * (MAX_GRANTS + 1)):
        asked = {**parameters(vaultd.Regrant(SANDBOX, ())), "keep": keep}
        assert "invalid" == await refusal(vault.admin.call("regrant", **asked))
    await worker.close()


async def test_narrowing_only_takes_away_and_always_can(vault: Any) -> None:
    """It gives no grant or value that the sandbox does not have, and succeeds even if a stored secret was deleted."""
    revoked: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
    await vault.admin.put("token", Secret(CANARY), BINDING)
    mine = [Grant.make(f"inline:{name}", "mine.test", 443, "https") for name in ("1/a", "1/b")]
    values = {"inline:1/a": Secret("value of 1/a"), "inline:1/b": Secret("value of 1/b")}
    await vault.admin.open_sandbox(SANDBOX, "lin-1", [GRANT, *mine], values)
    worker = await vault.worker(SANDBOX, 1, revoked.put)
    for secret, host in (("token", "api.good.test"), ("inline:1/a", "mine.test"), ("inline:1/b", "mine.test")):
        await worker.release(secret, host, 443, "https")
    await vault.admin.delete("token")
    assert frozenset({"token"}) == await revoked.get()
    more = [Grant.make("nowhere", "api.good.test", 443, "https"), Grant.make("inline:1/a", "other.test", 443, "https")]
    await vault.admin.narrow(SANDBOX, (GRANT, *mine, *more), ["inline:1/a", "inline:7/z"], None)
    assert frozenset({"inline:1/b"}) == await revoked.get()
    assert Secret("value of 1/a") == (await worker.release("inline:1/a", "mine.test", 443, "https")).value
    for secret, host in (("inline:1/b", "mine.test"), ("inline:1/a", "other.test"), ("nowhere", "api.good.test")):
        assert "not_granted" == await refusal(worker.release(secret, host, 443, "https"))
    await vault.admin.narrow(SANDBOX, [], None, None)
    assert frozenset({"inline:1/a"}) == await revoked.get()
    await vault.admin.regrant(SANDBOX, mine[:1])  # without `keep` the values stay
    assert Secret("value of 1/a") == (await worker.release("inline:1/a", "mine.test", 443, "https")).value
    await worker.close()


@pytest.mark.parametrize("restart", [False, True])
async def test_an_inline_secret_moves_to_no_destination_that_its_value_was_not_given_for(
    vault: Any, restart: bool
) -> None:
    """Not by a regrant, by bounds without the value, after its removal, or with a restart in between."""
    mine = Grant.make("inline:1/a", "mine.test", 443, "https")
    await vault.admin.open_sandbox(SANDBOX, "lin-1", [mine], {"inline:1/a": Secret(CANARY)})
    if restart:
        await vault.stop()
        await vault.start()
    worker = await vault.worker(SANDBOX, 1)
    for parts in (
        ("evil.test", 443, "https"),
        ("*.mine.test", 443, "https"),
        ("mine.test", 8443, "https"),
        ("mine.test", 80, "http"),
    ):
        there = Grant.make("inline:1/a", *parts)
        for keep in (None, ["inline:1/a"]):
            for bounds in (None, [there], [mine, there]):
                assert "not_bound" == await refusal(vault.admin.regrant(SANDBOX, [there], None, keep, bounds))
        for bounds in (None, [mine, there]):
            moved = vault.admin.regrant(SANDBOX, [mine, there], {"inline:2/b": Secret("x")}, ["inline:1/a"], bounds)
            assert "not_bound" == await refusal(moved)
        await vault.admin.regrant(SANDBOX, [mine], None, None, [mine, there])  # the wider bounds have no effect
        assert "not_bound" == await refusal(vault.admin.regrant(SANDBOX, [there]))
    assert "not_granted" == await refusal(worker.release("inline:1/a", "evil.test", 443, "https"))
    assert Secret(CANARY) == (await worker.release("inline:1/a", "mine.test", 443, "https")).value
    await worker.close()


async def test_with_its_value_an_inline_secret_goes_to_any_destination(vault: Any) -> None:
    """A control: the caller that gives the value sets its destinations, whether or not they are in force."""
    mine, other = (Grant.make("inline:1/a", host, 443, "https") for host in ("mine.test", "*.other.test"))
    below = Grant.make("inline:1/a", "x.other.test", 443, "https")
    await vault.admin.open_sandbox(SANDBOX, "lin-1", [mine], {"inline:1/a": Secret("one")})
    await vault.admin.regrant(SANDBOX, [mine], {"inline:1/a": Secret(CANARY)}, [], [mine, other])
    await vault.admin.regrant(SANDBOX, [])  # out of force, and in force again
    await vault.admin.regrant(SANDBOX, [below, mine])
    worker = await vault.worker(SANDBOX, 1)
    assert Secret(CANARY) == (await worker.release("inline:1/a", "x.other.test", 443, "https")).value
    await vault.admin.regrant(SANDBOX, [below, mine], None, None, [below, mine])
    assert "not_bound" == await refusal(vault.admin.regrant(SANDBOX, [other]))
    await vault.admin.narrow(SANDBOX, [below], None, [below])
    assert "not_bound" == await refusal(vault.admin.regrant(SANDBOX, [mine]))
    await vault.admin.close_sandbox(SANDBOX)
    await vault.admin.open_sandbox(SANDBOX, "lin-1", [])
    assert "unknown_secret" == await refusal(vault.admin.regrant(SANDBOX, [below], None, ["inline:1/a"], [below]))
    assert "unknown_secret" == await refusal(vault.admin.regrant(SANDBOX, [below]))
    await worker.close()


async def test_an_inline_secret_cannot_stand_for_a_stored_one(vault: Any) -> None:
    """One sandbox cannot use another's, either."""
    await opened(vault)
    taken = vault.admin.open_sandbox("sbx-2", "lin-2", [], {"token": Secret("mine")})
    assert "exists" == await refusal(taken)
    grant = Grant.make("inline:a", "mine.test", 443, "https")
    await vault.admin.open_sandbox("sbx-2", "lin-2", [grant], {"inline:a": Secret("mine")})
    assert "unknown_secret" == await refusal(vault.admin.open_sandbox("sbx-3", "lin-3", [grant]))


async def test_a_limited_secret_needs_a_fitting_request(vault: Any) -> None:
    """Methods and paths of the binding are checked at the release, and are part of the lease."""
    worker = await opened(vault, SecretBinding.make(["api.good.test"], methods=["GET"], paths=["/v1/*"]))
    assert "not_bound" == await refusal(worker.release(*ASK))
    assert "not_bound" == await refusal(worker.release(*ASK, method="POST", path="/v1/x"))
    assert "not_bound" == await refusal(worker.release(*ASK, method="GET", path="/v1/../x"))
    lease = await worker.release(*ASK, method="GET", path="/v1/x")
    assert lease.check("GET", "/v1/y") is None
    assert lease.check("POST", "/v1/y") is not None
    await worker.close()


async def test_a_lease_ends_with_its_secret(vault: Any) -> None:
    """It lasts five minutes at most, and ends not later than the secret."""
    binding = SecretBinding.make(["api.good.test"], expires=datetime.now(UTC) + timedelta(seconds=30))
    worker = await opened(vault, binding)
    await worker.release(*ASK)
    (record,) = vault.log.of("secret.release", "allow")
    assert 25 <= record["lease_seconds"] <= 30
    await worker.close()


async def test_an_older_generation_is_cut_off_and_stays_out(vault: Any) -> None:
    """A newer worker's channel ends the older one. An older generation cannot attach again, even after a restart."""
    old = await opened(vault)
    lease = await old.release(*ASK)
    new = await vault.worker(SANDBOX, 3)
    await old.closed.wait()
    assert not old.current(lease)
    with pytest.raises(VaultUnavailableError):
        await old.release(*ASK)
    await new.close()
    await vault.stop()
    await vault.start()
    assert "stale_generation" == await refusal(vault.worker(SANDBOX, 2))
    again = await vault.worker(SANDBOX, 3)
    assert Secret(CANARY) == (await again.release(*ASK)).value
    await again.close()


async def test_a_restarted_vault_continues(vault: Any) -> None:
    """Secrets, grants, inline secrets and the lineage's root are those from before."""
    mine = Grant.make("inline:a", "mine.test", 443, "https")
    await vault.admin.put("token", Secret(CANARY), BINDING)
    root = await vault.admin.open_sandbox(SANDBOX, "lin-1", [GRANT, mine], {"inline:a": Secret("one")})
    await vault.stop()
    await vault.start()
    assert root == await vault.admin.open_sandbox("sbx-2", "lin-1")
    worker = await vault.worker(SANDBOX, 1)
    assert Secret(CANARY) == (await worker.release(*ASK)).value
    assert Secret("one") == (await worker.release("inline:a", "mine.test", 443, "https")).value
    chain = (await worker.intermediate()).chain_pem
    assert chain.endswith(root)
    await worker.close()


async def test_closing_leaves_nothing(vault: Any) -> None:
    """I7: record and root are removed from the disk, the channel ends, and the name can be reused with another root."""
    worker = await opened(vault)
    root = await vault.admin.open_sandbox("sbx-2", "lin-1")
    await vault.admin.close_sandbox(SANDBOX)
    await worker.closed.wait()
    assert [".index", "=lin-1.sealed"] == sorted(os.listdir(vault.directory / "vault" / "lineages"))
    await vault.admin.close_sandbox("sbx-2")
    await vault.admin.close_sandbox("sbx-2")
    assert [".index"] == os.listdir(vault.directory / "vault" / "lineages")
    assert [".index"] == os.listdir(vault.directory / "vault" / "sandboxes")
    assert "unknown_sandbox" == await refusal(vault.worker(SANDBOX, 2))
    assert root != await vault.admin.open_sandbox("sbx-2", "lin-1")


async def test_a_failed_removal_is_reported_and_can_be_repeated(vault: Any) -> None:
    """An error is reported if a file cannot be removed.

    The sandbox gets nothing meanwhile, and a second close succeeds.
    """
    await opened(vault)
    record = vault.directory / "vault" / "sandboxes" / f"={SANDBOX}.sealed"
    content = record.read_bytes()
    record.unlink()
    record.mkdir()
    assert "storage" == await refusal(vault.admin.close_sandbox(SANDBOX))
    assert vault.vault.custody.known(SANDBOX)
    record.rmdir()
    record.write_bytes(content)
    await vault.admin.close_sandbox(SANDBOX)
    assert not record.exists()


async def test_each_intermediate_is_new_and_below_the_lineage(vault: Any) -> None:
    """Each call gives another key and serial. The rate is limited."""
    worker = await opened(vault)
    issued = [await worker.intermediate() for _ in range(8)]
    certificates = [x509.load_pem_x509_certificate(item.certificate_pem.encode()) for item in issued]
    assert 8 == len({certificate.serial_number for certificate in certificates})
    assert "PRIVATE KEY" in issued[0].key_pem.reveal()
    assert "PRIVATE KEY" not in repr(issued)
    assert "rate_limited" == await refusal(worker.intermediate())
    await worker.close()


async def test_releases_of_one_channel_are_limited(vault: Any) -> None:
    """Of 240 simultaneous releases 200 succeed; one second later 20 more do. The limit is on record."""
    now = 1000.0
    vault.monotonic = lambda: now
    worker = await opened(vault)

    async def limited(count: int) -> int:
        results = await asyncio.gather(*(worker.release(*ASK) for _ in range(count)), return_exceptions=True)
        codes = [result.code for result in results if isinstance(result, ReleaseRefusedError)]
        assert {"rate_limited"} >= set(codes)
        return len(codes)

    assert 40 == await limited(240)
    now += 1.0
    assert 5 == await limited(25)
    await vault.audit.drain(20)
    assert 45 == len(vault.log.of("secret.release", "deny"))
    await worker.close()


def test_each_request_of_the_socket_is_tried_here() -> None:
    kinds = {kind for _, kind in inspect.getmembers(vaultd, inspect.isclass) if kind in vaultd.CONTROL}
    assert kinds == {type(request) for request in (ADMINISTRATION | SANDBOXES).values()}


@pytest.mark.parametrize("op", ADMINISTRATION)
async def test_serve_may_not_administrate(serve_vault: Any, op: str) -> None:
    """Without uid 0 only the sandbox operations are answered."""
    assert "forbidden" == await refusal(serve_vault.admin.ask(ADMINISTRATION[op]))
    await serve_vault.admin.open_sandbox(SANDBOX, "lin-1")
    assert [] == serve_vault.vault.custody.store.list_infos()


@pytest.mark.parametrize("op", ["init", "release", "intermediate", "revoke", "x"])
async def test_the_socket_answers_no_other_request(vault: Any, op: str) -> None:
    assert "unknown_op" == await refusal(vault.admin.call(op))


_GRANTS = [parameters(GRANT.form)]
_VALUES = {f"inline:{number}": "value" for number in range(MAX_GRANTS + 1)}


@pytest.mark.parametrize(
    ("op", "changed"),
    [
        ("put", {"value": None}),
        ("put", {"value": 5}),
        ("put", {"value": {"text": "x" * 8, "more": 1}}),
        ("put", {"value": "short"}),
        ("put", {"value": {"text": "long enough"}}),
        ("put", {"name": "../a"}),
        ("put", {"binding": None}),
        ("put", {"binding": {**parameters(BINDING.form), "hosts": ["*.good.test", "*"]}}),
        ("put", {"binding": {**parameters(BINDING.form), "hosts": []}}),
        ("put", {"binding": {**parameters(BINDING.form), "ports": [True]}}),
        ("put", {"binding": {**parameters(BINDING.form), "schemes": ["ftp"]}}),
        ("put", {"binding": {**parameters(BINDING.form), "expires": "soon"}}),
        ("put", {"user": "me"}),
        ("open_sandbox", {"sandbox": "../x"}),
        ("open_sandbox", {"lineage": "../l"}),
        ("open_sandbox", {"lineage": "l" * 257}),
        ("open_sandbox", {"grants": [{}]}),
        ("open_sandbox", {"grants": _GRANTS * (MAX_GRANTS + 1)}),
        ("open_sandbox", {"bounds": _GRANTS * (MAX_GRANTS + 1)}),
        ("open_sandbox", {"names": ["a.test"] * (vaultd.MOST_PATTERNS + 1)}),
        ("open_sandbox", {"inline": {"a": 5}}),
        ("open_sandbox", {"inline": _VALUES}),
        ("regrant", {"grants": _GRANTS * (MAX_GRANTS + 1)}),
        ("regrant", {"inline": _VALUES}),
        ("regrant", {"keep": ["inline:a"] * (MAX_GRANTS + 1)}),
        ("regrant", {"bounds": _GRANTS * (MAX_GRANTS + 1)}),
        ("regrant", {"names": ["a.test"] * (vaultd.MOST_PATTERNS + 1)}),
        ("narrow", {"grants": _GRANTS * (MAX_GRANTS + 1)}),
        ("narrow", {"keep": ["inline:a"] * (MAX_GRANTS + 1)}),
        ("narrow", {"bounds": _GRANTS * (MAX_GRANTS + 1)}),
        ("close_sandbox", {"sandbox": "../x"}),
        ("attach", {"generation": 0}),
        ("attach", {"generation": True}),
        ("attach", {}),
        ("list", {"values": True}),
    ],
)
async def test_malformed_requests_are_refused(vault: Any, op: str, changed: dict[str, Any]) -> None:
    """Each case changes one part of a valid request. (An `attach` would need a descriptor.)"""
    asked = {**parameters((ADMINISTRATION | SANDBOXES)[op]), **changed}
    assert "invalid" == await refusal(vault.admin.call(op, **asked))
    assert () == await vault.admin.list_secrets()
    assert [] == vault.vault.custody.names()


async def test_a_revocation_overtaking_its_value_makes_the_client_ask_again() -> None:
    """A value that was revoked in transit is never given to the worker's code."""
    near, far = socket.socketpair()
    values = iter(["old", "new"])

    async def answer(connection: wire.Client, _op: str, _parameters: wire.Message, _fds: list[int]) -> wire.Message:
        value = next(values)
        if value == "old":
            await connection.notify("revoke", secrets=["token"])
        return parameters(vaultd.Released(vaultd.Value(value), (), 300, vaultd.Scope()))

    server = await wire.serve_connection(far, answer)
    worker = VaultClient.from_fd(near.detach())
    lease = await worker.release(*ASK)
    assert Secret("new") == lease.value
    assert worker.current(lease)
    await server.close()
    await worker.closed.wait()
    assert not worker.current(lease)
    await worker.close()


async def test_a_vault_of_another_key_is_refused_and_a_second_process_too(vault: Any, tmp_path: Path) -> None:
    """The lock and the check of the key are effective."""
    with pytest.raises(OSError):
        Vault(vault.directory / "vault", Keyring(bytes(range(32))))
    Vault(tmp_path / "v", Keyring(bytes(range(32)))).close()
    with pytest.raises(MasterKeyError, match="another master key"):
        Vault(tmp_path / "v", Keyring(bytes(32)))


async def test_a_release_to_look_for_a_secret_is_recorded_as_such_and_of_no_request(vault: Any) -> None:
    """Methods and paths do not limit the search of responses. The grant, the binding and the log do."""
    worker = await opened(vault, SecretBinding.make(["api.good.test"], methods=["PUT"], paths=["/in"]))
    assert "not_bound" == await refusal(worker.release(*ASK))
    lease = await worker.release(*ASK, purpose=vaultd.ReleasePurpose.SCRUB)
    assert (Secret(CANARY), ()) == (lease.value, lease.former)
    assert lease.check("GET", "/out") is not None
    (record,) = vault.log.of("secret.release", "allow")
    assert (True, "scrub", "token") == tuple(record[key] for key in ("durable", "action", "secret"))
    assert "not_granted" == await refusal(
        worker.release("token", "other.test", 443, "https", purpose=vaultd.ReleasePurpose.SCRUB)
    )
    asked = {**parameters(vaultd.Release(*ASK)), "purpose": "other"}
    assert "invalid" == await refusal(worker._wire.call("release", **asked))
    await worker.close()


async def test_values_that_were_replaced_come_with_the_new_one_also_from_a_vaultd_started_anew(vault: Any) -> None:
    worker = await opened(vault)
    await vault.admin.rotate("token", Secret("another-value"))
    lease = await worker.release(*ASK)
    assert (Secret("another-value"), (Secret(CANARY),)) == (lease.value, lease.former)
    await worker.close()
    await vault.stop()
    await vault.start()
    worker = await vault.worker(SANDBOX, 2)
    lease = await worker.release(*ASK, purpose=vaultd.ReleasePurpose.SCRUB)
    assert (Secret("another-value"), (Secret(CANARY),)) == (lease.value, lease.former)
    await worker.close()


async def test_an_inline_secret_that_was_replaced_is_looked_for_at_its_hosts(vault: Any) -> None:
    first, second = (Grant.make(f"inline:{number}/t", "api.good.test", 443, "https") for number in (1, 2))
    other = Grant.make("inline:2/t", "other.test", 443, "https")
    await vault.admin.open_sandbox(SANDBOX, "lin-1", [first], {"inline:1/t": Secret(CANARY)})
    await vault.admin.regrant(SANDBOX, [second, other], {"inline:2/t": Secret("another-value")}, keep=[])
    await vault.stop()
    await vault.start()
    worker = await vault.worker(SANDBOX, 1)
    at_first = await worker.release("inline:2/t", "api.good.test", 443, "https", purpose=vaultd.ReleasePurpose.SCRUB)
    elsewhere = await worker.release("inline:2/t", "other.test", 443, "https", purpose=vaultd.ReleasePurpose.SCRUB)
    assert ((Secret(CANARY),), ()) == (at_first.former, elsewhere.former)
    assert Secret("another-value") == at_first.value
    await worker.close()


async def test_a_worker_that_sends_other_things_gains_no_time_for_a_rotation(
    vault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vault.channels.REVOKE_TIMEOUT", 0.2)
    monkeypatch.setattr("wire.patience.MOST", 10**6)  # for as long as there is progress

    async def on_revoke(_: frozenset[str] | None) -> None:
        await asyncio.Event().wait()

    await opened(vault)
    worker = await vault.worker(SANDBOX, 1, on_revoke)
    await worker.release(*ASK)

    async def chatter() -> None:
        while True:
            await worker._wire.ask(wire.Ping())

    chattering = asyncio.create_task(chatter())
    async with asyncio.timeout(20):
        assert 2 == await vault.admin.rotate("token", Secret("new-value"))
    with pytest.raises(ConnectionError):
        await chattering


async def test_a_new_channel_of_the_same_worker_is_no_new_allowance(vault: Any) -> None:
    await opened(vault)
    for _ in range(2):
        worker = await vault.worker(SANDBOX, 1)
        with contextlib.suppress(ReleaseRefusedError):
            for _ in range(20):
                await worker.intermediate()
    assert 8 <= len(vault.log.of("vault.intermediate", "allow")) <= 9


async def test_an_intermediate_is_for_the_names_of_its_sandbox(vault: Any) -> None:
    """The last names that were set, also after a restart. A regrant without names does not change them."""

    async def permitted() -> list[str] | None:
        issued = x509.load_pem_x509_certificate((await worker.intermediate()).certificate_pem.encode())
        try:
            constraints = issued.extensions.get_extension_for_class(x509.NameConstraints)
        except x509.ExtensionNotFound:
            return None
        assert constraints.critical
        return [str(name.value) for name in constraints.value.permitted_subtrees or ()]

    await vault.admin.open_sandbox(SANDBOX, "lin-1", names=["a.test", "*.B.test"])
    worker = await vault.worker(SANDBOX, 1)
    assert ["a.test", "b.test"] == await permitted()
    await vault.admin.regrant(SANDBOX, [])
    assert ["a.test", "b.test"] == await permitted()
    await vault.admin.regrant(SANDBOX, [], names=[])
    await worker.close()
    await vault.stop()
    await vault.start()
    worker = await vault.worker(SANDBOX, 1)
    assert ["invalid"] == await permitted()
    await vault.admin.regrant(SANDBOX, [], names=["*"])
    assert await permitted() is None
    for names in (["*.com"], ["192.0.2.1"], ["a.test"] * 1025, "a.test", [5]):
        asked = {**parameters(vaultd.Regrant(SANDBOX, ())), "names": names}
        assert "invalid" == await refusal(vault.admin.call("regrant", **asked))
    await worker.close()
