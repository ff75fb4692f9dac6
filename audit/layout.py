"""The files of the log in its directory, for readers.

The module only reads. It is safe beside a running auditd.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from audit.chain import CONTROL, read_anchor
from audit.keys import EPOCHS_NAME
from audit.ring import read_ring
from audit.shares import SHARES_NAME, Kept, parse_kept, read_kept, share_lines
from audit.verifier import Verifier
from wire.api.auditd import Anchor

HEADS_NAME: Final = "heads.json"
_FILE = re.compile(r"audit-(\d{6,})\.jsonl")


def file_name(number: int) -> str:
    """Return the name of file `number`."""
    return f"audit-{number:06d}.jsonl"


def file_numbers(directory: Path) -> list[int]:
    """Return the numbers of the files of the log in `directory`, oldest first."""
    return sorted(int(match[1]) for entry in directory.iterdir() if (match := _FILE.fullmatch(entry.name)))


def read_verifier(directory: Path, identity: Ed25519PublicKey, anchors: Iterable[Anchor] = ()) -> Verifier:
    """Return a verifier that has read the whole log in `directory`.

    Args:
        identity: the log's first public key.
        anchors: anchors that were kept outside of the log.

    Raises:
        OSError: the log cannot be read.
    """
    # Read before the files: a running auditd can then only have written more than this state.
    heads, shares = _content(directory / HEADS_NAME), _content(directory / SHARES_NAME)
    ring, problem = read_ring(identity, _content(directory / EPOCHS_NAME) or b"")
    verifier = Verifier(ring)
    for anchor in anchors:
        verifier.pins.add(anchor)
    if problem is not None:
        verifier.finding(problem)
    if heads is not None:
        verifier.anchor = read_anchor(ring.key, heads)
    first = 0
    if shares is not None:
        kept = read_kept(ring, shares)
        if kept is None:
            verifier.finding(f"{SHARES_NAME} is not signed by this log's key")
        else:
            first = kept.file
            _read_shares(directory, verifier, kept)
    numbers = [number for number in file_numbers(directory) if number >= first]  # earlier files are split already
    if shares is None and numbers and numbers[0] > 1 and verifier.anchor is not None and verifier.anchor.version > 1:
        verifier.finding(f"{SHARES_NAME}, which says what is kept of the files before {numbers[0]}, is missing")
    for number in numbers:
        verifier.begin_file(number)
        with open(directory / file_name(number), "rb") as file:
            verifier.lines(file)
    verifier.finish()
    return verifier


def _read_shares(directory: Path, verifier: Verifier, kept: Kept) -> None:
    verifier.begin_shares(kept)
    for chain in sorted(kept.chains, key=lambda chain: (chain != CONTROL, chain)):
        verifier.share(chain, kept.chains[chain], share_lines(directory, chain, kept.chains[chain]))


def signature(directory: Path) -> tuple[bytes | None, list[int]]:
    """Return a value that changes when auditd retires a file."""
    return _content(directory / SHARES_NAME), file_numbers(directory)[:1]


def share_chains(directory: Path) -> Kept:
    """Return the state of retired files without a check of its signature, for display only."""
    data = _content(directory / SHARES_NAME)
    return Kept() if data is None else parse_kept(data)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
