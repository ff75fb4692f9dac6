"""Reads WebSocket frames (RFC 6455) without extensions, and removes secrets from those of a server.

- `FrameReader` refuses reserved bits and opcodes, a wrong mask, a length that is not in its shortest form, fragments
  out of order, and control frames that are long or fragmented. After a close frame it discards all bytes.
- `FrameScrubber` searches the contents of the frames of each message as one text. Frames keep their lengths. At the end
  of a message all of its bytes are released, as at the end of a body. A value that spans two messages is removed from
  the place where it is recognised. Control frames are searched in the same way, apart from messages.
- A frame head or control frame between the frames of a message waits until the bytes before it are released. If
  `MAX_WAITING` bytes wait, all bytes are released, as at the end of a message. So memory is constant for any size and
  number of frames.
- In a text message a match is extended to whole characters, so UTF-8 stays valid.
- `Withheld` means malformed frames; nothing of the chunk is released. After an abrupt end the held bytes are never
  released.

Pure. A frame can be of any size, because no frame is collected.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gateway.scrub.forms import Patterns
from gateway.scrub.stream import Scrubber, Withheld

MAX_WAITING = 4096
"""The limit of bytes of heads and control frames that wait for the content before them."""
MAX_CONTROL = 125

_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_LENGTH_16, _LENGTH_64 = 126, 127
_DATA: Final = (_CONTINUATION, _TEXT, _BINARY)
_CONTROL: Final = (_CLOSE, _PING, _PONG)
_CLOSE_CODES: Final = frozenset({*range(1000, 1004), *range(1007, 1015), *range(3000, 5000)})


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a frame.

    Attributes:
        opcode: of the frame; that of the message for its later fragments.
        head: the head of the frame, if it begins here; empty otherwise.
        content: bytes of the payload, masked if the sender masks.
        ends_frame, ends_message: these are the last bytes.
    """

    opcode: int
    head: bytes
    content: bytes
    ends_frame: bool
    ends_message: bool

    @property
    def control(self) -> bool:
        """Whether this is a part of a control frame."""
        return self.opcode in _CONTROL


class FrameReader:
    """Reads the frames of one direction. `masked`: they come from a client."""

    __slots__ = ("_begun", "_final", "_head", "_left", "_masked", "_message", "_opcode", "closed")

    def __init__(self, *, masked: bool) -> None:
        self.closed = False
        """A close frame was complete."""
        self._masked = masked
        self._begun = b""  # the bytes of an incomplete head
        self._head = b""  # the head of the current frame, until it is in a piece
        self._left: int | None = None  # bytes left of the current frame; None between frames
        self._opcode = _CONTINUATION
        self._final = False
        self._message: int | None = None  # the opcode of the message that has not ended

    def pieces(self, data: bytes) -> Iterator[Piece]:
        """Yield the parts of frames in the next bytes of the stream.

        Raises:
            Withheld: the frames are malformed.
        """
        position = 0
        while not self.closed and (position < len(data) or self._head):
            if self._left is None:
                position = self._read_head(data, position)
                continue
            content = data[position : position + self._left]
            position += len(content)
            self._left -= len(content)
            yield self._piece(content)

    def _read_head(self, data: bytes, position: int) -> int:
        """Take bytes of a head from `position` on; return the next position."""
        wanted = self._head_size() - len(self._begun)
        self._begun += data[position : position + wanted]
        position += wanted
        if len(self._begun) == 2:
            self._check(*self._begun)
        if len(self._begun) == self._head_size():
            self._begin(self._begun)
            self._begun = b""
        return min(position, len(data))

    def _head_size(self) -> int:
        if len(self._begun) < 2:
            return 2
        extended = {_LENGTH_16: 2, _LENGTH_64: 8}.get(self._begun[1] & 0x7F, 0)
        return 2 + extended + (4 if self._masked else 0)

    def _check(self, first: int, second: int) -> None:
        """Check the first two bytes of a head."""
        opcode = first & 0x0F
        if first & 0x70:
            raise Withheld("a WebSocket frame with a reserved bit: no extension was negotiated")
        if opcode not in _DATA and opcode not in _CONTROL:
            raise Withheld("a WebSocket frame with a reserved opcode")
        if bool(second & 0x80) is not self._masked:
            raise Withheld("a WebSocket frame with the mask of the other side")
        if opcode in _CONTROL:
            if not first & 0x80 or second & 0x7F > MAX_CONTROL:
                raise Withheld("a WebSocket control frame that is fragmented or too long")
        elif (opcode == _CONTINUATION) is (self._message is None):
            raise Withheld("a WebSocket fragment out of order")

    def _begin(self, head: bytes) -> None:
        opcode, length = head[0] & 0x0F, head[1] & 0x7F
        if length >= _LENGTH_16:
            shortest = 126 if length == _LENGTH_16 else 1 << 16
            length = int.from_bytes(head[2 : 4 if length == _LENGTH_16 else 10], "big")
            if not shortest <= length < 1 << 63:
                raise Withheld("a WebSocket frame with a length in an invalid form")
        if opcode not in _CONTROL:
            opcode = self._message = self._message or opcode
        self._opcode, self._final, self._left, self._head = opcode, bool(head[0] & 0x80), length, head

    def _piece(self, content: bytes) -> Piece:
        ends, control, head = self._left == 0, self._opcode in _CONTROL, self._head
        self._head = b""
        if ends:
            self._left = None
            self.closed = self._opcode == _CLOSE
            if self._final and not control:
                self._message = None
        return Piece(self._opcode, head, content, ends, ends and self._final and not control)


