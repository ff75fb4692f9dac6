"""Limits of the memory that one connection can cost its reader.

The cost of a frame is the memory of its parsed form: its bytes, and `ELEMENT` bytes for each value and key. A frame of
tiny objects needs thirty times its size. A request counts until its answer is sent, so the reader stops reading from a
peer that does not read its answers.
"""

import re
from dataclasses import dataclass
from typing import Final

MAX_FRAME: Final = 4 * 1024 * 1024
ELEMENT: Final = 96
"""Bytes of one parsed value and its place. The most expensive value, an object with one key, has three elements."""
_SIGNS: Final = (b",", b":", b"[", b"{")
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"')


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The limits of one direction of a connection.

    Attributes:
        frame: bytes of one frame.
        memory: cost of one frame, and of all requests that are being handled.
        requests: the number of requests that are handled at once.
    """

    frame: int = MAX_FRAME
    memory: int = 40 * 1024 * 1024
    requests: int = 64


WHOLE: Final = FrameLimits()
"""For messages between daemons and to a worker: configurations and policies."""
NARROW: Final = FrameLimits(frame=1024 * 1024, memory=6 * 1024 * 1024)
"""For messages from a worker, and to auditd."""


def cost(body: bytes) -> int:
    """Return an upper estimate of the memory of the parsed `body`, in bytes."""
    width = 1 if body.isascii() and b"\\u" not in body else 4  # bytes per character of a text with wide characters
    return width * len(body) + ELEMENT * (1 + sum(map(body.count, _SIGNS)))


def within(body: bytes, limits: FrameLimits) -> int:
    """Return the cost of `body`.

    Raises:
        ValueError: the cost is above the limits.
    """
    found = cost(body)
    if found > limits.memory:  # the estimate may count characters inside of texts as elements
        found = cost(body) - ELEMENT * sum(map(sum, (map(text.count, _SIGNS) for text in _TEXT.findall(body))))
    if len(body) > limits.frame or found > limits.memory:
        raise ValueError("the frame is beyond the limits of this connection")
    return found
