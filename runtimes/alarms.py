"""Sends alarms to the audit log.

- No caller waits for a record. A record that auditd does not accept is sent again later, in the order of the events.
- The queue is bounded. The next alarm's record has the number of alarms that did not fit.
- Each record has the time at which the difference was seen; the record's own time is that of its writing.
"""

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime

import wire
from runtimes.daemons import Daemons
from wire.api.auditd import Entry, Record

_MOST_PENDING = 256
_RECORD_SECONDS = 5.0
_RETRY_SECONDS = 1.0
_FLUSH_SECONDS = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Breach:
    """One difference from the required state. `rule` is its kind, for the record."""

    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Alarm:
    finding: Breach
    sandbox: str | None
    seen: str

    def entry(self, lost: int) -> Entry:
        """Return the record of the alarm; `lost` is the number of alarms that did not fit into the queue."""
        fields: dict[str, str | int] = {
            "rule": self.finding.rule,
            "reason": self.finding.reason,
            "detail": f"seen at {self.seen}",
        }
        fields |= ({"sandbox": self.sandbox} if self.sandbox else {}) | ({"count": lost} if lost else {})
        return Entry("alarm", "deny", fields)


class Alarms:
    """Queues alarms and sends them to auditd."""

    def __init__(self, daemons: Daemons) -> None:
        self._daemons = daemons
        self._pending: deque[_Alarm] = deque()
        self._lost = 0
        self._wake, self._taken = asyncio.Event(), asyncio.Event()
        self._taken.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to send."""
        self._task = asyncio.create_task(self._hand_over(), name="alarms")

    async def stop(self) -> None:
        """Give auditd a moment to accept the rest, then write to hostd's log what it did not accept."""
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_SECONDS):
                    await self._taken.wait()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for alarm in self._pending:
            _log.error("not in the audit log: %s: %s", alarm.finding.rule, alarm.finding.reason)

    def report(self, finding: Breach, sandbox: str | None = None) -> None:
        """Report a finding. Never waits, never fails."""
        _log.error("alarm: %s: %s: %s", sandbox or "host", finding.rule, finding.reason)
        if len(self._pending) >= _MOST_PENDING:
            self._lost += 1
            return
        self._pending.append(_Alarm(finding, sandbox, datetime.now(UTC).isoformat(timespec="milliseconds")))
        self._taken.clear()
        self._wake.set()

    async def _hand_over(self) -> None:
        while True:
            if not self._pending:
                self._wake.clear()
                self._taken.set()
                await self._wake.wait()
            lost = self._lost
            try:
                record = Record(self._pending[0].entry(lost))
                await self._daemons.client("auditd").ask(record, timeout=_RECORD_SECONDS)
            except (OSError, wire.FrameError, wire.RemoteError) as error:
                _log.warning("auditd did not take an alarm: %s", error or type(error).__name__)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self._pending.popleft()
            self._lost -= lost
