"""Memory and processor time of a running server, by component. Pure except `processes`, `memory` and `Meter`.

- A process belongs to the component that its command line names. Otherwise it belongs to that of its nearest ancestor,
  for example the processes in which runsc runs the code of a sandbox (`[exe]`).
- A child of the zygote is a worker.
- On runc the children of a shim are the sandbox.
- Private memory is Private_Clean and Private_Dirty of smaps_rollup. PSS also has the process's part of shared pages,
  so the PSS of all processes can be added.
- Processor time is that of schedstat, in nanoseconds, summed over threads. Threads that have ended count only in
  /proc/PID/stat, in clock ticks. The larger of the two counts. To that of hostd is added that of the programs that it
  has run to their end.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

WORKERS = "workers"
SANDBOXES, GOFERS, SHIMS = "sandboxes", "runsc gofers", "containerd-shims"
HOSTD = "hostd"
COMPONENTS = (
    HOSTD, "watchdog", "serve", "vaultd", "auditd", "compiler", "fetcher", "zygote", "guard", WORKERS,
    SANDBOXES, GOFERS, SHIMS, "dockerd", "containerd",
)  # fmt: skip
_MODULES = {
    "runtimes.hostd": HOSTD,
    "runtimes.process.watchdog": "watchdog",
    "lifecycle.serve": "serve",
    "vault.vaultd": "vaultd",
    "audit.auditd": "auditd",
    "policy.compiler": "compiler",
    "vault.fetcher": "fetcher",
    "gateway.zygote": "zygote",
}
_PROGRAMS = {
    "runsc-sandbox": SANDBOXES,
    "runsc-gofer": GOFERS,
    "containerd-shim-runc-v2": SHIMS,
    "dockerd": "dockerd",
    "containerd": "containerd",
}
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One process: its number, that of its parent, and its command line."""

    pid: int
    parent: int
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process, in KiB."""

    private: int
    pss: int


def classify(found: Iterable[Process], run: Path) -> dict[int, str]:
    """Return the component of each process of the server with run directory `run`."""
    by_pid = {process.pid: process for process in found}
    named = {pid: name for pid, process in by_pid.items() if (name := _named(process.command, f"{run}/"))}
    # A worker has the command line of the zygote.
    zygotes = {pid for pid, name in named.items() if name == "zygote"}
    named |= dict.fromkeys((pid for pid in zygotes if by_pid[pid].parent in zygotes), WORKERS)
    guards = (pid for pid, one in by_pid.items() if one.command[:2] == ("nft", "-i") and named.get(one.parent) == HOSTD)
    named |= dict.fromkeys(guards, "guard")
    shims = {pid for pid, name in named.items() if name == SHIMS}
    named |= dict.fromkeys((pid for pid, one in by_pid.items() if one.parent in shims and pid not in named), SANDBOXES)
    return {pid: name for pid in by_pid if (name := _inherited(pid, by_pid, named)) is not None}


def _named(command: tuple[str, ...], run: str) -> str | None:
    if not any(run in argument for argument in command):
        return None
    for before, argument in pairwise(command):
        if before == "-m" and argument in _MODULES:
            return _MODULES[argument]
    return _PROGRAMS.get(command[0].rpartition("/")[2])


def _inherited(pid: int, by_pid: Mapping[int, Process], named: Mapping[int, str]) -> str | None:
    seen = set()
    while pid in by_pid and pid not in seen:
        if pid in named:
            return named[pid]
        seen.add(pid)
        pid = by_pid[pid].parent
    return None


def members(components: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the processes of each component."""
    found: dict[str, list[int]] = {}
    for pid, name in sorted(components.items()):
        found.setdefault(name, []).append(pid)
    return found


def processes() -> list[Process]:
    """Return all processes of this host."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            command = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            found.append(Process(int(name), parent, tuple(command.split("\0"))))
    return found


def rollup(text: str) -> Memory:
    """Read the text of smaps_rollup; it is empty for a process without memory."""
    found = {line.partition(":")[0]: int(line.split()[1]) for line in text.splitlines() if line.endswith(" kB")}
    return Memory(found.get("Private_Clean", 0) + found.get("Private_Dirty", 0), found.get("Pss", 0))


def memory(pids: Iterable[int]) -> list[Memory]:
    """Return the memory of each process that still exists."""
    found = []
    for pid in pids:
        with suppress(OSError):
            found.append(rollup(Path(f"/proc/{pid}/smaps_rollup").read_text()))
    return found


class Meter:
    """Measures the processor time of processes between its construction and `read`.

    Args:
        components: as `classify` returns them.
        thread: the name of a thread of hostd. `read` returns under this name the time of that thread and of the
            programs that hostd has run.
    """

    def __init__(self, components: Mapping[int, str], thread: str) -> None:
        self._components = dict(components)
        self._thread = thread
        self._before = {pid: _used(pid) for pid in self._components}
        self._thread_before = self._of_thread()

    def begun(self, name: str) -> list[float]:
        """Return the seconds that each process of a component had used at the construction."""
        used = (self._before[pid] for pid, component in self._components.items() if component == name)
        return [one[0] for one in used if one is not None]

    def read(self) -> dict[str, float]:
        """Return the seconds that each component has used. Processes that have ended do not count."""
        seconds: dict[str, float] = {}
        for pid, name in self._components.items():
            begun, ended = self._before[pid], _used(pid)
            if begun is not None and ended is not None:
                exact, ticks, children = (after - before for before, after in zip(begun, ended, strict=True))
                programs = children if name == HOSTD else 0.0
                seconds[name] = seconds.get(name, 0.0) + max(exact, ticks, 0.0) + programs
        if (thread := self._of_thread()) is not None and self._thread_before is not None:
            seconds[self._thread] = thread - self._thread_before
        return seconds

    def _of_thread(self) -> float | None:
        """Return the seconds of all threads of that name, and of hostd's programs; None if there is no thread."""
        found: list[float] = []
        programs = 0.0
        for pid in (pid for pid, name in self._components.items() if name == HOSTD):
            programs += (_used(pid) or (0.0, 0.0, 0.0))[2]
            with suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    if (task / "comm").read_text().strip() == self._thread:
                        found.append(scheduled((task / "schedstat").read_text()))
        return sum(found) + programs if found else None


def scheduled(text: str) -> float:
    """Return the seconds of processor time in the text of a thread's schedstat."""
    return int(text.split()[0]) / 1e9


def _used(pid: int) -> tuple[float, float, float] | None:
    """Return the seconds of a process: of its present threads, of all, and of children that have ended.

    The last two are in whole ticks. None if the process has ended.
    """
    exact = 0.0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError, ProcessLookupError):
                exact += scheduled(Path(f"/proc/{pid}/task/{task}/schedstat").read_text())
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    own, children = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return exact, own / _TICKS, children / _TICKS
