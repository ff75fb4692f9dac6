"""Group commit: the queue between many producers and one log.

- A request is answered after write(2) has put its record into the file. `durable` records, and all records if `always`
  is set, are answered after fdatasync.
- Written records are synced within 50 ms. If the disk is too slow for this, records are refused.
- Records that cannot be written are refused and counted. When the log can be written again, a `gap` record has the
  count.
- Producers are served in turn, with a limited number of records each. So a flood delays only its own producer.
- Records also come from rings (`audit.drain`). They count as accepted when they are in the ring, so they are written
  before the requests of a turn, and stay in the ring until they are written. While the log cannot be written, and if
  `always` is set, no ring is open: gateways then send requests.
- Each sandbox's chain has a budget of bytes, refilled evenly. Above it the requests of this sandbox wait, and no
  others. No request is dropped: `wire` limits how many can wait, and a decision that is not recorded in time is denied.

The queue runs on one event loop. Syncing has a thread; anchoring, retiring files and changing keys share another one.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from audit.batch import ChainEntry, gap_entry
from audit.drain import Drain, Key
from audit.pace import Pace
from audit.shared_ring import ROOM
from audit.sinks.file import Log, LogUnwritable, Mark, sync
from wire import Code, RequestError
from wire.api import auditd

SYNC_SECONDS: Final = 0.02  # from a write to the start of its sync; with the sync less than 50 ms
STALL_SECONDS: Final = 2.0
ANCHOR_SECONDS: Final = 0.25
CHECKPOINT_SECONDS: Final = 60.0
EPOCH_SECONDS: Final = 600.0
TURN: Final = 64  # records of one producer per turn
RING_TURN: Final = 256  # records of one ring per turn
LOOK_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 0.25
REFUSED: Final = "refused: the log could not be written"

_log = logging.getLogger("auditd")


@dataclass(slots=True)
class _Request:
    entries: list[ChainEntry]
    durable: bool
    done: asyncio.Future[list[int]]
    seqs: list[int] = field(default_factory=list)


class GroupCommit:
    """Takes requests from all producers' queues in turn, writes them in batches, syncs, anchors."""

    def __init__(self, log: Log, *, always: bool, pace: int = 0) -> None:
        """Write to `log`. `pace` is the limit of one sandbox in bytes per second, 0 for no limit."""
        self._log = log
        self._always = always
        self._pace = Pace(pace, time.monotonic)
        self._queues: dict[object, deque[_Request]] = {}
        self._scheduled = False
        self._unsynced_since: float | None = None
        self._waiting: list[_Request] = []
        self._refused: dict[str, int] = {}
        self._paced: asyncio.TimerHandle | None = None
        self._rings: dict[Key, Drain] = {}
        self._full: dict[Key, Drain] = {}
        """The rings that may hold records."""
        self._healthy = True
        self._closing = False
        self._dirty = asyncio.Event()
        self._urgent = asyncio.Event()
        self._synced: Mark | None = None
        self._to_anchor = asyncio.Event()
        self._sync_thread = ThreadPoolExecutor(1, "audit-sync")
        self._anchor_thread = ThreadPoolExecutor(1, "audit-anchor")
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start syncing, anchoring and checkpoints."""
        loop = asyncio.get_running_loop()
        self._to_anchor.set()  # there may be files to retire
        works = {"sync": self._sync, "anchor": self._anchor, "checkpoint": self._checkpoint, "look": self._look}
        for name, work in works.items():
            self._tasks.append(loop.create_task(work(), name=f"audit-{name}"))

    def recovered(self, chain: str) -> int:
        """Return the last sequence number of a chain when this auditd opened the log, 0 if it was not open."""
        return self._log.found.get(chain, 0)

    def filled(self, ring: Drain) -> None:
        """Write the records of `ring` soon; while the log cannot be written, at the next attempt."""
        self._full[ring.key] = ring
        if self._healthy:
            self._schedule()
        else:
            self._schedule_next()

    def has_ring(self, key: Key) -> bool:
        """Whether records are taken from the ring of this worker."""
        return key in self._rings

    def add_ring(self, ring: Drain) -> None:
        """Take records from `ring`, the only one of its worker."""
        self._rings[ring.key] = ring
        ring.start()
        ring.open(is_open=self._healthy and not self._always)

    def remove_ring(self, key: Key) -> None:
        """Write the records that are left in the ring of a worker, and close it.

        Raises:
            RequestError: `unavailable`: they cannot be written now. The ring is unchanged.
        """
        if (ring := self._rings.get(key)) is None:
            return
        ring.look()
        closing, self._closing = self._closing, True  # no budgets
        try:
            for _ in range(ROOM // RING_TURN):  # bounded: the worker may still write
                if key not in self._full:
                    break
                self._flush()
                if not self._healthy:
                    raise _unavailable("records are left in a ring")
        finally:
            self._closing = closing
        del self._rings[key]
        self._full.pop(key, None)
        ring.close()

    async def submit(self, producer: object, entries: Iterable[ChainEntry], *, durable: bool) -> list[int]:
        """Write all of `entries`, or none; return their sequence numbers.

        Raises:
            RequestError: `unavailable`: the records are not in the log, or durable ones may not be on disk.
        """
        loop = asyncio.get_running_loop()
        request = _Request(list(entries), durable or self._always, loop.create_future())
        self._queues.setdefault(producer, deque()).append(request)
        self._schedule()
        return await request.done

    async def close_chain(self, sandbox: str) -> int:
        """End a sandbox's chain, after all its waiting records are written, and close its rings.

        Return the chain's last sequence number, 0 if there is no chain.
        """
        for key in [key for key in self._rings if key[0] == sandbox]:
            self.remove_ring(key)
        self._closing = True  # no budgets in this last turn
        try:
            while self._queues:
                self._flush()
        finally:
            self._closing = False
        self._pace.forget(sandbox)
        if sandbox not in self._log.heads:
            return 0
        try:
            seq = self._log.close_chain(sandbox)
        except LogUnwritable as error:
            raise _unavailable(str(error)) from error
        self._touched()
        return seq

    async def state(self) -> auditd.Anchor:
        """Return an anchor of the log, after the log up to there is on disk.

        Raises:
            RequestError: `unavailable`: the log cannot be synced.
        """
        state = self._log.state()
        request = _Request([], True, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._touched()
        await request.done
        return state

    async def close(self) -> None:
        """Write the waiting records, and sign the orderly end."""
        for key in list(self._rings):
            with contextlib.suppress(RequestError):  # what is left stays in the ring, for the next auditd
                self.remove_ring(key)
        self._closing = True
        while self._queues:
            self._flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sync_thread.shutdown()
        self._anchor_thread.shutdown()
        self._log.close()
        _resolve(self._waiting)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Write one turn of every ring and every queue."""
        self._scheduled = False
        self._write_turn()
        if self._queues or self._full:
            self._schedule_next()

    def _write_turn(self) -> None:
        if self._unsynced_since is not None and time.monotonic() - self._unsynced_since > STALL_SECONDS:
            self._refuse(self._take(), "sync stalled")
            return
        drawn = self._draw()
        requests = self._take()
        if not requests and not drawn:
            return
        gaps = [gap_entry(chain, REFUSED, count) for chain, count in self._refused.items()]
        entries = [*gaps, *(entry for _, some in drawn for entry in some)]
        place = len(entries)
        entries += [entry for request in requests for entry in request.entries]

        def begin(seqs: Sequence[int]) -> None:
            at = len(gaps)
            for ring, some in drawn:
                ring.begin(seqs[at], len(some))
                at += len(some)

        try:
            seqs = self._log.append(entries, begin)
        except LogUnwritable as error:
            for ring, _ in drawn:
                ring.undo()
                self._full[ring.key] = ring
            self._refuse(requests, str(error))
            return
        for ring, _ in drawn:
            ring.settle()
        self._set_health(healthy=True)
        for chain, size in self._log.grown.items():
            self._pace.charge(chain, size)
        if gaps:
            _log.warning("the log can be written again; %d records were refused before", sum(self._refused.values()))
            self._refused.clear()
        for request in requests:
            request.seqs = seqs[place : place + len(request.entries)]
            place += len(request.entries)
        self._waiting.extend(request for request in requests if request.durable)
        _resolve(request for request in requests if not request.durable)
        self._touched()

    def _draw(self) -> list[tuple[Drain, list[ChainEntry]]]:
        """Take one turn of every ring that may hold records and has a budget."""
        drawn: list[tuple[Drain, list[ChainEntry]]] = []
        for key, ring in list(self._full.items()):
            if not self._closing and self._pace.wait(ring.sandbox) > 0:
                continue
            some = ring.take(RING_TURN)
            if some:
                drawn.append((ring, some))
            if len(some) < RING_TURN:
                del self._full[key]
                ring.linger()
        return drawn

    def _set_health(self, *, healthy: bool) -> None:
        """Open all rings, or close them while the log cannot be written."""
        if healthy is self._healthy:
            return
        self._healthy = healthy
        for ring in self._rings.values():
            ring.open(is_open=healthy and not self._always)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for ring in self._rings.values():
                ring.look()

    def _schedule_next(self) -> None:
        """Schedule the next turn: at once, or when the first waiting chain has budget again."""
        if self._closing:
            return
        queues = [self._pace.wait(queue[0].entries[0].chain) for queue in self._queues.values()]
        rings = [max(self._pace.wait(one), 0 if self._healthy else RETRY_SECONDS) for one, _ in self._full]
        wait = min(*queues, *rings, LOOK_SECONDS)
        if wait <= 0:
            self._schedule()
        elif self._paced is None:
            self._paced = asyncio.get_running_loop().call_later(wait, self._resume)

    def _resume(self) -> None:
        self._paced = None
        self._schedule()

    def _take(self) -> list[_Request]:
        taken: list[_Request] = []
        for producer, queue in list(self._queues.items()):
            count = 0
            while queue and count < TURN and (self._closing or self._pace.wait(queue[0].entries[0].chain) <= 0):
                request = queue.popleft()
                count += len(request.entries)
                taken.append(request)
            if not queue:
                del self._queues[producer]
        return taken

    def _touched(self) -> None:
        if self._unsynced_since is None:
            self._unsynced_since = time.monotonic()
        self._dirty.set()
        if self._waiting:
            self._urgent.set()

    def _refuse(self, requests: list[_Request], why: str) -> None:
        if self._healthy:
            _log.error("the log refuses records until it can be written again: %s", why)
        self._set_health(healthy=False)
        for request in requests:
            for entry in request.entries:
                self._refused[entry.chain] = self._refused.get(entry.chain, 0) + 1
        _fail(requests, why)

    async def _sync(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._dirty.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SYNC_SECONDS):
                    await self._urgent.wait()
            self._dirty.clear()
            self._urgent.clear()
            waiting, self._waiting = self._waiting, []
            started = time.monotonic()
            try:
                mark = self._log.mark()
                await loop.run_in_executor(self._sync_thread, sync, mark)
            except OSError as error:
                _log.error("cannot sync the log: %s", type(error).__name__)
                self._log.distrust("the disk failed to sync: records accepted just before may be missing")
                _fail(waiting, "sync failed")
                self._unsynced_since = None
                continue
            except asyncio.CancelledError:
                self._waiting = waiting + self._waiting
                raise
            _resolve(waiting)
            # Records written during the sync have waited since its start at most.
            self._unsynced_since = started if self._dirty.is_set() else None
            self._synced = mark
            self._to_anchor.set()

    async def _anchor(self) -> None:
        loop = asyncio.get_running_loop()
        retry = 0.0
        while True:
            await self._to_anchor.wait()
            self._to_anchor.clear()
            mark = self._synced
            if mark is not None:
                try:
                    await loop.run_in_executor(self._anchor_thread, self._log.write_anchor, mark)
                except OSError as error:
                    _log.warning("cannot write heads.json: %s", type(error).__name__)
                    self._to_anchor.set()
            while self._log.retirable and time.monotonic() >= retry:
                try:
                    await loop.run_in_executor(self._anchor_thread, self._log.retire)
                except (OSError, ValueError) as error:
                    _log.error("cannot retire the oldest file of the log: %s", error or type(error).__name__)
                    retry = time.monotonic() + CHECKPOINT_SECONDS
            await asyncio.sleep(ANCHOR_SECONDS)

    async def _checkpoint(self) -> None:
        signed = ended = self._log.position
        began = time.monotonic()
        while True:
            await asyncio.sleep(CHECKPOINT_SECONDS)
            if self._log.position != ended and time.monotonic() - began >= EPOCH_SECONDS:
                await self._change_epoch()
                signed = ended = self._log.position
                began = time.monotonic()
            elif self._log.position != signed:
                with contextlib.suppress(LogUnwritable):
                    self._log.checkpoint()
                    self._touched()
                signed = self._log.position

    async def _change_epoch(self) -> None:
        """Change to a new signing key, and destroy the former one."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._anchor_thread, self._log.prepare_epoch)
            self._log.begin_epoch()
            self._touched()
            await loop.run_in_executor(self._sync_thread, sync, self._log.mark())
            await loop.run_in_executor(self._anchor_thread, self._log.destroy_former)
        except (OSError, LogUnwritable) as error:
            _log.error("cannot change the signing key, or destroy the former one: %s", type(error).__name__)


def _resolve(requests: Iterable[_Request]) -> None:
    for request in requests:
        if not request.done.done():
            request.done.set_result(request.seqs)


def _fail(requests: Iterable[_Request], why: str) -> None:
    for request in requests:
        if not request.done.done():
            request.done.set_exception(_unavailable(why))


def _unavailable(why: str) -> RequestError:
    return RequestError(Code.UNAVAILABLE, f"the log does not accept records: {why}")
