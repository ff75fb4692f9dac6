"""`sallyport audit tail`, `verify` and `anchor`, with the log of the settings."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from audit import cli
from lifecycle.commands.common import configured
from runtimes.process.bounded_log import ANCHORS_NAME


def add_arguments(parser: argparse.ArgumentParser, parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the commands `tail`, `verify` and `anchor`; `parents` has options that each of them takes besides."""
    log = parser.add_subparsers(dest="action", required=True)
    tail = log.add_parser("tail", parents=parents, help="print records")
    tail.add_argument("--denied", action="store_true", help="denials only")
    tail.add_argument("--sandbox", help="of one sandbox only")
    tail.add_argument("--follow", "-f", action="store_true")
    tail.add_argument("--output", choices=["text", "json", "ecs"], default="text")
    verify = log.add_parser("verify", parents=parents, help="check that the log is what was written")
    verify.add_argument("--key", type=Path, help="public key to trust, else the log's own")
    verify.add_argument(
        "--anchor", type=Path, action="append", default=[], help="compare with the anchors in this file"
    )
    anchor = log.add_parser(
        "anchor", parents=parents, help="print what to keep elsewhere, so that a rewritten log is found"
    )
    anchor.add_argument("--key", type=Path, help="public key to trust, else the log's own")
    anchor.add_argument("--output", type=Path, help="append it to this file instead")
    for command in (tail, verify, anchor):
        command.add_argument("directory", type=Path, nargs="?", help="of the log or a copy; else the configured one")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    directory = _log_directory(options)
    match options.action:
        case "tail":
            return cli.tail(
                directory,
                denied=options.denied,
                sandbox=options.sandbox,
                follow=options.follow,
                output=options.output,
            )
        case "anchor":
            return cli.anchor(directory, key=options.key, kept=_kept_anchors(options), output=options.output)
        case _:
            return cli.verify(directory, key=options.key, anchors=options.anchor, kept=_kept_anchors(options))


def _log_directory(options: argparse.Namespace) -> Path:
    if options.directory is not None and options.config is None:
        return Path(options.directory)
    found = configured(options)
    return Path(options.directory or found.state_dir / "audit")


def _kept_anchors(options: argparse.Namespace) -> list[Path]:
    """Return the files with hostd's anchors of the configured log. For another log there are none."""
    if options.directory is not None:
        return []
    path = configured(options).state_dir / "hostd" / ANCHORS_NAME
    return [path.with_name(f"{path.name}.old"), path]
