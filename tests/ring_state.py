"""What the files of a ring say, and a wait until auditd has taken everything out of it."""

import os
import time

from runtimes.rings import RingFiles
from testbed.rings import head, tail

SECONDS = 60.0


def is_open(ring: RingFiles) -> bool:
    return os.pread(ring.cursor, 1, 0) == b"\x01"


def close(ring: RingFiles) -> None:
    """Close the ring, as auditd does while it cannot write."""
    os.pwrite(ring.cursor, bytes(8), 0)


def drained(ring: RingFiles) -> None:
    """Wait until every record is in the log."""
    deadline = time.monotonic() + SECONDS
    while head(ring.records) != tail(ring.cursor):
        assert time.monotonic() < deadline, "records stay in the ring"
        time.sleep(0.001)  # another process's state
