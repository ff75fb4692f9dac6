"""HTTP/1.1 with a server in a sandbox over a dialled socket: one exchange, and if nothing speaks against it the next.

What a sandbox answers is hostile input.

- A request is written once. Whether a server carried it out cannot be known, so none is ever written again.
- What of a body comes in small pieces goes on in few: SDKs send a small file in a dozen, and each wakes the gateway and
  the sandbox. A piece is held for `HOLD_SECONDS` at most, and none once the body is complete.
- `reusable` is true only after a body that was sent completely and an answer that was framed, complete and followed by
  nothing; with the kernel, too, nothing may have arrived since.
- Nothing limits how long an answer may take; nothing of it is held beyond one chunk and one head of `MAX_HEAD` bytes.
- An answer in a great many small pieces, or heads before its own, takes its time from itself: after each `_BURST` of
  them a connection waits for its turn, and of all that have the same `turns` one has its turn at a time.

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
    """The server gave no answer, or none that is whole; or the request is none."""


class Connection:
    """A connection to a port of a sandbox; the socket is non-blocking and becomes this object's.

    Args:
        turns: shared by the connections of one server.
    """

    def __init__(self, sock: socket.socket, turns: asyncio.Lock | None = None) -> None:
        self.made_at = asyncio.get_running_loop().time()
        self._turns = turns or asyncio.Lock()
        self._events = 0
        """How many were read since the last turn."""
        self._sock = sock
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        self._held = b""
        self._unplan: Callable[[], object] | None = None
        """Takes back that `_send_some` will be called; None if it will not."""

    @property
    def reusable(self) -> bool:
        """Whether another request may go over this connection now."""
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
        return False  # more than was asked for, or the end

    async def request(self, method: str, target: bytes, headers: Headers, body: AsyncIterator[bytes] | None) -> None:
        """Write one request.

        A server may answer and close before it has all of it: that is no failure, `response` tells.

        Raises:
            BrokenExchangeError: it is no request, or its body is not as long as its head says.
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
        """Read the body of the answer; small pieces that came together are given as one.

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
        """Close the connection, whatever is under way."""
        self._stop_sending()
        self._sock.close()

    def _at_hand(self) -> Any:
        """The next event of what was read; None if it is not all there, or broken: `_event` tells."""
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
        """Send what is held, waiting until the kernel has taken it."""
        self._stop_sending()
        data, self._held = self._held, b""
        sent = self._send(data)
        if sent < len(data):
            await asyncio.get_running_loop().sock_sendall(self._sock, memoryview(data)[sent:])

    def _send_some(self) -> None:
        """Send of what is held as much as the kernel takes, and the rest when it takes more."""
        self._stop_sending()
        try:
            self._held = self._held[self._send(self._held) :]
        except OSError:
            return  # `response` tells
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
