"""The server proxy: `/sandboxes/{id}/proxy/{port}/…` to a port of the sandbox, HTTP and WebSocket; also signed routes.

- Path and query reach the sandbox byte for byte. Bodies are streamed in both directions without a limit of time. A
  client that disconnects ends the request on the sandbox's side too.
- Connections are counted per sandbox, with the idle ones to its execd. One sandbox cannot use the share of another.
- A request is sent once. Each request to another port than execd's gets its own connection.
- A call into a paused sandbox is refused (409). A call that began before rests until the resume.
- Port 18080 never reaches a sandbox: `egress_api` answers it.
- A signed route takes the place of the secure-access token. execd and the egress API check their own tokens all the
  same. At its expiry open requests and WebSockets end.
- No API key is needed (the ports' own tokens are), and none is forwarded: see `proxy_headers`. Wrong tokens are counted
  here, also those for execd, which refuses them itself.
"""

import asyncio
import contextlib
import itertools
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, WebSocketException
from websockets.typing import Origin, Subprotocol

from lifecycle.api.auth import Caller
from lifecycle.api.connections import WEBSOCKETS_LOG
from lifecycle.api.credentials import EXECD_HEADER, SECURE_HEADER, KeyRing, Purpose, RouteKeys, Tokens
from lifecycle.api.errors import ApiError
from lifecycle.egress.routes import EgressApi, EgressRequest
from lifecycle.proxy import signed
from lifecycle.proxy.exchange import BrokenExchangeError, Connection
from lifecycle.proxy.headers import EGRESS_PORT, EXECD_PORT, RENEW_HEADER, to_client, to_sandbox
from lifecycle.proxy.idle_pool import IdlePool
from lifecycle.proxy.ingress import WayIn, dial, dial_patiently, patience
from lifecycle.sandboxes.clock import Clock
from lifecycle.sandboxes.registry import Sandbox, State
from lifecycle.sandboxes.rows import Rows

type Scope = MutableMapping[str, Any]
type Message = MutableMapping[str, Any]
type Receive = Callable[[], Awaitable[Message]]
type Send = Callable[[Message], Awaitable[None]]

ROUTE = re.compile(rb"(?P<prefix>(?:/v1)?/sandboxes/(?P<sandbox>[^/]+)/proxy/(?P<port>[^/]+))(?P<path>/.*)?", re.DOTALL)
METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
MAX_MESSAGE = 64 * 1024 * 1024
_FRAMES = 4096
_FEWEST = 64
_LONG = 0.001
_BURST = 16
_LONGEST_SECONDS = 10**8
"""A time limit that no request reaches."""
_SENDABLE = frozenset({1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014})


class _ClientGone(Exception):
    pass


