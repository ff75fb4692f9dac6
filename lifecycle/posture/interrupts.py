"""The handling of Ctrl-C and SIGTERM: they cause a cleanup once, and do not interrupt it.

For the main thread of a process with a single task.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def ignore() -> None:
    """Ignore both signals from now on. A function that removes something calls this first."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    ignore()
    raise KeyboardInterrupt


@contextmanager
def unwinding() -> Iterator[None]:
    """Within this context either signal raises KeyboardInterrupt, once. Afterwards both have their former effect."""
    before = [signal.signal(number, _interrupt) for number in _NUMBERS]
    try:
        yield
    finally:
        for number, handler in zip(_NUMBERS, before, strict=True):
            signal.signal(number, handler)
