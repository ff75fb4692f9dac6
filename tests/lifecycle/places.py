"""A server that tests kill and start again beside stand-ins, and the checks that all parts agree when it is settled."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI
from injection import Injection, Injector, current
from standins import IMAGE, KEY, World, world

from lifecycle.api import app
from lifecycle.api.app import Server, api
from lifecycle.api.routes.context import Context
from lifecycle.egress.changes import vault_of
from lifecycle.sandboxes import pools, reaper
from lifecycle.sandboxes.registry import Sandbox, State
from lifecycle.snapshots import service
from policy.api import parse_network_policy
from policy.selection import Selection
from wire.api.states import HostState

POLICY, WALLET = "/networkpolicy", "/proxy/18080/credential-vault"
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


def credential(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "source": {"type": "inline", "value": value}}


def binding(name: str, credential: str) -> dict[str, Any]:
    auth = {"type": "apiKey", "name": f"x-{name}", "credential": credential}
    return {"name": name, "match": {"hosts": ["api.example.org"], "paths": [f"/{name}/*"]}, "auth": auth}


VAULT = {
    "credentials": [credential("one", FIRST), credential("two", SECOND)],
    "bindings": [binding("a", "one"), binding("b", "two")],
}


@dataclass
class Place:
    """A server that can be killed and started again, with the same state and the same daemons."""

    world: World
    injector: Injector
    server: Server | None = None
    _life: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def start(self) -> None:
        self.injector.dead = False
        self.injector.out.clear()
        described = self.world
        self.server = described.build()
        await self._life.enter_async_context(self.server.running())
        await self.server.adopted.wait()

    async def stop(self) -> None:
        await self._life.aclose()

    async def http(
        self, method: str, path: str, content: Any = None, more: dict[str, str] | None = None
    ) -> httpx.Response:
        assert self.server is not None
        transport = httpx.ASGITransport(self.server.edge, raise_app_exceptions=False)
        headers = {"OPEN-SANDBOX-API-KEY": KEY, **(more or {})}
        base = path if path.startswith(("/v1/pools", "/v1/snapshots")) else f"/v1/sandboxes{path}"
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            return await client.request(method, base, json=content)

    async def with_fault(
        self, injection: Injection, operation: Callable[[], Awaitable[httpx.Response]]
    ) -> httpx.Response | None:
        """Execute an operation with its fault. Return None if the fault disconnected the client before the answer."""
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
    """Return every difference between registry, host, gateway and vault."""
    assert place.server is not None
    hostd, vaultd = place.world.hostd, place.world.vaultd
    rows = await place.rows()
    paused = {name for name, there in hostd.sandboxes.items() if there.state is HostState.PAUSED}
    states = {name: State.PAUSED if name in paused else State.RUNNING for name in rows}
    found = [f"{name} is {row.state}" for name, row in rows.items() if row.state is not states[name]]
    for where, names in (("host", hostd.sandboxes), ("vault", vaultd.grants), ("vault's values", vaultd.inline)):
        found += [f"{where} and registry differ in {name}" for name in names.keys() ^ rows.keys()]
    for name, row in rows.items():
        if name not in hostd.sandboxes or name not in vaultd.grants:
            continue
        policy = None if row.network_policy is None else parse_network_policy(row.network_policy)
        vault = vault_of(row)
        bindings = () if vault is None else vault.compiled_bindings()
        compiled = await place.server.policies.enforce(Selection(row.policy_name, policy, bindings))
        if row.policy_digest != compiled.digest and not row.idle:  # An idle member gets its policy with its claim.
            found.append(f"{name}: the registry's digest is {row.policy_digest[:8]!r}")
        if hostd.policies[name] != compiled.policy.to_json():
            found.append(f"{name}: the gateway has another policy")
        if set(vaultd.grants.get(name, [])) != set(compiled.grants):
            found.append(f"{name}: the vault has other grants")
        if vaultd.names.get(name) != [*compiled.names]:
            found.append(f"{name}: the gateway may sign for other names")
        if vaultd.inline.get(name, {}).keys() != set([] if vault is None else vault.secrets()):
            found.append(f"{name}: the vault has other values")
    return found


async def settled(place: Place) -> list[str]:
    """Wait until nothing is wrong or the time limit is over. Return what is still wrong."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (found := await wrong(place)) and time.monotonic() < deadline:  # noqa: ASYNC110 - it is other processes' state
        await asyncio.sleep(0.01)
    return found


@functools.cache
def _routes() -> FastAPI:
    return api(None)  # type: ignore[arg-type]  # `_api` sets it


def _api(context: Context) -> FastAPI:
    """Return the same routes for every server. They keep no state, and building them is the slowest part of a start."""
    routes = _routes()
    routes.state.context = context
    return routes


@contextlib.asynccontextmanager
async def running(
    replace: Callable[[Any, str, Any], None], policy: str | None = None, *, ingress: bool = False
) -> AsyncIterator[Place]:
    """Run a server whose background tasks run at short intervals. With `ingress` there are programs in sandboxes."""
    for name, seconds in (("OBSERVE_SECONDS", 0.02), ("RETRY_FIRST", 0.02), ("RETRY_MOST", 0.05)):
        replace(reaper, name, seconds)
    for name, seconds in (("ROUND_SECONDS", 0.05), ("_RETRY_FIRST", 0.02), ("_RETRY_MOST", 0.05)):
        replace(pools, name, seconds)
    replace(service, "SETTLE_SECONDS", 0.02)
    injector = Injector()
    injector.install(replace)
    replace(app, "api", _api)
    async with world(policy, ingress=ingress) as described:
        place = Place(described, injector)
        await place.start()
        try:
            yield place
        finally:
            await place.stop()


async def create(place: Place, *, vault: bool) -> str:
    name: str = (await place.http("POST", "", BODY)).json()["id"]
    if vault:
        answer = await place.http("POST", f"/{name}{WALLET}", VAULT)
        assert 201 == answer.status_code, answer.text
    return name
