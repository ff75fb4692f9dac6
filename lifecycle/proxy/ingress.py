"""The way into a sandbox: its gateway's unix socket, two bytes with the port, one byte of answer.

hostd binds that socket and listens on it, and the worker accepts. Nothing is sent to a socket on which another user
listens.

Each connection serves one request, except those to execd (see `idle_pool`): a sandbox's server can close an idle
connection at any moment, and a request that was lost in that way cannot be distinguished from an executed one.

A refused connection is tried again if the caller allows it: execd listens some milliseconds after its container has
started, and SDKs wait half a second after a 502.
"""

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path

import wire
from lifecycle.proxy.headers import EXECD_PORT
from lifecycle.sandboxes.registry import Sandbox, State

CONNECT_SECONDS = 10.0
START_SECONDS = 3.0
_FIRST_PAUSE = 0.01
_LONGEST_PAUSE = 0.2
_REFUSED = "the sandbox does not listen on this port"


@dataclass(frozen=True, slots=True)
class WayIn:
    """The directory of the sandboxes' sockets, and the uid of the process that listens on them."""

    directory: Path
    uid: int


async def dial(way: WayIn, sandbox: str, port: int) -> socket.socket:
    """Connect to a port of a sandbox. The socket is non-blocking.

    Raises:
        OSError: the sandbox has no gateway, or no process listens on the port.
        TimeoutError: no answer in time.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_SECONDS):
        sock = await wire.connect_unix(way.directory / f"{sandbox}.sock", way.uid)
        try:
            await loop.sock_sendall(sock, port.to_bytes(2, "big"))
            answer = await loop.sock_recv(sock, 1)
            if answer != b"\x00":
                raise ConnectionRefusedError(_REFUSED)
        except BaseException:
            sock.close()
            raise
    return sock


def patience(sandbox: Sandbox, port: int, now: float) -> float:
    """Return the seconds from `now` to wait for a port: only for execd's port after the start, and never long."""
    if port != EXECD_PORT or sandbox.state is not State.RUNNING:
        return 0.0
    return min(START_SECONDS, max(0.0, sandbox.changed_at + START_SECONDS - now))


async def dial_patiently(way: WayIn, sandbox: str, port: int, seconds: float) -> socket.socket:
    """Call `dial`, and call it again for the given seconds while no process listens on the port."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    pause = _FIRST_PAUSE
    while True:
        try:
            return await dial(way, sandbox, port)
        except ConnectionRefusedError:
            if loop.time() + pause > deadline:
                raise
        await asyncio.sleep(pause)
        pause = min(_LONGEST_PAUSE, pause * 1.5)
