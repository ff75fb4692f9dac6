"""Take secrets out of a gRPC response: peers wait for one another's messages, so the end of one holds nothing back.

- A message is five bytes (a flag, a length) and its content. What is held back within it depends on the length of the
  values only; at its end all of it is let out, as at the end of a body: the beginning of a value is taken out and
  counted.
- A value is looked for in two readings, with and without the bytes between the contents: one that lies over two
  messages is taken out from where it is recognised, and one that a server writes where a length belongs is not let out.
- A compressed message, a flag or length that cannot be, an end within a message: `BrokenFraming`. Nothing of that
  message goes on.

Pure.
"""

from collections import deque

from gateway.forms import Patterns
from gateway.scrub import Scrubber

MAX_MESSAGE = 64 * 1024 * 1024
_PREFIX = 5
_STAR = ord("*")


class BrokenFraming(Exception):
    """The bytes are no gRPC messages that can be searched."""


class MessageScrubber:
    """Scrubs one body of gRPC messages. Used as a `Scrubber`.

    All methods raise `BrokenFraming`.
    """

    __slots__ = ("_contents", "_left", "_out", "_prefix", "_prefixes", "_ready", "_whole", "matches", "partials")

    def __init__(self, patterns: Patterns) -> None:
        self.matches = 0
        """Pieces so far in which a value was found."""
        self.partials = 0
        """Ends so far that looked like the beginning of a value."""
        self._whole, self._contents = Scrubber(patterns), Scrubber(patterns)
        self._ready = bytearray(), bytearray()  # what each of them has let out and the other has not
        self._prefix = b""
        self._out = 0  # so many bytes were let out
        self._prefixes: deque[int] = deque()  # where the bytes between contents are, as far as they are not let out
        self._left: int | None = None  # of the content of the message under way

    def feed(self, chunk: bytes) -> bytes:
        """Return what can be let out so far."""
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

    def finish(self) -> bytes:
        """Return the rest: nothing."""
        if self._left is not None or self._prefix:
            raise BrokenFraming("the response ended within a message")
        return b""

    def _both(self) -> bytes:
        count = min(map(len, self._ready))
        first, second = (bytes(ready[:count]) for ready in self._ready)
        for ready in self._ready:
            del ready[:count]
        self.matches = max(self._whole.matches, self._contents.matches)
        while self._prefixes and self._prefixes[0] < self._out + count:
            at = self._prefixes.popleft() - self._out
            if first[at] != second[at]:
                raise BrokenFraming("a value where a length belongs")
        self._out += count
        if first == second:
            return first
        return bytes(_STAR if _STAR in pair else pair[0] for pair in zip(first, second, strict=True))


def _length(prefix: bytes) -> int:
    length = int.from_bytes(prefix[1:], "big")
    if prefix[0] != 0:
        raise BrokenFraming("compressed messages cannot be searched for secrets")
    if length > MAX_MESSAGE:
        raise BrokenFraming(f"a message of more than {MAX_MESSAGE} bytes")
    return length
