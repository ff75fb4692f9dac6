"""A process that hangs is detected by its use of the processor. A slow process is not ended."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.process import liveness
from runtimes.process.liveness import CPU_SECONDS, IDLE_SECONDS, MOST, Liveness, Sample, observe, within
from testbed.with_parent import with_parent

LONGEST = 1.0


@dataclass(frozen=True)
class Step:
    """The activity of a process between two looks."""

    seconds: float
    cpu: float
    waits: bool
    progress: bool


def verdicts(steps: list[Step]) -> list[str | None]:
    judge = Liveness(LONGEST)
    at = cpu = 0.0
    done = 0
    found = [judge.look(Sample(at, done, cpu, True))]
    for step in steps:
        at, cpu, done = at + step.seconds, cpu + step.cpu, done + step.progress
        found.append(judge.look(Sample(at, done, cpu, step.waits)))
    return found


def steps(**fixed: object) -> st.SearchStrategy[list[Step]]:
    drawn = {
        "seconds": st.floats(0.01, 600),
        "cpu": st.floats(0, 5),
        "waits": st.booleans(),
        "progress": st.booleans(),
        **{name: st.just(value) for name, value in fixed.items()},
    }
    return st.lists(st.builds(Step, **drawn), max_size=60)


@given(steps())
def test_a_process_is_given_up_only_for_what_it_did_since_its_last_progress(taken: list[Step]) -> None:
    """A run without progress is either long enough in processor time, or long enough in looks without any use of it."""
    since: list[Step] = []
    for step, verdict in zip(taken, verdicts(taken)[1:], strict=True):
        since = [] if step.progress else [*since, step]
        if verdict is not None:
            busy = sum(item.cpu for item in since)
            idle = sum(not item.waits for item in since)
            assert busy >= CPU_SECONDS - 1e-6 or idle * LONGEST >= IDLE_SECONDS - 1e-6


@given(steps(cpu=0.0, waits=True, progress=False))
def test_a_process_that_is_given_no_processor_is_never_given_up(taken: list[Step]) -> None:
    assert {None} == set(verdicts(taken))


@given(steps(cpu=0.001, progress=False), st.integers(1, 30))
def test_a_process_that_makes_progress_now_and_then_is_never_given_up(taken: list[Step], every: int) -> None:
    """The time between two looks can be of any length, if no run without progress is long in looks."""
    most = min(every, int(IDLE_SECONDS / LONGEST) - 1)
    mixed = [
        step if number % most else Step(step.seconds, step.cpu, step.waits, True) for number, step in enumerate(taken)
    ]
    assert {None} == set(verdicts(mixed))


@given(steps(cpu=1.0, progress=False))
def test_a_loop_without_an_end_is_given_up_after_its_processor_time(taken: list[Step]) -> None:
    """On a busy machine a process only needs longer to get that time."""
    found = verdicts(taken)
    assert all(verdict is not None for verdict in found[int(CPU_SECONDS) :][1:])


@given(st.lists(st.floats(LONGEST, 600), min_size=int(IDLE_SECONDS) + 3, max_size=40))
def test_a_stopped_process_is_given_up_after_a_bounded_number_of_looks(pauses: list[float]) -> None:
    found = verdicts([Step(pause, 0.0, False, False) for pause in pauses])
    first = next(number for number, verdict in enumerate(found) if verdict is not None)
    looks = int(IDLE_SECONDS / LONGEST) + 1
    assert first in (looks, looks + 1)  # The difference of two times can be rounded to less than `LONGEST`.


KINDS = {
    "an endless loop": ("while True: pass", True),
    "a sleep": ("import time; time.sleep(60)", False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_process_does_is_read_from_the_kernel(kind: str) -> None:
    """A stopped process uses no processor time, in every state."""
    program, busy = KINDS[kind]
    command = with_parent(sys.executable, "-c", f"print(flush=True)\n{program}")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            deadline = time.monotonic() + 30
            first = observe(process.pid, 0.0, 0)
            while (now := observe(process.pid, 1.0, 0)).waits is not busy or (busy and now.cpu == first.cpu):
                assert time.monotonic() < deadline
            os.kill(process.pid, signal.SIGSTOP)
            while observe(process.pid, 2.0, 0).waits:
                assert time.monotonic() < deadline
        finally:
            process.kill()
    with pytest.raises(OSError):
        observe(process.pid, 3.0, 0)


_SIBLING = "import threading\ndef spin():\n  while True: pass\nthreading.Thread(target=spin).start()\nspin()"


@pytest.mark.slow
@pytest.mark.parametrize("program", ["import time; time.sleep(60)", "while True: pass", _SIBLING])
async def test_what_a_process_does_instead_of_answering_gains_it_no_time(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process's own seconds pass while it sleeps or works, with one thread or more."""
    monkeypatch.setattr(liveness, "MOST", 10**6)
    process = await asyncio.create_subprocess_exec(*with_parent(sys.executable, "-c", program))
    try:
        async with asyncio.timeout(60):
            with pytest.raises(TimeoutError):
                await within(process.pid, 1.0, asyncio.Event().wait())
    finally:
        process.kill()
        await process.wait()


@pytest.mark.slow
async def test_a_process_that_is_given_no_processor_gets_more_time_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []

    def starved(pid: int, at: float, progress: object, *, whole: bool) -> Sample:
        looks.append(pid)
        return Sample(at, progress, 0.0, True)

    monkeypatch.setattr(liveness, "observe", starved)
    with pytest.raises(TimeoutError):
        await within(1, 0.5, asyncio.Event().wait())
    assert MOST * 5 == len(looks)


async def test_an_answer_in_time_is_returned_and_a_failure_is_raised() -> None:
    async def answered() -> int:
        await asyncio.sleep(0.01)
        return 7

    async def failed() -> None:
        raise ConnectionError("it is gone")

    assert 7 == await within(os.getpid(), 1.0, answered())
    with pytest.raises(ConnectionError, match="gone"):
        await within(os.getpid(), 1.0, failed())
