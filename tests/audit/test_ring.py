"""The former key certifies each key of a log."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from audit.chain import fingerprint
from audit.ring import Ring, certificate, hexadecimal, public_key, read_ring

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([number] * 32)) for number in range(4)]
PUBLIC = [key.public_key() for key in KEYS]
NAMES = [hexadecimal(key) for key in PUBLIC]
LINES = [certificate(key, following) for key, following in zip(KEYS, PUBLIC[1:], strict=False)]


def names(data: bytes, *, check: bool = True) -> tuple[list[str], bool]:
    ring, problem = read_ring(PUBLIC[0], data, check=check)
    return [hexadecimal(key) for key in ring.keys], problem is None


def test_certificates_give_the_keys_in_order() -> None:
    assert (NAMES, True) == names(b"".join(LINES))
    assert (NAMES[:1], True) == names(b"")


def test_a_last_line_without_its_end_is_left_out() -> None:
    assert (NAMES[:3], True) == names(b"".join(LINES)[:-1])


@pytest.mark.parametrize(
    "lines",
    [
        LINES[1:],
        [LINES[0], LINES[2]],
        [LINES[0], LINES[0]],
        [LINES[0], certificate(KEYS[1], PUBLIC[0])],
        [LINES[0], b"{}\n"],
        [LINES[0], b"[" * 100_000 + b"\n"],
    ],
)
def test_the_ring_ends_before_a_key_that_the_key_before_did_not_certify(lines: list[bytes]) -> None:
    expected = NAMES[:1] if lines[0] is not LINES[0] else NAMES[:2]
    assert (expected, False) == names(b"".join(lines))


def test_a_signature_of_another_key_is_found_unless_signatures_are_trusted() -> None:
    own, other = (certificate(key, PUBLIC[1]) for key in (KEYS[0], KEYS[3]))
    forged = other.replace(fingerprint(PUBLIC[3]).encode(), fingerprint(PUBLIC[0]).encode())
    assert own != forged
    assert (NAMES[:1], False) == names(forged)
    assert (NAMES[:2], True) == names(forged, check=False)


def test_a_key_is_found_by_its_fingerprint_and_added_once() -> None:
    ring = Ring(PUBLIC[:1])
    ring.add(PUBLIC[1])
    assert PUBLIC[1] == ring.key(fingerprint(PUBLIC[1])) and PUBLIC[0] == ring.key(None)
    assert ring.key(fingerprint(PUBLIC[2])) is None
    with pytest.raises(ValueError, match="twice"):
        ring.add(PUBLIC[1])
    assert PUBLIC[0] == public_key(NAMES[0])
