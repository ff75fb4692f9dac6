"""Freezes: the operator's stop of secrets, until the operator ends it.

- A freeze has an extent: every secret of every sandbox, one secret, one sandbox, or one secret of one sandbox. A
  release within the extent of any freeze is refused. Grants, bindings and values stay as they are.
- Freezes are one sealed record of the vault, so they outlive vaultd and the host. An older copy of the record, or its
  absence, is detected as for each record (`vault.stores.directory`). Then everything is frozen.
- A freeze is in force before it is written, its end only after that is written.

Methods that write block.
"""

import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from vault.grants import Refusal, inline_name
from vault.stores.directory import SealedDirectory, SealedRecordError
from wire import Code
from wire.api.vaultd import MOST_FREEZES, Frozen
from wire.ids import check_sandbox

_RECORD: Final = "freezes"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Extent:
    """What a freeze or a revocation is about; None means every sandbox, or every secret."""

    sandbox: str | None = None
    secret: str | None = None

    def __post_init__(self) -> None:
        if self.sandbox is not None:
            check_sandbox(self.sandbox)
        if self.secret is not None:
            inline_name(self.secret)

    def covers(self, sandbox: str | None, secret: str) -> bool:
        """Whether this secret of this sandbox is meant; `sandbox` is None for a use by the host itself."""
        return self.sandbox in (None, sandbox) and self.secret in (None, secret)

    def __str__(self) -> str:
        secret = "every secret" if self.secret is None else f"the secret {self.secret}"
        return secret if self.sandbox is None else f"{secret} of {self.sandbox}"


ALL: Final = Extent()
_UNKNOWN: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""The beginning of the freeze that stands for a damaged record."""


class TooManyFreezesError(Exception):
    """There are `MOST_FREEZES` freezes already."""


class Freezes:
    """The freezes in force. Without a directory they are only in memory."""

    def __init__(self, directory: SealedDirectory | None = None) -> None:
        self._directory = directory
        self._since: dict[Extent, datetime] = {}
        if directory is None:
            return
        try:
            self._since = _read(directory)
        except (SealedRecordError, ValueError, KeyError, TypeError) as error:
            self._since = {ALL: _UNKNOWN}
            _log.error("the record of freezes is damaged, so every secret is frozen: %s", type(error).__name__)

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._since

    @property
    def forms(self) -> tuple[Frozen, ...]:
        """The freezes, the oldest first."""
        found = sorted(self._since.items(), key=lambda item: item[1])
        return tuple(Frozen(extent.sandbox, extent.secret, since.isoformat()) for extent, since in found)

    def refusal(self, sandbox: str | None, secret: str) -> Refusal | None:
        """Return why a secret is not released to a sandbox (None: to the host) now; None if it is not frozen."""
        if any(extent.covers(sandbox, secret) for extent in self._since):
            return Refusal(Code.FROZEN, f"the operator has frozen the secret {secret}")
        return None

    def begin(self, extent: Extent, now: datetime) -> None:
        """Put a freeze in force. One that exists stays as it is. It is not durable before `save`.

        Raises:
            TooManyFreezesError: it did not begin.
        """
        if extent not in self._since and extent != ALL and len(self._since) >= MOST_FREEZES:
            raise TooManyFreezesError(f"there are {MOST_FREEZES} freezes, the limit: freeze everything")
        self._since.setdefault(extent, now)

    def save(self) -> None:
        """Write the freezes in force, durably.

        Raises:
            OSError: those that are not written end with this process.
        """
        self._write(self._since)

    def remove(self, extent: Extent) -> None:
        """End a freeze, durably.

        Raises:
            OSError: it is still in force.
        """
        left = {each: since for each, since in self._since.items() if each != extent}
        self._write(left)
        self._since = left

    def forget(self, sandbox: str) -> None:
        """Remove the freezes of a sandbox that does not exist any more. Raises OSError."""
        for extent in [extent for extent in self._since if extent.sandbox == sandbox]:
            self.remove(extent)

    def _write(self, since: dict[Extent, datetime]) -> None:
        if self._directory is None:
            return
        document = [
            {"sandbox": extent.sandbox, "secret": extent.secret, "since": moment.isoformat()}
            for extent, moment in since.items()
        ]
        self._directory.write(_RECORD, json.dumps({"count": len(document)}).encode(), json.dumps(document).encode())


def _read(directory: SealedDirectory) -> dict[Extent, datetime]:
    try:
        _, body = directory.read(_RECORD)
    except FileNotFoundError:
        return {}
    document: list[dict[str, Any]] = json.loads(body)
    return {Extent(one["sandbox"], one["secret"]): datetime.fromisoformat(one["since"]) for one in document}
