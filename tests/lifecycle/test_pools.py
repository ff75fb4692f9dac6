"""Pools: a claim has all parts of its call, members follow the capacity, and no caller sees an idle one.

It tests `lifecycle/api/routes/pools.py`, `lifecycle/sandboxes/pools.py`, `lifecycle/sandboxes/members.py` and
`lifecycle/proxy/handover.py`, on the schema of `lifecycle/database/versions/v0003_pools.py`.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standins import IMAGE, KEY, World, world

import wire
from lifecycle.sandboxes import members, pools
from lifecycle.sandboxes.pool import Capacity, SandboxPool
from lifecycle.sandboxes.quantities import Resources
from lifecycle.sandboxes.registry import Sandbox, State
from policy.compiled import CompiledPolicy
from policy.decision import Deny, decide_name
from tests.lifecycle.test_transactions import until
from wire.api.states import HostState

pytestmark = pytest.mark.slow

TEMPLATE: dict[str, Any] = {"spec": {"containers": [{"image": IMAGE, "command": ["serve"], "args": ["-v"]}]}}
CLAIM: dict[str, Any] = {"extensions": {"poolRef": "p"}}
POLICY = """
version: 1
default: open
policies:
  open: {rules: [{id: all, host: api.example.com}]}
  inside: {rules: [{id: one, host: api.example.com, inject: {secret: token, as: bearer}}]}
