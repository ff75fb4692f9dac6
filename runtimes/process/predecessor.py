"""The processes that a killed hostd leaves running, and the lock that permits only one hostd.

- A note of each process has its pid, its start time and a digest of its program. So another process that reuses the
  number is never mistaken for it, and a process is adopted only if hostd would start it in exactly the same way.
- The run directory is locked while hostd runs; a second hostd there refuses to start.
"""

import fcntl
import hashlib
import os
import signal
from collections.abc import Collection
from functools import cache
from pathlib import Path

from runtimes.process.adopted import Adopted, readable_within

_TERM_SECONDS = 20.0
_KILL_SECONDS = 5.0
_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("wire", "policy", "audit", "vault", "gateway", "runtimes", "lifecycle")


def lock(directory: Path) -> int:
    """Lock `directory` for this process; return the descriptor that holds the lock.

    Raises:
        BlockingIOError: another hostd has it.
    """
    fd = os.open(directory / "hostd.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def start_time(pid: int) -> str | None:
    """Return the start time of process `pid` (clock ticks after boot), None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]


def parent(pid: int) -> int | None:
    """Return the parent of process `pid`, None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])


@cache
def code() -> str:
    """Return a digest of the present code: a daemon of another version is not adopted."""
    stamps = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            status = path.stat()
            stamps.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return stamps.hexdigest()


def digest(*parts: object) -> str:
    """Return the identity of a process that is started from `parts`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def note(directory: Path, name: str, pid: int, identity: str = "-") -> None:
    """Write the note that `name` is process `pid`, with its `identity`."""
    temporary = directory / f"{name}.pid.new"
    temporary.write_text(f"{pid} {start_time(pid)} {identity}\n")
    temporary.rename(directory / f"{name}.pid")


def any_left(directory: Path) -> bool:
    """Return whether there is a note in `directory`."""
    return any(directory.glob("*.pid"))


def take(directory: Path, name: str, identity: str) -> Adopted | None:
    """Return the noted process `name` if it still runs and was started with `identity`."""
    found = _open(directory / f"{name}.pid")
    if found is None:
        return None
    pid, fd, noted = found
    if noted != identity:
        os.close(fd)
        return None
    return Adopted(pid, fd)


def find(directory: Path, name: str) -> Adopted | None:
    """Return the noted process `name` if it still runs, with any identity."""
    found = _open(directory / f"{name}.pid")
    return None if found is None else Adopted(found[0], found[1])


def end(directory: Path, name: str, patience: float = _TERM_SECONDS) -> bool:
    """End the noted process `name` and remove the note; return whether the process ran. Can block for seconds.

    Args:
        patience: seconds until it is killed.
    """
    path = directory / f"{name}.pid"
    found = _open(path)
    if found is not None:
        _, fd, _ = found
        try:
            for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, _KILL_SECONDS)):
                signal.pidfd_send_signal(fd, number)
                if readable_within(fd, seconds):
                    break
        except ProcessLookupError:
            pass
        finally:
            os.close(fd)
    path.unlink(missing_ok=True)
    return found is not None


def end_all(directory: Path, spared: Collection[str] = (), patience: float = _TERM_SECONDS) -> tuple[str, ...]:
    """End every process noted in `directory` except `spared`; return the names of those that ran. Can block."""
    names = sorted(path.stem for path in directory.glob("*.pid"))
    return tuple(name for name in names if name not in spared and end(directory, name, patience))


def _open(path: Path) -> tuple[int, int, str] | None:
    """Return (pid, pidfd, identity) of a noted process that runs, None if there is none."""
    try:
        words = path.read_text().split()
    except OSError:
        return None
    if len(words) not in (2, 3) or not words[0].isdigit() or int(words[0]) < 1:
        return None
    pid = int(words[0])
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    # Checked after the pidfd was opened, so that the check is about the pidfd's process.
    if start_time(pid) != words[1] or readable_within(fd, 0):
        os.close(fd)
        return None
    return pid, fd, words[2] if len(words) == 3 else ""
