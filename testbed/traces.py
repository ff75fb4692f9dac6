"""The traces of a sandbox on the host: read while the sandbox exists, searched for after its removal.

The kernel uses the number (inode) of a removed namespace for the next one. It never reuses the cookie of a network
namespace.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from testbed.internet import in_namespace
from testbed.namespaces import cookie


@dataclass(frozen=True, slots=True)
class Traces:
    """The traces of one sandbox, and the places to search for them."""

    sandbox: str
    container: str
    processes: frozenset[tuple[int, int]]
    """(pid, start time) of every process whose first thread is in its namespaces, or that is in its cgroups."""
    namespaces: frozenset[tuple[int, int]]
    """(inode, cookie) of its network namespaces."""
    directories: tuple[Path, ...]
    """The directories that can contain files of the sandbox."""
    docker_socket: str

    @property
    def described(self) -> str:
        """A description of the traces."""
        return f"{len(self.processes)} processes, {len(self.namespaces)} namespaces, mounts, cgroups, files"

    def remaining(self) -> list[str]:
        """Return all traces of the sandbox that still exist."""
        left = [f"process {pid}" for pid, start in sorted(self.processes) if start_time(pid) == start]
        left += [f"network namespace {inode}" for inode, cookie in sorted(self.namespaces) if alive(inode, cookie)]
        needles = (self.sandbox, self.container)
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        left += [f"mount {line.split()[4]}" for line in mounts if any(needle in line for needle in needles)]
        for root in (Path("/sys/fs/cgroup"), *self.directories):
            for directory, names, files in os.walk(root):
                left += [
                    f"file {directory}/{name}" for name in (*names, *files) if any(needle in name for needle in needles)
                ]
        listed = subprocess.run(
            ["docker", "-H", f"unix://{self.docker_socket}", "ps", "-aq", "--no-trunc"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        if self.container in listed:
            left.append(f"container {self.container[:12]}")
        return left


def start_time(pid: int) -> int | None:
    """Return the start time of a process (clock ticks since boot); None if there is none, or only its exit status."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def namespaces_in_use() -> dict[int, set[int]]:
    """Return for each process the inodes of the network namespaces of its threads."""
    found: dict[int, set[int]] = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        inodes = set()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                inodes.add(os.stat(f"/proc/{pid}/task/{task}/ns/net").st_ino)
        except OSError:
            continue
        found[pid] = inodes
    return found


def mounted_namespaces() -> dict[int, str]:
    """Return the mount point of each network namespace (by inode) that a bind mount keeps."""
    points = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[3].startswith("net:["):
            points[int(fields[3][5:-1])] = fields[4]
    return points


def cookie_of(path: str) -> int:
    """Return the cookie of the network namespace at `path`, unique since the start of the host."""
    return in_namespace(path, cookie)


def alive(inode: int, cookie: int) -> bool:
    """Return whether exactly this network namespace is used by a thread or kept by a mount."""
    for path in _places_of(inode):
        try:
            if os.stat(path).st_ino == inode and cookie_of(path) == cookie:
                return True
        except OSError:
            continue  # it has ended meanwhile
    return False


def _places_of(inode: int) -> list[str]:
    """Return the paths by which the network namespace with this number can be entered now."""
    paths = [point for number, point in mounted_namespaces().items() if number == inode]
    for pid, inodes in namespaces_in_use().items():
        if inode in inodes:
            paths += [f"/proc/{pid}/task/{task}/ns/net" for task in _tasks(pid)]
    return paths


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def take(sandbox: str, container: str, netns: list[str], directories: tuple[Path, ...], docker_socket: str) -> Traces:
    """Return the traces of a running sandbox.

    A process is in a namespace if its first thread is. Threads of the daemons visit namespaces; one that stays is found
    as a namespace that is still alive.
    """
    namespaces = {os.stat(path).st_ino: cookie_of(path) for path in netns}
    processes = set()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            inside = os.stat(f"/proc/{pid}/ns/net").st_ino in namespaces
            named = sandbox in Path(f"/proc/{pid}/cgroup").read_text() or container in Path(
                f"/proc/{pid}/cmdline"
            ).read_text(errors="replace")
        except OSError:
            continue
        start = start_time(pid)
        if start is not None and (named or inside):
            processes.add((pid, start))
    return Traces(sandbox, container, frozenset(processes), frozenset(namespaces.items()), directories, docker_socket)


def left_by_server(run: Path, state: Path) -> list[str]:
    """Return what an ended server has left: processes with its directories in their command line, mounts below them."""
    needles = (f"{run}/", f"{state}/")
    left = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        except OSError:
            continue
        if any(needle in command for needle in needles):
            left.append(f"process {pid} {command.split(chr(0))[0]}")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split()[4].startswith(needles):
            left.append(f"mount {line.split()[4]}")
    return left
