"""Records of a gateway in the form that auditd reads and writes most often, without a dictionary for each.

Pure.

- `read` decodes and checks a record in one step: the same names, types and limits as `audit.records`. A record that
  would have to be truncated or escaped is left to the general way (None). So is one that is refused: the general way
  says why.
- A line that `sealed` writes is the same, byte for byte, as the one that `audit.chain.seal` writes.
"""

import hashlib
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
