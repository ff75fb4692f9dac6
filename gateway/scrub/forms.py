"""Finds the forms of a secret that common encoders make, in bytes.

- A value is found as text, as hex, and as base64 at its three alignments, standard or URL-safe. Each character may be
  raw or in any of its escapes, in any mixture: percent-encoding (any subset, either case, `+`, nested), JSON,
  JavaScript and C escapes (`\\u0026`, `\\x26`, `\\/`, nested in JSON strings), HTML entities (named or numeric).
- A value of bytes (a private number of a key) is found as hex and base64 only, so in PEM and JWK, not in DER.
- NUL bytes between the characters are ignored, so text in UTF-16 and UTF-32 of either byte order is found.
- Base64 may be wrapped at any column from `MIN_COLUMN` on. No other form of an ASCII value contains a line end. In
  UTF-16 and UTF-32 a byte of another character may look like one.
- A form is at most `Patterns.longest` bytes long. This depends only on the length of the values.
- `Patterns.partial` finds the beginning of a form at the end of the data.

Costs: one `bytes.find` for each unescaped form, one regular expression that finds relevant escapes, and a search for
the first characters around each escape. Each step is linear in the data for a given set of values.

Pure. `gateway.scrub.stream` decides which bytes are released.
"""

import base64
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from html.entities import html5
from urllib.parse import quote_plus

MIN_SECRET = 8
"""The shortest value, in characters, that is distinct from other text. Shorter values are never sent."""
MIN_PARTIAL = 4
"""The shortest beginning of a form, in characters, that is removed at the end of the data."""
MIN_COLUMN = 20
"""The shortest line of base64, in characters, that counts as wrapped."""
MAX_ESCAPE = 12
"""The largest number of bytes of a form per byte of its value."""

_BASE64 = b"A-Za-z0-9+/=_-"
_RUN = b"[" + _BASE64 + b"]{%d}" % MIN_COLUMN
_IN_BASE64 = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_=")
_WRAPPED = re.compile(b"(?<=" + _RUN + b")(?:\r?\n[ \t]{0,8}|\\\\{1,2}(?:r\\\\{1,2})?n)")
_SOME_WRAP = re.compile(b"\n(?:(?<=%(run)b\n)|(?<=%(run)b\r\n))|\\\\(?<=%(run)b\\\\)\\\\?[rn]" % {b"run": _RUN})
_AFTER_RUN = re.compile(b"(?<=" + _RUN + b")\r?\n?")
_UNFINISHED = re.compile(
    rb"(?:%(?:25){0,2}2?[0-9A-Fa-f]?"
    rb"|\\{1,4}(?:[uU]\{?[0-9A-Fa-f]{0,7}|x[0-9A-Fa-f]?|[0-7]{0,2})?"
    rb"|&(?:amp;){0,2}#?[A-Za-z0-9]{0,10}|\r)\Z"
)
_UNFINISHED_OCTETS = re.compile(
    rb"(?:%(?:25){0,2}[0-9A-Fa-f]{2}|\\{1,4}(?:x[0-9A-Fa-f]{2}|[0-7]{3}|u[0-9A-Fa-f]{4})){0,3}(?:"
    + _UNFINISHED.pattern
    + rb"|\Z)"
)
_MAY_ESCAPE = re.compile(rb"[%&+\\\r\n\x80-\xff]")
_AMBIGUOUS = ((b"%",), (b"&",), (b"\\",))
_EACH_HEX = re.compile(r"[a-f]")
_ANOTHER = r"\\\\{0,3}"
_HEAD = 3
_WRAP = 12  # the largest number of bytes of a wrap
_NAMES: dict[str, list[str]] = {}
for _name, _text in html5.items():
    if _name.endswith(";") and len(_text) == 1 and len(_name) <= 9:
        _NAMES.setdefault(_text, []).append(_name)

type Span = tuple[int, int]
type Headers = tuple[tuple[bytes, bytes], ...]

_KEPT_CLEAN = 128
_MAX_CLEAN = 4096
_FREQUENT = b"etaoinsrhldcumfpgwybvkxjqz 0123456789"
"""Characters that many texts have, the most frequent first. Others are rare."""


