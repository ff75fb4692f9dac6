"""A fault at each step of a claim from a pool, a snapshot, its removal and a restore: whole, or nothing of it happened.

The control plane is real, the daemons are stand-ins, as in `test_faults_at_each_step`. A PostgreSQL that is killed has
its cases in `test_postgresql`.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import Any

import httpx
import pytest
from injection import KILLS, Injection
from places import BODY, NEW, SETTLE_SECONDS, Place, create, running, settled
from standins import IMAGE
from test_faults_at_each_step import MODES

from lifecycle.sandboxes.registry import RegistryError, Sandbox, State

POOL: dict[str, Any] = {
    "name": "p",
    "template": {"spec": {"containers": [{"image": IMAGE}]}},
    "capacitySpec": {"bufferMin": 1, "bufferMax": 1, "poolMin": 0, "poolMax": 4},
}
CLAIM: dict[str, Any] = {
    "extensions": {"poolRef": "p"},
    "networkPolicy": NEW,
    "entrypoint": ["sleep", "1"],
    "timeout": 3600,
}

type Fault = Callable[[int, str], Injection]


@pytest.fixture
async def pooled(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    """Run a server with a pool of one member."""
    async with running(monkeypatch.setattr, ingress=True) as place:
        await fill(place)
        yield place


async def fill(place: Place) -> None:
    """Make the pool."""
    assert 201 == (await place.http("POST", "/v1/pools", POOL)).status_code


async def eventually(condition: Callable[[], Awaitable[bool]]) -> bool:
    """Wait until `condition` is true, or for the time in which a server settles. Return its last value."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not (true := await condition()) and time.monotonic() < deadline:  # noqa: ASYNC110 - other tasks' state
        await asyncio.sleep(0.01)
    return true


async def rows_of(place: Place, *, idle: bool) -> dict[str, Sandbox]:
    """Return the idle members that can be claimed, or all other sandboxes; as soon as the database answers."""
    rows: dict[str, Sandbox] = {}

    async def read() -> bool:
        with contextlib.suppress(RegistryError):
            rows.update(await place.rows())
            return True
        return False

    assert await eventually(read)
    if idle:
        return {name: row for name, row in rows.items() if row.idle and row.state is State.RUNNING}
    return {name: row for name, row in rows.items() if not row.idle}


async def _recovered(place: Place, injection: Injection) -> None:
    await asyncio.to_thread(injection.recover)
    if injection.mode in KILLS:
        await place.stop()
        await place.start()
    await asyncio.sleep(0.05 if injection.mode == "outage" else 0)
    place.injector.out.clear()


