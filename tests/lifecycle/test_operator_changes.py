"""A change of the operator's file: its denials are in force at once, whatever a sandbox has and whatever is down."""

import asyncio
import copy
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from injection import REGISTRY
from places import BODY, SETTLE_SECONDS, WALLET, Place, credential, running, settled, wrong

import wire
from lifecycle.egress.policies import Policies
from lifecycle.sandboxes import reaper
from lifecycle.sandboxes.registry import Sandbox
from policy import operator_file
from policy.compiled import DENY_ALL, CompiledPolicy
from policy.compiler import Compiler
from policy.decision import Deny, decide_flow
from policy.facts import FlowFacts, Scheme
from policy.load import PolicyError, load_text
from policy.operator_file import OperatorFile
from wire import frames, limits

pytestmark = pytest.mark.slow

LOOSE = """
version: 1
plaintext_secrets: [plain.example.org]
wildcard_bindings: true
policies:
  team:
    rules:
      - id: all
        hosts: [api.example.org, other.example.org, plain.example.org, "*.wild.example.org"]
        ports: [80, 443]
"""
ALLOWED = ["api.example.org", "other.example.org", "plain.example.org", "*.wild.example.org"]
BINDINGS = {
    "api": {"hosts": ["api.example.org"]},
    "other": {"hosts": ["other.example.org"]},
    "plain": {"hosts": ["plain.example.org"], "schemes": ["http"]},
    "wild": {"hosts": ["*.wild.example.org"]},
}


@dataclass(frozen=True)
class Tightening:
    """A later file, the bindings that it refuses, and whether it refuses the named policy."""

    text: str
    refused: frozenset[str]
    named: bool = False


TIGHTENINGS = {
    "a bound host is denied": Tightening(LOOSE + "always_deny: [api.example.org]\n", frozenset({"api"})),
    "the named policy is removed": Tightening(LOOSE.partition("policies:")[0], frozenset(BINDINGS), named=True),
    "the ceiling is lowered": Tightening(
        LOOSE + "ceiling: {hosts: [other.example.org], ports: [443]}\n", frozenset({"api", "plain", "wild"})
    ),
    "plaintext_secrets is taken back": Tightening(
        LOOSE.replace("[plain.example.org]\nwild", "[]\nwild"), frozenset({"plain"})
    ),
    "wildcard_bindings is taken back": Tightening(
        LOOSE.replace("bindings: true", "bindings: false"), frozenset({"wild"})
    ),
    "everything": Tightening("version: 1\nalways_deny: ['*.org']\n", frozenset(BINDINGS), named=True),
}
DENIED = TIGHTENINGS["a bound host is denied"]


