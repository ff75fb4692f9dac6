"""One flow of a PostgreSQL client: its TLS, its startup, the login at the server in its place, and the relay.

    client                      gateway                             server
    TLS (the sandbox's CA) ---> SNI names the host
    startup packet -----------> judged, recorded
                                dialled, SSLRequest, TLS verified -> certificate for the host
                                secret leased, use recorded
                                startup packet, SCRAM ------------>  signature verified
    session is ready <--------- settings, a cancel key of the gateway
    messages <----------------> relayed unread <------------------>

- No byte of the client is sent before the session is ready. A client that sends one before is refused: it is asked for
  no password, so it has none to send.
- A client that may not have a session, and one whose server fails, gets an error message with the reason, and the end
  of the connection.
- A session ends with either side. What the ended side had sent is delivered first.
- The end of policy, secret, budget or idle time aborts the flow: both connections are reset.
"""

import asyncio
from collections.abc import Callable

from gateway import startup as packets
from gateway.engines.buffered import BufferedConnection
from gateway.engines.ending import IdleTime, close_all
from gateway.engines.engine import Shared
from gateway.engines.port import InspectedFlow
from gateway.engines.postgres.cancel import CancelKeys, Cancellable
from gateway.engines.postgres.server import BUFFER, ENGINE, DatabaseServer
from gateway.engines.postgres.session import DatabaseSession, SessionRefused
from gateway.startup import CancelRequest, Startup, read_packet
from gateway.tls.hello import NeedMore, Refused
from gateway.verdicts import Origin
from policy.decision import Deny
from policy.facts import FlowFacts
from wire.patience import Countdown

RULE = "postgres"
"""The rule of a denial because of the form of a connection."""


class PostgresFraming:
    """Makes flows of PostgreSQL clients. `keys` are those of the live sessions of the worker."""

    name = ENGINE

    def __init__(self) -> None:
        self.keys = CancelKeys()

    def __call__(self, flow: InspectedFlow, shared: Shared) -> "PostgresFlow":
        """See `gateway.engines.engine.Framing`."""
        return PostgresFlow(flow, shared, self.keys)

    def cancellable(self, key: bytes, port: int) -> str | None:
        """See `gateway.engines.port.Engine`."""
        session = self.keys.find(key)
        return session.host if session is not None and session.port == port else None


