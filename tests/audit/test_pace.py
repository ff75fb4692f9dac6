"""Many records of one sandbox delay only that sandbox's records, and none is lost."""

import asyncio
from pathlib import Path

from audit.batch import ChainEntry
from audit.chain import CONTROL
from audit.commit import GroupCommit
from audit.pace import BURST_SECONDS, Pace
from audit.shares import Retention
from audit.sinks.file import Log

RATE = 64 * 1024


def entry(chain: str, size: int = 8192) -> ChainEntry:
    return ChainEntry(
        chain, {"kind": "flow", "decision": "deny", "producer": "gateway", "sandbox": chain, "reason": "x" * size}
    )


def writer(directory: Path, pace: int) -> GroupCommit:
    now = "2026-01-01T00:00:00.000Z"
    log = Log.open(directory, boot="b", clock=lambda: now, max_file_bytes=1 << 30, retention=Retention())
    commit = GroupCommit(log, always=False, pace=pace)
    commit.start()
    return commit


def test_a_chain_may_write_its_burst_and_then_waits_for_its_rate() -> None:
    now = [0.0]
    pace = Pace(100, lambda: now[0])
    pace.charge("a", 100 * BURST_SECONDS + 50)
    assert (0.5, 0.0) == (pace.wait("a"), pace.wait("b"))
    now[0] += 1
    assert 0.0 == pace.wait("a")


def test_the_control_chain_never_waits() -> None:
    pace = Pace(1, lambda: 0.0)
    pace.charge(CONTROL, 1 << 30)
    assert 0.0 == pace.wait(CONTROL)


async def test_a_flood_waits_and_its_neighbour_does_not(tmp_path: Path) -> None:
    commit = writer(tmp_path / "log", RATE)
    count = RATE * BURST_SECONDS // 8192 + 128  # a burst and sixteen more seconds at the rate
    flood = [asyncio.create_task(commit.submit("a", [entry("sbx-a")], durable=False)) for _ in range(count)]
    await asyncio.sleep(0.2)
    assert [1] == await commit.submit("b", [entry("sbx-b", 10)], durable=False)
    assert 8 < sum(not task.done() for task in flood) < count
    await commit.close()
    assert list(range(1, count + 1)) == [(await task)[0] for task in flood]


async def test_closing_a_chain_does_not_wait_for_its_pace(tmp_path: Path) -> None:
    commit = writer(tmp_path / "log", 1024)
    flood = [asyncio.create_task(commit.submit("a", [entry("sbx-a")], durable=False)) for _ in range(40)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        assert 41 == await commit.close_chain("sbx-a")
        await asyncio.gather(*flood)
        await commit.close()


async def test_what_was_paced_goes_on_by_itself(tmp_path: Path) -> None:
    commit = writer(tmp_path / "log", RATE)
    count = RATE * BURST_SECONDS // 8192 + 16
    async with asyncio.timeout(30):
        await asyncio.gather(*(commit.submit("a", [entry("sbx-a")], durable=False) for _ in range(count)))
        await commit.close()
