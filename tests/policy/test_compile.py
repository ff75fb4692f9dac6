"""Compiled policies: JSON, digest, bindings, secrets."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.api import ApiPolicy, ApiPolicyError, parse_network_policy
from policy.bindings import parse_bindings
from policy.compile import (
    DENY_ALL,
    CompiledPolicy,
    UnknownPolicy,
    compile_api,
    compile_default,
    compile_named,
    narrow,
    secrets_of,
)
from policy.compiled import SecretAt, SecretUse, secrets_to
from policy.document import PolicyDocument
from policy.facts import Scheme
from policy.injection import InjectionKind, InjectionPlan
from policy.load import load_text
from policy.names import HostPattern
from policy.paths import PathPattern
from policy.rules import (
    STANDARD,
    Action,
    Binding,
    Ceiling,
    DnsSettings,
    Limits,
    Precedence,
    Rule,
    RuleList,
)
from wire.codec import CodecError

RICH = load_text("""
version: 1
ceiling: {hosts: [any-public, "*.corp.internal"], ports: [443, 8443]}
default: agents
always_deny: [evil.test, 10.0.0.0/8]
always_allow: [status.test]
plaintext_secrets: [plain.good.test]
wildcard_bindings: true
policies:
  base:
    dns: {query_rate: 5}
    rules: [{id: pkgs, hosts: [pkgs.test, "*.cdn.test"]}]
  agents:
    extends: [base]
    limits: {bytes_out: 1000}
    rules:
      - {id: api, host: good.test, methods: [GET], paths: ["/v1/*"], inject: {secret: token, as: basic, username: me}}
      - {id: plain, host: plain.good.test, schemes: [http], inject: {secret: plain, as: api-key, header: x-key}}
      - {id: no, action: deny, addresses: [93.184.217.0/24]}
""")
BINDING = {"name": "b", "match": {"hosts": ["good.test"]}, "auth": {"type": "bearer", "credential": "c"}}


def network(*targets: str, default: str = "deny") -> ApiPolicy:
    """Return a policy with these targets: allow rules, or deny rules for a prefix `!`."""
    rules = [{"action": "deny" if t[0] == "!" else "allow", "target": t.removeprefix("!")} for t in targets]
    return parse_network_policy({"defaultAction": default, "egress": rules})


POLICIES = {
    "deny-all": DENY_ALL,
    "a named policy": compile_named(RICH, "agents"),
    "an API policy": compile_api(RICH, network("good.test", "*.cdn.test", "!10.0.0.0/8"), parse_bindings([BINDING])),
    "both": narrow(compile_named(RICH, "base"), compile_api(RICH, network("pkgs.test", default="allow"))),
}


@pytest.mark.parametrize("case", POLICIES)
def test_a_policy_survives_json_and_keeps_its_digest(case: str) -> None:
    """Through text, as between processes."""
    policy = POLICIES[case]
    again = CompiledPolicy.from_json(json.loads(json.dumps(policy.to_json())))

    assert policy == again
    assert policy.digest == again.digest
    assert 64 == len(policy.digest)


_TARGETS = st.lists(
    st.sampled_from(["a.test", "!a.test", "*.a.test", "!*.b.test", "*", "10.0.0.0/8", "!::1"]), max_size=6
)


@given(_TARGETS, st.sampled_from(["allow", "deny"]), _TARGETS)
def test_two_policies_are_equal_exactly_when_their_digests_are(
    targets: list[str], default: str, others: list[str]
) -> None:
    """Every policy also survives JSON."""
    first = compile_api(RICH, network(*targets, default=default))
    second = compile_api(RICH, network(*others, default="deny"))

    assert first == CompiledPolicy.from_json(first.to_json())
    assert (first == second) == (first.digest == second.digest)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every place in a JSON value."""
    found = [path]
    if isinstance(value, dict):
        for key, item in value.items():
            found.extend(places(item, (*path, key)))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            found.extend(places(item, (*path, position)))
    return found


_SAMPLE = POLICIES["a named policy"].to_json()


