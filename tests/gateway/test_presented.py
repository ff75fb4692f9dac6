"""A certificate is read once for each value, is judged at each use, and equals another one by plan and fingerprint."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from gateway.effects import SecretRefused
from gateway.presented import presented_plans, presents, read
from policy.injection import InjectionKind, InjectionPlan, SubstitutionPlan, Surface
from tests.client_certificates import DAY, Times, authority
from vault.secret import Secret

NOW = datetime.now(UTC)
ROOT = authority("Root")
PLAN = InjectionPlan("p/r", "s", InjectionKind.CLIENT_CERTIFICATE, "")
HEADER = InjectionPlan("p/r", "s", InjectionKind.BEARER, "Authorization")
PLACEHOLDER = SubstitutionPlan("p/r", "s", "{TOKEN}", (Surface.PATH,))
VALUE = Secret(ROOT.issue("a", times=Times(NOW - DAY, NOW + 2 * DAY)).value)


def test_only_plans_of_the_handshake_are_presented() -> None:
    assert [True, False, False] == [presents(plan) for plan in (PLAN, HEADER, PLACEHOLDER)]
    assert {PLAN} == presented_plans([PLAN, HEADER, PLACEHOLDER])


def test_a_value_is_read_once() -> None:
    """Another value, also an equal one, and another plan are read again."""
    first = read(PLAN, VALUE, NOW, None)
    assert first is read(PLAN, VALUE, NOW, first)
    for plan, value in ((PLAN, Secret(VALUE.reveal())), (replace(PLAN, binding="p/other"), VALUE)):
        assert first is not read(plan, value, NOW, first)


def test_equal_certificates_under_one_plan_are_equal() -> None:
    first = read(PLAN, VALUE, NOW, None).presented
    assert first == read(PLAN, Secret(VALUE.reveal()), NOW, None).presented
    assert first != read(PLAN, Secret(ROOT.issue("a").value), NOW, None).presented
    assert first != read(replace(PLAN, secret="t"), VALUE, NOW, None).presented


def test_the_validity_is_judged_at_each_use() -> None:
    """Also of a certificate that was read before."""
    kept = read(PLAN, VALUE, NOW, None)
    for now, reason in ((NOW + 3 * DAY, "expired at"), (NOW - 2 * DAY, "is not valid before")):
        for known in (None, kept):
            with pytest.raises(SecretRefused) as refused:
                read(PLAN, VALUE, now, known)
            assert reason in refused.value.reason


def test_a_value_that_is_no_certificate_is_refused_without_being_quoted() -> None:
    with pytest.raises(SecretRefused) as refused:
        read(PLAN, Secret("token-token-token"), NOW, None)
    assert "the value of the secret is no client certificate" in refused.value.reason
    assert "token-token" not in refused.value.reason


def test_a_representation_shows_no_key() -> None:
    kept = read(PLAN, VALUE, NOW, None)
    for text in (repr(kept), repr(kept.presented), str(kept.presented.certificate)):
        assert not any(line in text for line in VALUE.reveal().splitlines())
