"""Named unix sockets. One process binds a socket, another one listens on it, and a client checks the server's uid.

- `bind_unix` replaces a name atomically, so the name is never free. Only root uses it, in a directory that no other
  user can write.
- The serving process calls `listen` itself. The credentials that clients see (SO_PEERCRED) are those of the last caller
  of `listen`, not of the process that bound the socket.
- `connect_unix` compares the server's uid before it returns the socket, so nothing is sent to a wrong server.
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
"""The environment variable with the number of a daemon's inherited listening socket."""
BACKLOG = 64
ROOT = 0
_PROBE_SECONDS = 5.0
_TEMPORARY = ".new"
"""A temporary name, shorter than all final names: the length of a socket's path is limited."""


class WrongServer(ConnectionError):
    """A process of another user than expected serves the socket; nothing was sent."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as the kernel reports it (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the process at the other end. For a socket pair this is the process that made the pair."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Peer(*struct.unpack("3i", data))


def bind_unix(path: str | os.PathLike[str], mode: int = 0o600, owner: tuple[int, int] | None = None) -> socket.socket:
    """Return a stream socket that is bound to `path` and does not listen yet. It replaces an existing file.

    Args:
        path: its directory must be writable by this process only.
        mode: permission bits of the socket file.
        owner: (uid, gid) of the socket file; needs root.

    Raises:
        OSError: the socket cannot be bound; an existing file is unchanged.
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
    """Return the bound stream socket that this process has inherited.

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
    """Check that a process of user `uid` serves the socket at `path`, to which `sock` is connected.

    Raises:
        WrongServer: a process of another user serves it.
    """
    if (found := peer_of(sock).uid) != uid:
        raise WrongServer(f"{os.fspath(path)} is served by uid {found}, not by {uid}")


def probe_server(path: str | os.PathLike[str], uid: int) -> None:
    """Connect to the socket at `path` and check its server like `check_server`, for other libraries' clients.

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
    descriptors.refuse(sock)  # before the server can send any
    try:
        await asyncio.get_running_loop().sock_connect(sock, os.fspath(path))
        check_server(sock, path, uid)
    except BaseException:
        sock.close()
        raise
    return sock
