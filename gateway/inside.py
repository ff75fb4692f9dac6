"""Makes the worker's sockets in the gateway namespace. The worker itself runs in the upstream namespace.

A socket stays in the network namespace of the thread that made it. One thread of the worker enters the gateway
namespace. It makes the listeners while the process is still root (port 53). Later it makes the sockets that connect to
the sandbox. All other threads remain in the upstream namespace.

- Every socket towards the sandbox comes from `InsideSockets`. No other part of the worker can reach the sandbox.
- Sockets that connect are bound to the inner interface, so they reach only this sandbox.
- This module makes no upstream socket.
"""

import asyncio
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

PROXY_PORT = 15001
DNS_PORT = 53
_BACKLOG = 512


@dataclass(frozen=True, slots=True)
class Listeners:
    """The listeners to which the rules redirect the sandbox's traffic."""

    proxy: socket.socket
    dns_udp: socket.socket
    dns_tcp: socket.socket


class InsideSockets:
    """The thread in the gateway namespace.

    Args:
        namespace: descriptor of the gateway namespace. Only the constructor needs CAP_SYS_ADMIN.
        interface: the gateway's end of the sandbox's link.

    Raises:
        OSError: the namespace cannot be entered.
    """

    def __init__(self, namespace: int, interface: str = "gw0") -> None:
        self._interface = interface
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inside")
        self._thread.submit(os.setns, namespace, os.CLONE_NEWNET).result()

    def listen(self) -> Listeners:
        """Make the three listeners. Blocks. Call it once, before the process drops its privileges."""
        return self._thread.submit(_listeners).result()

    async def dialling_socket(self) -> socket.socket:
        """Return a new non-blocking TCP socket towards the sandbox."""
        return await asyncio.wrap_future(self._thread.submit(_dialling, self._interface))


def _listeners() -> Listeners:
    proxy = _tcp_listener(PROXY_PORT, _BACKLOG)
    dns_tcp = _tcp_listener(DNS_PORT, 64)
    dns_udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    dns_udp.bind(("0.0.0.0", DNS_PORT))  # noqa: S104 - every address of a namespace that has one interface
    return Listeners(proxy, dns_udp, dns_tcp)


def _tune(sock: socket.socket) -> None:
    """Set the options of a relayed connection: no delay of small segments, and keep-alive probes.

    runsc's network stack ends with the sandbox, without a FIN. Only probes detect this, after half a minute.
    """
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 10),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, 30_000),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _tcp_listener(port: int, backlog: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _tune(sock)  # accepted sockets inherit the options
    sock.bind(("0.0.0.0", port))  # noqa: S104 - every address of a namespace that has one interface
    sock.listen(backlog)
    return sock


def _dialling(interface: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode("ascii"))
        _tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock
