"""A zygote that records the system calls of its workers: `python -m tests.system.calls ZYGOTE.json NOTES MODE`.

MODE `all` allows and records every call of a confined worker. `gateway/calls.py` was derived from such notes. MODE
`refused` keeps the filter and records the calls that it refuses: the notes of an honest worker must be empty. This mode
does not record files that libraries search for, because the empty root does not have them either. Nor does it record
SO_LINGER, which `wire.descriptors` tries on descriptors from a peer, and can do without. The notes are lines of JSON:
number and arguments. A process beside the zygote writes them. The kernel stops a worker at a call until the call has
been recorded (seccomp_unotify(2)).
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import select
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from gateway import calls, confine, spawn, zygote

_NEW_LISTENER, _TSYNC, _TSYNC_ESRCH = 1 << 3, 1, 1 << 4
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTIFY = 0x7FC00000
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")
_CONTINUE = 1
_GETFD = 438
_FILES = {"x86_64": {21, 89, 257, 262}, "aarch64": {48, 56, 78, 79}}[platform.machine()]
"""access or faccessat, readlink or readlinkat, openat, newfstatat."""

_libc = ctypes.CDLL(None, use_errno=True)


def everything(*_arguments: object) -> bytes:
    """A filter that reports each call to the listener."""
    return struct.pack("HBBI", 6, 0, 0, _NOTIFY)


def main(arguments: list[str]) -> int:
    config, notes, mode = arguments
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        os.closerange(3, ours.fileno())
        os.closerange(ours.fileno() + 1, 1 << 14)
        _listen(ours, Path(notes), lets_through=mode == "all")
        os._exit(0)
    ours.close()
    close_others = spawn._close_others

    def close(keep: Iterable[int]) -> None:
        close_others({*keep, theirs.fileno()})

    def install(pinned: int = -1) -> None:
        code = everything() if mode == "all" else calls.assemble(platform.machine(), os.getpid(), pinned, _NOTIFY)
        program = confine._Program(len(code) // 8, code)
        os.close(expected := os.dup(0))  # The listener gets the lowest free number.
        theirs.send(struct.pack("II", os.getpid(), expected))
        number = ctypes.c_long(calls.number("seccomp", platform.machine()))
        flags = ctypes.c_uint(_NEW_LISTENER | _TSYNC | _TSYNC_ESRCH)
        if _libc.syscall(number, ctypes.c_uint(1), flags, ctypes.byref(program)) < 0:
            raise OSError(ctypes.get_errno(), "no listener")

    spawn._close_others = close
    confine.install = install  # type: ignore[assignment]
    return zygote.main([config])


def _listen(workers: socket.socket, notes: Path, *, lets_through: bool) -> None:
    poll = select.poll()
    poll.register(workers, select.POLLIN)
    with notes.open("a", buffering=1) as out:
        while True:
            for fd, event in poll.poll():
                if fd == workers.fileno():
                    if not (packet := workers.recv(8)):
                        return
                    with contextlib.suppress(ProcessLookupError):  # The worker was killed.
                        poll.register(_taken(*struct.unpack("II", packet)), select.POLLIN)
                elif event & select.POLLIN:
                    with contextlib.suppress(FileNotFoundError):  # The call was interrupted.
                        _note(fd, out.write, lets_through=lets_through)
                else:
                    poll.unregister(fd)
                    os.close(fd)


def _taken(pid: int, fd: int) -> int:
    """Return the worker's listener, as soon as the worker has one.

    Raises:
        ProcessLookupError: the worker has ended.
    """
    pidfd = os.pidfd_open(pid)
    try:
        while True:
            copy = _libc.syscall(ctypes.c_long(_GETFD), pidfd, fd, 0)
            if copy >= 0 and "seccomp" in os.readlink(f"/proc/self/fd/{copy}"):
                return int(copy)
            if copy >= 0:
                os.close(copy)
            elif ctypes.get_errno() != errno.EBADF:
                raise OSError(ctypes.get_errno(), "pidfd_getfd")
    finally:
        os.close(pidfd)


def _note(fd: int, write: Callable[[str], object], *, lets_through: bool) -> None:
    buffer = bytearray(_NOTIFICATION.size)
    fcntl.ioctl(fd, _RECEIVE, buffer)
    ident, _pid, _flags, number, _arch, _ip, *values = _NOTIFICATION.unpack(buffer)
    lingers = number == calls.number("setsockopt", platform.machine()) and values[1:3] == [1, socket.SO_LINGER]
    if lets_through or not (number in _FILES or lingers):
        write(json.dumps([number, *values]) + "\n")
    answer = _ANSWER.pack(ident, 0, 0, _CONTINUE) if lets_through else _ANSWER.pack(ident, 0, -errno.EPERM, 0)
    fcntl.ioctl(fd, _SEND, bytearray(answer))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
