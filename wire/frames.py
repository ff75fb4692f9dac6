"""Length-prefixed JSON frames, with file descriptors, over a connected unix stream socket.

Send and receive exist in a blocking and an asyncio form. The asyncio forms use a non-blocking socket directly, not
streams: the descriptors come only with the `recvmsg` that reads the first byte.

- `receive` returns None only at an end of stream between two frames. An incomplete frame is a `FrameError`.
- Descriptors are accepted only with the first byte of a frame, and only if the reader expects them. Others end the
  connection, and are closed outside of the event loop (`descriptors`).
- A frame above the limits of its connection is refused before it is parsed, by its sender and by its receiver.
- A peer that accepts no byte of a frame for `SEND_SECONDS` counts as dead.
"""

import array
import asyncio
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

from wire import descriptors
from wire.limits import WHOLE, FrameLimits, within
from wire.patience import Patience

type Message = dict[str, Any]

MAX_FDS: Final = 16
SEND_SECONDS: Final = 30.0
_HEADER = struct.Struct("!I")
_PART: Final = 1 << 16


class FrameError(Exception):
    """The peer sent no valid frame, or the stream ended inside a frame."""


def encode(message: Message, limits: FrameLimits = WHOLE) -> bytes:
    """Return the frame of `message`.

    Raises:
        FrameError: the frame is above the limits, or has a number that JSON does not have.
    """
    try:
        body = json.dumps(message, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except ValueError as error:
        raise FrameError("the message has a number that JSON does not have (NaN or infinity)") from error
    weigh(body, limits)
    return _HEADER.pack(len(body)) + body


def weigh(body: bytes, limits: FrameLimits) -> int:
    """Return the cost of a frame's body; see `limits`.

    Raises:
        FrameError: the cost is above the limits of the connection.
    """
    try:
        return within(body, limits)
    except ValueError as error:
        raise FrameError(str(error)) from error


def decode(body: bytes) -> Message:
    """Parse a frame's body.

    Raises:
        FrameError: the body is not one JSON object.
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


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors from a trusted peer."""
    for fd in fds:
        os.close(fd)


def _taken(ancillary: list[tuple[int, int, bytes]], *, expected: bool) -> list[int]:
    """Return the descriptors that came with some bytes.

    Raises:
        FrameError: descriptors are not expected, or there are too many. They are being closed.
    """
    fds = descriptors.collected(ancillary)
    if fds and (not expected or len(fds) > MAX_FDS):
        descriptors.discard(fds)
        raise FrameError("unexpected descriptors" if not expected else "too many descriptors")
    return fds


def _body_length(header: bytes, limits: FrameLimits) -> int:
    length: int = _HEADER.unpack(header)[0]
    if length > limits.frame:
        raise FrameError(f"frame of {length} bytes is over the limit of {limits.frame}")
    return length


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one frame on a blocking socket, with the descriptors at its first byte."""
    data = encode(message)
    sent = sock.sendmsg([data], _ancillary(fds))
    if sent < len(data):
        sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Receive one frame from a blocking socket of a trusted peer; None at a clean end of stream.

    The caller owns the returned descriptors (close-on-exec is set).
    """
    header, ancillary, _, _ = sock.recvmsg(_HEADER.size, descriptors.ROOM, socket.MSG_CMSG_CLOEXEC)
    fds = _taken(ancillary, expected=True)
    try:
        if not header:
            close_all(fds)
            return None
        header += _read_exactly(sock, _HEADER.size - len(header))
        return decode(_read_exactly(sock, _body_length(header, WHOLE))), fds
    except BaseException:
        close_all(fds)
        raise


def _read_exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(count - len(data), _PART))
        if not part:
            raise FrameError("stream ended inside a frame")
        data += part
    return bytes(data)


async def send_async(sock: socket.socket, frame: bytes, fds: Sequence[int] = ()) -> None:
    """Send the output of `encode` on a non-blocking socket. Concurrent senders must hold a lock.

    Raises:
        OSError: the peer is dead (TimeoutError: it accepts no bytes). A part of the frame may have been sent.
    """
    loop = asyncio.get_running_loop()
    ancillary = _ancillary(fds)
    rest = memoryview(frame)
    while rest:
        try:  # without descriptors by `send`: a worker may not call sendmsg
            sent = sock.sendmsg([rest], ancillary) if ancillary else sock.send(rest)
        except BlockingIOError:
            async with Patience(SEND_SECONDS):
                await _ready(loop, sock, writing=True)
        else:
            rest, ancillary = rest[sent:], []


class Receiver:
    """Reads frames from a non-blocking socket.

    Args:
        expects: whether frames may have descriptors; the peer must be trusted then.
        shielded: the kernel refuses descriptors on this socket (`descriptors.refuse`).
    """

    def __init__(self, sock: socket.socket, limits: FrameLimits, *, expects: bool, shielded: bool) -> None:
        self._sock = sock
        self._limits = limits
        self._expects = expects
        self._room = 0 if shielded else descriptors.ROOM

    async def body(self) -> tuple[bytes, list[int]] | None:
        """Return body and descriptors of the next frame within the limits; None at a clean end of stream.

        Raises:
            FrameError, OSError: there is no valid frame; the connection must end.
        """
        header, fds = await self._part(_HEADER.size, expected=self._expects)
        if not header:
            return None
        try:
            header += await self._exactly(_HEADER.size - len(header))
            return await self._exactly(_body_length(header, self._limits)), fds
        except BaseException:
            descriptors.discard(fds)
            raise

    async def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part, _ = await self._part(min(count - len(data), _PART), expected=False)
            if not part:
                raise FrameError("stream ended inside a frame")
            data += part
        return bytes(data)

    async def _part(self, count: int, *, expected: bool) -> tuple[bytes, list[int]]:
        while True:
            try:
                if not self._room:
                    return self._sock.recv(count), []
                part, ancillary, _, _ = self._sock.recvmsg(count, self._room, socket.MSG_CMSG_CLOEXEC)
                return part, _taken(ancillary, expected=expected)
            except BlockingIOError:
                await _ready(asyncio.get_running_loop(), self._sock, writing=False)


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