class _Upstream(ClientConnection):
    """A WebSocket to a sandbox that reads small amounts at a time; see `_Reading`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.set_protocol(_Reading(self))


class _Reading(asyncio.BufferedProtocol):
    """A reader that passes on `_FRAMES` bytes at a time, fewer if they take long, and then waits for as long as they
    took.

    A frame can have two bytes, and a `ClientConnection` parses all frames of one call at once: one read of asyncio can
    contain 100,000 frames.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._buffer = memoryview(bytearray(_FRAMES))
        self._size = _FRAMES

    def eof_received(self) -> None:
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[: self._size]

    def buffer_updated(self, nbytes: int) -> None:
        loop = self._connection.loop
        self._connection.transport.pause_reading()
        begun = time.perf_counter()
        self._connection.data_received(bytes(self._buffer[:nbytes]))
        took = time.perf_counter() - begun
        self._size = max(_FEWEST, self._size // 2) if took > _LONG else min(_FRAMES, self._size * 2)
        loop.call_later(took, self._go_on)

    def _go_on(self) -> None:
        if not (self._connection.recv_messages.paused or self._connection.transport.is_closing()):
            self._connection.transport.resume_reading()


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a request under the proxy route, and its caller. All parts are raw.

    Attributes:
        signature: that of a signed route, or empty.
        seconds: the time limit of the request; None without one.
    """

    caller: Caller
    sandbox: Sandbox
    port: int
    prefix: bytes
    path: bytes
    signature: bytes = b""
    seconds: float | None = None


@dataclass(slots=True)
class Proxy:
    """The proxy of one server."""

    rows: Rows
    clock: Clock
    egress_api: EgressApi
    tokens: Tokens
    keys: KeyRing
    route_keys: RouteKeys
    way: WayIn
    connections: int = 128
    renew_interval: float | None = None
    _open: Counter[str] = field(default_factory=Counter)
    _renewed: dict[str, float] = field(default_factory=dict)
    _idle: IdlePool = field(default_factory=IdlePool)
    _turns: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def target(self, scope: Scope, match: re.Match[bytes], caller: Caller) -> Target:
        """Find the target of a request, and check whether the caller may use it.

        Raises:
            ApiError: unknown or paused sandbox, no port, no secure access, or too many wrong tokens.
        """
        digits = match["port"]
        if not digits.isdigit() or len(digits) > 8 or digits.lstrip(b"0") not in (digits, b""):
            raise ApiError(422, "DOCKER::INVALID_PORT", "The port must be a number.")
        port = int(digits)
        if not 1 <= port <= 65535:
            raise ApiError(400, "DOCKER::INVALID_PORT", "The port must be between 1 and 65535.")
        row = await self.rows.get(match["sandbox"].decode("latin-1"))
        headers = _headers(scope)
        if row.secure_access:
            claim = self.tokens.claim(Purpose.SECURE, row.id, headers.get(SECURE_HEADER, ""))
            if not caller.proves(claim):
                raise ApiError(401, "MISSING_OR_INVALID_SECURE_ACCESS", "This sandbox needs its secure-access token.")
        await self._admit(row, port, headers, caller)
        return Target(caller, row, port, match["prefix"], match["path"] or b"")

    async def signed_target(self, scope: Scope, match: re.Match[bytes], caller: Caller) -> Target:
        """Find the target of a request by a signed route (`signed.ROUTE`).

        Raises:
            ApiError: the route is not valid, or as for `target`.
        """
        now = self.clock()
        route = signed.read(self.route_keys, match, caller, now)
        row = await self.rows.get(route.sandbox)
        await self._admit(row, route.port, _headers(scope), caller)
        left = min(route.expires - now, _LONGEST_SECONDS)
        return Target(caller, row, route.port, match["prefix"], match["path"] or b"", match["signature"], left)

    async def _admit(self, row: Sandbox, port: int, headers: dict[str, str], caller: Caller) -> None:
        """Check what holds for every way to a port, and count the access."""
        if port == EXECD_PORT:
            token = headers.get(EXECD_HEADER, "")  # execd answers a wrong token with its own text.
            caller.proves(self.tokens.claim(Purpose.EXECD, row.id, token), self.keys.claim(token))
        if port != EGRESS_PORT:
            _refuse_paused(row)
        if headers.get(RENEW_HEADER) != "skip":
            await self._renew(row)

    async def forget(self, sandbox: str) -> None:
        """Drop all data about a removed sandbox."""
        self._renewed.pop(sandbox, None)
        self._idle.trim(sandbox, 0)

    def close(self) -> None:
        """Close the kept connections of all sandboxes."""
        self._idle.close()

    async def _renew(self, row: Sandbox) -> None:
        if self.renew_interval is None or row.renew_seconds is None:
            return
        now = asyncio.get_running_loop().time()
        if now - self._renewed.get(row.id, float("-inf")) >= self.renew_interval:
            self._renewed[row.id] = now
            await self.rows.touch(row)

    @contextlib.asynccontextmanager
    async def _slot(self, sandbox: str) -> AsyncIterator[None]:
        if self._open[sandbox] >= self.connections:
            raise ApiError(
                503, "SANDBOX::TOO_MANY_CONNECTIONS", "Too many connections to this sandbox.", {"Retry-After": "1"}
            )
        self._open[sandbox] += 1
        self._idle.trim(sandbox, self.connections - self._open[sandbox])
        try:
            yield
        finally:
            self._open[sandbox] -= 1
            if not self._open[sandbox]:
                del self._open[sandbox]

    async def serve(self, scope: Scope, receive: Receive, send: Send, target: Target, request_id: str) -> None:
        """Relay one request or WebSocket within its time limit.

        Raises:
            ApiError: see `http`.
            ConnectionResetError: the answer has begun and is incomplete.
        """
        websocket = scope["type"] == "websocket"
        last = ""

        async def noted(message: Message) -> None:
            nonlocal last
            last = message["type"]
            await send(message)

        try:
            async with asyncio.timeout(target.seconds) as limit:
                await (self.websocket if websocket else self.http)(scope, receive, noted, target, request_id)
        except TimeoutError:
            if not limit.expired():
                raise
            if not last:
                raise signed.refused() from None
            if not websocket:
                raise ConnectionResetError("the signed route has expired") from None
            if last != "websocket.close":
                await send({"type": "websocket.close", "code": 1008, "reason": ""})

    # -- HTTP

    async def http(self, scope: Scope, receive: Receive, send: Send, target: Target, request_id: str) -> None:
        """Relay one request.

        Raises:
            ApiError: the sandbox did not get the request, and nothing was sent to the client.
        """
        headers = _headers(scope)
        if target.port == EGRESS_PORT:
            await self._egress(scope, receive, send, target, headers)
            return
        if scope["method"] not in METHODS:
            raise ApiError(405, "GENERAL::UNKNOWN_ERROR", "Method Not Allowed", {"Allow": ", ".join(sorted(METHODS))})
        if headers.get("upgrade", "").lower() == "websocket":
            raise ApiError(400, "SANDBOX::INVALID_PARAMETER", "This is not a WebSocket handshake.")
        async with self._slot(target.sandbox.id):
            has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
            body = _Body(receive, expected=has_body)
            relay = asyncio.create_task(self._relay(scope, body, send, target, headers, request_id))
            gone = asyncio.create_task(body.wait_for_disconnect())
            try:
                await asyncio.wait({relay, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not relay.done():
                    return  # The client has disconnected. The relay is cancelled below, and its connection is closed.
                await relay
            except _ClientGone:
                return
            finally:
                relay.cancel()
                gone.cancel()
                await asyncio.gather(relay, gone, return_exceptions=True)

    async def _relay(
        self, scope: Scope, body: "_Body", send: Send, target: Target, headers: dict[str, str], request_id: str
    ) -> None:
        query = scope["query_string"]
        row, port = target.sandbox, target.port
        path = (target.path or b"/") + (b"?" + query if query else b"")
        fields = to_sandbox(
            scope["headers"],
            port=port,
            keys=self.keys,
            scheme=scope.get("scheme", "http"),
            host=headers.get("host", ""),
            client=_client(scope),
            request_id=request_id,
            signature=target.signature,
        )
        connection = await self._connect(row, port)
        started = False
        try:
            await connection.request(scope["method"], path, fields, body.chunks() if body.expected else None)
            answer = await connection.response()
            started = True
            await send(
                {
                    "type": "http.response.start",
                    "status": answer.status_code,
                    "headers": to_client(
                        answer.headers.raw_items(), target.prefix, target.path, signed=bool(target.signature)
                    ),
                }
            )
            async for chunk in connection.chunks():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except BrokenExchangeError:
            if started:
                raise ConnectionResetError("the sandbox broke its answer off") from None
            raise ApiError(502, "BACKEND_RESPONSE_FAILED", "The sandbox did not give a whole answer.") from None
        finally:
            if port == EXECD_PORT:
                self._idle.give(row, connection)
            else:
                connection.close()

    async def _connect(self, row: Sandbox, port: int) -> Connection:
        """Return a connection to a port, kept or new. The caller owns it.

        Raises:
            ApiError: there is none.
        """
        if port == EXECD_PORT and (kept := self._idle.take(row)) is not None:
            return kept
        wait = patience(row, port, self.clock())
        try:
            return Connection(await dial_patiently(self.way, row.id, port, wait), self._turns)
        except OSError as error:
            _refuse_paused(await self.rows.get(row.id))  # the row may be older than the pause
            if isinstance(error, TimeoutError):
                raise ApiError(504, "BACKEND_TIMEOUT", "The sandbox did not answer in time.") from None
            message = f"Nothing answers on port {port} of the sandbox."
            raise ApiError(502, "BACKEND_CONNECTION_FAILED", message) from None

    async def _egress(
        self, scope: Scope, receive: Receive, send: Send, target: Target, headers: dict[str, str]
    ) -> None:
        request = EgressRequest(
            target.sandbox,
            scope["method"],
            target.path.decode("latin-1"),
            headers,
            target.caller,
            lambda limit: read_body(receive, limit),
        )
        answer = await self.egress_api.handle(request)
        fields = [(name.encode(), value.encode("latin-1")) for name, value in answer.headers.items()]
        if answer.status != 204:
            fields.append((b"content-type", answer.content_type.encode()))
            fields.append((b"content-length", str(len(answer.body)).encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": fields})
        await send({"type": "http.response.body", "body": answer.body})

    # -- WebSocket

    async def websocket(self, scope: Scope, receive: Receive, send: Send, target: Target, request_id: str) -> None:
        """Relay one WebSocket. Every failure becomes a close code."""
        await receive()  # websocket.connect
        try:
            async with self._slot(target.sandbox.id):
                await self._websocket(scope, receive, send, target, request_id)
        except ApiError:
            await refuse_websocket(send, 1013)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send, target: Target, request_id: str) -> None:
        headers = _headers(scope)
        if target.port == EGRESS_PORT:
            await refuse_websocket(send, 1008)
            return
        try:
            sock = await dial(self.way, target.sandbox.id, target.port)
        except OSError:
            await refuse_websocket(send, 1011)
            return
        query = scope["query_string"]
        uri = f"ws://localhost:{target.port}{(target.path or b'/').decode('latin-1')}"
        if query:
            uri += "?" + query.decode("latin-1")
        extra = to_sandbox(
            scope["headers"],
            port=target.port,
            keys=self.keys,
            scheme={"ws": "http", "wss": "https"}.get(scope.get("scheme", "ws"), "http"),
            host=headers.get("host", ""),
            client=_client(scope),
            request_id=request_id,
            signature=target.signature,
            websocket=True,
        )
        try:
            upstream = await _handshake(sock, uri, extra, headers.get("origin"), scope.get("subprotocols") or [])
        except (InvalidHandshake, ValueError):
            await refuse_websocket(send, 1008)
            return
        except (OSError, WebSocketException, EOFError):
            await refuse_websocket(send, 1011)
            return
        await send({"type": "websocket.accept", "subprotocol": upstream.subprotocol})
        tasks = {
            asyncio.create_task(_to_upstream(receive, upstream)),
            asyncio.create_task(_to_downstream(upstream, send, self._turns)),
        }
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await upstream.close()


async def _handshake(
    sock: socket.socket, uri: str, headers: list[tuple[bytes, bytes]], origin: str | None, subprotocols: list[str]
) -> ClientConnection:
    return await connect(
        uri,
        sock=sock,
        create_connection=_Upstream,
        additional_headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers],
        user_agent_header=None,
        origin=None if origin is None else Origin(origin),
        subprotocols=[Subprotocol(name) for name in subprotocols] or None,
        compression=None,
        ping_interval=None,
        max_size=MAX_MESSAGE,
        logger=WEBSOCKETS_LOG,
        open_timeout=10.0,
        close_timeout=5.0,
        proxy=None,
    )


async def _to_upstream(receive: Receive, upstream: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                code = message.get("code") or 1005
                if code == 1005:
                    code = 1000
                elif code not in _SENDABLE and not 3000 <= code <= 4999:
                    code = 1001
                await upstream.close(code, (message.get("reason") or "")[:120])
                return
            if message.get("text") is not None:
                await upstream.send(message["text"])
            else:
                await upstream.send(message.get("bytes") or b"")


async def _to_downstream(upstream: ClientConnection, send: Send, turns: asyncio.Lock) -> None:
    try:
        for number in itertools.count(1):
            data = await upstream.recv()
            if number % _BURST == 0:
                async with turns:  # `recv` does not wait for data that is there already.
                    await asyncio.sleep(0)
            kind = "text" if isinstance(data, str) else "bytes"
            await send({"type": "websocket.send", kind: data})
    except ConnectionClosed as closed:
        received = closed.rcvd
        code = 1011 if received is None else received.code
        if code == 1005:
            code = 1000
        elif code not in _SENDABLE and not 3000 <= code <= 4999:
            code = 1011
        await send({"type": "websocket.close", "code": code, "reason": received.reason if received else ""})


async def refuse_websocket(send: Send, code: int) -> None:
    """Accept and then close, because only so the client gets the code."""
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.close", "code": code, "reason": ""})


class _Body:
    """Yield the request's body in chunks, and then the end of the client's connection."""

    def __init__(self, receive: Receive, *, expected: bool) -> None:
        self._receive = receive
        self._finished = asyncio.Event()
        self.expected = expected
        self._gone = False
        if not expected:
            self._finished.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._gone = True
                self._finished.set()
                raise _ClientGone
            if body := message.get("body"):
                yield body
            if not message.get("more_body"):
                self._finished.set()
                return

    async def wait_for_disconnect(self) -> None:
        await self._finished.wait()
        while not self._gone and (await self._receive())["type"] != "http.disconnect":
            pass


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """Read a whole body. Return None if it is longer than `limit`."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > limit:
            return None
        if not message.get("more_body"):
            return bytes(body)


def _refuse_paused(row: Sandbox) -> None:
    """Refuse a call into a paused sandbox.

    Raises:
        ApiError: 409.
    """
    if row.state in (State.PAUSING, State.PAUSED):
        raise ApiError(409, "DOCKER::SANDBOX_NOT_RUNNING", f"Sandbox is {row.state}. Resume it before you call it.")


def _headers(scope: Scope) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return found


def _client(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "unknown"