@pytest.fixture
async def ruled(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    """Run a server with an operator's policy file, which it reads only on the test's request, and then to the end."""
    monkeypatch.setattr("lifecycle.api.app.POLICY_SECONDS", 3600)
    monkeypatch.setattr("lifecycle.sandboxes.reaper.APPLY_SECONDS", SETTLE_SECONDS)
    async with running(monkeypatch.setattr, LOOSE) as there:
        yield there


async def make(place: Place, named: bool = False) -> str:
    """Create a sandbox with a binding for each host."""
    body = copy.deepcopy(BODY)
    body["networkPolicy"]["egress"] = [{"action": "allow", "target": target} for target in ALLOWED]
    if named:
        body["extensions"] = {"sallyport.policy": "team"}
    name: str = (await place.http("POST", "", body)).json()["id"]
    vault = {
        "credentials": [credential(item, f"value-of-{item}") for item in BINDINGS],
        "bindings": [
            {"name": item, "match": match, "auth": {"type": "bearer", "credential": item}}
            for item, match in BINDINGS.items()
        ],
    }
    answer = await place.http("POST", f"/{name}{WALLET}", vault)
    assert 201 == answer.status_code, answer.text
    return name


def write(place: Place, text: str) -> None:
    path = place.world.config.run_dir / "policies.yaml"
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


async def follow(place: Place) -> None:
    assert place.server is not None
    await place.server.observer.follow()


async def change(place: Place, text: str) -> None:
    write(place, text)
    await follow(place)


def policy(place: Place, name: str) -> CompiledPolicy:
    """Return the policy that the gateway received."""
    return CompiledPolicy.from_json(place.world.hostd.policies[name])


def bound(place: Place, name: str) -> set[str]:
    return {item.name for item in policy(place, name).bindings}


def granted(place: Place, name: str) -> set[str]:
    return {grant.secret.partition("/")[2] for grant in place.world.vaultd.grants[name]}


def recorded(place: Place, name: str, kind: str) -> list[dict[str, Any]]:
    return [item for item in place.world.auditd.records if item.get("sandbox") == name and item["kind"] == kind]


async def row(place: Place, name: str) -> Sandbox:
    return (await place.rows())[name]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("case", TIGHTENINGS)
async def test_what_a_new_document_refuses_is_dropped_and_never_the_document(case: str, ruled: Place) -> None:
    """The dropped parts return with the former document, because the caller's input is kept."""
    tighter = TIGHTENINGS[case]
    name = await make(ruled, named=tighter.named)
    before = await row(ruled, name)
    former, values = policy(ruled, name), dict(ruled.world.vaultd.inline[name])
    assert set(BINDINGS) == bound(ruled, name) == granted(ruled, name)

    await change(ruled, tighter.text)
    assert [] == await settled(ruled)
    compiled, kept = policy(ruled, name), set(BINDINGS) - tighter.refused
    assert kept == bound(ruled, name) == granted(ruled, name)
    assert values == ruled.world.vaultd.inline[name]
    assert (before.vault, before.network_policy) == ((now := await row(ruled, name)).vault, now.network_policy)
    if tighter.named:
        assert "deny-all" == compiled.name
    else:
        assert isinstance(decide_flow(compiled, FlowFacts("other.example.org", 443, Scheme.HTTPS)), Deny) is False
    dropped = recorded(ruled, name, "gateway.dropped")
    assert tighter.refused == {item["binding"] for item in dropped if "binding" in item}
    assert (["team"] if tighter.named else []) == [item["name"] for item in dropped if "name" in item]
    assert all(item["reason"] and item["policy"] == compiled.digest for item in dropped)
    shown = (await ruled.http("GET", f"/{name}/networkpolicy")).json()
    assert shown["reason"].startswith("not in force: ")

    await change(ruled, LOOSE)
    assert [] == await settled(ruled)
    assert former == policy(ruled, name)
    assert set(BINDINGS) == granted(ruled, name)
    assert tighter.refused <= {item.get("binding") for item in recorded(ruled, name, "gateway.restored")}
    assert "reason" not in (await ruled.http("GET", f"/{name}/networkpolicy")).json()


@pytest.mark.parametrize("case", TIGHTENINGS)
@pytest.mark.parametrize("force", [False, True])
async def test_a_caller_can_always_take_away(case: str, force: bool, ruled: Place) -> None:
    """Deny-all, rules, bindings, credentials, the vault: refused parts of the row do not prevent their removal."""
    tighter = TIGHTENINGS[case]
    assert ruled.server is not None
    for method, path, body in (
        ("PUT", "/networkpolicy", {"defaultAction": "deny", "egress": []}),
        ("PATCH", WALLET, {"bindings": {"delete": sorted(BINDINGS)}}),
        ("PATCH", WALLET, {"bindings": {"delete": ["api"]}, "credentials": {"delete": ["api"]}}),
        ("DELETE", WALLET, None),
        ("DELETE", "/networkpolicy", ALLOWED),
    ):
        name = await make(ruled, named=tighter.named)
        await change(ruled, tighter.text)
        # The server refuses only a change that conflicts with a binding in force, and accepts it with force.
        uncovers = path == "/networkpolicy" and set(BINDINGS) != tighter.refused
        headers = {"OpenSandbox-Egress-Force": "revoke"} if force else {}
        answer = await ruled.http(method, f"/{name}{path}", body, headers)
        assert answer.status_code in ({400} if uncovers and not force else {200, 204}), (method, path, answer.text)
        assert [] == await settled(ruled)
        if force and path == "/networkpolicy":
            assert not (await row(ruled, name)).vault["bindings"]  # type: ignore[index]
        await ruled.http("DELETE", f"/{name}")
        await change(ruled, LOOSE)


async def test_a_write_is_refused_for_what_it_brings(ruled: Place) -> None:
    """A binding that the document refuses is not admitted, not even as the replacement of a dropped one."""
    name = await make(ruled)
    await change(ruled, DENIED.text)
    fresh = {"name": "api", "match": {"hosts": ["api.example.org"], "paths": ["/v2/*"]}}
    fresh["auth"] = {"type": "bearer", "credential": "api"}
    replaced = await ruled.http("PATCH", f"/{name}{WALLET}", {"bindings": {"replace": [fresh]}})
    added = await ruled.http("PATCH", f"/{name}{WALLET}", {"bindings": {"add": [fresh | {"name": "more"}]}})
    rotated = await ruled.http(
        "PATCH", f"/{name}{WALLET}", {"credentials": {"replace": [credential("api", "another value")]}}
    )
    assert [400, 400, 200] == [replaced.status_code, added.status_code, rotated.status_code], rotated.text
    assert "not allowed by egress policy" in replaced.text
    assert [] == await settled(ruled)
    assert set(BINDINGS) - {"api"} == bound(ruled, name)


async def test_a_value_given_while_its_binding_is_out_of_force_is_used_once_that_is_in_force(ruled: Place) -> None:
    """The value's places are those of its bindings, whether or not the current document permits them."""
    name = await make(ruled)
    await change(ruled, DENIED.text)
    rotate = {"credentials": {"replace": [credential("api", "another value")]}}
    assert 200 == (await ruled.http("PATCH", f"/{name}{WALLET}", rotate)).status_code
    await change(ruled, LOOSE)
    assert [] == await settled(ruled)
    assert set(BINDINGS) == bound(ruled, name)


@pytest.mark.parametrize("away", ["vaultd", "auditd", REGISTRY])
async def test_a_tighter_policy_waits_only_for_the_gateway(away: str, ruled: Place) -> None:
    """A change that could not be delivered is sent later. The sandbox is unsettled until then."""
    assert ruled.server is not None
    name = await make(ruled)
    ruled.injector.out.add(away)
    await change(ruled, DENIED.text)
    assert set(BINDINGS) - {"api"} == bound(ruled, name)
    assert ("api.example.org",) == policy(ruled, name).always_deny
    assert ruled.server.context.egress.unsettled(await row(ruled, name))
    ruled.injector.out.clear()
    assert [] == await settled(ruled)
    assert ["api"] == [item["binding"] for item in recorded(ruled, name, "gateway.dropped")]


async def test_a_vaultd_that_hangs_does_not_keep_the_gateway_waiting(ruled: Place) -> None:
    name = await make(ruled)
    vaultd = ruled.world.vaultd
    vaultd.hold["regrant"] = asyncio.Event()
    changing = asyncio.create_task(change(ruled, DENIED.text))
    await until(lambda: "api" not in bound(ruled, name))
    assert not (await row(ruled, name)).policy_digest
    vaultd.hold.pop("regrant").set()
    await changing
    assert [] == await settled(ruled)


async def test_a_document_that_is_read_while_the_former_is_applied_is_applied_directly_after_it(
    ruled: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "OBSERVE_SECONDS", 3600)  # otherwise the observer would deliver it later
    name, vaultd = await make(ruled), ruled.world.vaultd
    vaultd.hold["regrant"] = asyncio.Event()
    changes = [asyncio.create_task(change(ruled, DENIED.text))]
    await until(lambda: "api" not in bound(ruled, name))
    assert ruled.server is not None
    policies, before = ruled.server.policies, ruled.server.policies.version
    changes.append(asyncio.create_task(change(ruled, TIGHTENINGS["everything"].text)))
    await until(lambda: policies.version > before)
    vaultd.hold.pop("regrant").set()
    await asyncio.gather(*changes)
    assert set() == bound(ruled, name)
    assert [] == await settled(ruled)


async def test_a_gateway_that_does_not_answer_keeps_no_other_from_its_policy(
    ruled: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "OBSERVE_SECONDS", 3600)  # otherwise the observer would deliver it later
    names = [await make(ruled) for _ in range(3)]
    ruled.world.hostd.deaf[names[1]] = asyncio.Event()
    changing = asyncio.create_task(change(ruled, DENIED.text))
    await until(lambda: all("api" not in bound(ruled, name) for name in (names[0], names[2])))
    assert "api" in bound(ruled, names[1])
    await until(lambda: "api" not in granted(ruled, names[1]))
    ruled.world.hostd.deaf.pop(names[1]).set()
    await changing
    assert [] == await settled(ruled)


async def test_a_gateway_that_has_ended_comes_back_with_the_tighter_policy_and_never_with_a_refused_one(
    ruled: Place,
) -> None:
    name = await make(ruled)
    hostd = ruled.world.hostd
    hostd.gone.add(name)
    wider = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "*.example.org"}]}
    former = policy(ruled, name)
    wider["egress"] += [{"action": "allow", "target": target} for target in ALLOWED]  # type: ignore[operator]
    assert 500 == (await ruled.http("PUT", f"/{name}/networkpolicy", wider)).status_code
    assert former == policy(ruled, name)
    await change(ruled, DENIED.text)
    assert set(BINDINGS) - {"api"} == bound(ruled, name)
    assert not (await row(ruled, name)).policy_digest
    hostd.gone.clear()
    assert [] == await settled(ruled)


