"""One connection of a flow: a buffer of received bytes above TLS, and writes with back-pressure.

- A buffered connection takes over the transport of a stream. Bytes that the stream had already received come first.
- Received bytes collect in `data`. The consumer deletes what it has used. Above `limit` bytes no more are read.
- `fill` waits for more bytes, `drain` waits until the peer takes what was written. Both raise after `interrupt`.
- TLS runs in memory, with certificates that never were files.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial

from OpenSSL import SSL

from gateway.splice import reset
from gateway.tls.memory import MemoryTls, TlsFailed


class BufferedConnection(asyncio.Protocol):
    """One connection. `moved` is called when bytes arrive; it can be replaced."""

    def __init__(self, writer: asyncio.StreamWriter, limit: int, moved: Callable[[], None]) -> None:
        self.data = bytearray()
        self.ended: Callable[[], None] | None = None
        """Called when the peer ends its direction, or the connection is lost."""
        self._writer = writer
        self._transport = writer.transport
        self._former = writer.transport.get_protocol()
        self._limit = limit
        self.moved = moved
        self._tls: MemoryTls | None = None
        self._eof = False
        self._lost = False
        self._error: Exception | None = None
        self._reading = True
        self._writable = True
        self._reader: asyncio.Future[None] | None = None
        self._drainer: asyncio.Future[None] | None = None

    @classmethod
    async def over(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limit: int,
        moved: Callable[[], None],
        *,
        first: bytes = b"",
        tls: SSL.Connection | None = None,
    ) -> "BufferedConnection":
        """Take over a stream. `first` are bytes that the caller has read from it."""
        channel = cls(writer, limit, moved)
        channel._tls = None if tls is None else MemoryTls(tls)
        ended = reader.at_eof() or writer.is_closing()
        channel._transport.set_protocol(channel)
        reader.feed_eof()
        rest = await reader.read(-1)  # does not wait, so no event comes between
        if first or rest:
            channel.data_received(first + rest)
        if channel._tls is not None and not channel._tls.secure:
            channel._step(channel._tls.handshake)  # the client end of a handshake speaks first
        if ended:
            channel.eof_received()
        return channel

    # What the transport calls.

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.moved()
        if self._tls is None:
            self.data += data
        else:
            self._step(partial(self._decrypt, self._tls, data))
        if len(self.data) > self._limit and self._reading and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()  # type: ignore[attr-defined]
        _wake(self._reader)

    def eof_received(self) -> bool:
        """See `asyncio.Protocol`. The connection stays open for writing."""
        self._end()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._lost = True
        if exc is not None:
            self._error = self._error or ConnectionResetError("the connection was reset")
        self._former.connection_lost(exc)
        _wake(self._drainer)
        self._end()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._writable = False

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._writable = True
        _wake(self._drainer)

    # What a flow calls.

    @property
    def is_secure(self) -> bool:
        """Whether the TLS handshake is complete."""
        return self._tls is not None and self._tls.secure

    @property
    def no_protocol(self) -> bool:
        """Whether the TLS handshake failed because the peer speaks none of the offered application protocols."""
        return self._tls is not None and self._tls.no_protocol

    @property
    def at_end(self) -> bool:
        """Whether the peer has ended its direction or the connection is lost. `data` can still hold bytes."""
        return self._eof or self._lost or self._error is not None

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed."""
        return self._lost

    @property
    def unsent(self) -> int:
        """Written bytes that the kernel has not taken yet."""
        return 0 if self._lost else self._transport.get_write_buffer_size()

    async def secure(self) -> None:
        """Wait for the end of the TLS handshake.

        Raises:
            ConnectionError: it failed.
        """
        while not self.is_secure:
            if not await self._more():
                raise ConnectionError("the peer ended the TLS handshake")

    async def fill(self) -> bool:
        """Wait for more bytes in `data`; False at the end of the stream.

        Raises:
            ConnectionError: the connection was reset, its TLS failed, or the flow interrupted it.
        """
        if len(self.data) <= self._limit:
            self._resume_reading()
        have = len(self.data)
        while len(self.data) == have:
            if not await self._more():
                return False
        return True

    def rest(self, stirred: Callable[[], None]) -> bool:
        """Call `stirred` when bytes arrive or the peer ends its direction; False if bytes are left or it has ended."""
        if self.at_end or self.data or self.unsent or self._transport.is_closing():
            return False
        self.moved = self.ended = stirred
        self._resume_reading()
        return True

    def resume(self, moved: Callable[[], None]) -> None:
        """Continue after `rest`."""
        self.moved, self.ended = moved, None

    def write(self, data: bytes) -> None:
        """Send bytes, or queue them.

        Raises:
            ConnectionError: the connection is lost.
        """
        if not data:
            return
        if self._lost or self._error is not None or self._transport.is_closing():
            raise self._error or ConnectionResetError("the connection is closed")
        if self._tls is None:
            self._writer.write(data)
            return
        try:
            self._tls.write(data)
        except TlsFailed:
            raise self._failed() from None
        self._writer.write(self._tls.to_send())

    async def drain(self) -> None:
        """Wait while too many bytes are queued.

        Raises:
            ConnectionError: see `fill`.
        """
        while not self._writable and not self._lost:
            if self._error is not None:
                raise self._error
            self._drainer = asyncio.get_running_loop().create_future()
            await self._drainer
        if self._error is not None:
            raise self._error

    def interrupt(self, error: Exception) -> None:
        """Have `fill` and `drain` raise `error`, now and from now on."""
        self._error = self._error or error
        _wake(self._reader)
        _wake(self._drainer)

    def close(self) -> None:
        """End the connection in order: queued bytes are sent first."""
        if self._lost or self._transport.is_closing():
            return
        if self._tls is not None:
            self._tls.end()
            self._flush(self._tls)
        self._writer.close()

    def abort(self) -> None:
        """End the connection now; queued bytes are not sent."""
        self._transport.abort()

    def discard(self) -> None:
        """End the connection now with a reset; bytes in the kernel's buffer are not sent either."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            with (
                contextlib.suppress(OSError),
                socket.fromfd(sock.fileno(), socket.AF_INET, socket.SOCK_STREAM) as copy,
            ):
                reset(copy)
        self._transport.abort()

    async def closed(self) -> None:
        """Wait until the connection is closed."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _resume_reading(self) -> None:
        if not self._reading:
            self._reading = True
            if not self._transport.is_closing():
                self._transport.resume_reading()  # type: ignore[attr-defined]

    async def _more(self) -> bool:
        """Wait for one event; False at the end of the stream."""
        if self._error is not None:
            raise self._error
        if self._eof or self._lost:
            return False
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader
        if self._error is not None:
            raise self._error
        return True

    def _decrypt(self, tls: MemoryTls, data: bytes) -> None:
        self.data += tls.receive(data)
        if tls.closed:
            self._end()

    def _step(self, step: Callable[[], None]) -> None:
        """Take one step of TLS, and send what it has ready, an alert included."""
        if self._tls is None:
            return
        try:
            step()
        except TlsFailed:
            self._failed()
        self._flush(self._tls)

    def _flush(self, tls: MemoryTls) -> None:
        if (ready := tls.to_send()) and not self._transport.is_closing():
            self._writer.write(ready)

    def _failed(self) -> Exception:
        self._error = self._error or ConnectionError("TLS failed")
        _wake(self._reader)
        _wake(self._drainer)
        return self._error

    def _end(self) -> None:
        self._eof = True
        _wake(self._reader)
        if self.ended is not None:
            self.ended()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
