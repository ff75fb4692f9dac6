"""A ring of records in shared memory: order, room, death between two steps, and bytes that no worker writes."""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.shared_ring import (
    HEAD_BYTES,
    MAX_RECORD,
    ROOM,
    Cursor,
    RingDamaged,
    RingReader,
    RingWriter,
    map_ring,
    recover,
)
from runtimes.rings import RingFiles, Rings

PREFIX = 16


class Ends:
    """Both ends of one ring."""

    def __init__(self, directory: Path) -> None:
        rings = Rings(directory)
        self.files: RingFiles = rings.create(("sbx", 1))
        self.cursor = Cursor(self.files.cursor)
        self.reader = RingReader(os.dup(self.files.records))
        self.cursor.open(is_open=True)
        self.writer = self.worker()

    def worker(self) -> RingWriter:
        return map_ring(os.dup(self.files.records), os.dup(self.files.position), self.files.wake)

    def take(self, most: int = 1000) -> list[bytes]:
        records, end = self.reader.read(self.cursor.tail, most)
        self.cursor.settle(end)
        return [content for _, content in records]

    def woken(self) -> int:
        try:
            return os.eventfd_read(self.files.wake)
        except BlockingIOError:
            return 0

    def scribble(self, data: bytes, at: int) -> None:
        os.pwrite(self.files.records, data, at)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path / "rings")
    yield made
    made.cursor.close()
    made.reader.close()
    made.files.close()


def test_records_come_out_in_their_order_and_only_the_first_wakes_auditd(ends: Ends) -> None:
    assert [True] * 3 == [ends.writer.put(b"%d" % number) for number in range(3)]
    assert 1 == ends.woken()
    assert [b"0", b"1", b"2"] == ends.take()
    assert ends.writer.put(b"3")
    assert 1 == ends.woken()
    assert [b"3"] == ends.take()
    assert [] == ends.take()


def test_a_ring_of_zeros_is_closed(tmp_path: Path) -> None:
    rings = Rings(tmp_path / "rings")
    files = rings.create(("sbx", 1))
    writer = map_ring(os.dup(files.records), os.dup(files.position), files.wake)
    assert (False, False) == (writer.is_open, writer.put(b"x"))
    files.close()


def test_a_full_ring_takes_nothing_until_records_are_in_the_log(ends: Ends) -> None:
    content = b"x" * 1000
    put = 0
    while ends.writer.put(content):
        put += 1
    assert put == ROOM // (PREFIX + len(content))
    assert not ends.writer.put(content)
    records, end = ends.reader.read(ends.cursor.tail, 1)
    assert not ends.writer.put(content)  # copied is not settled
    ends.cursor.settle(end)
    assert ends.writer.put(content)
    assert ([content], [content] * put) == ([one for _, one in records], ends.take())


def test_a_record_above_the_limit_is_not_put(ends: Ends) -> None:
    assert ends.writer.put(b"x" * MAX_RECORD)
    assert not ends.writer.put(b"x" * (MAX_RECORD + 1))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=5000), st.integers(0, 5)), min_size=1, max_size=300))
