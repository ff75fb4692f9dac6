"""mitmproxy's HTTP/2 connections, made strict.

- A stream whose `:scheme` is not the connection's is refused; mitmproxy overwrites it unseen.
- Answers to what cannot be relayed are pages of `pages`, not mitmproxy's own.
- A peer that resets streams, or sends frames that move nothing (PING, SETTINGS, PRIORITY, empty DATA), without end is
  told to calm down, and its connection ends. Endless header blocks end in h2 itself.
- Headers that may carry a secret are sent never-indexed (RFC 7541, 7.1.3): they enter no compression table that is
  shared with what the sandbox chooses, and the frame's length says nothing about a guess.
"""

import time
from typing import Final

import h2.errors
import h2.events
import h2.exceptions
from hpack import NeverIndexedHeaderTuple
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers.http import _events, _http2

from gateway.full import pages
from gateway.full.pin import Commands, Pin, RefusedRequestHook

MAX_RESETS = 100
"""Streams of one HTTP/2 connection that its client may reset."""
IDLE_FRAMES = 1000
IDLE_FRAMES_PER_SECOND = 100
"""Frames that move nothing: so many at once, and so many a second, on one connection."""

_SENSITIVE: Final = frozenset({b"authorization", b"proxy-authorization", b"cookie"})
_HEADERS_FRAMES: Final = (1, 9)


class _CalmHttp2(_http2.Http2Connection):
    """Bounds what a peer makes this side do for nothing."""

    _frames = float(IDLE_FRAMES)
    _refilled = 0.0

    def handle_h2_event(self, event: h2.events.Event) -> Commands[bool]:
        if _moves_nothing(event) and not self._take():
            yield from self.protocol_error("too many frames", h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
            return True
        return (yield from super().handle_h2_event(event))

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
        | h2.events.UnknownFrameReceived,
    )


class StrictHttp2Server(_CalmHttp2, _http2.Http2Server):
    """Speaks HTTP/2 with the sandbox."""

    def __init__(self, context: Context, pin: Pin) -> None:
        super().__init__(context)
        self._resets = 0
        self._heads = 0
        self._pin = pin
        pin.downstream = self
        pin.unfinished_head = self._unfinished_head

    def _unfinished_head(self) -> int | None:
        buffer = self.h2_conn.incoming_buffer
        # h2 says nowhere else what it is waiting for.
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
        yield from super()._handle_event(event)

    def _can_answer(self, event: _events.ResponseProtocolError) -> bool:
        return (
            event.code.http_status_code() is not None
            and not self.is_closed(event.stream_id)
            and self.is_open_for_us(event.stream_id)
            and not self.h2_conn.streams[event.stream_id].state_machine.headers_sent
        )

    def handle_h2_event(self, event: h2.events.Event) -> Commands[bool]:
        if isinstance(event, h2.events.StreamReset):
            self._resets += 1
            if self._resets > MAX_RESETS:
                yield from self.protocol_error("too many resets", h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
                return True
        if isinstance(event, h2.exceptions.ProtocolError):  # in the place of events that cannot be read
            yield RefusedRequestHook("malformed HTTP/2")
        if isinstance(event, h2.events.RequestReceived):
            self._heads += 1
            # mitmproxy overwrites :scheme before anybody else sees it.
            scheme = b"https" if self._pin.tls else b"http"
            if [bytes(value) for name, value in event.headers or () if name == b":scheme"] != [scheme]:
                yield RefusedRequestHook(":scheme is not that of the connection")
                yield from self.protocol_error("wrong scheme")
                return True
        return (yield from super().handle_h2_event(event))


class StrictHttp2Client(_CalmHttp2, _http2.Http2Client):
    """Speaks HTTP/2 with a server."""

    def __init__(self, context: Context, pin: Pin) -> None:
        super().__init__(context)
        self._pin = pin
        pin.upstreams.append(self)

    def _handle_event2(self, event: events.Event) -> Commands[None]:
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
