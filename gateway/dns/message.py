"""DNS messages as bytes: strict readers of queries and answers, and a builder.

Pure. Names are compared as tuples of lower-case wire labels, never as printed text. A printed name is ambiguous: a
label can contain a dot or a backslash. Code that prints a name before it compares can decide on another name than the
one on the wire.

- `parse_query` accepts exactly one question, at most one OPT record, no compression, and no bytes after the message.
- `parse_answer` follows compression pointers only backwards, and at most `_MAX_POINTERS` of them per name.
- A built message copies nothing from a received one, except the id and the question's bytes in an answer.
- For any bytes, a reader returns a value or raises `MalformedMessage`. The pointer limit bounds its work.

`gateway.dns.queries` judges names.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address

HEADER = struct.Struct("!HHHHHH")
MAX_NAME = 255
MAX_LABEL = 63
MAX_RECORDS = 256
_MAX_POINTERS = 16
_POINTER = 0xC0
EDNS_UDP_SIZE = 1232

type Labels = tuple[bytes, ...]


class QType(IntEnum):
    """The record types that the gateway distinguishes."""

    A = 1
    CNAME = 5
    SOA = 6
    PTR = 12
    AAAA = 28
    OPT = 41
    SVCB = 64
    HTTPS = 65


class RCode(IntEnum):
    """Response codes; BADVERS needs the extended bits of an OPT record."""

    NOERROR = 0
    FORMERR = 1
    SERVFAIL = 2
    NXDOMAIN = 3
    NOTIMP = 4
    REFUSED = 5
    BADVERS = 16


CLASS_IN = 1
EDE_BLOCKED = 15
EDE_PROHIBITED = 18
EDE_NETWORK_ERROR = 23


class MalformedMessage(ValueError):
    """The bytes are not a DNS message that the gateway accepts."""


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a message."""

    ident: int
    flags: int
    questions: int
    answers: int
    authorities: int
    additionals: int

    @property
    def is_response(self) -> bool:
        return bool(self.flags & 0x8000)

    @property
    def opcode(self) -> int:
        return (self.flags >> 11) & 0xF

    @property
    def truncated(self) -> bool:
        return bool(self.flags & 0x0200)

    @property
    def recursion_desired(self) -> bool:
        return bool(self.flags & 0x0100)

    @property
    def rcode(self) -> int:
        return self.flags & 0xF


@dataclass(frozen=True, slots=True)
class Question:
    """One question.

    Attributes:
        labels: lower-cased, without the root label.
        raw_name: the bytes of the name on the wire, root label included.
    """

    labels: Labels
    raw_name: bytes
    qtype: int
    qclass: int


@dataclass(frozen=True, slots=True)
class Query:
    """A complete query.

    Attributes:
        udp_size: the largest UDP answer that the client accepts, in bytes; 512 without EDNS.
        edns_version: None without EDNS.
    """

    header: Header
    question: Question
    udp_size: int
    edns_version: int | None


@dataclass(frozen=True, slots=True)
class ResourceRecord:
    """One resource record of an answer section. `data` has its raw bytes; `target` is set for CNAME only."""

    owner: Labels
    rtype: int
    rclass: int
    ttl: int
    data: bytes
    target: Labels | None


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """An upstream's answer to one question. Only the answer section is read."""

    header: Header
    question: Question
    records: tuple[ResourceRecord, ...]


def lower(label: bytes) -> bytes:
    """Return a label in ASCII lower case; other bytes do not change."""
    return label.lower()


def parse_header(message: bytes) -> Header:
    """Read the header, the first 12 bytes.

    Raises:
        MalformedMessage: there are fewer bytes.
    """
    if len(message) < HEADER.size:
        raise MalformedMessage("shorter than a header")
    return Header(*HEADER.unpack_from(message))


def _plain_name(message: bytes, offset: int) -> tuple[Labels, int]:
    """Read an uncompressed name; return its labels and the offset after it."""
    labels: list[bytes] = []
    start = offset
    while True:
        if offset >= len(message):
            raise MalformedMessage("name runs over the end")
        length = message[offset]
        offset += 1
        if length == 0:
            return tuple(labels), offset
        if length > MAX_LABEL:
            raise MalformedMessage("pointer or unknown label type in a question")
        if offset + length > len(message) or offset + length + 1 - start > MAX_NAME:
            raise MalformedMessage("name too long")
        labels.append(lower(message[offset : offset + length]))
        offset += length


def _name(message: bytes, offset: int) -> tuple[Labels, int]:
    """Read a name with compression. Each pointer must point before the part of the name that contains it."""
    labels: list[bytes] = []
    total = 1
    end: int | None = None
    floor = offset
    pointers = 0
    while True:
        if offset >= len(message):
            raise MalformedMessage("name runs over the end")
        length = message[offset]
        if length & _POINTER == _POINTER:
            if offset + 2 > len(message):
                raise MalformedMessage("incomplete pointer")
            target = ((length & 0x3F) << 8) | message[offset + 1]
            end = offset + 2 if end is None else end
            pointers += 1
            if target >= floor or target < HEADER.size or pointers > _MAX_POINTERS:
                raise MalformedMessage("pointer does not point backwards")
            offset = floor = target
            continue
        if length & _POINTER:
            raise MalformedMessage("unknown label type")
        offset += 1
        if length == 0:
            return tuple(labels), offset if end is None else end
        total += length + 1
        if offset + length > len(message) or total > MAX_NAME:
            raise MalformedMessage("name too long")
        labels.append(lower(message[offset : offset + length]))
        offset += length


def _question(message: bytes, offset: int) -> tuple[Question, int]:
    labels, end = _plain_name(message, offset)
    if end + 4 > len(message):
        raise MalformedMessage("incomplete question")
    qtype, qclass = struct.unpack_from("!HH", message, end)
    return Question(labels, message[offset:end], qtype, qclass), end + 4


