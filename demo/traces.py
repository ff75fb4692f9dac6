"""What a sandbox has on the host, by process, inode and mount: taken while it lives, looked for when it is gone."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Traces:
    """The traces of one sandbox, and where to look for them again."""

    sandbox: str
    container: str
    processes: frozenset[tuple[int, int]]
    """(pid, start time) of every process in its namespaces or cgroups."""
    namespaces: frozenset[int]
    """Inodes of its network namespaces."""
    directories: tuple[Path, ...]
    """Where files of it may stand."""
    docker_socket: str

    @property
    def described(self) -> str:
        """What was looked for, in words."""
        return f"{len(self.processes)} processes, {len(self.namespaces)} namespaces, mounts, cgroups, files"

    def remaining(self) -> list[str]:
        """Everything of the sandbox that is still there."""
        left = [f"process {pid}" for pid, start in sorted(self.processes) if start_time(pid) == start]
        alive = {inode for inodes in namespaces_in_use().values() for inode in inodes}
        left += [f"network namespace {inode}" for inode in sorted(self.namespaces & (alive | mounted_namespaces()))]
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
    """When a process started (clock ticks since boot); None if there is none, or only its exit status."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def namespaces_in_use() -> dict[int, set[int]]:
    """For each process, the inodes of the network namespaces of its threads."""
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


def mounted_namespaces() -> set[int]:
    """Inodes of the network namespaces that a bind mount keeps."""
    inodes = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[3].startswith("net:["):
            inodes.add(int(fields[3][5:-1]))
    return inodes


def take(sandbox: str, container: str, netns: list[str], directories: tuple[Path, ...], docker_socket: str) -> Traces:
    """Take the traces of a living sandbox."""
    namespaces = frozenset(os.stat(path).st_ino for path in netns)
    processes = set()
    for pid, inodes in namespaces_in_use().items():
        try:
            named = sandbox in Path(f"/proc/{pid}/cgroup").read_text() or container in Path(
                f"/proc/{pid}/cmdline"
            ).read_text(errors="replace")
        except OSError:
            continue
        start = start_time(pid)
        if start is not None and (named or inodes & namespaces):
            processes.add((pid, start))
    return Traces(sandbox, container, frozenset(processes), namespaces, directories, docker_socket)


def left_by_server(run: Path, state: Path) -> list[str]:
    """What a server that has ended left: processes that name its directories, mounts below them."""
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