async def test_a_sandbox_that_fails_keeps_no_other_from_its_policy(ruled: Place) -> None:
    """Its row holds data that no release writes. It is denied everything, and the others get the right policy."""
    assert ruled.server is not None
    names = [await make(ruled) for _ in range(3)]
    broken: dict[str, Any] = {"egress": "everything", "defaultAction": 7}
    await ruled.server.registry.update(names[0], lambda item: replace(item, network_policy=broken))
    await ruled.server.registry.update(names[1], lambda item: replace(item, vault={"revision": 1}))
    await change(ruled, DENIED.text)
    await until(lambda: all(len(recorded(ruled, name, "gateway.dropped")) >= 1 for name in names))
    assert isinstance(decide_flow(policy(ruled, names[0]), FlowFacts("other.example.org", 443, Scheme.HTTPS)), Deny)
    assert (set(), set()) == (bound(ruled, names[1]), granted(ruled, names[1]))
    assert set(BINDINGS) == {item.partition("/")[2] for item in ruled.world.vaultd.inline[names[1]]}
    assert set(BINDINGS) - {"api"} == bound(ruled, names[2])
    assert {"network-policy", "credential-vault"} <= {
        item["code"] for name in names for item in recorded(ruled, name, "gateway.dropped")
    }
    assert 500 == (await ruled.http("GET", f"/{names[0]}/networkpolicy")).status_code
    assert 200 == (await ruled.http("PUT", f"/{names[0]}/networkpolicy", BODY["networkPolicy"])).status_code
    assert 204 == (await ruled.http("DELETE", f"/{names[1]}{WALLET}")).status_code
    assert [] == await settled(ruled)


