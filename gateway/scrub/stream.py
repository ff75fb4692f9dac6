"""Removes secrets from bytes on the way to a sandbox.

- `forms` finds the matches. In a body each byte of a match becomes `*` (NUL bytes stay), so lengths and framing do not
  change. In a header a match becomes `[REDACTED]`.
- The bytes held back are the last `Patterns.longest` bytes, or the last line, as far as a match could begin in it. This
  depends only on the length of the values and on whether they are ASCII. So timing reveals nothing about a guess.
- The output of a `Scrubber` does not depend on how its input is divided into chunks.
- At an end, the apparent beginning of a value is removed too: a response that ends inside a secret shows no part of it.
  Each removal confirms a guess. `Scrubber.partials` and `Scrubber.matches` count them, and the exchange limits them.
  After an abrupt end the held bytes are never released.
- Released bytes are remembered as long as a match may begin in them. A value that spans two messages is removed from
  the place where it is recognised.

Pure. Not covered: compressed bytes (see `gateway.scrub.decode`), reversals, ciphers, and other transformations.
"""

from gateway.scrub.forms import Patterns, Span

REDACTED = b"[REDACTED]"
_STARS = b"\0" + b"*" * 255


class Withheld(Exception):
    """The response is withheld from here on; the text is the reason."""


class Scrubber:
    """Scrubs one body. Feed it chunks in order, then call `finish` once, unless the body ended abruptly."""

    __slots__ = ("_data", "_found", "_patterns", "_released", "matches", "partials")

    def __init__(self, patterns: Patterns) -> None:
        self.partials = 0
        """The number of ends with the apparent beginning of a value."""
        self.matches = 0
        """The number of pieces in which a value was found."""
        self._patterns = patterns
        self._data = b""
        self._released = 0  # the number of bytes at the start of _data that are released
        self._found = 0  # the end of the last counted match, in _data

    def feed(self, chunk: bytes) -> bytes:
        """Take a chunk; return the bytes that can be released now."""
        self._data += chunk
        return self._release(max(self._released, self._patterns.hold(self._data)), self._patterns.spans(self._data))

    def finish(self, last: bytes = b"") -> bytes:
        """Take the last chunk; return the rest. `feed` may follow, with the next message of a stream."""
        self._data += last
        spans = self._patterns.spans(self._data)
        start = self._patterns.partial(self._data)
        if start == len(self._data) or self._released == len(self._data):
            return self._release(len(self._data), spans)
        self.partials += 1
        return self._release(len(self._data), spans, (start, len(self._data)))

    def _release(self, end: int, spans: list[Span], partial: Span = (0, 0)) -> bytes:
        data, begin = self._data, self._released
        if not spans and partial == (0, 0):
            kept = max(0, end - self._patterns.context(data[:end]))
            self._data, self._released, self._found = data[kept:], end - kept, max(0, self._found - kept)
            return data[begin:end]
        out = bytearray(data[begin:end])
        for first, last in (*spans, partial):
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                out[start - begin : stop - begin] = data[start:stop].translate(_STARS)
        found = max((last for first, last in spans if first < end), default=0)
        if found > max(begin, self._found):
            self.matches += 1
            self._found = found
        kept = max(0, end - self._patterns.context(data[:end]))
        self._data, self._released, self._found = data[kept:], end - kept, max(0, self._found - kept)
        return bytes(out)


def scrub_bytes(patterns: Patterns, data: bytes) -> bytes:
    """Scrub a complete body."""
    scrubber = Scrubber(patterns)
    return scrubber.feed(data) + scrubber.finish()


def scrub_header(patterns: Patterns, value: bytes) -> bytes:
    """Scrub a header's value; each match becomes `[REDACTED]`."""
    spans = sorted(patterns.spans(value))
    if not spans:
        return value
    out = bytearray()
    position = 0
    for start, end in spans:
        if start >= position:
            out += value[position:start] + REDACTED
        position = max(position, end)
    return bytes(out + value[position:])
