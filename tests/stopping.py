"""Stopped processes: in a process that was sent SIGSTOP, threads can run on until one of them has taken the signal."""

import os
import signal
import time
from pathlib import Path

_SECONDS = 30.0


def stop(pid: int) -> None:
    """Stop a process; return when each of its threads has stopped. SIGCONT continues it.

    Raises:
        ProcessLookupError: there is none.
        AssertionError: it does not stop.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _SECONDS
    while any(map(_runs, Path(f"/proc/{pid}/task").glob("*/stat"))):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _runs(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in ("T", "Z", "X")
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False
