"""The server's side of one flow: its connections, of which one at a time is in use."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from gateway.engines.engine import Shared
from gateway.engines.http1.buffered import BufferedConnection
from gateway.engines.port import InspectedFlow, describe
from gateway.exchange import Session
from gateway.tls.contexts import peer_name
from gateway.verdicts import Route
from policy.facts import Scheme
from wire.patience import Countdown, Patience

BUFFER = 256 * 1024
"""The limit of received bytes of one connection that wait to be read."""


class ServerFailed(ConnectionError):
    """There is no connection, it failed, or the response on it is malformed."""


@dataclass(slots=True)
class ServerConnection:
    """A connection to the server. `used`: it has carried a request."""

    connection: BufferedConnection
    route: Route
    used: bool = False


class Servers:
    """Opens connections to the destination of a flow. `engine` is the name of the framing in records."""

    def __init__(
        self,
        flow: InspectedFlow,
        shared: Shared,
        session: Session,
        engine: str,
        moved: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._flow = flow
        self._shared = shared
        self._session = session
        self._engine = engine
        self._moved = moved
        self._waiting = waiting
        self._current: ServerConnection | None = None
        self.connections: list[BufferedConnection] = []
        """All connections that can hold unsent bytes."""

    def route(self) -> Route | None:
        """Return the route of the open connection for the next request, None if there is none.

        A connection that the server has ended, or on which it has sent bytes without a request, is not used again.
        """
        server = self._current
        if server is not None and (server.connection.at_end or server.connection.data):
            self.leave()
            return None
        return None if server is None else server.route

    async def get(self) -> ServerConnection:
        """Return the connection for a request; open one if there is none.

        Raises:
            ServerFailed: there is none.
        """
        if self.route() is None or self._current is None:
            self._current = await self._connect()
        return self._current

    def leave(self) -> None:
        """End the connection in use in order. The next request gets another one."""
        server, self._current = self._current, None
        if server is not None:
            server.connection.close()

    def drop_leftovers(self) -> None:
        """Discard unsent bytes of requests whose client has ended them."""
        current = None if self._current is None else self._current.connection
        for connection in self.connections:
            if connection.unsent and (connection is not current or not self._session.active):
                connection.discard()

    async def _connect(self) -> ServerConnection:
        flow, shared = self._flow, self._shared
        if not self._session.may_connect():
            raise RuntimeError("a connection without an allowed request")
        seconds = shared.limits.handshake_seconds
        try:
            with self._waiting():
                async with Patience(3 * seconds):
                    reader, writer, address = await shared.dialler.dial(
                        flow.host, flow.port, flow.scheme, describe(flow, self._engine)
                    )
        except Exception as error:
            raise ServerFailed("no connection") from error
        if self._session.over:
            writer.close()
            raise ConnectionAbortedError
        tls = shared.upstream.connect(flow.host, [b"http/1.1"]) if flow.scheme is Scheme.HTTPS else None
        connection = await BufferedConnection.over(reader, writer, BUFFER, self._moved, tls=tls)
        self.connections = [one for one in self.connections if not one.is_closed]
        self.connections.append(connection)
        if tls is None:
            return ServerConnection(connection, Route(address, None))
        deadline = Countdown(seconds, lambda: connection.interrupt(ServerFailed("no handshake in time")))
        try:
            await connection.secure()
        except ConnectionError as error:
            connection.close()
            raise ServerFailed("no TLS") from error
        finally:
            deadline.cancel()
        return ServerConnection(connection, Route(address, peer_name(tls, flow.host)))
