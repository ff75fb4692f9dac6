"""A client certificate is accepted whole and consistent, and no message and no search text shows its key."""

import base64
import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from gateway.scrub.forms import Patterns
from gateway.scrub.stream import Scrubber, scrub_bytes
from tests.client_certificates import DAY, Key, Times, authority, key_pem, p256
from vault.client_certificate import (
    MAX_CHAIN,
    MAX_TEXT,
    CertificateError,
    ClientCertificate,
    certificate_problem,
    parse,
)
from vault.stores.port import stored_problem

NOW = datetime.datetime.now(datetime.UTC)
ROOT = authority("Root")
MIDDLE = ROOT.issue("Middle", ca=True)
LEAF = MIDDLE.issue("agent")
RSA = rsa.generate_private_key(65537, 2048)
TRADITIONAL = serialization.PrivateFormat.TraditionalOpenSSL


def encrypted(key: Key, form: serialization.PrivateFormat) -> str:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.BestAvailableEncryption(b"x")).decode()


@pytest.mark.parametrize(
    "value",
    [
        LEAF.value,
        LEAF.chain_pem + key_pem(LEAF.key),
        LEAF.value.replace("\n", "\r\n"),
        LEAF.value.rstrip(),
        "\n".join((key_pem(LEAF.key), LEAF.chain_pem, ROOT.pem)),
        key_pem(LEAF.key, TRADITIONAL) + LEAF.pem,
        ROOT.issue("a", RSA).value,
        key_pem(RSA, TRADITIONAL) + ROOT.issue("a", RSA).pem,
        *(ROOT.issue("a", ec.generate_private_key(curve)).value for curve in (ec.SECP384R1(), ec.SECP521R1())),
        ROOT.issue("a", ed25519.Ed25519PrivateKey.generate()).value,
        ROOT.issue("a", uses=None).value,
        ROOT.issue("a", uses=(ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)).value,
    ],
)
def test_a_key_with_its_chain_is_accepted(value: str) -> None:
    certificate = parse(value)
    assert certificate_problem(value, NOW) is None
    assert certificate.chain[0].public_key() == certificate.key.public_key()
    if value.startswith("-----"):
        assert stored_problem(value, NOW) is None


def broken_rsa() -> str:
    """Return a key whose private numbers do not belong to its public ones."""
    own = RSA.private_numbers()
    mixed = rsa.RSAPrivateNumbers(
        own.p, own.q, own.d + 2, own.dmp1 + 2, own.dmq1 + 2, own.iqmp, RSA.public_key().public_numbers()
    )
    key = mixed.private_key(unsafe_skip_rsa_key_validation=True)
    return key_pem(key) + ROOT.issue("a", RSA).pem


