"""Which parts of each sandbox's policy are out of force: kept for the API, recorded in the audit log.

A part is recorded when it goes out of force and when it is in force again. Nothing of it is stored: after a restart of
the server what is out of force is recorded again.
"""

import logging

from lifecycle.egress.policies import Compiled
from lifecycle.sandboxes.journal import Journal
from lifecycle.sandboxes.registry import Sandbox
from policy.compile import Dropped, Part

MAX_RECORDS = 64
"""For the parts of one sandbox at a time; the last record counts those that have none."""
MAX_REASON = 1000

_log = logging.getLogger(__name__)


class Shortfall:
    """What the audit log names as out of force, by sandbox."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._told: dict[str, tuple[Dropped, ...]] = {}

    def forget(self, sandbox: str) -> None:
        """Drop what is kept for a sandbox that is gone."""
        self._told.pop(sandbox, None)

    def is_told(self, sandbox: str, dropped: tuple[Dropped, ...]) -> bool:
        """Whether the log names just these parts."""
        return self._told.get(sandbox, ()) == dropped

    def reason(self, sandbox: str) -> str | None:
        """Say which parts of a sandbox's policy are not in force, and why; None if all are."""
        dropped = self._told.get(sandbox, ())
        return f"not in force: {'; '.join(item.reason for item in dropped)}"[:MAX_REASON] if dropped else None

    async def tell(self, row: Sandbox, compiled: Compiled) -> None:
        """Have it recorded which parts of a row are out of force now, and which are in force again.

        Raises:
            ApiError: the audit log does not take it.
        """
        if self.is_told(row.id, compiled.dropped):
            return
        before, now = self._told.get(row.id, ()), compiled.dropped
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
        self._told[row.id] = now

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
