"""What a killed hostd leaves running, and that there is only one hostd.

- Each daemon is noted with its pid and its start time: a number that was used again is never taken for it.
- The run directory is locked for as long as hostd lives; a second hostd there refuses to start.
"""

import fcntl
import os
import select
import signal
from pathlib import Path

_TERM_SECONDS = 20.0
_KILL_SECONDS = 5.0


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
    """Return when process `pid` started (clock ticks after boot), None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()[19]


def note(directory: Path, name: str, pid: int) -> None:
    """Note that daemon `name` is process `pid`."""
    (directory / f"{name}.pid").write_text(f"{pid} {start_time(pid)}\n")


def end_all(directory: Path) -> tuple[str, ...]:
    """End every daemon that is noted in `directory` and still runs; return their names. May block for seconds."""
    ended = []
    for path in sorted(directory.glob("*.pid")):
        words = path.read_text().split()
        if len(words) == 2 and words[0].isdigit() and start_time(int(words[0])) == words[1]:
            _end(int(words[0]), words[1])
            ended.append(path.stem)
        path.unlink()
    return tuple(ended)


def _end(pid: int, started: str) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # Looked at again behind the pidfd: it is this process or none.
        if start_time(pid) != started:
            return
        for number, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            signal.pidfd_send_signal(fd, number)
            if select.select([fd], [], [], seconds)[0]:
                return
    except ProcessLookupError:
        return
    finally:
        os.close(fd)
