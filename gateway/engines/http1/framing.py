"""Framing of HTTP/1.1 messages: request bodies, response heads and bodies, and heads to send. Sans-IO.

- `gateway.tls.hello.read_head` reads a request head, and `gateway.translate` judges it, before its body is read here.
- Responses are parsed by llhttp (httptools) with all its checks on. What llhttp refuses is a `FramingError`.
- Trailers are dropped.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import httptools

from gateway.tls.hello import NeedMore, Refused, RequestHead, read_head
from gateway.translate import Headers, RequestParts
from gateway.verdicts import ForwardHead

MAX_RESPONSE_HEAD = 128 * 1024
MAX_INFORMATIONAL = 16
_MAX_CHUNK_LINE = 256
_KEPT_HEADS = 128
_MAX_KEPT_HEAD = 4096
_TOO_LARGE = "the response head is over the limit"
_MAX_TRAILERS = 16 * 1024
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


_HTTP2 = re.compile(rb"\0[\0-\xff]{2}[\x04\x07]\0\0{4}", re.DOTALL)
"""The first frame of an HTTP/2 server: SETTINGS, or GOAWAY."""
_AUTHENTICATION = frozenset({b"authorization", b"www-authenticate"})
_OF_CONNECTION = frozenset({b"proxy-authenticate", b"persistent-auth"})
_CONNECTION_SCHEME = re.compile(rb"\b(?:ntlm|negotiate|kerberos)\b", re.IGNORECASE)


class FramingError(Exception):
    """A message is malformed, or exceeds a limit."""


class AnotherProtocol(FramingError):
    """The server speaks HTTP/2."""


class Body(Protocol):
    """The body of one request. `done` is True after its last byte. `chunked` is its coding."""

    done: bool
    chunked: bool

    def take(self, data: bytearray) -> bytes:
        """Remove the bytes of this body from the start of `data`, and return its content.

        Raises:
            FramingError: it is malformed.
        """
        ...


class SizedBody:
    """A body with a known length in bytes."""

    chunked = False

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0

    def take(self, data: bytearray) -> bytes:
        """See `Body`."""
        part = bytes(data[: self._left])
        del data[: len(part)]
        self._left -= len(part)
        self.done = self._left == 0
        return part


class ChunkedBody:
    """A body in the chunked coding."""

    chunked = True

    def __init__(self) -> None:
        self.done = False
        self._left = 0
        self._ends_chunk = False
        self._trailers: int | None = None

    def take(self, data: bytearray) -> bytes:
        """See `Body`."""
        content = bytearray()
        while not self.done and data:
            if self._left:
                part = data[: self._left]
                del data[: len(part)]
                self._left -= len(part)
                self._ends_chunk = not self._left
                content += part
                continue
            line = _line(data)
            if line is None:
                break
            if self._ends_chunk:
                if line:
                    raise FramingError("a chunk without its end")
                self._ends_chunk = False
            elif self._trailers is not None:
                self._trailer(line)
            else:
                found = _CHUNK_LINE.fullmatch(line)
                if found is None:
                    raise FramingError("a malformed chunk")
                self._left = int(found[1], 16)
                if not self._left:
                    self._trailers = 0
        return bytes(content)

    def _trailer(self, line: bytes) -> None:
        if not line:
            self.done = True
            return
        self._trailers = (self._trailers or 0) + len(line)
        if self._trailers > _MAX_TRAILERS or _TRAILER.fullmatch(line) is None:
            raise FramingError("malformed trailers")


def _line(data: bytearray) -> bytes | None:
    """Remove a line from the start of `data`; None if its end has not arrived."""
    end = data.find(b"\n")
    if end < 0 and len(data) <= _MAX_CHUNK_LINE:
        return None
    if end < 1 or end > _MAX_CHUNK_LINE or data[end - 1] != 0x0D:
        raise FramingError("a malformed line of a chunked body")
    line = bytes(data[: end - 1])
    if b"\r" in line:
        raise FramingError("a malformed line of a chunked body")
    del data[: end + 1]
    return line


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request head that was read from a client.

    Attributes:
        size: the bytes of the head.
        length: the bytes of its body, None for a chunked one. Valid if `translate` accepts its framing.
        closes: the client asks for the end of the connection after the response.
    """

    parts: RequestParts
    size: int
    length: int | None
    closes: bool

    @property
    def minor_version(self) -> int:
        """The minor version of HTTP/1."""
        return self.parts.version - 10

    def body(self) -> Body:
        """Return its body, of which nothing is taken."""
        return ChunkedBody() if self.length is None else SizedBody(self.length)


