"""A client certificate as a secret's value: PEM text with one private key and a certificate chain, the leaf first.

- The text consists of PEM blocks and blank lines only: one unencrypted key (`PRIVATE KEY`, `EC PRIVATE KEY`,
  `RSA PRIVATE KEY`) and 1 to `MAX_CHAIN` certificates, in any order of key and chain.
- The key is RSA of 2048 to 8192 bits, EC on P-256, P-384 or P-521, or Ed25519. It belongs to the leaf. Each other
  certificate issued the one before it. A leaf with an extended key usage is for client authentication.
- `parse` does not check the numbers of an RSA key, which takes up to a second. `certificate_problem` is for a value
  that is to be stored: it also signs with the key, verifies the signature with the leaf, and judges the validity.
- `expiry_problem` judges the validity at each use.
- No message contains a part of the key.

Pure.
"""

import binascii
import itertools
import re
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

MAX_TEXT = 64 * 1024
MAX_CHAIN = 8
MIN_RSA_BITS, MAX_RSA_BITS = 2048, 8192
PEM_BEGIN: Final = "-----BEGIN "

_BLOCK = re.compile(
    r"-----BEGIN (?P<label>[A-Z0-9 ]{1,40})-----[ \t]*\r?\n(?P<body>[^-]*)-----END (?P=label)-----[ \t]*(?:\r?\n|\Z)"
)
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/=]+[ \t]*\r?\n)+")
_KEYS: Final = frozenset({"PRIVATE KEY", "EC PRIVATE KEY", "RSA PRIVATE KEY"})
_CERTIFICATE = "CERTIFICATE"
_CURVES: Final = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_PART = 128
_SAMPLE = b"sallyport: a client certificate is stored"
_CLIENT_USES: Final = frozenset({ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE})

type PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


