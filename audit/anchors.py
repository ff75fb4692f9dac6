"""Anchors: copies of the log's state, kept where auditd cannot write, and the comparison of a log with them.

Pure. `wire.anchors` has the text form.

- `log` is the hash over all lines up to byte `offset` of file `file`. While that file exists, the comparison detects a
  change of any byte before that place. A log that ends before that place was truncated.
- `heads` has the last sequence numbers and hashes of the open chains (of all, or of those that grew since the anchor
  before). A head covers every earlier line of its chain, also after the file is retired and only the chain's share is
  left.
- `identity` is the log's first key, `key` the key in use. A different `identity` means that the log was replaced.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from wire.anchors import AnchorError, read_line
from wire.api.auditd import Anchor

MAX_LINE: Final = 4 * 1024 * 1024


def read_anchors(data: bytes) -> list[Anchor]:
    """Return the anchors in `data`, one per line. A last line without its end is ignored.

    Raises:
        AnchorError: there is no anchor, or a line is invalid.
    """
    lines = data.split(b"\n")
    whole = [line for line in lines[:-1] if line] or [line for line in lines if line]
    if not whole:
        raise AnchorError("there is no anchor in the file")
    return [read_line(line) for line in whole]


@dataclass(slots=True)
class Pins:
    """The anchors with which a log is compared during the read."""

    logs: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    """For each place in the log: log hash -> time of the anchor."""
    heads: dict[tuple[str, int], dict[str, tuple[str, int]]] = field(default_factory=dict)
    """For each chain and sequence number: hash -> time and newest file of the anchor."""
    identities: dict[str, str] = field(default_factory=dict)
    """First key -> time of the anchor."""
    found: set[tuple[str, int, str]] = field(default_factory=set)
    other: dict[tuple[str, int], str] = field(default_factory=dict)
    count: int = 0

    def add(self, anchor: Anchor) -> None:
        """Add an anchor to compare with."""
        self.count += 1
        self.identities.setdefault(anchor.identity, anchor.ts)
        self.logs.setdefault((anchor.file, anchor.offset), {}).setdefault(anchor.log, anchor.ts)
        for chain, head in anchor.heads.items():
            self.heads.setdefault((chain, head.seq), {}).setdefault(head.hash, (anchor.ts, anchor.file))

    def reached(self, file: int, offset: int, log: str) -> None:
        """Note the log hash at a place."""
        if (wanted := self.logs.get((file, offset))) is not None:
            wanted.pop(log, None)

    def seen(self, chain: str, seq: int, digest: str) -> None:
        """Note a line of the log."""
        if (wanted := self.heads.get((chain, seq))) is not None:
            if digest in wanted:
                self.found.add((chain, seq, digest))
            else:
                self.other[chain, seq] = digest

    def findings(self, identity: str, first: int, split: int, retired: Mapping[str, int]) -> list[str]:
        """Return the differences from the anchors, after the whole log was read.

        Args:
            identity: the fingerprint of the log's first key.
            first: the oldest file that still exists unchanged.
            split: the oldest file that was not split by chain; 0 if none was split.
            retired: for each chain without its beginning, the last retired sequence number.
        """
        out = [
            f"the log anchored at {ts} was another one: its first key was {other}"
            for other, ts in self.identities.items()
            if other != identity
        ]
        for (file, offset), wanted in sorted(self.logs.items()):
            if file >= min(first, split or 1):
                out += [
                    f"the log up to byte {offset} of file {file} is not as it was anchored at {ts}"
                    for ts in wanted.values()
                ]
        for (chain, seq), digests in sorted(self.heads.items()):
            for digest, (ts, file) in digests.items():
                if (chain, seq, digest) in self.found:
                    continue
                if (chain, seq) in self.other:
                    out.append(f"chain {chain}: sequence {seq} is not as it was anchored at {ts}")
                elif file < first and seq > retired.get(chain, seq):
                    out.append(f"chain {chain}: sequence {seq}, anchored at {ts}, is missing")
        return out
