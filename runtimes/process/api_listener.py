"""The socket on which the API listens. It is made once, and held by processes that outlive `serve`.

`sallyport serve` makes it before anything else, and keeps it as the watchdog. hostd inherits it, and passes it to
each `serve`. A hostd without a watchdog makes it itself.

- The port is never free while a server runs: connections wait in the socket while `serve` is started again. Only an
  orderly end of the server closes it (`end`).
- It listens from the moment of its creation. The reason: SO_REUSEADDR (for connections of a former server in
  TIME_WAIT) would let another process bind the address of a socket that is bound and does not listen.
- When watchdog and hostd have ended, only `serve` has it. The next server takes it from that process (pidfd_getfd),
  and accepts only a socket that listens at exactly this address.
"""

import contextlib
import ctypes
import errno
import os
import socket
from pathlib import Path

from runtimes.process import predecessor
from wire.sockets import LISTEN_FD

API_FD = "SALLYPORT_API_FD"
"""The environment variable that passes the number of the socket to the watchdog and hostd."""
_BACKLOG = 2048
_PIDFD_GETFD = 438  # on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address.

    Raises:
        OSError: the address is taken, or not one of this host; the text names it.
    """
    try:
        return socket.create_server((host, port), family=_family(host), backlog=_BACKLOG)
    except OSError as error:
        reason = "it is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {reason}") from error


def obtain(host: str, port: int, notes: Path) -> socket.socket:
    """Return a socket that listens on an address: a new one, or that of a `serve` which a killed server has left.

    Args:
        notes: the directory in which hostd notes its processes.

    Raises:
        OSError: another program has the address, or it is not one of this host; the text names it.
    """
    try:
        return bind(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or (taken := _left(host, port, notes)) is None:
            raise
        return taken


def hand_over(listener: socket.socket) -> None:
    """Pass the socket to the program that this process executes next (`inherited`); the caller no longer owns it."""
    listener.set_inheritable(True)
    os.environ[API_FD] = str(listener.detach())


def inherited() -> socket.socket | None:
    """Return the socket that the watchdog has passed to this process; None if there is no watchdog."""
    number = os.environ.pop(API_FD, "")
    if not number.isdigit():
        return None
    listener = socket.socket(fileno=int(number))
    listener.set_inheritable(False)
    return listener


def end(listener: socket.socket) -> None:
    """Refuse connections from now on, in each process that has the socket, and close it here."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _left(host: str, port: int, notes: Path) -> socket.socket | None:
    """Return the socket of the `serve` that is noted in `notes`, if that process runs and listens at this address."""
    process = predecessor.find(notes, "serve")
    if process is None:
        return None
    try:
        variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        name = f"{LISTEN_FD}=".encode()
        number = next((int(item.removeprefix(name)) for item in variables if item.startswith(name)), -1)
        fd = _libc.syscall(_PIDFD_GETFD, process.pidfd, number, 0)
        if fd < 0:
            return None
        sock = socket.socket(fileno=fd)
        address = socket.getaddrinfo(host, port, _family(host), socket.SOCK_STREAM)[0][4]
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname() == address:
            return sock
        sock.close()
    except (OSError, ValueError):
        return None
    return None
