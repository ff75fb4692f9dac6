"""A hostile program that uses up one of the kernel's quotas. It runs inside a sandbox with the standard library only.

`python3 quotas.py take NAME FILE` takes as much of a quota as it can, writes the number of uses to FILE, and holds them
until the program is ended. `python3 quotas.py try NAME` uses the quota once and prints `ok` or the name of the error.
"""

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator

_libc = ctypes.CDLL(None, use_errno=True)
_libc.shmat.restype = ctypes.c_void_p
_IO_SETUP, _MQ_OPEN, _MQ_UNLINK, _ADD_KEY, _FANOTIFY_INIT = 206, 240, 241, 248, 300
_F_SETPIPE_SZ, _F_GETPIPE_SZ = 1031, 1032
_SHM_LOCK, _IPC_RMID, _LOCKED = 11, 0, 65536
_USER, _PROCESSES = 1000, 40
_PIPE = 65536


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def inotify_instances() -> None:
    _checked(_libc.inotify_init1(0))


def _names() -> Iterator[str]:
    """Yield the paths of many existing inodes, so that the program can watch them without making any."""
    for directory, folders, files in os.walk("/usr"):
        for name in (*folders, *files):
            yield os.path.join(directory, name)


_inotify: list[int] = []
_paths: list[Iterator[str]] = []


def inotify_watches() -> None:
    """Watch another inode. Start a new instance when all paths have been used."""
    if not _paths:
        _inotify.append(_checked(_libc.inotify_init1(0)))
        _paths.append(_names())
    path = next(_paths[-1], None)
    if path is None:
        _paths.clear()
        return inotify_watches()
    mask = 0x02000000 | 0x200  # IN_DONT_FOLLOW and IN_DELETE
    with contextlib.suppress(PermissionError):
        _checked(_libc.inotify_add_watch(_inotify[-1], path.encode(), mask))
    return None


def pending_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
    _checked(_libc.sigqueue(os.getpid(), signal.SIGRTMIN, 0))


def timers() -> None:
    timer = ctypes.c_void_p()
    _checked(_libc.timer_create(1, None, ctypes.byref(timer)))


_held: list[socket.socket] = []


def message_queues() -> None:
    attributes = struct.pack("8q", 0, 10, 8192, 0, 0, 0, 0, 0)
    name = f"q{os.getpid()}".encode()
    _checked(_libc.syscall(_MQ_OPEN, name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600, attributes))
    _checked(_libc.syscall(_MQ_UNLINK, name))


def descriptors_in_flight() -> None:
    left, right = socket.socketpair()
    _held.append(right)
    with left:
        fds = array.array("i", [left.fileno()] * (200 if TAKING else 1))
        left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])


def pipe_pages() -> None:
    """Open a pipe.

    A pipe holds 16 pages, unless its user already has too many. To take the quota, each pipe gets the largest permitted
    size.
    """
    _, writer = os.pipe()
    if fcntl.fcntl(writer, _F_GETPIPE_SZ) < _PIPE:
        raise OSError(errno.ENOBUFS, "a pipe is smaller than it should be")
    if TAKING:
        with contextlib.suppress(PermissionError):
            fcntl.fcntl(writer, _F_SETPIPE_SZ, 1 << 20)


def locked_memory() -> None:
    segment = _checked(_libc.shmget(0, _LOCKED, 0o600))
    try:
        _checked(_libc.shmctl(segment, _SHM_LOCK, None))
        _libc.shmat(segment, None, 0)
    finally:
        _libc.shmctl(segment, _IPC_RMID, None)  # takes effect when this process ends


def processes() -> None:
    """Create a process as a user that has its own limit of processes."""
    if os.getuid() == 0:
        os.setresgid(_USER, _USER, _USER)
        os.setresuid(_USER, _USER, _USER)
    resource.setrlimit(resource.RLIMIT_NPROC, (_PROCESSES, _PROCESSES))
    if (pid := os.fork()) == 0:
        if TAKING:
            signal.pause()
        os._exit(0)
    if not TAKING:
        os.waitpid(pid, 0)


def asynchronous_io() -> None:
    context = ctypes.c_ulong(0)
    _checked(_libc.syscall(_IO_SETUP, 1024 if TAKING else 1, ctypes.byref(context)))


def keys() -> None:
    number = os.urandom(8).hex().encode()
    _checked(_libc.syscall(_ADD_KEY, b"user", number, b"x" * 32, 32, -2))


def fanotify_groups() -> None:
    _checked(_libc.syscall(_FANOTIFY_INIT, 0x200, 0))


def terminals() -> None:
    os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)


QUOTAS: dict[str, tuple[Callable[[], None], int]] = {
    "inotify_instances": (inotify_instances, 1000),
    "inotify_watches": (inotify_watches, 250_000),
    "pending_signals": (pending_signals, 120_000),
    "timers": (timers, 120_000),
    "message_queues": (message_queues, 100),
    "descriptors_in_flight": (descriptors_in_flight, 150),
    "pipe_pages": (pipe_pages, 3000),
    "locked_memory": (locked_memory, 400),
    "processes": (processes, 60),
    "asynchronous_io": (asynchronous_io, 100),
    "keys": (keys, 300),
    "fanotify_groups": (fanotify_groups, 200),
    "terminals": (terminals, 4200),
}
"""For each quota, the function that uses it once, and the maximum number of uses.

The maximum is more than the kernel's default gives one user.
"""
TAKING = sys.argv[1:2] == ["take"]
_REFUSALS, _PAUSE_SECONDS = 10, 0.03


def _take(name: str) -> int:
    """Use a quota until it is used up; return the number of uses.

    A quota counts as used up after several failures in a row, because resources that other processes of the user held
    for a moment become free again.
    """
    use, most = QUOTAS[name]
    taken = refused = 0
    while taken < most and refused < _REFUSALS:
        try:
            use()
        except OSError:
            refused += 1
            time.sleep(_PAUSE_SECONDS)
        else:
            taken, refused = taken + 1, 0
    return taken


def main() -> None:
    name = sys.argv[2]
    if TAKING:
        taken = _take(name)
        with open(f"{sys.argv[3]}.new", "w", encoding="ascii") as file:
            file.write(str(taken))
        os.rename(f"{sys.argv[3]}.new", sys.argv[3])
        signal.pause()
    try:
        QUOTAS[name][0]()
        print("ok")
    except OSError as error:
        print(errno.errorcode.get(error.errno or 0, "unknown"))


if __name__ == "__main__":
    main()
