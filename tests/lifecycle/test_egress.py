"""Changes of one sandbox's egress, called directly: locks, order, the state after a failure, and settling.

The server's background tasks do not run, so the state after a write stays. The behaviour over HTTP is tested in
tests/contracts/test_egress_api.py, faults at each step in test_faults_at_each_step.
"""

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from places import BODY, VAULT, binding, credential
from standins import KEY, World, world

import wire
from lifecycle.api.app import Server
from lifecycle.api.errors import ApiError
from lifecycle.egress import changes, credential_vault
from lifecycle.egress.changes import Egress, EgressError, user_policy, vault_of
from lifecycle.egress.credential_vault import CredentialVault, VaultText
from lifecycle.sandboxes.registry import RegistryError, Sandbox, State
from policy.api import ApiPolicy, NetworkRule, parse_network_policy, parse_patch
from policy.compiled import CompiledPolicy
from policy.compiler import Compiler
from policy.load import load_text
from policy.operator_file import OperatorFile
from policy.rules import Action
from wire.api import hostd

pytestmark = pytest.mark.slow

OPERATOR = "version: 1\npolicies: {team: {rules: [{id: one, host: one.example.org}]}}\n"
TIGHTER = OPERATOR + "always_deny: [api.example.org]\n"
VALUE = "value-of-the-first"


def allowing(*hosts: str) -> ApiPolicy:
    rules = [{"action": "allow", "target": host} for host in hosts]
    return parse_network_policy({"defaultAction": "deny", "egress": rules})


def rule(host: str, action: str = "allow") -> list[NetworkRule]:
    return [*parse_patch([{"action": action, "target": host}])]


@dataclass
class Still:
    """A server without its background tasks, and one sandbox."""

    world: World
    server: Server
    sandbox: str = ""

    @property
    def egress(self) -> Egress:
        return self.server.context.egress

    async def row(self) -> Sandbox:
        found = await self.server.registry.get(self.sandbox)
        assert found is not None
        return found

    async def put(self, **changes: Any) -> None:
        await self.server.registry.update(self.sandbox, lambda row: replace(row, **changes))

    @property
    def gateway(self) -> CompiledPolicy:
        """Return the policy of the gateway."""
        return CompiledPolicy.from_json(self.world.hostd.policies[self.sandbox])

    @property
    def hosts(self) -> set[str]:
        return {name.text for rule in self.gateway.rules for name in rule.hosts}

    @property
    def grants(self) -> set[tuple[str, str]]:
        """Return the pairs of secret and host that vaultd has granted."""
        return {(one.secret, one.host) for one in self.world.vaultd.grants[self.sandbox]}

    @property
    def values(self) -> set[str]:
        return set(self.world.vaultd.inline[self.sandbox].values())

    def calls(self) -> list[str]:
        """Return the calls of daemons since the last call of this method, for each daemon in order."""
        found = []
        for daemon in (self.world.auditd, self.world.vaultd, self.world.hostd):
            found += [op for op, _ in daemon.calls if op not in ("ping", "inspect")]
            daemon.calls.clear()
        return found

    async def document(self, text: str) -> None:
        """Change the operator's file, for the server and for hostd."""
        (self.world.config.run_dir / "policies.yaml").write_text(text + "# changed\n")
        assert await self.server.policies.reload()
        self.world.hostd.compiler = Compiler(OperatorFile(load_text(text)))


@pytest.fixture(name="still")
async def _still() -> AsyncIterator[Still]:
    async with world(OPERATOR, ingress=False) as described:
        server = described.build()
        await server.registry.open()
        still = Still(described, server)
        try:
            transport = httpx.ASGITransport(server.edge)
            headers = {"OPEN-SANDBOX-API-KEY": KEY}
            async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
                still.sandbox = (await client.post("/v1/sandboxes", json=BODY)).json()["id"]
            still.calls()
            yield still
        finally:
            await asyncio.gather(server.context.creations.close(), server.context.egress.close())
            for daemon in server.daemons:
                await daemon.close()
            await server.registry.close()


@pytest.fixture(name="vaulted")
async def _vaulted(still: Still) -> Still:
    """Give the sandbox a vault: two credentials, and bindings of one host."""
    await still.egress.create_vault(still.sandbox, VAULT)
    still.calls()
    return still


async def refused(work: Awaitable[object]) -> tuple[int, str]:
    """Return the status and text of the refusal."""
    with pytest.raises((EgressError, VaultText)) as caught:
        await work
    assert isinstance(caught.value, EgressError | VaultText)
    assert str(caught.value) == caught.value.text
    return caught.value.status, caught.value.text


def writes(still: Still) -> dict[str, Callable[[], Awaitable[object]]]:
    """Return every kind of write."""
    change, name = still.egress, still.sandbox
    return {
        "replace": lambda: change.replace(name, allowing("new.example.org")),
        "patch": lambda: change.patch(name, rule("new.example.org")),
        "delete": lambda: change.delete(name, ["api.example.org"]),
        "create": lambda: change.create_vault(name, VAULT),
        "mutate": lambda: change.patch_vault(name, {"credentials": {"add": [credential("c", "x")]}}),
        "remove": lambda: change.delete_vault(name),
    }