def _any_case(digits: str) -> str:
    return _EACH_HEX.sub(lambda letter: f"[{letter[0]}{letter[0].upper()}]", digits)


def _one_of(parts: Iterable[str]) -> str:
    return "(?:" + "|".join(parts) + ")"


def _hex_pairs(codes: Iterable[int]) -> str:
    """The source of a regular expression for two hex digits, in either case, of any of these ASCII codes."""
    rows: dict[int, list[str]] = {}
    for code in sorted(codes):
        rows.setdefault(code >> 4, []).append(f"{code & 15:x}")
    return _one_of(f"{row:x}[{''.join(digits)}{''.join(digits).upper()}]" for row, digits in rows.items())


def _escapes(characters: Iterable[str]) -> str:
    """The source of a regular expression for every escape of these characters, except `+` for a blank."""
    percent, slash, entity = list[str](), list[str](), list[str]()
    codes = sorted(ord(character) for character in characters if character.isascii())
    if codes:
        pair = _hex_pairs(codes)
        percent.append(pair)
        slash += [f"(?:u00|x|U000000){pair}", rf"u\{{0{{0,4}}{pair}\}}", _one_of(f"{code:03o}" for code in codes)]
        slash += [re.escape(chr(code)) for code in codes if not chr(code).isalnum()]
        entity += [rf"#0{{0,3}}{_one_of(map(str, codes))};", rf"#[xX]0{{0,4}}{pair};"]
    for character in characters:
        entity += _NAMES.get(character, ())
        if character.isascii():
            continue
        octets = [f"{octet:02x}" for octet in character.encode("utf-8", "surrogateescape")]
        units = character.encode("utf-16-be", "surrogatepass").hex()
        pairs = [units[index : index + 4] for index in range(0, len(units), 4)]
        code = _any_case(f"{ord(character):x}")
        percent.append("%(?:25){0,2}".join(map(_any_case, octets)))
        percent.append("%(?:25){0,2}".join("u" + _any_case(unit) for unit in pairs))
        if ord(character) < 0x100:
            percent.append(code)
        slash += [_ANOTHER.join("u" + _any_case(unit) for unit in pairs), rf"u\{{0{{0,4}}{code}\}}"]
        slash += [f"U0{{0,7}}{code}", f"x{code}", _ANOTHER.join("x" + _any_case(octet) for octet in octets)]
        slash.append(_ANOTHER.join(f"{int(octet, 16):03o}" for octet in octets))
        entity += [rf"#0{{0,3}}{ord(character)};", rf"#[xX]0{{0,4}}{code};"]
    entities = "(?:amp;){0,2}" + _one_of(entity)
    percent.append("26" + entities)
    slash.append("u0026" + entities)
    return "|".join(("%(?:25){0,2}" + _one_of(percent), r"\\\\{0,3}" + _one_of(slash), "&" + entities))


@dataclass(frozen=True, slots=True)
class _Element:
    """One character of a form: its unescaped bytes, and a pattern of its escapes."""

    raw: tuple[bytes, ...]
    source: bytes = field(repr=False)
    escape: re.Pattern[bytes] = field(repr=False)

    def ends(self, data: bytes, start: int) -> set[int]:
        """The possible ends of the element if it begins at `start`."""
        found = {start + len(raw) for raw in self.raw if data.startswith(raw, start)}
        escaped = self.escape.match(data, start)
        if escaped is not None:
            found.add(escaped.end())
        plain = self.raw[0]
        # One escape may begin another, as for U+00C3, whose UTF-8 begins with its own number.
        if escaped is not None and (self.raw in _AMBIGUOUS or not plain.isascii()):
            ends = range(start + 2, start + MAX_ESCAPE * len(plain))
            found |= {end for end in ends if self.escape.fullmatch(data, start, end) is not None}
        return found

    def unfinished(self, data: bytes, start: int) -> bool:
        """Whether the data from `start` on may be an incomplete element, or an incomplete wrap before it."""
        rest = data[start : start + MAX_ESCAPE * 2]
        unfinished = _UNFINISHED if self.raw[0].isascii() else _UNFINISHED_OCTETS
        return any(raw.startswith(rest) for raw in self.raw) or unfinished.match(rest) is not None