def test_any_records_pass_around_the_end(steps: list[tuple[bytes, int]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        ends = Ends(Path(directory) / "rings")
        expected: list[bytes] = []
        found: list[bytes] = []
        for content, most in steps * 3:
            if ends.writer.put(content):
                expected.append(content)
            found += ends.take(most)
        while more := ends.take():
            found += more
        assert expected == found
        ends.cursor.close()
        ends.reader.close()
        ends.files.close()


def test_a_worker_that_died_before_it_moved_the_head_has_put_nothing(ends: Ends) -> None:
    assert ends.writer.put(b"whole")
    ends.scribble(struct.pack("<IIQ", 100, 0, 0) + b"half", HEAD_BYTES + PREFIX + 5)
    assert [b"whole"] == ends.take()
    again = ends.worker()
    assert again.put(b"next")
    assert [b"next"] == ends.take()


@pytest.mark.parametrize("logged", [4, 5, 6, 7])
def test_a_record_is_written_once_whenever_auditd_dies(ends: Ends, logged: int) -> None:
    """The next auditd finds in the log how many of the records were written: here 0, 1, 2, and 2 with a checkpoint."""
    for number in range(4):
        assert ends.writer.put(b"%d" % number)
    ends.reader.read(ends.cursor.tail, 2)
    ends.cursor.begin(first=5, count=2)
    recover(ends.cursor, ends.reader, logged)
    assert [b"0", b"1", b"2", b"3"][min(2, logged - 4) :] == ends.take()


def test_what_was_settled_is_not_taken_for_unwritten(ends: Ends) -> None:
    assert ends.writer.put(b"0")
    ends.take()
    assert ends.writer.put(b"1")
    recover(ends.cursor, ends.reader, 99)
    assert [b"1"] == ends.take()


WRONG_HEADS = [1, 7, ROOM + 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("head", WRONG_HEADS)
def test_a_head_that_no_worker_writes_is_damage(ends: Ends, head: int) -> None:
    ends.scribble(head.to_bytes(8, "little"), 0)
    with pytest.raises(RingDamaged):
        ends.reader.read(ends.cursor.tail, 10)


def test_a_head_that_goes_back_is_damage(ends: Ends) -> None:
    assert ends.writer.put(b"x")
    ends.take()
    ends.scribble(bytes(8), 0)
    with pytest.raises(RingDamaged):
        ends.reader.read(ends.cursor.tail, 10)


@pytest.mark.parametrize("length", [MAX_RECORD + 1, 2**32 - 1, 6])
def test_a_length_beyond_the_head_is_damage(ends: Ends, length: int) -> None:
    assert ends.writer.put(b"first")
    ends.scribble(struct.pack("<IIQ", length, zlib.crc32(b"first"), 0), HEAD_BYTES)
    with pytest.raises(RingDamaged):
        ends.reader.read(ends.cursor.tail, 10)


def test_a_record_that_differs_from_its_checksum_is_awaited_for_a_moment_and_then_damage(ends: Ends) -> None:
    """On some processors the head can be seen before the bytes."""
    assert ends.writer.put(b"first")
    assert ends.writer.put(b"second")
    ends.scribble(b"F", HEAD_BYTES + PREFIX)
    assert [] == ends.take()
    ends.scribble(b"f", HEAD_BYTES + PREFIX)
    assert [b"first", b"second"] == ends.take()
    assert ends.writer.put(b"third")
    ends.scribble(b"T", HEAD_BYTES + PREFIX + 5 + PREFIX + 6 + PREFIX)
    assert [[], []] == [ends.take(), ends.take()]
    with pytest.raises(RingDamaged):
        ends.take()


def test_a_cursor_that_no_auditd_writes_is_a_full_ring(ends: Ends) -> None:
    assert ends.writer.put(b"x")
    for tail in (PREFIX + 2, 2**64 - 1):
        ends.cursor.settle(tail)
        assert not ends.writer.put(b"y")


def test_a_worker_cannot_write_the_cursor(ends: Ends) -> None:
    import mmap

    with pytest.raises(PermissionError):
        mmap.mmap(ends.files.position, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_a_file_that_became_shorter_is_damage_and_no_signal(ends: Ends) -> None:
    for _ in range(20):
        assert ends.writer.put(b"x" * 1000)
    os.truncate(ends.files.records, 100)
    with pytest.raises(RingDamaged, match="too short"):
        ends.reader.read(ends.cursor.tail, 10)


@pytest.mark.parametrize("kind", ["records", "position"])
def test_files_of_another_size_are_not_mapped(ends: Ends, kind: str) -> None:
    fd = getattr(ends.files, kind)
    writable = ends.files.cursor if kind == "position" else fd
    os.truncate(writable, 8192)
    with pytest.raises(ValueError, match="not the files of a ring"):
        map_ring(os.dup(ends.files.records), os.dup(ends.files.position), ends.files.wake)