@pytest.mark.parametrize("path", [p for p in places(_SAMPLE) if p])
def test_no_part_of_the_json_can_be_changed_or_removed(path: tuple[Any, ...]) -> None:
    """Another type, a missing key, an extra key, another text: each is refused at every place."""
    for change in ("wrong type", "remove", "extra"):
        document = copy.deepcopy(_SAMPLE)
        parent: Any = document
        for step in path[:-1]:
            parent = parent[step]
        match change:
            case "wrong type":
                parent[path[-1]] = 1.5
            case "remove":
                del parent[path[-1]]
            case _ if isinstance(parent[path[-1]], dict):
                parent[path[-1]]["odd"] = 1
            case _ if isinstance(parent[path[-1]], list):
                parent[path[-1]].append("odd.test")
            case _ if isinstance(parent[path[-1]], str):
                parent[path[-1]] += "x"
            case _:
                parent[path[-1]] = "x"
        with pytest.raises(CodecError):
            CompiledPolicy.from_json(document)


@pytest.mark.parametrize(
    "document", [None, [], {}, "x", {"format": 2}, {**_SAMPLE, "format": 1}, {**_SAMPLE, "format": True}]
)
def test_what_is_no_policy_is_refused(document: Any) -> None:
    """An empty document has no default policy."""
    with pytest.raises(CodecError):
        CompiledPolicy.from_json(document)


def test_a_bool_is_no_number_in_json() -> None:
    """In Python, `true` would equal 1."""
    document = copy.deepcopy(_SAMPLE)
    document["limits"]["connections"] = True

    with pytest.raises(CodecError, match=r"\$\.limits\.connections"):
        CompiledPolicy.from_json(document)


def test_a_policy_takes_the_rules_of_its_bases_and_keeps_their_ids() -> None:
    """Settings come from the nearest policy that has them. Modes are never inherited."""
    policy = compile_named(RICH, "agents")

    assert ["base/pkgs", "agents/api", "agents/plain", "agents/no"] == [rule.id for rule in policy.rules]
    assert (5, 1000) == (policy.dns.query_rate, policy.limits.bytes_out)
    assert policy == compile_default(RICH)


def test_the_default_of_an_empty_document_is_deny_all() -> None:
    """Without any input, nothing is allowed."""
    assert DENY_ALL == compile_default(PolicyDocument())
    with pytest.raises(UnknownPolicy):
        compile_named(PolicyDocument(), "agents")


def test_the_uses_of_secrets_are_listed_by_place() -> None:
    """The grants that are requested from the vault."""
    uses = [
        (use.secret, str(use.scheme), use.host, use.port, str(use.kind))
        for use in secrets_of(POLICIES["a named policy"])
    ]

    assert [
        ("plain", "http", "plain.good.test", 80, "api-key"),
        ("token", "https", "good.test", 443, "basic"),
    ] == uses
    assert ["inline:c"] == [use.secret for use in secrets_of(POLICIES["an API policy"])]


def test_what_a_host_can_be_sent_is_found_by_its_name_and_no_other() -> None:
    """For any method, path or port of a rule. A host that no rule with a secret names gets none."""
    for policy in POLICIES.values():
        hosts = {use.host.replace("*.", "deep.er.") for use in secrets_of(policy)} | {
            "good.test",
            "status.test",
            "x.test",
        }
        found = {
            (at.plan.secret, at.host, at.endpoint.port, at.endpoint.scheme)
            for host in hosts
            for at in secrets_to(policy, host)
        }
        expected = {
            (use.secret, use.host.replace("*.", "deep.er."), use.port, use.scheme) for use in secrets_of(policy)
        }
        assert expected <= found
        assert {secret for secret, *_ in found} == {use.secret for use in secrets_of(policy)}
    named = POLICIES["a named policy"]
    assert ["token"] == [at.plan.secret for at in secrets_to(named, "good.test")]
    assert () == secrets_to(named, "status.test") == secrets_to(named, "sub.good.test")


REFUSED_BINDINGS: dict[str, tuple[ApiPolicy, dict[str, Any], str]] = {
    "no rule at all": (network(), {}, 'binding "b" host "good.test" is not allowed by egress policy'),
    "only a default": (
        network(default="allow"),
        {},
        'binding "b" host "good.test" is not allowed by egress policy',
    ),
    "a denial ahead": (
        network("!*.test", "good.test"),
        {},
        'binding "b" host "good.test" is not allowed by egress policy',
    ),
    "the operator's denial": (
        network("evil.test"),
        {"hosts": ["evil.test"]},
        'binding "b" host "evil.test" is not allowed by egress policy',
    ),
    "above the ceiling": (
        network("printer.local"),
        {"hosts": ["printer.local"]},
        'binding "b" host "printer.local" is not allowed by egress policy',
    ),
    "plain HTTP without the switch": (
        network("good.test"),
        {"schemes": ["http"]},
        'binding "b": scheme http is not enabled by the operator for host "good.test"',
    ),
    "a wildcard that no rule covers": (
        network("a.good.test"),
        {"hosts": ["*.good.test"]},
        'binding "b" host "*.good.test" is not allowed by egress policy',
    ),
    "a denial inside the wildcard": (
        network("!bad.good.test", "*.good.test"),
        {"hosts": ["*.good.test"]},
        'binding "b" host "*.good.test" is not allowed by egress policy',
    ),
}


