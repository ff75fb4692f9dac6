"""The watchdog restarts a killed hostd, stops if hostd cannot run, forwards signals, and leaves no hostd behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtimes.process import predecessor
from runtimes.process.cgroups import Cgroups, GroupLimits
from tests.stopping import stop

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).resolve().parents[2]
_KEEP = (
    "import json, sys; from pathlib import Path; from runtimes.process.watchdog import Watchdog, ending; "
    "sys.exit(Watchdog([sys.executable, '-c', *sys.argv[3:]], ending(Path(sys.argv[1])), "
    "*json.loads(sys.argv[2])).run())"
)
_NOTED = "import os, sys, signal, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); "
_READY = "os.write(int(os.environ['SALLYPORT_HOSTD_READY_FD']), b'1'); "
_STAY = "time.sleep(60)"
_ORDERLY = (
    "end = lambda *_: (time.sleep(0.3), open(sys.argv[1], 'a').write('removed\\n'), sys.exit(0)); "
    "signal.signal(signal.SIGTERM, end); "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]); "
)


class Kept:
    """A watchdog with a program in place of hostd. Each life of the program records its pid. The watchdog gets
    `judged`.
    """

    def __init__(self, notes: Path, program: str, *judged: object) -> None:
        self.notes = notes
        host = notes.with_name("host.json")
        host.write_text(json.dumps({"run_dir": str(notes.parent)}))
        command = [sys.executable, "-c", _KEEP, str(host), json.dumps(judged), _NOTED + program, str(notes)]
        self.process = subprocess.Popen(command, cwd=_ROOT, stderr=subprocess.DEVNULL)

    def lines(self, count: int) -> list[str]:
        until(lambda: self.notes.exists() and len(self.notes.read_text().splitlines()) >= count)
        return self.notes.read_text().splitlines()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(name="keep")
def _keep(tmp_path: Path) -> Iterator[Callable[[str], Kept]]:
    made: list[Kept] = []

    def keep(program: str, *judged: object) -> Kept:
        made.append(Kept(tmp_path / "lives", program, *judged))
        return made[-1]

    yield keep
    for one in made:
        one.process.kill()
        one.process.wait()


@pytest.mark.parametrize("program", [_STAY, _READY + _STAY])
def test_a_killed_hostd_is_started_again(keep: Callable[[str], Kept], program: str) -> None:
    kept = keep(program)
    for life in (1, 2):
        os.kill(int(kept.lines(life)[-1]), signal.SIGKILL)
    assert 3 == len(set(kept.lines(3)))
    assert kept.process.poll() is None


@pytest.mark.parametrize("status", [1, 64, 78])
def test_a_hostd_that_cannot_run_is_not_started_again(keep: Callable[[str], Kept], status: int) -> None:
    kept = keep(f"sys.exit({status})")
    assert status == kept.process.wait(timeout=30)
    assert 1 == len(kept.lines(1))


def test_a_hostd_that_ends_after_it_was_ready_is_started_again(keep: Callable[[str], Kept]) -> None:
    assert 2 == len(set(keep(_READY + "sys.exit(1)").lines(2)[:2]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_removal_waited_for(keep: Callable[[str], Kept], number: int) -> None:
    kept = keep(_ORDERLY + _READY + "open(sys.argv[1], 'a').write('up\\n'); " + _STAY)
    kept.lines(2)
    kept.process.send_signal(number)
    assert 0 == kept.process.wait(timeout=30)
    assert "removed" == kept.lines(3)[-1]


def test_a_signal_that_comes_before_hostd_can_take_it_is_not_lost(keep: Callable[[str], Kept]) -> None:
    """The program has started and not yet set its reaction to SIGTERM. The signal waits for that."""
    kept = keep("time.sleep(0.7); " + _ORDERLY + _STAY)
    kept.lines(1)
    kept.process.send_signal(signal.SIGTERM)
    assert 0 == kept.process.wait(timeout=30)
    assert "removed" == kept.lines(2)[-1]


def test_a_hostd_that_was_killed_is_started_once_more_to_remove_what_is_left(keep: Callable[[str], Kept]) -> None:
    """The signal comes while there is no hostd, in the pause before a restart."""
    kept = keep(_READY + "os._exit(1) if len(open(sys.argv[1]).readlines()) < 4 else None; " + _ORDERLY + _STAY)
    kept.lines(3)
    kept.process.send_signal(signal.SIGTERM)
    assert kept.process.wait(timeout=30) in (0, 1)


def test_a_killed_watchdog_leaves_no_hostd(keep: Callable[[str], Kept]) -> None:
    kept = keep(_READY + _STAY)
    hostd = int(kept.lines(1)[0])
    assert alive(hostd)
    kept.process.kill()
    until(lambda: not alive(hostd))


def test_orphans_are_reaped(keep: Callable[[str], Kept]) -> None:
    """The children that hostd leaves behind become the watchdog's, and do not stay as zombies in a group."""
    kept = keep("os.fork() or (os.fork() and os._exit(0)) or (time.sleep(1), os._exit(0)); " + _READY + _STAY)
    kept.lines(1)
    until(lambda: 2 == len(children(kept.process.pid)))
    until(lambda: 1 == len(children(kept.process.pid)))


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.system
@pytest.mark.parametrize("dies", ["hostd", "watchdog"])
def test_a_worker_that_stays_is_killed_before_the_next_hostd(
    keep: Callable[[str], Kept], tmp_path: Path, dies: str
) -> None:
    """It ignores every signal that can be ignored, and the death of its parent."""
    groups = Cgroups(str(tmp_path))
    stays = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(600)"
    worker = subprocess.Popen([sys.executable, "-c", stays], start_new_session=True)
    try:
        kept = keep(_READY + _STAY)
        hostd = int(kept.lines(1)[0])
        for directory in groups.create("hostile.1", GroupLimits()):
            (directory / "cgroup.procs").write_text(str(worker.pid))
        if dies == "hostd":
            os.kill(hostd, signal.SIGKILL)
            kept.lines(2)
        else:
            kept.process.kill()
            until(lambda: not alive(hostd))
            assert alive(worker.pid)
            keep(_READY + _STAY).lines(2)
        assert not alive(worker.pid)
    finally:
        worker.kill()
        worker.wait()
        groups.sweep()


