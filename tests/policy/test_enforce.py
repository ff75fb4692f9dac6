"""Admitted rows are enforced under every later document: drawn rows with drawn documents."""

from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policy.api import ApiPolicy, ApiPolicyError, parse_network_policy
from policy.bindings import ApiBinding, parse_binding
from policy.compile import (
    CompiledPolicy,
    Dropped,
    Part,
    compile_api,
    compile_default,
    compile_named,
    enforce,
    secrets_of,
)
from policy.decision import AllowRequest, Deny, decide_flow, decide_request
from policy.document import PolicyDocument, PolicySource
from policy.facts import FlowFacts, RequestFacts, Scheme
from policy.injection import InjectionKind, InjectionPlan
from policy.names import HostPattern
from policy.rules import ANY_PUBLIC, STANDARD, Action, Ceiling, Precedence, Rule, RuleList

HOSTS = ("a.z.test", "b.a.z.test", "c.b.a.z.test", "other.test", "printer.local")
PATTERNS = (*HOSTS, "*.a.z.test", "*.b.a.z.test", "*.z.test")
PATHS = ("/", "/v1/x")
REQUESTS = tuple(
    RequestFacts(host, endpoint.port, endpoint.scheme, method, path)
    for host, endpoint, method, path in product(HOSTS, STANDARD, ("GET", "POST"), PATHS)
)

patterns = st.lists(st.sampled_from(PATTERNS), max_size=2, unique=True).map(tuple)


def _rule(number: int, action: Action, hosts: tuple[str, ...], secret: bool) -> Rule:
    plain = secret and action is Action.ALLOW and not any(host.startswith("*") for host in hosts)
    plan = InjectionPlan(f"r{number}", "token", InjectionKind.BEARER, "Authorization")
    return Rule(
        f"r{number}", action, tuple(map(HostPattern, hosts)), endpoints=STANDARD, injections=(plan,) if plain else ()
    )


rules = st.lists(
    st.tuples(st.sampled_from(Action), st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2), st.booleans()),
    max_size=3,
).map(lambda drawn: tuple(_rule(n, action, tuple(hosts), secret) for n, (action, hosts, secret) in enumerate(drawn)))


@st.composite
def documents(draw: st.DrawFn) -> PolicyDocument:
    """Draw any document with up to two policies, one of which can extend the other."""
    names = draw(st.sampled_from([(), ("p",), ("p", "q")]))
    policies = {
        name: PolicySource(name, ("p",) if name == "q" and draw(st.booleans()) else (), rules=draw(rules))
        for name in names
    }
    return PolicyDocument(
        ceiling=Ceiling(
            draw(st.sampled_from([(ANY_PUBLIC,), (ANY_PUBLIC, "printer.local"), ("*.a.z.test",), ("other.test",)])),
            draw(st.sampled_from([(80, 443), (443,), (80,)])),
        ),
        default=draw(st.sampled_from(["deny-all", *names])),
        always_deny=draw(patterns),
        always_allow=draw(patterns),
        plaintext_secrets=draw(st.lists(st.sampled_from(HOSTS), max_size=3, unique=True).map(tuple)),
        wildcard_bindings=draw(st.booleans()),
        policies=MappingProxyType(policies),
    )


def binding(name: str, **match: Any) -> ApiBinding:
    return parse_binding({"name": name, "match": match, "auth": {"type": "bearer", "credential": f"of-{name}"}})


bindings = st.lists(
    st.fixed_dictionaries(
        {
            "hosts": st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2),
            "schemes": st.sampled_from([["https"], ["http"], ["http", "https"]]),
            "methods": st.sampled_from([["GET"], ["POST"], ["GET", "POST"]]),
            "paths": st.sampled_from([["/*"], ["/v1/*"]]),
        }
    ),
    max_size=4,
).map(lambda drawn: tuple(binding(f"b{number}", **match) for number, match in enumerate(drawn)))
network_policies = st.builds(
    lambda egress, default: parse_network_policy(
        {"defaultAction": default, "egress": [{"action": action, "target": target} for action, target in egress]}
    ),
    st.lists(st.tuples(st.sampled_from(["allow", "allow", "deny"]), st.sampled_from(PATTERNS)), max_size=4),
    st.sampled_from(["deny", "allow"]),
)
Row = tuple[str | None, ApiPolicy | None, tuple[ApiBinding, ...]]
rows: st.SearchStrategy[Row] = st.tuples(
    st.sampled_from([None, "p", "q", "gone"]), st.none() | network_policies, bindings
)


def _named(targets: tuple[str, ...], host: str) -> bool:
    return any(HostPattern(target).matches(host) for target in targets)


def _operators_part(document: PolicyDocument, row: Row) -> CompiledPolicy:
    """Return the most that the document permits to a row, for any content of the row."""
    name, network_policy, _ = row
    if name is not None and name not in document.policies:
        return compile_named(document, "deny-all")
    if name is not None:
        return compile_named(document, name)
    if network_policy is None:
        return compile_default(document)
    anything = RuleList("ceiling", Precedence.FIRST_MATCH, default_action=Action.ALLOW, ceiling=document.ceiling)
    return replace(compile_named(document, "deny-all"), lists=(anything,))


