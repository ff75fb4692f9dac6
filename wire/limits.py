"""What one connection may cost the process that reads it.

A frame costs what it may take once it is parsed: its bytes, and `ELEMENT` bytes for each value and key. Without that a
frame of tiny objects takes thirty times its size. Requests count until their answers are with the kernel, so a peer
that does not read its answers is soon not read either.
"""

import re
from dataclasses import dataclass
from typing import Final

MAX_FRAME: Final = 4 * 1024 * 1024
ELEMENT: Final = 96
"""Bytes of one parsed value and its place. An object with one key, the dearest, has three elements and takes 240."""
_SIGNS: Final = (b",", b":", b"[", b"{")
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"')


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one direction of a connection.

    Attributes:
        frame: bytes of one frame.
        memory: cost of one frame, and of all requests that are being handled.
        requests: how many are handled at once.
    """

    frame: int = MAX_FRAME
    memory: int = 40 * 1024 * 1024
    requests: int = 64


WHOLE: Final = Limits()
"""Between daemons, and to a worker: configurations and policies."""
NARROW: Final = Limits(frame=1024 * 1024, memory=6 * 1024 * 1024)
"""Whatever a worker sends, and whatever auditd is sent."""


def cost(body: bytes) -> int:
    """Return the most memory, about, that `body` takes when it is parsed."""
    width = 1 if body.isascii() and b"\\u" not in body else 4  # of a character, where one of a text is wide
    return width * len(body) + ELEMENT * (1 + sum(map(body.count, _SIGNS)))


def within(body: bytes, limits: Limits) -> int:
    """Return the cost of `body`.

    Raises:
        ValueError: it is beyond the limits.
    """
    found = cost(body)
    if found > limits.memory:  # perhaps for what only looks like elements, inside of texts
        found = cost(body) - ELEMENT * sum(map(sum, (map(text.count, _SIGNS) for text in _TEXT.findall(body))))
    if len(body) > limits.frame or found > limits.memory:
        raise ValueError("the frame is beyond the limits of this connection")
    return found
