"""Slots ahead of need: what a judge that fails does to them. With real slots: `tests/system/test_runtimes_hostd.py`."""

import asyncio
from pathlib import Path

import pytest

from runtimes import slot_pool, slots


async def test_a_slot_that_cannot_be_judged_is_unmade_and_its_number_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the judge raises: the launch goes on with a slot of its own, and no number is lost."""
    unmade: list[int] = []
    monkeypatch.setattr(slots, "make", lambda _, index, __: slots.Slot(index, tmp_path, tmp_path, index, index))
    monkeypatch.setattr(slots, "destroy", lambda slot: unmade.append(slot.index) or ())
    pool = slot_pool.SlotPool(tmp_path, slot_pool.AHEAD + 1)
    made = 0

    async def judge(_: slots.Slot, generation: int | None) -> int | None:
        nonlocal made
        if generation is not None:
            raise ZeroDivisionError
        made += 1
        return 1

    pool.prepare(judge)
    async with asyncio.timeout(30):
        while made < slot_pool.AHEAD:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
    taken = await pool.take()
    await pool.close()
    assert list(range(slot_pool.AHEAD)) == sorted(unmade)
    assert slot_pool.AHEAD == taken.index
