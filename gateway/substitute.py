"""Puts secrets in place of placeholders in the text of one request. Pure.

- Matching is literal and case-sensitive, in one pass over the original text. At each place the longest placeholder
  wins. An inserted value is never read again.
- Each surface has its encoding of the value. A value cannot end the part of the request in which it stands.
- A match that begins inside an escape of the text (`%2f`, `\\u0041`) is none: the rest of the escape would join the
  value.
- In JSON only the contents of quoted strings are matched.
- The number of matches and the size of the result have limits.

No error message contains a value.
"""

import base64
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from functools import lru_cache
from urllib.parse import quote, quote_plus

from gateway.translate import Headers
from policy.injection import basic_login

MAX_MATCHES = 10_000
"""The limit of placeholders in one surface of a request."""
UNTOUCHED_HEADERS = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"te", b"trailer", b"forwarded"}
    | {b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"expect", b"content-encoding"}
)
"""Headers in which no placeholder is replaced, beside those that begin with `proxy-`."""

_MAX_TRIED = 10 * MAX_MATCHES
_SLICE = 1 << 16
_QUOTE = 0x22
_STRING = rb'(?:[^"\\]++|\\(?:u[0-9A-Fa-f]{4}|[^u]))*+'
_IN_STRING = re.compile(_STRING, re.DOTALL)
_OUTSIDE = re.compile(rb'[^"]*+(?:"' + _STRING + rb'"[^"]*+)*+', re.DOTALL)
_ESCAPE_BEFORE = re.compile(rb"%[0-9A-Fa-f]?\Z")


class TooMany(ValueError):
    """The request has more placeholders than the limit, or its result would be too large."""


class BodyForm(Enum):
    """How values are written into a body."""

    JSON = auto()
    FORM = auto()
    TEXT = auto()


def body_form(headers: Headers) -> BodyForm | None:
    """Return the form of the body that these headers announce; None if no placeholder is replaced in it."""
    named: dict[bytes, bytes] = {}
    for name, value in headers:
        if name.lower() in (b"content-type", b"content-encoding"):
            if name.lower() in named:
                return None
            named[name.lower()] = value
    if named.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
        return None
    kind, _, parameters = named.get(b"content-type", b"").partition(b";")
    kind = kind.strip().lower()
    charset = re.search(rb'charset\s*=\s*"?([^\s";]*)', parameters, re.IGNORECASE)
    if charset is not None and charset[1].lower() not in (b"utf-8", b"utf8", b"us-ascii", b"ascii"):
        return None
    if kind.startswith((b"multipart/", b"application/grpc")):
        return None
    if kind == b"application/json" or kind.endswith(b"+json"):
        return BodyForm.JSON
    return BodyForm.FORM if kind == b"application/x-www-form-urlencoded" else BodyForm.TEXT


