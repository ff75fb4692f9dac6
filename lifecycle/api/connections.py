"""Connections of clients: how long one may be silent, or only nearly so.

- A request's head has `HEAD_SECONDS` from the connection's first moment, or from its first byte where an answer went
  before; uvicorn bounds the time in between (`server.timeout_keep_alive`), and `edge` that of a body.
- A client that vanished without a word (a closed lid, a lost route) is noticed by the kernel, also on a WebSocket that
  carries no messages: what it held is then free again.
- What is said in a request is in no log: not its path, its query or its headers, at whatever level the server logs.
"""

import asyncio
import logging
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 15.0
_PROBES = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),
)
UVICORN_LOG_LEVEL = "warning"
"""Below it uvicorn writes the path and query of each WebSocket, and further down every header."""
WEBSOCKETS_LOG = logging.Logger("websockets", logging.WARNING)
"""For connections to sandboxes: no child of the root logger, whose level would let every header through."""


def expect_silence(listener: socket.socket) -> None:
    """Have the kernel ask whether clients are still there; what is accepted inherits this."""
    for level, option, value in _PROBES:
        listener.setsockopt(level, option, value)


class ApiConnection(H11Protocol):
    """uvicorn's HTTP/1.1, with a time for heads."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Begin the time of the first head."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Take data; a head that is not complete yet has its time."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._expect_head()
        else:
            self._forget_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the time."""
        self._forget_head()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _forget_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
