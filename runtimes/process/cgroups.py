"""Control groups of gateway workers: memory, processes, cpu; cgroup v1 and v2.

- Each worker has one group below `sallyport/<instance>/`. It is made before the fork; the worker joins it before its
  first byte.
- All workers together have the same CPU weight as all containers, so neither can displace the other.
- To remove a group kills the processes in it. The removal succeeds when the directory no longer exists.
"""

import contextlib
import errno
import hashlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CONTROLLERS = ("memory", "cpu", "pids")
_SETTLE_SECONDS = 2.0
_WEIGHT = 1  # of all workers, against 1 of all containers
PERIOD = 20_000
"""Microseconds of a period of processor time. It is short, because a group that has used its share waits for the next
one."""
_LONG_PERIOD = 100_000
_LEAST_QUOTA = 1000  # microseconds; the kernel accepts no lower value


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Limits of one worker. `cpus` is a share of time: 2.0 is two whole processors."""

    memory_bytes: int = 512 * 1024 * 1024
    pids: int = 64
    cpus: float = 1.0


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where this host's controllers are mounted; `version` is 1 or 2."""

    version: int
    roots: tuple[Path, ...]


def controller_mounts(mountinfo: str) -> tuple[Path | None, dict[str, Path]]:
    """Return the mount point of cgroup v2, and that of each controller of v1."""
    unified: Path | None = None
    legacy: dict[str, Path] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point, kind = Path(before.split(" ")[4]), after.split(" ")[0]
        if kind == "cgroup2":
            unified = point
        elif kind == "cgroup":
            legacy |= dict.fromkeys(after.split(" ")[-1].split(","), point)
    return unified, legacy


def find(mountinfo: str) -> Hierarchies:
    """Find the hierarchies in the text of /proc/self/mountinfo.

    Raises:
        OSError: a controller that workers need is not mounted.
    """
    unified, legacy = controller_mounts(mountinfo)
    found = {legacy[name] for name in _CONTROLLERS if name in legacy}
    if legacy.keys() >= set(_CONTROLLERS):
        return Hierarchies(1, tuple(sorted(found)))
    if unified is not None and not found:
        return Hierarchies(2, (unified,))
    raise OSError("no cgroup hierarchy with memory, cpu and pids")


def processor_time(nanos: int) -> tuple[int, int]:
    """Return period and quota, in microseconds, for `nanos` billionths of a processor; the minimum is a hundredth."""
    period = PERIOD if nanos * PERIOD >= _LEAST_QUOTA * 10**9 else _LONG_PERIOD
    return period, max(_LEAST_QUOTA, nanos * period // 10**9)


def settings(version: int, limits: GroupLimits) -> Mapping[str, str]:
    """Return file names and the values to write; on v1 each hierarchy has some of the files."""
    quota = int(limits.cpus * PERIOD)
    if version == 2:
        return {
            "memory.max": str(limits.memory_bytes),
            "memory.swap.max": "0",
            "pids.max": str(limits.pids),
            "cpu.max": f"{quota} {PERIOD}",
        }
    return {
        "memory.limit_in_bytes": str(limits.memory_bytes),
        "memory.memsw.limit_in_bytes": str(limits.memory_bytes),
        "pids.max": str(limits.pids),
        "cpu.cfs_period_us": str(PERIOD),
        "cpu.cfs_quota_us": str(quota),
    }


_OPTIONAL = frozenset(("memory.memsw.limit_in_bytes", "memory.swap.max"))
"""Absent where the kernel does not account for swap."""


class Cgroups:
    """The groups of one hostd; their parent directory is derived from hostd's run directory."""

    def __init__(self, run_dir: str, hierarchies: Hierarchies | None = None) -> None:
        self.hierarchies = hierarchies or find(Path("/proc/self/mountinfo").read_text())
        self.parent = Path("sallyport") / hashlib.sha256(run_dir.encode()).hexdigest()[:12]

    def _directories(self, name: str) -> tuple[Path, ...]:
        return tuple(root / self.parent / name for root in self.hierarchies.roots)

    def create(self, name: str, limits: GroupLimits) -> tuple[Path, ...]:
        """Make group `name` with `limits`; return the directories to join.

        Raises:
            OSError: a limit cannot be set; nothing is left.
        """
        directories = self._directories(name)
        try:
            for directory in directories:
                if self.hierarchies.version == 2:
                    self._delegate(directory)
                directory.mkdir(parents=True)
            self._weigh()
            for file, value in settings(self.hierarchies.version, limits).items():
                places = [directory / file for directory in directories if (directory / file).exists()]
                if not places and file not in _OPTIONAL:
                    raise OSError(f"no {file} in any hierarchy")
                for place in places:
                    place.write_text(value)
        except BaseException:
            self.remove(name)
            raise
        return directories

    def _weigh(self) -> None:
        """Set the CPU weight of the parent group of all workers; its siblings are Docker's or systemd's groups."""
        file, weight = ("cpu.weight", 100) if self.hierarchies.version == 2 else ("cpu.shares", 1024)
        for root in self.hierarchies.roots:
            place = root / self.parent.parts[0] / file
            if place.exists():
                place.write_text(str(weight * _WEIGHT))

    def _delegate(self, directory: Path) -> None:
        for parent in (directory.parents[2], directory.parents[1], directory.parents[0]):
            parent.mkdir(exist_ok=True)
            (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in _CONTROLLERS))

    def remove(self, name: str) -> tuple[str, ...]:
        """Kill the processes in group `name` and remove it; return what is left. Blocks for at most some seconds."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        left = [directory for directory in self._directories(name) if directory.exists()]
        while left:
            for directory in left:
                with contextlib.suppress(OSError):
                    for pid in (directory / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                with contextlib.suppress(OSError):
                    directory.rmdir()
            left = [directory for directory in left if directory.exists()]
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        return tuple(f"cgroup {directory}" for directory in left)

    def end_all(self, seconds: float) -> None:
        """Give the processes in all groups of this instance this time to end by themselves, then kill the others.

        A killed process can still be in a system call. This waits until it has ended, at most `_SETTLE_SECONDS`.
        """
        grace = time.monotonic() + seconds
        while (pids := self._pids()) and (now := time.monotonic()) < grace + _SETTLE_SECONDS:
            for pid in pids if now >= grace else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _pids(self) -> set[int]:
        found: set[int] = set()
        for root in self.hierarchies.roots:
            for procs in (root / self.parent).glob("*/cgroup.procs"):
                with contextlib.suppress(OSError):
                    found.update(map(int, procs.read_text().split()))
        return found

    def sweep(self) -> tuple[str, ...]:
        """Remove all groups of this instance, and the instance's own directories; return what is left."""
        names = {
            entry.name
            for root in self.hierarchies.roots
            if (root / self.parent).is_dir()
            for entry in (root / self.parent).iterdir()
            if entry.is_dir()
        }
        residue = [item for name in sorted(names) for item in self.remove(name)]
        for root in self.hierarchies.roots:
            for directory in (root / self.parent, (root / self.parent).parent):
                with contextlib.suppress(OSError):
                    directory.rmdir()
        return tuple(residue)


