"""Hash chains and signed checkpoints, and their verification.

Pure: functions from lines, keys and states to lines, states and findings.

A line is the canonical JSON of a record without its hash, to which the hash is then appended as the last member:

    {"chain":"sbx-..","decision":"deny",...,"prev":"<64 hex>","seq":7,"ts":"...","hash":"<64 hex>"}\\n

- `hash` is the SHA-256 of exactly the bytes before it (with the closing brace). It covers every byte of the line.
- `seq` counts from 1 within a chain. `prev` is the hash of the chain's previous line (64 zeros at the start). A chain
  belongs to one sandbox, or is `control`.
- The *log hash* covers all lines of all chains in file order: L(n) = SHA-256(L(n-1) || line). It fixes the order
  between chains, and one value identifies the whole log.
- A `checkpoint` record is signed (Ed25519, over its canonical bytes without signature). An attacker can change earlier
  lines and recompute every hash, but cannot sign the result. The first line of each file is a checkpoint with the heads
  of all open chains and the log hash, so the oldest files can be retired.
- A checkpoint with `next` is the last signature of its key. It certifies the next key, and the old key is destroyed
  (`audit.keys`). So auditd cannot sign for the past.
- A `SignedAnchor` is a signed statement of the length that the log certainly had. Lines that are missing before that
  place were removed.
- Lines after the last anchor (a fraction of a second of records) can vanish without detection. An incomplete last line
  comes from a killed writer: it is a note, not a finding.

auditd can rewrite the part that the present key signed, and can replace the whole log. Comparison with anchors that are
kept where auditd cannot write detects both (`audit.anchors`).
"""

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from audit.records import Fields, canonical
from wire.api.auditd import CONTROL_CHAIN

ZERO: Final = "0" * 64
CONTROL: Final = CONTROL_CHAIN
CHECKPOINT: Final = "checkpoint"
MAX_LINE: Final = 16 * 1024 * 1024
_CHECKPOINT_CONTEXT = b"sallyport-audit-checkpoint-v1\0"
_ANCHOR_CONTEXT = b"sallyport-audit-anchor-v1\0"
_TAIL = len(',"hash":""}\n') + 64


@dataclass(frozen=True, slots=True)
class ChainHead:
    """The sequence number and hash of a chain's last line."""

    seq: int = 0
    hash: str = ZERO


@dataclass(frozen=True, slots=True)
class SignedAnchor:
    """A signed statement of the log's length and state."""

    first: int  # number of the oldest file that must exist
    file: int  # number of the newest file
    offset: int  # bytes of it that are certainly on disk
    log: str  # the log hash at that point
    ts: str
    boot: str  # the host's boot id
    clean: bool  # written by an orderly shutdown; no line may follow
    version: int = 2  # 1: the former format, with one key


def seal(record: Mapping[str, Any], head: ChainHead) -> tuple[bytes, ChainHead]:
    """Return the line of `record` after `head` of its chain, and the new head."""
    body = canonical({**record, "seq": head.seq + 1, "prev": head.hash})
    digest = hashlib.sha256(body).hexdigest()
    return body[:-1] + b',"hash":"' + digest.encode("ascii") + b'"}\n', ChainHead(head.seq + 1, digest)


def extend_log(log: str, line: bytes) -> str:
    """Return the log hash after `line` (with its newline)."""
    return hashlib.sha256(bytes.fromhex(log) + line).hexdigest()


def seal_checkpoint(key: Ed25519PrivateKey, record: Fields, head: ChainHead) -> tuple[bytes, ChainHead]:
    """Like `seal`, for a checkpoint. The signature covers its whole content, also its place in the chain."""
    body = {**record, "key": fingerprint(key.public_key()), "seq": head.seq + 1, "prev": head.hash}
    signature = key.sign(_CHECKPOINT_CONTEXT + canonical(body))
    return seal({**body, "signature": b64encode(signature).decode("ascii")}, head)


def sign_anchor(key: Ed25519PrivateKey, anchor: SignedAnchor) -> bytes:
    """Return the content of `heads.json`."""
    body = {"key": fingerprint(key.public_key()), **asdict(anchor)}
    signature = b64encode(key.sign(_ANCHOR_CONTEXT + canonical(body))).decode("ascii")
    return canonical({**body, "signature": signature}) + b"\n"


def read_anchor(keys: Callable[[str | None], Ed25519PublicKey | None], data: bytes) -> SignedAnchor | None:
    """Return the anchor in `data`, None if no key of this log has signed it.

    Args:
        keys: returns this log's key for a fingerprint, and the log's first key for None. The first key signed anchors
            that name no key.
    """
    try:
        body = json.loads(data)
        signature = b64decode(body["signature"], validate=True)
        signed = {name: value for name, value in body.items() if name != "signature"}
        key = keys(signed["key"] if signed["version"] == 2 else None)
        anchor = SignedAnchor(**{name: value for name, value in signed.items() if name != "key"})
        if key is None:
            return None
        key.verify(signature, _ANCHOR_CONTEXT + canonical(signed))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidSignature):
        return None
    return anchor


def fingerprint(public_key: Ed25519PublicKey) -> str:
    """Return the SHA-256 of the raw public key, which an operator keeps elsewhere."""
    return hashlib.sha256(public_key.public_bytes(Encoding.Raw, PublicFormat.Raw)).hexdigest()


class LineError(ValueError):
    """A line that is not in the form that auditd writes."""


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the record of one line (with its newline). The line's own hash is checked, its place in the log is not.

    Raises:
        LineError: the line is invalid; the text is the reason.
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
        raise LineError("lacks a field that every record has")
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
