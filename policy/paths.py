"""Request paths: detects ambiguous ones, and matches patterns.

Servers normalise paths in different ways. A path rule is reliable only if every server sees the path that the rule
judged. On hosts with path rules a path must be canonical, otherwise it is refused. No path is rewritten.

- If `ambiguity` returns None, none of these operations changes a segment boundary of the path: decoding, collapsing
  slashes, resolving dot segments, removing `;` parameters, removing trailing dots.
- A pattern that ends in `*` is a string prefix: `/v1/*` matches `/v1/` and all paths below. Other patterns are exact.
- Allow patterns are case-sensitive. Deny patterns ignore ASCII case. In both cases the stricter result applies.
"""

from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

MAX_PATH = 8192
MAX_PATTERN = 2048

_HEX = frozenset("0123456789abcdefABCDEF")
_UNRESERVED = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~")
_ASCII_LOWER = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz")


def ambiguity(path: str) -> str | None:
    """Return why a raw path is ambiguous, in a few words, or None if it is not."""
    if not path.startswith("/"):
        return "does not begin with a slash"
    if len(path) > MAX_PATH:
        return "path too long"
    for character in path:
        if character <= " " or character >= "\x7f":
            return "control character, blank or non-ASCII character"
        if character in '\\?#"<>^`{|}':
            return "character that a path does not have"
        if character == ";":
            return "path parameter"
    if "%" in path:
        problem = _escape_problem(path)
        if problem is not None:
            return problem
    return _segment_problem(path)


@dataclass(frozen=True, slots=True)
class PathPattern:
    """An exact path, or a prefix and `*`.

    Raises:
        ValueError: the text can never match a canonical path, or has a `*` before its end.
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
        problem = ambiguity(f"{stem}x" if self.prefix else stem)
        if problem is not None:
            raise ValueError(f"path pattern {self.text!a} never matches: {problem}")

    @property
    def prefix(self) -> bool:
        """Whether the pattern ends in `*`."""
        return self.text.endswith("*")

    @property
    def splits_segment(self) -> bool:
        """Whether the prefix ends inside a segment, so that `/v1*` also matches `/v10`."""
        return self.prefix and not self.text.endswith("/*")

    def matches(self, path: str) -> bool:
        """Whether the pattern matches an unambiguous path."""
        return path.startswith(self.text[:-1]) if self.prefix else path == self.text

    def matches_any_case(self, path: str) -> bool:
        """Whether the pattern matches an unambiguous path without regard to ASCII case; for denials."""
        pattern, path = self.text.translate(_ASCII_LOWER), path.translate(_ASCII_LOWER)
        return path.startswith(pattern[:-1]) if self.prefix else path == pattern

    def overlaps(self, other: "PathPattern") -> bool:
        """Whether both patterns match some path."""
        mine, theirs = self.text.removesuffix("*"), other.text.removesuffix("*")
        if self.prefix and other.prefix:
            return mine.startswith(theirs) or theirs.startswith(mine)
        if self.prefix:
            return theirs.startswith(mine)
        return other.matches(mine)


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