def _of_container(container: str) -> tuple[Path, Path]:
    """Return the paths of a container's group in both layouts of Docker: of its cgroupfs driver, and of systemd's."""
    return Path("docker", container), Path("system.slice", f"docker-{container}.scope")


class Processor:
    """Reads the processor time of containers, and sets CPU weights of containers and workers; one object per hostd.

    Raises:
        OSError: the host has no such controllers.
    """

    def __init__(self, cgroups: "Cgroups", mountinfo: str | None = None) -> None:
        table = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
        unified, legacy = controller_mounts(table)
        self._version = cgroups.hierarchies.version
        self._parent = cgroups.parent
        points = (unified, unified) if self._version == 2 else (legacy.get("cpu"), legacy.get("cpuacct"))
        if points[0] is None or points[1] is None:
            raise OSError("no cgroup hierarchy that accounts for processor time")
        self._weights, self._times = points[0], points[1]

    def seconds(self, container: str) -> float:
        """Return the processor time that a container has used.

        Raises:
            OSError, ValueError: it has no group, or not a readable one.
        """
        group = container_group(self._times, container)
        if self._version == 1:
            return int((group / "cpuacct.usage").read_text()) / 1e9
        fields = dict(line.split(" ", 1) for line in (group / "cpu.stat").read_text().splitlines())
        return int(fields["usage_usec"]) / 1e6

    def weigh(self, container: str, worker: str, *, share: float) -> None:
        """Set the CPU weight of a container and of the worker in group `worker` to this share of the default.

        Raises:
            OSError: it could not be set for both.
        """
        file, usual = ("cpu.weight", 100) if self._version == 2 else ("cpu.shares", 1024)
        for group in (container_group(self._weights, container), self._weights / self._parent / worker):
            (group / file).write_text(str(round(usual * share)))


def container_group(point: Path, container: str) -> Path:
    """Return the group of a container below a mount point of control groups.

    Raises:
        FileNotFoundError: it has none.
    """
    for name in _of_container(container):
        if (point / name).is_dir():
            return point / name
    raise FileNotFoundError(errno.ENOENT, f"no group of container {container[:12]}")


def remove_container_groups(container: str, mountinfo: str | None = None) -> tuple[str, ...]:
    """Remove Docker's groups of a container that no longer exists; return those that remain.

    Docker does this itself, unless its shim was killed before. Both layouts are tried: `docker/<id>` of the cgroupfs
    driver and systemd's scope. Blocks for at most `_SETTLE_SECONDS`, because a group can be removed only after the
    last process in it has been reaped.
    """
    text = Path("/proc/self/mountinfo").read_text() if mountinfo is None else mountinfo
    kinds = (" - cgroup ", " - cgroup2 ")
    points = [Path(line.split(" ")[4]) for line in text.splitlines() if any(kind in line for kind in kinds)]
    names = _of_container(container)
    deadline = time.monotonic() + _SETTLE_SECONDS
    while left := [group for point in points for name in names if (group := point / name).exists()]:
        for group in left:
            for directory, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return tuple(f"cgroup {group}" for group in left if group.exists())
