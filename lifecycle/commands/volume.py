"""`sallyport volume`, with the socket of the settings."""

import argparse
from collections.abc import Sequence

from lifecycle import volumes
from lifecycle.commands.common import configured


def add_arguments(parser: argparse.ArgumentParser, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the commands of `lifecycle.volumes`; `parents` has options that each of them takes besides."""
    volumes.add_commands(parser, parents)


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    return volumes.run(options, configured(options).run_dir / "hostd.sock")
