"""The end of a container's output, read from Docker's frames."""

import io
import random
import struct

import pytest

from runtimes.engine.printed import last_bytes


def stream(*pieces: bytes) -> io.BytesIO:
    return io.BytesIO(
        b"".join(struct.pack(">BxxxI", 1 + place % 2, len(data)) + data for place, data in enumerate(pieces))
    )


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
    assert (text, dropped) == last_bytes(stream(*pieces).read, 10)


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 11])
def test_a_stream_that_breaks_off_gives_what_it_had(cut: int) -> None:
    assert (b"abc"[: max(0, cut - 8)].decode(), False) == last_bytes(io.BytesIO(stream(b"abc").read()[:cut]).read)


def test_the_memory_is_bounded_and_small_reads_change_nothing() -> None:
    draw = random.Random(1)
    lines = [b"%d" % number * draw.randrange(1, 40) + b"\n" for number in range(500)]
    whole = stream(*lines)
    asked: list[int] = []

    def read(size: int) -> bytes:
        asked.append(size)
        return whole.read(min(size, draw.randrange(1, 20)))

    text, dropped = last_bytes(read, 1000)
    assert dropped
    assert b"".join(lines).decode().endswith("\n" + text)
    assert 960 < len(text) <= 1000
    assert max(asked) <= 1000
