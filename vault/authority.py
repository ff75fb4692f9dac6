"""The certificate authorities of sandboxes: a root per lineage, short-lived intermediates below it. No IO.

- Every root and every intermediate has its own P-256 key, 159-bit random serial and random name. A certificate does not
  reveal its host, sandbox or tenant.
- A root signs intermediates only (pathlen 1, critical). An intermediate signs leaves only (pathlen 0, critical).
- An intermediate is valid for at most 12 hours and never longer than its root. Both begin 5 minutes early, for slow
  clocks.
- An intermediate signs for its names, each with its subdomains, and for no address. A critical name constraint enforces
  this if `permitted` returns a list.
- A root's key leaves this module only as PEM for sealing (`Root.key_pem`).

Time and the names that a worker needs are arguments.
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

ROOT_LIFETIME = timedelta(
    days=3650
)  # a process in a restored sandbox keeps its loaded root, so the root must outlive sandboxes
INTERMEDIATE_LIFETIME = timedelta(hours=12)
BACKDATING = timedelta(minutes=5)
ANY = "*"
"""Means every name."""
MAX_PERMITTED = 64
"""The limit of names in a certificate, which each handshake contains. With more names there is no constraint."""
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", re.ASCII)
_ADDRESSES = [x509.IPAddress(IPv4Network("0.0.0.0/0")), x509.IPAddress(IPv6Network("::/0"))]


def permitted(names: Collection[str]) -> tuple[str, ...] | None:
    """Return suffixes that cover all of `names` (exact, or `*.suffix`), None if there is no such list.

    A constraint covers a name and its subdomains, so `*.suffix` also permits the suffix. Some clients refuse a
    label with an underscore in a constraint, so it is removed, with the labels before it. Without names the only
    permitted name is one that cannot exist.
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
    """A root is invalid, or not valid now."""


@dataclass(frozen=True, slots=True)
class Issued:
    """An intermediate: certificate, chain (the certificate and its root) and private key, all PEM."""

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
        """Read a root from the values of `certificate_pem` and `key_pem`.

        Raises:
            AuthorityError: certificate or key is invalid, or they do not match.
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
        """The private key, only for sealing."""
        return _key_pem(self._key)

    def issue_intermediate(self, now: datetime, names: Collection[str] = (ANY,)) -> Issued:
        """Issue an intermediate with a new key, for `names` as in `permitted`.

        Raises:
            AuthorityError: the root has expired, or is not valid yet.
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
