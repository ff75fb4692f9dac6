"""The files of the kernel's freezer, in both versions of control groups, and what is done when it does not freeze.

Real processes are frozen in tests/system/test_pause.py.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtimes.process import freezer
from runtimes.process.freezer import Freeze, Freezer, NoProcesses

NAME = "c" * 64


@dataclass
class Kernel:
    """A directory in place of a hierarchy. `freezes` is False if a process never stops."""

    version: int
    root: Path
    freezes: bool = True

    @property
    def group(self) -> Path:
        return self.root / ("docker" if self.version == 1 else "system.slice") / self._directory

    @property
    def _directory(self) -> str:
        return NAME if self.version == 1 else f"docker-{NAME}.scope"

    @property
    def table(self) -> str:
        kind = "cgroup rw,freezer" if self.version == 1 else "cgroup2 rw"
        return f"1 2 0:3 / {self.root} rw - {kind.split(' ')[0]} none {kind.split(' ')[1]}\n"

    def make(self, *pids: int) -> None:
        self.group.mkdir(parents=True)
        (self.group / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        (self.group / "freezer.state" if self.version == 1 else self.group / "cgroup.freeze").touch()
        self.say(Freeze.THAWED)

    def say(self, state: Freeze) -> None:
        """Write what the kernel shows in this state."""
        if self.version == 1:
            words = {Freeze.THAWED: "THAWED", Freeze.PARTLY: "FREEZING", Freeze.FROZEN: "FROZEN"}
            (self.group / "freezer.state").write_text(f"{words[state]}\n")
        else:
            (self.group / "cgroup.freeze").write_text("0\n" if state is Freeze.THAWED else "1\n")
            (self.group / "cgroup.events").write_text(f"populated 1\nfrozen {int(state is Freeze.FROZEN)}\n")

    @property
    def asked(self) -> str:
        """What was written last."""
        file = "freezer.state" if self.version == 1 else "cgroup.freeze"
        return (self.group / file).read_text().strip()

    @property
    def thawed(self) -> str:
        return "THAWED" if self.version == 1 else "0"


@pytest.fixture(params=[1, 2], ids=["v1", "v2"], name="kernel")
def _kernel(request: pytest.FixtureRequest, tmp_path: Path) -> Kernel:
    return Kernel(request.param, tmp_path)


@pytest.fixture(name="process")
def _process() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.mark.parametrize("state", Freeze)
def test_the_state_is_the_kernels(state: Freeze, kernel: Kernel) -> None:
    kernel.make(1)
    kernel.say(state)
    assert state is Freezer(kernel.table).state(NAME)


async def test_a_container_without_a_group_is_thawed_and_cannot_be_frozen(kernel: Kernel) -> None:
    held = Freezer(kernel.table)
    assert Freeze.THAWED is held.state(NAME)
    with pytest.raises(NoProcesses):
        await held.freeze(NAME)
    with pytest.raises(FileNotFoundError):
        held.thaw(NAME)
    held.end(NAME)


async def test_a_container_without_a_process_cannot_be_frozen(kernel: Kernel) -> None:
    kernel.make()
    with pytest.raises(NoProcesses):
        await Freezer(kernel.table).freeze(NAME)
    assert kernel.thawed == kernel.asked


def test_processes_in_groups_below_count(kernel: Kernel, process: int) -> None:
    kernel.make()
    (kernel.group / "init").mkdir()
    (kernel.group / "init" / "cgroup.procs").write_text(f"{process}\n")
    kernel.say(Freeze.FROZEN)
    Freezer(kernel.table).end(NAME)
    assert -signal.SIGKILL == _ended(process)


async def test_a_freeze_returns_when_every_process_has_stopped(kernel: Kernel) -> None:
    """On v1 the file that is written shows the state too."""
    kernel.make(1)
    if kernel.version == 1:
        await Freezer(kernel.table).freeze(NAME)
        assert "FROZEN" == kernel.asked
        return
    freezing = asyncio.create_task(Freezer(kernel.table).freeze(NAME))
    await asyncio.sleep(0.05)  # a longer wait only makes the test stronger
    assert "1" == kernel.asked
    assert not freezing.done()
    kernel.say(Freeze.FROZEN)
    await freezing


async def test_a_caller_that_leaves_during_a_freeze_leaves_nothing_frozen(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.make(1)
    monkeypatch.setattr(Freezer, "state", lambda _self, _container: Freeze.PARTLY)
    freezing = asyncio.create_task(Freezer(kernel.table).freeze(NAME))
    await asyncio.sleep(0.01)
    assert kernel.thawed != kernel.asked
    freezing.cancel()
    await asyncio.gather(freezing, return_exceptions=True)
    assert kernel.thawed == kernel.asked


async def test_a_container_that_does_not_freeze_is_thawed_again(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.make(1)
    monkeypatch.setattr(freezer, "FREEZE_SECONDS", 0.05)
    held = Freezer(kernel.table)
    monkeypatch.setattr(Freezer, "state", lambda _self, _container: Freeze.PARTLY)
    with pytest.raises(TimeoutError):
        await held.freeze(NAME)
    assert kernel.thawed == kernel.asked


def test_only_a_frozen_container_is_ended(kernel: Kernel, process: int) -> None:
    """Its processes get SIGKILL before they are thawed."""
    kernel.make(process)
    held = Freezer(kernel.table)
    held.end(NAME)
    os.kill(process, 0)
    kernel.say(Freeze.FROZEN)
    held.end(NAME)
    assert -signal.SIGKILL == _ended(process)
    assert kernel.thawed == kernel.asked


@pytest.mark.parametrize("version", [0, 1])
async def test_a_host_without_a_freezer_freezes_nothing(version: int, tmp_path: Path) -> None:
    """Also not with a hierarchy of v2 beside those of v1, which has no controllers."""
    beside = f"1 2 0:3 / {tmp_path} rw - cgroup2 none rw\n1 2 0:3 / /memory rw - cgroup none rw,memory\n"
    held = Freezer(beside if version else "")
    assert not held.available
    assert Freeze.THAWED is held.state(NAME)
    with pytest.raises(OSError, match="no freezer"):
        await held.freeze(NAME)


def _ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
