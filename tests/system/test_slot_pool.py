"""Slots made ahead, with real slots: the effects of a check that fails."""

import asyncio
from pathlib import Path

import pytest

from runtimes.net import slot_pool, slots
from runtimes.net.plan import PLAN

pytestmark = pytest.mark.system


async def test_a_slot_that_cannot_be_judged_is_unmade_and_its_number_comes_back(tmp_path: Path) -> None:
    """After any exception of the check the launch continues with a new slot, and no number is lost."""
    pool = slot_pool.SlotPool(tmp_path, slot_pool.AHEAD + 1, PLAN)
    judged: list[slots.Slot] = []

    async def judge(slot: slots.Slot, generation: int | None) -> int | None:
        if generation is not None:
            raise ZeroDivisionError
        judged.append(slot)
        return 1

    pool.prepare(judge)
    async with asyncio.timeout(60):
        while len(judged) < slot_pool.AHEAD:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
    taken = await pool.take()
    try:
        await pool.close()
        assert set(map(str, slots.paths(tmp_path, taken.index))) == {str(path) for path in tmp_path.iterdir()}
        assert slot_pool.AHEAD == taken.index
        for index in range(slot_pool.AHEAD):
            pool.reserve(index)  # This raises unless the number is free.
    finally:
        assert () == slots.destroy(taken)