# -- what a row says


async def test_the_policy_a_caller_sees_without_one_of_its_own(still: Still) -> None:
    """Deny without a named policy. Allow under a named policy, because the caller can only narrow it."""
    row = replace(await still.row(), network_policy=None)
    assert Action.DENY is user_policy(replace(row, policy_name=None)).default_action
    assert Action.ALLOW is user_policy(replace(row, policy_name="team")).default_action


@pytest.mark.parametrize(
    "document", [{"egress": 1}, {"defaultAction": "x"}, {"zzz": []}, {"egress": [{"action": "allow"}]}], ids=range(4)
)
async def test_a_policy_that_cannot_be_read_is_not_shown_as_another(still: Still, document: dict[str, Any]) -> None:
    with pytest.raises(EgressError) as caught:
        user_policy(replace(await still.row(), network_policy=document))
    assert 500 == caught.value.status


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"revision": "x", "credentials": {}, "bindings": []},
        {"revision": 1, "credentials": {}, "bindings": [1]},
    ],
    ids=range(3),
)
async def test_a_vault_that_cannot_be_read_is_not_shown_as_none(still: Still, document: dict[str, Any]) -> None:
    row = await still.row()
    assert vault_of(replace(row, vault=None)) is None
    with pytest.raises(EgressError) as caught:
        vault_of(replace(row, vault=document))
    assert 500 == caught.value.status


@pytest.mark.parametrize("name", ["replace", "patch", "delete", "create", "mutate", "remove"])
async def test_a_sandbox_that_ends_takes_no_write(vaulted: Still, name: str) -> None:
    """In each final state the write is refused, and no daemon receives a call."""
    for state in (State.STOPPING, State.FAILED, State.TERMINATED):
        await vaulted.put(state=state)
        before = await vaulted.row()
        assert (409, f"sandbox is {state}") == await refused(writes(vaulted)[name]())
        assert before == await vaulted.row()
    assert [] == vaulted.calls()
    vaulted.sandbox = "sbx-unknown"
    with pytest.raises(ApiError) as caught:
        await writes(vaulted)[name]()
    assert 404 == caught.value.status


# -- one write after the other


async def test_patches_at_once_are_all_there(still: Still) -> None:
    await asyncio.gather(*(still.egress.patch(still.sandbox, rule(f"n{n}.example.org")) for n in range(12)))
    expected = {f"n{n}.example.org" for n in range(12)} | {"api.example.org"}
    assert expected == {one.target for one in user_policy(await still.row()).rules} == still.hosts


async def test_of_two_vaults_at_once_one_is_made(still: Still) -> None:
    other = {"credentials": [credential("one", "value-of-another")], "bindings": [binding("a", "one")]}
    made = await asyncio.gather(
        *(still.egress.create_vault(still.sandbox, body) for body in (VAULT, other)), return_exceptions=True
    )
    lost = [one for one in made if isinstance(one, VaultText)]
    assert [(409, "credential vault already exists")] == [(one.status, one.text) for one in lost]
    assert still.values in ({VALUE, "value-of-the-second"}, {"value-of-another"})


async def test_of_two_changes_of_one_revision_one_is_made(vaulted: Still) -> None:
    bodies = [{"expectedRevision": 1, "credentials": {"add": [credential(name, f"v-{name}")]}} for name in ("x", "y")]
    made = await asyncio.gather(
        *(vaulted.egress.patch_vault(vaulted.sandbox, body) for body in bodies), return_exceptions=True
    )
    assert [409] == [one.status for one in made if isinstance(one, VaultText)]
    assert 3 == len(vaulted.values)


@pytest.mark.parametrize("first", ["policy", "vault"])
async def test_a_policy_and_a_vault_at_once_do_not_slip_past_each_other(still: Still, first: str) -> None:
    """Each one alone is admitted: a policy without the host, a binding to the host.

    Both together are never admitted.
    """
    both: list[Awaitable[object]] = [
        still.egress.replace(still.sandbox, allowing("other.example.org")),
        still.egress.create_vault(still.sandbox, VAULT),
    ]
    made = await asyncio.gather(*(both if first == "policy" else both[::-1]), return_exceptions=True)
    assert [400] == [one.status for one in made if isinstance(one, EgressError | VaultText)]
    row = await still.row()
    assert (row.vault is None) == ({"other.example.org"} == still.hosts)
    assert (set() if row.vault is None else {VALUE, "value-of-the-second"}) == still.values


async def test_writes_of_different_sandboxes_do_not_wait_for_each_other(still: Still) -> None:
    hold, reached = still.world.hostd.hold, still.world.hostd.reached
    hold["configure"], reached["configure"] = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(still.egress.patch(still.sandbox, rule("new.example.org")))
    await reached["configure"].wait()
    async with asyncio.timeout(30):
        with pytest.raises(ApiError):
            await still.egress.patch("sbx-other", rule("new.example.org"))
    hold["configure"].set()
    await first


