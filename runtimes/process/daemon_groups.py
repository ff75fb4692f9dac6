"""Control groups of the daemons: a limit on the memory of each, besides the limits that hostd sets on requests.

- A daemon joins its group before its first instruction of Sallyport's code (`enter`). An adopted one is in it
  already.
- The kernel kills a daemon that exceeds its limit, and hostd starts it again. The host and the other daemons
  continue.
- On cgroup v2 a group also distributes processor time. There this group has three times the default CPU weight.
"""

import contextlib
import hashlib
from pathlib import Path
from typing import Final

from runtimes.process.cgroups import Hierarchies, find

_BASE: Final = "sallyport-daemons"
_WEIGHT: Final = "300"
_SWAP: Final = frozenset(("memory.memsw.limit_in_bytes", "memory.swap.max"))
"""Absent where the kernel does not account for swap."""


class DaemonGroups:
    """The groups of one hostd's daemons; their parent directory is derived from hostd's run directory."""

    def __init__(self, run_dir: str, hierarchies: Hierarchies | None = None) -> None:
        self._hierarchies = hierarchies or find(Path("/proc/self/mountinfo").read_text())
        self._instance = hashlib.sha256(run_dir.encode()).hexdigest()[:12]

    def _root(self) -> Path:
        roots = self._hierarchies.roots
        if self._hierarchies.version == 2:
            return roots[0]
        return next(root for root in roots if (root / "memory.limit_in_bytes").exists())

    def create(self, name: str, memory_bytes: int) -> Path:
        """Make group `name`, or reuse that of a former process; return its directory.

        Raises:
            OSError: its limit cannot be set.
        """
        root = self._root()
        directory = root / _BASE / self._instance / name
        if self._hierarchies.version == 2:
            for parent in (root, root / _BASE, root / _BASE / self._instance):
                parent.mkdir(exist_ok=True)
                (parent / "cgroup.subtree_control").write_text("+memory")
            if (weight := root / _BASE / "cpu.weight").exists():
                weight.write_text(_WEIGHT)
            limits = {"memory.max": str(memory_bytes), "memory.swap.max": "0"}
        else:
            limits = dict.fromkeys(("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), str(memory_bytes))
        directory.mkdir(parents=True, exist_ok=True)
        for file, value in limits.items():
            if file not in _SWAP or (directory / file).exists():
                _write(directory / file, value)
        return directory

    def sweep(self) -> None:
        """Remove all groups without a process."""
        instance = self._root() / _BASE / self._instance
        groups = [path for path in instance.iterdir() if path.is_dir()] if instance.is_dir() else []
        for directory in (*groups, instance, instance.parent):
            with contextlib.suppress(OSError):
                directory.rmdir()


def _write(file: Path, value: str) -> None:
    """Set a limit. On v1 the limit with swap is never below the one without, so if necessary it is raised first."""
    try:
        file.write_text(value)
    except OSError:
        above = file.with_name("memory.memsw.limit_in_bytes")
        if not above.exists() or above == file:
            raise
        above.write_text(value)
        file.write_text(value)
