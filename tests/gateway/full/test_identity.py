"""Leaves name one host, chain to the sandbox's root through the intermediate, and end in time."""

import datetime

import pytest
from cryptography import x509

from gateway.full.identity import CACHE, LeafMint

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
    with pytest.raises(ValueError, match="does not hold now"):
        authority.leaf("good.test")


def test_a_key_of_another_certificate_is_refused(sandbox_root):
    one, other = sandbox_root.intermediate("One"), sandbox_root.intermediate("Other")
    with pytest.raises(ValueError, match="does not belong"):
        LeafMint(one.pem, "", other.key_pem)


def test_a_long_name_fits(sandbox_root):
    host = ".".join(["a" * 60] * 3) + ".good.test"
    leaf = x509.load_pem_x509_certificates(mint(sandbox_root).leaf(host).chain_pem)[0]
    assert [] == list(leaf.subject)
