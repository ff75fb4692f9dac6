"""One inspected flow: the client's streams, mitmproxy's layers, and the upstream connections.

- Upstream connections come from the flow's `Dialler`. They go to the flow's destination, and are opened only while an
  allowed request waits.
- The flow is aborted, on all its connections, if a hook raises, a layer raises, or a hook is unknown. The engine sends
  nothing after it aborts a flow.
- A request head must be complete within the handshake time after its first byte. Otherwise the flow is aborted.
- If data for an HTTP/2 peer, or for a connection that is not open yet, exceeds a limit, its sender is not read.
- A flow ends when all its bytes are sent, or when a side has taken none of them for a time. Until then it counts as
  live, and a revocation or change of policy can abort it. An abort also discards bytes in the kernel's send buffers to
  servers.
- mitmproxy's log lines quote bytes of peers, so they are discarded.
"""

import asyncio
import contextlib
import inspect
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, cast

from mitmproxy import flow as mitm_flow
from mitmproxy.connection import Client, Connection, ConnectionState
from mitmproxy.http import HTTPFlow
from mitmproxy.proxy import commands, events, server, server_hooks
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers.http import _http2
from mitmproxy.tls import ClientHelloData, TlsData

from gateway.engines.engine import Shared
from gateway.engines.mitm import options
from gateway.engines.mitm.gate import ENGINE, Gate, Sentinel
from gateway.engines.mitm.layers import OrderlyClientTls, RootLayer, StrictHttpLayer
from gateway.engines.mitm.pin import Pin, presented_for
from gateway.engines.port import InspectedFlow, describe
from gateway.exchange import Session
from gateway.splice import reset
from gateway.tls.contexts import verified
from policy.facts import FlowFacts
from wire.patience import Countdown, Patience

_EXPECTED: Final = frozenset(
    {"client_connected", "client_disconnected", "server_connect", "server_connected", "server_disconnected"}
    | {"server_connect_error", "tls_clienthello", "tls_start_client", "tls_start_server", "tls_established_client"}
    | {"tls_established_server", "tls_failed_client", "tls_failed_server"}
    | {"requestheaders", "request", "responseheaders", "response", "error"}
    | {"sallyport_refused", "sallyport_route"}
)


class _Reader:
    """Reads `first`, then from `stream`, and only while the other side can take data."""

    def __init__(self, connection: Connection, stream: asyncio.StreamReader, room: "_Room", first: bytes = b"") -> None:
        self._connection = connection
        self._stream = stream
        self._room = room
        self._first = first

    async def read(self, count: int) -> bytes:
        await self._room.wait()
        if self._first:
            data, self._first = self._first[:count], self._first[count:]
            return data
        try:
            return await self._stream.read(count)
        except OSError:
            self._connection.error = "reset"  # mitmproxy treats a reset like an orderly end
            raise


class _Room:
    """Blocks a reader while more than `limit` bytes wait to be sent."""

    def __init__(self, limit: int, waiting: Callable[[], int]) -> None:
        self._limit = limit
        self._waiting = waiting
        self._progress = asyncio.Event()

    def changed(self) -> None:
        self._progress.set()

    async def wait(self) -> None:
        while self._waiting() > self._limit:
            self._progress.clear()
            await self._progress.wait()


def _buffered(connection: _http2.Http2Connection) -> int:
    if not connection.conn.connected:
        return 0
    return sum(len(part.data) for parts in connection.h2_conn.stream_buffers.values() for part in parts)


def _unsent(writer: asyncio.StreamWriter) -> int:
    return writer.transport.get_write_buffer_size()


def _descriptor(writer: asyncio.StreamWriter) -> int | None:
    """Return the descriptor of the socket, None if it is closed."""
    sock = writer.transport.get_extra_info("socket")
    return None if sock is None or sock.fileno() < 0 else sock.fileno()


def _discard(writer: asyncio.StreamWriter) -> None:
    """End a connection now, and discard unsent bytes in the kernel's buffer."""
    descriptor = _descriptor(writer)
    if descriptor is not None:
        with (
            contextlib.suppress(OSError),
            socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as sock,
        ):
            reset(sock)
    writer.transport.abort()


