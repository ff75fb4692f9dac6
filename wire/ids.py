"""Identifiers that more than one process reads, and their bounds. Pure."""

import re
from typing import Final

SANDBOX_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)
"""The form of a sandbox id. The id is also the name of its audit chain, a file name and a part of paths."""
SNAPSHOT_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
"""The form of a snapshot id, a UUID. The id is also the tag of an image, a file name and a part of paths."""
MOST_GENERATION: Final = 2**53 - 1
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


def check_sandbox(text: str) -> None:
    """Check the id of a sandbox.

    Raises:
        ValueError: the text is no sandbox id.
    """
    if not SANDBOX_ID.fullmatch(text):
        raise ValueError("not a sandbox id")


def check_snapshot(text: str) -> None:
    """Check the id of a snapshot.

    Raises:
        ValueError: the text is no snapshot id.
    """
    if not SNAPSHOT_ID.fullmatch(text):
        raise ValueError("not a snapshot id")


def check_generation(number: int) -> None:
    """Check the generation of a worker. The first worker of a sandbox has 1.

    Raises:
        ValueError: the number is no generation.
    """
    if not 1 <= number <= MOST_GENERATION:
        raise ValueError(f"a generation is a number from 1 to {MOST_GENERATION}")


def check_digest(text: str) -> None:
    """Check a SHA-256 in lower-case hexadecimal.

    Raises:
        ValueError: the text is no SHA-256.
    """
    if not _DIGEST.fullmatch(text):
        raise ValueError("not a SHA-256 in hexadecimal")
