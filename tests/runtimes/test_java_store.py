"""The trust store that Java reads."""

import base64
import hashlib
import subprocess
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from runtimes.engine.java_store import certificates, java_store
from testbed.pki import make_authority


def _pem(der: bytes, end: str = "\n") -> str:
    text = base64.encodebytes(der).decode().replace("\n", end)
    return f"-----BEGIN CERTIFICATE-----{end}{text}-----END CERTIFICATE-----{end}"


def _sequence(content: bytes) -> bytes:
    size = len(content).to_bytes(3)
    return b"\x30\x83" + size + content


def _entries(store: bytes) -> list[bytes]:
    """Parse a store to its last byte, by the description of its format."""
    body, digest = store[:-20], store[-20:]
    assert hashlib.sha1("changeit".encode("utf-16-be") + b"Mighty Aphrodite" + body).digest() == digest  # noqa: S324
    place = 0

    def take(count: int) -> bytes:
        nonlocal place
        place += count
        assert place <= len(body)
        return body[place - count : place]

    assert (0xFEEDFEED, 2) == (int.from_bytes(take(4)), int.from_bytes(take(4)))
    found, names = [], []
    for _ in range(int.from_bytes(take(4))):
        assert 2 == int.from_bytes(take(4))
        names.append(take(int.from_bytes(take(2))))
        take(8)
        assert b"X.509" == take(int.from_bytes(take(2)))
        found.append(take(int.from_bytes(take(4))))
    assert place == len(body) and len(names) == len(set(names))
    return found


@given(
    st.lists(st.binary(max_size=400), max_size=8, unique=True),
    st.text(max_size=40).filter(lambda text: "-----" not in text),
    st.sampled_from(["\n", "\r\n"]),
)
def test_the_store_holds_each_certificate_of_the_bundle_once(contents: list[bytes], between: str, end: str) -> None:
    ders = [_sequence(content) for content in contents]
    bundle = f"{end}{between}{end}".join(_pem(der, end) for der in [*ders, *ders[:2]])
    assert ders == _entries(java_store(bundle))


def test_what_is_no_certificate_is_left_out() -> None:
    good = _sequence(b"good")
    blocks = [
        _pem(b"no sequence"), _pem(good + b"more"), _pem(good[:-1]), _pem(b""), _pem(b"\x30\x80\x00\x00"),
        "-----BEGIN CERTIFICATE-----\n!!!!\n-----END CERTIFICATE-----\n",
        _pem(_sequence(b"key")).replace("CERTIFICATE", "PRIVATE KEY"), "-----\n", "-----BEGIN CERTIFICATE-----\n",
    ]  # fmt: skip
    assert [good] == certificates("".join(blocks[:4]) + _pem(good) + "".join(blocks[4:]))
    assert [] == _entries(java_store("".join(blocks)))


def test_real_certificates_come_through(tmp_path: Path) -> None:
    """OpenSSL's form of them."""
    roots = [make_authority(f"Root {number}").pem for number in range(3)]
    fingerprints = []
    for index, der in enumerate(_entries(java_store("".join(roots)))):
        place = tmp_path / f"{index}.der"
        place.write_bytes(der)
        command = ["openssl", "x509", "-inform", "der", "-in", str(place), "-noout", "-subject"]
        fingerprints.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert [f"Root {number}" in said for number, said in enumerate(fingerprints)] == [True] * 3
