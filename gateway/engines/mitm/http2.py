"""mitmproxy's HTTP/2 connections, made strict.

- A stream with another `:scheme` than the connection's is refused. mitmproxy would overwrite the scheme.
- Errors are answered with pages of `pages`, not with mitmproxy's.
- The rate of resets before an answer, and of frames without content (PING, SETTINGS, PRIORITY, empty DATA,
  informational answers), is limited. Above it the connection ends with ENHANCE_YOUR_CALM. h2 limits header blocks.
- The window of a stream is opened again when its data has been sent on. One slow stream does not block others.
- After an orderly GOAWAY (NO_ERROR) the existing streams of a connection continue. A server then gets no new request,
  and requests that it has not accepted fail.
- State of ended streams is dropped. mitmproxy would keep it for the life of the connection.
- Headers that may carry a secret are sent never-indexed (RFC 7541, 7.1.3). They are not in a compression table with
  headers that the sandbox chooses, so the length of a frame reveals nothing about a guess.
"""

import time
from dataclasses import dataclass
from typing import Any, Final

import h2.errors
import h2.events
import h2.exceptions
from hpack import NeverIndexedHeaderTuple
from hyperframe.frame import GoAwayFrame
from mitmproxy.connection import ConnectionState
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers.http import _base, _events, _http2

from gateway import pages
from gateway.engines.mitm.pin import Commands, Pin, RefusedRequestHook
from gateway.tls.hello import Refused

WINDOW = 256 * 1024
"""The window of one stream in bytes: data that its receiver has not taken yet."""
MAX_RESETS = 100
RESETS_PER_SECOND = 1
"""The limits of streams that a client resets before an answer, per connection: burst, and rate per second."""
IDLE_FRAMES = 1000
IDLE_FRAMES_PER_SECOND = 100
"""The limits of frames without content, per connection: burst, and rate per second. Each piece of data sent to the peer
permits one more: gRPC sends a PING for received data to measure its window."""

REMEMBERED = 256
"""The number of streams at which ended ones are dropped; then twice the number that is left."""

_SENSITIVE: Final = frozenset({b"authorization", b"proxy-authorization", b"cookie"})
_HEADERS_FRAMES: Final = (1, 9)


@dataclass
class Acknowledge(_base.HttpEvent):
    """Bytes of a stream were sent on."""

    count: int


class _GoingAway(h2.events.Event):
    """The peer begins and serves no stream after `last`."""

    def __init__(self, last: int) -> None:
        self.last = last


