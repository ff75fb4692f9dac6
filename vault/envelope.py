"""Authenticated encryption of small records under one key. Pure: the salt comes from the caller.

    version (1 byte) | salt (32 bytes) | ChaCha20-Poly1305 ciphertext and tag

- Key and nonce of each envelope are derived from the key and its own 256-bit salt (HKDF-SHA256). So the number of
  envelopes with random salts has no limit.
- The version byte, the salt and the caller's context are authenticated: an envelope opens only with its own context.
- Every failure to open is the same `EnvelopeError`.

The index of `stores.directory` detects an older envelope of the same context.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

VERSION = 1
KEY_BYTES = 32
SALT_BYTES = 32
_HEADER = 1 + SALT_BYTES
_TAG = 16


class EnvelopeError(Exception):
    """The envelope was not sealed with this key and context, or was changed since."""


def seal(key: bytes, context: bytes, plaintext: bytes, *, salt: bytes) -> bytes:
    """Encrypt `plaintext` so that it opens only with the same key and context.

    Args:
        context: identifies kind and name of the content; neither secret nor stored.
        salt: 32 random bytes, never used twice with one key.
    """
    if len(key) != KEY_BYTES or len(salt) != SALT_BYTES:
        raise ValueError("key and salt are 32 bytes each")
    header = bytes([VERSION]) + salt
    cipher, nonce = _cipher(key, salt)
    return header + cipher.encrypt(nonce, plaintext, header + context)


def unseal(key: bytes, context: bytes, envelope: bytes) -> bytes:
    """Return the plaintext of an envelope.

    Raises:
        EnvelopeError: another key, another context, another version, or a changed envelope.
    """
    if len(key) != KEY_BYTES:
        raise ValueError("the key is 32 bytes")
    if len(envelope) < _HEADER + _TAG or envelope[0] != VERSION:
        raise EnvelopeError("the envelope does not open")
    header = envelope[:_HEADER]
    cipher, nonce = _cipher(key, header[1:])
    try:
        return cipher.decrypt(nonce, envelope[_HEADER:], header + context)
    except InvalidTag:
        raise EnvelopeError("the envelope does not open") from None


def subkey(key: bytes, purpose: str) -> bytes:
    """Derive the key of one purpose, so that an envelope of one store never opens in another."""
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"sallyport/vault/purpose/" + purpose.encode()).derive(key)


def _cipher(key: bytes, salt: bytes) -> tuple[ChaCha20Poly1305, bytes]:
    material = HKDF(SHA256(), KEY_BYTES + 12, salt=salt, info=b"sallyport/vault/envelope/1").derive(key)
    return ChaCha20Poly1305(material[:KEY_BYTES]), material[KEY_BYTES:]
