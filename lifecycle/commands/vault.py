"""`sallyport vault`, with the places of the settings."""

import argparse
import sys
from collections.abc import Sequence

from lifecycle import running
from lifecycle.commands.common import FAILED, configured
from lifecycle.config import launch, master_key
from vault import cli


def add_arguments(parser: argparse.ArgumentParser, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the commands of `vault.cli`; `parents` has options that each of them takes besides."""
    cli.add_commands(parser, parents)


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    settings = configured(options)
    if options.action == "rekey" and master_key.differs(settings, running.settings_of(settings)):
        print(
            "sallyport: the running server has other settings of the master key: start it again with these first",
            file=sys.stderr,
        )
        return FAILED
    owner = launch.uids(settings)["vaultd"]
    socket, path = settings.run_dir / "vault.sock", settings.master_key_file
    if options.action not in ("init", "rekey"):
        return cli.run(options, cli.VaultPlaces(socket, path, (owner, owner)))
    if options.action == "init":
        master_key.make_directories(settings)
    with master_key.wrapping_of(settings) as wrapping:
        return cli.run(options, cli.VaultPlaces(socket, path, (owner, owner), wrapping))
