"""Connects TCP sockets to addresses, without a name and without a thread."""

import asyncio
import contextlib
import os
import socket
from ipaddress import IPv4Address, IPv6Address


async def connect(sock: socket.socket, address: IPv4Address | IPv6Address, port: int) -> None:
    """Connect a non-blocking TCP socket of the address's family.

    uvloop's `sock_connect` resolves addresses, too. For that it starts four threads, which stay, and each connection
    waits for one of them.

    Raises:
        OSError: there is no connection.
    """
    with contextlib.suppress(BlockingIOError):
        sock.connect((str(address), port))
        return
    loop = asyncio.get_running_loop()
    settled: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock.fileno(), _settle, settled)
    try:
        await settled
    finally:
        loop.remove_writer(sock.fileno())
    if (number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) != 0:
        raise OSError(number, os.strerror(number))


def _settle(settled: asyncio.Future[None]) -> None:
    if not settled.done():
        settled.set_result(None)
