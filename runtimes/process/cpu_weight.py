"""Gives a sandbox that computes without a pause a lower CPU weight than one that pauses.

- Twice a second each sandbox's processor time, its worker's included, is averaged over about a second. From `HEAVY`
  processors on container and worker have `SHARE` of the usual weight, until the average is below `LIGHT`.
- A weight has an effect only under contention: a sandbox that competes with no other gets all that its limits allow.
- What cannot be read or written leaves the sandbox as it is, until the next look.

The kernel is fair among those that want to run now; that one of them wanted to all the time does not count there.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runtimes.process.cgroups import Processor

SECONDS: Final = 0.5
HEAVY: Final = 0.4
LIGHT: Final = 0.2
SHARE: Final = 1 / 16
_FORGETS: Final = 1.0  # of the average, each second

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Computing:
    """What computes for one sandbox: its container, and its worker by its process and its group."""

    container: str
    pid: int
    group: str


@dataclass(slots=True)
class _Account:
    """What is known of one sandbox. `at` and `used` are of the last look, in seconds."""

    at: float
    used: float
    average: float = 0.0
    heavy: bool = False
    applied: bool | None = None


class CpuWeight:
    """Weighs the sandboxes that `computing` names, from `start` to `stop`."""

    def __init__(self, processor: Processor, computing: Callable[[], Sequence[Computing]]) -> None:
        self._processor = processor
        self._computing = computing
        self._accounts: dict[Computing, _Account] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name="cpu weight")

    async def stop(self) -> None:
        """End; weights stay as they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await asyncio.to_thread(self.look, tuple(self._computing()), loop.time())
            except Exception:  # noqa: BLE001 - whatever failed, the next round comes
                _log.exception("sandboxes could not be weighed")
            await asyncio.sleep(SECONDS)

    def look(self, computing: Sequence[Computing], now: float) -> None:
        """Account for the time since the last look, and set the weights that follow. Blocks for milliseconds."""
        self._accounts = {item: self._accounts[item] for item in computing if item in self._accounts}
        for item in computing:
            try:
                self._weigh(item, now)
            except (OSError, ValueError, KeyError, IndexError):  # it is ending, or only beginning
                continue

    def _weigh(self, item: Computing, now: float) -> None:
        used = self._processor.seconds(item.container) + process_seconds(item.pid)
        account = self._accounts.setdefault(item, _Account(now, used))
        if now > account.at:
            busy = (used - account.used) / (now - account.at)
            account.average += (busy - account.average) * min(1.0, _FORGETS * (now - account.at))
            account.at, account.used = now, used
        account.heavy = account.average >= (LIGHT if account.heavy else HEAVY)
        if account.applied is not account.heavy:
            self._processor.weigh(item.container, item.group, share=SHARE if account.heavy else 1.0)
            account.applied = account.heavy


def process_seconds(pid: int) -> float:
    """Return the processor time that a process has used.

    Raises:
        OSError: there is none.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
