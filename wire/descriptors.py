"""Descriptors that a peer passes: refused by the kernel, or taken and closed where their closing blocks nothing.

The last close of a file can block for as long as its sender likes (SO_LINGER on a socket with unsent bytes, also
one that waits inside another unix socket), and it runs in the process that holds the file: in `close`, in a `recv`
without room for descriptors, and in the `close` of a socket in whose queue the file waits. An event loop must do none
of them with a file of a peer that may be hostile.

- `refuse` has the kernel refuse them at the sender (SO_PASSRIGHTS, Linux 6.16). That is the usual case.
- On an older kernel every receive has room for all that one message can carry, and `discard` and `release` close on
  threads of their own.
"""

import array
import contextlib
import os
import queue
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Final

MOST: Final = 253
"""The kernel's own bound for one message (SCM_MAX_FD)."""
ROOM: Final = socket.CMSG_SPACE(MOST * 4)
_SO_PASSRIGHTS: Final = 83
_NO_LINGER: Final = struct.pack("ii", 0, 0)
_THREADS: Final = 16

_waiting: "queue.SimpleQueue[int]" = queue.SimpleQueue()
_free = threading.Semaphore(_THREADS)


def refuse(sock: socket.socket) -> bool:
    """Have no descriptor passed to `sock`, or to what a listening `sock` accepts; False if the kernel cannot."""
    return _pass_rights(sock, 0)


def allow(sock: socket.socket) -> None:
    """Let descriptors be passed to `sock` again."""
    _pass_rights(sock, 1)


def _pass_rights(sock: socket.socket, value: int) -> bool:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, value)
    except OSError:
        return False
    return True


def collected(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors that came with a message; they are the caller's."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def discard(fds: Sequence[int]) -> None:
    """Close a peer's descriptors without waiting for it."""
    for fd in fds:
        with contextlib.suppress(OSError):  # not a socket
            linger = os.dup(fd)
            with socket.socket(fileno=linger) as sock:  # not the last reference: this close ends nothing
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        _waiting.put(fd)
    if fds and _free.acquire(blocking=False):
        threading.Thread(target=_close_waiting, name="wire-discard", daemon=True).start()


def release(sock: socket.socket) -> None:
    """Close a connection in whose queue descriptors may wait, without waiting for theirs."""
    if sock.fileno() < 0:
        return
    copy = os.dup(sock.fileno())
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
    discard([copy])


def _close_waiting() -> None:
    try:
        while True:
            try:
                fd = _waiting.get_nowait()
            except queue.Empty:
                return
            with contextlib.suppress(OSError):
                os.close(fd)
    finally:
        _free.release()