def read_request(data: bytes) -> ClientRequest | NeedMore | Refused:
    """Read a request head from the start of `data`: see `read_head`. Small ones are kept, since clients repeat them."""
    return _read_before(data) if len(data) <= _MAX_KEPT_HEAD else _read(data)


def _read(data: bytes) -> ClientRequest | NeedMore | Refused:
    head = read_head(data)
    if not isinstance(head, RequestHead):
        return head
    parts = RequestParts(10 + head.minor_version, head.method, head.target, b"", b"", head.headers)
    return ClientRequest(parts, head.length, _length(head), _closes(head))


_read_before = lru_cache(maxsize=_KEPT_HEADS)(_read)


def _length(head: RequestHead) -> int | None:
    length = 0
    for name, value in head.headers:
        lower = name.lower()
        if lower == b"transfer-encoding":
            return None
        if lower == b"content-length" and value.isdigit():
            length = int(value)
    return length


def _closes(head: RequestHead) -> bool:
    options = {
        part.strip(b" \t").lower()
        for name, value in head.headers
        if name.lower() == b"connection"
        for part in value.split(b",")
    }
    return b"close" in options or (head.minor_version == 0 and b"keep-alive" not in options)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request head as it is sent.

    Attributes:
        data: its bytes.
        expects: the client waits for `100 Continue`. The server is not asked for it.
        binds: see `binds_connection`.
    """

    data: bytes = field(repr=False)
    expects: bool
    binds: bool


@dataclass(frozen=True, slots=True)
class Begun:
    """The head of a streamed response as it is sent.

    Attributes:
        data: its bytes.
        chunked: the body is sent in the chunked coding.
        unframed: the chunked coding is removed for a client of HTTP/1.0, so the end of the connection ends the body.
    """

    data: bytes = field(repr=False)
    chunked: bool
    unframed: bool


class HeadWriter:
    """Writes the heads of one flow. Keeps the last request and the last response, since both are repeated."""

    def __init__(self) -> None:
        self._last: tuple[ForwardHead, bytes, int, Sent] | None = None
        self._begun: tuple[Headers, int, int, Begun] | None = None

    def write(self, method: bytes, minor_version: int, head: ForwardHead) -> Sent:
        """Return a request head.

        Raises:
            FramingError: see `check_framing`.
        """
        last = self._last
        if last is not None and last[0] is head and last[1] == method and last[2] == minor_version:
            return last[3]
        fields = tuple(field for field in head.headers if field[0].lower() != b"expect")
        data = request_head(method, head.target, minor_version, fields)
        sent = Sent(data, len(fields) < len(head.headers), binds_connection(fields))
        self._last = head, method, minor_version, sent
        return sent

    def begin(self, status: int, reason: str, minor_version: int, headers: Headers) -> Begun:
        """Return the head of a streamed response for a client with this minor version."""
        last = self._begun
        if last is not None and last[0] is headers and last[1] == status and last[2] == minor_version:
            return last[3]
        chunked, fields = any(name.lower() == b"transfer-encoding" for name, _ in headers), headers
        unframed = chunked and minor_version == 0
        if unframed:
            fields = tuple(one for one in headers if one[0].lower() != b"transfer-encoding")
        begun = Begun(response_head(status, reason, fields), chunked and not unframed, unframed)
        self._begun = headers, status, minor_version, begun
        return begun


def binds_connection(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request or response with these headers authenticates its connection, or asks for that.

    With NTLM and Negotiate a server takes later requests of the connection for those of the same user.
    """
    for name, value in headers:
        lower = name.lower()
        if lower in _OF_CONNECTION or (lower in _AUTHENTICATION and _CONNECTION_SCHEME.search(value)):
            return True
    return False


