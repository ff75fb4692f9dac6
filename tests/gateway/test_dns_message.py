"""DNS messages byte for byte: accepted input, the reader's limits, and the builder's output."""

import struct
from ipaddress import ip_address

import pytest

from gateway.dns.message import (
    Header,
    MalformedMessage,
    QType,
    Question,
    RCode,
    ResourceRecord,
    UpstreamAnswer,
    build_answer,
    build_error,
    build_query,
    encode_name,
    parse_answer,
    parse_header,
    parse_query,
)

OPT = b"\0" + struct.pack("!HHIH", 41, 4096, 0, 0)
GOOD = b"\x04good\x04test\0"
QUESTION = GOOD + b"\0\1\0\1"


def head(
    questions: int = 1, answers: int = 0, authorities: int = 0, additionals: int = 0, flags: int = 0x0100
) -> bytes:
    return struct.pack("!HHHHHH", 4711, flags, questions, answers, authorities, additionals)


def labels(count: int, size: int) -> bytes:
    return (bytes((size,)) + b"a" * size) * count


def record(owner: bytes, rtype: int, data: bytes, ttl: int = 60, rclass: int = 1) -> bytes:
    return owner + struct.pack("!HHIH", rtype, rclass, ttl, len(data)) + data


def test_a_header_has_its_fields() -> None:
    header = parse_header(struct.pack("!HHHHHH", 1, 0xFFFF, 2, 3, 4, 5))
    assert Header(1, 0xFFFF, 2, 3, 4, 5) == header
    assert (True, 15, True, True, 15) == (
        header.is_response,
        header.opcode,
        header.truncated,
        header.recursion_desired,
        header.rcode,
    )
    for flags, fields in {
        0x8000: (True, 0, False, False, 0),
        0x2800: (False, 5, False, False, 0),
        0x0200: (False, 0, True, False, 0),
        0x0100: (False, 0, False, True, 0),
        0x0005: (False, 0, False, False, 5),
        0x04F0: (False, 0, False, False, 0),
    }.items():
        one = Header(1, flags, 0, 0, 0, 0)
        assert fields == (one.is_response, one.opcode, one.truncated, one.recursion_desired, one.rcode)


def test_a_query_is_read_to_its_last_byte() -> None:
    query = parse_query(head() + b"\x04GooD\x04test\0" + b"\0\x1c\0\3")
    assert Question((b"good", b"test"), b"\x04GooD\x04test\0", 28, 3) == query.question
    assert (512, None) == (query.udp_size, query.edns_version)
    assert Header(4711, 0x0100, 1, 0, 0, 0) == query.header


@pytest.mark.parametrize(
    ("opt", "expected"),
    [
        (OPT, (4096, 0)),
        (b"\0" + struct.pack("!HHIH", 41, 511, 0, 0), (512, 0)),
        (b"\0" + struct.pack("!HHIH", 41, 513, 0xFF02FFFF, 3) + b"abc", (513, 2)),
    ],
)
def test_an_opt_record_says_size_and_version(opt: bytes, expected: tuple[int, int]) -> None:
    query = parse_query(head(additionals=1) + QUESTION + opt)
    assert expected == (query.udp_size, query.edns_version)


