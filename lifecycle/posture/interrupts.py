"""Ctrl-C and SIGTERM unwind what was begun, and do not disturb the clearing up.

For the main thread of a process that does nothing else.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def ignore() -> None:
    """From now on only clear up: called first by whatever removes something."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    ignore()
    raise KeyboardInterrupt


@contextmanager
def unwinding() -> Iterator[None]:
    """Within it either signal raises KeyboardInterrupt, once; afterwards both do what they did before."""
    before = [signal.signal(number, _interrupt) for number in _NUMBERS]
    try:
        yield
    finally:
        for number, handler in zip(_NUMBERS, before, strict=True):
            signal.signal(number, handler)
