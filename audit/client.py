"""The client of auditd: sends records, and learns whether auditd has accepted them.

    audit = AuditClient.from_fd(fd)                      # inside a running loop
    await audit.accept("request", "allow", host=..., rule=...)     # returns: it is in the log
    audit.note("request", "info", host=..., status=200)            # an outcome; never blocks, never raises on load

- `accept` returns only after auditd has confirmed the record. Otherwise it raises `AuditUnavailable`: the caller must
  deny. If only the answer was late, the record is in the log although `accept` raised. So the log may contain a
  decision that was not carried out. No decision is carried out without its record.
- `note` is for outcomes after a decision. Its queue is limited in notes and bytes. Notes that do not fit, and notes
  under way when a connection ended, are counted. A `gap` record with the count precedes all later records.
- `count` is for floods: equal events within a second become one note with their number.
- The producer is fixed when its channel is attached. No message can change it.
- A gateway also has a ring (`shared_ring`). While it is open, `accept` returns when the record is in the ring: the
  record survives the death of every process there. `note` and `count` use the ring too. If the ring is full, `accept`
  waits for room; if it is closed, records are requests.

The client does not reconnect: the owner of the channel calls `rebind` with a new one.
"""

import asyncio
import json
import logging
import socket
from collections import deque
from typing import Final

import msgspec

from audit import line
from audit.line import Form
from audit.records import Decision, Fields, RecordError, record
from audit.shared_ring import MAX_RECORD, RingWriter
from wire import NARROW, Client, RemoteError
from wire.api.auditd import Entry, Record, Records, Value

ACCEPT_TIMEOUT: Final = 5.0
NOTE_QUEUE: Final = 1024
NOTE_BATCH: Final = 64
BATCH_BYTES: Final = 64 * 1024  # of one request; each may be twelve in a frame
NOTE_BYTES: Final = 4 * 1024 * 1024  # held at once, as their texts are long
COUNT_SECONDS: Final = 1.0
_ROOM_SECONDS: Final = 0.002
OVERFLOW: Final = "the queue of notes was full"
IN_FLIGHT: Final = "on their way when the writer stopped answering; some may have been recorded"

_log = logging.getLogger(__name__)


class AuditUnavailable(Exception):
    """The log did not accept the record in time. The recorded action must not happen."""


type _Event = tuple[str, str, tuple[tuple[str, object], ...]]
"""Kind, decision and fields of a counted event."""


