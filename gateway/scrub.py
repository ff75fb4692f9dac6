"""Take secrets out of what flows back to a sandbox.

- Found forms of each value: raw; percent-encoded (reserved characters or every byte, upper- and lower-case hex; form);
  JSON-escaped (also all-`\\uXXXX`, `\\/`); HTML-escaped; hex; base64, standard and URL-safe, at its three alignments.
  What a scheme adds (`Bearer `, `user:` before encoding) needs no form of its own: the value inside is found.
- In a body each byte of a match becomes `*`, so that lengths, and with them every kind of framing, stay right. In a
  header a match becomes `[REDACTED]`.
- The output of a `Scrubber` does not depend on how its input was cut into chunks. What is held back does not depend on
  the values, only on their length: the last line, as far as a match could begin in it. Whoever chooses what a server
  sends learns nothing from when it arrives. No form has a line end or NUL in it, so events and lines are not delayed.
- At the end of a stream, a held beginning of `MIN_PARTIAL` bytes or more is taken out too: a response cut inside a
  secret shows no part of it. That answers a guess, so `Scrubber.partial` tells of it, and an engine allows few of them.
  After an abrupt end, what is held is never released.

Pure. Not covered: compressed bytes (see `gateway.full.decode`), reversals, ciphers, and other transformations.
"""

import base64
import html
import json
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

MIN_SECRET = 4
"""Shorter values cannot be told from other text; an engine refuses to send them."""
MIN_PARTIAL = 4
REDACTED = b"[REDACTED]"

_BASE64 = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_=")
type _Span = tuple[int, int]


class Patterns:
    """The forms of some values to look for. Its repr shows none of them."""

    __slots__ = ("encoded", "literal", "longest")

    def __init__(self, values: Iterable[str]) -> None:
        """Values shorter than `MIN_SECRET` bytes are refused.

        Raises:
            ValueError: a value is too short to be found reliably.
        """
        literal: set[bytes] = set()
        encoded: set[bytes] = set()
        for value in values:
            raw = value.encode("utf-8", "surrogateescape")
            if len(raw) < MIN_SECRET:
                raise ValueError("a value is too short to be scrubbed from responses")
            literal |= _literal_forms(value, raw)
            encoded |= _base64_forms(raw)
        self.literal = tuple(sorted(literal, key=lambda form: (-len(form), form)))
        self.encoded = tuple(sorted(encoded - literal, key=lambda form: (-len(form), form)))
        self.longest = max((len(form) for form in (*self.literal, *self.encoded)), default=0)

    def __repr__(self) -> str:
        return f"Patterns({len(self.literal) + len(self.encoded)} hidden)"

    def spans(self, data: bytes) -> list[_Span]:
        """Where matches are, overlapping ones included, in no particular order."""
        found: list[_Span] = []
        for form in self.literal:
            start = data.find(form)
            while start >= 0:
                found.append((start, start + len(form)))
                start = data.find(form, start + 1)
        for form in self.encoded:
            start = data.find(form)
            while start >= 0:
                end = start + len(form)
                # The neighbours carry a few bits of the value where it does not begin or end at a 6-bit boundary.
                left = start > 0 and data[start - 1] in _BASE64
                right = end < len(data) and data[end] in _BASE64
                found.append((start - left, end + right))
                start = data.find(form, start + 1)
        return found

    def partial(self, data: bytes) -> int:
        """Where the longest tail of `data` begins that may grow into a match; `len(data)` if none may."""
        earliest = len(data)
        for form in self.literal:
            earliest = min(earliest, _partial(data, form, len(form) - 1))
        for form in self.encoded:
            # One byte more: the match may be complete while its right neighbour is not here yet.
            earliest = min(earliest, _partial(data, form, len(form)))
        return earliest

    def hold(self, data: bytes) -> int:
        """Where what must be held back of `data` begins.

        A match that is not complete begins less than `longest` bytes before the end, one whose right neighbour is
        missing exactly there, and its left neighbour one byte before; and none reaches over a line end.
        """
        line = max(data.rfind(end) for end in (b"\n", b"\r", b"\0")) + 1
        return max(line, len(data) - self.longest - 1, 0)