@given(documents(), rows)
def test_nothing_is_allowed_that_the_document_in_force_denies(document: PolicyDocument, row: Row) -> None:
    policy, _ = enforce(document, *row)
    most = _operators_part(document, row)
    for request in REQUESTS:
        decision = decide_request(policy, request)
        if isinstance(decision, Deny):
            continue
        assert not _named(document.always_deny, request.host)
        flow = FlowFacts(request.host, request.port, request.scheme)
        assert not isinstance(decide_flow(most, flow), Deny)
        if decision.injections and request.scheme is Scheme.HTTP:
            assert request.host in document.plaintext_secrets


@given(documents(), rows)
def test_each_binding_is_in_force_or_named_with_a_reason(document: PolicyDocument, row: Row) -> None:
    """A dropped binding has no use of its secret. A kept one is complete, and would be admitted unchanged."""
    policy, dropped = enforce(document, *row)
    name, network_policy, given_bindings = row
    out = [item.name for item in dropped if item.part is Part.BINDING]
    kept = [item.name for item in policy.bindings]

    assert sorted(item.name for item in given_bindings) == sorted(out + kept)
    assert all(item.reason for item in dropped)
    gone = name is not None and name not in document.policies
    assert gone == any(item.part is Part.POLICY and item.name == name for item in dropped)
    assert not {f"inline:of-{item}" for item in out} & {use.secret for use in secrets_of(policy)}
    if network_policy is not None and not gone:
        compile_api(document, network_policy, tuple(item for item in given_bindings if item.name in kept))


@given(documents(), network_policies, bindings)
def test_what_is_admitted_is_enforced_whole_and_nothing_else(
    document: PolicyDocument, network_policy: ApiPolicy, given_bindings: tuple[ApiBinding, ...]
) -> None:
    policy, dropped = enforce(document, None, network_policy, given_bindings)
    try:
        admitted = compile_api(document, network_policy, given_bindings)
    except ApiPolicyError as error:
        assert str(error) == dropped[0].reason
    else:
        assert (admitted, ()) == (policy, dropped)


_WIDE = PolicyDocument(wildcard_bindings=True, plaintext_secrets=HOSTS)
_ALL = parse_network_policy(
    {"defaultAction": "deny", "egress": [{"action": "allow", "target": target} for target in PATTERNS]}
)


@given(documents(), bindings)
@example(  # the wildcard's secret would go to the exact host, which had another one
    replace(_WIDE, plaintext_secrets=()),
    (binding("exact", hosts=["b.a.z.test"], schemes=["http", "https"]), binding("wild", hosts=["*.a.z.test"])),
)
@example(  # and further, from one to the next
    replace(_WIDE, plaintext_secrets=()),
    (
        binding("exact", hosts=["c.b.a.z.test"], schemes=["http", "https"]),
        binding("wild", hosts=["*.b.a.z.test", "a.z.test"]),
        binding("wider", hosts=["*.z.test"]),
    ),
)
def test_no_secret_goes_anywhere_because_another_was_dropped(
    document: PolicyDocument, given_bindings: tuple[ApiBinding, ...]
) -> None:
    """Each request gets no secret, or the one that it had under a document that allows all bindings."""
    before, refused = enforce(_WIDE, None, _ALL, given_bindings)
    after, _ = enforce(document, None, _ALL, given_bindings)
    if refused:
        return
    for request in REQUESTS:
        decision = decide_request(after, request)
        if isinstance(decision, AllowRequest) and decision.injections:
            former = decide_request(before, request)
            assert isinstance(former, AllowRequest)
            assert former.injections == decision.injections


BOUND = ApiPolicy(parse_network_policy({"egress": [{"action": "allow", "target": "a.z.test"}]}).rules)
CHANGES: dict[str, tuple[PolicyDocument, Row, list[Dropped]]] = {
    "a bound host is denied": (
        PolicyDocument(always_deny=("a.z.test",)),
        (None, BOUND, (binding("b", hosts=["a.z.test"]),)),
        [Dropped(Part.BINDING, "b", 'binding "b" host "a.z.test" is not allowed by egress policy')],
    ),
    "the named policy is gone": (
        PolicyDocument(),
        ("agents", BOUND, (binding("b", hosts=["a.z.test"]),)),
        [
            Dropped(Part.POLICY, "agents", "there is no policy named 'agents'"),
            Dropped(Part.BINDING, "b", "binding \"b\": there is no policy named 'agents'"),
        ],
    ),
    "bindings that compete": (
        PolicyDocument(),
        (None, BOUND, (binding("b", hosts=["a.z.test"]), binding("c", hosts=["a.z.test"]))),
        [
            Dropped(Part.BINDING, "b", 'bindings "b" and "c" can match the same request'),
            Dropped(Part.BINDING, "c", 'bindings "b" and "c" can match the same request'),
        ],
    ),
    "a binding without a network policy": (
        PolicyDocument(),
        (None, None, (binding("b", hosts=["a.z.test"]),)),
        [Dropped(Part.BINDING, "b", 'binding "b": there is no network policy with a rule for its hosts')],
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_reason_of_each_part_that_is_dropped(case: str) -> None:
    document, row, expected = CHANGES[case]
    policy, dropped = enforce(document, *row)

    assert (expected, ()) == (list(dropped), policy.bindings)
