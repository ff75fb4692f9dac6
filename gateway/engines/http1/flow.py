"""One inspected flow in HTTP/1.1: its client, its time, and its end. `transaction` serves each of its requests.

- Requests of a flow are served one after the other. A request is read only after the response before it is complete.
- Connections to the server come from the flow's dialler or from the pool of the sandbox, and go to the flow's
  destination. They end with the flow, unless they were returned to the pool.
- Any exception but a lost connection aborts the flow: each connection is reset, and nothing queued is sent.
- A flow ends when its queued bytes are sent, or when a side has taken none of them for the idle time.
"""

import asyncio
from contextlib import AbstractContextManager

from gateway import pages
from gateway.engines.buffered import BufferedConnection
from gateway.engines.ending import IdleTime, close_all
from gateway.engines.engine import Shared
from gateway.engines.http1.framing import ClientRequest, HeadWriter, read_request
from gateway.engines.http1.servers import BUFFER, Servers
from gateway.engines.http1.transaction import Transaction
from gateway.engines.port import InspectedFlow
from gateway.exchange import Exchange, Session
from gateway.tls.hello import NeedMore, Refused
from gateway.verdicts import Origin
from policy.facts import FlowFacts, Scheme
from wire.patience import Countdown

ENGINE = "http1"


class Http1Flow:
    """See `gateway.engines.engine.Flow`."""

    name = ENGINE

    def __init__(self, flow: InspectedFlow, shared: Shared) -> None:
        """Prepare to run `flow`."""
        facts = FlowFacts(flow.host, flow.port, flow.scheme)
        origin = Origin(facts, flow.flow_id, flow.original_destination[0], flow.peer, ENGINE)
        self.session = Session(
            origin, shared.effects, shared.known, shared.limits.scrub_body_bytes, shared.limits.request_body_bytes
        )
        self.reason = "aborted"
        """Why the engine ended the flow."""
        self.aborted = False
        self._flow = flow
        self._shared = shared
        self._limits = shared.limits
        self._client: BufferedConnection | None = None
        self._servers = Servers(flow, shared, self.session, ENGINE, self._moved, self._waiting)
        self._heads = HeadWriter()
        self._task: asyncio.Task[None] | None = None
        self._requests = 0
        self._loop = asyncio.get_running_loop()
        self._idle = IdleTime(self._limits.idle_seconds, self._unsent, lambda: self._end("idle"))

    async def run(self) -> None:
        """See `gateway.engines.engine.Flow`."""
        self._task = asyncio.current_task()
        try:
            client = await self._open_client()
            while await self._next(client):
                pass
        except OSError:
            pass
        except asyncio.CancelledError:
            if not self.aborted:
                self.abort()
                raise
        except Exception:  # noqa: BLE001 - fails closed: the flow is aborted
            self.abort()

    def abort(self) -> None:
        """See `gateway.engines.engine.Flow`."""
        self.aborted = True
        self.session.over = True
        for connection in self._servers.connections:
            connection.discard()
        if self._client is None:
            self._flow.writer.transport.abort()
        else:
            self._client.abort()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def drop_leftovers(self) -> None:
        """See `gateway.engines.engine.Flow`."""
        self._servers.drop_leftovers()

    async def close(self) -> None:
        """Close each connection when its queued bytes are sent, or when its peer has taken none for the idle time."""
        self._idle.cancel()
        self._servers.close()
        if self._client is None:
            self._flow.writer.close()
        try:
            await close_all(self._connections(), self._limits.idle_seconds)
        finally:
            # They refer to this flow. Without this, only the garbage collector would free a flow and its connections.
            self._client = None
            del self._servers

    def _connections(self) -> list[BufferedConnection]:
        return [*self._servers.connections, *([] if self._client is None else [self._client])]

    # Time.

    def _moved(self) -> None:
        self._idle.active_at = self._loop.time()
        self._shared.beat()

    def _waiting(self) -> AbstractContextManager[None]:
        return self._idle

    def _unsent(self) -> int:
        return sum(connection.unsent for connection in self._connections())

    def _end(self, reason: str) -> None:
        self.reason = reason
        self.abort()

    # The client.

    async def _open_client(self) -> BufferedConnection:
        flow = self._flow
        tls = None
        if flow.scheme is Scheme.HTTPS:
            tls = self._shared.clients.accept(self._shared.identity.leaf(flow.host), http2=False)
        deadline = Countdown(self._limits.handshake_seconds, lambda: self._end("the TLS handshake took too long"))
        try:
            client = self._client = await BufferedConnection.over(
                flow.reader, flow.writer, BUFFER, self._moved, first=flow.first_bytes, tls=tls
            )
            if tls is not None:
                await client.secure()
                name = tls.get_servername()
                if name is None or name.decode("ascii").lower().removesuffix(".") != flow.host:
                    raise RuntimeError("the ClientHello differs from the one that was judged")
        finally:
            deadline.cancel()
        return client

    async def _next(self, client: BufferedConnection) -> bool:
        """Serve one request; False if the flow has ended."""
        head = await self._read_head(client)
        if head is None:
            return False
        if isinstance(head, Refused):
            self.session.refused(head)
            client.write(pages.http1(head.status, pages.refusal(head.status, head.reason)))
            return False
        self._requests += 1
        exchange = Exchange(self.session, f"{self._flow.flow_id}-{self._requests}")
        bodies = self._shared.bodies
        transaction = Transaction(
            client, self._servers, exchange, head, self._heads, self._limits, self._waiting, bodies
        )
        return await transaction.run()

    async def _read_head(self, client: BufferedConnection) -> ClientRequest | Refused | None:
        """Read one request head; None if the client has ended the connection."""
        deadline: Countdown | None = None
        try:
            while True:
                if client.data:
                    head = read_request(bytes(client.data))
                    if not isinstance(head, NeedMore):
                        if isinstance(head, ClientRequest):
                            del client.data[: head.size]
                        return head
                    deadline = deadline or Countdown(self._limits.handshake_seconds, self._end_head)
                if not await client.fill():
                    return None
        finally:
            if deadline is not None:
                deadline.cancel()

    def _end_head(self) -> None:
        self._end("a request head was not complete in time")
