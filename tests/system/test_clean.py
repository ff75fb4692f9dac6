"""`./run clean` ends and removes what its home created, and nothing that only names one of its files.

frontdoor/processes.py decides, frontdoor/clean.py carries out.

Real processes, namespaces, mounts and tables. It runs in a copy of the front door without an environment, on Debian's
Python.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from runtimes.net import netns, nft
from runtimes.net.guard import NetGuard
from runtimes.net.nft import GuardPlan
from runtimes.process import predecessor
from testbed import namespaces
from testbed.internet import Internet
from testbed.stack import EMPTY_IMAGE
from testbed.traces import Traces, alive, left_by_server, start_time
from tests.stacks import INTERNET, Second, scratch

pytestmark = [pytest.mark.system, pytest.mark.faults]

ROOT = Path(__file__).resolve().parents[2]
SLEEP = "import time; print('runs', flush=True); time.sleep(300)"
PLAN = GuardPlan(700001000, 700005095, (), ())


class Place:
    """A home and a run directory, and a copy of the front door that cleans them."""

    def __init__(self, directory: Path, run_dir: Path) -> None:
        self.home, self.run, self.checkout = directory / "home", run_dir, directory / "checkout"
        shutil.copytree(ROOT / "frontdoor", self.checkout / "frontdoor")
        shutil.copy(ROOT / "run", self.checkout)
        for path in (self.home, self.run / "config"):
            path.mkdir(parents=True)

    def clean(self, *wrapper: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        environment |= {"SALLYPORT_HOME": str(self.home), "SALLYPORT_RUN_DIR": str(self.run)}
        done = subprocess.run(
            [*wrapper, self.checkout / "run", "clean"], env=environment, capture_output=True, text=True, check=False
        )
        assert 0 == done.returncode, done.stderr
        assert (False, False) == (self.home.exists(), self.run.exists())
        return done


@pytest.fixture(name="directory")
def _directory() -> Iterator[Path]:
    with scratch("clean") as directory:
        yield directory


@pytest.fixture(name="place")
def _place(directory: Path) -> Place:
    return Place(directory, directory / "run")


class Processes(ExitStack):
    """Processes of the test. Those that still run at its end are killed."""

    def start(
        self, *command: str | Path, first: str = "", cwd: Path | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        """Start a process. Return when it has printed the line `first`."""
        process = subprocess.Popen(command, cwd=cwd, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
        self.enter_context(process)
        self.callback(process.kill)
        assert process.stdout is not None
        assert first in ("", process.stdout.readline().strip() if first else "")
        return process


@pytest.fixture(name="processes")
def _processes() -> Iterator[Processes]:
    with Processes() as processes:
        yield processes


def test_an_operators_processes_survive(place: Place, processes: Processes) -> None:
    """They have files of the home open, name them, or have it as working directory. The control is a process that the
    home recorded.
    """
    log = place.home / "dockerd.log"
    log.write_text("a line\n")
    ours = str(place.home)
    bystanders = {
        "tail": processes.start("tail", "-f", log, first="a line"),
        "editor": processes.start(sys.executable, "-c", f"file = open({str(log)!r}); {SLEEP}", first="runs"),
        "script": processes.start(sys.executable, "-c", SLEEP, f"{place.run}/x", first="runs", SALLYPORT_HOME=ours),
        "shell": processes.start("sh", "-c", "echo runs; exec sleep 300", cwd=place.home, first="runs"),
        "reused": processes.start("sleep", "300"),
    }
    noted = processes.start("sleep", "300")
    predecessor.note(place.run / "config", "noted", noted.pid)
    (place.run / "config" / "reused.pid").write_text(f"{bystanders['reused'].pid} 1 -\n")

    place.clean()

    assert [] == [name for name, process in bystanders.items() if process.poll() is not None]
    assert -signal.SIGTERM == noted.wait(60)


def test_processes_of_a_second_home_survive(place: Place, processes: Processes) -> None:
    """The same program, module and checkout. Homes and run directories differ; one path is a prefix of the other."""

    def canary(home: Path, name: str, port: str) -> subprocess.Popen[str]:
        counter = place.checkout / name
        command = ("unshare", "-n", sys.executable, "-m", "testbed.canary", counter, port)
        return processes.start(*command, first="ready", SALLYPORT_HOME=str(home))

    own, other = canary(place.home, "own", "8080"), canary(Path(f"{place.home}-2"), "other", "8080")
    place.clean()

    assert -signal.SIGTERM == own.wait(60)
    assert other.poll() is None


def test_only_namespaces_that_the_home_noted_are_removed(place: Place) -> None:
    """No namespace of another home, and none of a name that the home recorded for a former one."""
    names = {part: f"{INTERNET}-c{part}" for part in ("own", "other", "again")}
    beside = place.home / "faults"
    try:
        namespaces.make(names["own"], place.home)
        namespaces.make(f"{names['own']}b", beside)
        namespaces.make(names["again"], place.home)
        subprocess.run(["ip", "netns", "del", names["again"]], check=True)
        subprocess.run(["ip", "netns", "add", names["again"]], check=True)
        namespaces.make(names["other"], place.checkout / "second-home")

        place.clean()

        left = {*names.values(), f"{names['own']}b"} & set(os.listdir("/run/netns"))
        assert {names["other"], names["again"]} == left
    finally:
        for name in (*names.values(), f"{names['own']}b"):
            namespaces.remove(name, place.checkout)


@pytest.mark.parametrize("ours", [True, False])
def test_the_floor_is_removed_only_if_a_server_of_the_home_laid_it(place: Place, ours: bool) -> None:
    """A real guard loaded it in a namespace of the test, where the copy of the front door runs."""
    name = f"{INTERNET}-cfloor"
    namespaces.make(name, place.checkout)
    try:
        path = Path("/run/netns", name)
        asyncio.run(_leave_floor(place.run / "config", path))
        if not ours:  # This happens when another server starts after the first one was killed.
            asyncio.run(_leave_floor(place.checkout, path))
        done = place.clean("nsenter", f"--net={path}", "--")
        assert ours == (nft.FLOOR_TABLE not in netns.list_rules(path, "tables"))
        assert ours != ("left the nft table sallyport_floor" in done.stderr)
    finally:
        namespaces.remove(name, place.checkout)


async def _leave_floor(notes: Path, upstream: Path) -> None:
    """Start a guard that records its process in `notes`, and kill it: the floor stays."""

    async def changed(pidfd: int) -> None:
        pass

    guard = NetGuard(notes / "guard.nft", upstream, changed)
    await guard.start(PLAN)
    await guard.stop()


def test_mounts_and_files_are_removed_and_packages_stay(place: Place) -> None:
    """A mount beside the home stays too."""
    beside = place.checkout / "mounted"
    for point in (place.run / "netns", place.home / "a b", beside):
        point.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "none", str(point)], check=True)
    (beside / "file").touch()
    try:
        done = place.clean()
        assert "Debian packages stay installed" in done.stderr
        assert (beside / "file").exists()
    finally:
        subprocess.run(["umount", str(beside)], check=True)


def living(traces: Traces) -> set[tuple[int, int]]:
    """Return the processes of a sandbox that still run."""
    return {one for one in traces.processes if start_time(one[0]) == one[1]}


def test_a_killed_server_goes_with_its_sandboxes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its containers, on both runtimes, still run or are frozen. The internet belongs to another home and stays."""
    place = Place(directory, Path(f"{os.environ['SALLYPORT_RUN_DIR']}-clean"))
    monkeypatch.setenv("SALLYPORT_HOME", str(place.home))
    monkeypatch.setenv("SALLYPORT_RUN_DIR", str(place.run))
    accounts = {"git": "a:b", "index": "a:b", "api": "c"}
    try:
        with Internet(f"{INTERNET}-clean", directory / "internet", accounts) as internet:
            with Second(internet, place.home / "stack") as stack:
                made = [stack.create(runtime, image=EMPTY_IMAGE, policy=None) for runtime in ("runsc", "runc") * 2]
                for sandbox in made[2:]:
                    sandbox.pause()
                traces = [stack.traces(sandbox.id) for sandbox in made]
                for sandbox in made:
                    sandbox.close()  # The client's connections.
                stack.kill()
                running = [living(trace) for trace in traces]
                assert all(running), "the control: containers on both runtimes outlive their server"

                place.clean()

            assert [set()] * 4 == [living(trace) for trace in traces]
            assert [] == [one for trace in traces for one in trace.namespaces if alive(*one)]
            assert [] == left_by_server(place.run, place.home)
            assert os.path.exists(internet.path(internet.up))
    finally:
        shutil.rmtree(place.run, ignore_errors=True)
