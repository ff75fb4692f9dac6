"""What the files of a ring say, and a wait until auditd has taken everything out of it."""

import os
import struct
import time

from runtimes.rings import RingFiles

SECONDS = 20.0


def head(ring: RingFiles) -> int:
    """Return the end of the records."""
    return int.from_bytes(os.pread(ring.records, 8, 0), "little")


def tail(ring: RingFiles) -> int:
    """Return the end of the records that are in the log."""
    _state, present, *positions = struct.unpack("<8Q", os.pread(ring.cursor, 64, 0))
    return positions[3 * present]


def is_open(ring: RingFiles) -> bool:
    return os.pread(ring.cursor, 1, 0) == b"\x01"


def close(ring: RingFiles) -> None:
    """Close the ring, as auditd does while it cannot write."""
    os.pwrite(ring.cursor, bytes(8), 0)


def drained(ring: RingFiles) -> None:
    """Wait until every record is in the log."""
    deadline = time.monotonic() + SECONDS
    while head(ring) != tail(ring):
        assert time.monotonic() < deadline, "records stay in the ring"
        time.sleep(0.001)  # another process's state
