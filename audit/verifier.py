"""Verifies a log, line by line.

Pure: from lines, keys and anchors to findings, notes, and the state from which a writer continues.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from audit.anchors import Pins
from audit.chain import (
    CHECKPOINT,
    CONTROL,
    ZERO,
    ChainHead,
    LineError,
    SignedAnchor,
    check_signature,
    extend_log,
    fingerprint,
    parse_line,
)
from audit.producers import misplacement
from audit.ring import Ring, hexadecimal, public_key
from audit.shares import DIRECTORY, Kept, Share
from wire.api import auditd

_CHAIN: Final = b'"chain":"'  # keys are sorted and quotes in texts escaped, so the first match is the key
_NEXT: Final = b'"next":"'  # likewise: only a checkpoint with this key matches
MAX_FINDINGS: Final = 50


@dataclass(slots=True)
class Verifier:
    """Reads a log line by line and collects the problems.

    Feed each file in order: `begin_file`, `line` for each line (the last may lack its newline), then `finish`.
    `heads` and `log` are then the state a writer continues from.
    """

    ring: Ring
    anchor: SignedAnchor | None = None
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    suppressed: int = 0
    heads: dict[str, ChainHead] = field(default_factory=dict)
    log: str = ZERO
    boot: str = ""
    torn: bytes = b""
    records: int = 0
    checkpoints: int = 0
    offset: int = 0  # bytes of complete lines of the present file
    _file: int = 0
    _first: int = 0
    _line: int = 0
    last_ts: str = ""
    anchored: bool = False  # all lines up to the anchor were read
    epoch: int = -1  # number of the present epoch; after retired files the log can begin in any epoch
    pins: Pins = field(default_factory=Pins)
    _place: str = ""  # the chain of a share
    _kept: Kept | None = None
    _open: dict[str, ChainHead] = field(default_factory=dict)  # the heads at the end of the newest retired file
    _stated: dict[tuple[str, int], str] = field(default_factory=dict)  # hashes in checkpoints of retired files

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def state(self) -> auditd.Anchor:
        """Return an anchor of the present state of the log."""
        return auditd.Anchor(
            version=auditd.ANCHOR_VERSION,
            ts=self.last_ts,
            identity=fingerprint(self.ring.keys[0]),
            key=fingerprint(self.ring.keys[self.epoch]),
            file=self._file,
            offset=self.offset,
            log=self.log,
            heads={chain: auditd.Head(head.seq, head.hash) for chain, head in self.heads.items()},
        )

    def finding(self, text: str) -> None:
        """Add a finding: a reason not to trust the log."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(text)
        else:
            self.suppressed += 1

    def begin_shares(self, kept: Kept) -> None:
        """Begin with the shares of retired files: call `share` for the control chain, then for each other chain."""
        self._kept = kept
        policy = ", ".join(f"{name} {value}" for name, value in sorted(kept.policy.items()))
        self.notes.append(f"files before {kept.file} were retired: of each chain its share is kept ({policy})")
        if CONTROL not in kept.chains and kept.file > kept.began:
            self.finding("nothing is kept of the control chain, which never goes as a whole")
        if kept.began > 1:
            self.notes.append(f"files before {kept.began} were deleted by a former version")
        cut = {chain: share.seq for chain, share in kept.chains.items() if share.seq}
        if cut:
            most = max(cut, key=lambda chain: cut[chain])
            self.notes.append(
                f"retired by policy: the beginnings of {len(cut)} chains, {sum(cut.values())} records "
                f"({cut[most]} of {most})"
            )
        if kept.expired:
            self.notes.append(f"retired by policy: {kept.expired} chains of closed sandboxes")
        for chain, share in kept.chains.items():
            least = kept.policy.get("control_share" if chain == CONTROL else "sandbox_share", 0)
            if share.seq and kept.began == 1 and (size := sum(part.size for part in share.segments)) < least:
                self.finding(f"chain {chain}: only {size} bytes are kept, and the share of it is {least}")

    def share(self, chain: str, share: Share, lines: Iterable[bytes]) -> None:
        """Check the share of one chain."""
        self._place = f"{DIRECTORY}/{chain}"
        self._line = 0
        head, epoch, sizes = ChainHead(share.seq, share.hash), -1, 0
        for line in lines:
            self._line += 1
            sizes += len(line)
            try:
                record = parse_line(line)
            except LineError as error:
                self._bad(str(error))
                continue
            self.records += 1
            self.heads = {chain: head}
            if record["chain"] != chain:
                self._bad(f"this is a line of chain {record['chain']}")
                continue
            epoch = self._shared(record, epoch)
            head = self.heads.get(chain, ChainHead())
        self.heads = {}
        if (head, sizes) != (share.head, sum(part.size for part in share.segments)):
            self.finding(f"chain {chain}: what is kept of it is not what was signed")
        if chain == CONTROL:
            self.epoch = epoch
        if head.seq:
            self._open[chain] = head

    def _shared(self, record: dict[str, Any], epoch: int) -> int:
        """Check a line of a share; return the epoch after it."""
        signed = False
        if record["kind"] == CHECKPOINT:
            self.checkpoints += 1
            place = self.ring.places.get(str(record.get("key")))
            signed = place is not None and check_signature(self.ring.keys[place], record)
            if place is None or not signed:
                self._bad("checkpoint is not signed by this log's key")
            elif place < epoch or (record["chain"] == CONTROL and epoch >= 0 and place != epoch):
                self._bad(f"checkpoint is signed by the key of epoch {place + 1}, in epoch {epoch + 1}")
            else:
                epoch = place
                if "next" in record:
                    epoch += 1
                    if epoch >= len(self.ring.keys) or hexadecimal(self.ring.keys[epoch]) != record["next"]:
                        self._bad("the key of the next epoch is not the one in keys/epochs.jsonl")
        for name, (seq, digest) in record["heads"].items() if signed and "heads" in record else ():
            self._stated.setdefault((name, seq), digest)
        if self._stated.get((record["chain"], record["seq"]), record["hash"]) != record["hash"]:
            self._bad("this is not the line that a signed checkpoint of its time names")
        self._check_chain(record)
        return epoch

    def begin_file(self, number: int) -> None:
        """Continue with file `number`."""
        self._place = ""
        if self.torn:
            self._bad("ends in the middle of a line but is not the newest file")
            self.torn = b""
        if self._file and number != self._file + 1:
            self.finding(f"file {self._file + 1} is missing: after {self._file} comes {number}")
        self._first = self._first or number
        self._file, self._line, self.offset = number, 0, 0
        self.pins.reached(number, 0, self.log)
        if self.anchor is not None and number == self.anchor.file and self.anchor.offset == 0:
            self._pass_anchor()

    def lines(self, lines: Iterable[bytes]) -> None:
        """Feed several lines of the present file."""
        for line in lines:
            self.line(line)

    def line(self, line: bytes) -> None:
        """Check one line of the present file."""
        self._line += 1
        if not line.endswith(b"\n"):
            self.torn = line
            return
        try:
            record = parse_line(line)
        except LineError as error:
            self._bad(str(error))
        else:
            self._check(record)
        self.log = extend_log(self.log, line)
        self.records += 1
        self.offset += len(line)
        self.pins.reached(self._file, self.offset, self.log)
        anchor = self.anchor
        if anchor is not None and self._file == anchor.file and not self.anchored and self.offset >= anchor.offset:
            self._pass_anchor()

    def trust(self, lines: Iterable[bytes]) -> bool:
        """Accept the lines up to the anchor if the signed log hash covers exactly these. The header was fed before.

        The hash covers every byte of them, so they are unchanged since they were written. Only the heads of the chains
        are read. With this a log of millions of lines is opened in seconds, not minutes. Returns False, without a
        change of state, if the hash differs: `line` then finds the problem.
        """
        anchor = self.anchor
        if anchor is None or self._file != anchor.file or self._line != 1 or self.anchored or self.findings:
            return False
        log, offset, count, line = bytes.fromhex(self.log), self.offset, 0, b""
        newest: dict[bytes, bytes] = {}
        stated: list[bytes] = []
        for line in lines:
            log = hashlib.sha256(log + line).digest()
            offset += len(line)
            count += 1
            begin = line.find(_CHAIN) + len(_CHAIN)
            newest[line[begin : line.find(b'"', begin)]] = line
            if _NEXT in line:
                stated.append(line)
            if offset >= anchor.offset:
                break
        if (offset, log.hex()) != (anchor.offset, anchor.log):
            return False
        try:
            records = {name.decode(): parse_line(last) for name, last in newest.items()}
            last_ts = str(parse_line(line)["ts"])
            epoch = self.epoch + sum("next" in parse_line(one) for one in stated)
        except (LineError, UnicodeDecodeError):
            return False
        if any(record["chain"] != name for name, record in records.items()):
            return False
        for name, record in records.items():
            self.heads[name] = ChainHead(record["seq"], record["hash"])
            if record["kind"] == CHECKPOINT and record.get("closed") is True:
                del self.heads[name]
        self.log, self.offset, self.last_ts, self.anchored = log.hex(), offset, last_ts, True
        self.epoch = epoch
        self.records += count
        self._line += count
        return True

    def finish(self) -> None:
        """Compare with the anchors, after all lines were fed."""
        retired = {} if self._kept is None else {chain: share.seq for chain, share in self._kept.chains.items()}
        split = 0 if self._kept is None else self._kept.file
        for text in self.pins.findings(fingerprint(self.ring.keys[0]), self._first, split, retired):
            self.finding(text)
        if self.anchor is None:
            self.finding("heads.json is missing or not signed by this log's key")
            return
        # A writer that was killed between signature and deletion leaves files older than `first`. They are valid.
        first = self.anchor.first if self._kept is None else max(self.anchor.first, self._kept.file)
        if self._first > first or self._first == 0:
            self.finding(f"file {first} is missing: the log begins with file {self._first}")
        if not self.anchored:
            self.finding(
                f"the end of the log is missing: it was signed up to byte {self.anchor.offset} of file "
                f"{self.anchor.file}, but ends at byte {self.offset} of file {self._file}"
            )
        elif self.anchor.clean and (self._file, self.offset) != (self.anchor.file, self.anchor.offset):
            self.finding("lines follow after the signed end of an orderly shutdown")
        if self.torn:
            if self.anchor.clean:
                self._bad("half a line follows after the signed end of an orderly shutdown")
            else:
                self.notes.append(f"incomplete last line of {len(self.torn)} bytes: auditd was killed during the write")

    def _pass_anchor(self) -> None:
        anchor = self.anchor
        assert anchor is not None  # noqa: S101 - for mypy; callers have checked it
        self.anchored = True
        if self.offset != anchor.offset or self.log != anchor.log:
            self.finding(f"the log up to byte {anchor.offset} of file {anchor.file} is not the one that was signed")

    def _bad(self, text: str) -> None:
        self.finding(f"{self._here()}: {text}")

    def _here(self) -> str:
        return f"{self._place or f'file {self._file}'} line {self._line}"

    def _check(self, record: dict[str, Any]) -> None:
        is_checkpoint = record["kind"] == CHECKPOINT
        signed = is_checkpoint and self._signed(record)
        if is_checkpoint:
            self.checkpoints += 1
        if self._line == 1:
            self._header(record, signed=signed)
        elif signed and record.get("log", self.log) != self.log:
            self._bad("the lines before this checkpoint are not the ones it was signed for")
        if record["ts"] < self.last_ts and "clock_back" not in record:
            self._bad("its time lies before the previous line's, and the writer did not say so")
        self.last_ts = record["ts"]
        self._check_chain(record)
        if is_checkpoint:
            self.boot = str(record.get("boot", self.boot))
            if signed and "next" in record:
                self._next_epoch(str(record["next"]))

    def _check_chain(self, record: dict[str, Any]) -> None:
        """Check the place of a line in its chain, and whether its producer may write it there."""
        if (why := misplacement(record, CONTROL)) is not None:
            self._bad(why)
        chain = record["chain"]
        head = self.heads.get(chain, ChainHead())
        if record["seq"] != head.seq + 1:
            self._bad(f"chain {chain}: sequence {record['seq']} follows {head.seq}")
        elif record["prev"] != head.hash:
            self._bad(f"chain {chain}: sequence {record['seq']} does not continue the line before it")
        if chain not in (CONTROL, record.get("sandbox")):
            self._bad(f"chain {chain} holds a record of sandbox {record.get('sandbox')}")
        self.heads[chain] = ChainHead(record["seq"], record["hash"])
        self.pins.seen(chain, record["seq"], record["hash"])
        if record["kind"] == CHECKPOINT:
            if record.get("closed") is True:
                del self.heads[chain]
        elif record["kind"] == "gap":
            self.notes.append(
                f"{self._here()}: gap in chain {chain} at {record['ts']}: "
                f"{record.get('count', 'unknown')} ({record.get('reason', '')})"
            )
            del self.notes[MAX_FINDINGS:]

    def _signed(self, record: dict[str, Any]) -> bool:
        """Whether a checkpoint is signed by the key of its epoch."""
        place = self.ring.places.get(str(record.get("key")))
        if place is None or not check_signature(self.ring.keys[place], record):
            self._bad("checkpoint is not signed by this log's key")
            return False
        if self.epoch < 0:
            self.epoch = place if self._first > 1 else 0  # the shares of retired files determine it
        if place != self.epoch:
            self._bad(f"checkpoint is signed by the key of epoch {place + 1}, in epoch {self.epoch + 1}")
            return False
        return True

    def _next_epoch(self, key: str) -> None:
        self.epoch += 1
        if self.epoch == len(self.ring.keys):  # its certificate is missing, or was missing when the ring was read
            try:
                self.ring.add(public_key(key))
            except ValueError as error:
                self._bad(f"the key of the next epoch cannot be one: {error}")
        elif hexadecimal(self.ring.keys[self.epoch]) != key:
            self._bad("the key of the next epoch is not the one in keys/epochs.jsonl")

    def _header(self, record: dict[str, Any], *, signed: bool) -> None:
        """Check the first line of a file: its heads and log hash must equal those of the lines before it."""
        if not signed or not {"heads", "log", "file"} <= record.keys():
            self._bad("a file must begin with a signed checkpoint of all chains")
            return
        log = str(record["log"])
        stated = {chain: ChainHead(int(seq), str(digest)) for chain, (seq, digest) in record["heads"].items()}
        if record["file"] != self._file:
            self._bad(f"this is the content of file {record['file']}")
        if "mismatch" in record:
            self._bad(f"auditd found the log changed: {record['mismatch']}")
        elif self._file == self._first:
            if self._file == 1 and (log != ZERO or stated):
                self._bad("the first file says that others came before it")
            for chain, head in self._open.items():
                if stated.get(chain) != head:
                    self._bad(f"chain {chain} did not stand where what is kept of it ends")
            if self._kept is not None and self._kept.began == 1:  # only a closed chain is deleted as a whole
                for chain in sorted(stated.keys() - self._open.keys()):
                    self._bad(f"nothing is kept of chain {chain}, which was open")
        elif log != self.log:
            self._bad("what this file says about the lines before it is not what they are")
        elif stated != self.heads:
            self._bad("what this file says about the chains before it is not what they are")
        self.heads, self.log = stated, log
