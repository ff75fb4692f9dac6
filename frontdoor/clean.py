"""`./run clean`: ends and removes what this home made, and only what is provably its own.

- Processes: see `processes`. A process that only has a file of the home open is not ended.
- Network namespaces: those that the demo noted in the home (testbed/namespaces.py), by name, number and cookie.
- The floor, the nft table below the guard's: if a server noted exactly this table in a run directory of this home.
- Mounts and files below the home, the run directories and `.venv`.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from frontdoor import processes
from frontdoor.places import Places
from frontdoor.steps import Failure, call, say

_PATIENCE_SECONDS = 10.0
_TICK_SECONDS = 0.2
_FLOOR = ("inet", "sallyport_floor")
_CLONE_NEWNET = 0x40000000
_SO_NETNS_COOKIE = 71
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def run(places: Places) -> None:
    """Remove everything; Debian packages stay.

    Raises:
        Failure: something could not be removed.
    """
    _end_processes(places)
    for home in places.homes:
        _remove_namespaces(Path(home, "namespaces"))
    _remove_floor(tuple(Path(run_dir, "config", "floor") for run_dir in places.run_dirs))
    directories = (*places.run_dirs, places.home)
    for mount in mounts_below(Path("/proc/self/mountinfo").read_text(), directories):
        subprocess.run(("umount", mount), check=False)
    call("rm", "-rf", "--one-file-system", *directories, ".venv")
    say(f"removed {places.home}, {places.run_dir} and .venv; Debian packages stay installed")


def mounts_below(table: str, directories: tuple[str, ...]) -> list[str]:
    """Return the mount points below `directories` in a mountinfo table, the innermost first."""
    ours = tuple(f"{directory}/" for directory in directories)
    points = (_unescaped(line.split()[4]) for line in table.splitlines())
    return sorted((point for point in points if point.startswith(ours)), reverse=True)


def _unescaped(point: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point)


def _end_processes(places: Places) -> None:
    home = processes.read_home(places)  # read once, because processes remove their notes when they end
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes.own(processes.read_all(), home, os.getpid()):
            _send(process, number)
        if number == signal.SIGKILL:
            _thaw(home.containers)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if not processes.own(processes.read_all(), home, os.getpid()):
                return
            time.sleep(_TICK_SECONDS)


def _thaw(containers: Iterable[str]) -> None:
    """Let the killed processes of paused sandboxes end: on cgroup v1 a frozen process takes no signal."""
    for file in freezer_files(Path("/proc/self/mountinfo").read_text(), containers):
        with contextlib.suppress(OSError):
            file.write_text("THAWED")


def freezer_files(table: str, containers: Iterable[str]) -> list[Path]:
    """Return the files of a mountinfo table's freezers (cgroup v1) that freeze and thaw these containers."""
    points = [
        line.split()[4]
        for line in table.splitlines()
        if " - cgroup " in line and "freezer" in line.rpartition(" ")[2].split(",")
    ]
    names = [
        name for container in containers for name in (f"docker/{container}", f"system.slice/docker-{container}.scope")
    ]
    return [Path(point, name, "freezer.state") for point in points for name in names]


def _send(process: processes.Process, number: int) -> None:
    """Send a signal to exactly this process, not to one that reuses its number."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        now = processes.read(process.pid)
        if now is not None and now.started == process.started:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


def _remove_namespaces(notes: Path) -> None:
    for note in notes.glob("*"):
        place = f"/run/netns/{note.name}"
        if os.path.exists(place) and note.read_text().split() == identity(place).split():
            call("ip", "netns", "del", note.name)


def identity(path: str) -> str:
    """Return the identity of the network namespace at `path`: boot, inode number, cookie."""
    found: list[int] = []

    def enter() -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            joined = ctypes.CDLL(None).setns(descriptor, _CLONE_NEWNET) == 0  # os.setns is not in Python 3.11
            inode = os.fstat(descriptor).st_ino
        finally:
            os.close(descriptor)
        if joined:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                cookie = probe.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
            found.extend((inode, int.from_bytes(cookie, "little")))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if not found:
        raise Failure(f"cannot join the network namespace {path}")
    return f"{_BOOT_ID.read_text().strip()} {found[0]} {found[1]}"


def _remove_floor(notes: tuple[Path, ...]) -> None:
    """Remove a killed server's floor, if a server of this home loaded exactly this table (`runtimes/net/guard.py`)."""
    listed = subprocess.run(("nft", "-a", "-t", "list", "table", *_FLOOR), capture_output=True, text=True, check=False)
    handle = re.search(r"# handle (\d+)$", listed.stdout, re.MULTILINE)
    if handle is None:
        return
    table = [_BOOT_ID.read_text().strip(), str(os.stat("/proc/self/ns/net").st_ino), handle[1]]
    if any(note.is_file() and note.read_text().split() == table for note in notes):
        call("nft", "delete", "table", *_FLOOR)
    else:
        say("left the nft table sallyport_floor: another server laid it")
