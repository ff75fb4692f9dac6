"""The head of the vault: the number of the last change of each directory, kept outside of the vault's directory.

    two slots of 512 bytes, written in turn: SHA-256 of the text (64 characters) | text, JSON | blanks

- A restored older copy of the vault does not contain this file, so the head detects it. The file belongs to root. hostd
  opens it and passes vaultd the descriptor.
- A number is written after its change is on disk. A vault with a smaller number is an older copy.
- A slot that a crash left incomplete is skipped; the other one is older by one change.

The file has counters and no secret. To accept a restored backup, root deletes it.
"""

import hashlib
import json
import logging
import os
from typing import Any

_SLOT = 512
_DIGEST = 64

_log = logging.getLogger(__name__)


class HeadError(Exception):
    """The file is invalid, or the vault is older than the file."""


class StoreHead:
    """The numbers and the descriptor of their file. Without a descriptor they are only in memory."""

    def __init__(self, fd: int | None = None) -> None:
        """Read the numbers.

        Raises:
            HeadError: the file is not empty, and neither slot is valid.
        """
        self._fd = fd
        self._turn, self._counters = (0, {}) if fd is None else _latest(os.pread(fd, 2 * _SLOT, 0))

    def check(self, purpose: str, counter: int) -> None:
        """Compare the last change of a directory with the head.

        Raises:
            HeadError: the directory is an older copy.
        """
        reached = self._counters.get(purpose, 0)
        if counter < reached:
            raise HeadError(
                f"the vault's {purpose} are an older copy (change {counter}, {reached} was the last): "
                "put the newest copy back, or see 'A restored vault' in docs/operations.md"
            )

    def record(self, purpose: str, counter: int) -> None:
        """Write the last change of a directory. A failure is logged, and the next call repeats the write."""
        self._counters[purpose] = counter
        if self._fd is None:
            return
        self._turn += 1
        text = json.dumps({"turn": self._turn, **self._counters}, sort_keys=True).encode()
        slot = (hashlib.sha256(text).hexdigest().encode() + text).ljust(_SLOT)
        try:
            os.pwrite(self._fd, slot, _SLOT * (self._turn % 2))
            os.fdatasync(self._fd)
        except OSError as error:
            _log.error("cannot write the vault's head, the next change tries again: %s", error.strerror)

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd is not None:
            os.close(self._fd)


def _latest(content: bytes) -> tuple[int, dict[str, int]]:
    if not content:
        return 0, {}
    slots = [_slot(content[start : start + _SLOT]) for start in (0, _SLOT)]
    found = max((slot for slot in slots if slot is not None), key=lambda slot: slot["turn"], default=None)
    if found is None:
        raise HeadError("the vault's head cannot be read: see 'A restored vault' in docs/operations.md")
    return found.pop("turn"), found


def _slot(content: bytes) -> dict[str, int] | None:
    text = content[_DIGEST:].rstrip()
    if hashlib.sha256(text).hexdigest().encode() != content[:_DIGEST]:
        return None
    document: dict[str, Any] = json.loads(text)
    return document