@pytest.mark.system
def test_killed_workers_have_ended_when_the_call_returns(tmp_path: Path) -> None:
    """They give much memory back when they end."""
    groups = Cgroups(str(tmp_path))
    holds = "held = bytearray(b'x' * (192 << 20)); print(flush=True); import time; time.sleep(600)"
    workers = [subprocess.Popen([sys.executable, "-c", holds], stdout=subprocess.PIPE) for _ in range(4)]
    try:
        directories = groups.create("hostile.1", GroupLimits())
        for worker in workers:
            assert worker.stdout is not None and worker.stdout.readline()
            for directory in directories:
                (directory / "cgroup.procs").write_text(str(worker.pid))
        groups.end_all(0.0)
        assert not any(alive(worker.pid) for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        groups.sweep()


@pytest.mark.system
def test_a_watchdog_that_starts_beside_another_server_leaves_its_workers_alone(
    keep: Callable[[str], Kept], tmp_path: Path
) -> None:
    groups = Cgroups(str(tmp_path))
    worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
    lock = predecessor.lock(tmp_path)  # The hostd of the other server.
    try:
        for directory in groups.create("other.1", GroupLimits()):
            (directory / "cgroup.procs").write_text(str(worker.pid))
        keep(_READY + _STAY).lines(1)
        assert worker.poll() is None
    finally:
        os.close(lock)
        worker.kill()
        worker.wait()
        groups.sweep()


def test_hostd_comes_before_what_others_compute(keep: Callable[[str], Kept]) -> None:
    weight = Path(f"/proc/{keep(_READY + _STAY).lines(1)[0]}/autogroup")
    assert not weight.exists() or weight.read_text().split()[-2:] == ["nice", "-5" if os.geteuid() == 0 else "0"]


_SOON = (0.2, (1.0, 1.0))
"""A hostd hangs after a second."""
_BEATING = "exec('while True:\\n os.write(int(os.environ[\\'SALLYPORT_HOSTD_READY_FD\\']), b\\'1\\'); time.sleep(0.2)')"


@pytest.mark.parametrize("hang", ["stopped", "asleep", "looping"])
def test_a_hostd_that_hangs_is_killed_and_started_again(keep: Callable[..., Kept], hang: str) -> None:
    """It hangs after it was ready. It has not ended, so only its silence shows the fault."""
    hanging = {"stopped": _BEATING, "asleep": _STAY, "looping": "exec('while True: pass')"}[hang]
    kept = keep(_READY + "open(sys.argv[1], 'a').write('up\\n'); " + hanging, *_SOON)
    first = int(kept.lines(2)[0])
    if hang == "stopped":
        stop(first)
    assert str(first) != kept.lines(3)[2]
    assert not alive(first)


def test_a_hostd_that_beats_or_is_not_ready_yet_is_left_alone(keep: Callable[..., Kept], tmp_path: Path) -> None:
    """Another hostd hangs at the same time, and is killed after its time limit."""
    slow, beating = keep(_STAY, *_SOON), Kept(tmp_path / "others", _BEATING, *_SOON)
    hanging = Kept(tmp_path / "hanging", _READY + _STAY, *_SOON)
    try:
        hanging.lines(2)
        assert [1, 1] == [len(slow.lines(1)), len(beating.lines(1))]
    finally:
        for one in (beating, hanging):
            one.process.kill()
            one.process.wait()


@pytest.mark.parametrize("hidden", [False, True])
def test_a_process_that_can_hold_secrets_dumps_no_core(hidden: bool, tmp_path: Path) -> None:
    """The control is the same process without the call."""
    call = "from runtimes.process.watchdog import dump_nothing; dump_nothing(); " if hidden else ""
    limit = "import resource as r; r.setrlimit(r.RLIMIT_CORE, (r.getrlimit(r.RLIMIT_CORE)[1],) * 2); "
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", f"{limit}{call}import os; os.abort()"], cwd=tmp_path, env=environment
    )
    _, status = os.waitpid(process.pid, 0)
    process.returncode = 0  # it is reaped
    assert (signal.SIGABRT, not hidden) == (os.WTERMSIG(status), os.WCOREDUMP(status))
