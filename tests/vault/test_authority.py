"""Properties of `vault.authority`, the issuing side of the sandboxes' certificates."""

import subprocess
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import PolicyBuilder, VerificationError
from cryptography.x509.verification import Store as TrustStore

from vault.authority import BACKDATING, INTERMEDIATE_LIFETIME, AuthorityError, Issued, Root, permitted
from vault.secret import Secret

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def issue(issuer: Issued, subject: str, *, authority: bool, now: datetime = NOW) -> Issued:
    """Return a certificate signed with an intermediate's key, as a worker (or a thief of its key) would make it."""
    issuer_certificate = x509.load_pem_x509_certificate(issuer.certificate_pem.encode())
    issuer_key = load_pem_private_key(issuer.key_pem.reveal().encode(), None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(issuer_certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if authority:
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = builder.add_extension(usage, critical=True)
    else:
        try:
            name: x509.GeneralName = x509.IPAddress(ip_address(subject))
        except ValueError:
            name = x509.DNSName(subject)
        builder = builder.add_extension(x509.SubjectAlternativeName([name]), critical=False)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
    certificate = builder.sign(issuer_key, SHA256())
    pem = certificate.public_bytes(Encoding.PEM).decode()
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return Issued(pem, pem + issuer.chain_pem, Secret(key_pem))


def verify(root_pem: str, chain_pem: str, host: str = "good.test") -> None:
    """Verify leaf and intermediates against one root.

    Raises:
        VerificationError: the chain is not valid.
    """
    leaf, *rest = x509.load_pem_x509_certificates(chain_pem.encode())
    store = TrustStore([x509.load_pem_x509_certificate(root_pem.encode())])
    PolicyBuilder().store(store).time(NOW).build_server_verifier(x509.DNSName(host)).verify(leaf, rest)


def test_a_leaf_validates_against_its_own_lineage_and_no_other() -> None:
    """Two lineages never validate each other's leaves. The control is the same leaf against its own root."""
    ours, other = Root.create(NOW), Root.create(NOW)
    leaf = issue(ours.issue_intermediate(NOW), "good.test", authority=False)
    verify(ours.certificate_pem, leaf.chain_pem)
    with pytest.raises(VerificationError):
        verify(other.certificate_pem, leaf.chain_pem)


def test_openssl_agrees_in_strict_mode(tmp_path: Path) -> None:
    """The chain passes `openssl verify -x509_strict`. It fails against another root, and so does a CA below the CA."""
    ours, other = Root.create(NOW), Root.create(NOW)
    intermediate = ours.issue_intermediate(NOW)
    leaf = issue(intermediate, "good.test", authority=False)
    below = issue(issue(intermediate, "Sub CA", authority=True), "good.test", authority=False)

    def openssl(root: Root, chain: str) -> int:
        (tmp_path / "root.pem").write_text(root.certificate_pem)
        (tmp_path / "chain.pem").write_text(chain)
        command = ["openssl", "verify", "-x509_strict", "-no-CAfile", "-no-CApath", "-no-CAstore"]
        command += ["-attime", str(int(NOW.timestamp())), "-purpose", "sslserver", "-verify_hostname", "good.test"]
        command += ["-trusted", "root.pem", "-untrusted", "chain.pem", "chain.pem"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode

    assert 0 == openssl(ours, leaf.chain_pem)
    assert 0 != openssl(other, leaf.chain_pem)
    assert 0 != openssl(ours, below.chain_pem)


def test_an_intermediate_cannot_make_another_authority() -> None:
    """The intermediate has path length 0: a chain through a CA below it is not valid."""
    root = Root.create(NOW)
    below = issue(root.issue_intermediate(NOW), "Sub CA", authority=True)
    leaf = issue(below, "good.test", authority=False)
    with pytest.raises(VerificationError):
        verify(root.certificate_pem, leaf.chain_pem)


def test_constraints_and_lifetimes_are_as_stated() -> None:
    """CA:TRUE is critical with path lengths 1 and 0, with 5 minutes of backdating and 7 days at most."""
    root = Root.create(NOW)
    top = x509.load_pem_x509_certificate(root.certificate_pem.encode())
    middle = x509.load_pem_x509_certificate(root.issue_intermediate(NOW).certificate_pem.encode())
    for certificate, length in ((top, 1), (middle, 0)):
        extension = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        assert (True, x509.BasicConstraints(True, length)) == (extension.critical, extension.value)
        assert certificate.extensions.get_extension_for_class(x509.KeyUsage).critical
        assert NOW - BACKDATING == certificate.not_valid_before_utc
    assert NOW + INTERMEDIATE_LIFETIME == middle.not_valid_after_utc


def test_nothing_is_shared_between_authorities() -> None:
    """20 lineages with 2 intermediates each have distinct keys, serials and names."""
    roots = [Root.create(NOW) for _ in range(20)]
    pems = [root.certificate_pem for root in roots]
    pems += [root.issue_intermediate(NOW).certificate_pem for root in roots for _ in range(2)]
    certificates = [x509.load_pem_x509_certificate(pem.encode()) for pem in pems]
    assert 60 == len({certificate.serial_number for certificate in certificates})
    assert 60 == len({certificate.subject.rfc4514_string() for certificate in certificates})
    keys = [c.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest for c in certificates]
    assert 60 == len(set(keys))


def test_an_intermediate_never_outlives_its_root() -> None:
    """Near the root's end the intermediate ends with it. After it none is issued."""
    root = Root.create(NOW)
    end = x509.load_pem_x509_certificate(root.certificate_pem.encode()).not_valid_after_utc
    pem = root.issue_intermediate(end - timedelta(hours=1)).certificate_pem
    assert end == x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc
    for moment in (end, NOW - timedelta(days=1)):
        with pytest.raises(AuthorityError):
            root.issue_intermediate(moment)


def test_a_root_comes_back_from_its_pem_and_only_whole() -> None:
    """Loading gives the same authority. A key of another root is refused."""
    root, other = Root.create(NOW), Root.create(NOW)
    loaded = Root.load(root.certificate_pem, root.key_pem)
    leaf = issue(loaded.issue_intermediate(NOW), "good.test", authority=False)
    verify(root.certificate_pem, leaf.chain_pem)
    with pytest.raises(AuthorityError):
        Root.load(root.certificate_pem, other.key_pem)
    with pytest.raises(AuthorityError):
        Root.load(root.certificate_pem, Secret("x"))


@pytest.mark.parametrize(
    ("names", "suffixes"),
    [
        (["*"], None),
        (["a.test", "*"], None),
        ([], ("invalid",)),
        (["a.test"], ("a.test",)),
        (["*.a.test"], ("a.test",)),
        (["*.a.test", "x.a.test", "a.test", "b.test"], ("a.test", "b.test")),
        (["x.a.test", "ax.test", "xa.test"], ("ax.test", "x.a.test", "xa.test")),
        (["my_api.a.test", "x.my_api.b.test"], ("a.test", "b.test")),
        (["_"], None),
        ([f"n{number}.test" for number in range(64)], tuple(sorted(f"n{number}.test" for number in range(64)))),
        ([f"n{number}.test" for number in range(65)], None),
        ([*(f"n{number}.a.test" for number in range(65)), "a.test"], ("a.test",)),
    ],
)
def test_what_an_intermediate_may_sign_holds_all_its_names(names: list[str], suffixes: tuple[str, ...] | None) -> None:
    assert suffixes == permitted(names)


@pytest.mark.parametrize(
    ("names", "host", "accepted"),
    [
        (["good.test"], "good.test", True),
        (["*.good.test"], "a.good.test", True),
        (["other.test", "*.good.test"], "a.good.test", True),
        (["*"], "evil.test", True),
        (["good.test"], "evil.test", False),
        (["good.test"], "evilgood.test", False),
        (["a.good.test"], "good.test", False),
        ([], "good.test", False),
        (["good.test"], "192.0.2.7", False),
        ([], "2001:db8::7", False),
        (["*"], "192.0.2.7", True),
    ],
)
def test_a_stolen_intermediate_signs_for_no_name_that_it_was_not_issued_for(
    tmp_path: Path, names: list[str], host: str, accepted: bool
) -> None:
    """By the judgement of two verifiers. A compromised worker would make such a leaf."""
    root = Root.create(NOW)
    leaf = issue(root.issue_intermediate(NOW, names), host, authority=False)
    (tmp_path / "root.pem").write_text(root.certificate_pem)
    (tmp_path / "chain.pem").write_text(leaf.chain_pem)
    address = host[0].isdigit()
    command = ["openssl", "verify", "-x509_strict", "-no-CAfile", "-no-CApath", "-no-CAstore"]
    command += ["-attime", str(int(NOW.timestamp())), "-purpose", "sslserver"]
    command += ["-verify_ip" if address else "-verify_hostname", host]
    command += ["-trusted", "root.pem", "-untrusted", "chain.pem", "chain.pem"]
    outcome = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert accepted == (outcome.returncode == 0), outcome.stderr
    assert accepted or "subtree violation" in outcome.stderr
    first, *rest = x509.load_pem_x509_certificates(leaf.chain_pem.encode())
    store = TrustStore([x509.load_pem_x509_certificate(root.certificate_pem.encode())])
    subject = x509.IPAddress(ip_address(host)) if address else x509.DNSName(host)
    verifier = PolicyBuilder().store(store).time(NOW).build_server_verifier(subject)
    try:
        verifier.verify(first, rest)
    except VerificationError:
        assert not accepted
    else:
        assert accepted