def _partial(data: bytes, form: bytes, longest: int) -> int:
    start = max(0, len(data) - longest)
    first = form[:1]
    while (start := data.find(first, start)) >= 0:
        if form.startswith(data[start:]):
            return start
        start += 1
    return len(data)


def _literal_forms(value: str, raw: bytes) -> set[bytes]:
    texts = {quote(raw, safe=""), quote(raw, safe="/"), quote_plus(raw), quote(raw, safe="~()*!'")}
    texts |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    texts |= {text.replace("/", "\\/") for text in list(texts)}
    texts |= {html.escape(value), html.escape(value, quote=False), html.escape(value).replace("&#x27;", "&#39;")}
    every = "".join(f"%{byte:02X}" for byte in raw)
    unicode = "".join(f"\\u{unit:04x}" for unit in _utf16_units(value))
    texts |= {every, unicode, unicode.upper().replace("\\U", "\\u"), raw.hex(), raw.hex().upper()}
    texts |= {_lower_hex(text) for text in list(texts)}
    return {raw} | {text.encode("utf-8", "surrogateescape") for text in texts}


def _utf16_units(value: str) -> list[int]:
    data = value.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[index : index + 2], "big") for index in range(0, len(data), 2)]


def _lower_hex(text: str) -> str:
    """`text` with its percent escapes in lower case."""
    head, *rest = text.split("%")
    return head + "".join(f"%{part[:2].lower()}{part[2:]}" for part in rest)


def _base64_forms(raw: bytes) -> set[bytes]:
    """The characters that depend on `raw` alone, for each position of its first byte in a group of three."""
    forms: set[bytes] = set()
    for before in range(3):
        whole = base64.b64encode(bytes(before) + raw)
        first = -(-before * 8 // 6)
        last = (before + len(raw)) * 8 // 6
        core = whole[first:last]
        forms |= {core, core.translate(bytes.maketrans(b"+/", b"-_"))}
        if (before + len(raw)) % 3 and before == 0:
            forms |= {whole, whole.translate(bytes.maketrans(b"+/", b"-_"))}
    return forms


class Scrubber:
    """Scrubs one body. Feed it chunks in order, then call `finish` once, unless the body ended abruptly.

    Args:
        prompt: hold back only what may be the beginning of a match. For protocols whose peers wait for one another's
            messages; who chooses the server's messages there can tell from their arrival how a value begins.
    """

    __slots__ = ("_held", "_masked", "_patterns", "_prompt", "partial")

    def __init__(self, patterns: Patterns, *, prompt: bool = False) -> None:
        self._prompt = prompt
        self.partial = False
        """After `finish`: whether the stream ended with what may be the beginning of a value."""
        self._patterns = patterns
        self._held = b""
        self._masked = 0  # so many bytes at the start of _held belong to a match found before

    def feed(self, chunk: bytes) -> bytes:
        """Return what can be let out so far."""
        data = self._held + chunk
        start = self._patterns.hold(data)
        if self._prompt:
            partial = self._patterns.partial(data)
            start = max(start, partial - (partial > 0 and data[partial - 1] in _BASE64))
        return self._release(data, start)

    def finish(self) -> bytes:
        """Return the rest."""
        data = self._held
        start = self._patterns.partial(data)
        if len(data) - start >= MIN_PARTIAL:
            self.partial = True
            return self._release(data, len(data), extra=(start, len(data)))
        return self._release(data, len(data))

    def _release(self, data: bytes, cut: int, extra: _Span = (0, 0)) -> bytes:
        spans = [(0, self._masked), extra, *self._patterns.spans(data)]
        out = bytearray(data[:cut])
        masked = max(0, self._masked - cut)
        for start, end in spans:
            if start < cut:
                out[start : min(end, cut)] = b"*" * (min(end, cut) - start)
                masked = max(masked, end - cut)
        self._held = data[cut:]
        self._masked = masked
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
