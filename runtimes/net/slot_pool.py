"""A pool of slots made ahead of need. A launch takes a ready slot, and makes one only if none is ready.

- A slot has no state of its sandbox, so one made ahead equals one made now. Each is used once.
- The watch does not cover a slot before its use. So the judge compares it when it is made and when it is taken. A
  slot that has changed is reported and destroyed, and never used. Without a judge no slot is made ahead.
- New slots are made when no slot was taken for a moment, so that this work does not slow down a launch.
- Slots have numbers, which are used in turn. So a number, and the uid that belongs to it, stays unused for a time
  before its next use.
- Ready slots are not recorded. After a kill of hostd the next one removes them, like everything else that was left.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import wire
from runtimes.net import netns, slots
from runtimes.net.plan import NetworkPlan
from runtimes.process.finish import finished, taken

AHEAD = 2
"""The number of slots that stand ready."""

_CALM_SECONDS = 1.0
_BACKOFF_SECONDS = 5.0
_ATTEMPTS = 16

type Judge = Callable[[slots.Slot, int | None], Awaitable[int | None]]
"""Takes a slot and the generation of its rules when they were last read (None: never). If the slot is as it was made,
it returns the present generation. Otherwise it reports the difference and returns None."""

_log = logging.getLogger(__name__)


class SlotPool:
    """The slots of one host that no sandbox uses, and the free numbers."""

    def __init__(self, directory: Path, numbers: int, plan: NetworkPlan) -> None:
        self._directory = directory
        self._plan = plan
        self._free = deque(range(numbers))
        self._ready: deque[tuple[slots.Slot, int]] = deque()
        self._judge: Judge | None = None
        self._wanted = asyncio.Event()
        self._taken_at = 0.0
        self._refilling: asyncio.Task[None] | None = None

    def reserve(self, index: int) -> None:
        """Mark number `index` as used by an adopted sandbox."""
        self._free.remove(index)

    def release(self, index: int) -> None:
        """Mark number `index` as free: nothing of its slot is left."""
        self._free.append(index)

    def prepare(self, judge: Judge) -> None:
        """Make slots ahead of need from now on."""
        self._judge = judge
        self._wanted.set()
        self._refilling = asyncio.create_task(self._refill(), name="slots")

    async def take(self) -> slots.Slot:
        """Return a slot for the caller, which must return its number with `release`. Must not be cancelled.

        Raises:
            wire.RequestError: no number is free.
            OSError, netns.NftError: none was ready, and one could not be made.
        """
        self._taken_at = time.monotonic()
        while self._ready:
            slot, generation = self._ready.popleft()
            self._wanted.set()
            if await self._judged(slot, generation) is not None:
                return slot
            await self._discard(slot)
        return await self._make()

    async def close(self) -> None:
        """Stop making slots, and destroy those that are ready."""
        if self._refilling is not None:
            self._refilling.cancel()
            await asyncio.gather(self._refilling, return_exceptions=True)
        while self._ready:
            await self._discard(self._ready.popleft()[0])

    async def _make(self) -> slots.Slot:
        """Make a slot with the next free number; skip a number at whose path there is a foreign file."""
        for _ in range(min(len(self._free), _ATTEMPTS)):
            index = self._free.popleft()
            try:
                return await asyncio.to_thread(slots.make, self._directory, index, self._plan)
            except FileExistsError:
                _log.error("slot %d cannot be made: its path exists already", index)
                self._free.append(index)
            except BaseException:
                self._free.append(index)
                raise
        raise wire.RequestError(wire.Code.FULL, "no slot is free")

    async def _judged(self, slot: slots.Slot, generation: int | None) -> int | None:
        """Return the judge's result. Without a judge, or if it fails, the slot counts as changed."""
        try:
            return None if self._judge is None else await self._judge(slot, generation)
        except Exception:  # noqa: BLE001 - what could not be judged is not used
            _log.exception("a slot made ahead could not be judged")
            return None

    async def _discard(self, slot: slots.Slot) -> None:
        if left := await taken("slot", asyncio.to_thread(slots.destroy, slot)):
            _log.error("a slot made ahead left: %s", "; ".join(left))
        else:
            self.release(slot.index)

    async def _refill(self) -> None:
        while True:
            if len(self._ready) >= AHEAD:
                self._wanted.clear()
                await self._wanted.wait()
            elif (rest := self._taken_at + _CALM_SECONDS - time.monotonic()) > 0:
                await asyncio.sleep(rest)
            elif not await finished(self._added()):
                await asyncio.sleep(_BACKOFF_SECONDS)

    async def _added(self) -> bool:
        """Make one more slot; return whether it is ready."""
        try:
            slot = await self._make()
        except (OSError, netns.NftError, wire.RequestError) as error:
            _log.warning("no slot could be made ahead: %s", error)
            return False
        generation = await self._judged(slot, None)
        if generation is None:
            await self._discard(slot)
            return False
        self._ready.append((slot, generation))
        return True
