"""`sallyport init-config [--output FILE]`: a settings file with every key as a comment."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lifecycle.commands.common import FAILED, OK
from lifecycle.config import reference


def add_arguments(parser: argparse.ArgumentParser, _parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the options of the command."""
    parser.add_argument("--output", type=Path, help="write it to this new file instead")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    output: Path | None = options.output
    if output is None:
        print(reference.toml(), end="")
        return OK
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(reference.toml())
    except FileExistsError:
        print(f"sallyport: {output} exists and is not replaced; name another file with --output", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"sallyport: {output}: {error.strerror}", file=sys.stderr)
        return FAILED
    return OK
