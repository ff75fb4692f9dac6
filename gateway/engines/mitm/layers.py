"""mitmproxy's HTTP layers for HTTP/2 clients, made strict; HTTP/2 itself is in `http2`.

| mitmproxy | These layers |
|---|---|
| raises on trailers | trailers are dropped |
| buffers the chunk headers of a server without limit | buffers have limits |
| ends TLS without close_notify | close_notify is sent |
| treats a server's close after an early response as a failure | the client gets the response |
| treats `100` or `103` as the final response | at most `MAX_INFORMATIONAL` of them are dropped |
| sends an HTTP/2 body without length unframed to an HTTP/1.1 server | the body is chunked, one request per connection |
| sends error texts, its name and its version to the client | pages of `pages` are sent |
| keeps the state of each upstream connection while the client's lasts | the state is dropped |
| buffers the body of a request that was answered locally | the answer is sent at once and the body discarded |

`StrictHttpLayer.get_connection` makes every upstream connection, to the one destination of the flow.
"""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import h11
from mitmproxy import http
from mitmproxy.connection import ConnectionState, Server
from mitmproxy.proxy import commands, events, layer, tunnel
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers import http as mitm_http
from mitmproxy.proxy.layers import tls
from mitmproxy.proxy.layers.http import _base, _events, _http1
from mitmproxy.proxy.utils import ReceiveBuffer
from OpenSSL import SSL

from gateway.engines.mitm.http2 import WINDOW, Acknowledge, StrictHttp2Client, StrictHttp2Server
from gateway.engines.mitm.pin import Commands, Pin, RouteHook, presented_for

MAX_BUFFER = 256 * 1024
"""The limit of unparsed bytes of one HTTP/1 connection to a server."""
MAX_RESPONSE_HEAD = 128 * 1024
MAX_INFORMATIONAL = 16

_HEAD_END = re.compile(rb"\n\r?\n")
_INFORMATIONAL = re.compile(rb"HTTP/1\.[01] 1(?!01)[0-9][0-9][ \r\n]")


class RootLayer(layer.Layer):
    """The top layer. An exception in a lower layer aborts the flow; mitmproxy would only log it."""

    def __init__(self, context: Context, on_crash: Callable[[], None]) -> None:
        super().__init__(context)
        self.child: layer.Layer | None = None
        self._on_crash = on_crash

    def handle_event(self, event: events.Event) -> Commands[None]:
        try:
            if self.child is not None:
                yield from self.child.handle_event(event)
        except Exception:  # noqa: BLE001 - fails closed: the flow is aborted
            self._on_crash()

    def _handle_event(self, event: events.Event) -> Commands[None]:
        yield from ()


class OrderlyClientTls(tls.ClientTLSLayer):
    """TLS with the sandbox, which sends close_notify. Without it a response that ends at the close looks incomplete."""

    def send_close(self, command: commands.CloseConnection) -> Commands[None]:
        if self.tunnel_state is tunnel.TunnelState.OPEN:
            with contextlib.suppress(SSL.Error):
                self.tls.shutdown()
            yield from self.tls_interact()
        yield from super().send_close(command)


class _BoundedHttp1(_http1.Http1Connection):
    """Body reading and buffer bounds."""

    def _handle_event(self, event: events.Event) -> Commands[None]:
        yield from super()._handle_event(event)
        if isinstance(event, events.DataReceived) and len(self.buf) > MAX_BUFFER:
            yield from self._give_up()

    def read_body(self, event: events.Event) -> Commands[None]:
        if _closed(event) and self.conn.error:
            yield from self._give_up()
            return
        while True:
            try:
                part = self.body_reader.read_eof() if _closed(event) else self.body_reader(self.buf)
            except h11.ProtocolError:
                yield from self._give_up()
                return
            if part is None:
                return
            if isinstance(part, h11.Data):
                data = bytes(part.data)
                if data:
                    yield from self.received(data)
            elif isinstance(part, h11.EndOfMessage):
                # part.headers has trailers; they are dropped.
                yield _base.ReceiveHttp(self.ReceiveEndOfMessage(self._stream()))
                yield from self.mark_done(response=True)
                return

    def received(self, data: bytes) -> Commands[None]:
        yield _base.ReceiveHttp(self.ReceiveData(self._stream(), data))

    def _stream(self) -> int:
        if self.stream_id is None:
            raise RuntimeError("a body outside of a request")  # ends the flow, see Root
        return self.stream_id

    def _give_up(self) -> Commands[None]:
        yield commands.CloseConnection(self.conn)
        if self.stream_id is not None and self.request is not None:
            yield _base.ReceiveHttp(
                self.ReceiveProtocolError(self.stream_id, "malformed message", self.ReceiveProtocolError.code)
            )
        self.buf = type(self.buf)()
        self.state = self.ignore

    def ignore(self, _event: events.Event) -> Commands[None]:
        """Discard the events of a connection that is being closed."""
        self.buf = type(self.buf)()
        yield from ()


