"""Request paths: detects ambiguous ones, and matches patterns.

Servers normalise paths in different ways. A path rule is reliable only if every server sees the path that the rule
judged. On hosts with path rules a path must be canonical, otherwise it is refused. No path is rewritten.

- If `ambiguity` returns None, none of these operations changes a segment boundary of the path: decoding, collapsing
  slashes, resolving dot segments, removing `;` parameters, removing trailing dots.
- A rule can permit two forms for its requests: `%2F` in a segment, and empty segments (`Leniency`). Such a path has two
  readings. In the literal one `%2F` is data; in the routed one it is a slash, and slashes are collapsed. An allow
  pattern judges the literal reading. The routed reading must be unambiguous, and begins with the same prefix, so no
  reading leaves a prefix. A deny pattern judges the routed reading, which it matches if it matches the literal one.
- A pattern that ends in `*` is a string prefix: `/v1/*` matches `/v1/` and all paths below. Other patterns are exact.
- Allow patterns are case-sensitive. Deny patterns ignore ASCII case. In both cases the stricter result applies.
"""

import re
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

MAX_PATH = 8192
MAX_PATTERN = 2048

_UNFIT = re.compile(r"""[^!-~]|[\\?#"<>^`{|};]""")
_UNPRINTABLE = "control character, blank or non-ASCII character"
_HEX = frozenset("0123456789abcdefABCDEF")
_UNRESERVED = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~")
_ASCII_LOWER = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz")


@dataclass(frozen=True, slots=True)
class Leniency:
    """The forms of a path that are permitted although servers read them in two ways."""

    encoded_slashes: bool = False
    empty_segments: bool = False


STRICT = Leniency()
LENIENT = Leniency(encoded_slashes=True, empty_segments=True)


def literal(path: str) -> str:
    """Return the reading in which `%2F` is data: with its digits in upper case."""
    return path.replace("%2f", "%2F")


def routed(path: str) -> str:
    """Return the reading of a server that decodes `%2F` and collapses slashes before it routes the request."""
    return _collapsed(_decoded(path))


def readings(path: str) -> tuple[str, str]:
    """Return the literal and the routed reading of a path."""
    return literal(path), routed(path)


def ambiguity(path: str, leniency: Leniency = STRICT) -> str | None:
    """Return why a raw path is ambiguous, in a few words, or None if it is not.

    With a leniency, None means that the literal and the routed reading are the only ones. The path can then begin with
    one slash only: some servers read what follows `//` as a host.
    """
    if leniency == STRICT:
        return _strict_ambiguity(path)
    if len(path) > MAX_PATH:
        return "path too long"
    reading = _decoded(path) if leniency.encoded_slashes else path
    if leniency.empty_segments and not reading.startswith("//"):
        reading = _collapsed(reading)
    return _strict_ambiguity(reading)


def strict_pattern(text: str) -> "PathPattern":
    """Return a pattern for requests whose paths may not contain `%2F`.

    Raises:
        ValueError: see `PathPattern`.
    """
    pattern = PathPattern(text)
    if pattern.encoded_slashes:
        raise ValueError(f"path pattern {text!a} never matches: percent-encoded separator")
    return pattern


def _strict_ambiguity(path: str) -> str | None:
    if not path.startswith("/"):
        return "does not begin with a slash"
    if len(path) > MAX_PATH:
        return "path too long"
    unfit = _UNFIT.search(path)
    if unfit is not None:
        if unfit[0] == ";":
            return "path parameter"
        return "character that a path does not have" if "!" <= unfit[0] <= "~" else _UNPRINTABLE
    if "%" in path:
        problem = _escape_problem(path)
        if problem is not None:
            return problem
    return _segment_problem(path)


@dataclass(frozen=True, slots=True)
class PathPattern:
    """An exact path, or a prefix and `*`. It may contain `%2F`, for requests that may contain it, too.

    Raises:
        ValueError: the text can never match a path that `ambiguity` permits, or has a `*` before its end.
    """

    text: str

    def __post_init__(self) -> None:
        stem = self.text.removesuffix("*")
        if not self.text.startswith("/"):
            raise ValueError("path pattern must start with /")
        if len(self.text) > MAX_PATTERN:
            raise ValueError(f"path pattern is longer than {MAX_PATTERN} characters")
        if "*" in stem:
            raise ValueError(f"path pattern {self.text!a}: `*` is allowed at the end only")
        # A prefix such as `/v1/a.` may end where a whole path may not, so a letter completes its last segment.
        problem = ambiguity(f"{stem}x" if self.prefix else stem, Leniency(encoded_slashes=True))
        if problem is None and self.text != literal(self.text):
            problem = "an encoded slash is written %2F in a pattern"
        if problem is not None:
            raise ValueError(f"path pattern {self.text!a} never matches: {problem}")

    @property
    def encoded_slashes(self) -> bool:
        """Whether the pattern contains `%2F`."""
        return "%2F" in self.text

    @property
    def prefix(self) -> bool:
        """Whether the pattern ends in `*`."""
        return self.text.endswith("*")

    @property
    def splits_segment(self) -> bool:
        """Whether the prefix ends inside a segment, so that `/v1*` also matches `/v10`."""
        return self.prefix and not self.text.endswith("/*")

    def matches(self, path: str) -> bool:
        """Whether the pattern matches the literal reading of an unambiguous path."""
        path = literal(path)
        return path.startswith(self.text[:-1]) if self.prefix else path == self.text

    def matches_any_case(self, path: str) -> bool:
        """Whether the pattern matches a reading of an unambiguous path without regard to ASCII case; for denials.

        A denial has no `%2F`. If it matches the literal reading, it also matches the routed one.
        """
        pattern, path = self.text.translate(_ASCII_LOWER), routed(path).translate(_ASCII_LOWER)
        return path.startswith(pattern[:-1]) if self.prefix else path == pattern

    def overlaps(self, other: "PathPattern") -> bool:
        """Whether both patterns match some path."""
        mine, theirs = self.text.removesuffix("*"), other.text.removesuffix("*")
        if self.prefix and other.prefix:
            return mine.startswith(theirs) or theirs.startswith(mine)
        if self.prefix:
            return theirs.startswith(mine)
        return other.matches(mine)


def _decoded(path: str) -> str:
    return literal(path).replace("%2F", "/")


def _collapsed(path: str) -> str:
    while "//" in path:
        path = path.replace("//", "/")
    return path


def _escape_problem(path: str) -> str | None:
    position = path.find("%")
    while position >= 0:
        digits = path[position + 1 : position + 3]
        if len(digits) != 2 or not _HEX.issuperset(digits):
            return "broken percent-encoding"
        octet = int(digits, 16)
        if octet in _UNRESERVED:
            return "percent-encoded character that needs none"
        if octet < 0x20 or octet == 0x7F:
            return "percent-encoded control character"
        if octet in b"/\\;":
            return "percent-encoded separator"
        nested = path[position + 3 : position + 5]
        if octet == 0x25 and len(nested) == 2 and _HEX.issuperset(nested):
            return "nested percent-encoding"
        position = path.find("%", position + 3)
    try:
        unquote_to_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        return "percent-encoded text that is not UTF-8"
    return None


def _segment_problem(path: str) -> str | None:
    segments = path[1:].split("/")
    for position, segment in enumerate(segments):
        if not segment:
            # A slash at the end makes another path. At any other place it would make two consecutive slashes.
            if position != len(segments) - 1:
                return "empty segment"
        elif segment.replace("%20", ".").strip(".") == "":
            return "dot segment"
        elif segment.endswith((".", "%20")):
            return "segment ending in a dot or blank"
    return None
