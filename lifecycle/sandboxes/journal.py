"""The control plane's records in the audit log."""

import logging
from typing import Any

import wire
from lifecycle.api.errors import unavailable
from lifecycle.daemon_clients import Auditd, Unreachable

_log = logging.getLogger(__name__)


class Journal:
    """A writer of audit records. `record` is for changes that need a record, `note` for events that cannot be
    prevented.
    """

    def __init__(self, auditd: Auditd) -> None:
        self._auditd = auditd

    async def record(self, kind: str, decision: str, **fields: Any) -> None:
        """Record a change before it is made.

        Raises:
            ApiError: 503. The caller must not make the change.
        """
        try:
            await self._auditd.record(kind, decision, **fields)
        except (Unreachable, wire.RemoteError) as error:
            _log.warning("audit refused %s: %s", kind, error)
            raise unavailable("AUDIT::UNAVAILABLE", "The audit log does not accept records.") from None

    async def note(self, kind: str, decision: str, **fields: Any) -> None:
        """Record an event that happens in any case."""
        try:
            await self._auditd.record(kind, decision, **fields)
        except (Unreachable, wire.RemoteError) as error:
            _log.warning("audit did not take %s: %s", kind, error)
