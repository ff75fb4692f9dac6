"""SCRAM-SHA-256: the example of its RFC, a real verifier, and every answer of a server that proves nothing."""

import base64
import hashlib
import hmac

import pytest

from gateway.engines.postgres.scram import (
    MAX_ITERATIONS,
    MIN_ITERATIONS,
    Challenge,
    Scram,
    ScramFailed,
    derive,
    prepared,
)

# The example of RFC 7677.
NONCE, PASSWORD = "rOprNGfwEbeRWgbNEkqO", "pencil"
SERVER_NONCE = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
FIRST = f"r={SERVER_NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
PROOF = "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
SIGNATURE = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def begun(offered: tuple[str, ...] = ("SCRAM-SHA-256",), certificate: bytes | None = None) -> Scram:
    return Scram(offered, certificate, NONCE, "user")


def answered(scram: Scram) -> bytes:
    challenge = scram.challenge(FIRST.encode())
    return scram.final(challenge, derive(PASSWORD, challenge))


def test_the_example_of_the_rfc() -> None:
    scram = begun()
    assert b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO" == scram.first
    assert PROOF.encode() == answered(scram)
    scram.verify(SIGNATURE)


@pytest.mark.parametrize(
    ("offered", "certificate", "mechanism", "header"),
    [
        (("SCRAM-SHA-256-PLUS", "SCRAM-SHA-256"), b"h", "SCRAM-SHA-256-PLUS", b"p=tls-server-end-point,,"),
        (("SCRAM-SHA-256",), b"h", "SCRAM-SHA-256", b"y,,"),
        (("SCRAM-SHA-256-PLUS", "SCRAM-SHA-256"), None, "SCRAM-SHA-256", b"n,,"),
    ],
)
def test_the_login_is_bound_to_the_certificate_where_that_is_offered(
    offered: tuple[str, ...], certificate: bytes | None, mechanism: str, header: bytes
) -> None:
    """`y` says that the client could bind: a server that offers binding then refuses, so the offer cannot be hidden."""
    scram = begun(offered, certificate)
    assert mechanism == scram.mechanism
    assert scram.first.startswith(header)
    binding = base64.b64encode(header + (b"h" if mechanism.endswith("PLUS") else b""))
    assert answered(scram).startswith(b"c=" + binding + b",r=")


@pytest.mark.parametrize("offered", [(), ("SCRAM-SHA-1",), ("scram-sha-256",), ("SCRAM-SHA-256-PLUS",)])
def test_another_mechanism_is_not_used(offered: tuple[str, ...]) -> None:
    with pytest.raises(ScramFailed):
        begun(offered)


CHALLENGES = {
    "another nonce": FIRST.replace("r=r", "r=R", 1),
    "no nonce of the server": FIRST.replace(SERVER_NONCE, NONCE),
    "few iterations": FIRST.replace("4096", str(MIN_ITERATIONS - 1)),
    "many iterations": FIRST.replace("4096", str(MAX_ITERATIONS + 1)),
    "no number": FIRST.replace("4096", "04096"),
    "a sign": FIRST.replace("4096", "+4096"),
    "an empty salt": FIRST.replace("W22ZaJ0SNY7soEsUEjb6gQ==", ""),
    "a broken salt": FIRST.replace("gQ==", "g="),
    "a long salt": FIRST.replace("W22ZaJ0SNY7soEsUEjb6gQ==", base64.b64encode(bytes(257)).decode()),
    "an extension": f"{FIRST},x=y",
    "a mandatory extension": f"m=x,{FIRST}",
    "another order": "s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
    "a line break": f"{FIRST}\n",
    "an error": "e=other-error",
    "too long": FIRST.replace("%hv", "%" + "h" * 2048),
}


@pytest.mark.parametrize("case", CHALLENGES)
def test_a_challenge_that_is_not_exact_ends_the_login(case: str) -> None:
    with pytest.raises(ScramFailed) as caught:
        begun().challenge(CHALLENGES[case].encode())
    assert SERVER_NONCE not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"v=",
        b"v=AAAA",
        SIGNATURE.replace(b"6", b"7", 1),
        SIGNATURE + b",x=y",
        SIGNATURE + b"\n",
        b"e=invalid-proof",
        b"v=" + base64.b64encode(bytes(32)),
        b"v=\xff",
    ],
)
def test_a_server_that_does_not_know_the_verifier_is_not_believed(data: bytes) -> None:
    scram = begun()
    answered(scram)
    with pytest.raises(ScramFailed):
        scram.verify(data)


def test_nothing_is_verified_before_there_is_a_proof() -> None:
    with pytest.raises(ScramFailed):
        begun().verify(b"v=")


@pytest.mark.parametrize(
    ("password", "expected"),
    [
        ("pencil", "pencil"),
        ("I\u00adX", "IX"),  # mapped to nothing
        ("a\u00a0b", "a b"),
        ("\u00aa", "a"),
        ("\u2168", "IX"),
        ("a\u0007", "a\u0007"),  # prohibited: the server then takes the password as it is
        ("\u0627\u0031", "\u0627\u0031"),  # a wrong order of directions
        ("\u0627\u0628", "\u0627\u0628"),
        ("\u0627a\u0628", "\u0627a\u0628"),
        ("\u00ad", "\u00ad"),
    ],
)
def test_a_password_is_prepared_like_the_server_prepares_it(password: str, expected: str) -> None:
    assert expected == prepared(password)


def test_the_salted_password_is_that_of_the_rfc() -> None:
    challenge = Challenge("", "", b"salt", 4096)
    block = hmac.digest(b"pencil", b"salt\0\0\0\1", "sha256")
    total = int.from_bytes(block)
    for _ in range(4095):
        block = hmac.digest(b"pencil", block, "sha256")
        total ^= int.from_bytes(block)
    assert total.to_bytes(32) == derive("pencil", challenge)
    assert hashlib.sha256().digest_size == len(derive("pencil", challenge))
