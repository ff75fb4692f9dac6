"""The end of a secret at its workers: each way in which one ends, over the sealed store and each backend.

A lease is not all: a flow can outlive the lease under which it sent the secret, and a backend can keep what it gave.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.vault.backends import HOST, OTHER, SANDBOX, SealedWorld, TokenWorld, VaultWorld, World, grant
from tests.vault.test_backends import FIRST, SECOND, WORLDS
from vault import channels
from vault.fetching import BackendError
from vault.freeze import ALL, Extent
from vault.limits import ReferenceLimit
from vault.readings import Readings
from vault.secret import Secret
from wire.api import vaultd
from wire.api.fetcher import Fault, Problem, Reading

pytestmark = pytest.mark.slow


@pytest.fixture(name="world")
async def _world(request: pytest.FixtureRequest, short_path: Path) -> AsyncIterator[World]:
    running: World = request.param(short_path)
    if isinstance(running, VaultWorld):
        running.server = request.getfixturevalue("vault_server")
    await running.start()
    yield running
    await running.stop()


async def rotate(world: World) -> None:
    await world.store(SECOND)
    await world.follow()


async def remove(world: World) -> None:
    await world.remove()
    await world.follow()


async def unrefer(world: World) -> None:
    """Take the rule out of the operator's file. A sealed secret loses its grant then."""
    if isinstance(world, SealedWorld):
        await world.vault.admin.regrant(SANDBOX, [])
    else:
        await world.refer()


