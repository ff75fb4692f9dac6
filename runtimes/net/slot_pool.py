"""Slots made ahead of need: a launch takes one that stands, and makes one itself only where none does.

- A slot has no state of its sandbox, so one made before is as good as one made now. Each is given away once.
- The watch does not cover a slot before its use. So the judge compares it when it is made and when it is taken. A slot
  that has changed is reported and destroyed, and never used. Without a judge no slot is made ahead.
- New slots are made when no slot was taken for a moment, so that this work does not slow down a launch.
- Slots are numbered, and numbers used in turn: one, and the uid that belongs to it, rests before its next use.
- Nothing of it is written down. What a killed hostd had ready is swept by the next one like anything that it left.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import wire
from runtimes.net import netns, slots
from runtimes.net.plan import PLAN
from runtimes.process.finish import finished, taken

AHEAD = 2
"""How many slots stand ready."""

_CALM_SECONDS = 1.0
_BACKOFF_SECONDS = 5.0
_ATTEMPTS = 16

type Judge = Callable[[slots.Slot, int | None], Awaitable[int | None]]
"""Takes a slot and the generation of its rules when they were last read, None if never; returns the generation now if
the slot is as it was made, None if it is not, and tells why not."""

_log = logging.getLogger(__name__)


class SlotPool:
    """The slots of one host that are no sandbox's, and the numbers that are free."""

    def __init__(self, directory: Path, numbers: int) -> None:
        self._directory = directory
        self._free = deque(range(numbers))
        self._ready: deque[tuple[slots.Slot, int]] = deque()
        self._judge: Judge | None = None
        self._wanted = asyncio.Event()
        self._taken_at = 0.0
        self._refilling: asyncio.Task[None] | None = None

    def reserve(self, index: int) -> None:
        """Number `index` is an adopted sandbox's."""
        self._free.remove(index)

    def release(self, index: int) -> None:
        """Number `index` is free again: nothing of its slot is left."""
        self._free.append(index)

    def prepare(self, judge: Judge) -> None:
        """Make slots ahead of need from now on."""
        self._judge = judge
        self._wanted.set()
        self._refilling = asyncio.create_task(self._refill(), name="slots")

    async def take(self) -> slots.Slot:
        """Return a slot that is the caller's; its number comes back by `release`. Not to be cancelled.

        Raises:
            wire.RequestError: no number is free.
            OSError, netns.NftError: none stood ready, and one could not be made.
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
        """Make no more, and unmake those that stand ready."""
        if self._refilling is not None:
            self._refilling.cancel()
            await asyncio.gather(self._refilling, return_exceptions=True)
        while self._ready:
            await self._discard(self._ready.popleft()[0])

    async def _make(self) -> slots.Slot:
        """Make a slot under the next free number; one whose name is taken by a stranger is passed over."""
        for _ in range(min(len(self._free), _ATTEMPTS)):
            index = self._free.popleft()
            try:
                return await asyncio.to_thread(slots.make, self._directory, index, PLAN)
            except FileExistsError:
                _log.error("something stands where slot %d would be made", index)
                self._free.append(index)
            except BaseException:
                self._free.append(index)
                raise
        raise wire.RequestError(wire.Code.FULL, "no slot is free")

    async def _judged(self, slot: slots.Slot, generation: int | None) -> int | None:
        """Return what the judge says; without one, or if it fails, the slot is not as it was made."""
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
        """Make one more slot; whether it stands ready now."""
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
