"""The limits of client connections that are silent or nearly silent.

- A request's head must arrive within `HEAD_SECONDS` from the start of the connection, or from the head's first byte
  after an earlier answer. uvicorn limits the time in between (`server.timeout_keep_alive`), and `edge` that of a body.
- The kernel detects a client that disappeared without a close (a suspended machine, a lost route), also on a WebSocket
  without messages. Its resources are then released.
- No log contains the path, query or headers of a request, at any log level of the server.
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
"""Below this level uvicorn logs the path and query of each WebSocket, and at still lower levels every header."""
WEBSOCKETS_LOG = logging.Logger("websockets", logging.WARNING)
"""For connections to sandboxes. It is not a child of the root logger, whose level could enable the log of headers."""


def expect_silence(listener: socket.socket) -> None:
    """Enable keep-alive probes and a time limit for unacknowledged data. Accepted connections inherit both."""
    for level, option, value in _PROBES:
        listener.setsockopt(level, option, value)


class ApiConnection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a time limit for heads. It reports at once that a client has disconnected."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start the time limit of the first head."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Take data. An incomplete head has a time limit."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._expect_head()
        else:
            self._forget_head()

    def eof_received(self) -> None:
        """Report the end of the connection. uvicorn reports it a turn of the event loop later, and drops an answer."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limit."""
        self._forget_head()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _forget_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
