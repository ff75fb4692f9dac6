"""Decides which processes belong to a home: those that it started. A mere mention of one of its files proves nothing.

A process belongs to a home if one of these conditions holds:

- hostd noted it in the run directory, with its start time (`config/*.pid`, see runtimes/process/predecessor.py);
- it is in the control group of a container of the home's dockerd;
- its program is below the home or the run directory, according to the first argument (uv, the Python of mutation);
- it is a program that the product starts, with a configuration, socket or directory of the run directory (dockerd,
  containerd, its shims, runsc), or a build script whose output is below the home;
- it is `python -m` a module of Sallyport, or the command `sallyport`, with a file of the home or the run directory,
  or with the home in its environment;
- a process that belongs to the home started it.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from frontdoor.places import DEFAULT_HOME, Places

_PACKAGES = ("wire", "policy", "audit", "vault", "gateway", "runtimes", "lifecycle")
_MODULES = frozenset((*_PACKAGES, "demo", "testbed", "bench", "tests", "pytest", "frontdoor"))
_PROGRAMS = frozenset(["dockerd", "containerd", "containerd-shim-runc-v2", "runsc-sandbox", "runsc-gofer"])
_BUILDS = re.compile(r"(?:^|/)(?:images/[\w-]+|tests/clients/install)\.sh$")
_SHELLS = frozenset(("bash", "sh"))
_CONTAINER = re.compile(r"[0-9a-f]{64}")
_CONTAINERS = "docker/containerd/daemon/io.containerd.runtime.v2.task/moby"


@dataclass(frozen=True)
class Process:
    """The kernel's data of a process. `started` is in clock ticks after boot; `home` is its SALLYPORT_HOME."""

    pid: int
    parent: int
    started: str
    arguments: tuple[str, ...] = ()
    groups: str = ""
    home: str = ""

    @property
    def program(self) -> str:
        """The name of its program, according to its first argument."""
        return os.path.basename(self.arguments[0]) if self.arguments else ""

    @property
    def module(self) -> str:
        """M of `python -m M`, otherwise an empty string."""
        if not self.program.startswith("python"):
            return ""
        words = iter(self.arguments[1:])
        for word in words:
            if word == "-m":
                return next(words, "")
            if not word.startswith("-") or word == "-c":
                return ""
        return ""


@dataclass(frozen=True)
class Home:
    """The evidence of a home: directories, noted processes (pid, start time), ids of containers."""

    homes: tuple[str, ...]
    run_dirs: tuple[str, ...]
    noted: frozenset[tuple[int, str]] = field(default_factory=frozenset)
    containers: frozenset[str] = field(default_factory=frozenset)

    def owns(self, process: Process) -> bool:
        """Return whether the process itself shows that it belongs to the home."""
        arguments = process.arguments
        return (
            (process.pid, process.started) in self.noted
            or not self.containers.isdisjoint(_CONTAINER.findall(process.groups))
            or self._below(arguments[0] if arguments else "")
            or (process.program in _PROGRAMS and self._named(arguments[1:]))
            or (process.program in _SHELLS and _builds(arguments) and self._named(arguments[2:]))
            or (process.program.startswith("python") and self._runs_ours(process))
        )

    def _runs_ours(self, process: Process) -> bool:
        arguments = process.arguments
        if process.module == "frontdoor":
            return (process.home or DEFAULT_HOME) in self.homes
        if process.module.partition(".")[0] in _MODULES:
            return process.home in self.homes or self._named(arguments)
        command = os.path.basename("".join(arguments[1:2])) == "sallyport"
        return command and arguments[2:3] == ("--defaults",) and self._named(arguments[3:4])

    def _named(self, arguments: Iterable[str]) -> bool:
        """Return whether an argument is a path of the home: PATH, --option=PATH or unix://PATH."""
        return any(self._below(argument.rpartition("=")[2].removeprefix("unix://")) for argument in arguments)

    def _below(self, path: str) -> bool:
        return path.startswith(tuple(f"{directory}/" for directory in (*self.homes, *self.run_dirs)))


def _builds(arguments: tuple[str, ...]) -> bool:
    return len(arguments) > 1 and _BUILDS.search(arguments[1]) is not None


def own(processes: Iterable[Process], home: Home, spared: int) -> list[Process]:
    """Return the home's processes and their descendants, except process `spared` and its ancestors."""
    known = {process.pid: process for process in processes}
    kept = set()
    while spared in known and spared not in kept:
        kept.add(spared)
        spared = known[spared].parent
    found = {pid for pid, process in known.items() if pid not in kept and home.owns(process)}
    while more := {pid for pid, one in known.items() if one.parent in found and pid not in found}:
        found |= more
    return [known[pid] for pid in sorted(found)]


def read_home(places: Places) -> Home:
    """Read the evidence of the home and its run directories."""
    noted, containers = set(), set()
    for directory in map(Path, places.run_dirs):
        for note in directory.glob("config/*.pid"):
            words = note.read_text().split()
            if len(words) > 1 and words[0].isdigit():
                noted.add((int(words[0]), words[1]))
        containers |= {path.name for path in directory.glob(f"{_CONTAINERS}/*")}
    return Home(places.homes, places.run_dirs, frozenset(noted), frozenset(containers))


def read_all() -> list[Process]:
    """Read all processes of the host. Only root can call it."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := read(int(name))) is not None:
            found.append(process)
    return found


def read(pid: int) -> Process | None:
    """Read one process; None if it has ended."""
    place = Path("/proc", str(pid))
    try:
        words = (place / "stat").read_text().rpartition(")")[2].split()
        arguments = (place / "cmdline").read_bytes()
        environment = (place / "environ").read_bytes()
        groups = (place / "cgroup").read_text()
    except OSError:
        return None
    if words[0] in "ZX":
        return None
    home = next((item[15:] for item in environment.split(b"\0") if item.startswith(b"SALLYPORT_HOME=")), b"")
    return Process(
        pid=pid,
        parent=int(words[1]),
        started=words[19],
        arguments=tuple(os.fsdecode(word) for word in arguments.split(b"\0")[:-1]),
        groups=groups,
        home=os.fsdecode(home),
    )