def _closed(event: events.Event) -> bool:
    return isinstance(event, events.ConnectionClosed)


class StrictHttp1Client(_BoundedHttp1, _http1.Http1Client):
    """Speaks HTTP/1 with a server."""

    _informational = 0

    def read_headers(self, event: events.ConnectionEvent) -> Commands[None]:
        while isinstance(event, events.DataReceived) and self.request is not None:
            data = bytes(self.buf)
            end = _HEAD_END.search(data, 0, MAX_RESPONSE_HEAD)
            if end is None:
                if len(data) >= MAX_RESPONSE_HEAD:
                    yield from self._give_up()
                return
            if _INFORMATIONAL.match(data) is None:
                break
            self._informational += 1
            if self._informational > MAX_INFORMATIONAL:
                yield from self._give_up()
                return
            self.buf.maybe_extract_at_most(end.end())
            if not self.buf:
                return
        self._informational = 0
        yield from super().read_headers(event)

    def mark_done(self, *, request: bool = False, response: bool = False) -> Commands[None]:
        yield from super().mark_done(request=request, response=response)
        if self.response_done and not self.request_done:
            self.state = self.answered

    def answered(self, event: events.Event) -> Commands[None]:
        """The response is complete, its request is not. A close is no failure now; further bytes are no response."""
        if isinstance(event, events.DataReceived | events.ConnectionClosed):
            yield commands.CloseConnection(self.conn)
            self.state = self.ignore

    def send(self, event: _base.HttpEvent) -> Commands[None]:
        if isinstance(event, _events.RequestHeaders):
            event = _events.RequestHeaders(event.stream_id, _as_http1(event), event.end_stream)
        yield from super().send(event)


def _as_http1(event: _events.RequestHeaders) -> http.Request:
    """Return the framed HTTP/1.1 form of an HTTP/2 request, with `Connection: close`."""
    request = event.request.copy()
    request.http_version = "HTTP/1.1"
    fields = [(b"Host", request.data.authority)]
    fields += [(name, value) for name, value in request.headers.fields if name.lower() not in (b"host", b"te")]
    cookies = [value for name, value in fields if name.lower() == b"cookie"]
    if len(cookies) > 1:
        fields = [one for one in fields if one[0].lower() != b"cookie"] + [(b"cookie", b"; ".join(cookies))]
    if not event.end_stream and not any(name.lower() == b"content-length" for name, _ in fields):
        fields.append((b"Transfer-Encoding", b"chunked"))
    fields.append((b"Connection", b"close"))
    request.data.authority = b""
    request.headers = http.Headers(fields)
    return request


class StrictHttpClient(mitm_http.HttpClient):
    """Opens one upstream connection and uses the protocol that the server selects."""

    def __init__(self, context: Context, pin: Pin) -> None:
        super().__init__(context)
        self._pin = pin

    def _handle_event(self, event: events.Event) -> Commands[None]:
        err = yield commands.OpenConnection(self.context.server)
        if not err:
            if self.context.server.alpn == b"h2":
                child: layer.Layer = StrictHttp2Client(self.context, self._pin)
            else:
                child = StrictHttp1Client(self.context)
            self.child_layer = child
            self._handle_event = self.child_layer.handle_event  # type: ignore[method-assign]
            yield from self._handle_event(event)
        yield mitm_http.RegisterHttpConnection(self.context.server, err)


