"""Client certificates for tests: authorities, chains and their PEM texts."""

import datetime
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)

type Key = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def p256() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8) -> str:
    """Return a key as unencrypted PEM."""
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode("ascii")


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate, its key, and the certificates that issued it, the nearest one first."""

    certificate: x509.Certificate
    key: Key
    issuers: tuple[x509.Certificate, ...] = ()

    @property
    def pem(self) -> str:
        """The certificate alone."""
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")

    @property
    def chain_pem(self) -> str:
        """The certificate and its intermediate issuers."""
        issuers = [one.public_bytes(serialization.Encoding.PEM).decode("ascii") for one in self.issuers[:-1]]
        return self.pem + "".join(issuers)

    @property
    def value(self) -> str:
        """The value of a secret: key and chain."""
        return key_pem(self.key) + self.chain_pem

    def issue(self, name: str, key: Key | None = None, **options: object) -> "Issued":
        """Return a certificate that this one signs."""
        return _issue(name, key or p256(), self, **options)  # type: ignore[arg-type]


def authority(name: str) -> Issued:
    """Return a root certificate."""
    return _issue(name, p256(), None, ca=True)


@dataclass(frozen=True, slots=True)
class Times:
    """When a certificate is valid."""

    since: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC) - DAY)
    until: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC) + 30 * DAY)


def _issue(
    name: str,
    key: Key,
    issuer: Issued | None,
    *,
    ca: bool = False,
    uses: tuple[x509.ObjectIdentifier, ...] | None = (ExtendedKeyUsageOID.CLIENT_AUTH,),
    times: Times | None = None,
) -> Issued:
    times = times or Times()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer: Key = key if issuer is None else issuer.key
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(times.since)
        .not_valid_after(times.until)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if ca:
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        builder = builder.add_extension(usage, critical=True)
    elif uses is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    algorithm = None if isinstance(signer, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    issuers = () if issuer is None else (issuer.certificate, *issuer.issuers)
    return Issued(builder.sign(signer, algorithm), key, issuers)
