"""TCP ports of loopback for servers of tests, reserved from other sockets.

Another socket can take a port that was found free before the server binds it, and while the server is started again.
A reserved port is bound by a socket with SO_REUSEADDR that does not listen. Linux gives such a port to no socket that
asks for any port and to no outgoing connection, and refuses connections to it. A server that sets SO_REUSEADDR, as
nearly all do, can listen on it.
"""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

HOST = "127.0.0.1"
_until_exit = ExitStack()


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, 0))
        yield int(holder.getsockname()[1])


def reserve_port() -> int:
    """Return a port that is reserved until this process ends. It costs a descriptor."""
    return _until_exit.enter_context(reserved_port())
