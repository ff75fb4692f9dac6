"""One request of a flow and its response.

    head -> Exchange.request -> Answer, or Forward -> server
    server -> head -> Exchange.response -> Relay -> scrubbed bytes -> client

- A body that the exchange needs as a whole is collected before the request is sent. It is then sent in one piece.
- The response is read while the body of the request is sent. If the response is complete first, the rest of the body
  is discarded.
- If the server has closed an idle connection in the meantime, a request that is safe to repeat and has no body is sent
  once more, on a new one. The client of any other request gets a 502 with the reason.
- The connection is kept for later requests only if request and response are complete and no byte is left. If it was
  authenticated itself (NTLM), only this flow uses it.
- A lost connection is a `ConnectionError`. Any other exception must abort the flow.
"""

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from gateway import pages
from gateway.engines.bodies import Bodies, BodyRefused
from gateway.engines.buffered import BufferedConnection
from gateway.engines.http1.framing import (
    AnotherProtocol,
    Body,
    ClientRequest,
    FramingError,
    HeadWriter,
    Response,
    Sent,
    SizedBody,
    binds_connection,
    response_head,
)
from gateway.engines.http1.servers import OnlyHttp2, ServerConnection, ServerFailed, Servers
from gateway.engines.port import EngineLimits
from gateway.exchange import Exchange
from gateway.translate import RequestParts
from gateway.verdicts import Answer, Collect, Forward, Relay, ResponseHead

MAX_DISCARD = 64 * 1024 * 1024
"""The limit of bytes of a request body that are discarded after an answer. Many clients send the whole body before they
read; a reset would lose the answer."""
_LAST_CHUNK = b"0\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REPEATABLE = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"})


_NOT_REPEATED = (
    "The server ended the connection without an answer. It may have received the request, so it was not sent again."
)


_ONLY_HTTP2 = "The server speaks only HTTP/2. A new connection uses HTTP/2, if the client offers it."


class _Unanswered(ServerFailed):
    """The server ended an idle connection, and the request must not be sent again."""


class _ClientGone(ConnectionError):
    """The client ended its connection before its response."""


