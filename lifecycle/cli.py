"""The command `sallyport`. Each subcommand is a module of `lifecycle.commands`.

sallyport serve | doctor [--probe]
sallyport init-config [--output FILE]
sallyport policy check [FILE] | policy explain [FILE] --host HOST [--method M] [--path P] [--policy NAME]
sallyport vault init | put | list | rotate | delete | reset | revoke-all | freeze | unfreeze | rekey
sallyport image add SOURCE [--name NAME] | alias NAME ALIAS | list | show NAME | remove NAME
sallyport volume list | remove NAME
sallyport audit tail | verify [--anchor FILE] | anchor [--output FILE] [DIRECTORY]

`--config FILE` is allowed before and after a command. Without it, `serve` searches for settings as `settings.read`
describes. The other commands use the settings of the running server, if there is one (`lifecycle.running`).
"""

import argparse
import logging
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from lifecycle import about, console
from lifecycle.commands.common import WRONG
from lifecycle.config import settings
from lifecycle.config.settings import SettingsError

COMMANDS = {
    "serve": "run the server and everything it needs (as root)",
    "doctor": "say what this host lacks and how to provide it",
    "init-config": "print a settings file with every key as a comment",
    "policy": "check and explain policy files",
    "vault": "manage stored secrets",
    "image": "manage the images of sandboxes",
    "volume": "manage named volumes",
    "audit": "read and verify the audit log",
}


class Subcommand(Protocol):
    """A module of `lifecycle.commands`."""

    def add_arguments(self, parser: argparse.ArgumentParser, parents: Sequence[argparse.ArgumentParser], /) -> None: ...
    def run(self, options: argparse.Namespace, /) -> int: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="sallyport: %(message)s")
    return console.guarded(lambda: _main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: Sequence[str]) -> int:
    options = parser(arguments).parse_args(arguments)
    try:
        return _module(options.command).run(options)
    except SettingsError as error:
        print(f"sallyport: {error}", file=sys.stderr)
        return WRONG


def parser(words: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser of the command line, with the options of those commands that are among `words`."""
    top = argparse.ArgumentParser(prog="sallyport", allow_abbrev=False)
    about_config = f"settings (TOML); else {settings.CONFIG_PATH}, else ~/.sandbox.toml"
    version = f"{about.PRODUCT.lower()} {about.VERSION} (API: {about.CONTRACT})"
    top.add_argument("--version", action="version", version=version)
    top.add_argument("--config", type=Path, help=about_config)
    top.add_argument("--defaults", type=Path, help="settings that those of --config win over, key by key")
    after = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    after.add_argument("--config", type=Path, default=argparse.SUPPRESS, help=about_config)
    commands = top.add_subparsers(dest="command", required=True)
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, parents=[after], help=purpose)
        if name in words:
            _module(name).add_arguments(command, [after])
    return top


def _module(command: str) -> Subcommand:
    """Import the module of a command. Other commands do not wait for it."""
    match command:
        case "serve":
            from lifecycle.commands import serve

            return serve
        case "doctor":
            from lifecycle.commands import doctor

            return doctor
        case "init-config":
            from lifecycle.commands import init_config

            return init_config
        case "policy":
            from lifecycle.commands import policy

            return policy
        case "vault":
            from lifecycle.commands import vault

            return vault
        case "image":
            from lifecycle.commands import image

            return image
        case "volume":
            from lifecycle.commands import volume

            return volume
        case "audit":
            from lifecycle.commands import audit

            return audit
    raise LookupError(f"no module for the command {command}")


if __name__ == "__main__":
    raise SystemExit(main())
