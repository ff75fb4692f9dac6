"""gRPC messages: each is relayed when it is complete, without a secret in any reading of the stream."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scrub.forms import Patterns
from gateway.scrub.grpc import MessageScrubber
from gateway.scrub.stream import Withheld

VALUE = b"correct-horse-battery"
PATTERNS = Patterns([VALUE.decode()])


def message(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


def test_a_message_goes_on_when_it_is_whole_whatever_it_ends_with() -> None:
    scrubber = MessageScrubber(PATTERNS)
    for content in (b"", b"tick", b"corr-", VALUE + b"!", b"x" * 5000):
        assert len(message(content)) == len(scrubber.feed(message(content)))
    assert b"" == scrubber.finish()
    assert (1, 0) == (scrubber.matches, scrubber.partials)


@pytest.mark.parametrize("at", range(4, len(VALUE)))
def test_a_value_over_two_messages_is_taken_out_and_counted(at: int) -> None:
    scrubber = MessageScrubber(PATTERNS)
    out = scrubber.feed(message(b"a " + VALUE[:at])) + scrubber.feed(message(VALUE[at:] + b" b"))
    assert message(b"a " + b"*" * at) + message(b"*" * (len(VALUE) - at) + b" b") == out
    assert (1, 1) == (scrubber.matches, scrubber.partials)


def test_a_value_that_begins_where_a_length_belongs_is_not_let_out() -> None:
    stream = b"\0\0\0\0" + VALUE + b"x" * 300
    with pytest.raises(Withheld, match="a secret in place of the length of a gRPC message"):
        MessageScrubber(PATTERNS).feed(stream)


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"\1\0\0\0\5", "compressed"),
        (b"\x80\0\0\0\5", "compressed"),
        (VALUE, "compressed"),
        (b"\0\xff\xff\xff\xff", "more than"),
    ],
)
def test_what_cannot_be_a_message_ends_the_stream(stream: bytes, reason: str) -> None:
    with pytest.raises(Withheld, match=reason):
        MessageScrubber(PATTERNS).feed(stream)


@pytest.mark.parametrize("stream", [b"\0", b"\0\0\0\0\5", message(b"hello")[:-1]])
def test_an_end_within_a_message_shows_none_of_it(stream: bytes) -> None:
    scrubber = MessageScrubber(PATTERNS)
    assert b"" == scrubber.feed(stream)
    with pytest.raises(Withheld):
        scrubber.finish()


@given(st.lists(st.sampled_from([b"x", VALUE, VALUE[:9], VALUE[9:], b"\n", b"\0\0"]), max_size=12), st.data())
@settings(max_examples=60)
def test_the_output_does_not_depend_on_chunks(contents: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(message, contents))
    whole = MessageScrubber(PATTERNS).feed(stream)
    cut = data.draw(st.integers(0, len(stream)))
    scrubber = MessageScrubber(PATTERNS)
    assert whole == scrubber.feed(stream[:cut]) + scrubber.feed(stream[cut:]) + scrubber.finish()
    assert VALUE not in whole
    assert len(stream) == len(whole)


@pytest.mark.slow
@given(st.lists(st.sampled_from([b"x", b"=", b"\n", b"pp"]), max_size=12), st.sampled_from([VALUE, b"y" * 21]))
@settings(max_examples=60)
def test_what_is_held_back_within_a_message_depends_on_no_value(contents: list[bytes], other: bytes) -> None:
    stream = message(b"".join(contents) + VALUE * 100)
    first, second = MessageScrubber(PATTERNS), MessageScrubber(Patterns([other.decode()]))
    for index in range(0, len(stream), 7):
        piece = stream[index : index + 7]
        assert len(first.feed(piece)) == len(second.feed(piece))


def test_a_new_scrubber_has_found_nothing() -> None:
    scrubber = MessageScrubber(PATTERNS)
    assert (0, 0) == (scrubber.matches, scrubber.partials)
    assert message(b"") == scrubber.feed(message(b""))
    assert b"" == scrubber.finish()
    assert (0, 0) == (scrubber.matches, scrubber.partials)


def test_the_longest_message_has_64_mib() -> None:
    prefix = b"\0" + (64 * 1024 * 1024).to_bytes(4, "big")
    MessageScrubber(PATTERNS).feed(prefix)
    with pytest.raises(Withheld, match="a gRPC message of more than 67108864 bytes"):
        MessageScrubber(PATTERNS).feed(b"\0" + (64 * 1024 * 1024 + 1).to_bytes(4, "big"))
    for flag in (1, 2, 255):
        with pytest.raises(Withheld, match="compressed gRPC messages cannot be searched"):
            MessageScrubber(PATTERNS).feed(bytes((flag,)) + b"\0\0\0\1")
