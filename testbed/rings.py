"""How far auditd has written the audit rings of a server: a record is in its log milliseconds after it was accepted."""

import os
import struct
import time
from pathlib import Path

_CURSOR = struct.Struct("<8Q")
_POLL_SECONDS = 0.001


def head(ring: int) -> int:
    """Return the end of the records in the ring with this descriptor."""
    return int.from_bytes(os.pread(ring, 8, 0), "little")


def tail(cursor: int) -> int:
    """Return the end of the records that are in the log. `cursor` is the descriptor of a ring's cursor."""
    _state, present, *positions = _CURSOR.unpack(os.pread(cursor, _CURSOR.size, 0))
    return int(positions[3 * present])


def settle(directory: Path, seconds: float = 5.0) -> None:
    """Wait until the records that are in the rings below `directory` now are in the log, at most `seconds`."""
    deadline = time.monotonic() + seconds
    for path in directory.glob("*.ring"):
        try:
            ring, cursor = (os.open(path.with_suffix(kind), os.O_RDONLY) for kind in (".ring", ".cursor"))
        except FileNotFoundError:  # its worker has ended, and auditd has written it
            continue
        try:
            end = head(ring)
            while tail(cursor) < end and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)  # another process's state
        finally:
            os.close(ring)
            os.close(cursor)
