"""Anchors: what is kept of a log where its writer cannot write, and the comparison with it.

Pure. `wire.anchors` has the text form.

- `log` is the hash over all lines up to byte `offset` of file `file`. As long as that file is there, no byte before
  that place can have changed. A log that ends before it was cut.
- `heads` says where open chains stood (all of them, or those that moved since the anchor before). A head binds every
  line of its chain before it, also when the file is retired and only the chain's own share is left.
- `identity` is the log's first key, `key` the one in use: another log in the place of this one is found by the first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from wire.anchors import AnchorError, read_line
from wire.api.auditd import Anchor

MAX_LINE: Final = 4 * 1024 * 1024


def read_anchors(data: bytes) -> list[Anchor]:
    """Return the anchors in `data`, one in each line. A last line without its end is what a killed writer leaves.

    Raises:
        AnchorError: there is none, or a line is no anchor.
    """
    lines = data.split(b"\n")
    whole = [line for line in lines[:-1] if line] or [line for line in lines if line]
    if not whole:
        raise AnchorError("there is no anchor in it")
    return [read_line(line) for line in whole]


@dataclass(slots=True)
class Pins:
    """Anchors that a log is compared with while it is read."""

    logs: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    """Time by log hash, by the place where it was so."""
    heads: dict[tuple[str, int], dict[str, tuple[str, int]]] = field(default_factory=dict)
    """Time and newest file by hash, by chain and sequence number."""
    identities: dict[str, str] = field(default_factory=dict)
    """Time by first key."""
    found: set[tuple[str, int, str]] = field(default_factory=set)
    other: dict[tuple[str, int], str] = field(default_factory=dict)
    count: int = 0

    def add(self, anchor: Anchor) -> None:
        """Compare with this anchor, too."""
        self.count += 1
        self.identities.setdefault(anchor.identity, anchor.ts)
        self.logs.setdefault((anchor.file, anchor.offset), {}).setdefault(anchor.log, anchor.ts)
        for chain, head in anchor.heads.items():
            self.heads.setdefault((chain, head.seq), {}).setdefault(head.hash, (anchor.ts, anchor.file))

    def reached(self, file: int, offset: int, log: str) -> None:
        """The log hash is `log` at this place."""
        if (wanted := self.logs.get((file, offset))) is not None:
            wanted.pop(log, None)

    def seen(self, chain: str, seq: int, digest: str) -> None:
        """The log has this line."""
        if (wanted := self.heads.get((chain, seq))) is not None:
            if digest in wanted:
                self.found.add((chain, seq, digest))
            else:
                self.other[chain, seq] = digest

    def findings(self, identity: str, first: int, split: int, retired: Mapping[str, int]) -> list[str]:
        """Say what is not as it was anchored, once the whole log was read.

        Args:
            identity: the fingerprint of the log's first key.
            first: the oldest file that is there as it was written.
            split: the oldest file that was not split by chain; 0 if none was.
            retired: for each chain that is there from its middle on, how far it was retired.
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
