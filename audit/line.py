"""Records of a gateway in the form that auditd reads and writes most often, without a dictionary for each.

Pure.

- `read` decodes and checks a record in one step: the same names, types and limits as `audit.records`. A record that
  would have to be truncated or escaped is left to the general way (None). So is one that is refused: the general way
  says why.
- A line that `sealed` writes is the same, byte for byte, as the one that `audit.chain.seal` writes.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from audit.chain import ChainHead
from audit.producers import WRITABLE
from audit.records import BOOLEANS, INTEGERS, LISTS, MAX_INTEGER, MAX_ITEMS, TEXTS, Decision

_SET_BY_AUDITD: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("accepted", "chain", "clock_back", "prev", "producer", "sandbox", "ts"), str),
    **dict.fromkeys(("generation", "seq"), int),
}
_DECISIONS = frozenset(decision.value for decision in Decision)
_UNSET = msgspec.UNSET
_WORD: Final = re.compile(r"[0-9A-Za-z-]{1,64}").fullmatch
_PATH: Final = re.compile(rf"[!$->@-\[\]-~]{{0,{TEXTS['path']}}}").fullmatch
"""Nothing of such a path is escaped or left out."""


def _text(limit: int) -> Any:
    return Annotated[str, msgspec.Meta(max_length=limit)]


def _fields() -> dict[str, Any]:
    found: dict[str, Any] = {name: _text(limit) for name, limit in TEXTS.items()}
    found |= {name: Annotated[int, msgspec.Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)] for name in INTEGERS}
    found |= dict.fromkeys(BOOLEANS, bool)
    found |= {
        name: Annotated[list[_text(limit)], msgspec.Meta(max_length=MAX_ITEMS)]  # type: ignore[misc]
        for name, limit in LISTS.items()
    }
    found |= _SET_BY_AUDITD
    return found | {"kind": str, "decision": str}


Line: Any = msgspec.defstruct(
    "Line",
    [(name, kind | msgspec.UnsetType, msgspec.UNSET) for name, kind in sorted(_fields().items())],
    kw_only=True,
    forbid_unknown_fields=True,
)
"""A record of a gateway. Its fields are sorted by name, so it is encoded in canonical form."""

_decode = msgspec.json.Decoder(Line).decode
_encode = msgspec.json.Encoder().encode
_convert = msgspec.convert


class Form:
    """A record of a gateway with fixed fields, and some that are given at each use.

    From its second use on, the record is a format for the given fields.

    Attributes:
        varying: the names of the fields that are given at each use: integers that are not negative, paths, or texts.
    """

    __slots__ = ("_fields", "_fits", "_format", "_used", "decision", "kind", "varying")

    def __init__(self, kind: str, decision: str, varying: tuple[str, ...], fields: Mapping[str, object]) -> None:
        self.kind = kind
        self.decision = decision
        self.varying = varying
        self._fields = fields
        self._fits = tuple(None if name in INTEGERS else _PATH if name == "path" else _WORD for name in varying)
        self._format: str | None = None
        self._used = False

    def fields(self, values: tuple[int | str, ...]) -> dict[str, Any]:
        """Return all fields of the record with `values`, which are in the order of `varying`."""
        return {**self._fields, **dict(zip(self.varying, values, strict=True))}

    def content(self, values: tuple[int | str, ...]) -> bytes | None:
        """Return what the function `content` returns for the record with `values`; None also if it is unusual."""
        if self._format is None:
            if not self._used:
                self._used = True
                return content(self.kind, self.decision, self.fields(values))
            self._format = self._prepared()
        if not self._format:
            return None
        for fits, value in zip(self._fits, values, strict=True):
            if type(value) is int:
                if fits is not None or not 0 <= value <= MAX_INTEGER:
                    return None
            elif fits is None or fits(value) is None:  # type: ignore[arg-type]
                return None
        return (self._format % values).encode("utf-8")

    def _prepared(self) -> str:
        """Return the record as a format for the values; empty if it is unusual."""
        samples = {name: 7 if name in INTEGERS else "7" for name in self.varying}
        made = content(self.kind, self.decision, {**self._fields, **samples})
        if made is None:
            return ""
        # A quote within a text is escaped, so a name between quotes occurs only where its field begins.
        form = made.decode("utf-8").replace("%", "%%")
        for name, sample in samples.items():
            if sample == 7:
                form = form.replace(f'"{name}":7', f'"{name}":%d')
            else:
                form = form.replace(f'"{name}":"7"', f'"{name}":"%s"')
        return form


def content(kind: str, decision: str, fields: Mapping[str, object]) -> bytes | None:
    """Return a gateway's record in the form that it has in a ring; None if it needs the general way.

    Fields with the value None are omitted.
    """
    given = {"kind": kind, "decision": decision, **fields}
    if None in given.values():
        given = {name: value for name, value in given.items() if value is not None}
    try:
        line = _convert(given, Line)
        if not _is_plain(line, WRITABLE):
            return None
        return _encode(line)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None


def read(content: bytes, kinds: frozenset[str]) -> Any:
    """Return the `Line` of a gateway's record, None if it needs the general way.

    Args:
        kinds: that the gateway may write.
    """
    if not content.isascii() or b"\\" in content or b"\x7f" in content:
        return None
    try:
        line = _decode(content)
    except msgspec.MsgspecError:
        return None
    return line if _is_plain(line, kinds) else None


def _is_plain(line: Any, kinds: frozenset[str]) -> bool:
    """Whether a line has only fields that its producer may set, and needs no truncation."""
    if line.kind not in kinds or line.decision not in _DECISIONS:
        return False
    if not line.accepted is line.chain is line.clock_back is line.prev is line.producer is _UNSET:
        return False
    if not line.generation is line.seq is line.sandbox is line.ts is _UNSET:
        return False
    path = line.path
    return path is _UNSET or not ("?" in path or "#" in path)


def sealed(line: Any, head: ChainHead) -> tuple[bytes, ChainHead]:
    """Return the line of a record after `head` of its chain, and the new head."""
    line.seq, line.prev = head.seq + 1, head.hash
    body = _encode(line)
    digest = hashlib.sha256(body).hexdigest()
    return b'%s,"hash":"%s"}\n' % (body[:-1], digest.encode("ascii")), ChainHead(line.seq, digest)
