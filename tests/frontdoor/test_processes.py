"""A home's own processes are those that it started, not those whose arguments name one of its files."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest

from frontdoor.clean import freezer_files, mounts_below
from frontdoor.places import find
from frontdoor.processes import Home, Process, own, read, read_home
from runtimes.process import predecessor

READY = "print(flush=True); input()"
CONTAINER = "7" * 64
HOME = Home(("/h", "/h/faults"), ("/run/h", "/run/h-faults"), frozenset({(70, "700")}), frozenset({CONTAINER}))


def process(
    *arguments: str, pid: int = 50, parent: int = 2, started: str = "1", groups: str = "", home: str = ""
) -> Process:
    return Process(pid, parent, started, arguments, groups, home)


OURS = {
    "hostd": process("/c/.venv/bin/python", "-m", "runtimes.hostd", "/run/h/launch/host.json"),
    "a worker": process("/c/.venv/bin/python", "-m", "gateway.zygote", "/run/h-faults/config/zygote.json"),
    "dockerd": process("/usr/sbin/dockerd", "--config-file=/run/h/config/daemon.json"),
    "dockerd on a socket": process("/usr/sbin/dockerd", "--host=unix:///run/h/docker.sock"),
    "containerd": process("containerd", "--config", "/run/h/docker/containerd/containerd.toml"),
    "a shim": process("/usr/bin/containerd-shim-runc-v2", "-address", "/run/h/docker/containerd/containerd.sock"),
    "runsc": process("runsc-sandbox", "--log-format=json", "--root=/run/h/docker/runtime-runc/moby", "boot"),
    "a process in a container": process("sleep", "1", groups=f"0::/system.slice/docker-{CONTAINER}.scope\n"),
    "a noted process": process("nft", "-i", pid=70, started="700"),
    "the demo": process("/c/.venv/bin/python", "-m", "demo.main", home="/h"),
    "the second session of tests": process("python", "-m", "pytest", "-q", home="/h/faults"),
    "the mutation run": process("/h/cache/venv-mutation/bin/python", "-m", "mutmut"),
    "a build": process("bash", "images/base.sh", "/h/cache/base-0.tar"),
    "the command": process("/c/.venv/bin/python", "/c/.venv/bin/sallyport", "--defaults", "/h/built.toml", "serve"),
    "the front door": process("/c/.venv/bin/python", "-S", "-m", "frontdoor", "test", home="/h"),
}
OTHERS = {
    "an operator's tail": process("tail", "-f", "/h/dockerd.log"),
    "an editor": process("vim", "/h/state/audit/audit-1.jsonl", home="/h"),
    "a pager of a program's name": process("less", "containerd", "/run/h/docker/containerd/containerd.toml"),
    "a shell": process("bash", "-c", "images/base.sh /h/cache/base-0.tar", home="/h"),
    "a script of the operator": process("python3", "/root/watch.py", "/run/h/hostd.sock", home="/h"),
    "a program of the operator": process("python3", "-c", "import x", "-m", "demo.main", home="/h"),
    "a program that reads as an option": process("python3", "-c", "-m", "demo.main", home="/h"),
    "a shell script of the operator": process("bash", "/root/backup.sh", "/h/state"),
    "a module of the operator": process("python3", "-m", "http.server", "--directory", "/h/reports", home="/h"),
    "another home's demo": process("/c/.venv/bin/python", "-m", "demo.main", home="/g"),
    "a demo without a home": process("/c/.venv/bin/python", "-m", "demo.main"),
    "a home whose name begins as ours": process("python", "-m", "runtimes.hostd", "/run/h2/launch/host.json"),
    "another home's dockerd": process("/usr/sbin/dockerd", "--config-file=/run/g/config/daemon.json"),
    "the machine's dockerd": process("/usr/sbin/dockerd", "-H", "fd://"),
    "a container of another": process("sleep", "1", groups="0::/docker/" + "8" * 64),
    "a process that was given a noted number": process("nft", "-i", pid=70, started="701"),
    "the front door of the default home": process("/c/.venv/bin/python", "-S", "-m", "frontdoor", "test"),
    "a kernel thread": process(),
}


@pytest.mark.parametrize("name", OURS)
def test_what_a_home_started_is_its_own(name: str) -> None:
    assert HOME.owns(OURS[name])


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_names_a_home_is_not_its_own(name: str) -> None:
    assert not HOME.owns(OTHERS[name])


def test_without_the_variable_the_front_door_has_the_default_home() -> None:
    assert Home(("/var/lib/sallyport",), ("/run/sallyport",)).owns(OTHERS["the front door of the default home"])


def test_what_a_process_of_ours_started_is_ours_too() -> None:
    tree = [
        replace(OURS["the front door"], pid=10),
        process("sh", "-c", "build", pid=11, parent=10),
        process("debootstrap", pid=12, parent=11),
        process("tail", "-f", "/h/dockerd.log", pid=13, parent=1),
        process("init", pid=1, parent=0),
    ]
    assert [10, 11, 12] == [one.pid for one in own(tree, HOME, spared=13)]


def test_the_cleaning_process_and_those_that_led_to_it_are_spared() -> None:
    tree = [
        process("init", pid=1, parent=0),
        process("bash", pid=20, parent=1),
        replace(OURS["the front door"], pid=21, parent=20),
        process("sh", pid=22, parent=21),
        process("python", "-m", "frontdoor", "clean", pid=23, parent=22, home="/h"),
        process("a child of a spared one", pid=24, parent=21),
        replace(OURS["dockerd"], pid=25, parent=1),
    ]
    assert [25] == [one.pid for one in own(tree, HOME, spared=23)]


def test_a_process_is_read_as_the_kernel_has_it() -> None:
    environment = os.environ | {"SALLYPORT_HOME": "/h x"}
    with subprocess.Popen([sys.executable, "-c", READY, "a b"], stdin=PIPE, stdout=PIPE, env=environment) as child:
        assert child.stdout is not None
        child.stdout.readline()  # until then it can be without its environment
        found = read(child.pid)
        child.communicate(b"\n")
    assert found is not None
    assert (child.pid, os.getpid(), "/h x") == (found.pid, found.parent, found.home)
    assert (sys.executable, "-c", READY, "a b") == found.arguments
    assert read(child.pid) is None


def test_notes_and_containers_are_read_where_the_product_keeps_them(tmp_path: Path) -> None:
    places = find({"SALLYPORT_HOME": str(tmp_path / "h"), "SALLYPORT_RUN_DIR": str(tmp_path / "r")}, "/c", 0)
    (tmp_path / "r" / "config").mkdir(parents=True)
    (tmp_path / "r" / "docker/containerd/daemon/io.containerd.runtime.v2.task/moby" / CONTAINER).mkdir(parents=True)
    predecessor.note(tmp_path / "r" / "config", "hostd", os.getpid())
    home = read_home(places)
    me = read(os.getpid())
    assert me is not None
    assert home.owns(me)
    assert frozenset({CONTAINER}) == home.containers
    assert places.homes == home.homes


def test_mounts_are_found_by_path_the_innermost_first() -> None:
    points = ("/h", "/h/a", r"/h/a/b\040c", "/h2/a", "/run/h/netns/1", "/")
    table = "".join(f"1 2 0:3 / {point} rw - tmpfs none rw\n" for point in points)
    assert ["/run/h/netns/1", "/h/a/b c", "/h/a"] == mounts_below(table, ("/h", "/run/h"))


def test_the_files_that_thaw_containers_are_those_of_the_freezer() -> None:
    table = """\
32 31 0:27 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 31 0:28 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
34 31 0:29 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
    names = ["docker/c1/freezer.state", "system.slice/docker-c1.scope/freezer.state"]
    assert [Path("/sys/fs/cgroup/freezer", name) for name in names] == freezer_files(table, ["c1"])
