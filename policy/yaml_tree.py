"""A strict reader of a subset of YAML. The result is a tree of nodes with line numbers.

- Plain `true`/`false`, decimal integers and `null` have their types. Every other scalar is text, also `no`, `1:30`,
  `0443`, `2026-01-01` and `1.5`, unlike in YAML 1.1.
- Refused, with the place: duplicate keys at any depth, keys that are not text, anchors, aliases, tags, merge keys,
  several documents, control characters, and more than the limits of size, depth and number of nodes.
- Time and memory are linear in the size of the text.
- After a duplicate key, an anchor, a tag or an alias the reader continues, to find further problems.

The module is independent of policies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from policy.problems import PolicyError, Problems

__all__ = ["MAX_BYTES", "MAX_DEPTH", "MAX_NODES", "Node", "PolicyError", "parse"]

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 16
MAX_NODES = 200_000

# libyaml if it is installed (ten times faster). Both report the same events and marks.
_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its position. The value of a mapping has its keys as nodes, too, in the order of the file."""

    value: "str | int | bool | tuple[Node, ...] | dict[str, tuple[Node, Node]] | None"
    line: int
    column: int


def parse(text: str | bytes, origin: str, problems: Problems | None = None) -> Node:
    """Return the tree of one YAML document.

    Args:
        problems: collects problems after which reading can continue; if None, they are raised.

    Raises:
        PolicyError: the text is not YAML of this subset.
    """
    noted = Problems() if problems is None else problems
    root = _parse(text, origin, noted)
    if problems is None:
        noted.check()
    return root


def _parse(text: str | bytes, origin: str, problems: Problems) -> Node:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(data) > MAX_BYTES:
        raise PolicyError(origin, 1, 1, f"file is larger than {MAX_BYTES} bytes")
    try:
        decoded = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PolicyError(origin, line, 1, "file is not UTF-8") from None
    try:
        return _Composer(yaml.parse(decoded, Loader=_LOADER), origin, problems).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        raise PolicyError(origin, line, column, error.problem or "not valid YAML") from None
    except yaml.YAMLError:
        raise PolicyError(
            origin, *_bad_character(decoded), "control character or other byte that YAML forbids"
        ) from None


class _Composer:
    """Turns events into nodes."""

    def __init__(self, events: Iterator[yaml.Event], origin: str, problems: Problems) -> None:
        self._events = events
        self._origin = origin
        self._problems = problems
        self._nodes = 0

    def document(self) -> Node:
        next(self._events)  # the stream's start
        event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent):
            raise PolicyError(self._origin, 1, 1, "file is empty")
        root = self._node(next(self._events), 0)
        next(self._events)  # the document's end
        event = next(self._events)
        if not isinstance(event, yaml.StreamEndEvent):
            raise self._error(event, "a second document in one file")
        return root

    def _node(self, event: Any, depth: int) -> Node:
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            raise self._error(event, "too many values or too deep a nesting")
        if isinstance(event, yaml.AliasEvent):
            self._problems.note(self._error(event, "aliases are not allowed"))
            return self._at(event, None)
        if event.anchor is not None:
            self._problems.note(self._error(event, "anchors are not allowed"))
        if event.tag is not None:
            self._problems.note(self._error(event, "tags are not allowed"))
        if isinstance(event, yaml.ScalarEvent):
            return self._at(event, _scalar(event.value) if event.implicit[0] else event.value)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._at(event, tuple(self._children(yaml.SequenceEndEvent, depth)))
        return self._at(event, self._mapping(depth))

    def _mapping(self, depth: int) -> dict[str, tuple[Node, Node]]:
        entries: dict[str, tuple[Node, Node]] = {}
        children = self._children(yaml.MappingEndEvent, depth)
        for key in children:
            value = next(children)
            if not isinstance(key.value, str):
                self._problems.note(PolicyError(self._origin, key.line, key.column, "a key must be text"))
            elif key.value in entries:
                duplicate = f"duplicate key {key.value[:100]!a}"
                self._problems.note(PolicyError(self._origin, key.line, key.column, duplicate))
            else:
                entries[key.value] = (key, value)
        return entries

    def _children(self, end: type[yaml.Event], depth: int) -> Iterator[Node]:
        while not isinstance(event := next(self._events), end):
            yield self._node(event, depth + 1)

    def _at(self, event: Any, value: Any) -> Node:
        return Node(value, event.start_mark.line + 1, event.start_mark.column + 1)

    def _error(self, event: Any, problem: str) -> PolicyError:
        return PolicyError(self._origin, event.start_mark.line + 1, event.start_mark.column + 1, problem)


def _scalar(text: str) -> str | int | bool | None:
    """Resolve a plain scalar."""
    match text:
        case "true" | "True" | "TRUE":
            return True
        case "false" | "False" | "FALSE":
            return False
        case "" | "~" | "null" | "Null" | "NULL":
            return None
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) <= 18 and (digits == "0" or digits[0] != "0"):
        return int(text)
    return text


def _bad_character(text: str) -> tuple[int, int]:
    """Find the first character that YAML forbids; the libraries do not agree on how to report it."""
    for position, character in enumerate(text):
        code = ord(character)
        allowed = character in "\t\n\r\x85" or 0x20 <= code < 0x7F or code >= 0xA0
        if not allowed or code in (0xFEFF, 0xFFFE, 0xFFFF):
            return text.count("\n", 0, position) + 1, position - (text.rfind("\n", 0, position) + 1) + 1
    return 1, 1
