"""Two concurrent requests on one sandbox: each is carried out completely, and both answers are true."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from injection import REGISTRY
from places import BODY, NEW, POLICY, SETTLE_SECONDS, VAULT, WALLET, Place, create, running, settled

from lifecycle.egress.policies import Policies
from lifecycle.sandboxes.registry import State
from wire.api.states import HostState

LOOSE = """
version: 1
default: open
policies:
  open:
    rules:
      - {id: one, host: one.example.org}
"""
TIGHT = LOOSE.replace("one.example.org", "two.example.org")
NAMED = {key: value for key, value in BODY.items() if key not in ("networkPolicy", "credentialProxy")}


@pytest.fixture
async def ruled(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    """Run a server with an operator's policy file."""
    async with running(monkeypatch.setattr, LOOSE) as there:
        yield there


async def _document(place: Place, text: str) -> None:
    """Write another operator's file, and make the server read it."""
    assert place.server is not None
    path = place.world.config.run_dir / "policies.yaml"
    path.write_text(text + "# changed\n")
    assert await place.server.policies.reload()
    await place.server.observer.recompile()


async def _gone(place: Place, name: str) -> bool:
    """Return whether a sandbox is removed in time."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while name in await place.rows() and time.monotonic() < deadline:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.01)
    return name not in await place.rows()


def _hosts(place: Place, name: str) -> str:
    return str(place.world.hostd.policies[name])


async def test_a_renewal_that_comes_before_the_removal_wins(place: Place) -> None:
    """The reaper has read that the sandbox is expired. Before the removal begins, it is renewed: it stays."""
    assert place.server is not None
    name = await create(place, vault=False)
    async with place.server.context.orchestrator._locks.hold(name):
        place.world.offset = 7200
        place.server.reaper.wake()
        await asyncio.sleep(0.1)  # the reaper now waits for the lock; a longer wait only makes the test stronger
        place.world.offset = 0
        later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
        renewed = await place.http("POST", f"/{name}/renew-expiration", {"expiresAt": later})
        assert 200 == renewed.status_code
        place.world.offset = 7200
    await asyncio.sleep(0.1)
    assert State.RUNNING is (await place.rows())[name].state
    place.world.offset = 2 * 86400
    place.server.reaper.wake()
    assert await _gone(place, name)
    assert [] == await settled(place)


async def test_changes_and_a_removal_at_once(place: Place) -> None:
    """Ten changes, three deletes: one delete gets 204, no answer is 5xx, and nothing remains."""
    name = await create(place, vault=True)
    changes = [place.http("PATCH", f"/{name}{POLICY}", NEW["egress"][1:]) for _ in range(10)]
    deletes = [place.http("DELETE", f"/{name}") for _ in range(3)]
    answers = await asyncio.gather(*changes[:5], *deletes, *changes[5:])
    assert [204] == [answer.status_code for answer in answers if answer.status_code == 204]
    assert {200, 204, 404, 409} >= {answer.status_code for answer in answers}
    assert [] == await settled(place)
    assert {} == await place.rows()


async def test_a_delete_during_a_create_waits_for_it(place: Place) -> None:
    """The list contains the id before the create is answered."""
    hostd = place.world.hostd
    hostd.hold["launch"], hostd.reached["launch"] = asyncio.Event(), asyncio.Event()
    creating = asyncio.create_task(place.http("POST", "", BODY))
    await hostd.reached["launch"].wait()
    name = next(iter(await place.rows()))
    deleting = asyncio.create_task(place.http("DELETE", f"/{name}"))
    await asyncio.sleep(0.05)  # for the delete to reach the lock; a longer wait only makes the test stronger
    hostd.hold["launch"].set()
    made, gone = await asyncio.gather(creating, deleting)
    assert (202, 204) == (made.status_code, gone.status_code)
    assert ([], {}) == (await settled(place), await place.rows())


async def test_twenty_changes_at_once_lose_none(place: Place) -> None:
    name = await create(place, vault=False)
    targets = {f"t{number}.example.org" for number in range(20)}
    answers = await asyncio.gather(
        *(place.http("PATCH", f"/{name}{POLICY}", [{"action": "allow", "target": target}]) for target in targets)
    )
    assert {200} == {answer.status_code for answer in answers}
    assert targets <= {rule["target"] for rule in ((await place.rows())[name].network_policy or {})["egress"]}
    assert [] == await settled(place)


async def test_a_server_that_stops_finishes_its_writes(place: Place) -> None:
    """SIGTERM during a vault's creation: after the gateway's answer the write is completed before the server ends."""
    name = await create(place, vault=False)
    hostd = place.world.hostd
    hostd.hold["configure"], hostd.reached["configure"] = asyncio.Event(), asyncio.Event()
    writing = asyncio.create_task(place.http("POST", f"/{name}{WALLET}", VAULT))
    await hostd.reached["configure"].wait()
    stopping = asyncio.create_task(place.stop())
    writing.cancel()
    await asyncio.sleep(0.05)  # for the server to begin its stop; a longer wait only makes the test stronger
    hostd.hold["configure"].set()
    await asyncio.gather(stopping, writing, return_exceptions=True)
    await place.start()
    row = (await place.rows())[name]
    assert row.vault is not None
    assert [] == await settled(place)


async def test_a_new_document_during_a_change_is_not_lost(ruled: Place) -> None:
    """The change was compiled under the former document. Afterwards the gateway has the new one."""
    name = (await ruled.http("POST", "", NAMED)).json()["id"]
    hostd = ruled.world.hostd
    hostd.hold["configure"], hostd.reached["configure"] = asyncio.Event(), asyncio.Event()
    assert "one.example.org" in _hosts(ruled, name)
    first = asyncio.create_task(_document(ruled, LOOSE.replace("one.", "mid.")))
    await hostd.reached["configure"].wait()
    second = asyncio.create_task(_document(ruled, TIGHT))
    await asyncio.sleep(0.05)  # for the second to read its file; a longer wait only makes the test stronger
    hostd.hold["configure"].set()
    await asyncio.gather(first, second)
    assert [] == await settled(ruled)
    assert "two.example.org" in _hosts(ruled, name)


async def test_a_new_document_during_a_create_is_not_lost(ruled: Place) -> None:
    hostd = ruled.world.hostd
    hostd.hold["launch"], hostd.reached["launch"] = asyncio.Event(), asyncio.Event()
    creating = asyncio.create_task(ruled.http("POST", "", NAMED))
    await hostd.reached["launch"].wait()
    await _document(ruled, TIGHT)
    hostd.hold["launch"].set()
    name = (await creating).json()["id"]
    assert [] == await settled(ruled)
    assert "two.example.org" in _hosts(ruled, name)


async def test_a_document_that_changed_while_the_server_was_down_is_applied(ruled: Place) -> None:
    name = (await ruled.http("POST", "", NAMED)).json()["id"]
    await ruled.stop()
    path = ruled.world.config.run_dir / "policies.yaml"
    path.write_text(TIGHT)
    ruled.world.policies = Policies.read(path)
    await ruled.start()
    assert [] == await settled(ruled)
    assert "two.example.org" in _hosts(ruled, name)


async def test_a_database_that_fails_for_a_while_stops_no_task(place: Place) -> None:
    """Expiry and observation continue when the database works again."""
    assert place.server is not None
    name = await create(place, vault=True)
    place.injector.out.add(REGISTRY)
    place.world.offset = 7200
    place.server.reaper.wake()
    await asyncio.sleep(0.2)  # some rounds of both tasks; more only make the test stronger
    assert name in await place.rows()
    place.injector.out.clear()
    assert await _gone(place, name)
    assert [] == await settled(place)


async def test_pauses_resumes_changes_renewals_and_a_removal_at_once(place: Place) -> None:
    """No answer is 5xx, each pause and resume that was answered was one, and nothing remains."""
    name = await create(place, vault=True)
    later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    turns = [place.http("POST", f"/{name}/{op}") for op in ("pause", "resume") * 6]
    changes = [place.http("PATCH", f"/{name}{POLICY}", NEW["egress"][1:]) for _ in range(5)]
    renewals = [place.http("POST", f"/{name}/renew-expiration", {"expiresAt": later}) for _ in range(3)]
    answers = await asyncio.gather(*turns, *changes, *renewals)
    assert {200, 202, 409} >= {answer.status_code for answer in answers}
    done = [answer.status_code for answer in answers[: len(turns)]].count(202)
    assert done == len(place.world.hostd.named("pause") + place.world.hostd.named("resume"))
    assert [] == await settled(place)

    answers = await asyncio.gather(
        place.http("POST", f"/{name}/pause"), place.http("DELETE", f"/{name}"), place.http("POST", f"/{name}/resume")
    )
    assert 204 == answers[1].status_code
    assert {202, 404, 409} >= {answers[0].status_code, answers[2].status_code}
    assert ([], {}) == (await settled(place), await place.rows())


async def test_a_paused_sandbox_expires(place: Place) -> None:
    assert place.server is not None
    name = await create(place, vault=True)
    assert 202 == (await place.http("POST", f"/{name}/pause")).status_code
    place.world.offset = 7200
    assert 404 == (await place.http("POST", f"/{name}/resume")).status_code
    place.server.reaper.wake()
    assert await _gone(place, name)
    assert [] == await settled(place)


async def test_a_list_that_is_older_than_a_pause_does_not_undo_it(place: Place) -> None:
    """The observer asks hostd before the pause, and gets the answer after it."""
    assert place.server is not None
    name = await create(place, vault=False)
    observer = place.server.observer
    before = place.world.hostd.sandboxes[name]
    began = place.server.context.orchestrator._clock()
    assert 202 == (await place.http("POST", f"/{name}/pause")).status_code
    await observer._seen(name, before, began, began)
    assert State.PAUSED is (await place.rows())[name].state
    async with place.server.context.orchestrator._locks.hold(name):
        await observer._seen(name, before, began + 3600, began + 3600)
        assert State.PAUSED is (await place.rows())[name].state
        ended = replace(before, state=HostState.DEAD, exit_code=1)
        await observer._seen(name, ended, began + 3600, began + 3600)
        assert State.FAILED is (await place.rows())[name].state


async def test_what_a_pause_that_was_interrupted_left_becomes_what_there_is(place: Place) -> None:
    """The row says `Pausing`, for example after a kill. hostd decides whether the sandbox is paused."""
    assert place.server is not None
    for paused in (False, True):
        name = await create(place, vault=False)
        if paused:
            await place.server.context.orchestrator._hostd.pause(name)
        await place.server.registry.update(
            name, lambda row: row.moved(State.PAUSING, "CONTAINER_PAUSING", "", row.changed_at)
        )
        assert [] == await settled(place)
        assert (State.PAUSED if paused else State.RUNNING) is (await place.rows())[name].state


async def test_a_document_that_changes_during_a_pause_is_in_force(ruled: Place) -> None:
    name = (await ruled.http("POST", "", NAMED)).json()["id"]
    assert 202 == (await ruled.http("POST", f"/{name}/pause")).status_code
    await _document(ruled, TIGHT)
    assert [] == await settled(ruled)
    assert "two.example.org" in _hosts(ruled, name)
    assert State.PAUSED is (await ruled.rows())[name].state
