"""DNS messages as bytes: a strict reader for queries and answers, and a builder that starts from nothing.

Pure. Names are compared as tuples of lower-cased wire labels, never as printed text: a printed name is ambiguous (a dot
or a backslash may be inside a label), and a library that prints before it compares decides on another name than the
one on the wire.

- `parse_query` accepts exactly one question, no records but one OPT, no compression, nothing behind the message.
- `parse_answer` follows compression pointers backwards only and at most `_MAX_POINTERS` of them per name.
- Nothing of a received message is copied into a built one, but the id and the question's own bytes in an answer.
- Whatever the bytes, a reader returns or raises `MalformedMessage`; it reads no byte twice more than the pointer
  limit allows.

It does not decide what a name may do (`gateway.dns_logic`) and does no IO.
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
    """The record types this gateway knows by name."""

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
    """The bytes are not a DNS message this gateway reads."""


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
        raw_name: the name as it stood on the wire, root label included.
    """

    labels: Labels
    raw_name: bytes
    qtype: int
    qclass: int


@dataclass(frozen=True, slots=True)
class Query:
    """A query that was read to its last byte.

    Attributes:
        udp_size: what the client can take over UDP; 512 without EDNS.
        edns_version: None without EDNS.
    """

    header: Header
    question: Question
    udp_size: int
    edns_version: int | None


@dataclass(frozen=True, slots=True)
class Record:
    """One resource record of an answer section; `target` is set for CNAME only, `data` are the raw bytes."""

    owner: Labels
    rtype: int
    rclass: int
    ttl: int
    data: bytes
    target: Labels | None


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """An upstream's answer to one question, its answer section only: the rest is never believed."""

    header: Header
    question: Question
    records: tuple[Record, ...]


def lower(label: bytes) -> bytes:
    """ASCII lower case of a label; other bytes stay as they are."""
    return label.lower()


def parse_header(message: bytes) -> Header:
    """Read the first 12 bytes.

    Raises:
        MalformedMessage: there are fewer.
    """
    if len(message) < HEADER.size:
        raise MalformedMessage("shorter than a header")
    return Header(*HEADER.unpack_from(message))


def _plain_name(message: bytes, offset: int) -> tuple[Labels, int]:
    """Read an uncompressed name; returns its labels and the offset behind it."""
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
    """Read a name with compression; every pointer must point before the name part it stands in."""
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
                raise MalformedMessage("cut pointer")
            target = ((length & 0x3F) << 8) | message[offset + 1]
            end = offset + 2 if end is None else end
            pointers += 1
            if target >= floor or target < HEADER.size or pointers > _MAX_POINTERS:
                raise MalformedMessage("pointer does not point back")
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
        raise MalformedMessage("cut question")
    qtype, qclass = struct.unpack_from("!HH", message, end)
    return Question(labels, message[offset:end], qtype, qclass), end + 4


def parse_query(message: bytes) -> Query:
    """Read a client's query, all of it.

    Raises:
        MalformedMessage: anything but one question and at most one OPT record.
    """
    header = parse_header(message)
    if (header.questions, header.answers, header.authorities) != (1, 0, 0) or header.additionals > 1:
        raise MalformedMessage("not one question alone")
    question, offset = _question(message, HEADER.size)
    udp_size, version = 512, None
    if header.additionals:
        udp_size, version, offset = _opt(message, offset)
    if offset != len(message):
        raise MalformedMessage("bytes behind the message")
    return Query(header, question, udp_size, version)


def _opt(message: bytes, offset: int) -> tuple[int, int, int]:
    """Read an OPT record: (UDP size, EDNS version, offset behind it). Its options are skipped unread."""
    if offset + 11 > len(message) or message[offset] != 0:
        raise MalformedMessage("additional record is not OPT")
    rtype, size, extended, length = struct.unpack_from("!HHIH", message, offset + 1)
    if rtype != QType.OPT:
        raise MalformedMessage("additional record is not OPT")
    end = offset + 11 + length
    if end > len(message):
        raise MalformedMessage("cut OPT")
    return max(512, size), (extended >> 16) & 0xFF, end


def parse_answer(message: bytes) -> UpstreamAnswer:
    """Read an upstream's answer: header, question, answer section.

    Raises:
        MalformedMessage: it cannot be read, or has more than `MAX_RECORDS` answers.
    """
    header = parse_header(message)
    if header.questions != 1 or header.answers > MAX_RECORDS:
        raise MalformedMessage("not one question, or too many answers")
    question, offset = _question(message, HEADER.size)
    if header.truncated:
        return UpstreamAnswer(header, question, ())
    records: list[Record] = []
    for _ in range(header.answers):
        owner, offset = _name(message, offset)
        if offset + 10 > len(message):
            raise MalformedMessage("cut record")
        rtype, rclass, ttl, length = struct.unpack_from("!HHIH", message, offset)
        offset += 10
        end = offset + length
        if end > len(message):
            raise MalformedMessage("cut record data")
        target: Labels | None = None
        if rtype == QType.CNAME:
            target, behind = _name(message, offset)
            if behind != end:
                raise MalformedMessage("CNAME data of another length")
        records.append(Record(owner, rtype, rclass, ttl & 0x7FFFFFFF, message[offset:end], target))
        offset = end
    return UpstreamAnswer(header, question, tuple(records))


def encode_name(host: str) -> bytes:
    """Wire form of a host name that is already checked (ASCII, labels up to 63).

    Raises:
        MalformedMessage: it does not fit a DNS name.
    """
    raw = bytearray()
    for label in host.encode("ascii").split(b"."):
        if not 0 < len(label) <= MAX_LABEL:
            raise MalformedMessage("label of a wrong length")
        raw.append(len(label))
        raw += label
    raw.append(0)
    if len(raw) > MAX_NAME:
        raise MalformedMessage("name too long")
    return bytes(raw)


def build_query(ident: int, host: str, qtype: QType) -> bytes:
    """A fresh recursive query for `host`: EDNS for the size only, no option."""
    question = encode_name(host) + struct.pack("!HH", qtype, CLASS_IN)
    opt = b"\x00" + struct.pack("!HHIH", QType.OPT, EDNS_UDP_SIZE, 0, 0)
    return HEADER.pack(ident, 0x0100, 1, 0, 0, 1) + question + opt


def build_error(header: Header, rcode: RCode) -> bytes:
    """An answer to a query whose question could not be read: header alone."""
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
    """An answer to `query`, built from its id, its question's bytes and the arguments.

    Args:
        addresses: each becomes an A or AAAA record owned by the question's name.
        ede: extended error (info code, text), sent when the client spoke EDNS; the text is cut to 120 bytes.
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
