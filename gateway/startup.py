"""Reads the packets with which a PostgreSQL client begins a connection, and makes the gateway's answers to them.

`read_packet` takes *all bytes received so far* and returns one value. After `NeedMore` the caller passes more bytes.

- Pure. The reader never raises: a packet that is not exactly well-formed is `Refused`, other bytes are `NotPostgres`.
- The verdict does not depend on segmentation. Work is limited: `MAX_PACKET` bytes, as in the server.
- A `Startup` has each parameter once. Its texts are valid UTF-8 without control characters.
- Only parameters of `PASSED` may go to the server: the client's other settings are those of an SQL statement. `user` is
  not among them, because the gateway logs in as another user. Nor is `replication`, which opens another protocol, nor
  `options`, which can contain any setting.

Source: PostgreSQL's documentation, "Message Formats", and src/backend/tcop/backend_startup.c.
"""

import struct
from dataclasses import dataclass

from gateway.tls.hello import NeedMore, Refused

MAX_PACKET = 10_000
MAX_KEY = 256
"""The limit of the secret part of a cancel key, in bytes."""
MAX_NAME = 63
"""The limit of the name of a database or user, in bytes: the server truncates a longer one."""

SSL_REQUEST = struct.pack("!II", 8, 80877103)
ACCEPTED = b"S"
DECLINED = b"N"

_CANCEL, _SSL, _GSS = 80877102, 80877103, 80877104
_MAJOR = 3
_NO_SETTINGS = frozenset({"user", "database", "replication", "options"})
_OPTION = "_pq_."
PASSED = frozenset(
    {
        "application_name",
        "client_encoding",
        "datestyle",
        "default_transaction_isolation",
        "default_transaction_read_only",
        "extra_float_digits",
        "geqo",
        "idle_in_transaction_session_timeout",
        "intervalstyle",
        "jit",
        "lock_timeout",
        "search_path",
        "statement_timeout",
        "timezone",
    }
)
"""Names, in lower case, of the parameters that are sent to the server."""

DENIED = "28000"
PROTOCOL = "08P01"
UNREACHABLE = "08006"
UNAVAILABLE = "57P03"
TOO_MANY = "53300"


@dataclass(frozen=True, slots=True)
class NotPostgres:
    """The bytes do not begin a PostgreSQL connection."""


@dataclass(frozen=True, slots=True)
class SslRequest:
    """The client asks for TLS. `length` is that of the packet in bytes, as in the other classes."""

    length: int


@dataclass(frozen=True, slots=True)
class GssRequest:
    """The client asks for GSSAPI encryption."""

    length: int


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """The client asks to cancel the query of another connection, which `key` identifies: process id and secret."""

    key: bytes
    length: int


@dataclass(frozen=True, slots=True)
class Startup:
    """The client opens a session.

    Attributes:
        minor: the minor version of protocol 3 that the client asks for.
        database: the name that it asks for; the user's name if it names none.
        parameters: those that may be sent to the server, without the database.
        options: names of protocol options (`_pq_.`), of which the gateway supports none.
    """

    minor: int
    database: str
    parameters: tuple[tuple[str, str], ...]
    options: tuple[str, ...]
    length: int


type Packet = SslRequest | GssRequest | CancelRequest | Startup
type PacketVerdict = NeedMore | NotPostgres | Refused | Packet


def read_packet(data: bytes) -> PacketVerdict:
    """Read the packet at the start of `data`. Bytes can be left after it."""
    if data[:2] != b"\0\0"[: len(data)]:
        return NotPostgres()
    if len(data) < 4:
        return NeedMore(8)
    length = int.from_bytes(data[:4])
    if not 8 <= length <= MAX_PACKET:
        return NotPostgres()
    if len(data) < 8:
        return NeedMore(8)
    code = int.from_bytes(data[4:8])
    if code in (_SSL, _GSS):
        if length != 8:
            return Refused("a request for encryption has a wrong length")
        return SslRequest(length) if code == _SSL else GssRequest(length)
    if code != _CANCEL and code >> 16 not in (2, _MAJOR):
        return NotPostgres()
    if len(data) < length:
        return NeedMore(length)
    body = data[8:length]
    if code == _CANCEL:
        if not 8 <= len(body) <= 4 + MAX_KEY:
            return Refused("a cancel request has a wrong length")
        return CancelRequest(body, length)
    if code >> 16 != _MAJOR:
        return Refused("the client speaks an old version of the protocol; only version 3 is supported")
    return _startup(body, code & 0xFFFF, length)


