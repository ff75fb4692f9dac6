"""Removes secrets from a gRPC response. Both sides wait for whole messages, so no bytes are held after a message's end.

- A message has five bytes (a flag, a length) and its content. The bytes held back within it depend only on the length
  of the values. At its end all bytes are released, as at the end of a body: the apparent beginning of a value is
  removed and counted.
- Values are searched in two readings, with and without the five bytes between contents. A value that spans two messages
  is removed from the place where it is recognised. A value in place of a length is not released.
- `Withheld` means a compressed message, an invalid flag or length, or an end within a message. Nothing of that
  message is released.

Pure.
"""

from collections import deque

from gateway.scrub.forms import Patterns
from gateway.scrub.stream import Scrubber, Withheld

MAX_MESSAGE = 64 * 1024 * 1024
_PREFIX = 5
_STAR = ord("*")


class MessageScrubber:
    """Scrubs one body of gRPC messages, with the interface of `Scrubber`.

    All methods raise `Withheld`.
    """

    __slots__ = ("_contents", "_left", "_out", "_prefix", "_prefixes", "_ready", "_whole", "matches", "partials")

    def __init__(self, patterns: Patterns) -> None:
        self.matches = 0
        """The number of pieces in which a value was found."""
        self.partials = 0
        """The number of ends with the apparent beginning of a value."""
        self._whole, self._contents = Scrubber(patterns), Scrubber(patterns)
        self._ready = bytearray(), bytearray()  # for each reading, the bytes that it has released and the other has not
        self._prefix = b""
        self._out = 0  # the number of released bytes
        self._prefixes: deque[int] = deque()  # positions of the bytes between contents that are not released yet
        self._left: int | None = None  # bytes left in the content of the current message

    def feed(self, chunk: bytes) -> bytes:
        """Take a chunk; return the bytes that can be released now."""
        out = bytearray()
        while chunk or self._left == 0:
            if self._left is None:
                wanted = _PREFIX - len(self._prefix)
                self._prefix, chunk = self._prefix + chunk[:wanted], chunk[wanted:]
                if len(self._prefix) < _PREFIX:
                    break
                self._left = _length(self._prefix)
                begin = self._out + len(self._ready[1])
                self._prefixes.extend(range(begin, begin + _PREFIX))
                self._ready[0].extend(self._whole.feed(self._prefix))
                self._ready[1].extend(self._prefix)
            content, chunk = chunk[: self._left], chunk[self._left :]
            self._left -= len(content)
            self._ready[0].extend(self._whole.feed(content))
            self._ready[1].extend(self._contents.feed(content))
            if not self._left:
                self._end()
            out += self._both()
        return bytes(out)

    def _end(self) -> None:
        partials = self._whole.partials, self._contents.partials
        self._ready[0].extend(self._whole.finish())
        self._ready[1].extend(self._contents.finish())
        self.partials += max(self._whole.partials - partials[0], self._contents.partials - partials[1])
        self._prefix, self._left = b"", None

    def finish(self, last: bytes = b"") -> bytes:
        """Take the last chunk, and check the end of the body."""
        out = self.feed(last) if last else b""
        if self._left is not None or self._prefix:
            raise Withheld("the response ended within a gRPC message")
        return out

    def _both(self) -> bytes:
        count = min(map(len, self._ready))
        first, second = (bytes(ready[:count]) for ready in self._ready)
        for ready in self._ready:
            del ready[:count]
        self.matches = max(self._whole.matches, self._contents.matches)
        while self._prefixes and self._prefixes[0] < self._out + count:
            at = self._prefixes.popleft() - self._out
            if first[at] != second[at]:
                raise Withheld("a secret in place of the length of a gRPC message")
        self._out += count
        if first == second:
            return first
        return bytes(_STAR if _STAR in pair else pair[0] for pair in zip(first, second, strict=True))


def _length(prefix: bytes) -> int:
    length = int.from_bytes(prefix[1:], "big")
    if prefix[0] != 0:
        raise Withheld("compressed gRPC messages cannot be searched for secrets")
    if length > MAX_MESSAGE:
        raise Withheld(f"a gRPC message of more than {MAX_MESSAGE} bytes")
    return length