LONGEST = labels(3, 63) + labels(1, 61) + b"\0"  # 255 bytes
QUERIES: dict[str, tuple[bytes, str]] = {
    "11 bytes": (head()[:11], "shorter than a header"),
    "no question": (head(0), "not exactly one question"),
    "two questions": (head(2) + QUESTION * 2, "not exactly one question"),
    "an answer": (head(answers=1) + QUESTION, "not exactly one question"),
    "an authority": (head(authorities=1) + QUESTION, "not exactly one question"),
    "two additional records": (head(additionals=2) + QUESTION + OPT * 2, "not exactly one question"),
    "two additional records, of which one is there": (head(additionals=2) + QUESTION + OPT, "not exactly one question"),
    "an OPT whose name is not the root": (
        head(additionals=1) + QUESTION + b"\1" + OPT[1:],
        "additional record is not OPT",
    ),
    "an additional record that is missing": (head(additionals=1) + QUESTION, "additional record is not OPT"),
    "a name without an end": (head() + b"\x04good", "name runs over the end"),
    "a name that is cut in a label": (head() + b"\x04goo", "name too long"),
    "no name": (head(), "name runs over the end"),
    "a pointer": (head() + b"\xc0\x0c\0\1\0\1", "pointer or unknown label type in a question"),
    "a label of 64": (head() + labels(1, 64) + b"\0\0\1\0\1", "pointer or unknown label type in a question"),
    "a name of 256": (head() + labels(3, 63) + labels(1, 62) + b"\0" + b"\0\1\0\1", "name too long"),
    "a cut type": (head() + GOOD + b"\0\1\0", "incomplete question"),
    "a byte behind it": (head() + QUESTION + b"\0", "bytes after the message"),
    "an OPT that is cut": (head(additionals=1) + QUESTION + OPT[:-1], "additional record is not OPT"),
    "an OPT with cut options": (head(additionals=1) + QUESTION + OPT[:-1] + b"\1", "incomplete OPT record"),
    "an OPT of a name": (head(additionals=1) + QUESTION + b"\1a" + OPT, "additional record is not OPT"),
    "another record": (
        head(additionals=1) + QUESTION + b"\0" + struct.pack("!HHIH", 250, 255, 0, 0),
        "additional record is not OPT",
    ),
    "a byte behind the OPT": (head(additionals=1) + QUESTION + OPT + b"\0", "bytes after the message"),
}


@pytest.mark.parametrize("case", QUERIES)
def test_what_is_no_query_is_malformed(case: str) -> None:
    message, reason = QUERIES[case]
    with pytest.raises(MalformedMessage) as caught:
        parse_query(message)
    assert reason == str(caught.value)


def test_the_longest_name_has_255_bytes() -> None:
    assert 255 == len(LONGEST)
    assert LONGEST == parse_query(head() + LONGEST + b"\0\1\0\1").question.raw_name
    answer = head(answers=1) + QUESTION
    assert 4 == len(parse_answer(answer + record(LONGEST, 1, b"\1\2\3\4")).records[0].owner)
    with pytest.raises(MalformedMessage, match="name too long"):
        parse_answer(answer + record(labels(3, 63) + labels(1, 62) + b"\0", 1, b"\1\2\3\4"))


def test_an_answer_is_read_with_its_records() -> None:
    message = head(answers=3, flags=0x8180) + QUESTION
    message += record(b"\xc0\x0c", 5, b"\x03CDN\xc0\x11", ttl=0x80000007)
    message += record(b"\x03cdn\xc0\x11", 1, b"\1\2\3\4", ttl=0x7FFFFFFF)
    message += record(b"\0", 16, b"text", rclass=3)
    answer = parse_answer(message + b"what follows is not read")
    question = Question((b"good", b"test"), GOOD, 1, 1)
    assert (
        UpstreamAnswer(
            Header(4711, 0x8180, 1, 3, 0, 0),
            question,
            (
                ResourceRecord((b"good", b"test"), 5, 1, 7, b"\x03CDN\xc0\x11", (b"cdn", b"test")),
                ResourceRecord((b"cdn", b"test"), 1, 1, 0x7FFFFFFF, b"\1\2\3\4", None),
                ResourceRecord((), 16, 3, 60, b"text", None),
            ),
        )
        == answer
    )
    assert UpstreamAnswer(Header(4711, 0x8380, 1, 3, 0, 0), question, ()) == parse_answer(
        head(answers=3, flags=0x8380) + QUESTION
    ), "a truncated answer has no records"


