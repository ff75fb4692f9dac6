"""A change anywhere in a line of a chain is detected."""

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from audit.chain import (
    ZERO,
    ChainHead,
    LineError,
    SignedAnchor,
    check_signature,
    fingerprint,
    parse_line,
    read_anchor,
    seal,
    seal_checkpoint,
    sign_anchor,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
RECORD = {
    "kind": "request",
    "decision": "deny",
    "producer": "gateway",
    "chain": "sbx-1",
    "sandbox": "sbx-1",
    "ts": "2026-01-01T00:00:00.000Z",
    "host": "bücher.example",
    "path": "/a",
    "port": 443,
}


def _key(name: str | None) -> Ed25519PublicKey | None:
    key = KEY.public_key()
    return key if name in (None, fingerprint(key)) else None


LINE, HEAD = seal(RECORD, ChainHead(6, "a" * 64))
ANCHOR = SignedAnchor(1, 2, 300, "b" * 64, "2026-01-01T00:00:00.000Z", "boot", False)


def test_a_sealed_line_reads_back() -> None:
    assert parse_line(LINE) == {**RECORD, "seq": 7, "prev": "a" * 64, "hash": HEAD.hash}


@given(st.integers(0, len(LINE) - 1), st.integers(1, 255))
def test_any_changed_byte_is_detected(place: int, change: int) -> None:
    damaged = bytearray(LINE)
    damaged[place] ^= change
    with pytest.raises(LineError):
        parse_line(bytes(damaged))


@given(st.integers(0, len(LINE) - 1), st.integers(1, 40))
def test_any_removed_piece_is_detected(place: int, count: int) -> None:
    with pytest.raises(LineError):
        parse_line(LINE[:place] + LINE[place + count :])


@given(st.binary(max_size=300))
def test_what_is_not_a_line_is_refused_not_a_crash(data: bytes) -> None:
    with pytest.raises(LineError):
        parse_line(data + b"\n")


@pytest.mark.parametrize("body", [b'{"a":1,"a":1}', b'{"b":1,"a":1}', b'{"a": 1}', b"[1]", b'{"a":"\\u0061"}', b"{}"])
def test_a_right_hash_over_bytes_that_are_not_canonical_is_refused(body: bytes) -> None:
    import hashlib

    line = body[:-1] + b',"hash":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    with pytest.raises(LineError):
        parse_line(line)


def test_a_checkpoint_is_signed_over_all_it_says() -> None:
    record = {**RECORD, "kind": "checkpoint"}
    parsed = parse_line(seal_checkpoint(KEY, record, ChainHead())[0])
    assert check_signature(KEY.public_key(), parsed)
    for name in parsed.keys() - {"hash", "signature"}:
        changed = {**parsed, name: "other"}
        assert not check_signature(KEY.public_key(), changed), name
    assert not check_signature(Ed25519PrivateKey.generate().public_key(), parsed)
    for noise in (" ", "\n", "!"):  # a signature has exactly one encoding
        assert not check_signature(KEY.public_key(), parsed | {"signature": parsed["signature"] + noise})


def test_an_anchor_reads_back_and_any_change_voids_it() -> None:
    data = sign_anchor(KEY, ANCHOR)
    assert read_anchor(_key, data) == ANCHOR
    for name, value in json.loads(data).items():
        changed = {**json.loads(data), name: value + 1 if isinstance(value, int) else "x" + value}
        if name != "version":
            assert read_anchor(_key, json.dumps(changed).encode()) is None, name


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b'{"signature":1}', b"\xff", b"[" * 100_000])
def test_what_is_not_an_anchor_is_none(data: bytes) -> None:
    assert read_anchor(_key, data) is None


def test_a_chain_starts_from_zero() -> None:
    line, head = seal(RECORD, ChainHead())
    assert (parse_line(line)["seq"], parse_line(line)["prev"]) == (1, ZERO)
    assert head.seq == 1