def _startup(body: bytes, minor: int, length: int) -> Startup | Refused:
    parts = body.split(b"\0")
    if len(parts) < 2 or parts[-2:] != [b"", b""] or len(parts) % 2:
        return Refused("malformed startup packet")
    named: dict[str, str] = {}
    for raw_name, raw_value in zip(parts[:-2:2], parts[1:-2:2], strict=True):
        name, value = _text(raw_name), _text(raw_value)
        if not name or value is None:
            return Refused("a startup parameter is empty, not UTF-8, or has a control character")
        # The server ignores letter case in names of settings, and of nothing else.
        key = name if name in _NO_SETTINGS or name.startswith(_OPTION) else name.lower()
        if key in named or (key in _NO_SETTINGS and key != name):
            return Refused("a startup parameter is there twice, or in another letter case")
        named[key] = value
    options = tuple(name for name in named if name.startswith(_OPTION))
    user = named.pop("user", "")
    database = named.pop("database", "") or user
    if not user or not 0 < len(database.encode()) <= MAX_NAME:
        return Refused(f"a startup packet needs a user and the name of a database with at most {MAX_NAME} bytes")
    if "replication" in named:
        return Refused("connections for replication are not supported")
    other = next((name for name in named if name not in PASSED and name not in options), None)
    if other is not None:
        shown = other if other.replace("_", "").replace(".", "").isalnum() and other.isascii() else "?"
        return Refused(f"the startup parameter {shown[:64]} is not relayed; use SET after the login")
    passed = tuple((name, value) for name, value in named.items() if name in PASSED)
    return Startup(minor, database, passed, options, length)


def _text(raw: bytes) -> str | None:
    """Return a text that is valid UTF-8 and has only printable characters, otherwise None."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None


def startup_packet(user: str, database: str, parameters: tuple[tuple[str, str], ...]) -> bytes:
    """Return the packet that opens a session in protocol 3.0."""
    texts = ["user", user, "database", database, *(text for pair in parameters for text in pair)]
    body = b"".join(text.encode() + b"\0" for text in texts) + b"\0"
    return struct.pack("!II", len(body) + 8, _MAJOR << 16) + body


def cancel_packet(key: bytes) -> bytes:
    """Return the packet that cancels the query of the connection with this key."""
    return struct.pack("!II", len(key) + 8, _CANCEL) + key


def message(kind: bytes, body: bytes) -> bytes:
    """Return a message of the protocol after startup: its type, its length and its body."""
    return kind + (len(body) + 4).to_bytes(4) + body


def negotiated(options: tuple[str, ...]) -> bytes:
    """Return the message that says: the session has protocol 3.0 and none of these options."""
    names = b"".join(name.encode() + b"\0" for name in options)
    return message(b"v", struct.pack("!II", _MAJOR << 16, len(options)) + names)


def error(code: str, text: str, hint: str = "") -> bytes:
    """Return the message with which the gateway ends a session. `code` is an SQLSTATE."""
    fields = (("S", "FATAL"), ("V", "FATAL"), ("C", code), ("M", text), *((("H", hint),) if hint else ()))
    return message(b"E", b"".join(f"{name}{value}".encode() + b"\0" for name, value in fields) + b"\0")


def denial(rule: str, reason: str, hint: str = "") -> bytes:
    """Return the message for a session that policy or the gateway does not allow."""
    return error(DENIED, f"Denied by policy rule {rule}: {reason}", hint)
