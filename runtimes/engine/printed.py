"""The end of a container's output, from Docker's stream, without the values of the sandbox's environment.

A frame of the stream is one entry of the container's log: one byte for standard output or standard error, three of
zeros, four with the length, and the bytes. An entry is a line, or a part of a line that is longer than `PART`.

- A value that the program has printed is replaced by its variable's name, also if it spans entries, or begins in one
  that is not shown. Of a value with several lines each long line is replaced also alone.
- Only the value itself is found, no encoding of it: this protects against an accident, not against the program.
- What is read is bounded for each of the two streams, independently of the length of the log.
"""

import datetime
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from wire.api.hostd import LEAST_HIDDEN

MOST_BYTES: Final = 256 * 1024
"""The bytes of an output that are shown: its end."""
PART: Final = 16 * 1024
"""The length at which Docker divides a line."""
_MOST_CONTEXT = 2000
_MOST_FOUND = 100_000
_MOST_FRAME = 1 << 20
_PREFIX = struct.Struct(">BxxxI")
_STAMP = len("2006-01-02T15:04:05.000000000Z ")
_SECOND = len("2006-01-02T15:04:05")


@dataclass(frozen=True, slots=True)
class LogTail:
    """The part of an output that is wanted.

    Attributes:
        lines: the number of entries, from the end.
        since: only entries from this time on, in seconds since the epoch. The stream must then have time stamps.
        most: the limit of what is returned, in bytes.
    """

    lines: int
    since: int | None = None
    most: int = MOST_BYTES


@dataclass(frozen=True, slots=True)
class Hidden:
    """The values that an output must not show.

    Attributes:
        values: each with its mark, the longest first.
        lines: the long lines of values with several lines, with the same marks.
    """

    values: tuple[tuple[bytes, bytes], ...] = ()
    lines: Mapping[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, *environments: Mapping[str, str]) -> "Hidden":
        """Return what is hidden of environments. Each can have its own value of the same variable."""
        marks: dict[bytes, bytes] = {}
        lines: dict[bytes, bytes] = {}
        for name, text in sorted(item for environment in environments for item in environment.items()):
            value, mark = text.strip().encode("utf-8", "surrogateescape"), f"[env {name}]".encode()
            if len(value) < LEAST_HIDDEN:
                continue
            marks.setdefault(value, mark)
            if b"\n" in value:
                long = (line.strip() for line in value.split(b"\n"))
                lines.update((line, mark) for line in long if len(line) >= LEAST_HIDDEN)
        return cls(tuple(sorted(marks.items(), key=lambda item: -len(item[0]))), lines)

    @property
    def longest(self) -> int:
        """The length of the longest value in bytes."""
        return len(self.values[0][0]) if self.values else 0

    @property
    def context(self) -> int:
        """The number of entries that a value can span, before the first one that is shown."""
        spans = (value.count(b"\n") + len(value) // PART + 1 for value, _ in self.values)
        return min(2 * max(spans, default=0), _MOST_CONTEXT)

    def spans(self, text: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Return begin, end and mark of every occurrence, in order, without an overlap.

        A text with very many occurrences is one occurrence: it was printed to make the search expensive.
        """
        found: list[tuple[int, int, bytes]] = []
        for value, mark in self.values:
            place = text.find(value)
            while place >= 0:
                if len(found) == _MOST_FOUND:
                    yield 0, len(text), b"[env]"
                    return
                found.append((place, place + len(value), mark))
                place = text.find(value, place + len(value))
        end = 0
        for begin, stop, mark in sorted(found, key=lambda span: (span[0], -span[1])):
            if stop > end:
                yield max(begin, end), stop, mark
                end = stop


NOTHING: Final = Hidden()


def entries(query: LogTail, hidden: Hidden) -> int:
    """Return the number of entries to ask Docker for."""
    return query.lines + hidden.context


def last_lines(read: Callable[[int], bytes], query: LogTail, hidden: Hidden = NOTHING) -> tuple[str, bool]:
    """Read a stream of `entries` at most. Return its last whole lines, and whether lines before them were dropped.

    A last line that is longer than the limit is shortened at its start.

    Args:
        read: returns up to so many bytes, empty at the end.
    """
    streams: dict[int, _Stream] = {}
    number = 0
    for kind, stamp, data in _frames(read, stamped=query.since is not None):
        stream = streams.setdefault(kind, _Stream(query.most + hidden.longest))
        stream.add(_Entry(number, _is_wanted(stamp, query.since), data))
        number += 1
    first = max(0, number - query.lines)
    shown: dict[int, bytes] = {}
    for stream in streams.values():
        shown |= {entry.number: text for entry, text in stream.without(hidden) if entry.wanted}
    dropped = any(stream.dropped >= first for stream in streams.values())
    kept = b"".join(shown[place] for place in sorted(shown) if place >= first)
    if len(kept) > query.most:
        kept, dropped = kept[-query.most :], True
    if dropped:
        kept = kept[kept.find(b"\n", 0, -1) + 1 :]
    return kept.decode("utf-8", "replace"), dropped


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    wanted: bool
    data: bytes


class _Stream:
    """The last entries of standard output or standard error. `dropped` is the number of the last one that is not."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: deque[_Entry] = deque()
        self._size = 0
        self.dropped = -1

    def add(self, entry: _Entry) -> None:
        """Add an entry. Older ones are dropped while the others have enough bytes."""
        self._entries.append(entry)
        self._size += len(entry.data)
        while self._size - len(self._entries[0].data) >= self._most:
            old = self._entries.popleft()
            self._size -= len(old.data)
            if old.wanted:
                self.dropped = old.number

    def without(self, hidden: Hidden) -> Iterator[tuple[_Entry, bytes]]:
        """Return every entry and its text, in which each value is replaced."""
        spans = list(hidden.spans(b"".join(entry.data for entry in self._entries)))
        begin, following = 0, 0
        for entry in self._entries:
            end, at, pieces = begin + len(entry.data), begin, []
            while following < len(spans) and spans[following][0] < end:
                start, stop, mark = spans[following]
                pieces += [entry.data[at - begin : max(start, begin) - begin], mark]
                at = min(stop, end)
                if stop > end:  # The rest is in the next entry.
                    break
                following += 1
            ended = b"\n" if at == end and entry.data.endswith(b"\n") else b""
            text = b"".join(pieces) + (ended or entry.data[at - begin :])
            mark = hidden.lines.get(text.strip(), b"")
            yield entry, mark + b"\n" if mark else text
            begin = end


def _is_wanted(stamp: bytes, since: int | None) -> bool:
    if since is None:
        return True
    try:
        least = datetime.datetime.fromtimestamp(since, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")
    except (OverflowError, ValueError, OSError):  # after the year 9999
        return False
    return stamp[:_SECOND].decode("ascii", "replace") >= least


def _frames(read: Callable[[int], bytes], *, stamped: bool) -> Iterator[tuple[int, bytes, bytes]]:
    """Return the kind, the time stamp and the bytes of each entry. A very long one is shortened at its start."""
    while len(prefix := _exactly(read, _PREFIX.size)) == _PREFIX.size:
        kind, left = _PREFIX.unpack(prefix)
        stamp = _exactly(read, min(_STAMP, left)) if stamped else b""
        left -= len(stamp)
        data = bytearray()
        while left and (piece := read(min(left, _MOST_FRAME))):
            left -= len(piece)
            data += piece
            del data[:-_MOST_FRAME]
        yield int(kind), stamp, bytes(data)


def _exactly(read: Callable[[int], bytes], size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := read(size - len(data))):
        data += piece
    return data
