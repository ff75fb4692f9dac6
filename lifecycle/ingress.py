"""The way into a sandbox: its gateway's unix socket, two bytes naming the port, one byte of answer.

Connections are made for one request each: a sandbox's server may close an idle one at any moment, and a request that
was lost that way could not be told from one that was carried out.

A connection that was refused is tried again where the caller has patience: execd listens some milliseconds after its
container has started, and SDKs wait half a second after a 502.
"""

import asyncio
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpcore

from lifecycle.proxy_headers import EXECD_PORT
from lifecycle.registry import Sandbox, State

CONNECT_SECONDS = 10.0
START_SECONDS = 3.0
_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.2
_REFUSED = "the sandbox does not listen on this port"


async def dial(directory: Path, sandbox: str, port: int) -> socket.socket:
    """Connect to a port of a sandbox; the socket is non-blocking.

    Raises:
        OSError: the sandbox has no gateway, or nothing listens on the port.
        TimeoutError: no answer in time.
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await loop.sock_connect(sock, str(directory / f"{sandbox}.sock"))
            await loop.sock_sendall(sock, port.to_bytes(2, "big"))
            answer = await loop.sock_recv(sock, 1)
        if answer != b"\x00":
            raise ConnectionRefusedError(_REFUSED)
    except BaseException:
        sock.close()
        raise
    return sock


class _Stream(httpcore.AsyncNetworkStream):
    """A dialled socket as httpcore reads and writes it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.get_running_loop().sock_recv(self._sock, max_bytes)
        except TimeoutError as error:
            raise httpcore.ReadTimeout from error
        except OSError as error:
            raise httpcore.ReadError from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout):
                await asyncio.get_running_loop().sock_sendall(self._sock, buffer)
        except TimeoutError as error:
            raise httpcore.WriteTimeout from error
        except OSError as error:
            raise httpcore.WriteError from error

    async def aclose(self) -> None:
        self._sock.close()

    def get_extra_info(self, info: str) -> Any:
        return self._sock if info == "socket" else None


def patience(sandbox: Sandbox, port: int, now: float) -> float:
    """Return for how many seconds from `now` a port is waited for: execd's after the start, no other, never long."""
    if port != EXECD_PORT or sandbox.state is not State.RUNNING:
        return 0.0
    return min(START_SECONDS, max(0.0, sandbox.changed_at + START_SECONDS - now))


class IngressBackend(httpcore.AsyncNetworkBackend):
    """Makes httpcore dial a sandbox; the host it is given is ignored.

    Args:
        patience: seconds for which a port that nothing listens on is tried again.
    """

    def __init__(self, directory: Path, sandbox: str, port: int, patience: float = 0.0) -> None:
        self._directory = directory
        self._sandbox = sandbox
        self._port = port
        self._patience = patience

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            return _Stream(await self._dial())
        except TimeoutError as error:
            raise httpcore.ConnectTimeout from error
        except OSError as error:
            raise httpcore.ConnectError from error

    async def _dial(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        pause = _FIRST_PAUSE
        while True:
            try:
                return await dial(self._directory, self._sandbox, self._port)
            except ConnectionRefusedError:
                if loop.time() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.5)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
