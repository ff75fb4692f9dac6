"""How often each limited secret was used, and in how many bytes: counts on disk, and what a lease takes of them.

Secrets are those of the sealed store, and references to backends.

- A lease of a limited secret permits a number of uses, or of bytes, or both. They are counted here, durably, before the
  value leaves vaultd, and never given back. So the sum of what all leases permitted never exceeds the limits, also not
  over restarts and kills of vaultd or of a worker.
- A lease takes a thousandth of what is left, at least what its request needs, and at most `MOST_USES` or `MOST_BYTES`.
  So limits below 2000 uses are exact. Above, a lease that ends early wastes at most a thousandth of what was left.
- A secret that is limited in both gets a lease for one request. So no lease holds back one of them while the other is
  used up.
- A secret whose counts cannot be read counts as used up until `reset`.
- At most `MOST_COUNTED` secrets are counted.

All methods block.
"""

import errno
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from policy.references import is_reference
from vault.conditions import Amount, UseLimits
from vault.stores.directory import SealedDirectory, SealedRecordError
from wire.api.vaultd import Used

MOST_USES = 256
MOST_BYTES = 256 * 1024
MOST_COUNTED = 8192
_PART = 1000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Count:
    """A number in all, and by sandbox."""

    total: int = 0
    sandboxes: Counter[str] = field(default_factory=Counter)

    def left(self, sandbox: str, most: int | None, sandbox_most: int | None) -> int | None:
        left = [] if most is None else [most - self.total]
        left += [] if sandbox_most is None else [sandbox_most - self.sandboxes[sandbox]]
        return max(0, min(left)) if left else None

    def more(self, sandbox: str, number: int | None, *, of_sandbox: bool) -> "_Count":
        if number is None:
            return self
        return _Count(self.total + number, self.sandboxes + Counter({sandbox: number} if of_sandbox else {}))

    def without(self, sandbox: str) -> "_Count":
        return _Count(self.total, Counter({one: number for one, number in self.sandboxes.items() if one != sandbox}))

    def to_json(self) -> dict[str, Any]:
        return {"total": self.total, "sandboxes": dict(self.sandboxes)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "_Count":
        sandboxes = Counter({str(key): int(value) for key, value in document["sandboxes"].items()})
        return cls(int(document["total"]), sandboxes)


@dataclass(frozen=True, slots=True)
class _Counts:
    """What was counted of one secret."""

    uses: _Count = field(default_factory=_Count)
    sent: _Count = field(default_factory=_Count)


class Budgets:
    """The counts of all limited secrets. Without a directory they are only in memory."""

    def __init__(self, directory: SealedDirectory | None = None) -> None:
        self._directory = directory
        self._used: dict[str, _Counts | None] = {}
        if directory is None:
            return
        for name in directory.names():
            try:
                secret, used = _read(name, directory.read(name)[1])
                self._used[secret] = used
            except (SealedRecordError, ValueError, KeyError, TypeError, AttributeError):
                _log.error("the uses of secret %s cannot be read, it counts as used up: reset them", name)
                self._used[name] = None

    def used(self, secret: str) -> Used:
        """Return what the leases of a secret have permitted so far."""
        found = self._used.get(secret) or _Counts()
        return Used(found.uses.total, found.sent.total)

    def counted(self) -> list[str]:
        """Return the names of the secrets that have counts."""
        return sorted(self._used)

    def left(self, secret: str, sandbox: str, limits: UseLimits) -> Amount:
        """Return how many more uses and bytes a sandbox may have of a secret."""
        if not limits.limited:
            return Amount()
        used = self._used.get(self._counts(secret), _Counts())
        if used is None:
            return Amount(0 if limits.of_uses else None, 0 if limits.of_bytes else None)
        return Amount(
            used.uses.left(sandbox, limits.uses, limits.sandbox_uses),
            used.sent.left(sandbox, limits.sent, limits.sandbox_sent),
        )

    def refusal(self, secret: str, sandbox: str, limits: UseLimits, size: int | None) -> str | None:
        """Return why a request of `size` bytes (None: unknown) may not have a secret, None if it may."""
        left = self.left(secret, sandbox, limits)
        if left.uses == 0:
            return "the secret was used as often as its limits allow"
        if left.sent is None:
            return None
        if size is None:
            return "the secret is limited in bytes, and the length of this request is not known: send a Content-Length"
        if size > left.sent:
            return "the secret was sent with as many bytes as its limits allow"
        return None

    def take(self, secret: str, sandbox: str, limits: UseLimits, size: int | None) -> Amount:
        """Count a new lease for a request of `size` bytes, durably, and return what it permits.

        Raises:
            ValueError: too little is left.
            OSError: it could not be written; nothing was taken.
        """
        if (reason := self.refusal(secret, sandbox, limits, size)) is not None:
            raise ValueError(reason)
        left = self.left(secret, sandbox, limits)
        if not left.limited:
            return left
        both = left.uses is not None and left.sent is not None
        uses = None if left.uses is None else _share(1, left.uses, MOST_USES, exact=both)
        sent = None if left.sent is None else _share(size or 0, left.sent, MOST_BYTES, exact=both)
        former = self._used.get(secret) or _Counts()
        counted = _Counts(
            former.uses.more(sandbox, uses, of_sandbox=limits.sandbox_uses is not None),
            former.sent.more(sandbox, sent, of_sandbox=limits.sandbox_sent is not None),
        )
        self._write(secret, counted)
        return Amount(uses, sent)

    def reset(self, secret: str) -> None:
        """Begin to count at zero. Raises OSError."""
        key = self._counts(secret)
        if self._used.pop(key, self) is not self and self._directory is not None:
            self._directory.remove(_record(key))

    def forget(self, sandbox: str) -> None:
        """Remove the counts of a sandbox that does not exist any more; totals stay. Raises OSError."""
        for secret, used in list(self._used.items()):
            if used is not None and (sandbox in used.uses.sandboxes or sandbox in used.sent.sandboxes):
                self._write(secret, _Counts(used.uses.without(sandbox), used.sent.without(sandbox)))

    def _counts(self, secret: str) -> str:
        """Return the key of a secret's counts: its name, or that of its record if that is damaged."""
        record = _record(secret)
        return record if record != secret and record in self._used else secret

    def _write(self, secret: str, used: _Counts) -> None:
        if secret not in self._used and len(self._used) >= MOST_COUNTED:
            raise OSError(errno.ENOSPC, f"the uses of {MOST_COUNTED} secrets are counted, the limit: reset some")
        if self._directory is not None:
            body = {"secret": secret, **used.uses.to_json(), "sent": used.sent.to_json()}
            self._directory.write(_record(secret), b"{}", json.dumps(body).encode())
        self._used[secret] = used


def _share(needed: int, left: int, most: int, *, exact: bool) -> int:
    """Return what a lease takes of what is left, which is at least `needed`."""
    return needed if exact else max(needed, min(left // _PART, most))


def _record(secret: str) -> str:
    """Return the name of a secret's record. That of a reference is longer than the name of any stored secret."""
    return f"reference-{hashlib.sha512(secret.encode()).hexdigest()}" if is_reference(secret) else secret


def _read(name: str, body: bytes) -> tuple[str, _Counts]:
    document: dict[str, Any] = json.loads(body)
    secret = str(document.get("secret", name))
    if _record(secret) != name:
        raise ValueError("the counts of another secret")
    sent = document.get("sent", _Count().to_json())  # absent in records of older versions
    return secret, _Counts(_Count.from_json(document), _Count.from_json(sent))