WAYS = {
    "rotate": rotate,
    "remove": remove,
    "revoke_all": lambda world: world.vault.admin.revoke_all(),
    "revoke_one": lambda world: world.vault.admin.revoke_all(None, world.reference),
    "freeze": lambda world: world.vault.admin.freeze(),
    "freeze_sandbox": lambda world: world.vault.admin.freeze(SANDBOX),
    "regrant": lambda world: world.vault.admin.regrant(SANDBOX, []),
    "unrefer": unrefer,
    "limit": lambda world: world.vault.admin.limit(ReferenceLimit.make("*", [OTHER])),
    "close": lambda world: world.vault.admin.close_sandbox(SANDBOX),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", WORLDS, indirect=True, ids=lambda kind: kind.__name__)
async def test_a_secret_that_ends_is_called_back_also_after_its_lease(world: World, way: str) -> None:
    """A stream, a WebSocket or a database session can be older than a lease. Each of these calls reaches its worker."""
    if way == "limit" and isinstance(world, SealedWorld):
        return  # its binding is its limit
    told: asyncio.Queue[Any] = asyncio.Queue()
    await world.store(FIRST)
    worker = await world.opened(world.reference, on_revoke=told.put)
    await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
    world.offset += 3600  # the lease has ended long ago
    if way in ("rotate", "remove") and world.vault.readings._held:
        world.vault.readings._held[(world.reference, None)].valid_until += 7200
    began = time.monotonic()
    await WAYS[way](world)
    assert told.get_nowait() in (None, frozenset({world.reference}))
    assert time.monotonic() - began < 1
    await worker.close()


@pytest.mark.parametrize("way", ["rotate", "remove"])
@pytest.mark.parametrize("world", WORLDS[:3], indirect=True, ids=lambda kind: kind.__name__)
async def test_a_worker_that_does_not_confirm_the_end_of_a_secret_is_cut_off_within_a_second(
    world: World, way: str
) -> None:
    stuck = asyncio.Event()

    async def silent(_secrets: frozenset[str] | None) -> None:
        await stuck.wait()

    await world.store(FIRST)
    worker = await world.opened(world.reference, on_revoke=silent)
    lease = await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")
    began = time.monotonic()
    await WAYS[way](world)
    async with asyncio.timeout(10):
        while worker.current(lease):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert time.monotonic() - began < channels.REVOKE_TIMEOUT / 2
    await worker.close()


@pytest.mark.parametrize("action", ["freeze", "revoke_all"])
@pytest.mark.parametrize("extent", [(None, None), (None, "token://api")])
@pytest.mark.parametrize("world", [TokenWorld], indirect=True)
async def test_after_an_operators_call_no_value_from_before_is_released(
    world: TokenWorld, extent: tuple[str | None, str | None], action: str
) -> None:
    """The issuer's former token is kept neither by vaultd nor by the fetcher. The control: it is kept before."""
    world.expires_in = 3600
    await world.store(FIRST)
    worker = await world.opened(world.reference)

    async def value() -> Secret:
        return (await worker.release(world.reference, HOST, 443, "https", method="GET", path="/")).value

    assert Secret(FIRST) == await value()
    await world.store(SECOND)
    assert Secret(FIRST) == await value()
    await getattr(world.vault.admin, action)(*extent)
    assert {} == world.vault.readings._held
    if action == "freeze":
        await world.vault.admin.unfreeze(*extent)
    assert Secret(SECOND) == await value()
    await worker.close()


@pytest.mark.parametrize("world", [TokenWorld], indirect=True)
async def test_no_value_of_a_frozen_reference_is_kept_or_refreshed(world: TokenWorld) -> None:
    """Also if it arrives after the freeze. The control is another sandbox, which is not frozen."""
    await world.store(FIRST)
    await world.opened(world.reference)
    await world.vault.admin.freeze(SANDBOX)
    await world.vault.readings.obtain(world.reference, SANDBOX)
    assert world.vault.readings._held
    world.vault.readings.settle()
    assert {} == world.vault.readings._held
    other = "sbx-000000000000000000000002"
    await world.vault.admin.open_sandbox(other, "lin-2", [grant(world.reference, HOST)])
    await world.vault.readings.obtain(world.reference, other)
    world.vault.readings.settle()
    assert world.vault.readings._held


class Slow:
    """A fetcher whose answers a test releases one by one; see `vault.fetching.FetcherPort`."""

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self.calls: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.fails = False

    async def fetch(self, reference: str, sandbox: str) -> Reading:
        number = len([call for call in self.calls if call.startswith("fetch")])
        self.calls.append(f"fetch {number}")
        await self.gates.setdefault(f"fetch {number}", asyncio.Event()).wait()
        return Reading(vaultd.Value(f"value-number-{number}"), 60, 300, self.shared)

    async def release(self, reference: str, sandbox: str) -> None:
        self.calls.append(f"release {sandbox}")
        await self.gates.setdefault("release", asyncio.Event()).wait()
        if self.fails:
            raise BackendError(Problem(Fault.FAILED, "no"))

    async def examine(self) -> tuple[Any, ...]:
        return ()

    async def close(self) -> None:
        return None

    def permit(self, name: str) -> None:
        self.gates.setdefault(name, asyncio.Event()).set()


class Users:
    def referring(self) -> dict[str, list[str]]:
        return {"vault://db/creds/a#p": [SANDBOX]}


REFERENCE = "vault://db/creds/a#p"


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("shared", [True, False])
async def test_a_value_that_was_under_way_during_the_call_is_not_used(shared: bool) -> None:
    fetcher = Slow(shared)
    readings = Readings(fetcher, Users(), time.monotonic)
    asking = asyncio.create_task(readings.obtain(REFERENCE, SANDBOX))
    await turns()
    readings.withdraw(ALL)
    for name in ("fetch 0", "release", "fetch 1"):
        fetcher.permit(name)
    await asking
    assert "value-number-1" == readings.current(REFERENCE, SANDBOX).value.reveal()
    assert ["fetch 0", f"release {SANDBOX}", "fetch 1"] == fetcher.calls
    await readings.close()


async def test_a_new_value_waits_until_the_backend_has_revoked_the_former_one() -> None:
    """Else a backend that keeps a lease of the sandbox would give the same one again. A failure is tried again."""
    fetcher = Slow(False)
    fetcher.permit("fetch 0")
    readings = Readings(fetcher, Users(), time.monotonic)
    await readings.obtain(REFERENCE, SANDBOX)
    readings.withdraw(Extent(SANDBOX, None))
    asking = asyncio.create_task(readings.obtain(REFERENCE, SANDBOX))
    await turns()
    assert ["fetch 0", f"release {SANDBOX}"] == fetcher.calls
    fetcher.permit("release")
    fetcher.permit("fetch 1")
    await asking
    assert "value-number-1" == readings.current(REFERENCE, SANDBOX).value.reveal()
    assert "value-number-0" in [one.reveal() for one in readings.current(REFERENCE, SANDBOX).former]
    fetcher.fails = True
    readings.withdraw(Extent(None, REFERENCE))
    await turns()
    assert {(REFERENCE, SANDBOX)} == readings._returned.keys()
    await readings.close()


@pytest.mark.parametrize(
    ("extent", "kept"),
    [(Extent(SANDBOX), {None}), (Extent("sbx-2"), {None, SANDBOX}), (Extent(None, "env://B"), {None, SANDBOX})],
)
async def test_only_values_of_the_extent_are_forgotten(extent: Extent, kept: set[str | None]) -> None:
    """A value that is the same for all sandboxes stays when one sandbox is meant."""
    held: set[str | None] = set()
    for shared in (True, False):
        fetcher = Slow(shared)
        for name in ("fetch 0", "release"):
            fetcher.permit(name)
        readings = Readings(fetcher, Users(), time.monotonic)
        await readings.obtain(REFERENCE, SANDBOX)
        readings.withdraw(extent)
        held |= {holder for _, holder in readings._held}
        await readings.close()
    assert kept == held