class FlowConnection(server.ConnectionHandler):
    """See `gateway.engines.engine.Flow`."""

    name = ENGINE

    def __init__(self, flow: InspectedFlow, shared: Shared) -> None:
        """Prepare to run `flow`."""
        limits = shared.limits
        client = Client(
            transport_protocol="tcp",
            peername=flow.peer,
            sockname=flow.original_destination,
            state=ConnectionState.OPEN,
        )
        context = Context(client, options.options(limits.idle_seconds))
        super().__init__(context)
        self._flow = flow
        self._beat = shared.beat
        self._shared = shared
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.upstream_connections)
        self._watch: asyncio.Task[None] | None = None
        watch: Callable[[], Awaitable[None]] = self.timeout_watchdog.watch

        async def remembered() -> None:
            self._watch = asyncio.current_task()
            await watch()

        self.timeout_watchdog.watch = remembered  # type: ignore[method-assign]
        self._aborted = False
        self._servers: list[asyncio.StreamWriter] = []
        self.reason = "aborted"
        """Why the engine ended the flow; None while it has not."""
        self._head: int | None = None
        self._head_deadline: Countdown | None = None
        self.gate = gate = Gate(flow, shared)
        self._addons = (gate, Sentinel())
        self._pin = Pin(FlowFacts(flow.host, flow.port, flow.scheme), limits.scrub_body_bytes, gate.sensitive)
        self._down = _Room(limits.backlog_bytes, self._waiting_down)
        self._up = _Room(limits.backlog_bytes, self._waiting_up)
        self._pin.finished = gate.finished
        self._pin.collects = gate.collects
        root = RootLayer(context, self.abort)
        context.server.address = (flow.host, flow.port)
        context.server.tls = True
        context.server.sni = flow.host
        tls = OrderlyClientTls(context)
        tls.child_layer = StrictHttpLayer(context, self._pin)
        root.child = tls
        self.layer = root
        self.transports[client] = server.ConnectionIO(
            reader=cast(asyncio.StreamReader, _Reader(client, flow.reader, self._up, flow.first_bytes)),
            writer=flow.writer,
        )

    @property
    def aborted(self) -> bool:
        """Whether the engine aborted the flow."""
        return self._aborted

    @property
    def session(self) -> Session:
        """The state that the exchanges of the flow share."""
        return self.gate.session

    async def run(self) -> None:
        """See `gateway.engines.engine.Flow`."""
        deadline = Countdown(self._limits.handshake_seconds, self.end_handshake)
        try:
            await self.handle_client()
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            deadline.cancel()

    async def close(self) -> None:
        """See `gateway.engines.engine.Flow`."""
        await self.shutdown()

    def abort(self) -> None:
        """End the flow now, on all its connections. Queued bytes are not sent."""
        self._aborted = True
        self.gate.over = True
        self.client.error = "aborted"
        self._drop()
        for io in list(self.transports.values()):
            if io.handler is not None:
                io.handler.cancel("aborted")

    def drop_leftovers(self) -> None:
        """Discard unsent bytes of requests whose client has ended them."""
        for writer in self._servers:
            if (writer.transport.is_closing() or not self.gate.active) and _unsent(writer):
                _discard(writer)

    def _drop(self) -> None:
        for writer in self._servers:
            _discard(writer)
        self._flow.writer.transport.abort()

    async def shutdown(self) -> None:
        """Stop all tasks and close all connections, also after an error of `handle_client`."""
        self._await_head(None)
        self.gate.close()
        ios = list(self.transports.values())
        self.transports.clear()
        tasks = [io.handler for io in ios if io.handler is not None and not io.handler.done()]
        if self._watch is not None:
            tasks.append(self._watch)
        for task in [*tasks, *self.wakeup_timer]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._linger()

    async def _linger(self) -> None:
        """Close each connection when its written bytes are sent, or when its peer has taken none for the idle time."""
        writers = [self._flow.writer, *self._servers]
        for writer in writers:
            with contextlib.suppress(OSError):
                writer.close()
        ends = {asyncio.ensure_future(writer.wait_closed()) for writer in writers if _unsent(writer)}
        left, unsent = ends, -1
        try:
            while left and unsent != sum(map(_unsent, writers)):
                unsent = sum(map(_unsent, writers))
                _, left = await asyncio.wait(left, timeout=self._limits.idle_seconds)
        finally:
            if left:
                self._drop()
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    def end_handshake(self) -> None:
        """Abort the flow if the client's TLS handshake is not complete."""
        if self._pin.tls and self.client.timestamp_tls_setup is None:
            self.abort()

    # Methods that mitmproxy calls.

    def log(self, message: str, level: int = 0, exc_info: Any = None) -> None:
        if exc_info is not None:
            self.abort()

    async def server_event(self, event: events.Event) -> None:
        if self._aborted:
            return
        self._beat()
        await super().server_event(event)
        self._down.changed()
        self._up.changed()
        self._await_head(self._pin.unfinished_head())

    async def drain_writers(self) -> None:
        """Wait until the other side can take the bytes that the caller has read.

        The caller waits for its own peer only if answers to that peer exceed the limit. A peer that sends its whole
        request before it reads must not be blocked by unread answers.
        """
        caller = asyncio.current_task()
        from_client = self.transports.get(self.client) is not None and self.transports[self.client].handler is caller
        for connection, io in list(self.transports.items()):
            writer = io.writer
            if writer is None:
                continue
            if io.handler is caller:
                if writer.transport.get_write_buffer_size() <= self._limits.backlog_bytes:  # type: ignore[union-attr]
                    continue
            elif not from_client and connection is not self.client:
                continue
            try:
                await writer.drain()
            except OSError as error:
                if io.handler is not None:
                    io.handler.cancel(f"Error sending data: {error}")

    def _waiting_down(self) -> int:
        return 0 if self._pin.downstream is None else _buffered(self._pin.downstream)

    def _waiting_up(self) -> int:
        return self._pin.held_back() + sum(_buffered(connection) for connection in self._pin.upstreams)

    def _await_head(self, head: int | None) -> None:
        """Start the deadline of request head number `head`; None means that no head is incomplete."""
        if head == self._head:
            return
        self._head = head
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None
        if head is not None and not self._aborted:
            self._head_deadline = Countdown(self._limits.handshake_seconds, self._end_head)

    def _end_head(self) -> None:
        self.reason = "a request head was not complete in time"
        self.abort()

    async def handle_hook(self, hook: commands.StartHook) -> None:
        if self._aborted:
            return
        try:
            if hook.name not in _EXPECTED:
                raise RuntimeError(hook.name)
            (data,) = hook.args()
            with self.timeout_watchdog.disarm():
                for addon in (self, *self._addons):
                    method = getattr(addon, f"on_{hook.name}" if addon is self else hook.name, None)
                    if method is not None:
                        result = method(data)
                        if inspect.isawaitable(result):
                            await result
        except Exception:  # noqa: BLE001 - fails closed: the flow is aborted
            for argument in hook.args():
                if isinstance(argument, mitm_flow.Flow):
                    argument.error = mitm_flow.Error(mitm_flow.Error.KILLED_MESSAGE)
            self.abort()

    async def open_connection(self, command: commands.OpenConnection) -> None:
        # The idle time-out of the flow bounds a wait here.
        async with self._slots:
            await self._open(command)

    async def _open(self, command: commands.OpenConnection) -> None:
        connection = command.connection
        refused = (
            connection.address != self._pin.address
            or connection.transport_protocol != "tcp"
            or connection.via is not None
            or self._aborted
            or not self.gate.may_connect()
        )
        if refused:
            await self._failed(command)
            return
        try:
            async with Patience(3 * self._limits.handshake_seconds):
                reader, writer, address = await self._shared.dialler.dial(
                    *self._pin.address, self._flow.scheme, describe(self._flow, ENGINE)
                )
        except asyncio.CancelledError:
            await self._failed(command)
            raise
        except Exception:  # noqa: BLE001 - fails closed: there is no connection
            await self._failed(command)
            return
        if self._aborted or connection not in self.transports:
            writer.close()
            return
        self._servers = [one for one in self._servers if _descriptor(one) is not None]
        self._servers.append(writer)
        connection.state = ConnectionState.OPEN
        connection.peername = (address, self._flow.port)
        self.transports[connection] = server.ConnectionIO(
            handler=asyncio.current_task(),
            reader=cast(asyncio.StreamReader, _Reader(connection, reader, self._down)),
            writer=writer,
        )
        deadline = Countdown(self._limits.handshake_seconds, partial(self._end_upstream_handshake, connection))
        try:
            await self.server_event(events.OpenConnectionCompleted(command, None))
            await self.handle_connection(connection)
        finally:
            deadline.cancel()

    def _end_upstream_handshake(self, connection: Connection) -> None:
        io = self.transports.get(connection)
        if self._pin.tls and connection.timestamp_tls_setup is None and io is not None and io.writer is not None:
            io.writer.close()

    async def _failed(self, command: commands.OpenConnection) -> None:
        self.transports.pop(command.connection, None)
        command.connection.error = "connection failed"
        await self.server_event(events.OpenConnectionCompleted(command, "connection failed"))

    # Hooks of this package.

    def on_tls_clienthello(self, data: ClientHelloData) -> None:
        hello = self._flow.hello
        sni = data.client_hello.sni
        if hello is None or sni is None or sni.lower().removesuffix(".") != self._flow.host:
            raise RuntimeError("the ClientHello differs from the one that was judged")
        data.establish_server_tls_first = False

    def on_tls_start_client(self, data: TlsData) -> None:
        leaf = self._shared.identity.leaf(self._flow.host)
        data.ssl_conn = self._shared.clients.accept(leaf, http2=True)

    def on_tls_start_server(self, data: TlsData) -> None:
        if data.conn.sni != self._flow.host or data.is_dtls:
            raise RuntimeError("the upstream handshake is for another host than the flow's")
        presented = self._pin.presented.get(data.conn)
        data.ssl_conn = self._shared.upstream.connect(self._flow.host, [b"h2", b"http/1.1"], presented)

    def on_tls_established_server(self, data: TlsData) -> None:
        if data.ssl_conn is None or not verified(data.ssl_conn):
            raise RuntimeError("the upstream certificate was not verified")

    def on_sallyport_route(self, flow: mitm_flow.Flow) -> None:
        if not isinstance(flow, HTTPFlow) or self._pin.presented.get(flow.server_conn) != presented_for(flow):
            raise RuntimeError("a request on a connection with another client certificate")

    def on_server_connect(self, _data: server_hooks.ServerConnectionHookData) -> None:
        raise RuntimeError("mitmproxy opened a connection by itself")