class FrameScrubber:
    """Scrubs the frames of a server. Counts like `Scrubber`; all methods raise `Withheld`."""

    __slots__ = (
        *("_character", "_contents", "_control", "_control_head", "_controls", "_due", "_fed"),
        *("_originals", "_reader", "_released", "_text", "_waiting"),
    )

    def __init__(self, patterns: Patterns) -> None:
        self._reader = FrameReader(masked=False)
        self._contents, self._controls = Scrubber(patterns), Scrubber(patterns)
        self._originals = b""  # content that is not released, as it came
        self._fed = self._released = 0  # bytes of content
        self._due: deque[tuple[int, bytes]] = deque()  # heads and control frames, with the content before them
        self._waiting = 0
        self._control_head = self._control = b""
        self._text = False
        self._character = 0  # bytes that are left of a character whose beginning was removed

    @property
    def matches(self) -> int:
        """The number of pieces in which a value was found."""
        return self._contents.matches + self._controls.matches

    @property
    def partials(self) -> int:
        """The number of ends with the apparent beginning of a value."""
        return self._contents.partials + self._controls.partials

    def feed(self, chunk: bytes) -> bytes:
        """Take a chunk; return the bytes that can be released now."""
        out = bytearray()
        for piece in self._reader.pieces(chunk):
            if piece.control:
                out += self._take_control(piece)
            else:
                out += self._take_data(piece)
        return bytes(out)

    def _take_data(self, piece: Piece) -> bytes:
        self._text = piece.opcode == _TEXT
        if piece.head:
            self._add(piece.head)
        self._originals += piece.content
        self._fed += len(piece.content)
        shown = self._contents.feed(piece.content) if piece.content else b""
        if piece.ends_message or self._waiting > MAX_WAITING:
            shown += self._contents.finish()
        out = self._merge(shown)
        if piece.ends_message:
            self._character = 0
        return out

    def _take_control(self, piece: Piece) -> bytes:
        self._control_head = self._control_head or piece.head
        self._control += piece.content
        if not piece.ends_frame:
            return b""
        head, content = self._control_head, self._control
        self._control_head = self._control = b""
        code = b""
        if piece.opcode == _CLOSE:
            code, content = _close(content)
        shown = self._controls.feed(content) + self._controls.finish()
        self._add(head + code + _whole_characters(content, shown))
        if piece.opcode == _CLOSE or self._waiting > MAX_WAITING:
            return self._merge(self._contents.finish())
        return self._merge(b"")

    def _add(self, raw: bytes) -> None:
        self._due.append((self._fed, raw))
        self._waiting += len(raw)

    def _merge(self, shown: bytes) -> bytes:
        """Return released content with the heads and control frames that are due."""
        original, self._originals = self._originals[: len(shown)], self._originals[len(shown) :]
        if self._text:
            shown = self._extended(original, shown)
        out, end = bytearray(), self._released + len(shown)
        while self._due and self._due[0][0] <= end:
            position, raw = self._due.popleft()
            before = position - self._released
            out += shown[:before] + raw
            shown, self._released = shown[before:], position
            self._waiting -= len(raw)
        self._released = end
        return bytes(out + shown)

    def _extended(self, original: bytes, shown: bytes) -> bytes:
        """Extend removals to whole characters, also if a character began before these bytes."""
        if self._character:
            begun = min(self._character, len(shown))
            shown = b"*" * begun + shown[begun:]
            self._character -= begun
        if shown == original or original.isascii():
            return shown
        extended = _whole_characters(original, shown)
        last = _last_character(original)
        if extended[last:] != original[last:]:
            self._character = max(self._character, last + _size(original[last]) - len(original))
        return extended


def _close(content: bytes) -> tuple[bytes, bytes]:
    """Return the code and the reason of a close frame."""
    if not content:
        return b"", b""
    try:
        valid = int.from_bytes(content[:2], "big") in _CLOSE_CODES
        content[2:].decode("utf-8")
    except UnicodeDecodeError:
        valid = False
    if len(content) < 2 or not valid:
        raise Withheld("a WebSocket close frame with an invalid code or reason")
    return content[:2], content[2:]


def _size(first: int) -> int:
    """Return the length of a UTF-8 character by its first byte; 1 for a byte that begins none."""
    return 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def _last_character(text: bytes) -> int:
    """Return where the last character of `text` begins, which can be incomplete."""
    start = len(text) - 1
    while start > max(0, len(text) - 4) and text[start] & 0xC0 == 0x80:
        start -= 1
    return start


def _whole_characters(original: bytes, shown: bytes) -> bytes:
    """Return `shown`, with each character of `original` removed of which a byte is removed."""
    if shown == original or original.isascii():
        return shown
    out, at = bytearray(shown), 0
    while at < len(original):
        end = min(at + _size(original[at]), len(original))
        if end - at > 1 and out[at:end] != original[at:end]:
            out[at:end] = b"*" * (end - at)
        at = end
    return bytes(out)