class CertificateError(ValueError):
    """A value is no usable client certificate. The text says why, without a part of the value."""


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class ClientCertificate:
    """A private key and its certificates.

    Attributes:
        chain: the leaf first.
        fingerprint: of the whole chain. Equal ones have equal keys.
    """

    key: PrivateKey
    chain: tuple[x509.Certificate, ...]
    fingerprint: bytes

    def expiry_problem(self, now: datetime) -> str | None:
        """Return why the certificate cannot be used at this time, None if it can. `now` is aware."""
        for position, one in enumerate(self.chain):
            what = "the client certificate" if position == 0 else "a certificate of the client certificate's chain"
            if now >= one.not_valid_after_utc:
                return f"{what} expired at {one.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}"
            if now < one.not_valid_before_utc:
                return f"{what} is not valid before {one.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ}"
        return None

    def private_parts(self) -> frozenset[bytes]:
        """Return the private numbers of the key in parts, to search for. A part contains nothing of the certificate."""
        parts: set[bytes] = set()
        for number in _private_numbers(self.key):
            size = -(-len(number) // -(-len(number) // _PART))
            parts |= {number[at : at + size] for at in range(0, len(number), size)}
        return frozenset(parts)


def parse(text: str) -> ClientCertificate:
    """Read a client certificate.

    Raises:
        CertificateError: it has another form, or its parts do not fit together.
    """
    key_text, chain_texts = _blocks(text)
    key = _key(key_text)
    chain = tuple(map(_certificate, chain_texts))
    if _public(key) != _encoded(chain[0].public_key()):
        raise CertificateError("the private key does not belong to the first certificate")
    for issued, issuer in itertools.pairwise(chain):
        try:
            issued.verify_directly_issued_by(issuer)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            raise CertificateError("a certificate of the chain was not issued by the next one") from None
    try:
        uses = set(chain[0].extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        uses = set(_CLIENT_USES)
    except ValueError:
        raise CertificateError("the first certificate has a malformed extension") from None
    if _CLIENT_USES.isdisjoint(uses):
        raise CertificateError("the first certificate is not for client authentication")
    digest = hashes.Hash(hashes.SHA256())
    for one in chain:
        digest.update(one.fingerprint(hashes.SHA256()))
    return ClientCertificate(key, chain, digest.finalize())


def certificate_problem(text: str, now: datetime) -> str | None:
    """Return why `text` is no client certificate that can be used at this time, None if it is one. `now` is aware."""
    try:
        certificate = parse(text)
    except CertificateError as error:
        return str(error)
    if not _signs(certificate):
        return "the private key does not sign for the first certificate"
    return certificate.expiry_problem(now)


def _signs(certificate: ClientCertificate) -> bool:
    try:
        match certificate.key, certificate.chain[0].public_key():
            case rsa.RSAPrivateKey() as key, rsa.RSAPublicKey() as public:
                signature = key.sign(_SAMPLE, padding.PKCS1v15(), hashes.SHA256())
                public.verify(signature, _SAMPLE, padding.PKCS1v15(), hashes.SHA256())
            case ec.EllipticCurvePrivateKey() as key, ec.EllipticCurvePublicKey() as public:
                public.verify(key.sign(_SAMPLE, ec.ECDSA(hashes.SHA256())), _SAMPLE, ec.ECDSA(hashes.SHA256()))
            case ed25519.Ed25519PrivateKey() as key, ed25519.Ed25519PublicKey() as public:
                public.verify(key.sign(_SAMPLE), _SAMPLE)
            case _:
                return False
    except (ValueError, InvalidSignature):
        return False
    return True


def _blocks(text: str) -> tuple[str, list[str]]:
    """Return the key and the certificates as PEM texts."""
    if len(text) > MAX_TEXT or not text.isascii():
        raise CertificateError(f"a client certificate is PEM text of at most {MAX_TEXT} ASCII characters")
    if "ENCRYPTED PRIVATE KEY-----" in text or "Proc-Type: 4,ENCRYPTED" in text:
        raise CertificateError("the private key is encrypted; store it without a passphrase")
    keys, chain, position = list[str](), list[str](), 0
    for block in _BLOCK.finditer(text):
        if text[position : block.start()].strip():
            raise CertificateError("there is text outside of the PEM blocks")
        position, label = block.end(), block["label"]
        if label != _CERTIFICATE and label not in _KEYS:
            raise CertificateError("only a private key and certificates are permitted as PEM blocks")
        if _BASE64.fullmatch(block["body"]) is None:
            raise CertificateError("a PEM block is malformed")
        (chain if label == _CERTIFICATE else keys).append(block[0].strip() + "\n")
    if text[position:].strip():
        raise CertificateError("there is text outside of the PEM blocks")
    if len(keys) != 1:
        raise CertificateError(f"there must be one private key, not {len(keys)}")
    if not 1 <= len(chain) <= MAX_CHAIN:
        raise CertificateError(f"there must be 1 to {MAX_CHAIN} certificates, not {len(chain)}")
    return keys[0], chain


def _key(text: str) -> PrivateKey:
    try:
        key = serialization.load_pem_private_key(
            text.encode("ascii"), password=None, unsafe_skip_rsa_key_validation=True
        )
    except (ValueError, TypeError, UnsupportedAlgorithm, binascii.Error):
        raise CertificateError("the private key cannot be read") from None
    match key:
        case rsa.RSAPrivateKey() if not MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS:
            raise CertificateError(f"an RSA key has {MIN_RSA_BITS} to {MAX_RSA_BITS} bits, not {key.key_size}")
        case ec.EllipticCurvePrivateKey() if not isinstance(key.curve, _CURVES):
            raise CertificateError("an EC key is on P-256, P-384 or P-521")
        case rsa.RSAPrivateKey() | ec.EllipticCurvePrivateKey() | ed25519.Ed25519PrivateKey():
            return key
        case _:
            raise CertificateError("the private key is of another kind than RSA, EC and Ed25519")


def _certificate(text: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(text.encode("ascii"))
    except (ValueError, UnsupportedAlgorithm):
        raise CertificateError("a certificate cannot be read") from None


def _public(key: PrivateKey) -> bytes:
    return _encoded(key.public_key())


def _encoded(key: object) -> bytes:
    if not isinstance(key, rsa.RSAPublicKey | ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey):
        return b""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _private_numbers(key: PrivateKey) -> list[bytes]:
    match key:
        case rsa.RSAPrivateKey():
            own = key.private_numbers()
            numbers = (own.d, own.p, own.q, own.dmp1, own.dmq1, own.iqmp)
            return [number.to_bytes((number.bit_length() + 7) // 8, "big") for number in numbers]
        case ec.EllipticCurvePrivateKey():
            return [key.private_numbers().private_value.to_bytes((key.key_size + 7) // 8, "big")]
        case ed25519.Ed25519PrivateKey():
            return [key.private_bytes_raw()]
