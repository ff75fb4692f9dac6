"""Plans of substitutions, and all enumerations of the uses of secrets, which include them."""

import json
from dataclasses import replace

import pytest

from policy.compiled import CompiledPolicy, secrets_of, secrets_to
from policy.decision import AllowFlow, AllowRequest, Deny, Treatment, decide_flow, decide_request, judged
from policy.facts import FlowFacts, RequestFacts, Scheme
from policy.injection import InjectionKind, InjectionPlan, SubstitutionPlan, Surface
from policy.names import HostPattern
from policy.paths import PathPattern
from policy.rules import STANDARD, Action, Binding, Endpoint, Mode, Precedence, Rule, RuleList

HTTPS = Endpoint(443, Scheme.HTTPS)
PLAN = SubstitutionPlan("p/r", "token", "{TOKEN}", (Surface.PATH, Surface.BODY))
RULE = Rule("p/r", Action.ALLOW, (HostPattern("good.test"),), endpoints=(HTTPS,), substitutions=(PLAN,))
BOUND = Binding(
    "b", (HostPattern("good.test"),), (Scheme.HTTPS,), ("GET",), (PathPattern("/*"),), (), (replace(PLAN, secret="c"),)
)
FACTS = RequestFacts("good.test", 443, Scheme.HTTPS, "GET", "/")


def policy(*rules: Rule, mode: Mode = Mode.ENFORCE) -> CompiledPolicy:
    return CompiledPolicy("p", (RuleList("p", Precedence.DENY_WINS, mode, rules),))


OPEN = replace(RULE, substitutions=())
SOURCES = {"a rule": policy(RULE), "a binding": replace(policy(OPEN), bindings=(BOUND,))}


@pytest.mark.parametrize("case", SOURCES)
def test_a_secret_that_is_only_substituted_is_a_use_like_any_other(case: str) -> None:
    """It is granted, searched for in responses, sent with the request, and its flow is inspected."""
    given = SOURCES[case]
    (use,) = secrets_of(given)
    (at,) = secrets_to(given, "good.test")
    decision = decide_request(given, FACTS)
    flow = decide_flow(given, FACTS.flow)

    assert ("good.test", 443, Scheme.HTTPS, "substitution") == (use.host, use.port, use.scheme, use.kind)
    assert isinstance(decision, AllowRequest)
    assert (at.plan,) == decision.plans == decision.substitutions
    assert use.secret == at.plan.secret
    assert isinstance(flow, AllowFlow)
    assert Treatment.INSPECT is flow.treatment
    assert given == CompiledPolicy.from_json(json.loads(json.dumps(given.to_json())))
    assert given.digest != policy(OPEN).digest


def test_a_path_with_two_readings_is_denied_where_a_placeholder_can_be_replaced() -> None:
    ambiguous = replace(FACTS, path="/a/../b")

    for given in SOURCES.values():
        decision = decide_request(given, ambiguous)
        assert isinstance(decision, Deny)
        assert "ambiguous-path" == decision.rule
        assert judged(given, FACTS) != judged(given, ambiguous)
    assert isinstance(decide_request(policy(OPEN), ambiguous), AllowRequest)


def test_an_observed_denial_gets_no_substitution() -> None:
    watched = policy(RULE, replace(OPEN, id="shut", action=Action.DENY), mode=Mode.OBSERVE)
    decision = decide_request(watched, FACTS)

    assert isinstance(decision, AllowRequest)
    assert decision.observed is not None
    assert () == decision.plans
    with pytest.raises(ValueError, match="gets no secret"):
        AllowRequest("r", (), Deny("r", "x"), (PLAN,))


def test_plain_http_needs_the_operators_word_for_a_substitution_too() -> None:
    plain = policy(replace(RULE, endpoints=STANDARD))
    facts = replace(FACTS, port=80, scheme=Scheme.HTTP)
    refused = decide_request(plain, facts)

    assert isinstance(refused, Deny)
    assert "plaintext-secret" == refused.rule
    assert isinstance(decide_request(replace(plain, plaintext_secrets=("good.test",)), facts), AllowRequest)


@pytest.mark.parametrize(
    ("other", "denied"),
    [
        (replace(PLAN, secret="other"), True),
        (replace(PLAN, secret="other", surfaces=(Surface.HEADER, Surface.BODY)), True),
        (replace(PLAN, secret="other", surfaces=(Surface.HEADER,)), False),
        (replace(PLAN, secret="other", placeholder="{token}"), False),
        (replace(PLAN, surfaces=(Surface.BODY,)), False),
    ],
)
def test_two_secrets_for_one_placeholder_on_one_surface_are_denied(other: SubstitutionPlan, denied: bool) -> None:
    second = replace(RULE, id="p/second", substitutions=(other,))
    decision = decide_request(policy(RULE, second), FACTS)

    if denied:
        assert isinstance(decision, Deny)
        assert "injection-ambiguous" == decision.rule
    else:
        assert isinstance(decision, AllowRequest)
        assert (PLAN, other) == decision.substitutions


def test_a_rule_with_a_substitution_allows_exact_hosts_only() -> None:
    with pytest.raises(ValueError, match="not to a wildcard"):
        replace(RULE, hosts=(HostPattern("*.good.test"),))
    with pytest.raises(ValueError, match="injects nothing"):
        replace(RULE, action=Action.DENY)
    with pytest.raises(ValueError, match="cannot be inspected"):
        replace(RULE, hosts=(), addresses=("203.0.113.0/24",))


@pytest.mark.parametrize("placeholder", ["", " ", "a\nb", "a\0", "\ud800", "x" * 1025])
def test_a_placeholder_is_a_short_printable_text(placeholder: str) -> None:
    with pytest.raises(ValueError, match="placeholder"):
        replace(PLAN, placeholder=placeholder)
    assert "x" * 1024 == replace(PLAN, placeholder="x" * 1024).placeholder


def test_a_substitution_has_surfaces_each_once() -> None:
    for surfaces in ((), (Surface.PATH, Surface.PATH)):
        with pytest.raises(ValueError, match="surfaces"):
            replace(PLAN, surfaces=surfaces)


def test_injections_and_substitutions_of_one_request_are_sent_both() -> None:
    key = InjectionPlan("p/r", "key", InjectionKind.API_KEY, "X-Api-Key")
    decision = decide_request(policy(replace(RULE, injections=(key,))), FACTS)

    assert isinstance(decision, AllowRequest)
    assert (key, PLAN) == decision.plans
    assert FlowFacts("good.test", 443, Scheme.HTTPS) == FACTS.flow
