"""Docker's stream of a container's output: frames of standard output and standard error, one after the other.

A frame is one byte for the stream, three of zeros, four with the length, and the bytes that the container has written.
"""

import struct
from collections.abc import Callable
from typing import Final

MOST_BYTES: Final = 256 * 1024
"""The bytes of an output that are kept: its end."""
_PREFIX = struct.Struct(">BxxxI")


def last_bytes(read: Callable[[int], bytes], most: int = MOST_BYTES) -> tuple[str, bool]:
    """Read a whole stream. Return its last whole lines, and whether lines before them were dropped.

    Args:
        read: returns up to so many bytes, empty at the end.
        most: the limit of what is kept, in bytes. A longer last line is shortened at its start.
    """
    kept, dropped = bytearray(), False
    while len(prefix := _exactly(read, _PREFIX.size)) == _PREFIX.size:
        left = int(_PREFIX.unpack(prefix)[1])
        while left and (piece := read(min(left, most))):
            left -= len(piece)
            kept += piece
            if len(kept) > 2 * most:
                del kept[:-most]
                dropped = True
    if len(kept) > most:
        del kept[:-most]
        dropped = True
    if dropped:
        del kept[: kept.find(b"\n", 0, -1) + 1]
    return kept.decode("utf-8", "replace"), dropped


def _exactly(read: Callable[[int], bytes], size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := read(size - len(data))):
        data += piece
    return data
