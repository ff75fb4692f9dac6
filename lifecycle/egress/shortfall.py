"""The parts of each sandbox's policy that are not in force: kept for the API and recorded in the audit log.

A part is recorded when it goes out of force and when it is in force again. This state is not stored. After a restart of
the server all parts that are out of force are recorded again.
"""

import logging

from lifecycle.egress.policies import Compiled
from lifecycle.sandboxes.journal import Journal
from lifecycle.sandboxes.registry import Sandbox
from policy.compile import Dropped, Part

MAX_RECORDS = 64
"""The parts of one sandbox in each record. The last record has the number of the others."""
MAX_REASON = 1000

_log = logging.getLogger(__name__)


class Shortfall:
    """For each sandbox, the parts that the audit log names as out of force."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._recorded: dict[str, tuple[Dropped, ...]] = {}

    def forget(self, sandbox: str) -> None:
        """Drop all data about a removed sandbox."""
        self._recorded.pop(sandbox, None)

    def is_recorded(self, sandbox: str, dropped: tuple[Dropped, ...]) -> bool:
        """Return whether the log names exactly these parts."""
        return self._recorded.get(sandbox, ()) == dropped

    def reason(self, sandbox: str) -> str | None:
        """Describe which parts of a sandbox's policy are not in force, and why; None if all are in force."""
        dropped = self._recorded.get(sandbox, ())
        return f"not in force: {'; '.join(item.reason for item in dropped)}"[:MAX_REASON] if dropped else None

    async def record(self, row: Sandbox, compiled: Compiled) -> None:
        """Record which parts of a row are now out of force, and which are in force again.

        Raises:
            ApiError: auditd did not accept the record.
        """
        if self.is_recorded(row.id, compiled.dropped):
            return
        before, now = self._recorded.get(row.id, ()), compiled.dropped
        out = {(item.part, item.name) for item in now}
        bound = {binding.name for binding in compiled.policy.bindings}
        lost = [item for item in now if item not in before]
        back = [
            item
            for item in before
            if (item.part, item.name) not in out and (item.part is not Part.BINDING or item.name in bound)
        ]
        await self._record("gateway.dropped", "deny", row, compiled, lost)
        await self._record("gateway.restored", "info", row, compiled, back)
        self._recorded[row.id] = now

    async def _record(self, kind: str, decision: str, row: Sandbox, compiled: Compiled, items: list[Dropped]) -> None:
        for number, item in enumerate(items[:MAX_RECORDS], start=1):
            reason = item.reason if decision == "deny" else None
            _log.warning("%s: sandbox %s: %s %r: %s", kind, row.id, item.part, item.name, reason or "in force again")
            await self._journal.record(
                kind,
                decision,
                sandbox=row.id,
                policy=compiled.digest,
                code=str(item.part),
                name=item.name if item.part is Part.POLICY else None,
                binding=item.name if item.part is Part.BINDING else None,
                reason=reason,
                count=(len(items) - number or None) if number == MAX_RECORDS else None,
            )