def check_framing(headers: Headers) -> None:
    """Check that a request head to send has at most one framing header. A second check, after `gateway.translate`.

    Raises:
        FramingError: two parsers could read the end of the request differently.
    """
    if sum(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in headers) > 1:
        raise FramingError("more than one framing header")


def request_head(method: bytes, target: bytes, minor_version: int, headers: Headers) -> bytes:
    """Return a request head as bytes on the wire.

    Raises:
        FramingError: see `check_framing`.
    """
    check_framing(headers)
    return b"%s %s HTTP/1.%d\r\n%s\r\n" % (method, target, minor_version, _lines(headers))


def response_head(status: int, reason: str, headers: Headers) -> bytes:
    """Return a response head as bytes on the wire."""
    return b"HTTP/1.1 %d %s\r\n%s\r\n" % (status, reason.encode("ascii", "replace"), _lines(headers))


def _lines(headers: Headers) -> bytes:
    return b"".join([b"%s: %s\r\n" % field for field in headers])


class Response:
    """Reads one final response from a server. `bodiless`: the request was HEAD.

    Attributes:
        begun: bytes have arrived.
        headed: the final head is complete; `status`, `headers` and `bodiless` are valid.
        bodiless: the response has no body, whatever its head says.
        complete: the body is complete.
        framed: the length of the body is known; otherwise it ends with the connection.
        reusable: the connection can carry another request. Valid when `complete`.
        upgraded: bytes after the head of a 101; None if the response is no 101.
    """

    def __init__(self, *, bodiless: bool) -> None:
        self.begun = False
        self.headed = False
        self.complete = False
        self.framed = False
        self.upgraded: bytes | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.bodiless = bodiless
        self._body: list[bytes] = []
        self._extra = False
        self._keeps_alive = False
        self._problem: str | None = None
        self._informational = 0
        self._size = 0
        self._parser = httptools.HttpResponseParser(self)

    @property
    def reusable(self) -> bool:
        """See the class."""
        return self.complete and self.framed and self._keeps_alive and not self._extra

    def feed(self, data: bytearray) -> list[bytes]:
        """Take all received bytes; return the pieces of the body in them.

        Raises:
            FramingError: the response is malformed.
        """
        received = bytes(data)
        data.clear()
        if not self.begun and _HTTP2.match(received) is not None:
            raise AnotherProtocol("the server speaks HTTP/2")
        self.begun = True
        if not self.headed:
            self._size += len(received)
        try:
            self._parser.feed_data(received)
        except httptools.HttpParserUpgrade as upgrade:
            self.upgraded = received[upgrade.args[0] :]
        except httptools.HttpParserError:
            if not self.complete:
                raise FramingError("the response is malformed") from None
            self._extra = True
        if not self.headed and self._size > MAX_RESPONSE_HEAD:
            self._problem = _TOO_LARGE
        if self._problem is not None:
            raise FramingError(self._problem)
        body, self._body = self._body, []
        return body

    def end(self) -> None:
        """Take the end of the connection.

        Raises:
            FramingError: the response is incomplete.
        """
        if self.complete:
            return
        if not self.headed or self.framed:
            raise FramingError("the response is incomplete")
        self.complete = True

    def release(self) -> None:
        """Drop the parser, which refers to this object. Without this, only the garbage collector would free both."""
        del self._parser

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._extra = self._extra or self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.headed:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.headed:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            self._informational += 1
            if self._informational > MAX_INFORMATIONAL:
                self._problem = "too many informational responses"
            self.headers = []
            return
        names = {name.lower() for name, _ in self.headers}
        if sum([len(name) + len(value) for name, value in self.headers]) > MAX_RESPONSE_HEAD:
            self._problem = _TOO_LARGE
        self.status, self.headed = status, True
        self._keeps_alive = bool(self._parser.should_keep_alive())
        self.bodiless = self.complete = self.bodiless or status in (101, 204, 304)
        self.framed = self.bodiless or b"content-length" in names or b"transfer-encoding" in names
        if b"transfer-encoding" in names and self._parser.get_http_version() != "1.1":
            self._problem = "a transfer coding in a response that is not HTTP/1.1"

    def on_body(self, data: bytes) -> None:
        if self.complete:
            self._extra = True
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        self.complete = self.complete or self.headed
