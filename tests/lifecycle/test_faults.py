"""A fault at each step of each operation: it is whole or it did not happen, and nothing is left of it.

The real control plane with stand-ins for the daemons; `injection` finds the steps by running the operation once. The
same on the real system, for a part of the cases: tests/system/test_faults.py.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from injection import ERRORS, KILLS, LEAVES, Injection, Injector, current
from standins import IMAGE, KEY, World, world

from lifecycle import reaper
from lifecycle.app import Server, build
from lifecycle.egress import vault_of
from lifecycle.registry import Sandbox, State
from policy.api import parse_network_policy

OLD = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "api.example.org"}]}
NEW = {"defaultAction": "deny", "egress": [*OLD["egress"], {"action": "allow", "target": "new.example.org"}]}
BODY: dict[str, Any] = {
    "image": {"uri": IMAGE},
    "entrypoint": ["sleep", "1"],
    "resourceLimits": {},
    "networkPolicy": OLD,
    "credentialProxy": {"enabled": True},
    "timeout": 3600,
}
FIRST, SECOND, THIRD = "value-of-the-first", "value-of-the-second", "value-of-the-third"
SETTLE_SECONDS = 20.0


def _credential(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "source": {"type": "inline", "value": value}}


def _binding(name: str, credential: str) -> dict[str, Any]:
    auth = {"type": "apiKey", "name": f"x-{name}", "credential": credential}
    return {"name": name, "match": {"hosts": ["api.example.org"], "paths": [f"/{name}/*"]}, "auth": auth}


VAULT = {
    "credentials": [_credential("one", FIRST), _credential("two", SECOND)],
    "bindings": [_binding("a", "one"), _binding("b", "two")],
}


@dataclass
class Place:
    """A server that can be killed and started again, on the same state and beside the same daemons."""

    world: World
    injector: Injector
    server: Server | None = None
    _life: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def start(self) -> None:
        self.injector.dead = False
        self.injector.out.clear()
        described = self.world
        clock: Callable[[], float] = lambda: time.time() + described.offset  # noqa: E731
        self.server = build(described.config, described.policies, described.tokens, clock=clock)
        await self._life.enter_async_context(self.server.running())
        await self.server.adopted.wait()

    async def stop(self) -> None:
        await self._life.aclose()

    async def http(self, method: str, path: str, content: Any = None) -> httpx.Response:
        assert self.server is not None
        transport = httpx.ASGITransport(self.server.edge, raise_app_exceptions=False)
        headers = {"OPEN-SANDBOX-API-KEY": KEY}
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            return await client.request(method, f"/v1/sandboxes{path}", json=content)

    async def with_fault(
        self, injection: Injection, operation: Callable[[], Awaitable[httpx.Response]]
    ) -> httpx.Response | None:
        """Do an operation with its fault; None if nobody was there any more for the answer."""
        context = copy_context()
        context.run(current.set, injection)
        task = asyncio.get_running_loop().create_task(_awaited(operation), context=context)
        injection.leave = task.cancel
        try:
            return await task
        except asyncio.CancelledError:
            return None

    async def rows(self) -> dict[str, Sandbox]:
        assert self.server is not None
        return {row.id: row for row in await self.server.registry.all()}


async def _awaited(operation: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    return await operation()


async def wrong(place: Place) -> list[str]:
    """Everything that registry, host, gateway and vault do not agree on."""
    assert place.server is not None
    hostd, vaultd = place.world.hostd, place.world.vaultd
    rows = await place.rows()
    found = [f"{name} is {row.state}" for name, row in rows.items() if row.state is not State.RUNNING]
    for where, names in (("host", hostd.sandboxes), ("vault", vaultd.grants), ("vault's values", vaultd.inline)):
        found += [f"{where} and registry differ in {name}" for name in names.keys() ^ rows.keys()]
    for name, row in rows.items():
        if name not in hostd.sandboxes or name not in vaultd.grants:
            continue
        policy = None if row.network_policy is None else parse_network_policy(row.network_policy)
        vault = vault_of(row)
        compiled = await place.server.policies.compile(row.policy_name, policy, vault)
        if row.policy_digest != compiled.digest:
            found.append(f"{name}: the registry's digest is {row.policy_digest[:8]!r}")
        if hostd.specs[name]["gateway"]["policy"] != compiled.policy.to_json():
            found.append(f"{name}: the gateway has another policy")
        if set(map(_grant, vaultd.grants[name])) != set(map(_grant, compiled.grants)):
            found.append(f"{name}: the vault has other grants")
        if vaultd.inline[name].keys() != set([] if vault is None else vault.secrets()):
            found.append(f"{name}: the vault has other values")
    open_chains = {item["sandbox"] for item in place.world.auditd.records if "sandbox" in item} - rows.keys()
    closed = {parameters["sandbox"] for parameters in place.world.auditd.named("close_sandbox")}
    return found + [f"{name}: its audit chain is open" for name in open_chains - closed]


def _grant(grant: Any) -> tuple[str, ...]:
    return tuple(str(grant[key]) for key in ("secret", "host", "port", "scheme"))


async def settled(place: Place) -> list[str]:
    """What is still wrong when nothing is, or the time is over."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (found := await wrong(place)) and time.monotonic() < deadline:  # noqa: ASYNC110 - it is other processes' state
        await asyncio.sleep(0.01)
    return found


@dataclass(frozen=True)
class Operation:
    """A request about a sandbox (which is there before), and how it is told that it has happened."""

    method: str
    path: str
    content: Any
    status: int
    done: Callable[[Sandbox | None], bool]
    vault: bool = False
    again: frozenset[int] = frozenset()
    """What a second request may be answered beside `status`: it finds that the first has happened."""