class PostgresFlow:
    """See `gateway.engines.engine.Flow`."""

    def __init__(self, flow: InspectedFlow, shared: Shared, keys: CancelKeys) -> None:
        """Prepare to run `flow`."""
        origin = Origin(
            FlowFacts(flow.host, flow.port, flow.scheme), flow.flow_id, flow.original_destination[0], flow.peer, ENGINE
        )
        self.session = DatabaseSession(origin, shared.effects, shared.sessions)
        self.reason = "aborted"
        self.aborted = False
        self._flow = flow
        self._shared = shared
        self._limits = shared.limits
        self._keys = keys
        self._client: BufferedConnection | None = None
        self._server = DatabaseServer(flow, shared, self.session, self._moved)
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._up = self._down = 0
        self._idle = IdleTime(self._limits.idle_seconds, self._unsent, lambda: self._end("idle"))

    async def run(self) -> None:
        """See `gateway.engines.engine.Flow`."""
        self._task = asyncio.current_task()
        try:
            await self._serve()
        except OSError:
            self._server.error = self._server.error or "upstream or client failed"
        except asyncio.CancelledError:
            if not self.aborted:
                self.abort()
                raise
        except Exception:  # noqa: BLE001 - fails closed: the flow is aborted
            self.abort()
        finally:
            self.session.finish(self._up, self._down, self.reason if self.aborted else self._server.error)

    def abort(self) -> None:
        """See `gateway.engines.engine.Flow`."""
        self.aborted = True
        self.session.over = True
        self._server.discard()
        if self._client is None:
            self._flow.writer.transport.abort()
        else:
            self._client.abort()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def drop_leftovers(self) -> None:
        """See `gateway.engines.engine.Flow`. A session whose client has left has no leftovers to keep."""

    async def close(self) -> None:
        """Close each connection when its queued bytes are sent, or when its peer has taken none for the idle time."""
        self._idle.cancel()
        if self._client is None:
            self._flow.writer.close()
        await close_all(self._connections(), self._limits.idle_seconds)

    # The session.

    async def _serve(self) -> None:
        flow = self._flow
        if flow.hello is None:  # a cancel request in the clear, which the acceptor has read
            packet: object = read_packet(flow.first_bytes)
            client = self._client = await BufferedConnection.over(flow.reader, flow.writer, BUFFER, self._moved)
        else:
            client = await self._open_client()
            packet = await self._read_startup(client)
        try:
            match packet:
                case CancelRequest() as request:
                    await self._cancel(request)
                case Startup() as startup if flow.hello is not None:
                    await self._open(client, startup)
                case Refused(reason):
                    raise await self.session.refuse(Deny(RULE, reason))
                case _:
                    raise await self.session.refuse(Deny(RULE, "the client did not send a startup packet"))
        except SessionRefused as refusal:
            client.write(refusal.answer)

    async def _open(self, client: BufferedConnection, startup: Startup) -> None:
        await self.session.judge(startup)
        server = await self._server.connect()
        login = await self._server.login(startup)
        if client.data:
            raise await self.session.refuse(Deny(RULE, "the client sent data before the session was ready"))
        self.session.ready()
        key = None
        if login.key is not None:
            key = self._keys.issue(Cancellable(self._flow.host, self._flow.port, login.key))
        try:
            client.write(login.welcome(key))
            await self._relay(client, server)
        finally:
            if key is not None:
                self._keys.forget(key)

    async def _cancel(self, request: CancelRequest) -> None:
        """Relay a cancel request to the server of the live session that it names. It gets no answer."""
        flow, known = self._flow, self._keys.find(request.key)
        if known is None or (known.host, known.port) != (flow.host, flow.port):
            raise await self.session.refuse(Deny(RULE, "a cancel request for no live session of this host"))
        await self.session.cancelled()
        await self._server.connect()
        await self._server.cancel(known.server_key)

    # The client.

    async def _open_client(self) -> BufferedConnection:
        flow = self._flow
        tls = self._shared.clients.accept_database(self._shared.identity.leaf(flow.host))
        deadline = Countdown(self._limits.handshake_seconds, lambda: self._end("the TLS handshake took too long"))
        try:
            client = self._client = await BufferedConnection.over(
                flow.reader, flow.writer, BUFFER, self._moved, first=flow.first_bytes, tls=tls
            )
            await client.secure()
            name = tls.get_servername()
            if name is None or name.decode("ascii").lower().removesuffix(".") != flow.host:
                raise RuntimeError("the ClientHello differs from the one that was judged")
        finally:
            deadline.cancel()
        return client

    async def _read_startup(self, client: BufferedConnection) -> object:
        """Read the client's first packet, and nothing after it."""
        deadline = Countdown(self._limits.handshake_seconds, lambda: self._end("no startup packet in time"))
        try:
            while True:
                data = bytes(client.data[: packets.MAX_PACKET + 1])
                packet = read_packet(data) if data else NeedMore(8)
                if not isinstance(packet, NeedMore):
                    if isinstance(packet, CancelRequest | Startup):
                        del client.data[: packet.length]
                    return packet
                if not await client.fill():
                    raise ConnectionResetError("the client ended the connection")
        finally:
            deadline.cancel()

    # The relay.

    async def _relay(self, client: BufferedConnection, server: BufferedConnection) -> None:
        pumps = [
            asyncio.ensure_future(self._pump(client, server, self._count_up)),
            asyncio.ensure_future(self._pump(server, client, self._count_down)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            ended = await asyncio.gather(*pumps, return_exceptions=True)
        if server.data and not client.at_end:  # such as the reason for which the server ended the session
            client.write(bytes(server.data))
            self._count_down(len(server.data))
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _pump(self, source: BufferedConnection, sink: BufferedConnection, count: Callable[[int], None]) -> None:
        """Relay one direction until its source ends."""
        while True:
            if source.data:
                data = bytes(source.data)
                source.data.clear()
                sink.write(data)
                count(len(data))
                await sink.drain()
            elif not await source.fill():
                return

    def _count_up(self, size: int) -> None:
        self._up += size

    def _count_down(self, size: int) -> None:
        self._down += size

    # Time.

    def _connections(self) -> list[BufferedConnection]:
        return [one for one in (self._client, self._server.connection) if one is not None]

    def _unsent(self) -> int:
        return sum(connection.unsent for connection in self._connections())

    def _moved(self) -> None:
        self._idle.active_at = self._loop.time()
        self._shared.beat()

    def _end(self, reason: str) -> None:
        self.reason = reason
        self.abort()
