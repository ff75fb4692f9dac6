"""WebSocket frames: a real endpoint reads what is relayed. No message has a secret, in any division of the stream."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, Pong, TextMessage
from wsproto.frame_protocol import FrameProtocol, Opcode

from gateway.scrub.forms import Patterns
from gateway.scrub.frames import MAX_CONTROL, MAX_WAITING, FrameReader, FrameScrubber
from gateway.scrub.stream import Scrubber, Withheld

VALUE = b"correct-horse-battery"
WIDE = "пароль-№1-тайна"
PATTERNS = Patterns([VALUE.decode(), WIDE])


def frame(opcode: int, content: bytes, *, final: bool = True) -> bytes:
    """Return a frame of a server, written by hand."""
    size = len(content)
    if size < 126:
        length = bytes((size,))
    elif size < 65536:
        length = bytes((126,)) + size.to_bytes(2, "big")
    else:
        length = bytes((127,)) + size.to_bytes(8, "big")
    return bytes((opcode | (0x80 if final else 0),)) + length + content


def text(*fragments: bytes) -> bytes:
    """Return a text message in these fragments."""
    last = len(fragments) - 1
    return b"".join(frame(0 if number else 1, one, final=number == last) for number, one in enumerate(fragments))


def received(stream: bytes) -> list[object]:
    """Return what a client's endpoint makes of a server's frames. It raises if they are malformed."""
    client = Connection(ConnectionType.CLIENT)
    client.receive_data(stream)
    events: list[object] = []
    whole: list[str | bytes] = []
    for event in client.events():
        match event:
            case TextMessage():
                whole.append(event.data)
                if event.message_finished:
                    events.append("".join(map(str, whole)))
                    whole = []
            case BytesMessage():
                whole.append(bytes(event.data))
                if event.message_finished:
                    events.append(b"".join(one for one in whole if isinstance(one, bytes)))
                    whole = []
            case Ping() | Pong():
                events.append((type(event), bytes(event.payload)))
            case CloseConnection():
                events.append((event.code, event.reason))
    assert not whole
    return events


def relayed(stream: bytes, *at: int) -> tuple[bytes, FrameScrubber]:
    """Scrub a stream that arrives in pieces."""
    scrubber = FrameScrubber(PATTERNS)
    places = [0, *sorted(at), len(stream)]
    return b"".join(scrubber.feed(stream[one:other]) for one, other in itertools.pairwise(places)), scrubber


def test_a_message_goes_on_when_it_is_whole_whatever_it_ends_with() -> None:
    scrubber = FrameScrubber(PATTERNS)
    for content in (b"", b"tick", b"cor", VALUE + b"!", b"x" * 70_000):
        assert len(frame(2, content)) == len(scrubber.feed(frame(2, content)))
    assert (1, 0) == (scrubber.matches, scrubber.partials)


@pytest.mark.parametrize("at", range(1, len(VALUE)))
def test_a_value_over_two_fragments_is_removed_whole_and_is_no_beginning(at: int) -> None:
    out, scrubber = relayed(text(b"a " + VALUE[:at], VALUE[at:] + b" b"))
    assert text(b"a " + b"*" * at, b"*" * (len(VALUE) - at) + b" b") == out
    assert (1, 0) == (scrubber.matches, scrubber.partials)


def test_a_value_in_fragments_of_one_byte_with_pings_between_them_is_removed() -> None:
    stream = frame(1, b"", final=False)
    for octet in VALUE:
        stream += frame(0, bytes((octet,)), final=False) + frame(9, b"?")
    out, scrubber = relayed(stream + frame(0, b""))
    assert ["*" * len(VALUE)] == [one for one in received(out) if isinstance(one, str)]
    assert [(Ping, b"?")] * len(VALUE) == [one for one in received(out) if isinstance(one, tuple)]
    assert (1, 0) == (scrubber.matches, scrubber.partials)


@pytest.mark.parametrize("at", range(4, len(VALUE)))
def test_a_value_over_two_messages_is_removed_and_its_beginning_is_counted(at: int) -> None:
    out, scrubber = relayed(text(b"a " + VALUE[:at]) + text(VALUE[at:] + b" b"))
    assert text(b"a " + b"*" * at) + text(b"*" * (len(VALUE) - at) + b" b") == out
    assert (1, 1) == (scrubber.matches, scrubber.partials)


@pytest.mark.parametrize("opcode", [9, 10])
def test_a_value_in_a_control_frame_is_removed(opcode: int) -> None:
    out, scrubber = relayed(frame(opcode, b"=" + VALUE))
    assert frame(opcode, b"=" + b"*" * len(VALUE)) == out
    assert 1 == scrubber.matches
    out, scrubber = relayed(frame(opcode, VALUE[:9]) + frame(opcode, VALUE[9:]))
    assert frame(opcode, b"*" * 9) + frame(opcode, b"*" * (len(VALUE) - 9)) == out


def test_a_close_frame_keeps_its_code_loses_a_value_and_ends_the_stream() -> None:
    close = frame(8, (1008).to_bytes(2, "big") + b"bad " + VALUE)
    out, scrubber = relayed(text(b"bye") + close + text(VALUE) + b"\xff")
    assert ["bye", (1008, "bad " + "*" * len(VALUE))] == received(out)
    assert 1 == scrubber.matches
    assert b"" == scrubber.feed(text(b"more"))


def test_held_bytes_are_not_released_by_an_abrupt_end_and_are_by_a_close() -> None:
    begun = frame(1, b"x" * 9 + VALUE[:9], final=False)
    out, scrubber = relayed(begun)
    assert VALUE[:3] not in out
    assert begun[:-9] + b"*" * 9 + frame(8, b"") == out + scrubber.feed(frame(8, b""))


@pytest.mark.parametrize("waiting", [(frame(0, b"", final=False), frame(9, b"?" * 60)), (frame(0, b"", final=False),)])
def test_heads_and_pings_within_a_message_wait_in_limited_memory(waiting: tuple[bytes, ...]) -> None:
    scrubber = FrameScrubber(PATTERNS)
    sent = shown = 0
    for one in (frame(1, VALUE[:5], final=False), *waiting * 3000):
        sent += len(one)
        shown += len(scrubber.feed(one))
        assert sent - shown <= MAX_WAITING + MAX_CONTROL + 2 + 5
    assert 1 == scrubber.partials  # the end of the hold removed the apparent beginning


HEAD = b"\x81\x01x"


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        *[(bytes((0x80 | bit | 1, 0)), "reserved bit") for bit in (0x10, 0x20, 0x40)],
        *[(bytes((0x80 | opcode, 0)), "reserved opcode") for opcode in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)],
        (b"\x81\x81\0\0\0\0x", "mask of the other side"),
        (b"\x81\x7e\x00\x7d", "length"),
        (b"\x81\x7f\0\0\0\0\0\0\xff\xff", "length"),
        (b"\x81\x7f\x80\0\0\0\0\0\0\0", "length"),
        (b"\x89\x7e\x00\x7e", "control frame"),
        (b"\x09\x00", "control frame"),
        (b"\x00\x00", "out of order"),
        (b"\x80\x00", "out of order"),
        (b"\x01\x00\x81\x00", "out of order"),
        (b"\x01\x00\x80\x00\x80\x00", "out of order"),
        (b"\x88\x01\x03", "close frame"),
        (b"\x88\x02\x03\xed", "close frame"),
        (b"\x88\x02\x00\x00", "close frame"),
        (b"\x88\x03\x03\xe8\xff", "close frame"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_malformed_frames_end_the_stream(stream: bytes, reason: str, whole: bool) -> None:
    scrubber = FrameScrubber(PATTERNS)
    assert HEAD == scrubber.feed(HEAD)
    with pytest.raises(Withheld, match=reason):
        for piece in [stream] if whole else [stream[at : at + 1] for at in range(len(stream))]:
            scrubber.feed(piece)


def test_frames_of_a_client_are_masked() -> None:
    reader = FrameReader(masked=True)
    stream = bytes(FrameProtocol(client=True, extensions=[]).send_data(b"x" * 70_000, True))
    pieces = list(reader.pieces(stream))
    assert stream == b"".join(piece.head + piece.content for piece in pieces)
    assert pieces[-1].ends_message
    with pytest.raises(Withheld, match="mask of the other side"):
        list(reader.pieces(text(b"x")))


def test_a_length_of_64_bits_is_read_and_collects_nothing() -> None:
    scrubber = FrameScrubber(PATTERNS)
    head = b"\x82\x7f" + (1 << 40).to_bytes(8, "big")
    sent = shown = len(head)
    assert head == scrubber.feed(head)
    for _ in range(64):
        shown += len(scrubber.feed(b"y" * 65536))
        sent += 65536
    assert 0 < sent - shown <= PATTERNS.longest + 2


PARTS = st.sampled_from([b"x", b"\n", VALUE, VALUE[:9], VALUE[9:], WIDE.encode(), WIDE.encode()[:11], "ж…".encode()])
KINDS = st.sampled_from([Opcode.TEXT, Opcode.BINARY, Opcode.PING, Opcode.PONG])


def octets(event: object) -> bytes:
    """Return the content of a message or control frame."""
    match event:
        case str(text):
            return text.encode()
        case bytes(content) | (_, bytes(content)):
            return content
    raise TypeError


def readable(content: bytes) -> str:
    return content.decode("utf-8", "ignore")


@given(st.lists(st.tuples(KINDS, st.lists(PARTS, min_size=1, max_size=5)), max_size=8), st.data())
@settings(max_examples=80, deadline=None)
def test_a_real_endpoint_reads_the_relayed_frames(
    messages: list[tuple[Opcode, list[bytes]]], data: st.DataObject
) -> None:
    server = FrameProtocol(client=False, extensions=[])
    stream, sent = b"", list[object]()
    for opcode, fragments in messages:
        content = b"".join(fragments)
        if opcode in (Opcode.PING, Opcode.PONG):
            stream += (server.ping if opcode is Opcode.PING else server.pong)(content[:MAX_CONTROL])
            sent.append((Ping if opcode is Opcode.PING else Pong, content[:MAX_CONTROL]))
            continue
        whole: str | bytes = readable(content) if opcode is Opcode.TEXT else content
        raw = whole.encode() if isinstance(whole, str) else whole
        cut = data.draw(st.integers(0, len(raw)))
        stream += frame(int(opcode), raw[:cut], final=False)
        if data.draw(st.booleans()):
            stream += server.ping(b"now")
            sent.append((Ping, b"now"))
        stream += frame(0, raw[cut:])
        sent.append(whole)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6))
    whole_out, scrubber = relayed(stream)
    out, divided = relayed(stream, *cuts)
    assert (whole_out, scrubber.partials) == (out, divided.partials)
    assert len(stream) == len(out)
    got = received(out)
    assert len(sent) == len(got)
    for one, other in zip(sent, got, strict=True):
        before, after = octets(one), octets(other)
        assert type(one) is type(other)
        assert len(before) == len(after)
        assert VALUE not in after and WIDE.encode() not in after
        assert all(new in (old, 0x2A) for old, new in zip(before, after, strict=True))


@given(st.lists(PARTS, min_size=1, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_fragments_are_scrubbed_like_one_body(parts: list[bytes], data: st.DataObject) -> None:
    content = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=5)))
    places = [0, *cuts, len(content)]
    pieces = [content[one:other] for one, other in itertools.pairwise(places)]
    stream = b"".join(
        frame(0 if number else 2, piece, final=number == len(pieces) - 1) for number, piece in enumerate(pieces)
    )
    out, _ = relayed(stream)
    body = Scrubber(PATTERNS)
    assert [body.feed(content) + body.finish()] == received(out)


def test_a_removed_character_is_removed_whole() -> None:
    # "é" in CP1252 is the first byte of a longer character in UTF-8.
    patterns = Patterns(["password-é"])
    for fragments in (
        [b"password-\xe9\x80\x80 x"],
        [b"password-\xe9", b"\x80", b"\x80 x"],
        [b"password-", b"\xe9\x80\x80 x"],
    ):
        scrubber = FrameScrubber(patterns)
        out = scrubber.feed(text(*fragments))
        assert [b"*" * 12 + b" x"] == [one.encode() for one in received(out) if isinstance(one, str)]
