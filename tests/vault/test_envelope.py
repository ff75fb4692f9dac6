"""Properties of `vault.envelope`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vault.envelope import EnvelopeError, seal, subkey, unseal

KEY = bytes(range(32))
SALT = bytes(32)


@given(st.binary(max_size=300), st.binary(max_size=40), st.binary(min_size=32, max_size=32))
def test_what_was_sealed_opens_again(plaintext: bytes, context: bytes, salt: bytes) -> None:
    """Sealing and opening are inverse for the same key and context."""
    assert plaintext == unseal(KEY, context, seal(KEY, context, plaintext, salt=salt))


def test_every_single_bit_flip_is_detected() -> None:
    """No bit of an envelope can change, the version and the salt included."""
    envelope = seal(KEY, b"context", b"secret", salt=SALT)
    for bit in range(len(envelope) * 8):
        changed = bytearray(envelope)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(EnvelopeError):
            unseal(KEY, b"context", bytes(changed))


def test_every_truncation_is_detected() -> None:
    """A truncated envelope, and one with additional bytes, do not open."""
    envelope = seal(KEY, b"context", b"secret", salt=SALT)
    for changed in [envelope[:size] for size in range(len(envelope))] + [envelope + b"\0"]:
        with pytest.raises(EnvelopeError):
            unseal(KEY, b"context", changed)


@pytest.mark.parametrize(
    ("key", "context"),
    [(bytes(32), b"context"), (KEY, b"other"), (subkey(KEY, "a"), b"context")],
    ids=["another key", "another context", "a subkey"],
)
def test_another_key_or_context_does_not_open(key: bytes, context: bytes) -> None:
    """An envelope opens only with the key and context with which it was sealed."""
    with pytest.raises(EnvelopeError, match=r"^the envelope does not open$"):
        unseal(key, context, seal(KEY, b"context", b"secret", salt=SALT))


def test_purposes_have_different_keys() -> None:
    """Keys of different purposes are unrelated, of the same one equal."""
    assert subkey(KEY, "a") == subkey(KEY, "a")
    assert subkey(KEY, "a") != subkey(KEY, "b")


def test_the_form_is_the_documented_one() -> None:
    """A known vector: a change of the format must change the version."""
    assert "01" + "00" * 32 == seal(KEY, b"context", b"secret", salt=SALT)[:33].hex() and 33 + 6 + 16 == len(
        seal(KEY, b"context", b"secret", salt=SALT)
    )
