"""How often each limited secret was used: counts on disk, and what a lease takes of them.

Secrets are those of the sealed store, and references to backends.

- A lease of a limited secret permits a number of uses. They are counted here, durably, before the value leaves vaultd,
  and never given back. So the sum of what all leases permitted never exceeds the limits, also not over restarts and
  kills of vaultd or of a worker.
- A lease takes a thousandth of what is left, at least one use and at most `MOST_SHARE`. So limits below 2000 are exact.
  Above, a lease that ends early wastes at most a thousandth of what was left.
- A secret whose counts cannot be read counts as used up until `reset`.
- At most `MOST_COUNTED` secrets are counted.

All methods block.
"""

import errno
import hashlib
import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from policy.references import is_reference
from vault.conditions import UseLimits
from vault.stores.directory import SealedDirectory, SealedRecordError

MOST_SHARE = 256
MOST_COUNTED = 8192
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
                secret, used = _read(name, directory.read(name)[1])
                self._used[secret] = used
            except (SealedRecordError, ValueError, KeyError, TypeError):
                _log.error("the uses of secret %s cannot be read, it counts as used up: reset them", name)
                self._used[name] = None

    def used(self, secret: str) -> int:
        """Return how many uses the leases of a secret have permitted so far."""
        found = self._used.get(secret)
        return 0 if found is None else found.total

    def counted(self) -> list[str]:
        """Return the names of the secrets that have counts."""
        return sorted(self._used)

    def left(self, secret: str, sandbox: str, limits: UseLimits) -> int | None:
        """Return how many more uses a sandbox may have of a secret; None is any number."""
        if not limits.limited:
            return None
        used = self._used.get(self._counts(secret), _Used())
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
        key = self._counts(secret)
        if self._used.pop(key, self) is not self and self._directory is not None:
            self._directory.remove(_record(key))

    def forget(self, sandbox: str) -> None:
        """Remove the counts of a sandbox that does not exist any more; totals stay. Raises OSError."""
        for secret, used in list(self._used.items()):
            if used is not None and sandbox in used.sandboxes:
                left = Counter({one: number for one, number in used.sandboxes.items() if one != sandbox})
                self._write(secret, _Used(used.total, left))

    def _counts(self, secret: str) -> str:
        """Return the key of a secret's counts: its name, or that of its record if that is damaged."""
        record = _record(secret)
        return record if record != secret and record in self._used else secret

    def _write(self, secret: str, used: _Used) -> None:
        if secret not in self._used and len(self._used) >= MOST_COUNTED:
            raise OSError(errno.ENOSPC, f"the uses of {MOST_COUNTED} secrets are counted, the limit: reset some")
        if self._directory is not None:
            body = {"secret": secret, "total": used.total, "sandboxes": dict(used.sandboxes)}
            self._directory.write(_record(secret), b"{}", json.dumps(body).encode())
        self._used[secret] = used


def _record(secret: str) -> str:
    """Return the name of a secret's record. That of a reference is longer than the name of any stored secret."""
    return f"reference-{hashlib.sha512(secret.encode()).hexdigest()}" if is_reference(secret) else secret


def _read(name: str, body: bytes) -> tuple[str, _Used]:
    document: dict[str, Any] = json.loads(body)
    secret = str(document.get("secret", name))
    if _record(secret) != name:
        raise ValueError("the counts of another secret")
    sandboxes = Counter({str(key): int(value) for key, value in document["sandboxes"].items()})
    return secret, _Used(int(document["total"]), sandboxes)
