"""Where the log lies in its directory, and how a reader finds its way through it.

Reads only; safe beside a live writer.
"""

import re
from pathlib import Path
from typing import Final

from audit.chain import Verifier, read_anchor

HEADS_NAME: Final = "heads.json"
_FILE = re.compile(r"audit-(\d{6,})\.jsonl")


def file_name(number: int) -> str:
    """Return the name of file `number`."""
    return f"audit-{number:06d}.jsonl"


def file_numbers(directory: Path) -> list[int]:
    """Return the numbers of the files of the log in `directory`, oldest first."""
    return sorted(int(match[1]) for entry in directory.iterdir() if (match := _FILE.fullmatch(entry.name)))


def verify_directory(directory: Path, verifier: Verifier) -> None:
    """Feed the log in `directory` to `verifier`, whose anchor is read here first.

    Raises:
        OSError: it cannot be read.
    """
    heads = directory / HEADS_NAME
    if heads.exists():  # before the files: a live writer then only ever has written more than it says
        verifier.anchor = read_anchor(verifier.public_key, heads.read_bytes())
    for number in file_numbers(directory):
        verifier.begin_file(number)
        with open(directory / file_name(number), "rb") as file:
            verifier.lines(file)
    verifier.finish()