async def creations(place: Place, mode: str, body: dict[str, Any], members: int, fault: Fault = Injection) -> list[str]:
    """Create a sandbox with a fault at each step in turn. Return the steps.

    A sandbox whose caller has no id is removed, and the pool has its members again.
    """

    async def full() -> bool:
        return len(await rows_of(place, idle=True)) == members

    for number in count():
        assert await eventually(full)
        injection = fault(number, mode)
        answer = await place.with_fault(injection, lambda: place.http("POST", "", body))
        said = f"{mode} at {injection.seen[-1]}"
        await _recovered(place, injection)
        told = {answer.json()["id"]} if answer is not None and answer.status_code == 202 else set()

        async def only_told(told: set[str] = told) -> bool:
            return (await rows_of(place, idle=False)).keys() == told

        if not (mode == "killed-after" and injection.seen[-1] == "registry.update" and not told):
            assert await eventually(only_told), said
        assert [] == await settled(place), said
        found = await rows_of(place, idle=False)
        assert len(found) <= 1, said  # One that was complete when its server was killed can be found in the list.
        for name, row in found.items():
            assert row.network_policy == body["networkPolicy"], said
            assert 204 == (await place.http("DELETE", f"/{name}")).status_code
        if not injection.fired:
            assert answer is not None and 202 == answer.status_code
            return injection.seen
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_a_claim_is_whole_or_did_not_happen(mode: str, pooled: Place) -> None:
    """A member whose claim failed belongs to no caller, and another one takes its place."""
    steps = await creations(pooled, mode, CLAIM, 1)
    wanted = ["hostd.claimable", "registry.update", "auditd.record", "vaultd.regrant", "hostd.claim_member"]
    assert wanted == steps[: len(wanted)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_a_restore_is_whole_or_did_not_happen(mode: str, place: Place) -> None:
    """And no snapshot counts as used by a sandbox that there is not."""
    name = await create(place, vault=False)
    snapshot = (await place.http("POST", f"/{name}/snapshots", {})).json()["id"]
    assert await eventually(lambda: _is(place, {snapshot: "Ready"}))
    assert 204 == (await place.http("DELETE", f"/{name}")).status_code
    body = {**{key: text for key, text in BODY.items() if key != "image"}, "snapshotId": snapshot}
    assert len(await creations(place, mode, body, 0)) >= 7
    assert {} == place.world.hostd.used
    assert 204 == (await place.http("DELETE", f"/v1/snapshots/{snapshot}")).status_code


async def _snapshots(place: Place) -> dict[str, str]:
    """Return the state of each snapshot; nothing but `{"": ""}` while the database does not answer."""
    answer = await place.http("GET", "/v1/snapshots")
    return {item["id"]: item["status"]["state"] for item in answer.json().get("items", [{"id": "", "status": _NONE}])}


_NONE = {"state": ""}


async def _is(place: Place, wanted: dict[str, str]) -> bool:
    return wanted == await _snapshots(place)


async def _agree(place: Place) -> bool:
    """Return whether each snapshot is ready or failed, and the host has exactly the ready ones."""
    found = await _snapshots(place)
    ready = {name for name, state in found.items() if state == "Ready"}
    return set(found.values()) <= {"Ready", "Failed"} and ready == place.world.hostd.snapshots.keys()


async def snapshots(place: Place, mode: str, fault: Fault = Injection) -> None:
    """Take a snapshot, and remove one, with a fault at each step in turn."""
    source = await create(place, vault=False)
    for number in count():
        injection = fault(number, mode)
        answer = await place.with_fault(injection, lambda: place.http("POST", f"/{source}/snapshots", {}))
        assert await eventually(lambda: _at_rest(place))
        said = f"{mode} at {injection.seen[-1]}"
        await _recovered(place, injection)
        assert await eventually(lambda: _agree(place)), (said, await _snapshots(place), place.world.hostd.snapshots)
        found = await _snapshots(place)
        assert answer is None or answer.status_code != 202 or answer.json()["id"] in found, said
        for name in found:
            await _removed(place, name)
        if not injection.fired:
            assert ["Ready"] == list(found.values())
            break
    for number in count():
        name = (await place.http("POST", f"/{source}/snapshots", {})).json()["id"]
        assert await eventually(lambda: _is(place, {name: "Ready"}))  # noqa: B023 - it is awaited here
        injection = fault(number, mode)
        answer = await place.with_fault(injection, lambda: place.http("DELETE", f"/v1/snapshots/{name}"))  # noqa: B023
        said = f"{mode} at {injection.seen[-1]}"
        await _recovered(place, injection)
        assert await eventually(lambda: _agree(place)), (said, await _snapshots(place), place.world.hostd.snapshots)
        if answer is not None and answer.status_code == 204:
            assert {} == await _snapshots(place), said
        await _removed(place, name)
        if not injection.fired:
            assert answer is not None and 204 == answer.status_code
            break
    assert len(injection.seen) >= 4
    assert 204 == (await place.http("DELETE", f"/{source}")).status_code


async def _at_rest(place: Place) -> bool:
    """Return whether this server takes no snapshot now."""
    assert place.server is not None
    return not place.server.context.snapshots._tasks


async def _removed(place: Place, name: str) -> None:
    async def gone() -> bool:
        answer: httpx.Response = await place.http("DELETE", f"/v1/snapshots/{name}")
        return answer.status_code in (204, 404)

    assert await eventually(gone)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_a_snapshot_and_its_removal_are_whole_or_did_not_happen(mode: str, place: Place) -> None:
    """The host has exactly the ready snapshots, and no row stays between two states."""
    await snapshots(place, mode)