async def test_a_write_runs_to_its_end_when_its_caller_leaves(still: Still) -> None:
    """Also while the server stops."""
    hold, reached = still.world.hostd.hold, still.world.hostd.reached
    hold["configure"], reached["configure"] = asyncio.Event(), asyncio.Event()
    caller = asyncio.create_task(still.egress.patch(still.sandbox, rule("new.example.org")))
    await reached["configure"].wait()
    caller.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await caller
    closing = asyncio.create_task(still.egress.close())
    await asyncio.sleep(0)
    assert not closing.done()
    hold["configure"].set()
    await closing
    assert "new.example.org" in {one.target for one in user_policy(await still.row()).rules}
    assert not still.egress.unsettled(await still.row())


async def test_a_write_that_takes_too_long_does_not_keep_the_server_from_stopping(
    still: Still, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "CLOSE_SECONDS", 0.05)
    hold, reached = still.world.hostd.hold, still.world.hostd.reached
    hold["configure"], reached["configure"] = asyncio.Event(), asyncio.Event()
    caller = asyncio.create_task(still.egress.patch(still.sandbox, rule("new.example.org")))
    await reached["configure"].wait()
    async with asyncio.timeout(30):
        await still.egress.close()
        await asyncio.gather(caller, return_exceptions=True)
    hold["configure"].set()
    assert "" == (await still.row()).policy_digest  # the next start settles it


# -- policies


async def test_a_policy_is_recorded_before_it_is_in_force(still: Still) -> None:
    """Without a record nothing changes, and nothing remains to be settled."""
    before = await still.row()
    still.world.auditd.fail["record"] = wire.RequestError(wire.Code.STORAGE, "no")
    status, text = await refused(still.egress.patch(still.sandbox, rule("new.example.org")))
    assert (500, True) == (status, text.startswith("internal error: "))
    assert ["record"] == still.calls()
    assert before == await still.row()
    assert not still.egress.unsettled(before)


async def test_the_gateway_has_confirmed_what_the_registry_says(still: Still) -> None:
    """Until the gateway has confirmed, the row is as before, and marked."""
    hold, reached = still.world.hostd.hold, still.world.hostd.reached
    hold["configure"], reached["configure"] = asyncio.Event(), asyncio.Event()
    caller = asyncio.create_task(still.egress.patch(still.sandbox, rule("new.example.org")))
    await reached["configure"].wait()
    row = await still.row()
    assert ("", allowing("api.example.org")) == (row.policy_digest, user_policy(row))
    assert still.egress.unsettled(row)
    hold["configure"].set()
    changed = await caller
    assert changed == await still.row()
    assert changed.policy_digest == still.gateway.digest
    assert not still.egress.unsettled(changed)


@pytest.mark.parametrize(("code", "status"), [("unavailable", 500), ("too_large", 413)])
async def test_a_policy_that_the_gateway_does_not_take_changes_nothing(still: Still, code: str, status: int) -> None:
    """The former policy is put in force again. Until then the row is unsettled."""
    before = await still.row()
    still.world.hostd.fail["configure"] = wire.RequestError(code, "x")
    assert status == (await refused(still.egress.replace(still.sandbox, allowing("new.example.org"))))[0]
    assert user_policy(before) == user_policy(await still.row())
    assert still.egress.unsettled(await still.row())
    first, *rollback = [call["decided"] for call in still.world.hostd.named("configure")]
    assert (False, {True}) == (first, set(rollback))
    del still.world.hostd.fail["configure"]
    await still.egress.reapply(still.sandbox)
    assert before == await still.row()
    assert {"api.example.org"} == still.hosts
    assert not still.egress.unsettled(await still.row())


