"""How far each directory of the vault had come: a second place, which a restored copy of the vault does not bring back.

    two slots of 512 bytes, written in turn: SHA-256 of the text (64 characters) | text, JSON | blanks

- The file belongs to root and lies outside of the vault's directory. hostd opens it and gives vaultd the descriptor.
- A number is written after the change that it counts is on disk. A vault that is behind its number was put back.
- A slot that was cut short by a crash is passed over: the other one is older by one change.

It holds counters, no secret. Root can delete it: that is how a restored backup is accepted on purpose.
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
    """The file is not one of ours, or the vault is older than it says."""


class Head:
    """The numbers, and the descriptor they are kept behind; without one they are kept in memory only."""

    def __init__(self, fd: int | None = None) -> None:
        """Read what is there.

        Raises:
            HeadError: there is something, and neither slot can be read.
        """
        self._fd = fd
        self._turn, self._counters = (0, {}) if fd is None else _latest(os.pread(fd, 2 * _SLOT, 0))

    def check(self, purpose: str, counter: int) -> None:
        """Compare where a directory stands with where it had come to.

        Raises:
            HeadError: it is behind.
        """
        reached = self._counters.get(purpose, 0)
        if counter < reached:
            raise HeadError(
                f"the vault's {purpose} are an older copy (change {counter}, {reached} was the last): "
                "put the newest copy back, or see 'A restored vault' in docs/operations.md"
            )

    def record(self, purpose: str, counter: int) -> None:
        """Write down where a directory stands; a failure is reported and made good by the next call."""
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
            _log.error("the vault's head is behind: %s", error.strerror)

    def close(self) -> None:
        """Give the descriptor back."""
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
