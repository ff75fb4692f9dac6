"""The limits of references in force, on disk (`vault.limits`).

- Limits are one sealed record of the vault, as freezes are. If it is damaged, no reference is released: it counts as a
  limit of every reference that ended long ago.
- A change is in force after it is written.

Methods that write block.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Final

from vault.limits import EVERY, ReferenceLimit
from vault.stores.directory import SealedDirectory, SealedRecordError
from wire import codec
from wire.api.vaultd import MOST_LIMITS, LimitForm

_RECORD: Final = "limits"
_LATER: Final = {"sent": None, "sandbox_sent": None}
_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)

_log = logging.getLogger(__name__)


class TooManyLimitsError(Exception):
    """There are `MOST_LIMITS` limits already."""


class ReferenceLimits:
    """The limits in force. Without a directory they are only in memory."""

    def __init__(self, directory: SealedDirectory | None = None) -> None:
        self._directory = directory
        self._limits: dict[str, ReferenceLimit] = {}
        if directory is None:
            return
        try:
            self._limits = {limit.pattern: limit for limit in _read(directory)}
        except (SealedRecordError, ValueError, KeyError, TypeError) as error:
            self._limits = {EVERY: ReferenceLimit(EVERY, expires=_LONG_AGO)}
            _log.error(
                "the record of limits is damaged, so no reference is released; set the limits again, "
                "and then: sallyport vault unlimit '*' (%s)",
                type(error).__name__,
            )

    def __contains__(self, pattern: str) -> bool:
        return pattern in self._limits

    @property
    def forms(self) -> tuple[LimitForm, ...]:
        """The limits, by pattern."""
        return tuple(limit.form for _, limit in sorted(self._limits.items()))

    def of(self, reference: str) -> tuple[ReferenceLimit, ...]:
        """Return the limits of a reference, by pattern."""
        return tuple(limit for _, limit in sorted(self._limits.items()) if limit.matches(reference))

    def put(self, limit: ReferenceLimit) -> None:
        """Put a limit in force, in place of the one with the same pattern.

        Raises:
            TooManyLimitsError, OSError: nothing is changed.
        """
        if limit.pattern not in self._limits and len(self._limits) >= MOST_LIMITS:
            raise TooManyLimitsError(f"there are {MOST_LIMITS} limits, the most: use a pattern")
        self._replace({**self._limits, limit.pattern: limit})

    def remove(self, pattern: str) -> None:
        """End a limit. Raises OSError: it is still in force."""
        self._replace({key: limit for key, limit in self._limits.items() if key != pattern})

    def _replace(self, limits: dict[str, ReferenceLimit]) -> None:
        if self._directory is not None:
            document = [codec.encode(limit.form) for limit in limits.values()]
            self._directory.write(_RECORD, json.dumps({"count": len(limits)}).encode(), json.dumps(document).encode())
        self._limits = limits


def _read(directory: SealedDirectory) -> list[ReferenceLimit]:
    try:
        _, body = directory.read(_RECORD)
    except FileNotFoundError:
        return []
    limits = json.loads(body)
    for limit in limits:  # a record of an older version lacks conditions that came later
        limit["conditions"] = {**_LATER, **limit["conditions"]}
    return [ReferenceLimit.of(codec.decode(LimitForm, limit)) for limit in limits]
