"""The trust store of a sandbox in Java's format: a JKS file of the certificates in the PEM bundle.

Java has no environment variable for trust anchors. It reads the file `cacerts` of its own installation, which is the
same file for all Java packages of a distribution. The format is JKS (magic, version, entries, digest), which each
Java since 1.2 reads without a password, like its own store. Nothing here parses a certificate, because hostd runs as
root.
"""

import base64
import binascii
import hashlib
import re

PASSWORD = "changeit"  # noqa: S105 - the well-known one of every `cacerts`; it makes the digest, it hides nothing
_MAGIC, _VERSION, _TRUSTED = 0xFEEDFEED, 2, 2
_SALT = b"Mighty Aphrodite"
_BLOCK = re.compile(r"^-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]*)-----END CERTIFICATE-----", re.MULTILINE)


def certificates(bundle: str) -> list[bytes]:
    """Return the DER certificates of a PEM `bundle`, each once. A block that is no DER sequence is left out.

    The reason: Java refuses the whole store for one entry that it cannot read.
    """
    found: dict[bytes, None] = {}
    for block in _BLOCK.finditer(bundle):
        try:
            der = base64.b64decode("".join(block[1].split()), validate=True)
        except binascii.Error:
            continue
        if _is_sequence(der):
            found[der] = None
    return list(found)


def _is_sequence(der: bytes) -> bool:
    """Return whether `der` is exactly one ASN.1 sequence."""
    if len(der) < 4 or der[0] != 0x30:
        return False
    if der[1] < 0x80:
        return len(der) == 2 + der[1]
    size = der[1] & 0x7F
    return 1 <= size <= 4 and len(der) == 2 + size + int.from_bytes(der[2 : 2 + size])


def java_store(bundle: str) -> bytes:
    """Return a JKS trust store with the certificates of a PEM `bundle`; equal bundles give equal stores."""
    anchors = certificates(bundle)
    store = bytearray(b"".join(number.to_bytes(4) for number in (_MAGIC, _VERSION, len(anchors))))
    for index, der in enumerate(anchors):
        store += _TRUSTED.to_bytes(4) + _text(f"anchor-{index}") + (0).to_bytes(8)  # the entry's date: not set
        store += _text("X.509") + len(der).to_bytes(4) + der
    store += hashlib.sha1(PASSWORD.encode("utf-16-be") + _SALT + store, usedforsecurity=False).digest()
    return bytes(store)


def _text(text: str) -> bytes:
    data = text.encode("ascii")
    return len(data).to_bytes(2) + data