@pytest.mark.parametrize("body", [{"bindings": {"delete": ["api"]}, "credentials": {"delete": ["api"]}}, None])
async def test_a_revocation_needs_no_consent_of_vaultd(body: Any, ruled: Place) -> None:
    """vaultd refuses a secret of the operator's policy. The revoked secrets are removed nevertheless."""
    name = await make(ruled, named=True)
    ruled.world.vaultd.fail["regrant"] = wire.RequestError(wire.Code.UNKNOWN_SECRET, "nowhere")
    answer = await ruled.http("PATCH" if body else "DELETE", f"/{name}{WALLET}", body)
    assert answer.status_code in (200, 204), answer.text
    left = set(BINDINGS) - {"api"} if body else set()
    assert left == bound(ruled, name) == granted(ruled, name)
    assert left == {item.partition("/")[2] for item in ruled.world.vaultd.inline[name]}
    assert not (await row(ruled, name)).policy_digest
    del ruled.world.vaultd.fail["regrant"]
    assert [] == await settled(ruled)


async def test_what_vaultd_does_not_grant_keeps_nothing_granted_that_is_over(ruled: Place) -> None:
    """The new document also needs a missing secret. The grants of the former document end nevertheless."""
    name = await make(ruled, named=True)
    unfulfilled = "      - {id: more, host: more.example.org, inject: {secret: nowhere, as: bearer}}\n"
    ruled.world.vaultd.fail["regrant"] = wire.RequestError(wire.Code.UNKNOWN_SECRET, "nowhere")
    await change(ruled, LOOSE + unfulfilled + "always_deny: [api.example.org]\n")
    assert set(BINDINGS) - {"api"} == bound(ruled, name) == granted(ruled, name)
    assert not (await row(ruled, name)).policy_digest
    del ruled.world.vaultd.fail["regrant"]
    assert [] == await settled(ruled)


