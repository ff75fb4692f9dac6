"""The control plane's own records in the audit log."""

import logging
from typing import Any

import wire
from lifecycle.api.errors import unavailable
from lifecycle.daemon_clients import Auditd, Unreachable

_log = logging.getLogger(__name__)


class Journal:
    """Writes records: `record` for changes that must not happen without one, `note` for what happens in any case."""

    def __init__(self, auditd: Auditd) -> None:
        self._auditd = auditd

    async def record(self, kind: str, decision: str, **fields: Any) -> None:
        """Have a change recorded before it is made.

        Raises:
            ApiError: 503, and it must not be made.
        """
        try:
            await self._auditd.record(kind, decision, **fields)
        except (Unreachable, wire.RemoteError) as error:
            _log.warning("audit refused %s: %s", kind, error)
            raise unavailable("AUDIT::UNAVAILABLE", "The audit log does not accept records.") from None

    async def note(self, kind: str, decision: str, **fields: Any) -> None:
        """Have something recorded that happens in any case."""
        try:
            await self._auditd.record(kind, decision, **fields)
        except (Unreachable, wire.RemoteError) as error:
            _log.warning("audit did not take %s: %s", kind, error)
