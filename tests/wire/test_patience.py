"""A time limit counts only the time in which the caller ran and its peer was silent."""

import asyncio
import socket
import time
from typing import Any

import pytest

import wire
from wire.patience import MOST, TICKS, Patience


async def pair(handler: wire.Handler) -> tuple[wire.Client, wire.Client]:
    near, far = socket.socketpair()
    client = wire.Client(near)
    client.start()
    return client, await wire.serve_connection(far, handler)


async def test_a_caller_that_got_no_processor_finds_its_answer() -> None:
    """The loop is blocked for longer than the time limit while the answer arrives."""

    async def answer(_client: wire.Client, _op: str, _parameters: wire.Message, _fds: list[int]) -> wire.Message:
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)
        return {"value": 1}

    client, server = await pair(answer)
    assert {"value": 1} == await client.call("echo", timeout=0.2)
    await client.close()
    await server.close()


@pytest.mark.parametrize("turns", range(1, TICKS - 1))
async def test_turns_of_the_loop_that_are_longer_than_the_deadline_do_not_end_it(turns: int) -> None:
    """A queue of callbacks comes before the answer."""
    loop = asyncio.get_running_loop()
    release = asyncio.Event()

    def slow(left: int) -> None:
        time.sleep(0.03)
        if left > 1:
            loop.call_later(0.001, slow, left - 1)
        else:
            release.set()

    async with Patience(0.02):
        loop.call_soon(slow, turns)
        await release.wait()


async def test_a_peer_that_answers_other_calls_is_not_silent_but_the_wait_has_an_end() -> None:
    held: list[asyncio.Future[wire.Message]] = []

    async def answer(_client: wire.Client, op: str, _parameters: wire.Message, _fds: list[int]) -> wire.Message:
        if op == "other":
            return {}
        held.append(asyncio.get_running_loop().create_future())
        return await held[-1]

    client, server = await pair(answer)

    async def others(count: int) -> None:
        for _ in range(count):
            await client.call("other")
            await asyncio.sleep(0.05)

    slow = asyncio.create_task(client.call("slow", timeout=0.2))
    await others(8)  # twice the time limit
    held[0].set_result({"late": True})
    assert {"late": True} == await slow

    never: asyncio.Task[Any] = asyncio.create_task(client.call("slow", timeout=0.05))
    busy = asyncio.create_task(others(100))
    with pytest.raises(TimeoutError):
        await never
    assert not busy.done()
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    await client.close()
    await server.close()


async def test_a_silent_peer_is_given_up_after_the_seconds_that_were_said() -> None:
    clock = asyncio.get_running_loop().time
    began = clock()
    with pytest.raises(TimeoutError):
        async with Patience(0.1):
            await asyncio.Event().wait()
    assert clock() - began >= 0.1


async def test_evidence_extends_a_deadline_to_its_bound_and_no_further() -> None:
    asked = 0

    def evidence() -> int:
        nonlocal asked
        asked += 1
        return asked

    with pytest.raises(TimeoutError):
        async with Patience(0.02, evidence):
            await asyncio.Event().wait()
    assert MOST * TICKS + 1 == asked


async def test_what_ends_in_time_leaves_no_timer_behind() -> None:
    async with Patience(0.01):
        pass
    async with Patience(None):
        await asyncio.sleep(0.05)