SMALL = rsa.generate_private_key(65537, 1024)  # noqa: S505 - is refused
DSA = dsa.generate_private_key(1024)  # noqa: S505 - is refused
K1 = ec.generate_private_key(ec.SECP256K1())
REFUSED = {
    "another key": (key_pem(p256()) + LEAF.chain_pem, "does not belong to the first certificate"),
    "the issuer first": (key_pem(LEAF.key) + MIDDLE.pem + LEAF.pem, "does not belong to the first certificate"),
    "a chain with a gap": (key_pem(LEAF.key) + LEAF.pem + ROOT.pem, "was not issued by the next one"),
    "a chain with a stranger": (LEAF.value + authority("Root").pem, "was not issued by the next one"),
    "no key": (LEAF.chain_pem, "there must be one private key, not 0"),
    "two keys": (key_pem(LEAF.key) + LEAF.value, "there must be one private key, not 2"),
    "no certificate": (key_pem(LEAF.key), f"there must be 1 to {MAX_CHAIN} certificates, not 0"),
    "a long chain": (LEAF.value + ROOT.pem * MAX_CHAIN, f"there must be 1 to {MAX_CHAIN} certificates"),
    "encrypted": (
        encrypted(LEAF.key, serialization.PrivateFormat.PKCS8) + LEAF.chain_pem,
        "the private key is encrypted",
    ),
    "encrypted in the old form": (encrypted(LEAF.key, TRADITIONAL) + LEAF.chain_pem, "the private key is encrypted"),
    "a small RSA key": (key_pem(SMALL) + ROOT.issue("a", SMALL).pem, "2048 to 8192 bits, not 1024"),
    "an RSA key with other private numbers": (broken_rsa(), "does not sign for the first certificate"),
    "another curve": (ROOT.issue("a", K1).value, "P-256, P-384 or P-521"),
    "DSA": (key_pem(DSA) + LEAF.pem, "another kind than RSA, EC and Ed25519"),  # type: ignore[arg-type]
    "a server's certificate": (
        ROOT.issue("a", uses=(ExtendedKeyUsageOID.SERVER_AUTH,)).value,
        "not for client authentication",
    ),
    "text before": ("Bag Attributes\n" + LEAF.value, "outside of the PEM blocks"),
    "text between": (key_pem(LEAF.key) + "subject=x\n" + LEAF.pem, "outside of the PEM blocks"),
    "text after": (LEAF.value + "x", "outside of the PEM blocks"),
    "another block": (
        "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n" + LEAF.value,
        "only a private key and certificates",
    ),
    "a cut key": (LEAF.value.replace("-----END PRIVATE KEY-----\n", "", 1), "outside of the PEM blocks"),
    "a key that is none": (
        "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n" + LEAF.pem,
        "the private key cannot be read",
    ),
    "a certificate that is none": (
        key_pem(LEAF.key) + "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        "a certificate cannot be read",
    ),
    "no base64": (LEAF.value.replace("\nM", "\n!", 1), "malformed"),
    "not ASCII": (LEAF.value + "\u00e9", "ASCII"),
    "too long": (LEAF.value + "\n" * MAX_TEXT, "at most"),
    "no PEM": ("token-token-token", "outside of the PEM blocks"),
    "empty": ("", "there must be one private key"),
    "expired": (ROOT.issue("a", times=Times(until=NOW - DAY / 2)).value, "the client certificate expired at 20"),
    "not valid yet": (
        ROOT.issue("a", times=Times(since=NOW + DAY)).value,
        "the client certificate is not valid before",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_is_no_client_certificate_is_refused_without_being_quoted(name: str) -> None:
    value, reason = REFUSED[name]
    problem = certificate_problem(value, NOW)
    assert problem is not None and reason in problem
    assert not any(line in problem for line in value.split() if len(line) > 30)
    if value.startswith("-----BEGIN "):
        assert stored_problem(value, NOW) is not None


@pytest.mark.parametrize(("at", "problem"), [(-2, "not valid before"), (0, None), (29, None), (31, "expired at 20")])
def test_validity_is_judged_at_a_time(at: int, problem: str | None) -> None:
    found = parse(LEAF.value).expiry_problem(NOW + at * DAY)
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_an_expired_intermediate_counts() -> None:
    middle = ROOT.issue("Middle", ca=True, times=Times(until=NOW - DAY / 2))
    problem = parse(middle.issue("a").value).expiry_problem(NOW)
    assert problem is not None and problem.startswith("a certificate of the client certificate's chain expired at")


def test_certificates_differ_in_their_fingerprint() -> None:
    values = [LEAF.value, key_pem(LEAF.key) + LEAF.pem, MIDDLE.issue("agent").value]
    assert 3 == len({parse(value).fingerprint for value in values})
    assert parse(LEAF.value).fingerprint == parse(LEAF.chain_pem + key_pem(LEAF.key, TRADITIONAL)).fingerprint


# What is searched for in responses.

KEYS: dict[str, Key] = {"EC": p256(), "RSA": RSA, "Ed25519": ed25519.Ed25519PrivateKey.generate()}


def secrets_left(certificate: ClientCertificate, shown: bytes) -> bool:
    """Whether twelve bytes of a private number are left in base64 or hex."""
    packed = shown.replace(b"\n", b"").replace(b"\\n", b"").replace(b"-", b"+").replace(b"_", b"/")
    for part in certificate.private_parts():
        for at in range(len(part) - 12):
            if part[at : at + 12].hex().encode() in shown.lower():
                return True
            if base64.b64encode(part[at : at + 12]) in packed:
                return True
    return False


@pytest.mark.parametrize("name", KEYS)
def test_a_response_with_the_key_shows_no_private_number_of_it(name: str) -> None:
    key = KEYS[name]
    certificate = parse(ROOT.issue("a", key).value)
    patterns = Patterns(certificate.private_parts())
    pem = key_pem(key).encode()
    der = base64.b64decode(b"".join(pem.split(b"\n")[1:-2]))
    forms = {
        "pem": pem,
        "json": pem.replace(b"\n", b"\\n"),
        "crlf": pem.replace(b"\n", b"\r\n"),
        "76 columns": base64.encodebytes(der),
        "one line": base64.b64encode(der),
        "url-safe": base64.urlsafe_b64encode(der),
        "shifted": base64.b64encode(b"x" + der),
        "hex": der.hex().encode(),
        "HEX": der.hex().upper().encode(),
    }
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        forms["traditional"] = key_pem(key, TRADITIONAL).encode()
    for form, text in forms.items():
        assert secrets_left(certificate, text) or form == "crlf"  # the control
        shown = scrub_bytes(patterns, b"before\n" + text + b"\nafter")
        assert not secrets_left(certificate, shown), form
        assert len(shown) == len(text) + 13
        assert shown.startswith(b"before\n") and shown.endswith(b"\nafter")


@pytest.mark.parametrize("name", KEYS)
def test_a_response_with_the_certificate_is_not_changed(name: str) -> None:
    issued = ROOT.issue("a", KEYS[name])
    patterns = Patterns(parse(issued.value).private_parts())
    for text in (issued.pem.encode(), issued.certificate.public_bytes(serialization.Encoding.DER)):
        assert text == scrub_bytes(patterns, text)


def test_lines_of_a_stream_are_released_at_their_ends() -> None:
    """The search for a key delays no event of a stream that consists of lines."""

    scrubber = Scrubber(Patterns(parse(LEAF.value).private_parts()))
    assert b"data: tick\n\n" == scrubber.feed(b"data: tick\n\n")


def test_an_error_is_a_value_error() -> None:
    with pytest.raises(CertificateError):
        parse("")
    assert isinstance(parse(LEAF.value).chain[0], x509.Certificate)