@cache
def _element(characters: str) -> _Element:
    """Return the element for any of `characters`."""
    raw: dict[bytes, None] = {}
    for character in characters:
        raw[character.encode("utf-8", "surrogateescape")] = None
        if character == " ":
            raw[b"+"] = None
        if not character.isascii():
            for charset in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "cp1252"):
                octets = character.encode(charset, "ignore").replace(b"\0", b"")
                if octets:
                    raw[octets] = None
    escapes = _escapes(characters).encode()
    source = b"(?:%b|%b)" % (b"|".join(re.escape(one) for one in raw), escapes)
    return _Element(tuple(raw), source, re.compile(escapes))


@dataclass(frozen=True, slots=True)
class _Form:
    """One text to search for: its elements, its unescaped bytes, and whether it is a part of base64 text."""

    elements: tuple[_Element, ...]
    plain: tuple[bytes, ...]
    base64: bool = False

    def end(self, data: bytes, start: int) -> tuple[int, int]:
        """Return the end of the match at `start` (-1 if none), and how many characters match at the data's end."""
        ends = {start}
        reached = 0
        for count, element in enumerate(self.elements):
            if self.base64 and count:
                ends |= {wrap.end() for one in ends if (wrap := _WRAPPED.match(data, one)) is not None}
            following: set[int] = set()
            for one in ends:
                following |= element.ends(data, one)
                if len(data) - one < MAX_ESCAPE * 2 and element.unfinished(data, one):
                    reached = count  # the maximum: another reading of these bytes may match longer, then fail
            if not following:
                return -1, reached
            ends = following
        return max(ends), 0