def is_utf8(body: bytes) -> bool:
    """Whether a body is UTF-8. Reads it in slices: the text of a whole body can have four times its size."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(body), _SLICE):
            decoder.decode(body[start : start + _SLICE])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def takes_placeholders(name: bytes) -> bool:
    """Whether placeholders are replaced in a header of this name."""
    lower = name.lower()
    return lower not in UNTOUCHED_HEADERS and not lower.startswith(b"proxy-")


def in_target(text: bytes, placeholders: Iterable[str]) -> frozenset[str]:
    """Return the placeholders in a path or a query. Raises TooMany."""
    return _names(_in_target(text, frozenset(placeholders)))


def in_header(text: bytes, placeholders: Iterable[str]) -> frozenset[str]:
    """Return the placeholders in the value of a header. Raises TooMany."""
    return _names(_plain(text, frozenset(placeholders)))


def in_body(form: BodyForm, body: bytes, placeholders: Iterable[str]) -> frozenset[str]:
    """Return the placeholders in a body. Raises TooMany."""
    return _names(_in_body(form, body, frozenset(placeholders)))


def replaced_in_target(text: bytes, values: Mapping[str, str], limit: int) -> bytes:
    """Return a path or a query with each value percent-encoded; only unreserved characters stand for themselves.

    Raises:
        ValueError: a value must not be sent there, or the result is too large.
    """
    encoded = {placeholder: quote(value, safe="").encode("ascii") for placeholder, value in _lines(values).items()}
    return _spliced(text, _in_target(text, frozenset(values)), encoded, limit)


def replaced_in_header(text: bytes, values: Mapping[str, str], limit: int) -> bytes:
    """Return the value of a header with each value verbatim.

    Raises:
        ValueError: see `replaced_in_target`.
    """
    encoded: dict[str, bytes] = {}
    for placeholder, value in _lines(values).items():
        if not value.isascii() or value != value.strip(" "):
            raise ValueError("the secret has blanks at its edge or is not ASCII, so it cannot be sent in a header")
        encoded[placeholder] = value.encode("ascii")
    return _spliced(text, _plain(text, frozenset(values)), encoded, limit)


def replaced_password(text: bytes, value: str) -> bytes:
    """Return the value of a header with a Basic login, with another password.

    Raises:
        ValueError: the value must not be sent there, or there is no Basic login.
    """
    found = basic_login(text)
    if found is None:
        raise ValueError("there is no Basic login")
    password = _lines({"": value})[""].encode("utf-8")
    return b"Basic " + base64.b64encode(found[0] + b":" + password)


def replaced_in_body(form: BodyForm, body: bytes, values: Mapping[str, str], limit: int) -> bytes:
    """Return a body with each value in the encoding of its form.

    Raises:
        ValueError: see `replaced_in_target`.
    """
    encoded: dict[str, bytes] = {}
    for placeholder, value in _unicode(values).items():
        match form:
            case BodyForm.JSON:
                encoded[placeholder] = json.dumps(value)[1:-1].encode("ascii")
            case BodyForm.FORM:
                encoded[placeholder] = quote_plus(value).encode("ascii")
            case BodyForm.TEXT:
                encoded[placeholder] = value.encode("utf-8")
    return _spliced(body, _in_body(form, body, frozenset(values)), encoded, limit)


type _Match = tuple[int, int, str]
"""Begin, end and placeholder."""


def _unicode(values: Mapping[str, str]) -> Mapping[str, str]:
    if any("\ud800" <= character <= "\udfff" for value in values.values() for character in value):
        raise ValueError("the secret is not Unicode, so it cannot be sent")
    return values


def _lines(values: Mapping[str, str]) -> Mapping[str, str]:
    if any(character < " " or "\x7f" <= character <= "\x9f" for value in values.values() for character in value):
        raise ValueError("the secret has a control character, so it cannot be sent in the head of a request")
    return _unicode(values)


def _plain(text: bytes, placeholders: frozenset[str]) -> Iterator[_Match]:
    pattern, names = _pattern(placeholders)
    return ((found.start(), found.end(), names[found[0]]) for found in pattern.finditer(text))


def _in_target(text: bytes, placeholders: frozenset[str]) -> Iterator[_Match]:
    pattern, names = _pattern(placeholders)
    found = pattern.search(text)
    tried = 0
    while found is not None:
        tried += 1
        if tried > _MAX_TRIED:
            raise TooMany("the request has too many placeholders")
        inside = _ESCAPE_BEFORE.search(text, max(0, found.start() - 2), found.start())
        if inside is None:
            yield found.start(), found.end(), names[found[0]]
        found = pattern.search(text, found.end() if inside is None else found.start() + 1)


def _in_body(form: BodyForm, body: bytes, placeholders: frozenset[str]) -> Iterator[_Match]:
    match form:
        case BodyForm.JSON:
            return _in_json(body, placeholders)
        case BodyForm.FORM:
            return _in_target(body, placeholders)
        case BodyForm.TEXT:
            return _plain(body, placeholders)


def _in_json(body: bytes, placeholders: frozenset[str]) -> Iterator[_Match]:
    """Find placeholders in quoted strings. Each byte of the body is read once, whatever the number of matches."""
    pattern, names = _pattern(placeholders, json_text=True)
    quoted, known = False, 0  # whether the place `known`, which is between two characters, is inside a string
    found = pattern.search(body)
    tried = 0
    while found is not None:
        start, tried = found.start(), tried + 1
        if tried > _MAX_TRIED:
            raise TooMany("the request has too many placeholders")
        while known < start:
            known = _end(_IN_STRING if quoted else _OUTSIDE, body, known, start)
            if known == start or body[known] != _QUOTE:
                break
            quoted, known = not quoted, known + 1
        if quoted and known == start:
            yield start, found.end(), names[found[0]]
            known = found.end()
        found = pattern.search(body, max(known, start + 1))


def _end(pattern: re.Pattern[bytes], text: bytes, start: int, end: int) -> int:
    found = pattern.match(text, start, end)
    return start if found is None else found.end()


@lru_cache(maxsize=256)
def _pattern(placeholders: frozenset[str], *, json_text: bool = False) -> tuple[re.Pattern[bytes], dict[bytes, str]]:
    """Return a pattern of all placeholders, the longest first, and the placeholder of each text that it matches."""
    names: dict[bytes, str] = {}
    for placeholder in placeholders:
        text = json.dumps(placeholder, ensure_ascii=False)[1:-1] if json_text else placeholder
        names[text.encode("utf-8")] = placeholder
    longest_first = sorted(names, key=lambda text: (-len(text), text))
    return re.compile(b"|".join(map(re.escape, longest_first)) or rb"(?!)"), names


def _names(matches: Iterable[_Match]) -> frozenset[str]:
    found: set[str] = set()
    for count, (_, _, placeholder) in enumerate(matches):
        if count >= MAX_MATCHES:
            raise TooMany("the request has too many placeholders")
        found.add(placeholder)
    return frozenset(found)


def _spliced(text: bytes, matches: Iterable[_Match], encoded: Mapping[str, bytes], limit: int) -> bytes:
    parts: list[bytes] = []
    kept, size = 0, len(text)
    for count, (start, end, placeholder) in enumerate(matches):
        size += len(encoded[placeholder]) - (end - start)
        if count >= MAX_MATCHES or size > limit:
            raise TooMany("the request has too many placeholders")
        parts += [text[kept:start], encoded[placeholder]]
        kept = end
    return b"".join((*parts, text[kept:])) if parts else text
