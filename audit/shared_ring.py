"""A ring of records in shared memory, between the gateway worker of one sandbox and auditd.

    ring     0      head: bytes that the worker has put into the ring
             4096   records, one after the other, around the end: length, CRC-32, time, content
    cursor   0      state: OPEN if a record in the ring counts as accepted
             8      number of the present position, 0 or 1
             16     position 0: tail, first, count
             40     position 1: the same

- A ring belongs to one worker. A worker can outlive its hostd for a moment, so the sandbox's next worker has a ring of
  its own.

- Both are files of hostd. So a record in the ring survives the death of worker, auditd and hostd. The worker maps the
  ring, and can only read the cursor. Only auditd writes the cursor.
- The worker writes a record, and then its end as the new head. A worker that dies in between has put nothing.
- auditd copies a record out of the ring before it reads it. auditd maps no memory that a worker can change: a worker
  that removes pages of the file causes no signal in auditd.
- A record is in the log exactly once. Before auditd writes records, it notes in the cursor how many, and the sequence
  number of the first one (`begin`). After the write it moves the tail (`settle`). If auditd dies in between, the next
  auditd compares this with the log (`recover`).
- A position is written completely before it becomes the present one.
- A ring without room takes no record. A cursor of zeros is closed.

A compromised worker can change only records that auditd has not copied yet. The layout has no pointers: auditd checks
each length against the head, and the head against the tail.
"""

import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from wire.api.auditd import CURSOR_BYTES, RING_BYTES

HEAD_BYTES: Final = 4096
ROOM: Final = RING_BYTES - HEAD_BYTES
"""The bytes of a ring that hold records."""
MAX_RECORD: Final = 64 * 1024
"""The limit of one record's content, in bytes."""
OPEN: Final = 1
_PREFIX = struct.Struct("<IIQ")
_WORD = struct.Struct("<Q")
_STATE, _PRESENT, _POSITIONS, _WORDS = 0, 1, 2, 3
_TAIL, _FIRST, _COUNT = range(3)
_DOUBTS: Final = 3


type Put = tuple[int, bytes]
"""When the worker put a record into the ring, by its own clock, in milliseconds of Unix time; and the record."""


class RingDamaged(Exception):
    """The ring holds bytes that no worker writes. What is in it is lost."""


