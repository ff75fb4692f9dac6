"""Unix sockets with names: bound by one process, listened on by another, and connected to only if the right one serves.

- `bind_unix` replaces a name atomically: at no moment is the name free. It is for root, in a directory that no other
  user can write.
- The process that serves calls `listen` itself. The kernel takes the credentials that clients see (SO_PEERCRED) from
  the last caller of `listen`, not from the process that has bound the socket: a client sees the daemon.
- `connect_unix` compares the server's uid before the caller has the socket: nothing was sent to another server.
"""

import asyncio
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from wire import descriptors

LISTEN_FD = "SALLYPORT_LISTEN_FD"
"""The environment variable that holds the number of a daemon's inherited listening socket."""
BACKLOG = 64
ROOT = 0
_PROBE_SECONDS = 5.0
_TEMPORARY = ".new"
"""Shorter than any name of ours: the length of a socket's path is limited."""


class WrongServer(ConnectionError):
    """The socket is served by another user than expected; nothing was sent."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as the kernel reports it (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the process at the other end. For a socket pair: the one that made the pair."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Peer(*struct.unpack("3i", data))


def bind_unix(path: str | os.PathLike[str], mode: int = 0o600, owner: tuple[int, int] | None = None) -> socket.socket:
    """Return a stream socket that is bound to `path`, in place of whatever has that name, and does not listen yet.

    Args:
        path: its directory must be writable by this process only.
        mode: permission bits of the socket file.
        owner: (uid, gid) of the socket file; needs root.

    Raises:
        OSError: it cannot be bound; what had the name has it still.
    """
    name = Path(path)
    temporary = name.with_name(_TEMPORARY)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        temporary.unlink(missing_ok=True)
        previous = os.umask(0o777)
        try:
            sock.bind(str(temporary))
        finally:
            os.umask(previous)
        if owner is not None:
            os.chown(temporary, *owner)
        os.chmod(temporary, mode)
        temporary.rename(name)
    except BaseException:
        sock.close()
        raise
    return sock


def inherited_listener() -> socket.socket:
    """Return the stream socket that this process was started with, bound to its name or address.

    Raises:
        ValueError: the environment names no such socket.
    """
    text = os.environ.pop(LISTEN_FD, "")
    fd = int(text) if text.isascii() and text.isdecimal() else -1
    try:
        if fd < 3 or not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise ValueError
        sock = socket.socket(fileno=fd)
        os.set_inheritable(fd, False)
        if sock.type != socket.SOCK_STREAM:
            raise ValueError
    except (OSError, ValueError):
        raise ValueError(f"{LISTEN_FD} names no inherited stream socket") from None
    return sock


def check_server(sock: socket.socket, path: str | os.PathLike[str], uid: int) -> None:
    """Check that a process of user `uid` serves the socket at `path`, which `sock` is connected to.

    Raises:
        WrongServer: another user's process does.
    """
    if (found := peer_of(sock).uid) != uid:
        raise WrongServer(f"{os.fspath(path)} is served by uid {found}, not by {uid}")


def probe_server(path: str | os.PathLike[str], uid: int) -> None:
    """Connect to the socket at `path` and check its server, as `check_server` does; for clients of other libraries.

    Raises:
        WrongServer: another user's process serves it.
        OSError: nothing listens there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_PROBE_SECONDS)
        sock.connect(os.fspath(path))
        check_server(sock, path, uid)


async def connect_unix(path: str | os.PathLike[str], uid: int) -> socket.socket:
    """Return a non-blocking socket that is connected to the server at `path`, a process of user `uid`.

    Raises:
        WrongServer: another user's process serves it.
        OSError: nothing listens there, or this process may not connect.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    descriptors.refuse(sock)  # before the server can pass any
    try:
        await asyncio.get_running_loop().sock_connect(sock, os.fspath(path))
        check_server(sock, path, uid)
    except BaseException:
        sock.close()
        raise
    return sock
