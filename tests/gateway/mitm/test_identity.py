"""Leaf certificates name one host, chain to the sandbox's root through the intermediate, and expire in time."""

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gateway.tls.identity import CACHE, LeafMint

DAY = datetime.timedelta(days=1)


def mint(sandbox_root, **more):
    intermediate = sandbox_root.intermediate("Worker")
    return LeafMint(intermediate.pem, sandbox_root.pem, intermediate.key_pem, **more)


def test_a_leaf_has_exactly_one_name_and_is_served_with_its_intermediate_but_not_the_root(sandbox_root):
    leaf, intermediate = x509.load_pem_x509_certificates(mint(sandbox_root).leaf("a.good.test").chain_pem)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ["a.good.test"] == [name.value for name in names]
    leaf.verify_directly_issued_by(intermediate)
    intermediate.verify_directly_issued_by(sandbox_root.certificate)
    assert leaf.not_valid_after_utc <= intermediate.not_valid_after_utc
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_leaves_are_reused_and_the_cache_is_bounded(sandbox_root):
    authority = mint(sandbox_root)
    first = authority.leaf("good.test")
    assert first is authority.leaf("good.test")
    for number in range(CACHE):
        authority.leaf(f"h{number}.good.test")
    assert first is not authority.leaf("good.test")


def test_a_leaf_is_renewed_before_it_ends_and_an_expired_intermediate_mints_nothing(sandbox_root):
    now = [datetime.datetime.now(datetime.UTC)]
    authority = mint(sandbox_root, now=lambda: now[0])
    first = authority.leaf("good.test")
    now[0] += DAY - datetime.timedelta(minutes=20)
    assert first is not authority.leaf("good.test")
    now[0] += DAY
    with pytest.raises(ValueError, match="is not valid now"):
        authority.leaf("good.test")


def test_a_key_of_another_certificate_is_refused(sandbox_root):
    one, other = sandbox_root.intermediate("One"), sandbox_root.intermediate("Other")
    with pytest.raises(ValueError, match="does not belong"):
        LeafMint(one.pem, "", other.key_pem)


def test_a_long_name_fits(sandbox_root):
    host = ".".join(["a" * 60] * 3) + ".good.test"
    leaf = x509.load_pem_x509_certificates(mint(sandbox_root).leaf(host).chain_pem)[0]
    assert [] == list(leaf.subject)
    assert leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).critical  # the only name there is


def intermediate(root, key, permitted=None, *, lasts=DAY):
    """Return an intermediate with `key` for the `permitted` names."""
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Worker")]))
        .issuer_name(root.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + lasts)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    if permitted is not None:
        names = x509.NameConstraints([x509.DNSName(name) for name in permitted], None)
        builder = builder.add_extension(names, critical=True)
    certificate = builder.sign(root.key, hashes.SHA256())
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return certificate, (
        certificate.public_bytes(encoding),
        root.pem,
        key.private_bytes(encoding, form, serialization.NoEncryption()),
    )


def made_at(pems, now):
    return LeafMint(*pems, now=lambda: now)


@pytest.mark.parametrize(
    ("host", "permitted"),
    [
        ("good.test", True),
        ("a.good.test", True),
        ("a.a.good.test", True),
        ("evilgood.test", False),
        ("test", False),
        ("good.test.evil.test", False),
        ("other.test", True),
    ],
)
def test_a_leaf_is_made_for_names_that_the_intermediate_may_sign(sandbox_root, host, permitted):
    _, pems = intermediate(sandbox_root, ec.generate_private_key(ec.SECP256R1()), ["good.test", "other.test"])
    authority = LeafMint(*pems)
    assert permitted is authority.signs(host)
    if permitted:
        authority.leaf(host)
    else:
        with pytest.raises(ValueError, match="not for this host"):
            authority.leaf(host)


def test_a_leaf_lasts_no_longer_than_its_intermediate_and_begins_no_earlier(sandbox_root):
    hours = datetime.timedelta(hours=1)
    certificate, pems = intermediate(sandbox_root, ec.generate_private_key(ec.SECP256R1()), lasts=4 * hours)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    second = datetime.timedelta(seconds=1)
    for outside in (begin - second, end, end + second):
        assert not made_at(pems, outside).signs("good.test")
        assert made_at(pems, outside).due
        with pytest.raises(ValueError, match="is not valid now"):
            made_at(pems, outside).leaf("good.test")
    leaf = x509.load_pem_x509_certificates(made_at(pems, begin + hours / 2).leaf("good.test").chain_pem)[0]
    assert (begin, end) == (leaf.not_valid_before_utc, leaf.not_valid_after_utc)
    assert [False, False, True] == [made_at(pems, begin + part * hours).due for part in (0, 1.9, 2)]


def test_a_cached_leaf_is_renewed_half_an_hour_before_its_end(sandbox_root):
    certificate, pems = intermediate(sandbox_root, ec.generate_private_key(ec.SECP256R1()))
    now = [certificate.not_valid_before_utc]
    authority = LeafMint(*pems, now=lambda: now[0])
    first = authority.leaf("good.test")
    minutes = datetime.timedelta(minutes=1)
    now[0] = certificate.not_valid_after_utc - 31 * minutes
    assert first is authority.leaf("good.test")
    now[0] += 2 * minutes
    assert first is not authority.leaf("good.test")


def test_a_leaf_serves_one_host_and_signs_nothing(sandbox_root):
    leaf = x509.load_pem_x509_certificates(mint(sandbox_root).leaf("good.test").chain_pem)[0]
    found = leaf.extensions.get_extension_for_class
    assert [ExtendedKeyUsageOID.SERVER_AUTH] == list(found(x509.ExtendedKeyUsage).value)
    usage = found(x509.KeyUsage).value
    assert (True, False, False) == (usage.digital_signature, usage.key_cert_sign, usage.crl_sign)
    assert ["good.test"] == found(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)


def test_the_intermediate_is_served_once(sandbox_root):
    authority = sandbox_root.intermediate("Worker")
    served = LeafMint(authority.pem, authority.pem + sandbox_root.pem, authority.key_pem).leaf("good.test").chain_pem
    assert [authority.certificate] == x509.load_pem_x509_certificates(served)[1:]


def test_an_intermediate_of_another_kind_of_key_is_refused(sandbox_root):
    _, pems = intermediate(sandbox_root, ed25519.Ed25519PrivateKey.generate())
    with pytest.raises(ValueError, match="does not belong"):
        LeafMint(*pems)