class Cursor:
    """auditd's own view of a cursor: its file, mapped."""

    def __init__(self, fd: int) -> None:
        """Map the file `fd`. The caller still owns the descriptor.

        Raises:
            OSError, ValueError: it is not the file of a cursor.
        """
        self._map = mmap.mmap(fd, CURSOR_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._words = memoryview(self._map).cast("Q")

    def close(self) -> None:
        """Unmap the file."""
        self._words.release()
        self._map.close()

    @property
    def tail(self) -> int:
        """The number of bytes of the ring whose records are in the log."""
        return self._words[self._place() + _TAIL]

    @property
    def unsettled(self) -> tuple[int, int]:
        """The sequence number of the first record that was being written, and their number; 0 for none."""
        place = self._place()
        return self._words[place + _FIRST], self._words[place + _COUNT]

    def open(self, *, is_open: bool) -> None:
        """Let records in the ring count as accepted, or not."""
        self._words[_STATE] = OPEN if is_open else 0

    def begin(self, first: int, count: int) -> None:
        """Note that the next `count` records are about to be written, from sequence number `first` on."""
        self._set(self.tail, first, count)

    def settle(self, tail: int) -> None:
        """Note that all records before `tail` are in the log, and that no other is being written."""
        self._set(tail, 0, 0)

    def _place(self) -> int:
        return _POSITIONS + _WORDS * (self._words[_PRESENT] & 1)

    def _set(self, tail: int, first: int, count: int) -> None:
        other = 1 - (self._words[_PRESENT] & 1)
        place = _POSITIONS + _WORDS * other
        self._words[place + _TAIL], self._words[place + _FIRST], self._words[place + _COUNT] = tail, first, count
        self._words[_PRESENT] = other


class RingReader:
    """auditd's side of a ring. Owns its descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._doubts = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def head(self) -> int:
        """Return the present end of the records."""
        found = os.pread(self._fd, _WORD.size, 0)
        while (again := os.pread(self._fd, _WORD.size, 0)) != found:  # it may change in the middle of a copy
            found = again
        return int(_WORD.unpack(found)[0]) if len(found) == _WORD.size else 0

    def read(self, tail: int, most: int) -> tuple[list[Put], int]:
        """Return up to `most` records from `tail` on, and the end of the last one.

        Raises:
            RingDamaged: there are bytes that no worker writes.
        """
        head = self.head()
        left = head - tail
        if not 0 <= left <= ROOM:
            raise RingDamaged("its head is out of range")
        data = self._copy(tail, left)
        records: list[Put] = []
        at = 0
        while at < left and len(records) < most:
            whole = left - at >= _PREFIX.size
            length, checksum, put = _PREFIX.unpack_from(data, at) if whole else (MAX_RECORD + 1, 0, 0)
            end = at + _PREFIX.size + length
            if length > MAX_RECORD or end > left:
                raise RingDamaged("a record has no valid length")
            content = data[at + _PREFIX.size : end]
            if zlib.crc32(content) != checksum:
                # Another processor may see the head earlier than the bytes before it.
                self._doubts += 1
                if self._doubts < _DOUBTS:
                    break
                self._doubts = 0
                raise RingDamaged("a record differs from its checksum")
            records.append((put, content))
            at = end
        if records:
            self._doubts = 0
        return records, tail + at

    def _copy(self, tail: int, count: int) -> bytes:
        at = tail % ROOM
        first = os.pread(self._fd, min(count, ROOM - at), HEAD_BYTES + at)
        rest = os.pread(self._fd, count - len(first), HEAD_BYTES) if len(first) < count else b""
        if len(first) + len(rest) != count:
            raise RingDamaged("its file is too short")
        return first + rest


def recover(cursor: Cursor, reader: RingReader, logged: int) -> None:
    """Settle what a dead auditd was writing. `logged` is the last sequence number of the chain in the log.

    Raises:
        RingDamaged: see `RingReader.read`.
    """
    first, count = cursor.unsettled
    written = max(0, min(count, logged - first + 1))
    tail = cursor.tail
    if written:
        records, end = reader.read(tail, written)
        tail = end if len(records) == written else tail
    cursor.settle(tail)


class RingWriter:
    """The worker's side of a ring. `wake` is called when the ring was empty before."""

    def __init__(self, ring: mmap.mmap, cursor: mmap.mmap, wake: Callable[[], None]) -> None:
        self._head_word = memoryview(ring)[: _WORD.size].cast("Q")
        self._room = memoryview(ring)[HEAD_BYTES:RING_BYTES]
        self._cursor = memoryview(cursor).cast("Q")
        self._wake = wake
        self._head = self._head_word[0]

    @property
    def is_open(self) -> bool:
        """Whether a record in the ring counts as accepted."""
        return self._cursor[_STATE] == OPEN

    def put(self, content: bytes) -> bool:
        """Put a record into the ring; False if there is no room for it, or the ring is closed."""
        words = self._cursor
        if words[_STATE] != OPEN:
            return False
        used = self._head - words[_POSITIONS + _WORDS * (words[_PRESENT] & 1) + _TAIL]
        record = _PREFIX.pack(len(content), zlib.crc32(content), time.time_ns() // 1_000_000) + content
        if not 0 <= used <= ROOM - len(record) or len(content) > MAX_RECORD:
            return False
        at = self._head % ROOM
        end = at + len(record)
        if end <= ROOM:
            self._room[at:end] = record
        else:
            self._room[at:] = record[: ROOM - at]
            self._room[: end - ROOM] = record[ROOM - at :]
        self._head += len(record)
        self._head_word[0] = self._head
        if not used:
            self._wake()
        return True


def map_ring(ring: int, cursor: int, wake: int) -> RingWriter:
    """Return the worker's side. Closes `ring` and `cursor`; keeps the eventfd `wake`.

    Raises:
        OSError, ValueError: a file cannot be mapped, or has another size.
    """
    try:
        if (os.fstat(ring).st_size, os.fstat(cursor).st_size) != (RING_BYTES, CURSOR_BYTES):
            raise ValueError("these are not the files of a ring")
        written = mmap.mmap(ring, RING_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        read = mmap.mmap(cursor, CURSOR_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(ring)
        os.close(cursor)

    def signal() -> None:
        with suppress(BlockingIOError):  # auditd is awake
            os.eventfd_write(wake, 1)

    return RingWriter(written, read, signal)
