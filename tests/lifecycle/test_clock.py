"""The system clock is set while sandboxes run: none ends early, none runs too long, none is forgotten."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from standins import World
from test_transactions import BODY, until

from lifecycle.sandboxes.clock import Clock
from lifecycle.sandboxes.registry import RegistryError

pytestmark = pytest.mark.slow

DAY = 86400.0


def _clock(wall: list[float], elapsed: list[float]) -> Clock:
    walls, spent = iter(wall), iter(elapsed)
    return Clock(lambda: next(walls), lambda: next(spent))


@pytest.mark.parametrize(
    ("set_by", "moved"), [(0.0, 0.0), (0.9, 0.0), (-0.9, 0.0), (1.5, 1.5), (DAY, DAY), (-DAY, -DAY)]
)
def test_a_step_is_reported_and_a_slew_is_not(set_by: float, moved: float) -> None:
    clock = _clock([1000.0, 1010.0 + set_by], [5.0, 15.0, 15.0, 15.0, 15.0])
    assert moved == pytest.approx(clock.moved())
    assert 1010 == clock()
    clock.follow(moved)
    assert 1010 + moved == pytest.approx(clock())


def test_a_reading_that_was_held_up_tells_nothing() -> None:
    """The process was suspended between its two clock readings: that is no step, however far apart they are."""
    assert 0 == _clock([1000.0, 1010.0], [5.0, 15.0, 45.0]).moved()
    assert 0 == _clock([1000.0, 1040.0], [5.0, 15.0, 45.0]).moved()


async def _expiry(server: World, path: str) -> datetime:
    async with server.client() as client:
        return datetime.fromisoformat((await client.get(path)).json()["expiresAt"])


@pytest.mark.parametrize("step", [DAY, -DAY], ids=["ahead", "back"])
async def test_what_is_left_of_a_life_stays_when_the_clock_is_set(server: World, step: float) -> None:
    async with server.client() as client:
        path = f"/v1/sandboxes/{(await client.post('/v1/sandboxes', json={**BODY, 'timeout': 60})).json()['id']}"
        before = await _expiry(server, path)
        server.step = step
        assert 200 == (await client.get(path)).status_code

        async def moved() -> bool:
            return abs(await _expiry(server, path) - before - timedelta(seconds=step)) < timedelta(seconds=1)

        await until(moved)
        assert server.server is not None
        server.offset = 61
        server.server.reaper.wake()
        assert 404 == (await client.get(path)).status_code
        await until(lambda: not server.hostd.sandboxes)


@pytest.mark.parametrize("step", [DAY, -DAY], ids=["ahead", "back"])
async def test_a_renewal_is_in_the_time_of_the_caller(server: World, step: float) -> None:
    """Directly after the clock was set, before a background task read the clock."""
    async with server.client() as client:
        path = f"/v1/sandboxes/{(await client.post('/v1/sandboxes', json={**BODY, 'timeout': 60})).json()['id']}"
        server.step = step
        wanted = datetime.now(UTC) + timedelta(seconds=step + 600)
        answer = await client.post(f"{path}/renew-expiration", json={"expiresAt": wanted.isoformat()})
        assert 200 == answer.status_code
        assert abs(await _expiry(server, path) - wanted) < timedelta(seconds=1)
        server.offset = 590
        assert 200 == (await client.get(path)).status_code
        server.offset = 601
        assert 404 == (await client.get(path)).status_code


async def test_a_sandbox_that_is_lost_after_the_clock_went_back_is_seen(server: World) -> None:
    async with server.client() as client:
        name = (await client.post("/v1/sandboxes", json={**BODY, "timeout": 3600})).json()["id"]
        server.step = -DAY
        del server.hostd.sandboxes[name]

        async def failed() -> bool:
            return (await client.get(f"/v1/sandboxes/{name}")).json()["status"]["state"] == "Failed"

        await until(failed)


@pytest.mark.parametrize("step", [DAY, -DAY], ids=["ahead", "back"])
async def test_nothing_has_changed_while_the_moments_cannot_be_moved(
    server: World, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.server is not None
    orchestrator = server.server.context.orchestrator
    shift, asked = server.server.registry.shift, 0

    async def failing(seconds: float) -> None:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise RegistryError("disk full")
        await shift(seconds)

    monkeypatch.setattr(server.server.registry, "shift", failing)
    async with server.client() as client:
        path = f"/v1/sandboxes/{(await client.post('/v1/sandboxes', json={**BODY, 'timeout': 60})).json()['id']}"
        server.step = step
        await until(lambda: asked == 2)
        assert (200, step) == ((await client.get(path)).status_code, pytest.approx(orchestrator._clock.moved(), abs=1))
        await until(lambda: orchestrator._clock.moved() == 0)
        assert (200, 3) == ((await client.get(path)).status_code, asked)


@pytest.mark.parametrize("step", [DAY, -DAY], ids=["ahead", "back"])
async def test_rows_and_clock_move_together_when_callers_are_cancelled(
    server: World, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.server is not None
    orchestrator = server.server.context.orchestrator
    shift, begun, go, asked = server.server.registry.shift, asyncio.Event(), asyncio.Event(), 0

    async def slow(seconds: float) -> None:
        nonlocal asked
        asked += 1
        writing = asyncio.ensure_future(shift(seconds))  # like the database's thread: a cancellation does not end it
        begun.set()
        await go.wait()
        await writing

    monkeypatch.setattr(server.server.registry, "shift", slow)
    async with server.client() as client:
        path = f"/v1/sandboxes/{(await client.post('/v1/sandboxes', json={**BODY, 'timeout': 60})).json()['id']}"
        before = await _expiry(server, path)
        server.step = step
        callers = [asyncio.create_task(orchestrator.keep_time()) for _ in "ab"]
        await begun.wait()
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        go.set()
        await until(lambda: orchestrator._clock.moved() == 0)
        assert 200 == (await client.get(path)).status_code
        assert abs(await _expiry(server, path) - before - timedelta(seconds=step)) < timedelta(seconds=1)
        assert 1 == asked
