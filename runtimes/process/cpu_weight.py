"""Gives a sandbox that computes without a pause a lower CPU weight than one that pauses.

- Twice a second each sandbox's processor time, with that of its worker, is averaged over about a second. If the
  average reaches `HEAVY` processors, container and worker get `SHARE` of the default weight, until it is below
  `LIGHT`.
- A weight has an effect only under contention: a sandbox that competes with no other gets all that its limits allow.
- If a value cannot be read or written, the sandbox stays as it is until the next round.

The kernel's scheduler is fair only among the tasks that can run now. It does not consider that one of them was busy
all the time before.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from runtimes.process.cgroups import Processor
from runtimes.process.liveness import stat_fields

SECONDS: Final = 0.5
HEAVY: Final = 0.4
LIGHT: Final = 0.2
SHARE: Final = 1 / 16
_FORGETS: Final = 1.0  # the share of the average that is forgotten each second

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Computing:
    """The processes that compute for one sandbox: its container, and its worker by its process and its group."""

    container: str
    pid: int
    group: str


@dataclass(slots=True)
class _Account:
    """The measurements of one sandbox. `at` and `used` are of the last round, in seconds."""

    at: float
    used: float
    average: float = 0.0
    heavy: bool = False
    applied: bool | None = None


class CpuWeight:
    """Sets the CPU weights of the sandboxes that `computing` returns, from `start` to `stop`."""

    def __init__(self, processor: Processor, computing: Callable[[], Sequence[Computing]]) -> None:
        self._processor = processor
        self._computing = computing
        self._accounts: dict[Computing, _Account] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the periodic task."""
        self._task = asyncio.create_task(self._run(), name="cpu weight")

    async def stop(self) -> None:
        """Stop the periodic task; weights stay as they are."""
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
        """Account for the time since the last round, and set the resulting weights. Blocks for milliseconds."""
        self._accounts = {item: self._accounts[item] for item in computing if item in self._accounts}
        for item in computing:
            try:
                self._weigh(item, now)
            except (OSError, ValueError, KeyError, IndexError):  # the sandbox is ending, or not complete yet
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
        OSError: there is no such process.
    """
    fields = stat_fields(f"/proc/{pid}/stat")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