def parse_query(message: bytes) -> Query:
    """Read a client's complete query.

    Raises:
        MalformedMessage: the message is not exactly one question and at most one OPT record.
    """
    header = parse_header(message)
    if (header.questions, header.answers, header.authorities) != (1, 0, 0) or header.additionals > 1:
        raise MalformedMessage("not exactly one question")
    question, offset = _question(message, HEADER.size)
    udp_size, version = 512, None
    if header.additionals:
        udp_size, version, offset = _opt(message, offset)
    if offset != len(message):
        raise MalformedMessage("bytes after the message")
    return Query(header, question, udp_size, version)


def _opt(message: bytes, offset: int) -> tuple[int, int, int]:
    """Read an OPT record: (UDP size, EDNS version, offset after it). Its options are skipped."""
    if offset + 11 > len(message) or message[offset] != 0:
        raise MalformedMessage("additional record is not OPT")
    rtype, size, extended, length = struct.unpack_from("!HHIH", message, offset + 1)
    if rtype != QType.OPT:
        raise MalformedMessage("additional record is not OPT")
    end = offset + 11 + length
    if end > len(message):
        raise MalformedMessage("incomplete OPT record")
    return max(512, size), (extended >> 16) & 0xFF, end


def parse_answer(message: bytes) -> UpstreamAnswer:
    """Read an upstream's answer: header, question, answer section.

    Raises:
        MalformedMessage: the message is malformed, or has more than `MAX_RECORDS` answers.
    """
    header = parse_header(message)
    if header.questions != 1 or header.answers > MAX_RECORDS:
        raise MalformedMessage("not one question, or too many answers")
    question, offset = _question(message, HEADER.size)
    if header.truncated:
        return UpstreamAnswer(header, question, ())
    records: list[ResourceRecord] = []
    for _ in range(header.answers):
        owner, offset = _name(message, offset)
        if offset + 10 > len(message):
            raise MalformedMessage("incomplete record")
        rtype, rclass, ttl, length = struct.unpack_from("!HHIH", message, offset)
        offset += 10
        end = offset + length
        if end > len(message):
            raise MalformedMessage("incomplete record data")
        target: Labels | None = None
        if rtype == QType.CNAME:
            target, behind = _name(message, offset)
            if behind != end:
                raise MalformedMessage("CNAME data has a wrong length")
        records.append(ResourceRecord(owner, rtype, rclass, ttl & 0x7FFFFFFF, message[offset:end], target))
        offset = end
    return UpstreamAnswer(header, question, tuple(records))


def encode_name(host: str) -> bytes:
    """Return the wire form of a canonical host name (ASCII).

    Raises:
        MalformedMessage: a label or the name is too long.
    """
    raw = bytearray()
    for label in host.encode("ascii").split(b"."):
        if not 0 < len(label) <= MAX_LABEL:
            raise MalformedMessage("a label is empty or longer than 63 bytes")
        raw.append(len(label))
        raw += label
    raw.append(0)
    if len(raw) > MAX_NAME:
        raise MalformedMessage("name too long")
    return bytes(raw)


def build_query(ident: int, host: str, qtype: QType) -> bytes:
    """Return a new recursive query for `host`, with EDNS for the UDP size and no options."""
    question = encode_name(host) + struct.pack("!HH", qtype, CLASS_IN)
    opt = b"\x00" + struct.pack("!HHIH", QType.OPT, EDNS_UDP_SIZE, 0, 0)
    return HEADER.pack(ident, 0x0100, 1, 0, 0, 1) + question + opt


def build_error(header: Header, rcode: RCode) -> bytes:
    """Return an answer without a question, for a query whose question is malformed."""
    flags = 0x8000 | (header.flags & 0x7900) | 0x0080 | (rcode & 0xF)
    return HEADER.pack(header.ident, flags, 0, 0, 0, 0)


def build_answer(
    query: Query,
    rcode: RCode,
    addresses: tuple[IPv4Address | IPv6Address, ...] = (),
    *,
    ttl: int = 0,
    ede: tuple[int, str] | None = None,
    limit: int = 65535,
) -> bytes:
    """Return an answer to `query`, built from its id, its question's bytes and the arguments.

    Args:
        addresses: each becomes an A or AAAA record of the question's name.
        ede: extended error (info code, text), sent if the query has EDNS; the text is truncated to 120 bytes.
        limit: largest size in bytes; a larger answer is sent empty with TC set.
    """
    question = query.question.raw_name + struct.pack("!HH", query.question.qtype, query.question.qclass)
    answers = b"".join(
        struct.pack("!HHHIH", 0xC00C, QType.A if item.version == 4 else QType.AAAA, CLASS_IN, ttl, len(item.packed))
        + item.packed
        for item in addresses
    )
    opt = b""
    if query.edns_version is not None:
        options = b""
        if ede is not None:
            text = ede[1].encode("utf-8")[:120].decode("utf-8", "ignore").encode("utf-8")
            options = struct.pack("!HHH", 15, len(text) + 2, ede[0]) + text
        opt = b"\x00" + struct.pack("!HHIH", QType.OPT, EDNS_UDP_SIZE, (rcode >> 4) << 24, len(options)) + options
    flags = 0x8080 | (0x0100 if query.header.recursion_desired else 0) | (rcode & 0xF)
    if HEADER.size + len(question) + len(answers) + len(opt) > limit:
        return HEADER.pack(query.header.ident, flags | 0x0200, 1, 0, 0, 0) + question
    header = HEADER.pack(query.header.ident, flags, 1, len(addresses), 0, 1 if opt else 0)
    return header + question + answers + opt