class StrictStream(mitm_http.HttpStream):
    """One request and its response."""

    def __init__(self, context: Context, stream_id: int, pin: Pin) -> None:
        super().__init__(context, stream_id)
        self._pin = pin

    def state_wait_for_request_headers(self, event: events.Event) -> Commands[None]:
        if isinstance(event, _events.RequestHeaders) and event.end_stream:
            event.request.timestamp_end = event.request.timestamp_start  # The hook sees that no body follows.
        yield from super().state_wait_for_request_headers(event)

    def start_request_stream(self) -> Commands[None]:
        if self.flow.response is None:
            yield from super().start_request_stream()
            return
        yield from self._answer_now()

    def _answer_now(self) -> Commands[None]:
        """Answer locally: do not wait for the body. Drop the stream, which discards the rest."""
        self.client_state = self.state_done
        yield from self.send_response()
        self.client_state = self.state_errored  # discards queued parts of the body

    def state_consume_request_body(self, event: events.Event) -> Commands[None]:
        if isinstance(event, _events.RequestData) and not self._pin.collects(self.flow, len(event.data)):
            self.request_body_buf = ReceiveBuffer()  # type: ignore[no-untyped-call]
            yield from self._answer_now()
            return
        yield from super().state_consume_request_body(event)

    def make_server_connection(self) -> Commands[bool]:
        if not (yield from super().make_server_connection()):
            return False
        yield RouteHook(self.flow)
        return True

    def state_consume_response_body(self, event: events.Event) -> Commands[None]:
        known = len(self.response_body_buf)
        if isinstance(event, _events.ResponseData) and known + len(event.data) > self._pin.response_buffer:
            self.response_body_buf = ReceiveBuffer()  # type: ignore[no-untyped-call]
            cancel = _events.RequestProtocolError(self.stream_id, "too large", _events.ErrorCode.CANCEL)
            yield mitm_http.SendHttp(cancel, self.context.server)
            code = _events.ErrorCode.RESPONSE_TOO_LARGE
            yield from self.handle_protocol_error(_events.ResponseProtocolError(self.stream_id, "", code))
            self.client_state = self.server_state = self.state_errored
            return
        yield from super().state_consume_response_body(event)

    def send_response(self, already_streamed: bool = False) -> Commands[None]:
        yield from super().send_response(already_streamed)
        if self._answered_early():
            # mitmproxy would send the end only after the request's end. HTTP/2 ignores a second end.
            yield mitm_http.SendHttp(_events.ResponseEndOfMessage(self.stream_id), self.context.client)

    def handle_protocol_error(
        self, event: _events.RequestProtocolError | _events.ResponseProtocolError
    ) -> Commands[None]:
        if isinstance(event, _events.RequestProtocolError) and self._answered_early():
            # The server's half of the stream would stay open.
            end = _events.RequestProtocolError(self.stream_id, event.message, event.code)
            yield mitm_http.SendHttp(end, self.context.server)
        yield from super().handle_protocol_error(event)
        self._pin.finished(self.flow.id)

    def _answered_early(self) -> bool:
        """Whether the client has the complete answer and still sends the request."""
        return bool(self.client_state == self.state_stream_request_body and self.server_state == self.state_done)

    def held_back(self) -> int:
        """Return the bytes of the request body that wait in this stream."""
        return sum(len(one.data) for one in self._paused_event_queue if isinstance(one, _events.RequestData))


