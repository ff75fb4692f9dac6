"""Relays bytes between two connected sockets, unchanged.

- Each side gets the bytes of the other in order. An end of stream is passed on for its direction only (half-close).
- A reset or an error of one side resets both. At most one chunk per direction is buffered (back-pressure).
- If `may_send` refuses a chunk, the chunk is not sent and the relay ends.
- The relay ends after `idle` seconds without a byte in either direction, and after `total` seconds.
- While `moving` is not set, the relay rests.
- A byte is counted when the kernel accepts it for sending. After an orderly end the receiver has exactly this number of
  bytes. After a reset it may have fewer, never more.
- The caller owns the sockets and closes them.

The module does not read the bytes that it relays.
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
    """Bytes relayed so far; `up` is towards the second socket. `moved` is the loop time of the last byte."""

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
    moving: asyncio.Event | None = None,
) -> End:
    """Relay until both directions have ended.

    Args:
        traffic: updated with each byte, so its counts are valid after a cancelled relay.
        first: bytes already read from the first socket; they are sent first.
        idle: seconds without a byte in either direction; None means no limit.
        total: seconds that the relay may last; None means no limit.
        may_send: called with the size of each chunk before it is sent to the second socket; None permits all.
        chunk: the largest number of bytes buffered per direction.
        moving: while it is not set, no byte is sent to either socket; None means that it always is.
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
                if moving is not None:
                    await moving.wait()
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
                if moving is not None:
                    await moving.wait()
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
    """Wait until the kernel accepts some of `data`; return the number of accepted bytes."""
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
    """No byte moved in either direction for `idle` seconds."""


class _OverError(Exception):
    """`may_send` refused a chunk."""


def reset(*sockets: socket.socket) -> None:
    """End these connections now with a reset (RST); unsent bytes are dropped. The caller closes the sockets.

    The effect is that of a close with SO_LINGER zero. The filter of a worker refuses that option.
    """
    for sock in sockets:
        if sock.fileno() >= 0:
            _libc.connect(sock.fileno(), _NOWHERE, len(_NOWHERE))
