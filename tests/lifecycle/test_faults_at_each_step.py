"""A fault at each step of each operation: the operation is complete, or nothing of it happened.

The control plane is real, the daemons are stand-ins. `injection` finds the steps by running the operation once.
tests/system/test_faults_of_a_server.py does the same on the real system for a part of the cases.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import httpx
import pytest
from injection import ERRORS, KILLS, LEAVES, Injection
from places import (
    BODY,
    NEW,
    POLICY,
    SETTLE_SECONDS,
    THIRD,
    VAULT,
    WALLET,
    Place,
    binding,
    create,
    credential,
    settled,
    wrong,
)

from lifecycle.sandboxes.registry import Sandbox, State

pytestmark = pytest.mark.slow

EXTENDED = ("unreached", "left-before", "killed-before")
"""Modes whose steps end like those of another mode, one step earlier or later."""
MODES = [pytest.param(mode, marks=[pytest.mark.extended] * (mode in EXTENDED)) for mode in (*ERRORS, *LEAVES, *KILLS)]


@dataclass(frozen=True)
class Operation:
    """A request about an existing sandbox, and the check that it was carried out."""

    method: str
    path: str
    content: Any
    status: int
    done: Callable[[Sandbox | None], bool]
    vault: bool = False
    after: str = ""
    """A request that the sandbox had before."""
    steps: int = 4
    """The least number of its steps."""
    again: frozenset[int] = frozenset()
    """Statuses other than `status` that a second request can get because the first one was carried out."""


def _targets(row: Sandbox | None) -> list[str]:
    return [rule["target"] for rule in (row.network_policy or {})["egress"]] if row is not None else []


def _vault(row: Sandbox | None) -> dict[str, int]:
    return dict(row.vault["credentials"]) if row is not None and row.vault is not None else {}


EXPIRY = (datetime.now(UTC) + timedelta(days=2)).replace(microsecond=0)
ROTATE = {"credentials": {"replace": [credential("one", THIRD)]}}
DROP = {"credentials": {"delete": ["two"]}, "bindings": {"delete": ["b"]}}
ADD = {"credentials": {"add": [credential("three", THIRD)]}, "bindings": {"add": [binding("c", "three")]}}
OPERATIONS = {
    "delete": Operation("DELETE", "", None, 204, lambda row: row is None, True, again=frozenset({404})),
    "renew": Operation(
        "POST",
        "/renew-expiration",
        {"expiresAt": EXPIRY.isoformat()},
        200,
        lambda row: row is not None and row.expires_at == EXPIRY.timestamp(),
        steps=1,
    ),
    "pause": Operation(
        "POST",
        "/pause",
        None,
        202,
        lambda row: row is not None and row.state is State.PAUSED,
        again=frozenset({409}),
    ),
    "resume": Operation(
        "POST",
        "/resume",
        None,
        202,
        lambda row: row is not None and row.state is State.RUNNING,
        after="/pause",
        steps=3,
        again=frozenset({409}),
    ),
    "put": Operation("PUT", POLICY, NEW, 200, lambda row: "new.example.org" in _targets(row)),
    "patch": Operation("PATCH", POLICY, NEW["egress"][1:], 200, lambda row: "new.example.org" in _targets(row)),
    "unlist": Operation("DELETE", POLICY, ["api.example.org"], 200, lambda row: [] == _targets(row)),
    "open-vault": Operation("POST", WALLET, VAULT, 201, lambda row: len(_vault(row)) == 2, again=frozenset({409})),
    "rotate": Operation("PATCH", WALLET, ROTATE, 200, lambda row: _vault(row).get("one", 1) > 1, True),
    "add": Operation("PATCH", WALLET, ADD, 200, lambda row: "three" in _vault(row), True, again=frozenset({400, 409})),
    "drop": Operation(
        "PATCH", WALLET, DROP, 200, lambda row: "two" not in _vault(row), True, again=frozenset({400, 404})
    ),
    "close-vault": Operation("DELETE", WALLET, None, 204, lambda row: {} == _vault(row), True, again=frozenset({404})),
}


async def judge(place: Place, operation: Operation, injection: Injection, answer: httpx.Response | None) -> list[str]:
    """Return the faults of the sandbox after `operation`, when it is settled.

    Then repeat the operation without a fault.
    """
    said = f"{injection.mode} at {injection.seen[-1]}"
    await asyncio.to_thread(injection.recover)
    if injection.mode in KILLS:
        await place.stop()
        await place.start()
    await asyncio.sleep(0.05 if injection.mode == "outage" else 0)
    place.injector.out.clear()
    found = [f"{said}: {item}" for item in await settled(place)]
    if answer is not None and answer.status_code == operation.status:
        rows = await place.rows()
        if not operation.done(next(iter(rows.values()), None)):
            found.append(f"{said}: answered {answer.status_code}, and it has not happened")
    return found


async def run(place: Place, operation: Operation, injection: Injection) -> tuple[list[str], httpx.Response | None]:
    """Execute one operation with one fault, on its own sandbox."""
    name = await create(place, vault=operation.vault)
    if operation.after:
        assert 202 == (await place.http("POST", f"/{name}{operation.after}")).status_code
    before = (await place.rows())[name]
    answer = await place.with_fault(
        injection, lambda: place.http(operation.method, f"/{name}{operation.path}", operation.content)
    )
    found = await judge(place, operation, injection, answer)
    row = (await place.rows()).get(name)
    said = f"{injection.mode} at {injection.seen[-1]}"
    if not operation.done(row) and row is not None:
        same = (row.state, row.network_policy, row.vault, row.expires_at) == (
            before.state,
            before.network_policy,
            before.vault,
            before.expires_at,
        )
        found += [] if same else [f"{said}: neither as before nor as asked for"]
    second = await place.http(operation.method, f"/{name}{operation.path}", operation.content)
    if second.status_code not in {operation.status, *operation.again}:
        found.append(f"{said}: a second time it is refused: {second.status_code} {second.text}")
    found += [f"{said}, second time: {item}" for item in await settled(place)]
    if not operation.done((await place.rows()).get(name)):
        found.append(f"{said}: a second time, and it has not happened")
    await place.http("DELETE", f"/{name}")
    found += [f"{said}, deleted: {item}" for item in await settled(place)]
    return found, answer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_change_is_whole_or_did_not_happen(name: str, mode: str, place: Place) -> None:
    """With a fault at each step in turn. When no step is left for the fault, the operation succeeds."""
    operation = OPERATIONS[name]
    found: list[str] = []
    for number in count():
        injection = Injection(number, mode)
        wronged, answer = await run(place, operation, injection)
        found += wronged
        if not injection.fired:
            break

    assert [] == found
    assert answer is not None and operation.status == answer.status_code
    assert len(injection.seen) >= operation.steps


@pytest.mark.parametrize("mode", MODES)
async def test_a_creation_is_whole_or_did_not_happen(mode: str, place: Place) -> None:
    """If the caller did not receive the sandbox's id, the sandbox does not exist."""
    steps = Injection()
    answer = await place.with_fault(steps, lambda: place.http("POST", "", BODY))
    assert answer is not None and 202 == answer.status_code
    assert 204 == (await place.http("DELETE", f"/{answer.json()['id']}")).status_code
    assert len(steps.seen) >= 6

    found: list[str] = []
    for number in range(len(steps.seen)):
        injection = Injection(number, mode)
        answer = await place.with_fault(injection, lambda: place.http("POST", "", BODY))
        assert injection.fired
        said = f"{mode} at {injection.seen[-1]}"
        if mode in KILLS:
            await place.stop()
            await place.start()
        await asyncio.sleep(0.05 if mode == "outage" else 0)
        place.injector.out.clear()
        told = {answer.json()["id"]} if answer is not None and answer.status_code == 202 else set()
        deadline = time.monotonic() + SETTLE_SECONDS
        while (await place.rows()).keys() - told and mode not in KILLS and time.monotonic() < deadline:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        found += [f"{said}: {item}" for item in await settled(place)]
        untold = (await place.rows()).keys() - told
        if mode == "killed-after" and injection.seen[-1] == "registry.update":
            assert len(untold) <= 1  # it was made, and the answer was lost with the server: the list shows it
        else:
            found += [f"{said}: no caller knows {name}" for name in untold]
        for name in await place.rows():
            assert 204 == (await place.http("DELETE", f"/{name}")).status_code
        assert [] == await wrong(place)

    assert [] == found
