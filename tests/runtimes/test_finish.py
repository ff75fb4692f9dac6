"""Two concurrent steps: both have ended before either is undone, in every case."""

import asyncio

import pytest

from runtimes.process.finish import both


class Step:
    """A step that the test ends."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.ended = False

    async def run(self) -> str:
        await self.go.wait()
        self.ended = True
        return "made"


async def fail() -> str:
    raise OSError("no")


async def test_both_results_are_returned() -> None:
    async def one() -> int:
        return 1

    async def other() -> str:
        return "other"

    assert (1, "other") == await both(one(), other())


@pytest.mark.parametrize("fails_first", [True, False])
async def test_the_failure_of_one_waits_for_the_other(fails_first: bool) -> None:
    step = Step()
    pair = (fail(), step.run()) if fails_first else (step.run(), fail())
    under_way = asyncio.create_task(both(*pair))
    await asyncio.sleep(0.01)
    assert not under_way.done()
    step.go.set()
    with pytest.raises(OSError, match="no"):
        await under_way
    assert step.ended


async def test_cancelling_waits_for_both_however_often() -> None:
    one, other = Step(), Step()
    under_way = asyncio.create_task(both(one.run(), other.run()))
    for _ in range(3):
        await asyncio.sleep(0)
        under_way.cancel()
        await asyncio.sleep(0)
    one.go.set()
    await asyncio.sleep(0.01)
    assert not under_way.done()
    other.go.set()
    with pytest.raises(asyncio.CancelledError):
        await under_way
    assert (True, True) == (one.ended, other.ended)