def _targets(row: Sandbox | None) -> list[str]:
    return [rule["target"] for rule in (row.network_policy or {})["egress"]] if row is not None else []


def _vault(row: Sandbox | None) -> dict[str, int]:
    return dict(row.vault["credentials"]) if row is not None and row.vault is not None else {}


POLICY, WALLET = "/networkpolicy", "/proxy/18080/credential-vault"
EXPIRY = (datetime.now(UTC) + timedelta(days=2)).replace(microsecond=0)
ROTATE = {"credentials": {"replace": [_credential("one", THIRD)]}}
DROP = {"credentials": {"delete": ["two"]}, "bindings": {"delete": ["b"]}}
ADD = {"credentials": {"add": [_credential("three", THIRD)]}, "bindings": {"add": [_binding("c", "three")]}}
OPERATIONS = {
    "delete": Operation("DELETE", "", None, 204, lambda row: row is None, True, frozenset({404})),
    "renew": Operation(
        "POST",
        "/renew-expiration",
        {"expiresAt": EXPIRY.isoformat()},
        200,
        lambda row: row is not None and row.expires_at == EXPIRY.timestamp(),
    ),
    "put": Operation("PUT", POLICY, NEW, 200, lambda row: "new.example.org" in _targets(row)),
    "patch": Operation("PATCH", POLICY, NEW["egress"][1:], 200, lambda row: "new.example.org" in _targets(row)),
    "unlist": Operation("DELETE", POLICY, ["api.example.org"], 200, lambda row: [] == _targets(row)),
    "open-vault": Operation("POST", WALLET, VAULT, 201, lambda row: len(_vault(row)) == 2, again=frozenset({409})),
    "rotate": Operation("PATCH", WALLET, ROTATE, 200, lambda row: _vault(row).get("one", 1) > 1, True),
    "add": Operation("PATCH", WALLET, ADD, 200, lambda row: "three" in _vault(row), True, frozenset({400, 409})),
    "drop": Operation("PATCH", WALLET, DROP, 200, lambda row: "two" not in _vault(row), True, frozenset({400, 404})),
    "close-vault": Operation("DELETE", WALLET, None, 204, lambda row: {} == _vault(row), True, frozenset({404})),
}


@pytest.fixture
async def place(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    """A running server; what it does later it does soon."""
    monkeypatch.setattr(reaper, "OBSERVE_SECONDS", 0.02)
    monkeypatch.setattr(reaper, "RETRY_FIRST", 0.02)
    monkeypatch.setattr(reaper, "RETRY_MOST", 0.05)
    injector = Injector()
    injector.install(monkeypatch.setattr)
    async with world() as described:
        running = Place(described, injector)
        await running.start()
        try:
            yield running
        finally:
            await running.stop()


async def create(place: Place, *, vault: bool) -> str:
    name: str = (await place.http("POST", "", BODY)).json()["id"]
    if vault:
        answer = await place.http("POST", f"/{name}{WALLET}", VAULT)
        assert 201 == answer.status_code, answer.text
    return name


async def judge(place: Place, operation: Operation, injection: Injection, answer: httpx.Response | None) -> list[str]:
    """What is wrong after `operation` on its sandbox, settled; then do it again, without a fault."""
    said = f"{injection.mode} at {injection.seen[-1]}"
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
    """One operation with one fault, on a sandbox of its own."""
    name = await create(place, vault=operation.vault)
    before = (await place.rows())[name]
    answer = await place.with_fault(
        injection, lambda: place.http(operation.method, f"/{name}{operation.path}", operation.content)
    )
    if not injection.fired and injection.number >= 0:
        return [], answer
    found = await judge(place, operation, injection, answer)
    row = (await place.rows()).get(name)
    said = f"{injection.mode} at {injection.seen[-1]}"
    if not operation.done(row) and row is not None:
        same = (row.network_policy, row.vault, row.expires_at) == (
            before.network_policy,
            before.vault,
            before.expires_at,
        )
        found += [] if same else [f"{said}: neither as before nor as asked for"]
    if injection.number >= 0:
        second = await place.http(operation.method, f"/{name}{operation.path}", operation.content)
        if second.status_code not in {operation.status, *operation.again}:
            found.append(f"{said}: a second time it is refused: {second.status_code} {second.text}")
        found += [f"{said}, second time: {item}" for item in await settled(place)]
        if not operation.done((await place.rows()).get(name)):
            found.append(f"{said}: a second time, and it has not happened")
    await place.http("DELETE", f"/{name}")
    found += [f"{said}, deleted: {item}" for item in await settled(place)]
    return found, answer


@pytest.mark.parametrize("mode", [*ERRORS, *LEAVES, *KILLS])
@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_change_is_whole_or_did_not_happen(name: str, mode: str, place: Place) -> None:
    operation, steps = OPERATIONS[name], Injection()
    found, answer = await run(place, operation, steps)
    assert ([], operation.status) == (found, answer and answer.status_code)
    assert len(steps.seen) >= (1 if name == "renew" else 5)

    number = 0
    while True:
        injection = Injection(number, mode)
        wronged, _ = await run(place, operation, injection)
        found += wronged
        if not injection.fired:
            break
        number += 1

    assert [] == found
    assert number >= len(steps.seen)


@pytest.mark.parametrize("mode", [*ERRORS, *LEAVES, *KILLS])
async def test_a_creation_is_whole_or_did_not_happen(mode: str, place: Place) -> None:
    """And whoever was not told of a sandbox does not have one."""
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
            assert len(untold) <= 1  # it was made, and the answer died with the server: the list shows it
        else:
            found += [f"{said}: nobody was told of {name}" for name in untold]
        for name in await place.rows():
            assert 204 == (await place.http("DELETE", f"/{name}")).status_code
        assert [] == await wrong(place)

    assert [] == found
