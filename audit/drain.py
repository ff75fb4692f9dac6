"""auditd's intake from one ring: whose records it holds, and when it is looked at.

- A wake-up of the worker is followed at once. After the ring was emptied, auditd looks again after `LINGER_SECONDS`
  and waits for wake-ups only if the ring stayed empty. So a busy worker causes few wake-ups, and no record is older
  than `LINGER_SECONDS` before it is written.
- Every ring is also looked at once a second (`audit.commit`): a worker cannot hide records by taking back its wake-up.
- A record that waited longer in its ring, because auditd was down or the log could not be written, has the field
  `accepted`: when the worker put it there, by the worker's clock.
- Bytes that no worker writes are skipped, and a `gap` record says so.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from audit import line
from audit.batch import ChainEntry, gap_entry
from audit.producers import GATEWAY, KINDS
from audit.shared_ring import Cursor, RingDamaged, RingReader, recover
from wire import RequestError
from wire.api.auditd import Entry

LINGER_SECONDS: Final = 0.004
LATE_MILLISECONDS: Final = 50
DAMAGED: Final = "the gateway's ring held bytes that are no record"
INVALID: Final = "the gateway put a record into its ring that it may not write"

_log = logging.getLogger("auditd")


type Key = tuple[str, int]
"""Sandbox and generation."""


class Drain:
    """The ring of one worker. Owns the descriptors `ring` and `wake`."""

    def __init__(
        self,
        ring: int,
        cursor: Cursor,
        wake: int,
        *,
        key: Key,
        entry: Callable[[Entry], ChainEntry],
        ready: Callable[["Drain"], None],
    ) -> None:
        """Take records of the worker `key`.

        Args:
            entry: returns the record to append; raises `RequestError` if the gateway may not write it.
            ready: called when the ring may hold records.
        """
        self.key = key
        self.sandbox = key[0]
        self._reader = RingReader(ring)
        self._cursor = cursor
        self._wake = wake
        self._entry = entry
        self._ready = ready
        self._end = cursor.tail
        self._lingering: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def recover(self, logged: int) -> None:
        """Settle what a former auditd was writing; see `shared_ring.recover`."""
        try:
            recover(self._cursor, self._reader, logged)
        except RingDamaged as error:
            self._skip(error)
        self._end = self._cursor.tail

    def start(self) -> None:
        """Take records from now on."""
        self.look()
        self._loop.add_reader(self._wake, self._woken)

    def close(self) -> None:
        """Take no more records."""
        self._loop.remove_reader(self._wake)
        if self._lingering is not None:
            self._lingering.cancel()
        self._cursor.open(is_open=False)
        self._cursor.close()
        self._reader.close()
        os.close(self._wake)

    def open(self, *, is_open: bool) -> None:
        """Let records in the ring count as accepted, or not."""
        self._cursor.open(is_open=is_open)

    def look(self) -> None:
        """Call `ready` if there are records."""
        if self._reader.head() != self._cursor.tail:
            self._ready(self)

    def take(self, most: int) -> list[ChainEntry]:
        """Return the next records, at most `most`. They stay in the ring until `settle`."""
        try:
            contents, self._end = self._reader.read(self._cursor.tail, most)
        except RingDamaged as error:
            self._skip(error)
            return [gap_entry(self.sandbox, DAMAGED)]
        now = time.time_ns() // 1_000_000
        return [self._read(content, _accepted(put, now)) for put, content in contents]

    def begin(self, first: int, count: int) -> None:
        """The records that `take` returned are about to be written, from sequence number `first` on."""
        self._cursor.begin(first, count)

    def settle(self) -> None:
        """The records that `take` returned are in the log."""
        self._cursor.settle(self._end)

    def undo(self) -> None:
        """The records that `take` returned are not in the log."""
        self._cursor.settle(self._cursor.tail)

    def linger(self) -> None:
        """Look again soon, without a wake-up: the ring was emptied."""
        if self._lingering is None:
            self._loop.remove_reader(self._wake)
            self._lingering = self._loop.call_later(LINGER_SECONDS, self._lingered)

    def _lingered(self) -> None:
        self._lingering = None
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if self._reader.head() != self._cursor.tail:
            self._ready(self)
        else:
            self._loop.add_reader(self._wake, self._woken)

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._ready(self)

    def _read(self, content: bytes, accepted: str | None) -> ChainEntry:
        found = line.read(content, KINDS[GATEWAY])
        if found is not None:
            if accepted is not None:
                found.accepted = accepted
            found.producer, (found.sandbox, found.generation) = GATEWAY, self.key
            return ChainEntry(self.sandbox, line=found)
        try:
            fields = json.loads(content)
            kind, decision = fields.pop("kind"), fields.pop("decision")
            entry = self._entry(Entry(str(kind), str(decision), fields))
            return entry if accepted is None else replace(entry, record={**entry.record, "accepted": accepted})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RequestError) as error:
            _log.error("a record in the ring of %s is refused: %s", self.sandbox, type(error).__name__)
            return gap_entry(self.sandbox, INVALID, 1)

    def _skip(self, error: RingDamaged) -> None:
        _log.error("the ring of %s is damaged: %s", self.sandbox, error)
        self._end = self._reader.head()
        self._cursor.settle(self._end)


def _accepted(put: int, now: int) -> str | None:
    """Return the time at which a record was put, if that is long ago; both in milliseconds of Unix time."""
    if not LATE_MILLISECONDS < now - put < now:
        return None
    return datetime.fromtimestamp(put / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
