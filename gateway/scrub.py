"""Take secrets out of what flows back to a sandbox.

- `forms` says what is looked for. In a body each byte of a match becomes `*` (NUL bytes stay), so that lengths,
  and with them every kind of framing, stay right. In a header a match becomes `[REDACTED]`.
- What is held back does not depend on the values, only on their length and on whether they are ASCII: the last
  `Patterns.longest` bytes, or the last line, as far as a match could begin in it. When bytes arrive tells nothing
  about a guess.
- The output of a `Scrubber` does not depend on how its input was cut into chunks.
- At an end, what looks like the beginning of a value is taken out too: a response cut inside a secret shows no part of
  it. That answers a guess, and so does every match: `Scrubber.partials` and `Scrubber.matches` count them, and an
  engine allows few. After an abrupt end, what is held is never released.
- What was released stays known for as long as a match may begin in it: a value over two messages is taken out from
  where it is recognised.

Pure. Not covered: compressed bytes (see `gateway.decode`), reversals, ciphers, and other transformations.
"""

from gateway.forms import Patterns, Span

REDACTED = b"[REDACTED]"
_STARS = b"\0" + b"*" * 255


class Scrubber:
    """Scrubs one body. Feed it chunks in order, then call `finish` once, unless the body ended abruptly."""

    __slots__ = ("_data", "_found", "_patterns", "_released", "matches", "partials")

    def __init__(self, patterns: Patterns) -> None:
        self.partials = 0
        """Ends so far that looked like the beginning of a value."""
        self.matches = 0
        """Pieces so far in which a value was found."""
        self._patterns = patterns
        self._data = b""
        self._released = 0  # so many bytes at the start of _data have been let out
        self._found = 0  # where the last match that was counted ends, in _data

    def feed(self, chunk: bytes) -> bytes:
        """Return what can be let out so far."""
        self._data += chunk
        return self._release(max(self._released, self._patterns.hold(self._data)), self._patterns.spans(self._data))

    def finish(self) -> bytes:
        """Return the rest. More may be fed after it: the next message of a stream."""
        spans = self._patterns.spans(self._data)
        start = self._patterns.partial(self._data)
        if start == len(self._data) or self._released == len(self._data):
            return self._release(len(self._data), spans)
        self.partials += 1
        return self._release(len(self._data), spans, (start, len(self._data)))

    def _release(self, end: int, spans: list[Span], partial: Span = (0, 0)) -> bytes:
        data, begin = self._data, self._released
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
    """Scrub a header's value, each match becoming `[REDACTED]`."""
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