class _CalmHttp2(_http2.Http2Connection):
    """Limits frames without content from a peer, and data that its receiver has not taken."""

    unacknowledged: dict[int, int]
    """Received bytes that are not acknowledged to their sender, by stream."""
    _frames = float(IDLE_FRAMES)
    _refilled = 0.0
    _depth = 0
    _remembered = REMEMBERED

    def _prepare(self) -> None:
        self.unacknowledged = {}
        self.h2_conn.local_settings.initial_window_size = WINDOW
        self.h2_conn.local_settings.acknowledge()
        # h2 itself treats each GOAWAY as the end of the connection.
        self.h2_conn._frame_dispatch_table[GoAwayFrame] = self._receive_goaway

    def _receive_goaway(self, frame: GoAwayFrame) -> tuple[list[Any], list[h2.events.Event]]:
        if frame.error_code != h2.errors.ErrorCodes.NO_ERROR:
            return self.h2_conn._receive_goaway_frame(frame)
        return [], [_GoingAway(frame.last_stream_id)]

    def _handle_event(self, event: events.Event) -> Commands[None]:
        if isinstance(event, _events.RequestData | _events.ResponseData) and event.data:
            self._frames = min(IDLE_FRAMES, self._frames + 1)
        self._depth += 1
        try:
            yield from super()._handle_event(event)
        finally:
            self._depth -= 1
        # Not earlier: h2 may know the end of a stream before mitmproxy has its event.
        if not self._depth and self._known() >= self._remembered:
            self._forget()
            self._remembered = max(REMEMBERED, 2 * self._known())

    def _known(self) -> int:
        return len(self.streams)

    def _forget(self) -> None:
        self.streams = {stream: state for stream, state in self.streams.items() if not self.is_closed(stream)}

    def _acknowledge(self, event: Acknowledge) -> Commands[None]:
        self.h2_conn.acknowledge_received_data(event.count, event.stream_id)
        if data := self.h2_conn.data_to_send():
            yield commands.SendData(self.conn, data)

    def handle_h2_event(self, event: h2.events.Event) -> Commands[bool]:
        if _moves_nothing(event) and not self._take():
            yield from self.protocol_error("too many frames", h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
            return True
        if isinstance(event, _GoingAway):
            self._going_away(event)
            return False
        if isinstance(event, h2.events.DataReceived):
            count = self.unacknowledged.get(event.stream_id, 0) + (event.flow_controlled_length or 0)
            self.unacknowledged[event.stream_id] = count
            event.flow_controlled_length = 0  # see StrictHttpLayer, which says when
        return (yield from super().handle_h2_event(event))

    def _going_away(self, event: _GoingAway) -> None:
        """Note a GOAWAY. From a client it means only that no new request comes."""

    def _take(self) -> bool:
        now = time.monotonic()
        self._frames = min(IDLE_FRAMES, self._frames + (now - self._refilled) * IDLE_FRAMES_PER_SECOND) - 1
        self._refilled = now
        return self._frames >= 0


def _moves_nothing(event: h2.events.Event) -> bool:
    if isinstance(event, h2.events.DataReceived):
        return not event.data and not event.stream_ended
    return isinstance(
        event,
        h2.events.PingReceived
        | h2.events.RemoteSettingsChanged
        | h2.events.PriorityUpdated
        | h2.events.UnknownFrameReceived
        | h2.events.InformationalResponseReceived
        | _GoingAway,
    )


def _waiting(connection: _http2.Http2Connection, stream: int) -> int:
    return sum(len(part.data) for part in connection.h2_conn.stream_buffers.get(stream, ()))


class StrictHttp2Server(_CalmHttp2, _http2.Http2Server):
    """Speaks HTTP/2 with the sandbox."""

    def __init__(self, context: Context, pin: Pin) -> None:
        super().__init__(context)
        self._prepare()
        self._resets = float(MAX_RESETS)
        self._resets_refilled = time.monotonic()
        self._answered: set[int] = set()
        self._heads = 0
        self._pin = pin
        pin.downstream = self
        pin.unfinished_head = self._unfinished_head

    def _unfinished_head(self) -> int | None:
        buffer = self.h2_conn.incoming_buffer
        # h2 has no public way to see an incomplete header block.
        data = buffer._data
        headers = 0 < len(data) < 4 or (len(data) >= 4 and data[3] in _HEADERS_FRAMES)
        waiting = buffer._preamble_len or buffer._headers_buffer or headers
        return self._heads if waiting else None

    def _handle_event(self, event: events.Event) -> Commands[None]:
        if isinstance(event, _events.ResponseProtocolError) and self._can_answer(event):
            status = event.code.http_status_code() or 502
            fields, body = pages.failure(status)
            self.h2_conn.send_headers(event.stream_id, [(b":status", b"%d" % status), *fields])
            self.h2_conn.send_data(event.stream_id, body, end_stream=True)
            yield commands.SendData(self.conn, self.h2_conn.data_to_send())
            return
        if isinstance(event, Acknowledge):
            yield from self._acknowledge(event)
            return
        if isinstance(event, _events.ResponseHeaders):
            self._answered.add(event.stream_id)
        yield from super()._handle_event(event)

    def _forget(self) -> None:
        super()._forget()
        self._answered &= self.streams.keys()

    def waiting(self, stream: int) -> int:
        """Return the bytes of a stream that its client has not taken yet."""
        return _waiting(self, stream)

    def _can_answer(self, event: _events.ResponseProtocolError) -> bool:
        return (
            event.code.http_status_code() is not None
            and not self.is_closed(event.stream_id)
            and self.is_open_for_us(event.stream_id)
            and not self.h2_conn.streams[event.stream_id].state_machine.headers_sent
        )

    def handle_h2_event(self, event: h2.events.Event) -> Commands[bool]:
        if isinstance(event, h2.events.StreamReset) and not self._may_reset(event.stream_id):
            yield from self.protocol_error("too many resets", h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
            return True
        if isinstance(event, h2.exceptions.ProtocolError):  # h2 could not read the frames
            yield RefusedRequestHook(Refused("malformed HTTP/2"))
        if isinstance(event, h2.events.RequestReceived):
            self._heads += 1
            # mitmproxy overwrites :scheme before its hooks run.
            scheme = b"https" if self._pin.tls else b"http"
            if [bytes(value) for name, value in event.headers or () if name == b":scheme"] != [scheme]:
                yield RefusedRequestHook(Refused(":scheme is not that of the connection"))
                yield from self.protocol_error("wrong scheme")
                return True
        return (yield from super().handle_h2_event(event))

    def _may_reset(self, stream: int) -> bool:
        if stream in self._answered:
            self._answered = {one for one in self._answered if not self.is_closed(one)}
            return True
        now = time.monotonic()
        self._resets = min(MAX_RESETS, self._resets + (now - self._resets_refilled) * RESETS_PER_SECOND) - 1
        self._resets_refilled = now
        return self._resets >= 0


class StrictHttp2Client(_CalmHttp2, _http2.Http2Client):
    """Speaks HTTP/2 with a server."""

    def __init__(self, context: Context, pin: Pin) -> None:
        super().__init__(context)
        self._prepare()
        self.going_away = False
        """Whether the server accepts no new request."""
        self._abandoned: list[int] = []
        self._pin = pin
        pin.upstreams.append(self)

    def _handle_event(self, event: events.Event) -> Commands[None]:
        if self.going_away and isinstance(event, _base.HttpEvent) and event.stream_id not in self.our_stream_id:
            if isinstance(event, _events.RequestHeaders):
                yield self._lost(event.stream_id)
            return
        if isinstance(event, _base.HttpEvent) and not self._knows(event):
            return  # a late event of an ended stream
        yield from super()._handle_event(event)
        while self._abandoned:
            yield self._lost(self._abandoned.pop())
        if self.going_away and not self.streams and self.conn.state & ConnectionState.CAN_WRITE:
            yield commands.CloseConnection(self.conn)

    def _knows(self, event: _base.HttpEvent) -> bool:
        begins = isinstance(event, _events.RequestHeaders)
        return begins or event.stream_id in self.our_stream_id or event.stream_id in self.stream_queue

    def _known(self) -> int:
        return len(self.our_stream_id)

    def _forget(self) -> None:
        super()._forget()
        kept = self.streams.keys() | self.unacknowledged.keys()
        self.their_stream_id = {ours: theirs for ours, theirs in self.their_stream_id.items() if ours in kept}
        self.our_stream_id = {theirs: ours for ours, theirs in self.their_stream_id.items()}

    def _going_away(self, event: _GoingAway) -> None:
        self.going_away = True
        lost = [stream for stream in self.streams if stream > event.last]
        for stream in lost:
            del self.streams[stream]
        self._abandoned = [self.their_stream_id[stream] for stream in lost] + list(self.stream_queue)
        self.stream_queue.clear()

    def _lost(self, stream: int) -> _base.ReceiveHttp:
        return _base.ReceiveHttp(self.ReceiveProtocolError(stream, "not taken", self.ReceiveProtocolError.code))

    def waiting(self, stream: int) -> int:
        """Return the bytes of a client's stream that the server has not taken yet."""
        queued = [event for event in self.stream_queue.get(stream, ()) if isinstance(event, _events.RequestData)]
        ours = self.our_stream_id.get(stream)
        return sum(len(event.data) for event in queued) + (0 if ours is None else _waiting(self, ours))

    def _handle_event2(self, event: events.Event) -> Commands[None]:
        if isinstance(event, Acknowledge):
            yield from self._acknowledge(event)
            return
        if not isinstance(event, _events.RequestHeaders):
            yield from super()._handle_event2(event)
            return
        headers = yield from _http2.format_h2_request_headers(self.context, event)
        self.last_activity = time.time()
        self.h2_conn.send_headers(
            event.stream_id, [self._sealed(name, value) for name, value in headers], end_stream=event.end_stream
        )
        self.streams[event.stream_id] = _http2.StreamState.EXPECTING_HEADERS
        yield commands.SendData(self.conn, self.h2_conn.data_to_send())

    def _sealed(self, name: bytes, value: bytes) -> tuple[bytes, bytes]:
        if name in _SENSITIVE or name in self._pin.sensitive:
            return NeverIndexedHeaderTuple(name, value)
        return name, value
