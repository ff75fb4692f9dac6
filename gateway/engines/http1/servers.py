"""The server's side of one flow: one connection at a time, from the pool of the sandbox or opened for the request.

`reserve` or `get`, then `keep` after a complete exchange, otherwise `leave`. `keep` also returns a reserved connection
whose request is not forwarded.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from gateway.engines.buffered import BufferedConnection
from gateway.engines.engine import Shared
from gateway.engines.pool import Carried, Place, Pool, Pooled
from gateway.engines.port import InspectedFlow, describe
from gateway.exchange import Session
from gateway.presented import Presented
from gateway.tls.contexts import peer_name
from gateway.verdicts import Injected, Route
from policy.facts import Scheme
from policy.injection import SecretPlan
from wire.patience import Countdown, Patience

BUFFER = 256 * 1024
"""The limit of received bytes of one connection that wait to be read."""


class ServerFailed(ConnectionError):
    """There is no connection, it failed, or the response on it is malformed."""


class OnlyHttp2(ServerFailed):
    """The server speaks HTTP/2 and not HTTP/1.1. Later flows to it use HTTP/2, if their clients offer it."""


type ServerConnection = Pooled[BufferedConnection]


class Servers:
    """Connections to the destination of a flow. `engine` is the name of the framing in records."""

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
        self._pool: Pool[BufferedConnection] = shared.pool
        self._place = Place(flow.host, flow.port, flow.scheme, shared.upstream)
        self._current: ServerConnection | None = None
        self.connections: list[BufferedConnection] = []
        """All connections that can hold unsent bytes. Idle ones are not among them."""

    def reserve(self, plans: frozenset[SecretPlan]) -> Route | None:
        """Take an idle connection for a request with the secrets of `plans`; return its route, None if there is none.

        `keep` returns it if the request is not sent.
        """
        self.leave()
        server = self._current = self._pool.take(self._place, plans, self)
        if server is None:
            return None
        server.connection.resume(self._moved)
        self._enter(server.connection)
        return server.route

    async def get(self, injected: Injected, presented: Presented | None) -> ServerConnection:
        """Return the reserved connection for a request with these secrets; open one if there is none.

        A new connection presents the client certificate among them, and carries requests with these secrets only.

        A reserved connection is not used if the server has ended it or has sent bytes, if it carried another value of
        a secret, or if policy, roots or secrets changed.

        Raises:
            ServerFailed: there is none.
        """
        if not self._session.may_connect():
            raise RuntimeError("a connection without an allowed request")
        carried, server = self._pool.carried(injected), self._current
        if server is not None and not self._usable(server, carried):
            self.leave()
        server = self._current = self._current or await self._connect(presented)
        server.carried = carried
        return server

    def bind(self) -> None:
        """Use the connection in use for no other flow."""
        if self._current is not None:
            self._current.owner = self

    def keep(self) -> None:
        """Keep the connection for later requests: its exchange is complete, or it was reserved and not used."""
        server = self._current
        if server is None or server.connection.unsent:
            self.leave()
            return
        self._current = None
        self.connections.remove(server.connection)
        self._pool.keep(server)

    def only_http2(self) -> ServerFailed:
        """Remember that the server speaks only HTTP/2. Clients choose HTTP/2 in TLS only."""
        if self._flow.scheme is not Scheme.HTTPS:
            return ServerFailed("the server speaks only HTTP/2")
        self._shared.http2.add((self._flow.host, self._flow.port))
        return OnlyHttp2("the server speaks only HTTP/2")

    def leave(self) -> None:
        """End the connection in use in order. The next request gets another one."""
        server, self._current = self._current, None
        if server is not None:
            server.connection.close()

    def close(self) -> None:
        """End the idle connections that only this flow may use."""
        self._pool.leave(self)

    def drop_leftovers(self) -> None:
        """Discard unsent bytes of requests whose client has ended them."""
        current = None if self._current is None else self._current.connection
        for connection in self.connections:
            if connection.unsent and (connection is not current or not self._session.active):
                connection.discard()

    def _usable(self, server: ServerConnection, carried: Carried) -> bool:
        silent = not (server.connection.at_end or server.connection.data)
        same = server.carried is carried or server.carried == carried
        return silent and same and server.revision == self._pool.revision

    def _enter(self, connection: BufferedConnection) -> None:
        self.connections = [one for one in self.connections if not one.is_closed]
        self.connections.append(connection)

    async def _connect(self, presented: Presented | None) -> ServerConnection:
        flow, shared, revision = self._flow, self._shared, self._pool.revision
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
        https = flow.scheme is Scheme.HTTPS
        if presented is not None and not https:
            raise RuntimeError("a client certificate without TLS")
        tls = shared.upstream.connect(flow.host, [b"http/1.1"], presented) if https else None
        connection = await BufferedConnection.over(reader, writer, BUFFER, self._moved, tls=tls)
        self._enter(connection)
        if tls is None:
            return self._pool.made(connection, Route(address, None), self._place, revision)
        deadline = Countdown(seconds, lambda: connection.interrupt(ServerFailed("no handshake in time")))
        try:
            await connection.secure()
        except ConnectionError as error:
            connection.close()
            if connection.no_protocol:
                raise self.only_http2() from error
            raise ServerFailed("no TLS") from error
        finally:
            deadline.cancel()
        return self._pool.made(connection, Route(address, peer_name(tls, flow.host)), self._place, revision)