async def test_a_policy_that_no_gateway_can_be_given_is_deny_all(ruled: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled policy can be larger than a message between processes."""
    name, small = await make(ruled, named=True), wire.FrameLimits(frame=64 * 1024)
    monkeypatch.setattr(frames, "within", lambda body, _limits: limits.within(body, small))
    many = ", ".join(f"{'long-label.' * 9}host-{number}.example.org" for number in range(1000))
    await change(ruled, LOOSE + f"      - {{id: many, hosts: [{many}]}}\n")
    await until(lambda: policy(ruled, name).lists == DENY_ALL.lists)
    assert set() == granted(ruled, name)
    assert ["the policy is too large for a gateway"] == [
        item["reason"] for item in recorded(ruled, name, "gateway.dropped")
    ]
    await change(ruled, DENIED.text)
    assert [] == await settled(ruled)


async def test_a_database_that_cannot_be_read_only_delays_a_new_document(
    ruled: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ruled.server is not None
    name = await make(ruled)
    registry = ruled.server.registry

    async def broken() -> list[Sandbox]:
        raise OSError("injected")

    with monkeypatch.context() as during:
        during.setattr(registry, "all", broken)
        with pytest.raises(OSError, match="injected"):
            await change(ruled, DENIED.text)
    await follow(ruled)
    assert set(BINDINGS) - {"api"} == bound(ruled, name)
    assert [] == await settled(ruled)


async def test_a_new_document_during_a_create_is_in_force_when_it_is_answered(ruled: Place) -> None:
    hostd = ruled.world.hostd
    hostd.hold["launch"], hostd.reached["launch"] = asyncio.Event(), asyncio.Event()
    creating = asyncio.create_task(ruled.http("POST", "", BODY))
    await hostd.reached["launch"].wait()
    await change(ruled, DENIED.text)
    hostd.hold["launch"].set()
    name = (await creating).json()["id"]
    assert ("api.example.org",) == policy(ruled, name).always_deny


async def test_a_create_that_waits_for_its_turn_is_admitted_under_the_document_of_its_turn(ruled: Place) -> None:
    """The policy that it names is removed before the launch: the caller gets an error, and nothing remains."""
    hostd = ruled.world.hostd
    hostd.hold["launch"] = asyncio.Event()
    body = BODY | {"extensions": {"sallyport.policy": "team"}}
    others = [asyncio.create_task(ruled.http("POST", "", BODY)) for _ in range(ruled.world.config.bounds.launches)]
    await until(lambda: len(hostd.named("launch")) == len(others))
    waiting = asyncio.create_task(ruled.http("POST", "", body))
    while len(await ruled.rows()) <= len(others):  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.005)
    await change(ruled, TIGHTENINGS["the named policy is removed"].text)
    hostd.hold.pop("launch").set()
    refused = await waiting
    assert (400, True) == (refused.status_code, "there is no policy named" in refused.text)
    assert {202} == {(await other).status_code for other in others}
    assert len(others) == len(await ruled.rows())
    assert [] == await settled(ruled)


async def test_a_binding_that_is_deleted_is_not_recorded_as_restored(ruled: Place) -> None:
    name = await make(ruled)
    await change(ruled, DENIED.text)
    assert 200 == (await ruled.http("PATCH", f"/{name}{WALLET}", {"bindings": {"delete": ["api"]}})).status_code
    await change(ruled, LOOSE)
    assert [] == recorded(ruled, name, "gateway.restored")
    assert "reason" not in (await ruled.http("GET", f"/{name}/networkpolicy")).json()


def _alarms(place: Place) -> list[dict[str, Any]]:
    return [item for item in place.world.auditd.records if item.get("rule") == "policy.file"]


UNUSABLE: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.rename(path.with_suffix(".away")),
    "a directory": lambda path: (path.rename(path.with_suffix(".away")), path.mkdir()),
    "no YAML": lambda path: path.write_text("version: ["),
    "no document": lambda path: path.write_text("version: 1\nalways_denied: [x.example.org]\n"),
    "not UTF-8": lambda path: path.write_bytes(b"version: 1\n# \xff\n"),
}


@pytest.mark.parametrize("case", UNUSABLE)
async def test_an_unusable_file_leaves_the_last_good_document_in_force_and_raises_one_alarm(
    case: str, ruled: Place
) -> None:
    name = await make(ruled)
    await change(ruled, DENIED.text)
    path = ruled.world.config.run_dir / "policies.yaml"
    UNUSABLE[case](path)
    for _ in range(3):
        await follow(ruled)
    assert 1 == len(_alarms(ruled))
    assert str(path) in _alarms(ruled)[0]["error"]
    assert ("api.example.org",) == policy(ruled, name).always_deny
    if path.is_dir():
        path.rmdir()
    await change(ruled, TIGHTENINGS["everything"].text)
    assert ("*.org",) == policy(ruled, name).always_deny
    UNUSABLE["no YAML"](path)
    await follow(ruled)
    assert 2 == len(_alarms(ruled))


async def test_a_file_that_could_not_be_read_is_read_later_though_it_looks_the_same(
    ruled: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk error or a lack of descriptors: `stat` shows neither."""
    name = await make(ruled)
    with monkeypatch.context() as during:

        def unreadable(path: Path) -> Any:
            raise PolicyError(str(path), 1, 1, "cannot be read") from OSError(5, "injected")

        during.setattr(operator_file, "load", unreadable)
        await change(ruled, DENIED.text)
        assert 1 == len(_alarms(ruled))
    await follow(ruled)
    assert ("api.example.org",) == policy(ruled, name).always_deny


async def test_after_a_restart_the_document_of_now_is_in_force_under_rows_of_before(ruled: Place) -> None:
    name = await make(ruled, named=True)
    await ruled.stop()
    write(ruled, TIGHTENINGS["everything"].text)
    path = ruled.world.config.run_dir / "policies.yaml"
    ruled.world.policies = Policies.read(path)
    await ruled.start()
    assert [] == await settled(ruled)
    assert ("deny-all", set()) == (policy(ruled, name).name, granted(ruled, name))
    assert "team" in {item.get("name") for item in recorded(ruled, name, "gateway.dropped")}


async def test_a_gateway_under_another_document_than_ours_is_settled_once_both_are_the_same(ruled: Place) -> None:
    """hostd's compiler has read the file first. Callers' changes are then already under the new document."""
    changed = await make(ruled)
    write(ruled, DENIED.text)
    body = {"defaultAction": "deny", "egress": [{"action": "allow", "target": target} for target in ALLOWED]}
    answer = await ruled.http("PUT", f"/{changed}/networkpolicy", body)
    assert 200 == answer.status_code, answer.text
    created = (await ruled.http("POST", "", BODY)).json()["id"]
    for name in (changed, created):
        assert ("api.example.org",) == policy(ruled, name).always_deny
        assert "" == (await row(ruled, name)).policy_digest
    assert [] != await wrong(ruled)
    await follow(ruled)
    assert [] == await settled(ruled)


async def test_a_gateway_that_is_behind_stays_unsettled_until_it_is_not(ruled: Place) -> None:
    """The compiler has missed a document that was readable only for a moment."""
    name = await make(ruled)
    compiler = ruled.world.hostd.compiler
    ruled.world.hostd.compiler = Compiler(OperatorFile(load_text(LOOSE)))
    await change(ruled, DENIED.text)
    assert () == policy(ruled, name).always_deny
    assert "" == (await row(ruled, name)).policy_digest
    assert "api" not in granted(ruled, name)
    ruled.world.hostd.compiler = compiler
    assert [] == await settled(ruled)
    assert ("api.example.org",) == policy(ruled, name).always_deny
