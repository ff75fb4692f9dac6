"""The client's side of SCRAM-SHA-256 and SCRAM-SHA-256-PLUS (RFC 5802, RFC 7677, RFC 5929), as PostgreSQL has it. Pure.

    client = Scram(offered, certificate_hash, nonce)
    client.first -> challenge = client.challenge(bytes) -> salted = derive(password, challenge)
    -> client.final(challenge, salted) -> client.verify(bytes)

- The password never leaves `derive`. The server gets a proof. `verify` fails unless the server knows the verifier of
  the same password.
- With TLS the exchange is bound to the server's certificate if the server offers that (`tls-server-end-point`).
- Work is limited: `MAX_ITERATIONS`. Below `MIN_ITERATIONS` a server could try passwords too fast with the proof.
- Every field is strict. Extensions are refused.

`derive` takes long. The caller runs it where it blocks no other flow.
"""

import base64
import hashlib
import hmac
import re
import stringprep
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

MECHANISM = "SCRAM-SHA-256"
MECHANISM_BOUND = "SCRAM-SHA-256-PLUS"
MIN_ITERATIONS = 4096
MAX_ITERATIONS = 1_000_000
MAX_MESSAGE = 2048
_MAX_SALT = 256
_BINDING = "tls-server-end-point"
_FIRST = re.compile(r"r=([\x21-\x2b\x2d-\x7e]+),s=([A-Za-z0-9+/]+={0,2}),i=([1-9][0-9]{0,9})")
_FINAL = re.compile(r"v=([A-Za-z0-9+/]+={0,2})")
_PROHIBITED = (
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
    stringprep.in_table_a1,
)


class ScramFailed(Exception):
    """The exchange failed. The text is the reason, without any part of the exchange."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """The server's first message: the nonce of both sides, the salt and the number of iterations."""

    text: str
    nonce: str
    salt: bytes
    iterations: int


class Scram:
    """One exchange. Call each method once, in the order of the module's docstring."""

    def __init__(self, offered: Sequence[str], certificate_hash: bytes | None, nonce: str, user: str = "") -> None:
        """Choose a mechanism.

        Args:
            user: PostgreSQL ignores it and takes the name in the startup packet.
            offered: the mechanisms of the server.
            certificate_hash: of the server's certificate (RFC 5929); None if that has none.
            nonce: random printable characters without a comma.

        Raises:
            ScramFailed: the server offers no SCRAM-SHA-256.
        """
        if certificate_hash is not None and MECHANISM_BOUND in offered:
            self.mechanism, header, binding = MECHANISM_BOUND, f"p={_BINDING},,", certificate_hash
        elif MECHANISM in offered:
            # "y": the client could bind. A server that offers binding refuses it, so no one can hide the offer.
            self.mechanism, header, binding = MECHANISM, "n,," if certificate_hash is None else "y,,", b""
        else:
            raise ScramFailed("the server does not offer SCRAM-SHA-256")
        self._binding = base64.b64encode(header.encode() + binding).decode()
        self._nonce = nonce
        self._bare = f"n={user},r={nonce}"
        self._signature = b""
        self.first = (header + self._bare).encode()

    def challenge(self, data: bytes) -> Challenge:
        """Read the server's first message.

        Raises:
            ScramFailed: it is malformed, or its number of iterations is out of bounds.
        """
        text = _text(data)
        match = _FIRST.fullmatch(text)
        if match is None:
            raise ScramFailed("the server's first SCRAM message is malformed")
        nonce, salt, iterations = match[1], _decoded(match[2]), int(match[3])
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce):
            raise ScramFailed("the server's SCRAM nonce does not continue the client's")
        if not 0 < len(salt) <= _MAX_SALT:
            raise ScramFailed("the server's SCRAM salt is empty or too long")
        if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
            allowed = f"from {MIN_ITERATIONS} to {MAX_ITERATIONS} are allowed"
            raise ScramFailed(f"the server asks for {iterations} SCRAM iterations; {allowed}")
        return Challenge(text, nonce, salt, iterations)

    def final(self, challenge: Challenge, salted: bytes) -> bytes:
        """Return the client's last message, with the proof."""
        without = f"c={self._binding},r={challenge.nonce}"
        everything = f"{self._bare},{challenge.text},{without}".encode()
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        signature = hmac.digest(hashlib.sha256(client_key).digest(), everything, "sha256")
        proof = bytes(one ^ other for one, other in zip(client_key, signature, strict=True))
        server_key = hmac.digest(salted, b"Server Key", "sha256")
        self._signature = hmac.digest(server_key, everything, "sha256")
        return f"{without},p={base64.b64encode(proof).decode()}".encode()

    def verify(self, data: bytes) -> None:
        """Check the server's last message.

        Raises:
            ScramFailed: the server has not proved that it knows the password's verifier.
        """
        match = _FINAL.fullmatch(_text(data))
        if match is None or not self._signature or not hmac.compare_digest(_decoded(match[1]), self._signature):
            raise ScramFailed("the server has not proved that it knows the login: its SCRAM signature is wrong")


def derive(password: str, challenge: Challenge) -> bytes:
    """Return the salted password (RFC 5802)."""
    octets = prepared(password).encode("utf-8", "surrogateescape")
    return hashlib.pbkdf2_hmac("sha256", octets, challenge.salt, challenge.iterations)


def prepared(password: str) -> str:
    """Return the form of a password that SASLprep (RFC 4013) makes; like the server, keep one that has none."""
    mapped = "".join(
        " " if stringprep.in_table_c12(character) else character
        for character in password
        if not stringprep.in_table_b1(character)
    )
    text = unicodedata.ucd_3_2_0.normalize("NFKC", mapped)
    if not text or any(prohibited(character) for character in text for prohibited in _PROHIBITED):
        return password
    if any(map(stringprep.in_table_d1, text)):
        ends = stringprep.in_table_d1(text[0]) and stringprep.in_table_d1(text[-1])
        if not ends or any(map(stringprep.in_table_d2, text)):
            return password
    return text


def _text(data: bytes) -> str:
    if len(data) > MAX_MESSAGE or not data.isascii():
        raise ScramFailed("a SCRAM message of the server is too long or not ASCII")
    return data.decode("ascii")


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ScramFailed("a field of the server's SCRAM message is not base64") from None