class AuditClient:
    """One producer's channel to auditd. Make it inside a running loop."""

    def __init__(
        self,
        client: Client,
        *,
        timeout: float = ACCEPT_TIMEOUT,
        queue: int = NOTE_QUEUE,
        ring: RingWriter | None = None,
    ) -> None:
        """Use `client`, which is started. `timeout` limits each `accept` in seconds, `queue` the held notes."""
        self._client = client
        self._ring = ring
        self._timeout = timeout
        self._capacity = queue
        self._notes: deque[Fields] = deque()
        self._held = 0
        self._lost: dict[str, int] = {}
        self._counts: dict[_Event, int] = {}
        self._counting: asyncio.TimerHandle | None = None
        self._unsent = asyncio.Event()
        self._bound = asyncio.Event()
        self._bound.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._sender: asyncio.Task[None] | None = None

    @classmethod
    def from_fd(
        cls,
        fd: int,
        *,
        timeout: float = ACCEPT_TIMEOUT,
        queue: int = NOTE_QUEUE,
        ring: RingWriter | None = None,
    ) -> "AuditClient":
        """Use `fd`, one end of a socket pair. Its other end is attached to auditd, and so is `ring`."""
        return cls(_started(fd), timeout=timeout, queue=queue, ring=ring)

    @property
    def available(self) -> bool:
        """Whether the channel is open. False is certain; True can be outdated."""
        return not self._client.closed.is_set()

    @property
    def lost(self) -> int:
        """The number of dropped notes that no `gap` record has reported yet."""
        return sum(self._lost.values())

    async def wait_closed(self) -> None:
        """Return when the present channel has ended."""
        await self._client.closed.wait()

    async def accept(self, kind: str, decision: Decision | str, *, durable: bool = False, **fields: object) -> int:
        """Have one record accepted into the log; return its sequence number, 0 if it is in the ring.

        Args:
            durable: return only after the record is on disk (fdatasync).
            fields: see `audit.records`; fields with the value None are omitted.

        Raises:
            AuditUnavailable: auditd has not confirmed the record; the caller must deny.
            audit.records.RecordError: kind, decision or a field does not exist (a programming error).
        """
        if self._ring is not None and not durable:
            content = line.content(kind, decision, fields) or encoded(record(kind, decision, **fields))
            if self._ring.put(content) or await self._room(kind, content, self._ring):
                return 0
        request = Record(entry(record(kind, decision, **fields)), durable)
        try:
            return (await self._client.ask(request, timeout=self._timeout)).seq
        except (RemoteError, OSError) as error:  # OSError: ConnectionError and TimeoutError
            raise AuditUnavailable(f"{kind} was not recorded: {_why(error)}") from error

    async def accept_form(self, form: Form, values: tuple[int | str, ...]) -> None:
        """Have the record of `form` with `values` accepted into the log: see `accept`."""
        if self._ring is None or (content := form.content(values)) is None or not self._ring.put(content):
            await self.accept(form.kind, form.decision, **form.fields(values))

    async def _room(self, kind: str, content: bytes, ring: RingWriter) -> bool:
        """Put a record into a ring that had no room; False if the ring is closed.

        Raises:
            AuditUnavailable: there is no room in time.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout
        while ring.is_open and len(content) <= MAX_RECORD:
            if asyncio.get_running_loop().time() > deadline:
                raise AuditUnavailable(f"{kind} was not recorded: the ring is full")
            await asyncio.sleep(_ROOM_SECONDS)
            if ring.put(content):
                return True
        return False

    def note(self, kind: str, decision: Decision | str = Decision.INFO, **fields: object) -> None:
        """Queue one outcome record. If the queue is full, the record is dropped and counted for a `gap` record.

        Raises:
            audit.records.RecordError: as for `accept`.
        """
        if self._ring is not None and not self._notes and not self._lost:
            content = line.content(kind, decision, fields)
            if content is not None and self._ring.put(content):
                return
        self._queue(record(kind, decision, **fields), 1)

    def note_form(self, form: Form, values: tuple[int | str, ...]) -> None:
        """Queue the record of `form` with `values` as an outcome: see `note`."""
        if self._ring is not None and not self._notes and not self._lost:
            content = form.content(values)
            if content is not None and self._ring.put(content):
                return
        self.note(form.kind, form.decision, **form.fields(values))

    def count(self, kind: str, decision: Decision | str, **fields: object) -> None:
        """Count one event. The first is noted at once, the others of each second in one note with their `count`.

        `fields` must have few different values: each combination is kept for a second.

        Raises:
            audit.records.RecordError: as for `accept`.
        """
        event = (kind, str(decision), tuple(fields.items()))
        if event not in self._counts:
            record(kind, decision, **fields)
        self._counts[event] = self._counts.get(event, 0) + 1
        if self._counting is None:
            self._note_counts()

    def _note_counts(self) -> None:
        if self._counting is not None:
            self._counting.cancel()
            self._counting = None
        counts, self._counts = self._counts, {}
        for (kind, decision, fields), count in counts.items():
            self._queue(record(kind, decision, count=count, **dict(fields)), count)
        if counts:
            self._counting = asyncio.get_running_loop().call_later(COUNT_SECONDS, self._note_counts)

    def _queue(self, item: Fields, events: int) -> None:
        """Put a note that stands for so many events into the ring, or queue it, or count them as lost."""
        if self._ring is not None and not self._notes and not self._lost and self._ring.put(encoded(item)):
            return
        size = _size(item)
        if len(self._notes) >= self._capacity or self._held + size > NOTE_BYTES:
            self._lose(OVERFLOW, events)
        else:
            self._notes.append(item)
            self._held += size
        self._idle.clear()
        self._unsent.set()
        if self._sender is None:
            self._sender = asyncio.get_running_loop().create_task(self._send_notes(), name="audit-notes")

    async def drain(self, timeout: float = ACCEPT_TIMEOUT) -> bool:
        """Wait until all notes are in the log. False after `timeout` seconds."""
        self._note_counts()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def rebind(self, fd: int) -> None:
        """Use a new channel, after a restart of auditd. Queued notes and counts are kept."""
        await self._client.close()
        self._client = _started(fd)
        self._bound.set()

    async def close(self, timeout: float = 1.0) -> None:
        """Send the queued notes, for at most `timeout` seconds, and end the channel."""
        if self.available:
            await self.drain(timeout)
        if self._counting is not None:
            self._counting.cancel()
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        await self._client.close()

    def _lose(self, reason: str, count: int) -> None:
        self._lost[reason] = self._lost.get(reason, 0) + count

    def _batch(self) -> list[Fields]:
        """Take the next notes from the queue, as many as one request can have."""
        notes: list[Fields] = []
        size = 0
        while self._notes and len(notes) < NOTE_BATCH and (not notes or size + _size(self._notes[0]) <= BATCH_BYTES):
            notes.append(self._notes.popleft())
            size += _size(notes[-1])
        self._held -= size
        return notes

    async def _send_notes(self) -> None:
        while True:
            if not self._notes and not self._lost:
                self._unsent.clear()
                self._idle.set()
                await self._unsent.wait()
            await self._bound.wait()
            client = self._client
            if client.closed.is_set():  # nothing was sent; the notes wait for the next channel
                self._bound.clear()
                continue
            # The gap record is sent first, so its place is that of the missing notes or earlier.
            lost, self._lost = self._lost, {}
            gaps = [record("gap", Decision.INFO, count=count, reason=reason) for reason, count in lost.items()]
            notes = self._batch()
            try:
                await client.ask(Records(tuple(map(entry, (*gaps, *notes)))), timeout=self._timeout)
            except (RemoteError, OSError) as error:
                for reason, count in lost.items():
                    self._lose(reason, count)
                if isinstance(error, RemoteError):  # refused as a whole; no record of it was written
                    self._notes.extendleft(reversed(notes))
                    self._held += sum(map(_size, notes))
                elif notes:
                    self._lose(IN_FLIGHT, len(notes))
                _log.warning("auditd did not record a batch of notes: %s", _why(error))
                if client.closed.is_set():
                    if client is self._client:
                        self._bound.clear()
                else:
                    await asyncio.sleep(0.1)


def _started(fd: int) -> Client:
    client = Client(socket.socket(fileno=fd), takes=NARROW, gives=NARROW)
    client.start()
    return client


def _size(item: Fields) -> int:
    """Return the approximate size of a note in bytes."""
    return 256 + sum(len(value) if isinstance(value, str | list) else 16 for value in item.values())


def encoded(item: Fields) -> bytes:
    """Return a record in the form that it has in a ring."""
    try:
        return msgspec.json.encode(item)
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(item).encode("ascii")


def entry(item: Fields) -> Entry:
    """Return a record in the form that is sent to auditd."""
    fields = {name: _value(value) for name, value in item.items() if name not in ("kind", "decision")}
    return Entry(str(item["kind"]), str(item["decision"]), fields)


def _value(value: object) -> Value:
    match value:
        case str() | int():
            return value
        case list() | tuple():
            return tuple(value)
        case _:
            raise RecordError(f"a field cannot hold a {type(value).__name__}")


def _why(error: Exception) -> str:
    return error.code if isinstance(error, RemoteError) else type(error).__name__
