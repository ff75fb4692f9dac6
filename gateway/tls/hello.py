"""Reads the server name from the first bytes of a flow: a TLS ClientHello or a plain HTTP request head.

Both readers take *all bytes received so far* and return one value. After `NeedMore` the caller passes more bytes.

- Pure. The readers never raise: bytes that are not exactly well-formed are `Refused`.
- The verdict does not depend on segmentation: if a prefix has a verdict, every longer input has the same verdict.
- Work is limited: 64 KiB in all, `MAX_RECORDS` TLS records, `MAX_HEADERS` header lines.
- A `Hello` has exactly one server name, of type host_name, that is a clean LDH name. Ambiguous names are refused.
- ECH: an outer `encrypted_client_hello` extension looks like GREASE, so both set `Hello.ech`. A caller that splices the
  flow must refuse it, because the inner name is unknown. A caller that terminates TLS may accept it, because the
  extension is not forwarded. The inner type and ESNI are always refused.

The module does not decide whether a name is allowed.
"""

import re
from dataclasses import dataclass

from policy.names import InvalidName, wire_host

MAX_HELLO = 64 * 1024
"""The limit of a ClientHello, in bytes of its TLS records, headers included."""
MAX_RECORDS = 1024
MAX_RECORD = 16384
MAX_HEAD = 64 * 1024
"""The limit of a request head in bytes, its blank line included."""
MAX_REQUEST_LINE = 16 * 1024
MAX_HEADERS = 128

_HANDSHAKE = 22
_CLIENT_HELLO = 1
_EXT_SERVER_NAME = 0
_EXT_ALPN = 16
_EXT_ECH = 0xFE0D
_EXT_ESNI = 0xFFCE

TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_BAD_LINE_END = re.compile(rb"(?<!\r)\n|\r(?!\n)")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_REQUEST_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,64}) ([\x21-\x7e]+) HTTP/1\.([01])")
_PORT = re.compile(rb"[1-9][0-9]{0,4}")
_ABSOLUTE = re.compile(rb"(https?)://([^/?#]*)([/?].*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class NeedMore:
    """Not enough bytes for a verdict. Call again with at least `total` bytes."""

    total: int


@dataclass(frozen=True, slots=True)
class NotTls:
    """The first byte is not that of a TLS handshake record."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The bytes are refused.

    Attributes:
        reason: a fixed text that quotes nothing of the bytes.
        status: the status of an HTTP answer.
        asked_host: for the record; the clean host name (and port) that the request has in place of the expected one.
    """

    reason: str
    status: int = 400
    asked_host: str | None = None


@dataclass(frozen=True, slots=True)
class NoSni:
    """A well-formed ClientHello without a server name."""

    alpn: tuple[bytes, ...]
    raw_length: int


@dataclass(frozen=True, slots=True)
class Hello:
    """A well-formed ClientHello.

    `sni` is canonical (lower case, no trailing dot). `raw_length` is the length of its TLS records in bytes.
    """

    sni: str
    alpn: tuple[bytes, ...]
    ech: bool
    raw_length: int


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A strictly formed HTTP/1 request head.

    `host` and `port` come from Host; an absolute-form target must agree. `port` is None if Host has none. `length` is
    the length of the head in bytes, its blank line included.
    """

    method: bytes
    target: bytes
    minor_version: int
    headers: tuple[tuple[bytes, bytes], ...]
    host: str
    port: int | None
    length: int


type HelloVerdict = NeedMore | NotTls | NoSni | Hello | Refused
type HeadVerdict = NeedMore | RequestHead | Refused


class _Malformed(Exception):
    """Internal: a field is malformed. The text is a fixed reason."""


class _Fields:
    """A cursor over one structure. It is an error to read beyond its end, or not to reach its end."""

    __slots__ = ("_data", "_position")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._position

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise _Malformed("a field extends beyond the end of its structure")
        start = self._position
        self._position += count
        return self._data[start : self._position]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        return self.take(self.number(size))

    def end(self) -> None:
        if self.left:
            raise _Malformed("bytes after the end of a structure")


def read_hello(data: bytes) -> HelloVerdict:
    """Return the verdict on all bytes received so far, from the first of the flow."""
    if not data:
        return NeedMore(1)
    if data[0] != _HANDSHAKE:
        return NotTls()
    message = bytearray()
    position = 0
    expected: int | None = None
    for _ in range(MAX_RECORDS):
        if len(data) < position + 5:
            return NeedMore(position + 5)
        length = int.from_bytes(data[position + 3 : position + 5], "big")
        if data[position] != _HANDSHAKE or data[position + 1] != 3 or data[position + 2] > 4:
            return Refused("a record inside the ClientHello is not a TLS handshake record")
        if not 1 <= length <= MAX_RECORD:
            return Refused("TLS record with an invalid length")
        end = position + 5 + length
        if end > MAX_HELLO:
            return Refused("ClientHello over the limit")
        if len(data) < end:
            return NeedMore(end)
        message += data[position + 5 : end]
        position = end
        if message[0] != _CLIENT_HELLO:
            return Refused("first TLS message is not a ClientHello")
        if expected is None and len(message) >= 4:
            expected = 4 + int.from_bytes(message[1:4], "big")
            if expected > MAX_HELLO:
                return Refused("ClientHello over the limit")
        if expected is not None and len(message) >= expected:
            if len(message) > expected:
                return Refused("bytes after the ClientHello in its record")
            try:
                return _parse_hello(bytes(message[4:]), position)
            except _Malformed as error:
                return Refused(f"malformed ClientHello: {error}")
    return Refused("ClientHello in too many records")


def _parse_hello(body: bytes, raw_length: int) -> Hello | NoSni | Refused:
    fields = _Fields(body)
    if fields.number(2) >> 8 != 3:
        return Refused("unsupported TLS version")
    fields.take(32)
    if len(fields.vector(1)) > 32:
        return Refused("session id over the limit")
    suites = fields.vector(2)
    if not suites or len(suites) % 2:
        return Refused("malformed cipher suite list")
    if not fields.vector(1):
        return Refused("no compression method")
    if not fields.left:
        return NoSni((), raw_length)
    extensions = _Fields(fields.vector(2))
    fields.end()
    seen: dict[int, bytes] = {}
    while extensions.left:
        kind = extensions.number(2)
        content = extensions.vector(2)
        if kind in seen:
            return Refused("duplicate extension")
        seen[kind] = content
    if _EXT_ESNI in seen:
        return Refused("encrypted server name (ESNI)")
    ech = seen.get(_EXT_ECH)
    if ech is not None and ech[:1] != b"\x00":
        return Refused("encrypted ClientHello of the inner type")
    alpn = _parse_alpn(seen[_EXT_ALPN]) if _EXT_ALPN in seen else ()
    if _EXT_SERVER_NAME not in seen:
        return NoSni(alpn, raw_length)
    names = _Fields(_single(seen[_EXT_SERVER_NAME]))
    if names.number(1) != 0:
        return Refused("server name of unknown type")
    raw = names.vector(2)
    if names.left:
        return Refused("more than one server name")
    try:
        return Hello(wire_host(raw), alpn, ech is not None, raw_length)
    except InvalidName:
        return Refused("server name is not a clean host name")


def _single(content: bytes) -> bytes:
    """Return the content of the only vector (16-bit length) in `content`."""
    fields = _Fields(content)
    inner = fields.vector(2)
    fields.end()
    return inner


def _parse_alpn(content: bytes) -> tuple[bytes, ...]:
    protocols = _Fields(_single(content))
    found: list[bytes] = []
    while protocols.left:
        protocol = protocols.vector(1)
        if not protocol:
            raise _Malformed("empty protocol name")
        found.append(protocol)
    if not found:
        raise _Malformed("empty protocol list")
    return tuple(found)


def read_head(data: bytes) -> HeadVerdict:
    """Return the verdict on the bytes of an HTTP/1 request received so far.

    Lines end with CRLF, there is exactly one Host, and header names are tokens. Folded lines, control characters and
    NUL are refused. `gateway.translate` compares the host with the flow and judges the meaning of headers.
    """
    if not data:
        return NeedMore(1)
    if not TOKEN.match(data, 0, 1):
        return Refused("request does not begin with a method")
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD)
    # A lone CR at the very end may still become a line end.
    region = data[: end + 4] if end >= 0 else data[:MAX_HEAD].removesuffix(b"\r")
    line_end = region.find(b"\r\n")
    too_long = (len(region) if line_end < 0 else line_end) > MAX_REQUEST_LINE
    bad_end = _BAD_LINE_END.search(region)
    # The first violation on the wire decides, so a longer input cannot change the reason.
    if bad_end is not None and not (too_long and bad_end.start() > MAX_REQUEST_LINE):
        return Refused("a line does not end with CRLF")
    if too_long:
        return Refused("request line over the limit", 414)
    if end < 0:
        if len(data) >= MAX_HEAD:
            return Refused("request head over the limit", 431)
        return NeedMore(len(data) + 1)
    return _parse_head(region[:-4].split(b"\r\n"), end + 4)


def _parse_head(lines: list[bytes], length: int) -> RequestHead | Refused:
    request_line = _REQUEST_LINE.fullmatch(lines[0])
    if request_line is None:
        return Refused("malformed request line")
    method, target, minor = request_line.groups()
    if len(lines) - 1 > MAX_HEADERS:
        return Refused("too many headers", 431)
    headers: list[tuple[bytes, bytes]] = []
    hosts: list[bytes] = []
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or TOKEN.fullmatch(name) is None:
            return Refused("malformed header line")
        value = value.strip(b" \t")
        if _VALUE.fullmatch(value) is None:
            return Refused("control character in a header value")
        headers.append((name, value))
        if name.lower() == b"host":
            hosts.append(value)
    if len(hosts) != 1:
        return Refused("a request must have exactly one Host header")
    authority = split_authority(hosts[0])
    if authority is None:
        return Refused("Host is not a clean host name")
    absolute = split_absolute(target)
    if absolute is not None and split_authority(absolute[1]) != authority:
        return Refused("target and Host name different hosts", asked_host=asked(absolute[1]))
    return RequestHead(method, target, int(minor), tuple(headers), authority[0], authority[1], length)


def split_authority(raw: bytes) -> tuple[str, int | None] | None:
    """Return `host[:port]` in canonical form; None for any other form (user info, IP literals, invalid ports)."""
    name, colon, digits = raw.partition(b":")
    port: int | None = None
    if colon:
        if _PORT.fullmatch(digits) is None or int(digits) > 65535:
            return None
        port = int(digits)
    try:
        return wire_host(name), port
    except InvalidName:
        return None


def asked(authority: bytes) -> str | None:
    """Return an authority for a record, in canonical form; None if it is not clean, as it could be a credential."""
    found = split_authority(authority)
    if found is None:
        return None
    host, port = found
    return host if port is None else f"{host}:{port}"


def split_absolute(target: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Return (scheme, authority, origin-form target) of an absolute-form http(s) target; None for other targets."""
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        return None
    scheme, authority, rest = match.groups()
    if rest is None:
        rest = b"/"
    elif rest.startswith(b"?"):
        rest = b"/" + rest
    return scheme, authority, rest
