"""Counts of the packets that the kernel has dropped in each sandbox's slot, and their records in the audit log.

- A record holds the number since the sandbox was launched. It is written when the number has grown. So each round of
  the watch writes at most one for each counter, at any rate of a flood.
- If auditd does not accept a record, a later round writes one with the number at that time. No caller waits. Only the
  drops of a sandbox's last seconds can be missing from the log.
"""

import logging
from collections.abc import Container, Mapping

import wire
from runtimes.daemons import Daemons
from runtimes.net.nft import DROPS
from wire.api.auditd import Entry, Records

_RECORD_SECONDS = 1.0  # the watch's round waits for it
_MOST = 64  # records in one request

_log = logging.getLogger(__name__)


class Drops:
    """The counters of all slots, as last read and as last recorded."""

    def __init__(self, daemons: Daemons) -> None:
        self._daemons = daemons
        self._seen: dict[tuple[str, str], int] = {}
        self._reported: dict[tuple[str, str], int] = {}

    def seen(self, sandbox: str, counters: Mapping[str, int]) -> None:
        """Store the counters of a sandbox's slot."""
        for name in DROPS:
            if count := counters.get(name, 0):
                self._seen[sandbox, name] = count

    def forget(self, remaining: Container[str]) -> None:
        """Remove the counters of sandboxes that were removed."""
        for known in (self._seen, self._reported):
            for key in [key for key in known if key[0] not in remaining]:
                del known[key]

    async def report(self) -> None:
        """Send records of the counters that have grown to auditd. Never fails."""
        grown = [item for item in self._seen.items() if self._reported.get(item[0]) != item[1]][:_MOST]
        if not grown:
            return
        records = tuple(_record(sandbox, name, count) for (sandbox, name), count in grown)
        try:
            await self._daemons.client("auditd").ask(Records(records), timeout=_RECORD_SECONDS)
        except (OSError, wire.FrameError, wire.RemoteError) as error:
            _log.warning("auditd did not take what was dropped: %s", error or type(error).__name__)
            return
        self._reported.update(grown)


def _record(sandbox: str, name: str, count: int) -> Entry:
    rule, what = DROPS[name]
    reason = f"{what}, dropped by the kernel since the sandbox was launched"
    return Entry("drop", "deny", {"sandbox": sandbox, "rule": rule, "reason": reason, "count": count})
