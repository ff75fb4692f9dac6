"""Counts all resources of a running Sallyport on this host, for a comparison of before and after.

It does not query Sallyport itself: processes come from /proc, mounts from mountinfo, groups and files from the file
system, containers from Docker, rows from the database file.
"""

import os
import re
import sqlite3
import subprocess
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from pathlib import Path

from runtimes.process.cgroups import Cgroups
from testbed.stack import Stack
from testbed.traces import mounted_namespaces, namespaces_in_use, start_time

_NOTED = {
    "lifecycle.serve": "serve",
    "vault.vaultd": "vaultd",
    "audit.auditd": "auditd",
    "policy.compiler": "compiler",
    "vault.fetcher": "fetcher",
    "gateway.zygote": "zygote",
}
_FORKS_STAY = "gateway.zygote"
_PLACES = ("ingress", "plans", "sandboxes", "netns", "launch", "config", "runtimes")
_SLOT = re.compile(r"/netns/[0-9]+-")
_READY_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Census:
    """The resources on the host. Command lines identify processes, so that a restarted one counts as the same.

    For the same reason control groups of workers have no generation, which is the last part of their names, and slots
    have no numbers.
    """

    processes: tuple[str, ...]
    namespaces: int
    mounts: tuple[str, ...]
    cgroups: tuple[str, ...]
    files: tuple[str, ...]
    containers: tuple[str, ...]
    images: tuple[str, ...]
    rows: int
    """Those of sandboxes, pools and snapshots."""

    def beyond(self, before: "Census") -> dict[str, object]:
        """Return the additions and removals, by kind."""
        differences: dict[str, object] = {}
        for field in fields(self):
            old, new = getattr(before, field.name), getattr(self, field.name)
            if old != new:
                both = isinstance(new, tuple)
                differences[field.name] = (Counter(new) - Counter(old), Counter(old) - Counter(new)) if both else new
        return differences


def take(stack: Stack) -> Census:
    """Take the census of `stack`, when the slots that it makes ahead of need are ready and it starts no program."""
    run, state = stack.run, stack.state
    deadline = time.monotonic() + _READY_SECONDS
    while _idle(run) < stack.slots_ahead and time.monotonic() < deadline and hostd_runs(stack):
        time.sleep(0.1)
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    groups = Cgroups(str(run))
    used = {inode for inodes in namespaces_in_use().values() for inode in inodes} | mounted_namespaces().keys()
    return Census(
        processes=tuple(sorted(programs(run, deadline).values())),
        namespaces=len(used & _slots(run)),
        mounts=tuple(sorted(_unnumbered(line.split()[4]) for line in mounts if f" {run}/" in line)),
        cgroups=tuple(
            sorted(
                str(path.with_suffix(""))
                for root in groups.hierarchies.roots
                for path in (root / groups.parent).glob("*/")
            )
        ),
        files=tuple(
            sorted(
                _unnumbered(str(path))
                for path in (
                    *(path for place in _places(run, state) for path in place.rglob("*")),
                    *(run / "volumes").glob("*/*"),  # not the files in them
                )
                if path.name != ".index"  # there is one in a sealed directory, from its first record on
            )
        ),
        containers=_listed(run, "ps"),
        images=_listed(run, "images"),
        rows=_rows(state / "lifecycle" / "sallyport.db"),
    )


def _listed(run: Path, kind: str) -> tuple[str, ...]:
    """Return the ids of what Docker has of a kind."""
    command = ["docker", "-H", f"unix://{run / 'docker.sock'}", kind, "-aq", "--no-trunc"]
    return tuple(sorted(set(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split())))


def _slots(run: Path, side: str = "*") -> set[int]:
    found = set()
    for path in (run / "netns").glob(side):
        with suppress(FileNotFoundError):  # an unused slot can be removed meanwhile
            found.add(path.stat().st_ino)
    return found


def _idle(run: Path) -> int:
    """Return the number of unused slots: namespaces without a process, the lower number of the two sides."""
    used = {inode for inodes in namespaces_in_use().values() for inode in inodes}
    free = mounted_namespaces().keys() - used
    return min(len(_slots(run, side) & free) for side in ("*-gw", "*-sbx"))


def _unnumbered(path: str) -> str:
    return _SLOT.sub("/netns/N-", path)


def _places(run: Path, state: Path) -> list[Path]:
    return [*(run / name for name in _PLACES), state / "vault", state / "hostd"]


def _rows(path: Path) -> int:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        counted = (database.execute(f"SELECT count(*) FROM {table}") for table in ("sandboxes", "pools", "snapshots"))  # noqa: S608
        return sum(int(found.fetchone()[0]) for found in counted)


def command_lines() -> dict[int, str]:
    """Return the command line of every process."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            found[int(name)] = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


def programs(run: Path, deadline: float) -> dict[int, str]:
    """Return the command line of each process of the Sallyport in `run`, when none is between fork and exec.

    Such a child has its parent's command line. At `deadline` (of the monotonic clock) it counts as a process.
    """
    while True:
        lines = {pid: line for pid, line in command_lines().items() if f"{run}/" in line}
        if not any(_changes(pid, lines) for pid in lines) or time.monotonic() > deadline:
            return lines
        time.sleep(0.01)


def _changes(pid: int, lines: dict[int, str]) -> bool:
    """Return whether a process has not executed its program yet, or has ended. A worker stays a fork of the zygote."""
    if _FORKS_STAY in lines[pid]:
        return False
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return True
    return lines.get(parent) == lines[pid]


def daemons(stack: Stack) -> dict[str, int]:
    """Return the pid of each daemon of `stack` from hostd's notes: a fork of a daemon has the same command line."""
    hostd = [pid for pid, line in command_lines().items() if f"-m runtimes.hostd {stack.run}/" in line]
    started = [(start, pid) for pid in hostd if (start := start_time(pid)) is not None]
    found = {"runtimes.hostd": min(started)[1]} if started else {}
    for module, role in _NOTED.items():
        with suppress(FileNotFoundError):
            pid, start = map(int, (stack.run / "config" / f"{role}.pid").read_text().split()[:2])
            if start_time(pid) == start:
                found[module] = pid
    return found


def hostd_runs(stack: Stack) -> bool:
    """Return whether a hostd of `stack` runs."""
    return "runtimes.hostd" in daemons(stack)


def descriptors(stack: Stack) -> dict[str, int]:
    """Return the number of descriptors of each daemon."""
    return {module: len(os.listdir(f"/proc/{pid}/fd")) for module, pid in daemons(stack).items()}