async def test_a_write_that_fails_is_rolled_back_at_once(still: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the gateway takes the former policy, nothing remains to be settled."""
    before, real = await still.row(), still.world.hostd.configure

    async def narrow(request: hostd.Configure) -> hostd.PolicyInForce:
        if "new.example.org" in request.selection:
            raise wire.RequestError(wire.Code.UNAVAILABLE, "x")
        return await real(request)

    monkeypatch.setattr(still.world.hostd, "configure", narrow)
    await refused(still.egress.replace(still.sandbox, allowing("new.example.org")))
    assert before == await still.row()
    assert not still.egress.unsettled(before)
    assert 2 == len(still.world.hostd.named("configure"))


async def test_a_gateway_under_another_document_leaves_the_sandbox_unsettled(still: Still) -> None:
    """hostd's digest differs from the server's: the requested policy is stored, and marked until both digests agree."""
    compiler, still.world.hostd.compiler = still.world.hostd.compiler, Compiler(OperatorFile(load_text(TIGHTER)))
    changed = await still.egress.patch(still.sandbox, rule("new.example.org"))
    assert "" == changed.policy_digest == (await still.row()).policy_digest
    assert still.egress.unsettled(changed)
    await still.egress.reapply(still.sandbox)
    assert still.egress.unsettled(await still.row())
    still.world.hostd.compiler = compiler
    await still.egress.reapply(still.sandbox)
    assert (await still.row()).policy_digest == still.gateway.digest
    assert not still.egress.unsettled(await still.row())


async def test_a_policy_that_uncovers_a_binding_is_refused_without_force(vaulted: Still) -> None:
    """With force the binding is removed, and vaultd's grant with it."""
    before = await vaulted.row()
    status, text = await refused(vaulted.egress.replace(vaulted.sandbox, allowing("other.example.org")))
    assert (400, True) == (status, text.startswith("credential vault policy validation: "))
    assert ([], before) == (vaulted.calls(), await vaulted.row())
    changed = await vaulted.egress.replace(vaulted.sandbox, allowing("other.example.org"), force=True)
    vault = vault_of(changed)
    assert vault is not None
    assert (2, ()) == (vault.revision, vault.bindings)
    assert (set(), {"other.example.org"}) == (vaulted.grants, vaulted.hosts)
    assert not vaulted.egress.unsettled(changed)


async def test_force_takes_only_the_bindings_that_are_not_covered(still: Still) -> None:
    await still.egress.patch(still.sandbox, rule("other.example.org"))
    other = {**binding("c", "one"), "match": {"hosts": ["other.example.org"]}}
    await still.egress.create_vault(still.sandbox, {**VAULT, "bindings": [*VAULT["bindings"], other]})
    both = await still.egress.replace(
        still.sandbox, allowing("api.example.org", "other.example.org", "more.example.org"), force=True
    )
    vault = vault_of(both)
    assert vault is not None
    assert (1, ["a", "b", "c"]) == (vault.revision, [one.name for one in vault.bindings])
    vault = vault_of(await still.egress.replace(still.sandbox, allowing("other.example.org"), force=True))
    assert vault is not None
    assert (2, ["c"]) == (vault.revision, [one.name for one in vault.bindings])
    assert {"other.example.org"} == {host for _, host in still.grants}


async def test_a_target_without_a_rule_changes_nothing(still: Still) -> None:
    before = await still.row()
    assert (before, False) == await still.egress.delete(still.sandbox, ["unknown.example.org"])
    assert [] == still.calls()
    row, found = await still.egress.delete(still.sandbox, ["api.example.org"])
    assert (True, ()) == (found, user_policy(row).rules)
    assert set() == still.hosts


# -- vaults


async def test_a_vault_is_granted_after_it_is_recorded_and_before_the_gateway_has_it(still: Still) -> None:
    """vaultd has values and grants before the gateway can ask for them."""
    hold, reached = still.world.hostd.hold, still.world.hostd.reached
    hold["configure"], reached["configure"] = asyncio.Event(), asyncio.Event()
    caller = asyncio.create_task(still.egress.create_vault(still.sandbox, VAULT))
    await reached["configure"].wait()
    assert ["vault.bind"] == [record["kind"] for record in still.world.auditd.records[-1:]]
    assert ({VALUE, "value-of-the-second"}, 2) == (still.values, len(still.grants))
    assert (await still.row()).vault is None
    hold["configure"].set()
    assert 1 == (await caller).revision
    assert {"a", "b"} == {one.name for one in still.gateway.bindings}


@pytest.mark.parametrize(
    ("daemon", "op", "code", "status"),
    [
        ("vaultd", "regrant", "internal", 412),
        ("vaultd", "regrant", "too_large", 413),
        ("vaultd", "regrant", "not_bound", 400),
        ("hostd", "configure", "unavailable", 412),
        ("hostd", "configure", "too_large", 413),
    ],
)
async def test_a_vault_that_is_not_taken_is_not_there(
    still: Still, caplog: pytest.LogCaptureFixture, daemon: str, op: str, code: str, status: int
) -> None:
    """Its values are dropped at vaultd as soon as that is possible, and no message or log contains them."""
    before = await still.row()
    caplog.set_level(logging.DEBUG)
    part = getattr(still.world, daemon)
    part.fail[op] = wire.RequestError(code, "refused")
    found, text = await refused(still.egress.create_vault(still.sandbox, VAULT))
    assert status == found
    assert VALUE not in text + caplog.text
    assert (await still.row()).vault is None
    assert still.egress.unsettled(await still.row())
    part.fail.clear()
    await still.egress.reapply(still.sandbox)
    assert before == await still.row()
    assert (set(), set()) == (still.values, still.grants)


async def test_a_vault_is_refused_before_a_value_reaches_vaultd(still: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    """Because of its text, the operator's document, its number of places, or an existing vault."""
    before = await still.row()
    assert 400 == (await refused(still.egress.create_vault(still.sandbox, {"zzz": 1})))[0]
    monkeypatch.setattr(credential_vault, "MAX_GRANTS", 1)
    status, text = await refused(still.egress.create_vault(still.sandbox, VAULT))
    assert (400, "at most 1 pairs of a credential and a host") == (status, text)
    monkeypatch.undo()
    await still.document(TIGHTER)
    status, text = await refused(still.egress.create_vault(still.sandbox, VAULT))
    assert (400, True) == (status, "not allowed by egress policy" in text)
    assert (404, "credential vault not found") == await refused(
        still.egress.patch_vault(still.sandbox, {"credentials": {"add": [credential("c", "x")]}})
    )
    assert [] == still.calls()
    assert before == await still.row()


async def test_places_count_though_nothing_is_granted_there(vaulted: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    """A binding that the current document refuses can be in force again later."""
    await vaulted.document(TIGHTER)
    await vaulted.egress.replace(vaulted.sandbox, allowing("api.example.org", "other.example.org"))
    other = {**binding("c", "one"), "match": {"hosts": ["other.example.org"]}}
    monkeypatch.setattr(credential_vault, "MAX_GRANTS", 2)
    body = {"credentials": {"replace": [credential("one", "x")]}, "bindings": {"add": [other]}}
    text = "at most 2 pairs of a credential and a host"
    assert (400, text) == await refused(vaulted.egress.patch_vault(vaulted.sandbox, body))


async def test_what_the_operator_grants_counts(still: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox's named policy sends secrets, too."""
    await still.document(OPERATOR.replace("example.org}]", "example.org, inject: {secret: theirs, as: bearer}}]"))
    await still.put(policy_name="team", network_policy=allowing("one.example.org").to_wire())
    other = {**binding("a", "one"), "match": {"hosts": ["one.example.org"], "paths": ["/a/*"]}}
    body = {"credentials": [credential("one", VALUE)], "bindings": [other]}
    monkeypatch.setattr(credential_vault, "MAX_GRANTS", 1)
    assert 400 == (await refused(still.egress.create_vault(still.sandbox, body)))[0]
    monkeypatch.setattr(credential_vault, "MAX_GRANTS", 2)
    await still.egress.create_vault(still.sandbox, body)
    assert 2 == len(still.grants)


async def test_a_binding_that_the_document_has_come_to_refuse_keeps_no_other_write_out(vaulted: Still) -> None:
    """The write is not refused for a binding that it does not change. It is refused for one that it changes."""
    await vaulted.document(TIGHTER)
    added = {"credentials": {"add": [credential("three", "value-of-the-third")]}}
    await vaulted.egress.patch_vault(vaulted.sandbox, added)
    await vaulted.egress.replace(vaulted.sandbox, allowing("api.example.org", "other.example.org"))
    assert set() == {one.name for one in vaulted.gateway.bindings}
    other = {**binding("a", "one"), "match": {"hosts": ["api.example.org"], "paths": ["/else/*"]}}
    assert 400 == (await refused(vaulted.egress.patch_vault(vaulted.sandbox, {"bindings": {"replace": [other]}})))[0]


async def test_values_that_are_replaced_or_deleted_are_dropped_at_vaultd(vaulted: Still) -> None:
    await vaulted.egress.patch_vault(
        vaulted.sandbox, {"credentials": {"replace": [credential("one", "value-of-the-third")]}}
    )
    assert {"value-of-the-third", "value-of-the-second"} == vaulted.values
    await vaulted.egress.patch_vault(
        vaulted.sandbox, {"credentials": {"delete": ["two"]}, "bindings": {"delete": ["b"]}}
    )
    assert {"value-of-the-third"} == vaulted.values
    assert 1 == len(vaulted.grants)
    assert {"a"} == {one.name for one in vaulted.gateway.bindings}


async def test_while_the_gateway_has_not_confirmed_former_and_new_grants_stand(vaulted: Still) -> None:
    """Either policy can be in force until the confirmation. Afterwards only the grants of the new one remain."""
    await vaulted.egress.patch(vaulted.sandbox, rule("other.example.org"))
    hold, reached = vaulted.world.hostd.hold, vaulted.world.hostd.reached
    hold["configure"], reached["configure"] = asyncio.Event(), asyncio.Event()
    other = {**binding("c", "three"), "match": {"hosts": ["other.example.org"]}}
    body = {
        "credentials": {"add": [credential("three", "value-of-the-third")], "delete": ["one", "two"]},
        "bindings": {"add": [other], "delete": ["a", "b"]},
    }
    caller = asyncio.create_task(vaulted.egress.patch_vault(vaulted.sandbox, body))
    await reached["configure"].wait()
    names = vaulted.world.vaultd.names
    assert (3, ["api.example.org", "other.example.org"]) == (len(vaulted.grants), names[vaulted.sandbox])
    assert {VALUE, "value-of-the-second", "value-of-the-third"} == vaulted.values
    hold["regrant"], vaultd_reached = asyncio.Event(), asyncio.Event()
    vaulted.world.vaultd.hold["regrant"], vaulted.world.vaultd.reached["regrant"] = hold["regrant"], vaultd_reached
    hold["configure"].set()
    await vaultd_reached.wait()
    row = await vaulted.row()
    assert (["three"], "") == ([*(vault_of(row) or CredentialVault(0, {}, ())).credentials], row.policy_digest)
    hold["regrant"].set()
    await caller
    assert (1, ["other.example.org"]) == (len(vaulted.grants), names[vaulted.sandbox])
    assert {"value-of-the-third"} == vaulted.values


async def test_a_value_that_no_binding_uses_is_dropped_when_it_is_replaced(vaulted: Still) -> None:
    for action, value in (("add", "value-of-the-third"), ("replace", "value-of-the-fourth")):
        await vaulted.egress.patch_vault(vaulted.sandbox, {"credentials": {action: [credential("three", value)]}})
    assert {VALUE, "value-of-the-second", "value-of-the-fourth"} == vaulted.values


async def test_the_places_of_a_binding_out_of_force_go_with_it(vaulted: Still) -> None:
    """Otherwise its value could be granted there again."""
    assert 2 == len(vaulted.world.vaultd.bounds[vaulted.sandbox])
    await vaulted.document(TIGHTER)
    vaulted.egress.mark_outdated(vaulted.sandbox)
    await vaulted.egress.reapply(vaulted.sandbox)
    assert (set(), 2) == (vaulted.grants, len(vaulted.world.vaultd.bounds[vaulted.sandbox]))
    body = {"credentials": {"add": [credential("three", "x")]}, "bindings": {"delete": ["a"]}}
    await vaulted.egress.patch_vault(vaulted.sandbox, body)
    assert {"inline:1/two"} == {place.secret for place in vaulted.world.vaultd.bounds[vaulted.sandbox]}


async def test_a_value_given_while_its_binding_is_out_of_force_may_be_used_there_later(vaulted: Still) -> None:
    await vaulted.document(TIGHTER)
    await vaulted.egress.patch_vault(vaulted.sandbox, {"credentials": {"replace": [credential("one", "x")]}})
    assert set() == vaulted.grants
    await vaulted.document(OPERATOR)
    vaulted.egress.mark_outdated(vaulted.sandbox)
    await vaulted.egress.reapply(vaulted.sandbox)
    assert {("inline:2/one", "api.example.org"), ("inline:1/two", "api.example.org")} == vaulted.grants


async def test_what_is_unsettled_is_put_right_as_a_whole_by_the_next_write(vaulted: Still) -> None:
    """Because it is unknown which part of the write reached vaultd."""
    vaulted.world.vaultd.inline[vaulted.sandbox]["inline:left"] = "value-that-was-left"
    await vaulted.put(policy_digest="")
    await vaulted.egress.patch(vaulted.sandbox, rule("new.example.org"))
    assert {VALUE, "value-of-the-second"} == vaulted.values
    assert not vaulted.egress.unsettled(await vaulted.row())


async def test_a_write_under_a_new_document_has_recorded_what_that_takes_out_of_force(vaulted: Still) -> None:
    """Also if the document's change was not reported for the sandbox before."""
    await vaulted.document(TIGHTER)
    await vaulted.egress.patch(vaulted.sandbox, rule("new.example.org"))
    assert ["gateway.dropped"] * 2 == [record["kind"] for record in vaulted.world.auditd.records[-2:]]
    assert "api.example.org" in (vaulted.egress.shortfall.reason(vaulted.sandbox) or "")


# -- revocations


@pytest.mark.parametrize("how", ["vault", "credential"])
async def test_a_revocation_does_not_wait_for_the_gateway(vaulted: Still, how: str) -> None:
    """It is stored, applied at vaultd and recorded. The gateway gets its policy later."""
    vaulted.world.hostd.fail["configure"] = wire.RequestError(wire.Code.UNAVAILABLE, "x")
    if how == "vault":
        await vaulted.egress.delete_vault(vaulted.sandbox)
    else:
        gone = {"credentials": {"delete": ["one", "two"]}, "bindings": {"delete": ["a", "b"]}}
        await vaulted.egress.patch_vault(vaulted.sandbox, gone)
    assert (set(), set()) == (vaulted.values, vaulted.grants)
    assert "vault.revoke" == vaulted.world.auditd.records[-1]["kind"]
    row = await vaulted.row()
    assert ("", True) == (row.policy_digest, vaulted.egress.unsettled(row))
    assert {"a", "b"} == {one.name for one in vaulted.gateway.bindings}
    vaulted.world.hostd.fail.clear()
    await vaulted.egress.reapply(vaulted.sandbox)
    assert () == vaulted.gateway.bindings
    assert not vaulted.egress.unsettled(await vaulted.row())


async def test_a_revocation_that_vaultd_does_not_hear_is_said_and_carried_forward(vaulted: Still) -> None:
    """The row keeps the revocation. A second request applies it at vaultd before the answer "not found"."""
    vaulted.world.vaultd.fail |= dict.fromkeys(("narrow", "regrant"), wire.RequestError(wire.Code.INTERNAL, "x"))
    assert 500 == (await refused(vaulted.egress.delete_vault(vaulted.sandbox)))[0]
    assert (None, True) == ((await vaulted.row()).vault, vaulted.egress.unsettled(await vaulted.row()))
    assert 500 == (await refused(vaulted.egress.delete_vault(vaulted.sandbox)))[0]
    assert {VALUE, "value-of-the-second"} == vaulted.values
    vaulted.world.vaultd.fail.clear()
    assert 404 == (await refused(vaulted.egress.delete_vault(vaulted.sandbox)))[0]
    assert (set(), set()) == (vaulted.values, vaulted.grants)


async def test_a_revocation_needs_no_grants_of_vaultd(vaulted: Still) -> None:
    """If vaultd grants nothing, it still removes: grants, values and the places of those."""
    vaulted.world.vaultd.fail["regrant"] = wire.RequestError(wire.Code.INTERNAL, "x")
    await vaulted.egress.delete_vault(vaulted.sandbox)
    assert (set(), set(), set()) == (vaulted.values, vaulted.grants, vaulted.world.vaultd.bounds[vaulted.sandbox])


async def test_a_revocation_that_cannot_be_written_down_is_an_error_and_marked(vaulted: Still) -> None:
    path = vaulted.world.config.state_dir / "sallyport.db"
    with contextlib.closing(sqlite3.connect(path, autocommit=True)) as database:
        database.execute("CREATE TRIGGER full BEFORE UPDATE ON sandboxes BEGIN SELECT RAISE(ABORT, 'full'); END")
        with pytest.raises(RegistryError):
            await vaulted.egress.delete_vault(vaulted.sandbox)
    assert (await vaulted.row()).vault is not None
    assert vaulted.egress.unsettled(await vaulted.row())


async def test_a_revocation_needs_no_record(vaulted: Still) -> None:
    """A change that only removes permissions does not wait for the audit log."""
    vaulted.world.auditd.fail["record"] = wire.RequestError(wire.Code.STORAGE, "no")
    await vaulted.egress.delete_vault(vaulted.sandbox)
    assert (set(), set(), None) == (vaulted.values, vaulted.grants, (await vaulted.row()).vault)


async def test_where_there_is_no_vault_nothing_is_cut(still: Still) -> None:
    assert (404, "credential vault not found") == await refused(still.egress.delete_vault(still.sandbox))
    assert [] == still.calls()


# -- settling


async def test_what_is_settled_is_left_alone(vaulted: Still) -> None:
    """Also a row compiled under an earlier document, if the new document makes no difference to it."""
    before = await vaulted.row()
    await vaulted.egress.reapply(vaulted.sandbox)
    vaulted.egress.mark_outdated(vaulted.sandbox)
    assert vaulted.egress.unsettled(before)
    await vaulted.egress.reapply(vaulted.sandbox)
    assert ([], before) == (vaulted.calls(), await vaulted.row())
    assert not vaulted.egress.unsettled(before)


async def test_a_new_document_is_put_in_force_at_gateway_and_vault(vaulted: Still) -> None:
    await vaulted.document(TIGHTER)
    await vaulted.egress.reapply(vaulted.sandbox)
    assert [] == vaulted.calls()  # the document's change was not reported for it
    vaulted.egress.mark_outdated(vaulted.sandbox)
    await vaulted.egress.reapply(vaulted.sandbox)
    assert ("api.example.org",) == vaulted.gateway.always_deny
    assert (set(), {VALUE, "value-of-the-second"}) == (vaulted.grants, vaulted.values)
    assert (await vaulted.row()).policy_digest == vaulted.gateway.digest
    assert {"gateway.dropped"} == {record["kind"] for record in vaulted.world.auditd.records[-2:]}


@pytest.mark.parametrize("mark", ["registry", "memory"])
async def test_a_mark_has_the_registrys_policy_put_in_force(vaulted: Still, mark: str) -> None:
    """For a mark in either of the two. The values without a row are dropped."""
    vaulted.world.vaultd.inline[vaulted.sandbox]["inline:left"] = "value-that-was-left"
    nothing = (await vaulted.server.policies.always_allowed()).policy
    vaulted.world.hostd.policies[vaulted.sandbox] = nothing.to_json()
    if mark == "registry":
        await vaulted.put(policy_digest="")
    else:
        vaulted.egress._unsettled.add(vaulted.sandbox)
    assert vaulted.egress.unsettled(await vaulted.row())
    await vaulted.egress.reapply(vaulted.sandbox)
    assert {"a", "b"} == {one.name for one in vaulted.gateway.bindings}
    assert {VALUE, "value-of-the-second"} == vaulted.values
    assert not vaulted.egress.unsettled(await vaulted.row())


@pytest.mark.parametrize("away", ["vaultd", "hostd"])
async def test_gateway_and_vault_do_not_wait_for_each_other(vaulted: Still, away: str) -> None:
    """Each one becomes tighter even if the other refuses. The sandbox stays unsettled."""
    await vaulted.document(TIGHTER)
    vaulted.egress.mark_outdated(vaulted.sandbox)
    op = {"vaultd": "regrant", "hostd": "configure"}[away]
    getattr(vaulted.world, away).fail[op] = wire.RequestError(wire.Code.INTERNAL, "x")
    await vaulted.egress.reapply(vaulted.sandbox)
    assert set() == vaulted.grants
    assert (away == "vaultd") == (("api.example.org",) == vaulted.gateway.always_deny)
    assert {"api.example.org"} == vaulted.hosts
    assert "" == (await vaulted.row()).policy_digest  # the mark is also for the next start


async def test_a_database_that_takes_no_mark_keeps_nothing_from_being_settled(vaulted: Still) -> None:
    """The mark is then in memory, and stays until the database has the digest."""
    await vaulted.document(TIGHTER)
    vaulted.egress.mark_outdated(vaulted.sandbox)
    path = vaulted.world.config.state_dir / "sallyport.db"
    with contextlib.closing(sqlite3.connect(path, autocommit=True)) as database:
        database.execute("CREATE TRIGGER full BEFORE UPDATE ON sandboxes BEGIN SELECT RAISE(ABORT, 'full'); END")
        await vaulted.egress.reapply(vaulted.sandbox)
        assert (("api.example.org",), set()) == (vaulted.gateway.always_deny, vaulted.grants)
        assert vaulted.egress.unsettled(await vaulted.row())
        database.execute("DROP TRIGGER full")
    await vaulted.egress.reapply(vaulted.sandbox)
    assert (await vaulted.row()).policy_digest == vaulted.gateway.digest
    assert not vaulted.egress.unsettled(await vaulted.row())


async def test_a_vaultd_that_grants_nothing_keeps_what_is_still_granted(still: Still) -> None:
    """Only the grants that the new document refuses are removed."""
    await still.egress.patch(still.sandbox, rule("other.example.org"))
    other = {**binding("b", "two"), "match": {"hosts": ["other.example.org"]}}
    await still.egress.create_vault(still.sandbox, {**VAULT, "bindings": [binding("a", "one"), other]})
    await still.document(TIGHTER)
    still.egress.mark_outdated(still.sandbox)
    still.world.vaultd.fail["regrant"] = wire.RequestError(wire.Code.INTERNAL, "x")
    await still.egress.reapply(still.sandbox)
    assert {("inline:1/two", "other.example.org")} == still.grants
    assert {VALUE, "value-of-the-second"} == still.values


async def test_a_vault_that_cannot_be_read_grants_nothing_and_loses_no_value(vaulted: Still) -> None:
    """A release that can read the vault can be installed again. The audit log records the failure."""
    await vaulted.put(vault={"revision": "x"}, policy_digest="")
    await vaulted.egress.reapply(vaulted.sandbox)
    assert (set(), {VALUE, "value-of-the-second"}) == (vaulted.grants, vaulted.values)
    assert () == vaulted.gateway.bindings
    assert "cannot be read" in (vaulted.egress.shortfall.reason(vaulted.sandbox) or "")


async def test_a_policy_that_fits_into_no_gateway_is_deny_all(vaulted: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its secrets are granted nowhere."""
    real, told = vaulted.world.hostd.configure, []

    async def small(request: hostd.Configure) -> hostd.PolicyInForce:
        told.append(request.selection)
        if len(told) == 1:
            raise wire.RequestError(wire.Code.TOO_LARGE, "x")
        return await real(request)

    monkeypatch.setattr(vaulted.world.hostd, "configure", small)
    await vaulted.put(policy_digest="")
    await vaulted.egress.reapply(vaulted.sandbox)
    assert (2, set(), set()) == (len(told), vaulted.hosts, vaulted.grants)
    assert "too large" in (vaulted.egress.shortfall.reason(vaulted.sandbox) or "")


async def test_reapplying_raises_nothing_and_forgets_what_is_gone(still: Still) -> None:
    still.world.hostd.fail["configure"] = wire.RequestError(wire.Code.UNAVAILABLE, "x")
    still.egress.mark_outdated(still.sandbox)
    await still.put(policy_digest="")
    await still.egress.reapply(still.sandbox)
    assert still.egress.unsettled(await still.row())
    row = await still.row()
    await still.server.registry.delete(still.sandbox)
    still.egress.mark_outdated(still.sandbox)
    await still.egress.reapply(still.sandbox)
    assert not still.egress.unsettled(replace(row, policy_digest="x"))


async def test_a_gateway_with_another_policy_gets_the_registrys(still: Still) -> None:
    """A gateway that reports no policy, or the same one, is not configured again."""
    row = await still.row()
    for said, configured in (("", 0), (row.policy_digest, 0), ("another", 1)):
        still.world.hostd.change(still.sandbox, policy=said)
        still.calls()
        await still.egress.reconcile(still.sandbox)
        assert configured == still.calls().count("configure")
    assert row == await still.row()
    still.world.hostd.fail["configure"] = wire.RequestError(wire.Code.UNAVAILABLE, "x")
    await still.egress.reconcile(still.sandbox)
    assert "" == (await still.row()).policy_digest
