"""Length-prefixed JSON frames, with file descriptors, over a connected unix stream socket.

Blocking and asyncio forms of the same two operations. The asyncio forms work on a non-blocking socket directly
(not on streams), because file descriptors must be collected with the very `recvmsg` that brings the first byte.

- `receive` returns None only at a clean end of stream, between two frames; a cut frame is a `FrameError`.
- Descriptors that arrive with a broken frame are closed before the error is raised.
"""

import array
import asyncio
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

type Message = dict[str, Any]

MAX_FRAME = 4 * 1024 * 1024
MAX_FDS = 16
_HEADER = struct.Struct("!I")


class FrameError(Exception):
    """The peer sent something that is not a frame, or went away in the middle of one."""


def encode(message: Message) -> bytes:
    """Return the frame of `message`.

    Raises:
        FrameError: it would be larger than `MAX_FRAME`, or holds a number that JSON does not have.
    """
    try:
        body = json.dumps(message, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except ValueError as error:
        raise FrameError("not a number") from error
    if len(body) > MAX_FRAME:
        raise FrameError(f"frame of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return _HEADER.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Parse a frame's body.

    Raises:
        FrameError: it is not one JSON object.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError("frame is not JSON") from error
    if not isinstance(message, dict):
        raise FrameError("frame is not a JSON object")
    return message


def _ancillary(fds: Sequence[int]) -> list[tuple[int, int, bytes]]:
    if not fds:
        return []
    if len(fds) > MAX_FDS:
        raise FrameError(f"{len(fds)} descriptors are over the limit of {MAX_FDS}")
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]


def _collect(ancillary: list[tuple[int, int, bytes]], flags: int) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    collected = list(fds)
    if flags & socket.MSG_CTRUNC:
        close_all(collected)
        raise FrameError("more descriptors than a frame may carry")
    return collected


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that nobody took."""
    for fd in fds:
        os.close(fd)


def _body_length(header: bytes) -> int:
    length: int = _HEADER.unpack(header)[0]
    if length > MAX_FRAME:
        raise FrameError(f"frame of {length} bytes is over the limit of {MAX_FRAME}")
    return length


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one frame on a blocking socket, descriptors beside its first byte."""
    data = encode(message)
    sent = sock.sendmsg([data], _ancillary(fds))
    if sent < len(data):
        sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Receive one frame from a blocking socket; None at a clean end of stream.

    The caller owns the returned descriptors (close-on-exec is set).
    """
    size = socket.CMSG_SPACE(MAX_FDS * 4)
    header, ancillary, flags, _ = sock.recvmsg(_HEADER.size, size, socket.MSG_CMSG_CLOEXEC)
    fds = _collect(ancillary, flags)
    try:
        if not header:
            close_all(fds)
            return None
        header += _read_exactly(sock, _HEADER.size - len(header))
        return decode(_read_exactly(sock, _body_length(header))), fds
    except BaseException:
        close_all(fds)
        raise


def _read_exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(count - len(data), 1 << 16))
        if not part:
            raise FrameError("stream ended inside a frame")
        data += part
    return bytes(data)


async def send_async(sock: socket.socket, frame: bytes, fds: Sequence[int] = ()) -> None:
    """Send what `encode` made on a non-blocking socket. Concurrent senders must hold a lock."""
    loop = asyncio.get_running_loop()
    ancillary = _ancillary(fds)
    while True:
        try:
            sent = sock.sendmsg([frame], ancillary)
            break
        except BlockingIOError:
            await _ready(loop, sock, writing=True)
    if sent < len(frame):
        await loop.sock_sendall(sock, frame[sent:])


async def receive_async(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """As `receive`, on a non-blocking socket."""
    loop = asyncio.get_running_loop()
    size = socket.CMSG_SPACE(MAX_FDS * 4)
    while True:
        try:
            header, ancillary, flags, _ = sock.recvmsg(_HEADER.size, size, socket.MSG_CMSG_CLOEXEC)
            break
        except BlockingIOError:
            await _ready(loop, sock, writing=False)
    fds = _collect(ancillary, flags)
    try:
        if not header:
            close_all(fds)
            return None
        header += await _read_exactly_async(loop, sock, _HEADER.size - len(header))
        return decode(await _read_exactly_async(loop, sock, _body_length(header))), fds
    except BaseException:
        close_all(fds)
        raise


async def _read_exactly_async(loop: asyncio.AbstractEventLoop, sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = await loop.sock_recv(sock, min(count - len(data), 1 << 16))
        if not part:
            raise FrameError("stream ended inside a frame")
        data += part
    return bytes(data)


async def _ready(loop: asyncio.AbstractEventLoop, sock: socket.socket, *, writing: bool) -> None:
    """Wait until `sock` can be written or read."""
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    if writing:
        loop.add_writer(sock, wake)
    else:
        loop.add_reader(sock, wake)
    try:
        await ready
    finally:
        if writing:
            loop.remove_writer(sock)
        else:
            loop.remove_reader(sock)
