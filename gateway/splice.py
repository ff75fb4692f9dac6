"""Relays bytes between two connected sockets, untouched.

- What one side sent is what the other gets, in order; an end of stream travels alone (half-close).
- A reset or error of either side resets both; nothing is buffered beyond one chunk per direction (back-pressure).
- Nothing goes to the second socket that `may_send` refuses: the relay ends there, and neither side gets more.
- With `idle` the relay ends when neither direction moved for that long, with `total` at that age.
- A byte is counted when the kernel has taken it for the receiver. Of a relay that ended in order the receiver has each
  of them; of one that was reset it may have fewer, never more.
- The sockets stay the caller's; it closes them.

It decides nothing and reads nothing of what it carries.
"""

import asyncio
import ctypes
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

_CHUNK = 1 << 16
_NOWHERE = struct.pack("H14x", socket.AF_UNSPEC)
_libc = ctypes.CDLL(None)


class End(StrEnum):
    """Why a relay ended."""

    CLOSED = "closed"
    RESET = "reset"
    IDLE = "idle"
    TOTAL = "total"
    LIMITS = "limits"


@dataclass(slots=True)
class Traffic:
    """Bytes relayed so far; `up` is towards the second socket."""

    up: int = 0
    down: int = 0
    moved: float = field(default=0.0)


async def relay(
    inner: socket.socket,
    outer: socket.socket,
    traffic: Traffic,
    *,
    first: bytes = b"",
    idle: float | None,
    total: float | None,
    may_send: Callable[[int], bool] | None = None,
    chunk: int = _CHUNK,
) -> End:
    """Relay until both directions ended.

    Args:
        traffic: updated as bytes move, so that a cancelled relay can still be accounted for.
        first: what was read from the first socket already; it goes ahead of the rest.
        idle: seconds without a byte in either direction; None never ends for that.
        total: seconds the relay may last; None never ends for that.
        may_send: asked with the size of each chunk before it goes to the second socket; None never refuses.
        chunk: how many bytes are held per direction at most.
    """
    loop = asyncio.get_running_loop()
    traffic.moved = loop.time()

    async def up() -> None:
        data = first or await loop.sock_recv(inner, chunk)
        while data:
            if may_send is not None and not may_send(len(data)):
                raise _OverError
            left = memoryview(data)
            while left:
                sent = await _send(outer, left)
                traffic.moved = loop.time()
                traffic.up += sent
                left = left[sent:]
            data = await loop.sock_recv(inner, chunk)
        outer.shutdown(socket.SHUT_WR)

    async def down() -> None:
        while data := await loop.sock_recv(outer, chunk):
            left = memoryview(data)
            while left:
                sent = await _send(inner, left)
                traffic.moved = loop.time()
                traffic.down += sent
                left = left[sent:]
        inner.shutdown(socket.SHUT_WR)

    async def watch(seconds: float) -> None:
        left = seconds
        while left > 0:
            await asyncio.sleep(left)
            left = traffic.moved + seconds - loop.time()
        raise _IdleError

    try:
        async with asyncio.timeout(total), asyncio.TaskGroup() as group:
            watcher = group.create_task(watch(idle)) if idle is not None else None
            pumps = [group.create_task(up()), group.create_task(down())]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
            if watcher is not None:
                watcher.cancel()
    except TimeoutError:
        reset(inner, outer)
        return End.TOTAL
    except BaseExceptionGroup as group_error:
        reset(inner, outer)
        if group_error.subgroup(_IdleError) is not None:
            return End.IDLE
        if group_error.subgroup(_OverError) is not None:
            return End.LIMITS
        if group_error.subgroup(OSError) is not None:
            return End.RESET
        raise
    return End.CLOSED


async def _send(sock: socket.socket, data: memoryview) -> int:
    """Give the kernel some of `data`, waiting until it takes any; returns how much."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return sock.send(data)
        except (BlockingIOError, InterruptedError):
            writable: asyncio.Future[None] = loop.create_future()
            loop.add_writer(sock, _resolve, writable)
            try:
                await writable
            finally:
                loop.remove_writer(sock)


def _resolve(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)


class _IdleError(Exception):
    """Neither direction moved for too long."""


class _OverError(Exception):
    """A chunk was refused by `may_send`."""


def reset(*sockets: socket.socket) -> None:
    """End these connections now with a reset (RST), whatever is still unsent. The sockets stay the caller's to close.

    It is what the kernel does at a close with SO_LINGER zero, without the option, which a worker does not have.
    """
    for sock in sockets:
        if sock.fileno() >= 0:
            _libc.connect(sock.fileno(), _NOWHERE, len(_NOWHERE))