class Transaction:
    """Serves one request. `waiting` is held while a port of the exchange is awaited, which has a limit of its own."""

    def __init__(
        self,
        client: BufferedConnection,
        servers: Servers,
        exchange: Exchange,
        request: ClientRequest,
        heads: HeadWriter,
        limits: EngineLimits,
        waiting: Callable[[], AbstractContextManager[None]],
        bodies: Bodies,
    ) -> None:
        self._client = client
        self._servers = servers
        self._exchange = exchange
        self._request = request
        self._heads = heads
        self._limits = limits
        self._waiting = waiting
        self._body = request.body()
        self._outgoing: Body = self._body
        self._source = client.data
        """Where the bytes of `_outgoing` come from."""
        self._collected = bodies.collect()
        self._response = Response(bodiless=request.parts.method == b"HEAD")
        self._pieces: list[bytes] = []
        self._upload: asyncio.Task[None] | None = None
        self._settled = False

    async def run(self) -> bool:
        """Serve the request; False if the client's connection cannot carry another one.

        Raises:
            Exception: the flow must end.
        """
        try:
            return await self._serve()
        except BaseException:
            self._fail()
            raise
        finally:
            self._client.ended = None
            await self._end_upload()
            self._collected.release()
            self._response.release()
            self._exchange.session.finished(self._exchange.request_id)

    async def _serve(self) -> bool:
        with self._waiting():
            verdict = await self.judge(self._request.parts, self._exchange.session.destination)
        if isinstance(verdict, Collect):
            verdict = await self._collect(verdict)
        if isinstance(verdict, Forward):
            return await self._forward(verdict)
        self._servers.keep()
        if self._exchange.facts is None:  # its form was refused: its framing is not trusted
            self._client.write(pages.http1(verdict.status, (list(verdict.headers), verdict.body)))
            return False
        self._send(verdict)
        return await self._discard() and not self._request.closes

    async def judge(self, parts: RequestParts, destination: tuple[str, int, bytes]) -> Answer | Collect | Forward:
        """Return the verdict on the request. An exception ends the flow."""
        return await self._exchange.request(parts, destination, self._servers.reserve)

    def check(self) -> None:
        """Check that the request may be sent, whatever came before.

        Raises:
            RuntimeError: it has no verdict that allows it.
        """
        if not self._exchange.allowed:
            raise RuntimeError("no decision on this request")

    # The request.

    async def _collect(self, collect: Collect) -> Answer | Forward:
        """Collect the body; return the verdict on the whole request."""
        client, body = self._client, self._body
        if collect.expects:
            client.write(_CONTINUE)
        try:
            while True:
                self._collected.add(body.take(client.data))
                if body.done:
                    break
                if not await client.fill():
                    raise _ClientGone
        except BodyRefused as refused:
            return self._exchange.refuse_body(refused.status)
        except FramingError as error:
            raise _ClientGone from error
        with self._waiting():
            verdict = await self._exchange.request_whole(self._collected.whole())
        if isinstance(verdict, Answer):
            return verdict
        forward, whole = verdict
        self._outgoing, self._source = SizedBody(len(whole)), bytearray(whole)
        return forward

    async def _forward(self, forward: Forward) -> bool:
        self.check()
        request = self._request
        sent = self._heads.write(request.parts.method, request.minor_version, forward.head)
        if sent.expects:
            self._client.write(_CONTINUE)
        try:
            server = await self._exchanged(sent, forward)
            return await self._relay(server)
        except ServerFailed as error:
            if self._exchange.begun:
                raise
            self._bad_gateway(_reason(error))
            await self._end_upload()
            await self._discard()
            return False

    async def _exchanged(self, sent: Sent, forward: Forward) -> ServerConnection:
        """Send the request and read the head of its response; return the server that gave it."""
        again = self._outgoing.done and self._request.parts.method in _REPEATABLE
        while True:
            server = await self._servers.get(forward.injected, forward.presented)
            with self._waiting():
                await self._exchange.connection(server.route)
            if sent.binds:
                self._servers.bind()
            reused, server.used = server.used, True
            try:
                await self._begin(server, sent.data)
            except _ClientGone:
                raise
            except AnotherProtocol as error:
                raise self._servers.only_http2() from error
            except (OSError, FramingError) as error:
                self._servers.leave()
                if not reused or self._response.begun:
                    raise ServerFailed("no response") from error
                if not again:
                    raise _Unanswered("no response") from error
                again = False
            else:
                return server

    async def _begin(self, server: ServerConnection, sent: bytes) -> None:
        connection, body = server.connection, self._outgoing
        part = b"" if body.done else self._exchange.request_chunk(body.take(self._source))
        connection.write(sent + _framed(part, chunked=body.chunked))
        if not body.done:
            self._upload = asyncio.create_task(self._send_body(connection))
        else:
            self._exchange.request_sent()
            if body.chunked:
                connection.write(_LAST_CHUNK)
        self._client.ended = lambda: connection.interrupt(_ClientGone())
        if self._client.at_end:
            raise _ClientGone
        while not self._response.headed:
            if not connection.data and not await connection.fill():
                raise ServerFailed("the server closed the connection")
            self._pieces = self._response.feed(connection.data)
        if self._response.status == 101 and self._response.upgraded is None:
            raise ServerFailed("a 101 without an upgrade")

    async def _send_body(self, server: BufferedConnection) -> None:
        """Send the request body. If the client breaks it off, the wait for the response ends too."""
        client, body = self._client, self._outgoing
        try:
            while not body.done:
                if not client.data and not await client.fill():
                    raise _ClientGone
                part = self._exchange.request_chunk(body.take(self._source))
                try:
                    server.write(_framed(part, chunked=body.chunked))
                    await server.drain()
                except ConnectionError:
                    return  # its response may have come before
            self._exchange.request_sent()
            if body.chunked:
                server.write(_LAST_CHUNK)
        except (OSError, FramingError):
            server.interrupt(_ClientGone())
        except Exception as error:  # noqa: BLE001 - fails closed: the flow is aborted
            server.interrupt(error)

    async def _discard(self) -> bool:
        """Read the rest of the request body; False if the connection must end."""
        left = MAX_DISCARD
        try:
            while True:
                left -= len(self._body.take(self._client.data))
                if self._body.done:
                    return True
                if left < 0 or not await self._client.fill():
                    return False
        except FramingError:
            return False

    # The response.

    async def _relay(self, server: ServerConnection) -> bool:
        response = self._response
        self._collected.release()
        with self._waiting():
            verdict = await self._exchange.response(ResponseHead(response.status, False, tuple(response.headers)))
        if isinstance(verdict, Relay) and response.upgraded is not None:
            await self._tunnel(server.connection, verdict, response.upgraded)
            return False
        if isinstance(verdict, Answer):
            self._send(Answer(verdict.status, verdict.headers, self._exchange.response_end()))
            self._finish()
            self._servers.leave()
            framed = True
        elif verdict.buffered:
            framed = await self._buffered(server.connection, verdict)
        else:
            framed = await self._streamed(server.connection, verdict)
        self._client.ended = None
        early = self._upload is not None and not self._upload.done()
        await self._end_upload()
        if binds_connection(response.headers):
            self._servers.bind()
        if early or not response.reusable:
            self._servers.leave()
        else:
            self._servers.keep()
        whole = self._body.done or await self._discard()
        return whole and framed and not self._request.closes

    async def _more(self, server: BufferedConnection) -> list[bytes]:
        """Wait for further bytes of the response; return the pieces of its body in them, none at its end.

        Raises:
            ServerFailed: it is incomplete or malformed.
        """
        try:
            if server.data or await server.fill():
                return self._response.feed(server.data)
            self._response.end()
        except _ClientGone:
            raise
        except (OSError, FramingError) as error:
            raise ServerFailed("the response is incomplete") from error
        return []

    async def _streamed(self, server: BufferedConnection, verdict: Relay) -> bool:
        """Relay a body as it comes; False if only the end of the connection ends it."""
        client, exchange, response = self._client, self._exchange, self._response
        begun = self._heads.begin(verdict.status, verdict.reason, self._request.minor_version, verdict.headers)
        chunked, framed = begun.chunked, response.bodiless if begun.unframed else response.framed
        out, pieces = begun.data, self._pieces
        try:
            while not response.complete:
                out += b"".join([_framed(exchange.response_chunk(piece), chunked=chunked) for piece in pieces])
                client.write(out)
                await client.drain()
                out, pieces = b"", await self._more(server)
        except ServerFailed:
            if not framed:  # the client would take the end of its connection for the end of the response
                client.discard()
            raise
        out += _framed(exchange.response_end(b"".join(pieces)), chunked=chunked)
        client.write(out + _LAST_CHUNK if chunked and not response.bodiless else out)
        self._finish()
        await client.drain()
        return framed

    async def _buffered(self, server: BufferedConnection, verdict: Relay) -> bool:
        """Relay a body that is scrubbed as a whole."""
        body, pieces = bytearray(), self._pieces
        while True:
            body += b"".join(pieces)
            if len(body) > self._limits.scrub_body_bytes:
                self._bad_gateway()
                return False
            if self._response.complete:
                break
            pieces = await self._more(server)
        whole = self._exchange.response_whole(bytes(body))
        if isinstance(whole, Answer):
            self._send(whole)
        else:
            fields = tuple(one for one in whole[0] if one[0].lower() != b"transfer-encoding")
            self._client.write(response_head(verdict.status, verdict.reason, fields) + whole[1])
        self._finish()
        return True

    async def _tunnel(self, server: BufferedConnection, verdict: Relay, early: bytes) -> None:
        """Relay an accepted WebSocket through the exchange, until either side ends it."""
        client, exchange = self._client, self._exchange
        client.ended = None
        client.write(response_head(verdict.status, verdict.reason, verdict.headers))
        exchange.open_tunnel()
        self._settled = True
        reason = "the flow was aborted"
        try:
            client.write(exchange.tunnel_down(early))
            up = asyncio.create_task(_copied(client, server, exchange.tunnel_up))
            down = asyncio.create_task(_copied(server, client, exchange.tunnel_down))
            try:
                done, _ = await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in (up, down):
                    await _cancelled(way)
            for way in done:
                way.result()
            reason = "the client ended it" if up in done else "the server ended it"
        finally:
            exchange.close_tunnel(reason)
        self._servers.leave()

    # Ends.

    def _send(self, answer: Answer) -> None:
        head = response_head(answer.status, pages.reason_phrase(answer.status), answer.headers)
        self._client.write(head + answer.body)

    def _bad_gateway(self, reason: str | None = None) -> None:
        self._fail()
        self._servers.leave()
        self._client.write(pages.http1(502, pages.failure(502) if reason is None else pages.refusal(502, reason)))

    def _finish(self) -> None:
        self._exchange.finish()
        self._settled = True

    def _fail(self) -> None:
        """Record the failure of the exchange, unless its outcome is recorded already."""
        if not self._settled:
            self._settled = True
            self._exchange.failed()

    async def _end_upload(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            await _cancelled(upload)


def _reason(error: ServerFailed) -> str | None:
    if isinstance(error, OnlyHttp2):
        return _ONLY_HTTP2
    return _NOT_REPEATED if isinstance(error, _Unanswered) else None


def _framed(data: bytes, *, chunked: bool) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data) if data and chunked else data


async def _copied(source: BufferedConnection, target: BufferedConnection, through: Callable[[bytes], bytes]) -> None:
    """Copy what `through` returns, until a connection ends. An exception of `through` ends the flow."""
    with contextlib.suppress(ConnectionError):
        while True:
            if source.data:
                data = bytes(source.data)
                source.data.clear()
                target.write(through(data))
                await target.drain()
            elif not await source.fill():
                return


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
