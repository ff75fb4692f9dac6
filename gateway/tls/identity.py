"""Leaf certificates for inspected hosts, signed by the worker's short-lived intermediate.

- A leaf names exactly one host, which policy allows. It has no wildcard and no second name.
- A leaf outside of the intermediate's name constraints is not made: no client would accept it.
- All leaves share one key of this process, made after the fork. The key is never written to disk.
- The cache is limited. A leaf is renewed before it ends, and never outlives the intermediate.
"""

import datetime
from collections import OrderedDict
from collections.abc import Callable

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gateway.engines.port import Leaf

CACHE = 256
LIFETIME = datetime.timedelta(hours=24)
RENEW_BEFORE = datetime.timedelta(minutes=30)
_BACKDATE = datetime.timedelta(hours=1)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class LeafMint:
    """Mints and caches leaves. Make one per intermediate, after the fork."""

    def __init__(
        self,
        certificate_pem: str | bytes,
        chain_pem: str | bytes,
        key_pem: str | bytes,
        *,
        now: Callable[[], datetime.datetime] = _now,
    ) -> None:
        """Take the answer of `VaultClient.intermediate`.

        Args:
            certificate_pem: the intermediate (pathlen 0).
            chain_pem: further certificates to present, can be empty. An intermediate in it is not presented twice.

        Raises:
            ValueError: these are not certificates and the matching EC key.
        """
        self._issuer = x509.load_pem_x509_certificate(_bytes(certificate_pem))
        key = serialization.load_pem_private_key(_bytes(key_pem), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != self._issuer.public_key():
            raise ValueError("the intermediate's key does not belong to its certificate")
        self._issuer_key = key
        others = x509.load_pem_x509_certificates(_bytes(chain_pem)) if _bytes(chain_pem).strip() else []
        served = [self._issuer, *(one for one in others if one != self._issuer and one.issuer != one.subject)]
        self._chain = b"".join(one.public_bytes(serialization.Encoding.PEM) for one in served)
        self._now = now
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._key_pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._permitted = _permitted(self._issuer)
        self._cache: OrderedDict[str, tuple[datetime.datetime, Leaf]] = OrderedDict()

    @property
    def expires(self) -> datetime.datetime:
        """The end of the intermediate's validity."""
        return self._issuer.not_valid_after_utc

    @property
    def due(self) -> bool:
        """Whether to request another intermediate: half of the lifetime is over, or this one is not valid now."""
        begin, now = self._issuer.not_valid_before_utc, self._now()
        return not begin <= now < begin + (self.expires - begin) / 2

    def signs(self, host: str) -> bool:
        """Whether the intermediate is valid now and its constraints permit `host`."""
        if not self._issuer.not_valid_before_utc <= self._now() < self.expires:
            return False
        return self._permitted is None or any(
            host == suffix or host.endswith(f".{suffix}") for suffix in self._permitted
        )

    def leaf(self, host: str) -> Leaf:
        """See `gateway.engines.port.LeafIssuer`.

        Raises:
            ValueError: the intermediate is not valid now, or not for this host.
        """
        now = self._now()
        cached = self._cache.get(host)
        if cached is not None and now < cached[0]:
            self._cache.move_to_end(host)
            return cached[1]
        until = min(now + LIFETIME, self.expires)
        if not self.signs(host):
            raise ValueError("the intermediate certificate is not valid now, or not for this host")
        leaf = Leaf(self._mint(host, now, until) + self._chain, self._key_pem)
        self._cache[host] = (until - RENEW_BEFORE, leaf)
        self._cache.move_to_end(host)
        while len(self._cache) > CACHE:
            self._cache.popitem(last=False)
        return leaf

    def _mint(self, host: str, now: datetime.datetime, until: datetime.datetime) -> bytes:
        # A common name has at most 64 characters. Clients check the subject alternative name only.
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)] if len(host) <= 64 else [])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._issuer.subject)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(max(now - _BACKDATE, self._issuer.not_valid_before_utc))
            .not_valid_after(until)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=len(host) > 64)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(_DIGITAL_SIGNATURE, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .add_extension(_authority_key(self._issuer), critical=False)
        )
        return builder.sign(self._issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


_DIGITAL_SIGNATURE = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=False,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)


def _permitted(issuer: x509.Certificate) -> tuple[str, ...] | None:
    """Return the names that an intermediate may sign, each with its subdomains; None means any name."""
    try:
        constraints = issuer.extensions.get_extension_for_class(x509.NameConstraints).value
    except x509.ExtensionNotFound:
        return None
    return tuple(each.value for each in constraints.permitted_subtrees or () if isinstance(each, x509.DNSName))


def _authority_key(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    try:
        identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(_ec_public(issuer))
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier.value)


def _ec_public(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("the intermediate's key is not an EC key")
    return key


def _bytes(text: str | bytes) -> bytes:
    return text.encode("ascii") if isinstance(text, str) else text
