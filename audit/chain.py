"""Hash chains, signed checkpoints, and the check of both.

Pure: it is given lines, keys and states and gives back lines, states and findings.

A line is the canonical JSON of a record without its hash, to which the hash is then appended as the last member:

    {"chain":"sbx-..","decision":"deny",...,"prev":"<64 hex>","seq":7,"ts":"...","hash":"<64 hex>"}\\n

- `hash` is the SHA-256 of exactly the bytes before it (with the closing brace), so no byte of a line can change.
- `seq` counts from 1 within a chain and `prev` is the hash of the chain's previous line (64 zeros at the start). A
  chain is one sandbox's story, or `control`.
- The *log hash* runs over all lines of all chains in file order: L(n) = SHA-256(L(n-1) || line). It binds the order
  between chains and makes one value stand for the whole log.
- A `checkpoint` record is signed (Ed25519, over its canonical bytes without signature): whoever edits earlier lines
  and recomputes every hash has no signature for the result. The first line of each file is a checkpoint that states
  the heads of all open chains and the log hash, so files can be retired from the front.
- An `Anchor` is signed too and says how far the log had certainly grown: what is missing up to there was taken away.
- After the last anchor (a fraction of a second of records) lines can vanish unnoticed, and an unfinished last line is
  what a killed writer leaves: a note, not a finding.

The key that signs lies beside the log, readable by auditd alone. Whoever has it, or replaces it and the whole log,
is found only by comparing the public key's fingerprint with one kept elsewhere.
"""

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from audit.records import Fields, canonical

ZERO: Final = "0" * 64
CONTROL: Final = "control"
CHECKPOINT: Final = "checkpoint"
MAX_LINE: Final = 16 * 1024 * 1024
_CHECKPOINT_CONTEXT = b"sallyport-audit-checkpoint-v1\0"
_ANCHOR_CONTEXT = b"sallyport-audit-anchor-v1\0"
_TAIL = len(',"hash":""}\n') + 64
_CHAIN = b'"chain":"'  # keys are sorted and a text's quotes escaped: its first place in a line is the chain's name
MAX_FINDINGS: Final = 50


@dataclass(frozen=True, slots=True)
class Head:
    """Where a chain stands: the sequence number and hash of its last line."""

    seq: int = 0
    hash: str = ZERO


@dataclass(frozen=True, slots=True)
class Anchor:
    """A signed statement of how far the log had grown."""

    first: int  # number of the oldest file that must exist
    file: int  # number of the newest file
    offset: int  # bytes of it that are certain
    log: str  # the log hash at that point
    ts: str
    boot: str  # the host's boot id
    clean: bool  # written by an orderly shutdown: nothing may follow


def seal(record: Mapping[str, Any], head: Head) -> tuple[bytes, Head]:
    """Return the line that continues a chain standing at `head` with `record`, and the new head."""
    body = canonical({**record, "seq": head.seq + 1, "prev": head.hash})
    digest = hashlib.sha256(body).hexdigest()
    return body[:-1] + b',"hash":"' + digest.encode("ascii") + b'"}\n', Head(head.seq + 1, digest)


def extend_log(log: str, line: bytes) -> str:
    """Return the log hash after `line` (with its newline)."""
    return hashlib.sha256(bytes.fromhex(log) + line).hexdigest()


def seal_checkpoint(key: Ed25519PrivateKey, record: Fields, head: Head) -> tuple[bytes, Head]:
    """As `seal`, for a checkpoint: signed over all of its content, its place in the chain included."""
    body = {**record, "key": fingerprint(key.public_key()), "seq": head.seq + 1, "prev": head.hash}
    signature = key.sign(_CHECKPOINT_CONTEXT + canonical(body))
    return seal({**body, "signature": b64encode(signature).decode("ascii")}, head)


def sign_anchor(key: Ed25519PrivateKey, anchor: Anchor) -> bytes:
    """Return the content of `heads.json`."""
    body = _anchor_body(anchor)
    signature = b64encode(key.sign(_ANCHOR_CONTEXT + canonical(body))).decode("ascii")
    return canonical({**body, "signature": signature}) + b"\n"


