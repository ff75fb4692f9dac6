"""HTTP/1.1 with a server in a sandbox over a dialled socket: one exchange, and if possible the next one.

A sandbox's answer is hostile input.

- A request is written once and never repeated, because it is unknown whether a server has executed it.
- Small pieces of a body are combined before they are sent: SDKs send a small file in a dozen pieces, and each piece
  wakes the gateway and the sandbox. A piece is held for at most `HOLD_SECONDS`, and not at all after the body is
  complete.
- `reusable` is true only after a body that was sent completely and an answer that was framed, complete and the last
  data. The kernel must also have no further data.
- The time of an answer has no limit. At most one chunk and one head of `MAX_HEAD` bytes of it are in memory.
- An answer in very many small pieces, or with heads before its own, slows only itself: after each `_BURST` of them a
  connection waits for its turn. Of all connections with the same `turns` one has its turn at a time.

It does not decide which request uses a connection next: see `idle_pool`.
"""

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import h11

MAX_HEAD = 100 * 1024
MAX_INTERIM = 1000
HOLD_SECONDS = 0.002
_HELD = 64 * 1024
_CHUNK = 256 * 1024
_BURST = 16

type Headers = Sequence[tuple[bytes, bytes]]


class BrokenExchangeError(Exception):
    """The server sent no complete answer, or the request is invalid."""


class Connection:
    """A connection to a port of a sandbox. The socket is non-blocking and is owned by this object.

    Args:
        turns: shared by the connections of one server.
    """

    def __init__(self, sock: socket.socket, turns: asyncio.Lock | None = None) -> None:
        self.made_at = asyncio.get_running_loop().time()
        self._turns = turns or asyncio.Lock()
        self._events = 0
        """The number of pieces since the last turn."""
        self._sock = sock
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        self._held = b""
        self._unplan: Callable[[], object] | None = None
        """A function that cancels the planned call of `_send_some`; None without a planned call."""

    @property
    def reusable(self) -> bool:
        """Return whether another request can use this connection now."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        if self._http.trailing_data != (b"", False):
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # There is more data than expected, or the end of the connection.

    async def request(self, method: str, target: bytes, headers: Headers, body: AsyncIterator[bytes] | None) -> None:
        """Write one request.

        A server may answer and close before it has read the whole request. That is no failure here: `response` reports
        it.

        Raises:
            BrokenExchangeError: the request is invalid, or its body does not have the length in its head.
        """
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        try:
            self._held = self._http.send(h11.Request(method=method, target=target, headers=list(headers))) or b""
            if body is not None:
                async for chunk in body:
                    self._held += self._http.send(h11.Data(chunk)) or b""
                    if len(self._held) > _HELD:
                        await self._send_all()
                    elif self._unplan is None:
                        self._unplan = asyncio.get_running_loop().call_later(HOLD_SECONDS, self._send_some).cancel
            self._held += self._http.send(h11.EndOfMessage()) or b""
            await self._send_all()
        except h11.LocalProtocolError as error:
            raise BrokenExchangeError from error
        except OSError:
            return

    async def response(self) -> h11.Response:
        """Read the head of the answer.

        Raises:
            BrokenExchangeError: there is none.
        """
        for _ in range(MAX_INTERIM):
            event = await self._event()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                break
        raise BrokenExchangeError

    async def chunks(self) -> AsyncIterator[bytes]:
        """Read the body of the answer. Small pieces that arrived together are combined.

        Raises:
            BrokenExchangeError: it ended too early.
        """
        while isinstance(event := await self._event(), h11.Data):
            pieces = [event.data]
            while self._events < _BURST and isinstance(event := self._at_hand(), h11.Data):
                pieces.append(event.data)
            yield b"".join(pieces)
            if isinstance(event, h11.EndOfMessage):
                return

    def close(self) -> None:
        """Close the connection at any moment."""
        self._stop_sending()
        self._sock.close()

    def _at_hand(self) -> Any:
        """Return the next event of the data read; None if it is incomplete or broken, which `_event` reports."""
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError:
            return None
        self._events += 1
        return event

    async def _event(self) -> Any:
        if self._events >= _BURST:
            async with self._turns:
                await asyncio.sleep(0)
            self._events = 0
        self._events += 1
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await asyncio.get_running_loop().sock_recv(self._sock, _CHUNK))
        except (OSError, h11.RemoteProtocolError) as error:
            raise BrokenExchangeError from error
        return event

    async def _send_all(self) -> None:
        """Send the held data, and wait until the kernel has taken it."""
        self._stop_sending()
        data, self._held = self._held, b""
        sent = self._send(data)
        if sent < len(data):
            await asyncio.get_running_loop().sock_sendall(self._sock, memoryview(data)[sent:])

    def _send_some(self) -> None:
        """Send as much of the held data as the kernel takes now, and the rest later."""
        self._stop_sending()
        try:
            self._held = self._held[self._send(self._held) :]
        except OSError:
            return  # `response` reports it.
        if self._held:
            loop = asyncio.get_running_loop()
            loop.add_writer(self._sock, self._send_some)
            self._unplan = functools.partial(loop.remove_writer, self._sock)

    def _stop_sending(self) -> None:
        if self._unplan is not None:
            self._unplan()
            self._unplan = None

    def _send(self, data: bytes) -> int:
        try:
            return self._sock.send(data) if data else 0
        except (BlockingIOError, InterruptedError):
            return 0