class StrictHttpLayer(mitm_http.HttpLayer):
    """All HTTP of one client connection. Serves one host, from connections of its own."""

    def __init__(self, context: Context, pin: Pin) -> None:
        super().__init__(context, mitm_http.HTTPMode.transparent)
        self._pin = pin
        pin.held_back = lambda: sum(self._held_back(stream) for stream in self.streams)

    def _handle_event(self, event: events.Event) -> Commands[None]:
        if isinstance(event, events.Start):
            if self.context.client.alpn != b"h2":
                raise RuntimeError("a client that does not speak HTTP/2")
            self.connections[self.context.client] = StrictHttp2Server(self.context.fork(), self._pin)
        if isinstance(event, events.ConnectionEvent) and event.connection not in self.connections:
            return  # a late event of a dropped connection
        yield from super()._handle_event(event)
        yield from self._acknowledge()

    def _acknowledge(self) -> Commands[None]:
        """Open the windows of streams whose data was sent on."""
        down = self._pin.downstream
        if down is None:
            return
        for stream in list(down.unacknowledged):
            waiting = self._held_back(stream) + sum(up.waiting(stream) for up in self._pin.upstreams)
            if waiting <= WINDOW // 2:
                count = down.unacknowledged.pop(stream)
                yield from self.event_to_child(self.connections[self.context.client], Acknowledge(stream, count))
        for up in self._pin.upstreams:
            for ours in list(up.unacknowledged):
                stream = up.their_stream_id[ours]
                if down.waiting(stream) <= WINDOW // 2:
                    count = up.unacknowledged.pop(ours)
                    yield from self.event_to_child(self.connections[up.conn], Acknowledge(stream, count))

    def _held_back(self, number: int) -> int:
        stream = self.streams.get(number)
        return stream.held_back() if isinstance(stream, StrictStream) else 0

    def make_stream(self, stream_id: int) -> Commands[None]:
        stream = self.streams[stream_id] = StrictStream(self.context.fork(), stream_id, self._pin)
        yield from self.event_to_child(stream, events.Start())

    def get_connection(self, event: mitm_http.GetHttpConnection, *, reuse: bool = True) -> Commands[None]:
        pinned = (event.address, event.tls, event.via, event.transport_protocol)
        if pinned != (self._pin.address, self._pin.tls, None, "tcp"):
            yield from self._reply(event, (None, "not the destination of this flow"))
            return
        stream = self.command_sources[event]
        if not isinstance(stream, StrictStream):
            raise RuntimeError("a connection for no request")
        presented = presented_for(stream.flow)
        if reuse:
            for connection in self.connections:
                if not event.connection_spec_matches(connection) or connection.error:
                    continue
                if self._pin.presented.get(connection) != presented:
                    continue
                if any(up.conn is connection and up.going_away for up in self._pin.upstreams):
                    continue
                if connection in self.waiting_for_establishment:
                    self.waiting_for_establishment[connection].append(event)
                    return
                # An HTTP/1 connection serves one stream of the client: another stream needs a new one.
                if connection.connected and connection.alpn == b"h2":
                    yield from self._reply(event, (connection, None))
                    return
        self._forget()
        context = self.context.fork()
        context.server = Server(address=self._pin.address, transport_protocol="tcp")
        if presented is not None:
            if not self._pin.tls:
                raise RuntimeError("a client certificate without TLS")
            self._pin.presented[context.server] = presented
        stack = tunnel.LayerStack()
        if self._pin.tls:
            context.server.sni = self._pin.facts.host
            stack /= tls.ServerTLSLayer(context)
        stack /= StrictHttpClient(context, self._pin)
        self.connections[context.server] = stack[0]
        self.waiting_for_establishment[context.server].append(event)
        yield from self.event_to_child(stack[0], events.Start())

    def _forget(self) -> None:
        """Drop closed connections that no stream uses; mitmproxy would keep them all."""
        self._pin.upstreams = [up for up in self._pin.upstreams if up.conn.connected]
        spoken_of = {stream.context.server for stream in self.streams.values()}
        for connection in list(self.connections):
            over = connection.state is ConnectionState.CLOSED and connection is not self.context.client
            if over and connection not in spoken_of and connection not in self.waiting_for_establishment:
                del self.connections[connection]
                self._pin.presented.pop(connection, None)

    def _reply(self, event: mitm_http.GetHttpConnection, reply: Any) -> Commands[None]:
        stream = self.command_sources.pop(event)
        yield from self.event_to_child(stream, mitm_http.GetHttpConnectionCompleted(event, reply))