def _octets(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value


def _text_form(value: str) -> _Form:
    raw = value.encode("utf-8", "surrogateescape")
    plain = {raw, quote_plus(raw, safe=_PRINTABLE).encode()} if " " in value else {raw}
    return _Form(tuple(_element(character) for character in value), tuple(plain))


_PRINTABLE = "".join(chr(code) for code in range(0x21, 0x7F)).replace("+", "")


def _hex_form(raw: bytes) -> _Form:
    text = raw.hex()
    elements = tuple(_element(digit + digit.upper() if digit.isalpha() else digit) for digit in text)
    return _Form(elements, (text.encode(), text.upper().encode()))


def _base64_forms(raw: bytes) -> Iterator[_Form]:
    """Yield the base64 characters that depend only on `raw`, for each position in a group of three bytes."""
    for before in range(3):
        whole = base64.b64encode(bytes(before) + raw).decode("ascii")
        core = whole[-(-before * 8 // 6) : (before + len(raw)) * 8 // 6]
        elements = tuple(_element({"+": "+-", "/": "/_"}.get(character, character)) for character in core)
        plain = core.encode()
        yield _Form(elements, tuple({plain, plain.translate(bytes.maketrans(b"+/", b"-_"))}), base64=True)


class Patterns:
    """The forms of the values to search for. Its repr shows no value."""

    __slots__ = (
        *("_ascii", "_begins", "_begun", "_clean", "_escape", "_first", "_forms", "_head", "_introducer", "_plain"),
        "_signs",
        "longest",
    )

    def __init__(self, values: Iterable[str | bytes]) -> None:
        """There is at least one value. Values shorter than `MIN_SECRET` characters or bytes are refused.

        Raises:
            ValueError: a value is too short to be found reliably.
        """
        forms: list[_Form] = []
        characters: set[str] = set()
        self.longest = 0
        for value in sorted(set(values), key=_octets):
            raw = _octets(value)
            if len(value) < MIN_SECRET:
                raise ValueError(f"a secret needs at least {MIN_SECRET} characters to be removed from responses")
            if isinstance(value, str):
                forms.append(_text_form(value))
                characters |= set(value)
            forms += [_hex_form(raw), *_base64_forms(raw)]
            self.longest = max(self.longest, MAX_ESCAPE * len(raw))
        self._forms = tuple(forms)
        self._plain = tuple((form, plain) for form in forms for plain in form.plain)
        self._begins = tuple((max(plain[:MIN_PARTIAL], key=_rarity), plain) for _, plain in self._plain)
        self._clean: set[Headers] = set()
        self._ascii = all(character.isascii() for character in characters)
        self._first: dict[int, list[_Form]] = {}
        for form in forms:
            for octet in {raw[0] for raw in form.elements[0].raw} | set(b"%\\&"):
                self._first.setdefault(octet, []).append(form)
        characters |= {chr(octet) for octet in _IN_BASE64}
        blank = r"|\+" if " " in characters else ""
        escapes = (_escapes(sorted(characters)) + blank).encode()
        others = {raw[:1] for one in characters if not one.isascii() for raw in _element(one).raw}
        self._escape = re.compile(b"|".join((_SOME_WRAP.pattern, escapes, *map(re.escape, sorted(others)))))
        introducers = b"".join(sorted({b"%", b"&", b"\\", b"\n", *([b"+"] if blank else ()), *others}))
        self._introducer = re.compile(b"[" + re.escape(introducers) + b"]")
        self._begun = tuple(b"\0" + introducers)
        self._signs = tuple((max(plain, key=_rarity), plain) for _, plain in self._plain)
        """Each unescaped form with its rarest byte. A text without any of these, and of `_begun`, has no match."""
        self._head: re.Pattern[bytes] | None = None

    def __repr__(self) -> str:
        return f"Patterns({len(self._forms)} hidden)"

    def in_headers(self, headers: Headers) -> bool:
        """Whether a name or a value of `headers` may hold a match. Headers without one are kept, up to a number."""
        if headers in self._clean:
            return False
        if any(self.spans(name) or self.spans(value) for name, value in headers):
            return True
        if sum(len(name) + len(value) for name, value in headers) <= _MAX_CLEAN:
            if len(self._clean) >= _KEPT_CLEAN:
                self._clean.clear()
            self._clean.add(headers)
        return False

    def spans(self, data: bytes) -> list[Span]:
        """Return all matches, also overlapping ones, in no particular order; those of base64 with both neighbours."""
        for octet in self._begun:
            if octet in data:
                break
        else:
            # The search for one byte takes a fraction of the time, and often says that the form is absent.
            for rare, plain in self._signs:
                if rare in data and plain in data:
                    break
            else:
                return []
        view = _View(data)
        found: list[Span] = []
        for form, start, end in self._matches(view.text):
            if form.base64:  # the neighbours hold some bits of the value if it is not at a 6-bit boundary
                start -= start > 0 and view.text[start - 1] in _IN_BASE64
                end += end < len(view.text) and view.text[end] in _IN_BASE64
            first, last = view.index(start), view.index(end - 1) + 1
            if last - first <= 4 * (end - start):
                found.append((first, last))
        return found

    def _matches(self, text: bytes) -> Iterator[tuple[_Form, int, int]]:
        for form, plain in self._plain:
            start = text.find(plain)
            while start >= 0:
                yield form, start, start + len(plain)
                start = text.find(plain, start + 1)
        for first, last in self._escaped(text):
            head = self._heads()
            at = head.search(text, first, last)
            while at is not None:
                for form in self._first.get(text[at.start()], ()):
                    end, _ = form.end(text, at.start())
                    if 0 <= end <= at.start() + self.longest:
                        yield form, at.start(), end
                at = head.search(text, at.start() + 1, last)

    def _escaped(self, text: bytes) -> Iterator[Span]:
        """Yield the parts of `text` that can contain matches with escapes or wraps; the parts do not overlap."""
        if self._introducer.search(text) is None:
            return
        first = last = -1
        for escape in self._escape.finditer(text):
            if escape.start() - self.longest > last:
                if last >= 0:
                    yield max(first, 0), last
                first = escape.start() - self.longest
            last = escape.end() + self.longest
        if last >= 0:
            yield max(first, 0), min(last, len(text))

    def _heads(self) -> re.Pattern[bytes]:
        """A pattern of the beginnings of all forms: unescaped with the next characters, or escaped."""
        if self._head is None:
            sources = {
                re.escape(raw) + b"".join(_wrappable(form, one) for one in form.elements[1:_HEAD])
                for form in self._forms
                for raw in form.elements[0].raw
            }
            sources |= {form.elements[0].escape.pattern for form in self._forms}
            self._head = re.compile(b"|".join(sorted(sources)))
        return self._head

    def partial(self, data: bytes) -> int:
        """Return the start of the longest tail of `data` that begins a form with `MIN_PARTIAL` characters or more;
        `len(data)` if there is none."""
        skipped = max(0, len(data) - 4 * (self.longest + MIN_COLUMN + _WRAP))
        view = _View(data[skipped:])
        text = view.text
        first = max(0, len(text) - self.longest)
        start = len(text)
        tail = text[first:]
        for rare, plain in self._begins:
            if rare in tail:
                start = min(start, _prefix(text, plain))
        if _MAY_ESCAPE.search(text, first) is not None:
            head = self._heads()
            at = head.search(text, first)
            while at is not None and at.start() < start:
                if any(form.end(text, at.start())[1] >= MIN_PARTIAL for form in self._first.get(text[at.start()], ())):
                    start = at.start()
                    break
                at = head.search(text, at.start() + 1)
        return skipped + view.index(start) if start < len(text) else len(data)

    def context(self, data: bytes) -> int:
        """Return the number of bytes at the end of `data` in which a later match may begin."""
        count = self.longest + MIN_COLUMN + _WRAP
        return count if b"\0" not in data[-count:] else 4 * count

    def hold(self, data: bytes) -> int:
        """Return the start of the bytes to hold back: a match after it may be incomplete, a match before it is not.

        A match ends at a line end, unless the line end may be a wrap or a value is not ASCII. The result depends on
        the values only by their length and by whether they are ASCII.
        """
        skipped = max(0, len(data) - 4 * (self.longest + MIN_COLUMN + _WRAP))
        view = _View(data[skipped:])
        text = view.text
        start = max(0, len(text) - self.longest - 2)
        end = len(text)
        while self._ascii and (end := max(text.rfind(b"\n", start, end), text.rfind(b"\r", start, end))) >= 0:
            before = end - (text[end : end + 1] == b"\n" and text[end - 1 : end] == b"\r")
            if _AFTER_RUN.match(text, before) is None:
                start = end + 1
                break
        if start >= len(text):
            return len(data)
        return skipped + (view.index(start) if start else 0)


def _rarity(octet: int) -> int:
    place = _FREQUENT.find(octet)
    return len(_FREQUENT) if place < 0 else place


def _prefix(text: bytes, plain: bytes) -> int:
    """Return the start of the longest tail of `text` that is a proper prefix of `plain`; len(text) if none."""
    at = text.find(plain[:MIN_PARTIAL], max(0, len(text) - len(plain) + 1))
    while at >= 0:
        if plain.startswith(text[at:]):
            return at
        at = text.find(plain[:MIN_PARTIAL], at + 1)
    return len(text)


def _wrappable(form: _Form, element: _Element) -> bytes:
    return (b"(?:\r?\n[ \t]{0,8}|\\\\{1,2}(?:r\\\\{1,2})?n)?" if form.base64 else b"") + element.source


class _View:
    """Data without its NUL bytes, and the mapping of positions back to the data."""

    __slots__ = ("_data", "_dense", "text")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._dense = b"\0" not in data
        self.text = data if self._dense else data.translate(None, b"\0")  # many NUL bytes cost no more than none

    def index(self, position: int) -> int:
        """Return the position in the data of byte `position` of the text; the data's length for the text's end."""
        if self._dense:
            return position
        if position >= len(self.text):
            return len(self._data)
        low, high = position, len(self._data) - 1
        while low < high:
            middle = (low + high) // 2
            if middle + 1 - self._data.count(b"\0", 0, middle + 1) > position:
                high = middle
            else:
                low = middle + 1
        return low
