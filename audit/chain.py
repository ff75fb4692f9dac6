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
- A checkpoint that says `next` is the last signature of its key: it certifies the key that signs from there on, and the
  key that signed it is destroyed (`audit.keys`). auditd cannot sign for the past.
- An `Anchor` is signed too and says how far the log had certainly grown: what is missing up to there was taken away.
- After the last anchor (a fraction of a second of records) lines can vanish unnoticed, and an unfinished last line is
  what a killed writer leaves: a note, not a finding.

auditd can rewrite what the present key signed, and replace the whole log: that is found by comparison with anchors kept
where auditd cannot write (`audit.anchors`).
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
    version: int = 2  # 1: of the former format, which had one key


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
    body = {"key": fingerprint(key.public_key()), **asdict(anchor)}
    signature = b64encode(key.sign(_ANCHOR_CONTEXT + canonical(body))).decode("ascii")
    return canonical({**body, "signature": signature}) + b"\n"


def read_anchor(keys: Callable[[str | None], Ed25519PublicKey | None], data: bytes) -> Anchor | None:
    """Return the anchor in `data`, or None if it is not one signed by a key of this log.

    Args:
        keys: returns the key of a fingerprint if it is one of this log's; of None, the log's first key, which signed
            what names no key.
    """
    try:
        body = json.loads(data)
        signature = b64decode(body["signature"], validate=True)
        signed = {name: value for name, value in body.items() if name != "signature"}
        key = keys(signed["key"] if signed["version"] == 2 else None)
        anchor = Anchor(**{name: value for name, value in signed.items() if name != "key"})
        if key is None:
            return None
        key.verify(signature, _ANCHOR_CONTEXT + canonical(signed))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidSignature):
        return None
    return anchor


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
