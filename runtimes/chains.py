"""hostd's part of the audit log: it ends the chains of removed sandboxes, and keeps anchors.

- Only hostd ends chains. A round compares the open chains and the rings with the sandboxes that exist. If a round
  failed (auditd was down, a launch failed, hostd was killed), the next round does its work, so no state must be kept.
- A round also lets auditd write what is left in the rings of workers that have ended, and removes these rings. A chain
  is ended after the rings of its sandbox.
- Each round appends an anchor, auditd's statement of the log's state, to a file that only root can write. `sallyport
  audit verify` compares the log with it, so auditd cannot alter the anchored part unnoticed.
- The anchors take two files of at most `MAX_BYTES` each. The first anchor of a file has the heads of all open chains,
  the others those that changed.
- It raises an alarm if the log is not the one that was anchored before, or has become shorter.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import wire
from runtimes.alarms import Breach
from runtimes.daemons import Daemons
from runtimes.process.bounded_log import BoundedLog
from runtimes.process.finish import finished
from runtimes.rings import Rings
from wire import anchors
from wire.api.auditd import CONTROL_CHAIN, Anchor, AttachRing, CloseRing, CloseSandbox, Heads

MAX_BYTES: Final = 8 * 1024 * 1024
_ROUND_SECONDS = 10.0
_RETRY_SECONDS = 1.0
_CALL_SECONDS = 5.0

_log = logging.getLogger(__name__)


class Chains:
    """Ends chains and keeps anchors, from `start` to `stop`."""

    def __init__(
        self,
        daemons: Daemons,
        rings: Rings,
        path: Path,
        known: Callable[[], Container[str]],
        report: Callable[[Breach], None],
    ) -> None:
        """Keep anchors in `path`; `known` returns the sandboxes that exist, `report` raises an alarm."""
        self._daemons = daemons
        self._rings = rings
        self._kept = BoundedLog(path, MAX_BYTES)
        self._known = known
        self._report = report
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._last: Anchor | None = None
        self._done = True

    def start(self) -> None:
        """Start with a round."""
        self._wake.set()
        self._task = asyncio.create_task(self._rounds(), name="chains")

    def wake(self) -> None:
        """Request a round soon, because a sandbox was removed."""
        self._wake.set()

    async def stop(self) -> None:
        """Do a last round, if auditd answers."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CALL_SECONDS):
                await self._round()

    async def _rounds(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ROUND_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            if not await finished(self._round()):  # a round that is cancelled could write after the last one
                await asyncio.sleep(_RETRY_SECONDS)
                self._wake.set()

    async def _round(self) -> bool:
        """Keep an anchor and end the chains of removed sandboxes; return whether everything succeeded."""
        try:
            auditd = self._daemons.client("auditd")
            left = await self._write_rings(auditd)
            anchor = await auditd.ask(Heads(), timeout=_CALL_SECONDS)
            await self._keep(anchor)
            known = self._known()
            for chain in sorted(chain for chain in anchor.heads if chain not in known and chain not in left):
                if chain != CONTROL_CHAIN:
                    await auditd.ask(CloseSandbox(chain), timeout=_CALL_SECONDS)
        except (OSError, ValueError, wire.RemoteError) as error:
            if self._done:
                _log.warning("the audit log is not anchored, or a chain not ended: %s", error or type(error).__name__)
            self._done = False
            return False
        self._done = True
        return True

    async def _write_rings(self, auditd: wire.Client) -> set[str]:
        """Let auditd write the rings of workers that have ended, and remove them; return the sandboxes that keep one.

        A ring of a former hostd's worker is attached, and closed when that worker cannot write any more.
        """
        left: set[str] = set()
        for key in self._rings.left():
            if self._rings.complete(key):
                ring = self._rings.open(key)
                try:
                    await auditd.ask(AttachRing(*key), fds=ring.for_auditd, timeout=_CALL_SECONDS)
                finally:
                    ring.close()
                if not self._rings.over(key):
                    left.add(key[0])
                    continue
                await auditd.ask(CloseRing(*key), timeout=_CALL_SECONDS)
            self._rings.remove(key)
        return left

    async def _keep(self, anchor: Anchor) -> None:
        if self._last is None:
            self._last = await asyncio.to_thread(_newest, self._kept)
        last = self._last
        if last is not None and last.identity != anchor.identity:
            self._report(Breach("audit.replaced", "the audit log is not the one that was anchored before"))
            last = None
        elif last is not None and (anchor.file, anchor.offset) < (last.file, last.offset):
            self._report(Breach("audit.shortened", "the audit log is shorter than it was when it was anchored"))
            last = None
        if last is not None and last.log == anchor.log:
            return
        known: Mapping[str, object] = {} if last is None else last.heads
        changed = {chain: head for chain, head in anchor.heads.items() if known.get(chain) != head}
        await asyncio.to_thread(self._kept.append, anchors.line(replace(anchor, heads=changed)), anchors.line(anchor))
        self._last = anchor


def _newest(kept: BoundedLog) -> Anchor | None:
    """Return the newest anchor in the file; its heads are those that had changed."""
    for line in reversed(kept.read()):
        with contextlib.suppress(anchors.AnchorError):
            return anchors.read_line(line)
    return None
