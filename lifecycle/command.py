"""The program `sallyport`. Ctrl-C ends it silently, also while it is still loading."""

import signal
import sys


def main() -> int:
    """Load the command line and run it."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lifecycle import cli

    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return cli.main()
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
