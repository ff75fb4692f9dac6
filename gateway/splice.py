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
_TURN = 8
"""Chunks that one direction relays before other flows have their turn."""
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
    try:
        return await _Pair(inner, outer, traffic, may_send, chunk, moving).run(first, idle, total)
    except Exception as error:
        reset(inner, outer)
        if isinstance(error, _Ended):
            return error.end
        if isinstance(error, OSError):
            return End.RESET
        raise


class _Ended(Exception):
    """A limit ends the relay."""

    def __init__(self, end: End) -> None:
        self.end = end


class _Pair:
    """Two directions, their time and their end. The loop calls them when a socket is ready; they have no tasks."""

    def __init__(
        self,
        inner: socket.socket,
        outer: socket.socket,
        traffic: Traffic,
        may_send: Callable[[int], bool] | None,
        chunk: int,
        moving: asyncio.Event | None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.chunk = chunk
        self.over: asyncio.Future[None] = self.loop.create_future()
        self._traffic = traffic
        self._moving = moving
        self._ways: tuple[_Way, ...] = (
            _Way(self, inner, outer, self._sent_up, may_send),
            _Way(self, outer, inner, self._sent_down, None),
        )
        self._resting: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._total: asyncio.TimerHandle | None = None

    async def run(self, first: bytes, idle: float | None, total: float | None) -> End:
        """Relay until both directions have ended.

        Raises:
            _Ended: a limit was reached.
            OSError: a side has failed.
        """
        self._traffic.moved = self.loop.time()
        if idle is not None:
            self._idle = self.loop.call_later(idle, self._watch, idle)
        if total is not None:
            self._total = self.loop.call_later(total, self.fail, _Ended(End.TOTAL))
        up, down = self._ways
        try:
            up.begin(first)
            down.begin(b"")
            await self.over
        finally:
            for timer in (self._idle, self._total, self._resting):
                if timer is not None:
                    timer.cancel()
            self._stop()
            self._ways = ()  # They refer to this object. Without this, only the garbage collector would free a relay.
        return End.CLOSED

    def rests(self) -> bool:
        """Return whether nothing may be sent now. If so, both directions go on when it may."""
        if self._moving is None or self._moving.is_set():
            return False
        if self._resting is None:
            self._stop()
            self._resting = self.loop.create_task(self._rest(self._moving), name="relay-rests")
        return True

    def fail(self, error: Exception) -> None:
        """End the relay at once."""
        self._stop()
        if not self.over.done():
            self.over.set_exception(error)

    def ended(self) -> None:
        """End the relay if both directions have ended."""
        if all(way.ended for way in self._ways) and not self.over.done():
            self.over.set_result(None)

    async def _rest(self, moving: asyncio.Event) -> None:
        await moving.wait()
        self._resting = None
        try:
            for way in self._ways:
                way.go_on()
        except Exception as error:  # noqa: BLE001 - fails closed: `relay` raises it
            self.fail(error)

    def _stop(self) -> None:
        for way in self._ways:
            way.stop()

    def _sent_up(self, count: int) -> None:
        self._traffic.moved = self.loop.time()
        self._traffic.up += count

    def _sent_down(self, count: int) -> None:
        self._traffic.moved = self.loop.time()
        self._traffic.down += count

    def _watch(self, idle: float) -> None:
        left = self._traffic.moved + idle - self.loop.time()
        if left > 0:
            self._idle = self.loop.call_later(left, self._watch, idle)
        else:
            self.fail(_Ended(End.IDLE))


class _Way:
    """One direction. It reads a chunk when the one before it is sent. `may_send` None permits all."""

    def __init__(
        self,
        pair: _Pair,
        source: socket.socket,
        target: socket.socket,
        sent: Callable[[int], None],
        may_send: Callable[[int], bool] | None,
    ) -> None:
        self.ended = False
        self._pair = pair
        self._source = source
        self._target = target
        self._sent = sent
        self._may_send = may_send
        self._left = memoryview(b"")
        """What was read and is not sent."""

    def begin(self, first: bytes) -> None:
        """Send `first`, if there is any, and go on."""
        if first:
            self._step(self._offer, first)
        if not self._pair.over.done():
            self.go_on()

    def go_on(self) -> None:
        """Wait for the socket that is next."""
        if self.ended or self._pair.rests():
            return
        if self._left:
            self._pair.loop.add_writer(self._target, self._step, self._send)
        else:
            self._pair.loop.add_reader(self._source, self._step, self._read)

    def stop(self) -> None:
        """Wait for neither socket."""
        self._pair.loop.remove_reader(self._source)
        self._pair.loop.remove_writer(self._target)

    def _step(self, work: Callable[..., None], *data: bytes) -> None:
        try:
            work(*data)
        except (BlockingIOError, InterruptedError):
            pass  # the loop calls again when the socket is ready
        except Exception as error:  # noqa: BLE001 - fails closed: `relay` raises it
            self._pair.fail(error)

    def _read(self) -> None:
        """Read until the kernel has no more, at most `_TURN` chunks.

        uvloop does not call again after an error of the socket. The last call of `recv` reports it.
        """
        for _ in range(_TURN):
            if self._pair.rests():
                return
            if not (data := self._source.recv(self._pair.chunk)):
                self.ended = True
                self.stop()
                self._target.shutdown(socket.SHUT_WR)
                self._pair.ended()
                return
            self._offer(data)
            if self._left:
                break
        self.stop()
        self.go_on()

    def _offer(self, data: bytes) -> None:
        if self._may_send is not None and not self._may_send(len(data)):
            raise _Ended(End.LIMITS)
        self._left = memoryview(data)
        if not self._pair.rests():
            self._push()

    def _send(self) -> None:
        if self._pair.rests():
            return
        self._push()
        if not self._left:
            self.stop()
            self.go_on()

    def _push(self) -> None:
        """Give the kernel what it accepts now."""
        try:
            count = self._target.send(self._left)
        except (BlockingIOError, InterruptedError):
            return
        self._left = self._left[count:]
        self._sent(count)


def reset(*sockets: socket.socket) -> None:
    """End these connections now with a reset (RST); unsent bytes are dropped. The caller closes the sockets.

    The effect is that of a close with SO_LINGER zero. The filter of a worker refuses that option.
    """
    for sock in sockets:
        if sock.fileno() >= 0:
            _libc.connect(sock.fileno(), _NOWHERE, len(_NOWHERE))