@pytest.mark.parametrize("case", REFUSED_BINDINGS)
def test_a_binding_needs_an_explicit_rule_and_the_operators_switches(case: str) -> None:
    """With the contract's texts."""
    policy, match, message = REFUSED_BINDINGS[case]
    bindings = parse_bindings([{**BINDING, "match": {"hosts": ["good.test"], **match}}])
    with pytest.raises(ApiPolicyError) as caught:
        compile_api(RICH, policy, bindings)

    assert message == str(caught.value)


def test_a_covered_binding_compiles_and_a_wildcard_needs_its_switch() -> None:
    """A control for the refusals above."""
    wild = parse_bindings([{**BINDING, "match": {"hosts": ["*.good.test"]}}])
    assert compile_api(RICH, network("*.good.test"), wild).bindings

    with pytest.raises(ApiPolicyError, match="wildcard hosts are not enabled by the operator"):
        compile_api(PolicyDocument(), network("*.good.test"), wild)


def test_a_narrowed_policy_has_the_stricter_of_both_operator_lists() -> None:
    """Both come from one document. If they differ, nothing is allowed that one of them denies."""

    def side(
        name: str, host: str, deny: tuple[str, ...], allow: tuple[str, ...], plain: tuple[str, ...], **more: Any
    ) -> Any:
        rules = (Rule("r", Action.ALLOW, (HostPattern(host),)),)
        lists = (RuleList(name, Precedence.FIRST_MATCH, rules=rules, ceiling=Ceiling()),)
        bindings = (Binding(name, (HostPattern(host),), (Scheme.HTTPS,), ("GET",), (PathPattern("/"),)),)
        return CompiledPolicy(
            name, lists, bindings=bindings, always_deny=deny, always_allow=allow, plaintext_secrets=plain, **more
        )

    dns, limits = DnsSettings(query_rate=7), Limits(connections=3)
    named = side(
        "n", "a.test", ("x.test", "y.test"), ("s.test", "t.test"), ("p.test", "q.test"), dns=dns, limits=limits
    )
    api = side("a", "b.test", ("y.test", "z.test"), ("t.test", "u.test"), ("q.test", "r.test"))
    both = narrow(named, api)

    assert both == CompiledPolicy(
        "n+a",
        (named.lists[0], replace(api.lists[0], ceiling=None)),
        bindings=(*named.bindings, *api.bindings),
        always_deny=("x.test", "y.test", "z.test"),
        always_allow=("t.test",),
        plaintext_secrets=("q.test",),
        dns=dns,
        limits=limits,
    )


def test_a_policy_has_the_operators_lists_and_its_own_name() -> None:
    """Also the policy that allows nothing, and a caller's policy."""
    lists = (RICH.always_deny, RICH.always_allow, RICH.plaintext_secrets)
    assert all(lists)
    for name, policy in {
        "deny-all": compile_named(RICH, "deny-all"),
        "agents": compile_named(RICH, "agents"),
        "networkPolicy": compile_api(RICH, network("good.test")),
    }.items():
        assert (name, *lists) == (policy.name, policy.always_deny, policy.always_allow, policy.plaintext_secrets)
        assert [name] == [rules.name for rules in policy.lists]


def test_what_a_binding_sends_is_sent_to_its_hosts_only() -> None:
    plans = tuple(InjectionPlan("binding:b", "inline:c", InjectionKind.API_KEY, name) for name in ("X-A", "X-B"))
    hosts = (HostPattern("b.test"), HostPattern("*.c.test"))
    bound = Binding("b", hosts, (Scheme.HTTPS,), ("GET",), (PathPattern("/"),), plans)
    policy = replace(DENY_ALL, bindings=(bound,))

    for host in ("b.test", "a.c.test"):
        assert tuple(SecretAt(plan, host, STANDARD[1]) for plan in plans) == secrets_to(policy, host)
    assert () == secrets_to(policy, "c.test")
    assert tuple(
        SecretUse("inline:c", host, 443, Scheme.HTTPS, "api-key", header, "binding:b")
        for host in ("*.c.test", "b.test")
        for header in ("x-a", "x-b")
    ) == secrets_of(policy)
