"""The terminal or pipe of every command: no traceback after Ctrl-C or when the reader has closed the pipe.

A command without a reader ends with the status of the signal: 141 for a closed pipe, 130 for an interrupt.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

INTERRUPTED, UNREAD, UNWRITTEN = 130, 141, 74


def guarded(command: Callable[[], int]) -> int:
    """Run a command; return its exit status. All output is written when this returns."""
    try:
        with _named_failures():
            try:
                return command()
            finally:
                flush()
    except BrokenPipeError:
        return _discard(UNREAD)
    except KeyboardInterrupt:
        return _discard(INTERRUPTED)
    except _OutputError as error:
        status = _discard(UNWRITTEN)
        print(f"sallyport: the output cannot be written: {error}", file=sys.stderr)
        return status


def reason(error: Exception) -> str:
    """Return the text of an error for an operator: place and reason of a system error, without its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


class _OutputError(Exception):
    """The output could not be written. The message is the reason."""


def flush() -> None:
    """Write the buffered output."""
    for stream in _streams():
        with _named_failure():
            stream.flush()


@contextmanager
def _named_failures() -> Iterator[None]:
    """Have each write to the output that fails raise `_OutputError`: a long output is written before the last flush."""
    streams = [(stream, stream.write) for stream in _streams()]
    for stream, write in streams:
        stream.write = _named(write)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for stream, write in streams:
            stream.write = write  # type: ignore[method-assign]


def _named(write: Callable[[str], int]) -> Callable[[str], int]:
    def named(text: str) -> int:
        with _named_failure():
            return write(text)

    return named


@contextmanager
def _named_failure() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _OutputError(error.strerror) from None


def _streams() -> list[TextIO]:
    """Return standard output and standard error, without one that was closed when the program started."""
    found: list[TextIO | None] = [sys.stdout, sys.stderr]
    return [stream for stream in found if stream is not None]


def _discard(status: int) -> int:
    """Discard the buffered output, which the interpreter would write when it ends."""
    for stream in _streams():
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
    return status