"""


def capacity(low: int = 1, high: int = 1, least: int = 0, most: int = 8) -> dict[str, int]:
    return {"bufferMin": low, "bufferMax": high, "poolMin": least, "poolMax": most}


def pool(name: str = "p", **changes: Any) -> dict[str, Any]:
    return {"name": name, "template": TEMPLATE, "capacitySpec": capacity()} | changes


@pytest.fixture
async def server() -> AsyncIterator[World]:
    async with world(POLICY) as made, made.serving():
        yield made


async def rows(server: World) -> list[Sandbox]:
    assert server.server is not None
    return await server.server.registry.all()


async def idle(server: World, number: int, name: str = "p") -> None:
    """Wait until a pool has a number of idle members and none in progress, and hostd as many sandboxes as rows."""

    async def reached() -> bool:
        found = await rows(server)
        states = [row.state for row in found if row.idle and row.pool.startswith(f"{name}@")]
        return states == [State.RUNNING] * number and len(found) == len(server.hostd.sandboxes)

    await until(reached)


async def made(server: World, **changes: Any) -> None:
    async with server.client() as client:
        answer = await client.post("/v1/pools", json=pool(**changes))
    assert 201 == answer.status_code, answer.text
    await idle(server, (pool() | changes)["capacitySpec"]["bufferMax"])


async def test_a_pool_is_made_shown_and_deleted(server: World) -> None:
    async with server.client() as client:
        answer = await client.post("/v1/pools", json=pool())
        assert (201, "/v1/pools/p") == (answer.status_code, answer.headers["location"])
        assert ("p", capacity(), 0) == (
            answer.json()["name"],
            answer.json()["capacitySpec"],
            answer.json()["status"]["allocated"],
        )
        await idle(server, 1)
        status = (await client.get("/v1/pools/p")).json()["status"]
        assert {"total": 1, "allocated": 0, "available": 1} == {key: status[key] for key in status if key != "revision"}
        assert 409 == (await client.post("/v1/pools", json=pool())).status_code
        assert ["p"] == [item["name"] for item in (await client.get("/pools")).json()["items"]]
        assert 204 == (await client.delete("/v1/pools/p")).status_code
        for answer in (await client.get("/v1/pools/p"), await client.delete("/v1/pools/p")):
            assert (404, "KUBERNETES::POOL_NOT_FOUND") == (answer.status_code, answer.json()["code"])
    await idle(server, 0)
    assert ([], {}) == (await rows(server), server.vaultd.grants)
    assert ["created", "deleted"] == [r["reason"] for r in server.auditd.records if r["kind"] == "lifecycle.pool"]


async def test_no_caller_sees_an_idle_member(server: World) -> None:
    """Neither by a list nor by its id, on any route. A deletion by its id does nothing."""
    await made(server)
    (row,) = await rows(server)
    path = f"/v1/sandboxes/{row.id}"
    async with server.client() as client:
        assert [] == (await client.get("/v1/sandboxes")).json()["items"]
        for method, place, body in (
            ("GET", path, None),
            ("DELETE", path, None),
            ("GET", f"{path}/endpoints/44772", None),
            ("POST", f"{path}/pause", None),
            ("PATCH", f"{path}/metadata", {"a": "b"}),
            ("GET", f"{path}/networkpolicy", None),
            ("GET", f"{path}/proxy/44772/ping", None),
            ("POST", f"{path}/renew-expiration", {"expiresAt": "2099-01-01T00:00:00Z"}),
        ):
            answer = await client.request(method, place, json=body)
            assert 404 == answer.status_code, place
    assert [row] == await rows(server)


async def test_a_member_denies_all_and_starts_no_program(server: World) -> None:
    await made(server)
    (launch,) = server.hostd.named("launch")
    assert (True, ["serve", "-v"]) == (launch["held"], launch["entrypoint"])
    (policy,) = server.hostd.policies.values()
    assert isinstance(decide_name(CompiledPolicy.from_json(policy), "api.example.com"), Deny)
    assert [[]] == list(server.vaultd.grants.values())
    assert not [one for one in server.hostd.program.seen if one.raw_path == b"/internal/init"]


async def test_a_claim_has_every_part_of_its_call(server: World) -> None:
    """Policy and grants are in force before execd starts the entrypoint with the variables of the call."""
    await made(server)
    (member,) = await rows(server)
    order: list[str] = []
    program = server.hostd.program
    body = CLAIM | {
        "env": {"A": "b", "SSL_CERT_FILE": "/own"},
        "metadata": {"team": "x"},
        "timeout": 600,
        "entrypoint": ["run me"],
        "secureAccess": True,
        "resourceLimits": {},
        "image": {"uri": IMAGE},
        "extensions": {"poolRef": "p", "sallyport.policy": "inside", "opensandbox.extensions.n": "1"},
    }
    configure = server.hostd.configure

    async def noted(request: Any) -> Any:
        order.append("configure" if not [s for s in program.seen if s.raw_path == b"/internal/init"] else "late")
        assert server.vaultd.grants[member.id]
        return await configure(request)

    server.hostd.configure = noted  # type: ignore[method-assign]
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=body)
        assert 202 == answer.status_code, answer.text
        shown = (await client.get(f"/v1/sandboxes/{member.id}")).json()
        listed = (await client.get("/v1/sandboxes", params={"metadata": "team=x"})).json()["items"]
        endpoint = (await client.get(f"/v1/sandboxes/{member.id}/endpoints/8080")).json()
    body = answer.json()
    assert (member.id, ["run me"], {"team": "x"}) == (body["id"], body["entrypoint"], body["metadata"])
    assert {"mode": "pool", "poolRef": "p", "state": "allocated"} == shown["allocation"]
    assert [shown] == listed
    assert "OpenSandbox-Secure-Access" in endpoint["headers"]
    (init,) = [one for one in program.seen if one.raw_path == b"/internal/init"]
    assert [server.tokens.execd(member.id)] == init.header("x-execd-access-token")
    sent = json.loads(init.body)
    assert (member.id, ["run", "me"], "b") == (sent["sandboxId"], sent["entrypoint"], sent["envs"]["A"])
    assert "SSL_CERT_FILE" not in sent["envs"]
    assert "configure" == order[0]
    (claimed,) = [one for one in server.auditd.records if one["kind"] == "lifecycle.claim"]
    assert (member.id, member.pool) == (claimed["sandbox"], claimed["pool"])
    row = next(row for row in await rows(server) if row.id == member.id)
    assert (False, State.RUNNING, "inside") == (row.idle, row.state, row.policy_name)
    assert row.expires_at is not None and 590 < row.expires_at - row.created_at < 610
    assert row.policy_digest == server.hostd.policies[member.id]["digest"]
    await idle(server, 1)  # another member takes its place


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"image": {"uri": "other:1"}}, "image"),
        ({"resourceLimits": {"memory": "1Gi"}}, "resourceLimits"),
        ({"resourceLimits": {"cpu": "2"}}, "resourceLimits"),
        ({"resourceLimits": {"disk": "2Gi"}}, "resourceLimits"),
        ({"resourceLimits": {"nothing": "1"}}, "nothing"),
        ({"extensions": {"poolRef": "p", "sallyport.runtime": "runsc"}}, "sallyport.runtime"),
        ({"extensions": {"poolRef": "p", "bootstrap.execd.isolation": "enable", "sallyport.runtime": "runsc"}}, "isol"),
        ({"volumes": [{"name": "a", "host": {"path": "/a"}, "mountPath": "/a"}]}, "volumes"),
        ({"env": {"JUPYTER_HOST": "x"}}, "JUPYTER_HOST"),
        ({"env": {"EXECD_ENVS": "x"}}, "EXECD_ENVS"),
        ({"env": {"a.b": "x"}}, "a.b"),
        ({"entrypoint": [" "]}, "entrypoint"),
    ],
)
async def test_a_claim_with_a_part_that_has_no_effect_is_refused(
    server: World, changes: dict[str, Any], named: str
) -> None:
    await made(server)
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=CLAIM | changes)
    assert (400, True) == (answer.status_code, named in answer.json()["message"]), answer.text
    assert [True] == [row.idle for row in await rows(server)]


@pytest.mark.parametrize(
    "changes", [{"snapshotId": "5f2b1c0d-0000-4000-8000-000000000000"}, {"lifecycle": {"preStart": {"command": ["a"]}}}]
)
async def test_a_claim_with_what_the_contract_excludes_is_422(server: World, changes: dict[str, Any]) -> None:
    await made(server)
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=CLAIM | changes)
    assert (422, True) == (answer.status_code, "poolRef" in answer.json()["message"]), answer.text
    assert [True] == [row.idle for row in await rows(server)]


async def test_a_claim_of_an_unknown_pool_is_404(server: World) -> None:
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=CLAIM)
    assert (404, "KUBERNETES::POOL_NOT_FOUND") == (answer.status_code, answer.json()["code"])


async def test_concurrent_claims_get_different_members_and_the_rest_429(server: World) -> None:
    """Never two the same. The pool never has more sandboxes than its maximum."""
    await made(server, capacitySpec=capacity(3, 3, 0, 5))
    async with server.client() as client:
        answers = await asyncio.gather(*(client.post("/v1/sandboxes", json=CLAIM) for _ in range(9)))
    got = [answer.json()["id"] for answer in answers if answer.status_code == 202]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert (5, 5, 4) == (len(got), len(set(got)), len(refused))
    assert {"KUBERNETES::POOL_CAPACITY_EXHAUSTED"} == {answer.json()["code"] for answer in refused}
    assert all(answer.headers["retry-after"].isdigit() for answer in refused)
    assert 5 == len(await rows(server)) == len(server.hostd.named("launch"))


@pytest.mark.parametrize("op", ["regrant", "claim_member"])
async def test_a_claim_that_fails_leaves_nothing(server: World, op: str) -> None:
    """The member is removed, because it is unknown how far the claim came. Another one takes its place."""
    await made(server)
    (member,) = await rows(server)
    daemon = server.vaultd if op == "regrant" else server.hostd
    daemon.fail[op] = wire.RequestError(wire.Code.INTERNAL, "no")
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=CLAIM)
    assert 500 == answer.status_code
    assert member.id not in server.hostd.sandboxes
    assert not [one for one in server.hostd.program.seen if one.raw_path == b"/internal/init"]
    await idle(server, 1)
    assert member.id not in [row.id for row in await rows(server)]


async def test_a_claim_without_its_record_starts_nothing(server: World) -> None:
    await made(server)
    server.auditd.fail["record"] = wire.RequestError(wire.Code.STORAGE, "no")
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=CLAIM)
    assert 500 <= answer.status_code
    assert not [one for one in server.hostd.program.seen if one.raw_path == b"/internal/init"]


async def test_members_that_ended_are_replaced(server: World) -> None:
    await made(server)
    (member,) = await rows(server)
    server.hostd.change(member.id, state=HostState.EXITED, exit_code=1)
    await until(lambda: member.id not in server.hostd.sandboxes)
    await idle(server, 1)


async def test_a_member_of_a_removed_or_replaced_image_is_replaced_and_not_claimed(server: World) -> None:
    """The claim gets a later one. hostd compares the images again at the claim."""
    await made(server)
    (member,) = await rows(server)
    server.hostd.outdated.add(member.id)
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=CLAIM)
    assert 202 == answer.status_code, answer.text
    assert member.id != answer.json()["id"]
    await until(lambda: member.id not in server.hostd.sandboxes)
    await idle(server, 1)


async def test_a_member_whose_image_goes_during_the_claim_starts_nothing(
    server: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(server)
    (member,) = await rows(server)
    claim = server.vaultd.answer

    async def late(op: str, given: dict[str, Any]) -> Any:
        server.hostd.outdated.add(member.id)
        return await claim(op, given)

    monkeypatch.setattr(server.vaultd, "answer", late)
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=CLAIM)
    assert (400, "DOCKER::SANDBOX_IMAGE_PULL_FAILED") == (answer.status_code, answer.json()["code"])
    assert member.id not in server.hostd.sandboxes
    assert not [one for one in server.hostd.program.seen if one.raw_path == b"/internal/init"]


async def test_a_claim_of_a_pool_whose_image_was_removed_is_refused_at_once(
    server: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(server)
    (member,) = await rows(server)
    server.hostd.outdated.add(member.id)
    server.hostd.fail["describe_image"] = wire.RequestError(wire.Code.UNKNOWN_IMAGE, "no")
    async with server.client() as client:
        answer = await client.post("/v1/sandboxes", json=CLAIM)
        assert (400, "DOCKER::SANDBOX_IMAGE_PULL_FAILED") == (answer.status_code, answer.json()["code"])

        async def told() -> bool:
            return "not available" in (await client.get("/v1/pools/p")).json()["status"].get("message", "")

        await until(told)
    assert {} == server.hostd.sandboxes


async def test_members_follow_the_capacity(server: World) -> None:
    await made(server, capacitySpec=capacity(1, 1))
    async with server.client() as client:
        for low, high, least, most, wanted in ((2, 4, 0, 8, 4), (0, 1, 3, 8, 3), (0, 1, 0, 8, 1), (0, 0, 0, 0, 0)):
            answer = await client.put("/v1/pools/p", json={"capacitySpec": capacity(low, high, least, most)})
            assert 200 == answer.status_code
            await idle(server, wanted)
        assert 404 == (await client.put("/v1/pools/q", json={"capacitySpec": capacity()})).status_code


async def test_a_pool_that_cannot_be_filled_says_why_and_refuses_at_once(server: World) -> None:
    server.hostd.fail["launch"] = wire.RequestError(wire.Code.FULL, "no slots")
    async with server.client() as client:
        assert 201 == (await client.post("/v1/pools", json=pool())).status_code

        async def told() -> bool:
            return "no slots" in (await client.get("/v1/pools/p")).json()["status"].get("message", "")

        await until(told)
        answer = await client.post("/v1/sandboxes", json=CLAIM)
        assert 429 == answer.status_code
        del server.hostd.fail["launch"]
        await idle(server, 1)
        assert "message" not in (await client.get("/v1/pools/p")).json()["status"]


async def test_a_pool_of_a_former_name_has_new_members(server: World) -> None:
    """The members of the former pool are removed, also if the new one has the same template."""
    await made(server)
    (former,) = await rows(server)
    async with server.client() as client:
        await client.delete("/v1/pools/p")
        assert 201 == (await client.post("/v1/pools", json=pool())).status_code
    await until(lambda: former.id not in server.hostd.sandboxes)
    await idle(server, 1)
    assert former.pool != (await rows(server))[0].pool


async def test_pools_and_members_survive_a_restart() -> None:
    """A member that was being made is removed. A claim of a member from before works."""
    async with world(POLICY) as made_world:
        async with made_world.serving():
            await made(made_world)
            (member,) = await rows(made_world)
            assert made_world.server is not None
            registry = made_world.server.registry
            await registry.put(replace(member, id=f"sbx-{'1' * 24}", state=State.PENDING))
            await registry.put(replace(member, id=f"sbx-{'2' * 24}", state=State.PENDING, idle=False))
        async with made_world.serving():
            await idle(made_world, 1)
            async with made_world.client() as client:
                answer = await client.post("/v1/sandboxes", json=CLAIM)
            assert (202, member.id) == (answer.status_code, answer.json()["id"])


async def test_a_changed_document_is_in_force_at_the_claim(server: World) -> None:
    """An idle member keeps its policy that denies all. The claim compiles under the document of its moment."""
    await made(server)
    assert server.server is not None
    (member,) = await rows(server)
    path = server.config.run_dir / "policies.yaml"
    path.write_text(POLICY.replace("api.example.com}", "other.example.com}"))
    await until(lambda: server.policies.version > 0)
    async with server.client() as client:
        body = {"extensions": {"poolRef": "p", "sallyport.policy": "open"}}
        assert 202 == (await client.post("/v1/sandboxes", json=body)).status_code
    assert "other.example.com" in json.dumps(server.hostd.policies[member.id])


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"name": "Upper"}, 422),
        ({"name": "a" * 254}, 422),
        ({"template": {"spec": {"containers": []}}}, 422),
        ({"template": {"spec": {"containers": [{"image": IMAGE}, {"image": IMAGE}]}}}, 422),
        ({"template": {"spec": {"containers": [{"image": IMAGE, "env": []}]}}}, 400),
        ({"template": {"spec": {"containers": [{"image": IMAGE}], "hostNetwork": True}}}, 400),
        ({"template": {"spec": {"containers": [{"image": IMAGE, "args": ["x"]}]}}}, 400),
        ({"template": {"spec": {"containers": [{"image": IMAGE}], "runtimeClassName": "kata"}}}, 400),
        ({"template": {"spec": {"containers": [{"image": IMAGE, "resources": {"limits": {"cpu": "x"}}}]}}}, 400),
        ({"template": {"spec": {"containers": [{"image": "none:1"}]}}}, 400),
        ({"capacitySpec": capacity(3, 2)}, 400),
        ({"capacitySpec": capacity(1, 9, 0, 8)}, 400),
        ({"capacitySpec": capacity(1, 1, 9, 8)}, 400),
        ({"capacitySpec": capacity() | {"poolMax": -1}}, 422),
        ({"capacitySpec": {"bufferMax": 1}}, 422),
        ({"more": 1}, 400),
    ],
)
async def test_a_bad_pool_is_refused_and_not_made(server: World, changes: dict[str, Any], status: int) -> None:
    async with server.client() as client:
        answer = await client.post("/v1/pools", json=pool() | changes)
        assert (status, True) == (answer.status_code, bool(answer.json()["message"])), answer.text
        assert [] == (await client.get("/v1/pools")).json()["items"]


async def test_the_routes_need_a_key(server: World) -> None:
    async with server.client(None) as client:
        for method, path in (("GET", "/v1/pools"), ("POST", "/pools"), ("DELETE", "/v1/pools/p"), ("PUT", "/pools/p")):
            assert 401 == (await client.request(method, path, json=pool())).status_code
    assert KEY


async def test_a_waiting_claim_gets_the_next_member(server: World) -> None:
    server.hostd.hold["launch"] = asyncio.Event()
    async with server.client() as client:
        assert 201 == (await client.post("/v1/pools", json=pool())).status_code
        await until(lambda: server.hostd.named("launch"))
        waiting = asyncio.create_task(client.post("/v1/sandboxes", json=CLAIM))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        server.hostd.hold["launch"].set()
        assert 202 == (await waiting).status_code


async def test_a_claim_does_not_wait_for_longer_than_its_bound(server: World, monkeypatch: pytest.MonkeyPatch) -> None:
    server.hostd.hold["launch"] = asyncio.Event()
    assert server.server is not None
    monkeypatch.setattr(server.server.context.creations._members, "_seconds", 0.2)
    async with server.client() as client:
        assert 201 == (await client.post("/v1/pools", json=pool())).status_code
        await until(lambda: server.hostd.named("launch"))
        assert 429 == (await client.post("/v1/sandboxes", json=CLAIM)).status_code
        server.hostd.hold["launch"].set()


NUMBERS = st.integers(0, 12)


@given(low=NUMBERS, high=NUMBERS, least=NUMBERS, most=NUMBERS, ready=NUMBERS, claimed=NUMBERS, filling=st.booleans())
def test_a_capacity_never_asks_for_both_and_reaches_rest(
    low: int, high: int, least: int, most: int, ready: int, claimed: int, filling: bool
) -> None:
    """One step leads to a number that needs no other step, within the maximum."""
    spec = Capacity(min(low, high), high, least, max(least, high, most))
    missing, surplus = spec.missing(ready, claimed, filling=filling), spec.surplus(ready, claimed)
    assert not (missing and surplus)
    after = ready + missing - surplus
    assert after + claimed <= spec.pool_max or not missing
    assert 0 == spec.missing(after, claimed, filling=missing > 0) == spec.surplus(after, claimed)


def test_a_pool_keeps_its_stored_form() -> None:
    whole = SandboxPool("p", "1", "image", ("a", "b"), "runc", Resources(1, 2, 3, None), Capacity(1, 2, 3, 4), 5.0)
    assert whole == SandboxPool.from_json(json.loads(json.dumps(whole.to_json())))
    assert whole.revision != replace(whole, image="other").revision
    assert "p" == SandboxPool.named_by(whole.key)


def test_the_bounds_are_below_the_time_out_of_the_clients() -> None:
    assert members.WAIT_SECONDS < 20 < 30
    assert pools.MOST_POOLS <= 64
