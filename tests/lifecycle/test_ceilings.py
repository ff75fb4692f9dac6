"""Ceilings and the queue of creations: exact among concurrent calls, restarts and servers, with a time to come back."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from backends import Template, described, table
from standins import BOUNDS, IMAGE, KEY, World, world

import wire
from lifecycle.api.credentials import digest
from lifecycle.api.errors import ApiError
from lifecycle.config.serve import DatabaseConfig
from lifecycle.sandboxes.bounds import CreationBounds
from lifecycle.sandboxes.ceilings import Ceilings, Held, SandboxCeiling, check
from lifecycle.sandboxes.registry import Registry, Sandbox, State
from tests.postgresql import Cluster
from wire.api.states import HostState

pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {"image": {"uri": IMAGE}, "entrypoint": ["sleep", "1"], "resourceLimits": {}}
OTHER_KEY = "another-api-key-0123456789"
GIB = 1 << 30


def bounds(
    total: SandboxCeiling | None = None, per_key: SandboxCeiling | None = None, **changes: Any
) -> CreationBounds:
    return replace(BOUNDS, ceilings=Ceilings(total or SandboxCeiling(), per_key or SandboxCeiling()), **changes)


async def create(client: httpx.AsyncClient, **limits: str) -> httpx.Response:
    return await client.post("/v1/sandboxes", json={**BODY, "resourceLimits": limits})


def refused(answer: httpx.Response) -> bool:
    """Return whether the answer is the refusal by a ceiling, which is complete."""
    if answer.status_code != 429:
        return False
    assert "SANDBOX::QUOTA_EXCEEDED" == answer.json()["code"]
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    return True


@pytest.mark.parametrize(
    ("limits", "made"),
    [
        (bounds(SandboxCeiling(sandboxes=5)), 5),
        (bounds(per_key=SandboxCeiling(sandboxes=5)), 5),
        (bounds(SandboxCeiling(cpu_nanos=5_999_999_999)), 5),
        (bounds(SandboxCeiling(memory_bytes=5 * 512 << 20)), 5),
        (bounds(per_key=SandboxCeiling(disk_bytes=5 * GIB)), 5),
        (bounds(SandboxCeiling(sandboxes=7, cpu_nanos=6 * 10**9), SandboxCeiling(memory_bytes=5 * 512 << 20)), 5),
        (bounds(sandboxes=5), 5),
    ],
)
async def test_calls_that_come_together_get_exactly_what_there_is(limits: CreationBounds, made: int) -> None:
    async with world(bounds=limits) as described, described.serving() as server, server.client() as client:
        answers = await asyncio.gather(*(create(client) for _ in range(50)))
        assert {202: made, 429: 50 - made} == Counter(answer.status_code for answer in answers)
        assert made == len(server.hostd.sandboxes)
        listed = (await client.get("/v1/sandboxes")).json()
        assert made == listed["pagination"]["totalItems"]
        first = listed["items"][0]["id"]
        assert 204 == (await client.delete(f"/v1/sandboxes/{first}")).status_code
        assert [202, 429] == [(await create(client)).status_code for _ in "ab"]


async def test_a_sandbox_counts_until_it_is_removed() -> None:
    """Also paused, ended, and over a restart. One that is lost counts no longer."""
    async with world(bounds=bounds(SandboxCeiling(sandboxes=1))) as there:
        async with there.serving() as server, server.client() as client:
            name = (await create(client)).json()["id"]
            assert refused(await create(client))
            assert 202 == (await client.post(f"/v1/sandboxes/{name}/pause")).status_code
            assert refused(await create(client))
        async with there.serving() as server, server.client() as client:
            assert refused(await create(client))
            assert server.server is not None
            server.hostd.change(name, state=HostState.EXITED, exit_code=1)
            await server.server.observer.observe()
            assert "Failed" == (await client.get(f"/v1/sandboxes/{name}")).json()["status"]["state"]
            assert refused(await create(client))
            server.hostd.change(name, state=HostState.ALARM)
            await server.server.observer.observe()
            assert 202 == (await create(client)).status_code


@pytest.mark.parametrize("answered", [False, True])
async def test_a_failed_creation_gives_its_share_back(answered: bool) -> None:
    """Whether its caller got the error, or an id before it."""
    limits = bounds(SandboxCeiling(sandboxes=1), answer_seconds=0.05 if answered else 10.0)
    async with world(bounds=limits) as described, described.serving() as server, server.client() as client:
        server.hostd.fail["launch"] = wire.RequestError(wire.Code.HOST, "no")
        server.hostd.hold["launch"] = asyncio.Event()
        call = asyncio.create_task(create(client))
        if answered:
            name = (await call).json()["id"]
        server.hostd.hold["launch"].set()
        if answered:
            while (await client.get(f"/v1/sandboxes/{name}")).json()["status"]["state"] != "Failed":
                pass
        else:
            assert 500 == (await call).status_code
        server.hostd.fail.clear()
        assert 202 == (await create(client)).status_code
        assert refused(await create(client))


async def test_each_key_has_its_own_share() -> None:
    """In the database is a label, from which the key cannot be read, and by which it is the same after a restart."""
    limits = bounds(SandboxCeiling(sandboxes=3), SandboxCeiling(sandboxes=2))
    digests = (digest(KEY), digest(OTHER_KEY))
    async with world(bounds=limits, key_digests=digests) as described:
        async with described.serving() as server, server.client() as one, server.client(OTHER_KEY) as two:
            assert [202, 202, 429] == [(await create(one)).status_code for _ in range(3)]
            assert [202, 429] == [(await create(two)).status_code for _ in range(2)]
            assert server.server is not None
            labels = {row.key_label for row in await server.server.registry.all()}
            assert ({16}, 2) == ({len(label) for label in labels}, len(labels))
            assert not any(label in known for label in labels for known in digests)
            for item in (await one.get("/v1/sandboxes")).json()["items"]:
                assert not {"keyLabel", "key_label"} & item.keys()
        async with described.serving() as server, server.client() as one:
            assert refused(await create(one))


@pytest.mark.parametrize(
    ("limits", "asked", "named"),
    [
        (bounds(SandboxCeiling(cpu_nanos=2 * 10**9)), {"cpu": "3"}, "resourceLimits.cpu"),
        (bounds(per_key=SandboxCeiling(memory_bytes=GIB)), {"memory": "2Gi"}, "resourceLimits.memory"),
        (bounds(SandboxCeiling(disk_bytes=GIB)), {"disk": "2Gi"}, "resourceLimits.disk"),
    ],
)
async def test_a_sandbox_over_a_ceiling_by_itself_is_never_possible(
    limits: CreationBounds, asked: dict[str, str], named: str
) -> None:
    """Its caller is not asked to come back."""
    async with world(bounds=limits) as described, described.serving() as server, server.client() as client:
        answer = await create(client, **asked)
        assert (400, "SANDBOX::INVALID_PARAMETER") == (answer.status_code, answer.json()["code"])
        assert named in answer.json()["message"]
        assert 202 == (await create(client)).status_code


def test_the_first_exceeded_resource_is_named() -> None:
    ceiling = SandboxCeiling(sandboxes=2, memory_bytes=10)
    check(Held(1, 9, 5, 9), Held(1, 9, 5, 9), ceiling, "x")
    for used, word in ((Held(2, 0, 0, 0), "sandboxes"), (Held(1, 0, 6, 0), "memory")):
        with pytest.raises(ApiError, match=f"429 .*ceiling of {word} for x"):
            check(Held(1, 9, 5, 9), used, ceiling, "x")


async def test_servers_of_one_database_share_the_ceilings(template: Template, cluster: Cluster) -> None:
    """Their calls come together. `max_sandboxes` stays that of each server."""
    config = described(cluster.dsn(cluster.create(template.name)))
    for limits, made in (
        (bounds(SandboxCeiling(sandboxes=5)), 5),
        (bounds(per_key=SandboxCeiling(sandboxes=5), sandboxes=3), 5),
    ):
        async with (
            world(database=config, bounds=limits) as first,
            world(database=config, bounds=limits) as second,
            first.serving(),
            second.serving(),
            first.client() as one,
            second.client() as two,
        ):
            answers = await asyncio.gather(*(create(client) for _ in range(25) for client in (one, two)))
            assert {202: made, 429: 50 - made} == Counter(answer.status_code for answer in answers)
            for client in (one, two):
                for item in (await client.get("/v1/sandboxes")).json()["items"]:
                    assert 204 == (await client.delete(f"/v1/sandboxes/{item['id']}")).status_code


async def test_a_claim_counts_for_its_key_and_an_idle_member_for_none(
    backend: DatabaseConfig | None, tmp_path: Path
) -> None:
    """A refused claim leaves the member as it was. Members count in the total."""
    registry = Registry(table(backend, tmp_path / "state.db"))
    await registry.open()
    limits = Ceilings(SandboxCeiling(sandboxes=3), SandboxCeiling(sandboxes=1))
    row = Sandbox("m0", State.RUNNING, "", "", 1.0, 1.0, None, IMAGE, ("true",), "runc", pool="p", idle=True)
    members = [replace(row, id=f"m{number}") for number in range(3)]
    for member in members:
        await registry.admit(member, 1000, limits)
    with pytest.raises(ApiError, match=r"429 .*all sandboxes"):
        await registry.admit(replace(row, id="m3"), 1000, limits)
    for member, label in ((members[0], "one"), (members[1], "two")):
        owned = await registry.update(member.id, lambda row, to=label: replace(row, idle=False, key_label=to), limits)
        assert owned is not None
        assert (label, False) == (owned.key_label, owned.idle)
    with pytest.raises(ApiError, match=r"429 .*this API key"):
        await registry.update("m2", lambda row: replace(row, idle=False, key_label="one"), limits)
    assert members[2] == await registry.get("m2")
    await registry.close()


# -- the queue


async def holding(server: World, client: httpx.AsyncClient) -> tuple[asyncio.Task[httpx.Response], asyncio.Event]:
    """Occupy the only turn. Return the call that has it, and the event that ends its launch."""
    gate, reached = asyncio.Event(), asyncio.Event()
    server.hostd.hold["launch"], server.hostd.reached["launch"] = gate, reached
    call = asyncio.create_task(create(client))
    await reached.wait()
    return call, gate


async def test_a_wait_over_its_bound_is_a_429() -> None:
    limits = bounds(launches=1, queue_seconds=0.2)
    async with world(bounds=limits) as described, described.serving() as server, server.client() as client:
        first, gate = await holding(server, client)
        answer = await create(client)
        assert (429, "SANDBOX::TOO_MANY_REQUESTS") == (answer.status_code, answer.json()["code"])
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        gate.set()
        assert 202 == (await first).status_code
        assert 1 == len(server.hostd.named("launch"))
        assert 1 == (await client.get("/v1/sandboxes")).json()["pagination"]["totalItems"]
        assert 202 == (await create(client)).status_code


async def test_a_wait_over_its_bound_after_the_answer_is_a_failed_sandbox() -> None:
    limits = bounds(launches=1, queue_seconds=0.2, answer_seconds=0.05)
    async with world(bounds=limits) as described, described.serving() as server, server.client() as client:
        _, gate = await holding(server, client)
        name = (await create(client)).json()["id"]
        while (shown := (await client.get(f"/v1/sandboxes/{name}")).json()["status"])["state"] == "Pending":
            pass
        assert ("Failed", "CREATE_FAILED") == (shown["state"], shown["reason"])
        gate.set()


async def test_a_sandbox_that_is_removed_while_it_waits_is_not_launched() -> None:
    """Its row does not come back either."""
    limits = bounds(launches=1, answer_seconds=0.05)
    async with world(bounds=limits) as described, described.serving() as server, server.client() as client:
        first, gate = await holding(server, client)
        name = (await create(client)).json()["id"]
        assert 204 == (await client.delete(f"/v1/sandboxes/{name}")).status_code
        gate.set()
        await first
        assert server.server is not None
        while server.server.context.creations.is_making(name):
            await client.get(f"/v1/sandboxes/{name}")
        assert 404 == (await client.get(f"/v1/sandboxes/{name}")).status_code
        assert [1] == [len(server.hostd.named("launch"))]


async def test_a_full_queue_says_when_to_come_back() -> None:
    """The longer the queue, the later."""
    limits = bounds(launches=1, pending=30, answer_seconds=0.05)
    async with world(bounds=limits) as described, described.serving() as server, server.client() as client:
        _, gate = await holding(server, client)
        answers = await asyncio.gather(*(create(client) for _ in range(40)))
        full = [answer for answer in answers if answer.status_code == 429]
        assert 11 == len(full)
        assert {"SANDBOX::TOO_MANY_REQUESTS"} == {answer.json()["code"] for answer in full}
        assert all(10 <= int(answer.headers["retry-after"]) <= 60 for answer in full)
        gate.set()
