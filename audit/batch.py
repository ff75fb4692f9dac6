"""A batch of records for the log: the lines to write together, and the state of the chains after them.

Pure. A batch does not change the state from which it starts. The log adopts the new state after the lines are written,
and drops the batch if the write fails.

- If the time is before that of the previous line, the line has the field `clock_back`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from audit.chain import CHECKPOINT, CONTROL, ChainHead, extend_log, seal, seal_checkpoint
from audit.line import sealed
from audit.records import Fields, bounded, escaped

_TORN_KEPT: Final = 2048


@dataclass(frozen=True, slots=True)
class ChainEntry:
    """One record to append, without ts, chain, seq, prev and hash. `line` replaces `record` if it is given."""

    chain: str
    record: Fields = field(default_factory=dict)
    line: Any = None
    """An `audit.line.Line`."""


class Batch:
    """Lines to write together, and the state of the chains after the write."""

    def __init__(
        self, key: Ed25519PrivateKey, *, heads: Mapping[str, ChainHead], log: str, ts: str, last_ts: str
    ) -> None:
        """Begin at time `ts`, from the heads `heads`, the log hash `log` and the last line's time `last_ts`."""
        self._key = key
        self._old = heads
        self.ts = ts
        self._last_ts = last_ts
        self.heads: dict[str, ChainHead | None] = {}  # None: the chain is closed
        self.since: dict[str, int] = {}
        self.log = log
        self.lines: list[bytes] = []
        self.grown: dict[str, int] = {}  # bytes by chain

    def _head(self, chain: str) -> ChainHead:
        return (self.heads[chain] if chain in self.heads else self._old.get(chain)) or ChainHead()

    def add(self, entry: ChainEntry) -> int:
        """Add one record; return its sequence number."""
        if entry.line is not None:
            entry.line.chain, entry.line.ts = entry.chain, self.ts
            entry.line.clock_back = self._last_ts if self.ts < self._last_ts else msgspec.UNSET
            self._last_ts = self.ts
            line, head = sealed(entry.line, self._head(entry.chain))
        else:
            line, head = seal(self._dated(entry.chain, entry.record), self._head(entry.chain))
        self._push(line, entry.chain, head)
        return head.seq

    def checkpoint(self, chain: str, extra: Fields) -> int:
        """Add a signed checkpoint with the fields `extra`; return its sequence number."""
        record: Fields = {"kind": CHECKPOINT, "decision": "info", "producer": "auditd", **extra}
        if chain != CONTROL:
            record["sandbox"] = chain
        line, head = seal_checkpoint(self._key, self._dated(chain, record), self._head(chain))
        self._push(line, chain, None if extra.get("closed") else head)
        return head.seq

    def _dated(self, chain: str, record: Fields) -> Fields:
        dated: Fields = {**record, "chain": chain, "ts": self.ts}
        if self.ts < self._last_ts:
            dated["clock_back"] = self._last_ts
        self._last_ts = self.ts
        return dated

    def _push(self, line: bytes, chain: str, head: ChainHead | None) -> None:
        self.lines.append(line)
        self.grown[chain] = self.grown.get(chain, 0) + len(line)
        self.log = extend_log(self.log, line)
        self.heads[chain] = head


def gap_entry(chain: str, reason: str, count: int | None = None) -> ChainEntry:
    """Return a `gap` record of auditd: records of `chain` are missing. `count` is None if the number is unknown."""
    record: Fields = {"kind": "gap", "decision": "info", "producer": "auditd", "reason": reason}
    if count is not None:
        record["count"] = count
    if chain != CONTROL:
        record["sandbox"] = chain
    return ChainEntry(chain, record)


def torn_record(torn: bytes) -> Fields:
    """Return the `gap` record for bytes that were truncated at the end of a log."""
    text = torn[:_TORN_KEPT].decode("utf-8", "surrogateescape")
    fields: dict[str, Any] = {"torn": text, "reason": "an incomplete last line was truncated", "count": 1}
    if len(torn) > _TORN_KEPT:
        fields |= {"torn_sha256": hashlib.sha256(torn).hexdigest(), "torn_length": len(torn)}
    return {"kind": "gap", "decision": "info", "producer": "auditd", **escaped(bounded(fields))}
