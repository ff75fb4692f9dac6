"""The public keys of a log, one for each epoch, and the certificates between them.

Pure.

- The first key is the identity of the log. A verifier needs no other key.
- A certificate is one line of `keys/epochs.jsonl`: a key signs the next key, and is then destroyed. A valid signature
  of an epoch's key was made before the end of that epoch.
- The certificates stay when the files of their epochs are retired: about 250 bytes for each epoch.
"""

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from audit.chain import fingerprint
from audit.records import canonical

_CONTEXT: Final = b"sallyport-audit-epoch-v1\0"


def hexadecimal(key: Ed25519PublicKey) -> str:
    """Return the raw public key in hexadecimal, as in certificates and records."""
    return key.public_bytes_raw().hex()


def certificate(key: Ed25519PrivateKey, following: Ed25519PublicKey) -> bytes:
    """Return the line with which `key` certifies the key of the next epoch."""
    body = {"version": 1, "key": fingerprint(key.public_key()), "next": hexadecimal(following)}
    signature = b64encode(key.sign(_CONTEXT + canonical(body))).decode("ascii")
    return canonical({**body, "signature": signature}) + b"\n"


@dataclass(slots=True)
class Ring:
    """Public keys, the oldest first. The number of an epoch is the position of its key."""

    keys: list[Ed25519PublicKey]
    places: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = {fingerprint(key): place for place, key in enumerate(self.keys)}

    def key(self, name: str | None) -> Ed25519PublicKey | None:
        """Return the key with this fingerprint, None if it is unknown. For None, return the first key."""
        if name is None:
            return self.keys[0]
        return self.keys[self.places[name]] if name in self.places else None

    def add(self, key: Ed25519PublicKey) -> None:
        """Add the key of the next epoch. Raises ValueError for a known key."""
        if fingerprint(key) in self.places:
            raise ValueError("a key is certified twice")
        self.places[fingerprint(key)] = len(self.keys)
        self.keys.append(key)


def read_ring(identity: Ed25519PublicKey, data: bytes, *, check: bool = True) -> tuple[Ring, str | None]:
    """Return the keys that `data` certifies, beginning with `identity`, and the problem with the rest of `data`.

    Args:
        data: certificates. Bytes after the last line end come from a killed writer and are ignored.
        check: verify signatures. auditd does not verify its own file, which may have many.
    """
    ring = Ring([identity])
    lines = data.split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            body = json.loads(line)
            signature = b64decode(body.pop("signature"), validate=True)
            if body.keys() != {"version", "key", "next"} or body["version"] != 1:
                raise ValueError("not a certificate")
            if ring.places.get(body["key"]) != len(ring.keys) - 1:
                raise ValueError("not signed by the key before it")
            if check:
                ring.keys[-1].verify(signature, _CONTEXT + canonical(body))
            ring.add(public_key(body["next"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidSignature):
            return ring, f"keys/epochs.jsonl line {number}: the key before it did not certify this one"
    return ring, None


def public_key(text: str) -> Ed25519PublicKey:
    """Return the public key that `hexadecimal` names. Raises ValueError."""
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))
