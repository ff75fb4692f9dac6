"""The producers' side of the audit log: ask auditd to accept a record, and know whether it did.

    audit = AuditClient.from_fd(fd)                      # inside a running loop
    await audit.accept("request", "allow", host=..., rule=...)     # returns: it is in the log
    audit.note("request", "info", host=..., status=200)            # an outcome; never blocks, never raises on load

- `accept` returns only after auditd has confirmed the record; everything else is `AuditUnavailable`, and whoever
  gets that must deny. A record may be in the log although `accept` raised (the answer came too late): the log may
  show a decision that was then not carried out, never the reverse.
- `note` is for what happened after a decision. Its queue is bounded, in notes and in bytes. What does not fit, and what
  was on its way when a connection ended, is counted, and the count goes into the log as a `gap` record before anything
  later.
- `count` is for what comes in floods: the same event many times in a second is one note, with their number.
- Who this producer is was fixed when its channel was attached; nothing sent here can change it.

It does not reconnect by itself: the owner of the channel calls `rebind` with a new one.
"""

import asyncio
import logging
import socket
from collections import deque
from typing import Final

from audit.records import Decision, Fields, RecordError, record
from wire import NARROW, Client, RemoteError
from wire.api.auditd import Entry, Record, Records, Value

ACCEPT_TIMEOUT: Final = 5.0
NOTE_QUEUE: Final = 1024
NOTE_BATCH: Final = 64
BATCH_BYTES: Final = 64 * 1024  # of one request; each may be twelve in a frame
NOTE_BYTES: Final = 4 * 1024 * 1024  # held at once, as their texts are long
COUNT_SECONDS: Final = 1.0
OVERFLOW: Final = "the queue of notes was full"
IN_FLIGHT: Final = "on their way when the writer stopped answering; some may have been recorded"

_log = logging.getLogger(__name__)


class AuditUnavailable(Exception):
    """The log did not accept the record (in time). What it was to permit must not happen."""


type _Event = tuple[str, str, tuple[tuple[str, object], ...]]
"""Kind, decision and fields of what is counted."""


class AuditClient:
    """One producer's channel to auditd. Make it inside a running loop."""

    def __init__(self, client: Client, *, timeout: float = ACCEPT_TIMEOUT, queue: int = NOTE_QUEUE) -> None:
        """Take over `client`, already started; `timeout` (seconds) bounds each `accept`, `queue` the notes held."""
        self._client = client
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
    def from_fd(cls, fd: int, *, timeout: float = ACCEPT_TIMEOUT, queue: int = NOTE_QUEUE) -> "AuditClient":
        """Take over `fd`, one end of a socket pair whose other end was attached to auditd."""
        return cls(_started(fd), timeout=timeout, queue=queue)

    @property
    def available(self) -> bool:
        """Whether the channel is open. False is certain; True is a hope that `accept` settles."""
        return not self._client.closed.is_set()

    @property
    def lost(self) -> int:
        """How many notes were dropped and not yet accounted for in the log."""
        return sum(self._lost.values())

    async def wait_closed(self) -> None:
        """Return when the present channel has ended."""
        await self._client.closed.wait()

    async def accept(self, kind: str, decision: Decision | str, *, durable: bool = False, **fields: object) -> int:
        """Have one record accepted into the log; return its sequence number.

        Args:
            durable: return only once the record is also on disk (fdatasync).
            fields: see `audit.records`; None values are left out.

        Raises:
            AuditUnavailable: not confirmed: the caller must deny.
            audit.records.RecordError: no such kind, decision or field (a programming error).
        """
        request = Record(entry(record(kind, decision, **fields)), durable)
        try:
            return (await self._client.ask(request, timeout=self._timeout)).seq
        except (RemoteError, OSError) as error:  # OSError: ConnectionError and TimeoutError
            raise AuditUnavailable(f"{kind} was not recorded: {_why(error)}") from error

    def note(self, kind: str, decision: Decision | str = Decision.INFO, **fields: object) -> None:
        """Queue one outcome record; when the queue is full it is counted instead and the log will say so.

        Raises:
            audit.records.RecordError: as for `accept`.
        """
        self._queue(record(kind, decision, **fields), 1)

    def count(self, kind: str, decision: Decision | str, **fields: object) -> None:
        """Count one more of the same event; the first is noted at once, the rest of each second with their `count`.

        `fields` are constants of the program or few: each combination is kept for a second.

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
        """Queue a note that stands for so many events, or count them as lost."""
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
        """Wait until all notes are in the log; False if they are not within `timeout` seconds."""
        self._note_counts()
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def rebind(self, fd: int) -> None:
        """Go on over a new channel (auditd was restarted); queued notes and counts are kept."""
        await self._client.close()
        self._client = _started(fd)
        self._bound.set()

    async def close(self, timeout: float = 1.0) -> None:
        """Send what is queued if that takes no longer than `timeout` seconds, and end the channel."""
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
        """Take the next notes from the queue, as many as fit into one request."""
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
            if client.closed.is_set():  # nothing was sent yet: what waits goes over the next channel
                self._bound.clear()
                continue
            # The gap record goes first: it stands where the missing notes would have stood, or earlier.
            lost, self._lost = self._lost, {}
            gaps = [record("gap", Decision.INFO, count=count, reason=reason) for reason, count in lost.items()]
            notes = self._batch()
            try:
                await client.ask(Records(tuple(map(entry, (*gaps, *notes)))), timeout=self._timeout)
            except (RemoteError, OSError) as error:
                for reason, count in lost.items():
                    self._lose(reason, count)
                if isinstance(error, RemoteError):  # refused as a whole: nothing of it was written
                    self._notes.extendleft(reversed(notes))
                    self._held += sum(map(_size, notes))
                elif notes:
                    self._lose(IN_FLIGHT, len(notes))
                _log.warning("audit notes not recorded: %s", _why(error))
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
    """About as many bytes as a note holds."""
    return 256 + sum(len(value) if isinstance(value, str | list) else 16 for value in item.values())


def entry(item: Fields) -> Entry:
    """Return a record as it is sent to auditd."""
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
