"""How often each limited secret was used: counts on disk, and what a lease takes of them.

- A lease of a limited secret permits a number of uses. They are counted here, durably, before the value leaves vaultd,
  and never given back. So the sum of what all leases permitted never exceeds the limits, also not over restarts and
  kills of vaultd or of a worker.
- A lease takes a thousandth of what is left, at least one use and at most `MOST_SHARE`. So limits below 2000 are exact.
  Above, a lease that ends early wastes at most a thousandth of what was left.
- A secret whose counts cannot be read counts as used up until `reset`.

All methods block.
"""

import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vault.conditions import UseLimits
from vault.stores.directory import SealedDirectory, SealedRecordError

MOST_SHARE = 256
_PART = 1000

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Used:
    """Uses in all, and by sandbox."""

    total: int = 0
    sandboxes: Counter[str] = field(default_factory=Counter)


class Budgets:
    """The counts of all limited secrets. Without a directory they are only in memory."""

    def __init__(self, directory: SealedDirectory | None = None) -> None:
        self._directory = directory
        self._used: dict[str, _Used | None] = {}
        if directory is None:
            return
        for name in directory.names():
            try:
                self._used[name] = _read(directory.read(name)[1])
            except (SealedRecordError, ValueError, KeyError, TypeError):
                _log.error("the uses of secret %s cannot be read, it counts as used up: reset them", name)
                self._used[name] = None

    def used(self, secret: str) -> int:
        """Return how many uses the leases of a secret have permitted so far."""
        found = self._used.get(secret)
        return 0 if found is None else found.total

    def left(self, secret: str, sandbox: str, limits: UseLimits) -> int | None:
        """Return how many more uses a sandbox may have of a secret; None is any number."""
        if not limits.limited:
            return None
        used = self._used.get(secret, _Used())
        if used is None:
            return 0
        left = [] if limits.uses is None else [limits.uses - used.total]
        left += [] if limits.sandbox_uses is None else [limits.sandbox_uses - used.sandboxes[sandbox]]
        return max(0, min(left))

    def take(self, secret: str, sandbox: str, limits: UseLimits) -> int | None:
        """Count the uses of a new lease, durably, and return their number: at least one; None is any number.

        Raises:
            ValueError: none is left.
            OSError: they could not be written; nothing was taken.
        """
        left = self.left(secret, sandbox, limits)
        if left is None:
            return None
        if left < 1:
            raise ValueError("no use is left")
        share = max(1, min(left // _PART, MOST_SHARE))
        former = self._used.get(secret) or _Used()
        sandboxes = Counter(former.sandboxes)
        if limits.sandbox_uses is not None:
            sandboxes[sandbox] += share
        self._write(secret, _Used(former.total + share, sandboxes))
        return share

    def reset(self, secret: str) -> None:
        """Begin to count at zero. Raises OSError."""
        if self._used.pop(secret, self) is not self and self._directory is not None:
            self._directory.remove(secret)

    def forget(self, sandbox: str) -> None:
        """Remove the counts of a sandbox that does not exist any more; totals stay. Raises OSError."""
        for secret, used in list(self._used.items()):
            if used is not None and sandbox in used.sandboxes:
                left = Counter({one: number for one, number in used.sandboxes.items() if one != sandbox})
                self._write(secret, _Used(used.total, left))

    def _write(self, secret: str, used: _Used) -> None:
        if self._directory is not None:
            body = {"total": used.total, "sandboxes": dict(used.sandboxes)}
            self._directory.write(secret, b"{}", json.dumps(body).encode())
        self._used[secret] = used


def _read(body: bytes) -> _Used:
    document: dict[str, Any] = json.loads(body)
    return _Used(
        int(document["total"]), Counter({str(key): int(value) for key, value in document["sandboxes"].items()})
    )
