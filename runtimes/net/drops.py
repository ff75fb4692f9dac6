"""What the kernel has dropped of each sandbox in its slot, on its way into the audit log.

- A record is the number since the sandbox was launched. It is written when the number has grown, so at most one for
  each counter in a round of the watch, however hard a sandbox floods.
- If auditd does not accept a record, a later round writes one with the number at that time. No caller waits. Nothing is
  lost but what a sandbox had dropped in its last seconds.
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
        self._told: dict[tuple[str, str], int] = {}

    def seen(self, sandbox: str, counters: Mapping[str, int]) -> None:
        """Take note of the counters of a sandbox's slot."""
        for name in DROPS:
            if count := counters.get(name, 0):
                self._seen[sandbox, name] = count

    def forget(self, remaining: Container[str]) -> None:
        """Drop what is known of sandboxes that are gone."""
        for known in (self._seen, self._told):
            for key in [key for key in known if key[0] not in remaining]:
                del known[key]

    async def tell(self) -> None:
        """Hand what has grown to auditd. Never fails."""
        grown = [item for item in self._seen.items() if self._told.get(item[0]) != item[1]][:_MOST]
        if not grown:
            return
        records = tuple(_record(sandbox, name, count) for (sandbox, name), count in grown)
        try:
            await self._daemons.client("auditd").ask(Records(records), timeout=_RECORD_SECONDS)
        except (OSError, wire.FrameError, wire.RemoteError) as error:
            _log.warning("auditd did not take what was dropped: %s", error or type(error).__name__)
            return
        self._told.update(grown)


def _record(sandbox: str, name: str, count: int) -> Entry:
    rule, what = DROPS[name]
    reason = f"{what}, dropped by the kernel since the sandbox was launched"
    return Entry("drop", "deny", {"sandbox": sandbox, "rule": rule, "reason": reason, "count": count})
