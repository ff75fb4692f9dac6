"""`sallyport doctor [--probe]`: what this host lacks, and whether a sandbox on it can get out."""

import argparse
import sys
from collections.abc import Sequence

from lifecycle import doctor
from lifecycle.commands.common import FAILED, OK, configured
from lifecycle.config.settings import Settings


def add_arguments(parser: argparse.ArgumentParser, _parents: Sequence[argparse.ArgumentParser]) -> None:
    """Add the options of the command."""
    parser.add_argument("--probe", action="store_true", help="start sandboxes here and try to get out of them")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    settings = configured(options)
    return _probe(settings) if options.probe else _diagnose(settings)


def _diagnose(settings: Settings) -> int:
    if doctor.needs_root():
        print("sallyport: not run by root: most checks cannot be made", file=sys.stderr)
    findings = doctor.diagnose(settings)
    for finding in findings:
        print(finding.line())
    return OK if all(finding.ok for finding in findings) else FAILED


def _probe(settings: Settings) -> int:
    if doctor.needs_root():
        print("sallyport: cannot probe: not root", file=sys.stderr)
        return FAILED
    from lifecycle.posture.probe import probe  # This imports an HTTP client that no other command needs.

    held = probe(settings, lambda line: print(line, flush=True))
    print("posture: every way held" if held else "posture: NOT every way is known to hold")
    return OK if held else FAILED
