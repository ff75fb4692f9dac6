"""Descriptors from a peer: the kernel refuses them, or they are closed where a close cannot block the event loop.

The last close of a file can block as long as its sender wants (SO_LINGER on a socket with unsent bytes, also for a
socket that waits inside another unix socket). It happens in the process that holds the file: in `close`, in a `recv`
without room for descriptors, and in the `close` of a socket with the file in its queue. An event loop must not do any
of these with a file of a hostile peer.

- `refuse` makes the kernel refuse descriptors at the sender (SO_PASSRIGHTS, Linux 6.16). This is the usual case.
- On an older kernel every receive has room for all descriptors of a message. `discard` and `release` close them in
  separate threads.
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
"""The kernel's limit for one message (SCM_MAX_FD)."""
ROOM: Final = socket.CMSG_SPACE(MOST * 4)
_SO_PASSRIGHTS: Final = 83
_NO_LINGER: Final = struct.pack("ii", 0, 0)
_THREADS: Final = 16

_waiting: "queue.SimpleQueue[int]" = queue.SimpleQueue()
_free = threading.Semaphore(_THREADS)


def refuse(sock: socket.socket) -> bool:
    """Refuse descriptors on `sock`, and on sockets that it accepts. False if the kernel cannot do this."""
    return _pass_rights(sock, 0)


def allow(sock: socket.socket) -> None:
    """Permit descriptors on `sock` again."""
    _pass_rights(sock, 1)


def _pass_rights(sock: socket.socket, value: int) -> bool:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, value)
    except OSError:
        return False
    return True


def collected(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """Return the descriptors of a message; the caller owns them."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def discard(fds: Sequence[int]) -> None:
    """Close a peer's descriptors without blocking the caller."""
    for fd in fds:
        with contextlib.suppress(OSError):  # not a socket
            linger = os.dup(fd)
            with socket.socket(fileno=linger) as sock:  # not the last reference, so this close cannot block
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        _waiting.put(fd)
    if fds and _free.acquire(blocking=False):
        threading.Thread(target=_close_waiting, name="wire-discard", daemon=True).start()


def release(sock: socket.socket) -> None:
    """Close a connection that may have descriptors in its queue, without blocking the caller."""
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