ANSWERED = head(answers=1) + QUESTION
END = len(ANSWERED)
ANSWERS: dict[str, tuple[bytes, str]] = {
    "no question": (head(0), "not one question, or too many answers"),
    "two questions": (head(2) + QUESTION * 2, "not one question, or too many answers"),
    "257 records": (
        head(answers=257) + QUESTION + record(b"\0", 1, b"\1\2\3\4") * 257,
        "not one question, or too many answers",
    ),
    "a record that is missing": (ANSWERED, "name runs over the end"),
    "a cut record": (ANSWERED + b"\0" + b"\0" * 9, "incomplete record"),
    "cut data": (ANSWERED + record(b"\0", 1, b"\1\2\3\4")[:-1], "incomplete record data"),
    "a pointer to itself": (
        ANSWERED + record(struct.pack("!H", 0xC000 | END), 1, b"\1\2\3\4"),
        "pointer does not point backwards",
    ),
    "a pointer forward": (
        ANSWERED + record(struct.pack("!H", 0xC000 | END + 2), 1, b"\1\2\3\4"),
        "pointer does not point backwards",
    ),
    "a pointer behind a label to that label": (
        ANSWERED + record(b"\1a" + struct.pack("!H", 0xC000 | END), 1, b"\1\2\3\4"),
        "pointer does not point backwards",
    ),
    "a pointer into the header": (ANSWERED + record(b"\xc0\x0b", 1, b"\1\2\3\4"), "pointer does not point backwards"),
    "a cut pointer": (ANSWERED + b"\xc0", "incomplete pointer"),
    "a label of another type": (ANSWERED + record(b"\x40" + b"a" * 64 + b"\0", 1, b"\1\2\3\4"), "unknown label type"),
    "a label of a third type": (ANSWERED + record(b"\x80" + b"a" * 128 + b"\0", 1, b"\1\2\3\4"), "unknown label type"),
    "a name without an end": (ANSWERED + b"\x04good", "name runs over the end"),
    "a name that is cut": (ANSWERED + b"\x04goo", "name too long"),
    "a CNAME that is shorter than its data": (ANSWERED + record(b"\0", 5, b"\1a\0\0"), "CNAME data has a wrong length"),
    "a CNAME that goes beyond its data": (ANSWERED + record(b"\0", 5, b"\1a") + b"\0", "CNAME data has a wrong length"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_what_is_no_answer_is_malformed(case: str) -> None:
    message, reason = ANSWERS[case]
    with pytest.raises(MalformedMessage) as caught:
        parse_answer(message)
    assert reason == str(caught.value)


def test_a_record_may_be_empty() -> None:
    assert b"" == parse_answer(ANSWERED + record(b"\0", 16, b"")).records[0].data


def test_256_records_are_read() -> None:
    message = head(answers=256) + QUESTION + record(b"\0", 1, b"\1\2\3\4") * 256
    assert 256 == len(parse_answer(message).records)


@pytest.mark.parametrize(("count", "good"), [(1, True), (16, True), (17, False)])
def test_a_name_has_at_most_16_pointers(count: int, good: bool) -> None:
    """Each points to the one before it, the first to the question's name."""
    chain = b"".join(struct.pack("!H", 0xC00C if not n else 0xC000 | END + 11 + 2 * (n - 1)) for n in range(count - 1))
    last = END + 11 + len(chain)
    pointer = 0xC00C if count == 1 else 0xC000 | last - 2
    message = head(answers=2) + QUESTION + record(b"\0", 16, chain) + record(struct.pack("!H", pointer), 1, b"\1\2\3\4")
    if good:
        assert (b"good", b"test") == parse_answer(message).records[1].owner
    else:
        with pytest.raises(MalformedMessage, match="pointer does not point backwards"):
            parse_answer(message)


def test_a_name_over_pointers_is_as_long_as_any() -> None:
    """At most 255 bytes in all, wherever its parts are."""
    first = labels(3, 63) + b"\0"
    for size, good in {61: True, 62: False}.items():
        message = head(answers=1) + first + b"\0\1\0\1" + record(labels(1, size) + b"\xc0\x0c", 1, b"\1\2\3\4")
        if good:
            assert 4 == len(parse_answer(message).records[0].owner)
        else:
            with pytest.raises(MalformedMessage):
                parse_answer(message)


def test_a_query_is_written_for_its_name_alone() -> None:
    expected = b"\x12\x34\x01\0\0\1\0\0\0\0\0\1" + GOOD + b"\0\x1c\0\1" + b"\0\0\x29\x04\xd0\0\0\0\0\0\0"
    assert expected == build_query(0x1234, "good.test", QType.AAAA)


def test_a_name_is_written_in_255_bytes_at_most() -> None:
    longest = ".".join(["a" * 63] * 3 + ["a" * 61])
    assert LONGEST == encode_name(longest)
    with pytest.raises(MalformedMessage, match="name too long"):
        encode_name(longest + "a")


def test_an_error_is_a_header_with_the_flags_of_the_query() -> None:
    """Opcode and recursion-desired flag are repeated, nothing else."""
    header = parse_header(struct.pack("!HHHHHH", 7, 0xFFFF, 1, 2, 3, 4))
    assert struct.pack("!HHHHHH", 7, 0xF984, 0, 0, 0, 0) == build_error(header, RCode.NOTIMP)
    plain = parse_header(struct.pack("!HHHHHH", 7, 0, 1, 2, 3, 4))
    assert struct.pack("!HHHHHH", 7, 0x8081, 0, 0, 0, 0) == build_error(plain, RCode.FORMERR)


A = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4\1\2\3\4"
AAAA = b"\xc0\x0c\0\x1c\0\1\0\0\0\x3c\0\x10" + ip_address("2606:2800::1").packed


def test_an_answer_is_written_from_the_question_and_the_addresses() -> None:
    query = parse_query(head() + QUESTION)
    built = build_answer(query, RCode.NOERROR, (ip_address("1.2.3.4"), ip_address("2606:2800::1")), ttl=60)
    assert struct.pack("!HHHHHH", 4711, 0x8180, 1, 2, 0, 0) + QUESTION + A + AAAA == built
    quiet = parse_query(head(flags=0) + QUESTION)
    assert struct.pack("!HHHHHH", 4711, 0x8083, 1, 0, 0, 0) + QUESTION == build_answer(
        quiet, RCode.NXDOMAIN, ede=(15, "not sent without EDNS")
    )


def test_an_answer_that_is_too_long_is_sent_empty() -> None:
    query = parse_query(head(additionals=1) + QUESTION + OPT)
    size = 12 + len(QUESTION) + len(A) + 11
    whole = build_answer(query, RCode.NOERROR, (ip_address("1.2.3.4"),), ttl=60, limit=size)
    assert size == len(whole)
    assert struct.pack("!HHHHHH", 4711, 0x8380, 1, 0, 0, 0) + QUESTION == build_answer(
        query, RCode.NOERROR, (ip_address("1.2.3.4"),), ttl=60, limit=size - 1
    )


def test_an_extended_error_is_cut_at_120_bytes_and_between_characters() -> None:
    query = parse_query(head(additionals=1) + QUESTION + OPT)
    for text, sent in {"a" * 121: b"a" * 120, "a" * 119 + "\u00e4": b"a" * 119, "ab": b"ab"}.items():
        option = struct.pack("!HHH", 15, len(sent) + 2, 18) + sent
        expected = struct.pack("!HHHHHH", 4711, 0x8185, 1, 0, 0, 1) + QUESTION
        expected += b"\0" + struct.pack("!HHIH", 41, 1232, 0, len(option)) + option
        assert expected == build_answer(query, RCode.REFUSED, ede=(18, text))


def test_a_code_over_four_bits_has_its_rest_in_the_opt() -> None:
    query = parse_query(head(additionals=1) + QUESTION + OPT)
    expected = struct.pack("!HHHHHH", 4711, 0x8180, 1, 0, 0, 1) + QUESTION
    assert expected + b"\0" + struct.pack("!HHIH", 41, 1232, 1 << 24, 0) == build_answer(query, RCode.BADVERS)


@pytest.mark.parametrize("host", ["", ".", "a..test", "a.test.", f"{'a' * 64}.test"])
def test_a_label_has_1_to_63_characters(host: str) -> None:
    with pytest.raises(MalformedMessage, match="a label is empty or longer than 63 bytes"):
        encode_name(host)
    assert labels(1, 63) + b"\0" == encode_name("a" * 63)
    assert b"\1a\1b\0" == encode_name("a.b")


def test_a_pointer_may_be_the_end_of_a_message_and_reach_anywhere_before_it() -> None:
    """Its offset has 14 bits."""
    message = head(answers=3) + QUESTION + record(b"\0", 16, b"x" * 300)
    place = len(message)
    message += record(b"\x03far\xc0\x0c", 1, b"\1\2\3\4") + record(b"\0", 5, struct.pack("!H", 0xC000 | place))
    assert place > 256
    assert (b"far", b"good", b"test") == parse_answer(message).records[2].target
