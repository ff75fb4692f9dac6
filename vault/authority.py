"""The certificate authorities of sandboxes: a root per lineage, short-lived intermediates below it. No IO.

- Every root and every intermediate has its own P-256 key, 159-bit random serial and random name; nothing in a
  certificate says which host, sandbox or tenant it is of.
- A root signs intermediates only (pathlen 1, critical), an intermediate signs leaves only (pathlen 0, critical).
- An intermediate lives at most 12 hours and never longer than its root; both begin 5 minutes early, for slow clocks.
- An intermediate signs for the names it was issued for, each with all names below it, and for no address: a critical
  name constraint, where `permitted` has a list.
- A root's key leaves this module only as PEM meant for sealing (`Root.key_pem`).

Time is an argument. Which names a worker needs is said by its caller.
"""

import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import IPv4Network, IPv6Network

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from vault.secret import Secret

ROOT_LIFETIME = timedelta(days=3650)  # a restored process keeps the root it had loaded, so it must outlive sandboxes
INTERMEDIATE_LIFETIME = timedelta(hours=12)
BACKDATING = timedelta(minutes=5)
ANY = "*"
"""Stands for every name."""
MAX_PERMITTED = 64
"""Names in a certificate, which is sent in each handshake. An intermediate that would need more has no constraint."""
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", re.ASCII)
_ADDRESSES = [x509.IPAddress(IPv4Network("0.0.0.0/0")), x509.IPAddress(IPv6Network("::/0"))]


def permitted(names: Collection[str]) -> tuple[str, ...] | None:
    """Return the suffixes that hold all of `names` (exact, or `*.suffix`), None where there is no such list.

    A constraint holds for a name and all below it: `*.suffix` permits the suffix, too. Labels that some clients refuse
    in a constraint (an underscore) are left out, with what is before them. None at all permit only what does not exist.
    """
    if ANY in names:
        return None
    suffixes = {_plain(name.removeprefix("*.")) for name in names}
    if "" in suffixes:
        return None
    found = tuple(sorted(suffix for suffix in suffixes if not any(parent in suffixes for parent in _parents(suffix))))
    return (found or ("invalid",)) if len(found) <= MAX_PERMITTED else None


def _plain(name: str) -> str:
    labels = name.split(".")
    bad = [position for position, label in enumerate(labels) if not _LABEL.fullmatch(label)]
    return ".".join(labels[bad[-1] + 1 :] if bad else labels)


def _parents(name: str) -> list[str]:
    labels = name.split(".")
    return [".".join(labels[start:]) for start in range(1, len(labels))]


class AuthorityError(Exception):
    """A root cannot be read, or can no longer issue."""


@dataclass(frozen=True, slots=True)
class Issued:
    """An intermediate: certificate, itself followed by its root, and its private key, all PEM."""

    certificate_pem: str
    chain_pem: str
    key_pem: Secret


class Root:
    """The root of one lineage."""

    __slots__ = ("_certificate", "_key")

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, now: datetime) -> "Root":
        """Make the root of a new lineage."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("Sallyport sandbox root")
        certificate = (
            _builder(name, name, key.public_key(), now - BACKDATING, now + ROOT_LIFETIME, path_length=1)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
            .sign(key, SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, certificate_pem: str, key_pem: Secret) -> "Root":
        """Read what `certificate_pem` and `key_pem` gave.

        Raises:
            AuthorityError: they cannot be read or do not belong together.
        """
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
            key = load_pem_private_key(key_pem.reveal().encode(), password=None)
        except (ValueError, TypeError):
            raise AuthorityError("a root's certificate or key cannot be read") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise AuthorityError("a root's certificate and key do not belong together")
        return cls(certificate, key)

    @property
    def certificate_pem(self) -> str:
        """The certificate that sandboxes of this lineage trust."""
        return _pem(self._certificate)

    @property
    def key_pem(self) -> Secret:
        """The private key, to be sealed and nothing else."""
        return _key_pem(self._key)

    def issue_intermediate(self, now: datetime, names: Collection[str] = (ANY,)) -> Issued:
        """Issue an intermediate with a new key, for `names` as in `permitted`.

        Raises:
            AuthorityError: the root has expired or its clock was not reached.
        """
        begin, end = now - BACKDATING, min(now + INTERMEDIATE_LIFETIME, self._certificate.not_valid_after_utc)
        if not self._certificate.not_valid_before_utc <= now < end:
            raise AuthorityError("the lineage's root is not valid now")
        key = ec.generate_private_key(ec.SECP256R1())
        begin = max(begin, self._certificate.not_valid_before_utc)
        builder = (
            _builder(
                _name("Sallyport sandbox gateway"),
                self._certificate.subject,
                key.public_key(),
                begin,
                end,
                path_length=0,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        )
        if (suffixes := permitted(names)) is not None:
            builder = builder.add_extension(
                x509.NameConstraints([x509.DNSName(suffix) for suffix in suffixes], _ADDRESSES),
                critical=True,
            )
        certificate = builder.sign(self._key, SHA256())
        pem = _pem(certificate)
        return Issued(pem, pem + self.certificate_pem, _key_pem(key))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    begin: datetime,
    end: datetime,
    *,
    path_length: int,
) -> x509.CertificateBuilder:
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _name(what: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{what} {secrets.token_hex(12)}")])


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode("ascii")


def _key_pem(key: ec.EllipticCurvePrivateKey) -> Secret:
    return Secret(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode("ascii"))
