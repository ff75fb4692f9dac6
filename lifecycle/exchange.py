"""HTTP/1.1 with a server in a sandbox over a dialled socket: one exchange, and if nothing speaks against it the next.

What a sandbox answers is hostile input.

- A request is written once. Whether a server carried it out cannot be known, so none is ever written again.
- `reusable` is true only after a body that was sent completely and an answer that was framed, complete and followed by
  nothing; with the kernel, too, nothing may have arrived since.
- Nothing limits how long an answer may take; nothing of it is held beyond one chunk and one head of `MAX_HEAD` bytes.

It does not decide who may use a connection next: see `kept`.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import h11

MAX_HEAD = 100 * 1024
_CHUNK = 256 * 1024

type Headers = Sequence[tuple[bytes, bytes]]


class BrokenExchangeError(Exception):
    """The server gave no answer, or none that is whole; or the request is none."""


class Connection:
    """A connection to a port of a sandbox; the socket is non-blocking and becomes this object's."""

    def __init__(self, sock: socket.socket) -> None:
        self.made_at = asyncio.get_running_loop().time()
        self._sock = sock
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)

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
        """Write one request; its head goes with the first chunk of its body.

        A server may answer and close before it has all of it: that is no failure, `response` tells.

        Raises:
            BrokenExchangeError: it is no request, or its body is not as long as its head says.
        """
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        try:
            data = self._http.send(h11.Request(method=method, target=target, headers=list(headers))) or b""
            if body is not None:
                async for chunk in body:
                    await self._write(data + (self._http.send(h11.Data(chunk)) or b""))
                    data = b""
            await self._write(data + (self._http.send(h11.EndOfMessage()) or b""))
        except h11.LocalProtocolError as error:
            raise BrokenExchangeError from error
        except OSError:
            return

    async def response(self) -> h11.Response:
        """Read the head of the answer.

        Raises:
            BrokenExchangeError: there is none.
        """
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise BrokenExchangeError

    async def chunks(self) -> AsyncIterator[bytes]:
        """Read the body of the answer.

        Raises:
            BrokenExchangeError: it ended too early.
        """
        while isinstance(event := await self._event(), h11.Data):
            yield bytes(event.data)

    def close(self) -> None:
        """Close the connection, whatever is under way."""
        self._sock.close()

    async def _event(self) -> Any:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await asyncio.get_running_loop().sock_recv(self._sock, _CHUNK))
        except (OSError, h11.RemoteProtocolError) as error:
            raise BrokenExchangeError from error
        return event

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        if sent < len(data):
            await asyncio.get_running_loop().sock_sendall(self._sock, memoryview(data)[sent:])
