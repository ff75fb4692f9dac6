"""What every command owes the terminal or pipe it writes to: no traceback when that goes away or Ctrl-C is pressed.

A command that ends because nothing reads it any more ends as a signal would have ended it: 141 for a closed pipe, 130
for an interrupt.
"""

import os
import sys
from collections.abc import Callable

INTERRUPTED, UNREAD, UNWRITTEN = 130, 141, 74


def guarded(command: Callable[[], int]) -> int:
    """Run a command; return its exit status. All it printed is written when this returns."""
    try:
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
    """What an error says to an operator: of the operating system's, the place and the reason without its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


class _OutputError(Exception):
    """What was printed could not be written; the message is the reason."""


def flush() -> None:
    """Write what was printed so far."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # the descriptor was closed when the program started
            continue
        try:
            stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _OutputError(error.strerror) from None


def _discard(status: int) -> int:
    """Have what is still buffered go nowhere: the interpreter writes it when it ends."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
    return status