def read_anchor(public_key: Ed25519PublicKey, data: bytes) -> Anchor | None:
    """Return the anchor in `data`, or None if it is not one signed by this key."""
    try:
        body = json.loads(data)
        signature = b64decode(body.pop("signature"), validate=True)
        body.pop("version")
        anchor = Anchor(**body)
        public_key.verify(signature, _ANCHOR_CONTEXT + canonical(_anchor_body(anchor)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidSignature):
        return None
    return anchor


def _anchor_body(anchor: Anchor) -> Fields:
    return {
        "version": 1,
        "first": anchor.first,
        "file": anchor.file,
        "offset": anchor.offset,
        "log": anchor.log,
        "ts": anchor.ts,
        "boot": anchor.boot,
        "clean": anchor.clean,
    }


def fingerprint(public_key: Ed25519PublicKey) -> str:
    """Return the SHA-256 of the raw public key: what an operator writes down elsewhere."""
    return hashlib.sha256(public_key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()


class LineError(ValueError):
    """A line that auditd cannot have written."""


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the record of one line (with its newline), its own hash checked, its place in the log not.

    Raises:
        LineError: with the reason.
    """
    if not line.endswith(b'"}\n') or len(line) < _TAIL + 2 or line[-_TAIL:-67] != b',"hash":"':
        raise LineError("not a record line")
    if len(line) > MAX_LINE:
        raise LineError("line too long")
    body = line[:-_TAIL] + b"}"
    digest = hashlib.sha256(body).hexdigest()
    if digest.encode("ascii") != line[-67:-3]:
        raise LineError("content does not match its hash")
    try:
        record = json.loads(body)
        again = canonical(record)
    except (ValueError, RecursionError):
        raise LineError("not JSON") from None
    if again != body or not isinstance(record, dict) or "hash" in record:
        raise LineError("not in canonical form")
    texts = ("chain", "prev", "ts", "kind", "decision", "producer")
    if not isinstance(record.get("seq"), int) or not all(isinstance(record.get(name), str) for name in texts):
        raise LineError("lacks what every record has")
    record["hash"] = digest
    return record


def check_signature(public_key: Ed25519PublicKey, record: Mapping[str, Any]) -> bool:
    """Whether checkpoint `record`, as `parse_line` returned it, is signed by `public_key`."""
    body = {name: value for name, value in record.items() if name not in ("hash", "signature")}
    try:
        public_key.verify(b64decode(str(record["signature"]), validate=True), _CHECKPOINT_CONTEXT + canonical(body))
    except (ValueError, KeyError, InvalidSignature):
        return False
    return True


@dataclass(slots=True)
class Verifier:
    """Reads a log line by line and collects what is wrong with it.

    Feed each file in order: `begin_file`, `line` for each line (the last may lack its newline), then `finish`.
    `heads` and `log` are then the state a writer continues from.
    """

    public_key: Ed25519PublicKey
    anchor: Anchor | None = None
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    suppressed: int = 0
    heads: dict[str, Head] = field(default_factory=dict)
    log: str = ZERO
    boot: str = ""
    torn: bytes = b""
    records: int = 0
    checkpoints: int = 0
    offset: int = 0  # bytes of whole lines of the present file
    _file: int = 0
    _first: int = 0
    _line: int = 0
    last_ts: str = ""
    anchored: bool = False  # everything up to the anchor has been seen

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def finding(self, text: str) -> None:
        """Add a reason to distrust the log."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(text)
        else:
            self.suppressed += 1

    def begin_file(self, number: int) -> None:
        """Go on to file `number`."""
        if self.torn:
            self._bad("ends in the middle of a line but is not the newest file")
            self.torn = b""
        if self._file and number != self._file + 1:
            self.finding(f"file {self._file + 1} is missing: after {self._file} comes {number}")
        self._first = self._first or number
        self._file, self._line, self.offset = number, 0, 0
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
        anchor = self.anchor
        if anchor is not None and self._file == anchor.file and not self.anchored and self.offset >= anchor.offset:
            self._pass_anchor()

    def trust(self, lines: Iterable[bytes]) -> bool:
        """Take over the lines up to the anchor if they are the very ones it was signed for; the header was fed before.

        The signed log hash binds every byte of them: what was right when it was written is right, and only where each
        chain stands is read. A log of millions of lines is continued in seconds so, not minutes. Returns False, with
        nothing changed, if they are others: then `line` finds out what is wrong with them.
        """
        anchor = self.anchor
        if anchor is None or self._file != anchor.file or self._line != 1 or self.anchored or self.findings:
            return False
        log, offset, count, line = bytes.fromhex(self.log), self.offset, 0, b""
        newest: dict[bytes, bytes] = {}
        for line in lines:
            log = hashlib.sha256(log + line).digest()
            offset += len(line)
            count += 1
            begin = line.find(_CHAIN) + len(_CHAIN)
            newest[line[begin : line.find(b'"', begin)]] = line
            if offset >= anchor.offset:
                break
        if (offset, log.hex()) != (anchor.offset, anchor.log):
            return False
        try:
            records = {name.decode(): parse_line(last) for name, last in newest.items()}
            last_ts = str(parse_line(line)["ts"])
        except (LineError, UnicodeDecodeError):
            return False
        if any(record["chain"] != name for name, record in records.items()):
            return False
        for name, record in records.items():
            self.heads[name] = Head(record["seq"], record["hash"])
            if record["kind"] == CHECKPOINT and record.get("closed") is True:
                del self.heads[name]
        self.log, self.offset, self.last_ts, self.anchored = log.hex(), offset, last_ts, True
        self.records += count
        self._line += count
        return True

    def finish(self) -> None:
        """Compare with the anchor once all lines were fed."""
        if self.anchor is None:
            self.finding("heads.json is missing or not signed by this log's key")
            return
        # A writer killed between signing and deleting leaves files older than `first`: harmless, they chain.
        if self._first > self.anchor.first or self._first == 0:
            self.finding(f"file {self.anchor.first} is missing: the log begins with file {self._first}")
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
                self.notes.append(f"torn last line of {len(self.torn)} bytes: the writer was killed while writing it")

    def _pass_anchor(self) -> None:
        anchor = self.anchor
        assert anchor is not None  # noqa: S101 - for the type checker; callers have looked
        self.anchored = True
        if self.offset != anchor.offset or self.log != anchor.log:
            self.finding(f"the log up to byte {anchor.offset} of file {anchor.file} is not the one that was signed")

    def _bad(self, text: str) -> None:
        self.finding(f"file {self._file} line {self._line}: {text}")

    def _check(self, record: dict[str, Any]) -> None:
        is_checkpoint = record["kind"] == CHECKPOINT
        signed = is_checkpoint and check_signature(self.public_key, record)
        if is_checkpoint:
            self.checkpoints += 1
            if not signed:
                self._bad("checkpoint is not signed by this log's key")
        if self._line == 1:
            self._header(record, signed=signed)
        elif signed and record.get("log", self.log) != self.log:
            self._bad("the lines before this checkpoint are not the ones it was signed for")
        chain = record["chain"]
        head = self.heads.get(chain, Head())
        if record["seq"] != head.seq + 1:
            self._bad(f"chain {chain}: sequence {record['seq']} follows {head.seq}")
        elif record["prev"] != head.hash:
            self._bad(f"chain {chain}: sequence {record['seq']} does not continue the line before it")
        if chain not in (CONTROL, record.get("sandbox")):
            self._bad(f"chain {chain} holds a record of sandbox {record.get('sandbox')}")
        if record["ts"] < self.last_ts and "clock_back" not in record:
            self._bad("its time lies before the previous line's, and the writer did not say so")
        self.last_ts = record["ts"]
        self.heads[chain] = Head(record["seq"], record["hash"])
        if is_checkpoint:
            self.boot = str(record.get("boot", self.boot))
            if record.get("closed") is True:
                del self.heads[chain]
        elif record["kind"] == "gap":
            self.notes.append(
                f"file {self._file} line {self._line}: gap in chain {chain} at {record['ts']}: "
                f"{record.get('count', 'unknown')} ({record.get('reason', '')})"
            )
            del self.notes[MAX_FINDINGS:]

    def _header(self, record: dict[str, Any], *, signed: bool) -> None:
        """Check the first line of a file: what it says of all lines before it."""
        if not signed or not {"heads", "log", "file"} <= record.keys():
            self._bad("a file must begin with a signed checkpoint of all chains")
            return
        log = str(record["log"])
        stated = {chain: Head(int(seq), str(digest)) for chain, (seq, digest) in record["heads"].items()}
        if record["file"] != self._file:
            self._bad(f"this is the content of file {record['file']}")
        if "mismatch" in record:
            self._bad(f"auditd found the log changed: {record['mismatch']}")
        elif self._file == self._first:
            if self._file == 1 and (log != ZERO or stated):
                self._bad("the first file says that others came before it")
        elif log != self.log:
            self._bad("what this file says about the lines before it is not what they are")
        elif stated != self.heads:
            self._bad("what this file says about the chains before it is not what they are")
        self.heads, self.log = stated, log
