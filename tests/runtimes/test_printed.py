"""The end of a container's output, read from Docker's frames, without the values of its environment."""

import io
import random
import struct
import time

import pytest

from runtimes.engine.printed import NOTHING, PART, Hidden, LogTail, entries, last_lines

SECRET = "s3cr3t-of-the-caller"


def stream(*pieces: bytes, kinds: tuple[int, ...] = (1, 2)) -> io.BytesIO:
    return io.BytesIO(
        b"".join(
            struct.pack(">BxxxI", kinds[place % len(kinds)], len(data)) + data for place, data in enumerate(pieces)
        )
    )


def shown(pieces: list[bytes], lines: int = 100, most: int = 1 << 18, **variables: str) -> str:
    """Return what is shown of an output on one stream."""
    return last_lines(stream(*pieces, kinds=(1,)).read, LogTail(lines, None, most), Hidden.of(variables))[0]


@pytest.mark.parametrize(
    ("pieces", "text", "dropped"),
    [
        ((), "", False),
        ((b"a\n", b"b\n"), "a\nb\n", False),
        ((b"a", b"b"), "ab", False),
        ((b"0123456\n", b"89\n"), "89\n", True),
        ((b"x" * 50,), "x" * 10, True),
        ((b"x" * 50 + b"\n",), "x" * 9 + "\n", True),
        ((b"", b"a\xff\n"), "a\ufffd\n", False),
        ((b"0123456789",), "0123456789", False),
    ],
)
def test_the_last_whole_lines_are_kept(pieces: tuple[bytes, ...], text: str, dropped: bool) -> None:
    assert (text, dropped) == last_lines(stream(*pieces).read, LogTail(100, None, 10))


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 11])
def test_a_stream_that_breaks_off_gives_what_it_had(cut: int) -> None:
    read = io.BytesIO(stream(b"abc").read()[:cut]).read
    assert (b"abc"[: max(0, cut - 8)].decode(), False) == last_lines(read, LogTail(100))


def test_the_memory_is_bounded_and_small_reads_change_nothing() -> None:
    draw = random.Random(1)
    lines = [b"%d" % number * draw.randrange(1, 40) + b"\n" for number in range(500)]
    whole = stream(*lines)

    def read(size: int) -> bytes:
        return whole.read(min(size, draw.randrange(1, 20)))

    text, dropped = last_lines(read, LogTail(500, None, 1000))
    assert dropped
    assert b"".join(lines).decode().endswith("\n" + text)
    assert 960 < len(text) <= 1000


def test_of_the_requested_entries_those_before_the_last_lines_are_only_context() -> None:
    assert ("b\nc\n", False) == last_lines(stream(b"a\n", b"b\n", b"c\n").read, LogTail(2))


def test_only_entries_from_a_time_on_are_shown() -> None:
    stamped = [b"2026-01-02T03:04:%02d.000000000Z line %d\n" % (second, second) for second in range(5, 9)]
    since = 1767323047  # 03:04:07
    assert ("line 7\nline 8\n", False) == last_lines(stream(*stamped).read, LogTail(10, since))
    assert ("line 8\n", False) == last_lines(stream(*stamped).read, LogTail(1, since))
    assert ("", False) == last_lines(stream(*stamped).read, LogTail(10, 1 << 40))


def test_a_value_of_the_environment_is_replaced_by_its_name() -> None:
    text = shown([b"token=" + SECRET.encode() + b" and " + SECRET.encode() + b".\n"], TOKEN=SECRET)
    assert "token=[env TOKEN] and [env TOKEN].\n" == text


def test_short_values_and_unset_ones_stay() -> None:
    assert "1234567 x\n" == shown([b"1234567 x\n"], SHORT="1234567", EMPTY="", BLANK="         ")


def test_a_line_feed_at_the_end_of_a_value_does_not_hide_it() -> None:
    assert "[env TOKEN]\n" == shown([SECRET.encode() + b"\n"], TOKEN=f"{SECRET}\n")


@pytest.mark.parametrize("place", range(1, len(SECRET)))
def test_a_value_is_found_across_entries(place: int) -> None:
    """Docker divides a long line at any byte."""
    secret = SECRET.encode()
    text = shown([b"a" * 40 + secret[:place], secret[place:] + b" b\n"], TOKEN=SECRET)
    assert "a" * 40 + "[env TOKEN][env TOKEN] b\n" == text


@pytest.mark.parametrize("place", range(1, len(SECRET)))
def test_a_value_that_begins_before_what_is_shown_is_not_shown_in_part(place: int) -> None:
    secret, hidden = SECRET.encode(), Hidden.of({"TOKEN": SECRET})
    pieces = (b"a" * 40 + secret[:place], secret[place:] + b" b\n")
    by_lines, _ = last_lines(stream(*pieces, kinds=(1,)).read, LogTail(1), hidden)
    assert "[env TOKEN] b\n" == by_lines
    for most in range(2, 40):
        by_bytes, dropped = last_lines(stream(*pieces, kinds=(1,)).read, LogTail(9, None, most), hidden)
        assert dropped
        assert not any(part in by_bytes for part in (SECRET[-4:], SECRET[:4], SECRET[8:12]))


def test_a_value_is_found_between_entries_of_the_other_stream() -> None:
    secret = SECRET.encode()
    text, _ = last_lines(stream(secret[:5], b"other\n", secret[5:] + b"\n").read, LogTail(9), Hidden.of({"T": SECRET}))
    assert "[env T]other\n[env T]\n" == text


def test_each_long_line_of_a_value_with_several_lines_is_replaced_also_alone() -> None:
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQEF\n-----END KEY-----"
    lines = [line.encode() + b"\n" for line in key.split("\n")]
    assert "K=[env K]\n[env K]\n[env K]\n[env K]\nend\n" == shown([b"K=" + lines[0], *lines[1:], b"end\n"], K=key)
    assert "[env K]\n" == shown([*lines[:2]], lines=1, K=key)
    assert "[env K]\nother\n[env K]\n" == shown([b"  " + lines[1], b"other\n", lines[2]], K=key)


def test_the_longest_of_two_values_is_replaced_as_a_whole() -> None:
    both = {"SHORT": "abcdefgh", "LONG": "abcdefgh-and-more"}
    assert "[env LONG] [env SHORT]\n" == shown([b"abcdefgh-and-more abcdefgh\n"], **both)
    assert "[env A][env B]\n" == shown([b"aaaabbbbcccc\n"], A="aaaabbbb", B="bbbbcccc")


def test_docker_is_asked_for_the_entries_that_a_value_can_span() -> None:
    assert 10 == entries(LogTail(10), NOTHING)
    assert 10 + 2 * 3 == entries(LogTail(10), Hidden.of({"A": "x" * (2 * PART)}))
    assert 10 + 2 * 3 == entries(LogTail(10), Hidden.of({"A": "aaaa\nbbbb\ncccc"}))
    assert 10 + 2000 == entries(LogTail(10), Hidden.of({"A": "a\n" * 5000 + "b"}))


def test_a_search_that_was_made_expensive_is_ended() -> None:
    """A thousand values that are parts of each other, in a text of them: nothing is shown then."""
    values = {f"V{number}": "ab" * (4 + number // 2) + "a" * (number % 2) for number in range(1000)}
    began = time.process_time()
    text = shown([b"ab" * (PART // 2)] * 16, **values)
    assert "[env]" * 16 == text
    assert time.process_time() - began < 5.0
