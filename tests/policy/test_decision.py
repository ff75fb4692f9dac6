"""Decisions, compared with tables and with small reference models."""

from collections.abc import Callable
from dataclasses import replace
from ipaddress import IPv4Network, ip_address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.api import parse_network_policy
from policy.bindings import parse_bindings
from policy.compile import compile_api, compile_named, narrow
from policy.compiled import DENY_ALL, CompiledPolicy
from policy.decision import (
    AllowAddress,
    AllowFlow,
    AllowName,
    AllowRequest,
    Deny,
    Treatment,
    decide_flow,
    decide_name,
    decide_request,
    judged,
    refuse_credentials,
)
from policy.destination import decide_address
from policy.document import PolicyDocument
from policy.facts import AddressSource, Destination, FlowFacts, RequestFacts, Scheme
from policy.injection import InjectionKind, InjectionPlan
from policy.load import load_text
from policy.names import HostPattern
from policy.paths import PathPattern
from policy.rules import STANDARD, Action, Binding, Endpoint, Precedence, Rule, RuleList

DOCUMENT = load_text("""
version: 1
always_deny: [evil.test, "*.evil.test", 198.51.100.0/24, 93.184.216.66]
always_allow: [status.good.test]
plaintext_secrets: [plain.good.test]
policies:
  agents:
    rules:
      - {id: splice, host: splice.test}
      - {id: wild, host: "*.cdn.test", ports: [443]}
      - id: api
        host: good.test
        ports: [443]
        methods: [GET, POST]
        paths: ["/v1/*"]
        inject: {secret: token, as: bearer}
      - {id: open, host: good.test, ports: [443], paths: ["/open/*"]}
      - {id: no-admin, action: deny, host: good.test, paths: ["/v1/Admin/*"]}
      - {id: no-delete, action: deny, host: splice.test, methods: [DELETE], ports: [80]}
      - {id: shut, action: deny, host: shut.cdn.test}
      - {id: dev, host: dev.good.test, ports: [8080], schemes: [http]}
      - {id: tls-only, host: tls.good.test, ports: [443, 8443]}
      - {id: plain, host: plain.good.test, schemes: [http], inject: {secret: plain, as: bearer}}
      - {id: one, host: two.good.test, paths: ["/a/*"], inject: {secret: first, as: bearer}}
      - {id: other, host: two.good.test, paths: ["/b/*"], inject: {secret: second, as: bearer}}
      - {id: status, host: status.good.test, inject: {secret: status, as: bearer}, paths: ["/me/*"]}
      - {id: box, address: 93.184.216.34}
      - {id: not-there, action: deny, addresses: [93.184.217.0/24]}
  watch:
    extends: [agents]
    mode: observe
""")
AGENTS = compile_named(DOCUMENT, "agents")
WATCH = compile_named(DOCUMENT, "watch")
HTTP, HTTPS = Scheme.HTTP, Scheme.HTTPS


def api(rules: str, default: str = "deny", bindings: Any = None, document: PolicyDocument = DOCUMENT) -> CompiledPolicy:
    """Return an API policy of the words `+allow -deny`, in order."""
    egress = [{"action": "allow" if word[0] == "+" else "deny", "target": word[1:]} for word in rules.split()]
    return compile_api(
        document, parse_network_policy({"defaultAction": default, "egress": egress}), parse_bindings(bindings or [])
    )


def bare(policy: CompiledPolicy, ip: str, port: int, exceptions: tuple[IPv4Network, ...] = ()) -> AllowAddress | Deny:
    """Judge a TLS flow without a server name."""
    return decide_address(policy, Destination(None, ip_address(ip), port, HTTPS, AddressSource.LITERAL), exceptions)


def resolved(policy: CompiledPolicy, host: str, ip: str, port: int) -> AllowAddress | Deny:
    """Judge a DNS answer."""
    return decide_address(policy, Destination(host, ip_address(ip), port, HTTPS, AddressSource.RESOLVED))


def outcome(decision: AllowName | AllowFlow | AllowRequest | AllowAddress | Deny) -> str:
    """Return a decision as text.

    An allow is its `rule` and treatment, a denial `!rule`, an observed denial has `?rule` in front.
    """
    match decision:
        case Deny(rule, reason):
            assert reason
            return f"!{rule}"
        case AllowFlow(rule, treatment, observed):
            text = f"{rule} {treatment}"
        case AllowRequest(rule, injections, observed):
            text = " ".join([rule, *(f"{plan.name}={plan.secret}" for plan in injections)])
        case AllowName(rule, observed) | AllowAddress(rule, observed):
            text = rule
    return text if observed is None else f"?{observed.rule} {text}"


FLOWS = {
    "an allowed host with nothing to inspect is spliced": ("splice.test", 443, HTTPS, "agents/splice splice"),
    "plain HTTP is always inspected": ("splice.test", 80, HTTP, "agents/splice inspect"),
    "methods, paths and secrets make a flow inspected": ("good.test", 443, HTTPS, "agents/api inspect"),
    "https on port 80 is nobody's": ("splice.test", 80, HTTPS, "!scheme"),
    "http on port 443 is nobody's": ("splice.test", 443, HTTP, "!scheme"),
    "another port is not allowed": ("splice.test", 8443, HTTPS, "!default"),
    "a port that the rule names is": ("tls.good.test", 8443, HTTPS, "agents/tls-only splice"),
    "but not in plain": ("tls.good.test", 8443, HTTP, "!default"),
    "plain HTTP on a port of its own, if the rule says so": ("dev.good.test", 8080, HTTP, "agents/dev inspect"),
    "and nothing else there": ("dev.good.test", 8080, HTTPS, "!default"),
    "port 0 does not exist": ("splice.test", 0, HTTPS, "!scheme"),
    "a wildcard gives access below its suffix": ("a.b.cdn.test", 443, HTTPS, "agents/wild splice"),
    "and not to the suffix": ("cdn.test", 443, HTTPS, "!default"),
    "a secret's host is not reached over plain HTTP": ("good.test", 80, HTTP, "!default"),
    "a denial beats the wildcard": ("shut.cdn.test", 443, HTTPS, "!agents/shut"),
    "a suffix without a boundary": ("evilgood.test", 443, HTTPS, "!default"),
    "the operator's denial comes first": ("a.evil.test", 443, HTTPS, "!always-deny:2"),
    "the operator's allow needs no rule": ("status.good.test", 80, HTTP, "always-allow:1 inspect"),
    "but stays on the standard ports": ("status.good.test", 8443, HTTPS, "!default"),
    "and is inspected where a rule wants it": ("status.good.test", 443, HTTPS, "always-allow:1 inspect"),
    "a name that is not canonical is denied": ("Splice.test", 443, HTTPS, "!invalid-name"),
    "an address is no name": ("93.184.216.34", 443, HTTPS, "!invalid-name"),
    "an empty name is denied": ("", 443, HTTPS, "!invalid-name"),
}


@pytest.mark.parametrize("case", FLOWS)
def test_a_flow_is_judged_by_name_port_and_scheme(case: str) -> None:
    """And gets the treatment that its rules need."""
    host, port, scheme, expected = FLOWS[case]

    assert expected == outcome(decide_flow(AGENTS, FlowFacts(host, port, scheme)))


REQUESTS = {
    "the rule's method and path, with its secret": ("good.test", "GET", "/v1/x", "agents/api Authorization=token"),
    "another method": ("good.test", "PUT", "/v1/x", "!default"),
    "the method in another case": ("good.test", "get", "/v1/x", "!default"),
    "a path outside": ("good.test", "GET", "/v2/x", "!default"),
    "a longer segment": ("good.test", "GET", "/v10", "!default"),
    "another rule's path, without the secret": ("good.test", "PUT", "/open/x", "agents/open"),
    "a denied path": ("good.test", "GET", "/v1/Admin/x", "!agents/no-admin"),
    "a denied path in another case": ("good.test", "GET", "/v1/aDMIN/x", "!agents/no-admin"),
    "an ambiguous path": ("good.test", "GET", "/v1/../v2", "!ambiguous-path"),
    "a host without path rules takes any path": ("tls.good.test", "GET", "/a//b/../c;d", "agents/tls-only"),
    "TRACE is never relayed": ("tls.good.test", "TRACE", "/", "!forbidden-method"),
    "nor in another case": ("tls.good.test", "trace", "/", "!forbidden-method"),
    "CONNECT is never relayed": ("good.test", "CONNECT", "/v1/x", "!forbidden-method"),
    "a method with a NUL": ("tls.good.test", "GET\0", "/", "!invalid-method"),
    "no method": ("tls.good.test", "", "/", "!invalid-method"),
    "an asterisk is no path": ("tls.good.test", "OPTIONS", "*", "!invalid-path"),
    "an absolute form is no path": ("tls.good.test", "GET", "http://tls.good.test/", "!invalid-path"),
    "a query in the path": ("tls.good.test", "GET", "/x?y", "!invalid-path"),
    "each path has its own secret": ("two.good.test", "GET", "/a/x", "agents/one Authorization=first"),
    "and the other": ("two.good.test", "GET", "/b/x", "agents/other Authorization=second"),
    "an always-allowed host on any path": ("status.good.test", "GET", "/x", "always-allow:1"),
    "with the secret where a rule puts it": (
        "status.good.test",
        "GET",
        "/me/x",
        "always-allow:1 Authorization=status",
    ),
    "an always-denied host": ("evil.test", "GET", "/", "!always-deny:1"),
    "a denied host": ("shut.cdn.test", "GET", "/", "!agents/shut"),
    "an unknown host": ("other.test", "GET", "/", "!default"),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_request_is_judged_from_the_beginning(case: str) -> None:
    """By host, method and path. It gets the secrets of the rules that accept it."""
    host, method, path, expected = REQUESTS[case]

    assert expected == outcome(decide_request(AGENTS, RequestFacts(host, 443, HTTPS, method, path, "q=1")))


def test_a_denial_by_method_reaches_the_port_it_names() -> None:
    """`no-delete` applies to port 80. Its method is denied there in any case."""
    for method, expected in {
        "GET": "agents/splice",
        "DELETE": "!agents/no-delete",
        "delete": "!agents/no-delete",
    }.items():
        assert expected == outcome(decide_request(AGENTS, RequestFacts("splice.test", 80, HTTP, method, "/")))
    assert "agents/splice" == outcome(decide_request(AGENTS, RequestFacts("splice.test", 443, HTTPS, "DELETE", "/")))


def test_a_secret_goes_over_plain_http_only_where_the_operator_named_the_pair() -> None:
    """The compiled policy repeats the check of the loader."""
    facts = RequestFacts("plain.good.test", 80, HTTP, "GET", "/")
    assert "agents/plain Authorization=plain" == outcome(decide_request(AGENTS, facts))

    stripped = CompiledPolicy(AGENTS.name, AGENTS.lists)

    assert "!plaintext-secret" == outcome(decide_request(stripped, facts))


def test_no_reason_holds_the_query_or_the_path() -> None:
    """Both can contain secrets of the sandbox itself."""
    for path in ("/v1/Admin/canary", "/v2/canary", "/v1/../canary"):
        decision = decide_request(AGENTS, RequestFacts("good.test", 443, HTTPS, "GET", path, "canary=1"))

        assert isinstance(decision, Deny)
        assert "canary" not in decision.reason
    assert "canary" not in repr(RequestFacts("good.test", 443, HTTPS, "GET", "/", "canary=1"))


NAMES = {
    "splice.test": "agents/splice",
    "good.test": "agents/api",
    "x.cdn.test": "agents/wild",
    "cdn.test": "!default",
    "test": "!default",
    "com": "!default",
    "shut.cdn.test": "!agents/shut",
    "evil.test": "!always-deny:1",
    "status.good.test": "always-allow:1",
    "GOOD.test": "!invalid-name",
    "localhost": "!default",
}


@pytest.mark.parametrize("host", NAMES)
def test_a_name_is_resolved_only_if_some_flow_to_it_could_be_allowed(host: str) -> None:
    """A denial of some path or port does not hide the name. A denial of all does."""
    assert NAMES[host] == outcome(decide_name(AGENTS, host))


ADDRESSES = {
    "the address of the rule": ("93.184.216.34", 443, "agents/box"),
    "its mapped form": ("::ffff:93.184.216.34", 443, "agents/box"),
    "another port": ("93.184.216.34", 8443, "!default"),
    "a neighbour": ("93.184.216.35", 443, "!default"),
    "a denied network": ("93.184.217.1", 443, "!agents/not-there"),
    "the operator's denial": ("93.184.216.66", 443, "!always-deny:4"),
    "a private address": ("10.0.0.1", 443, "!address-class:private"),
    "metadata": ("169.254.169.254", 443, "!address-class:metadata"),
}


@pytest.mark.parametrize("case", ADDRESSES)
def test_a_bare_address_needs_a_rule_for_that_address(case: str) -> None:
    """Rules for names, and defaults, never allow an address."""
    ip, port, expected = ADDRESSES[case]

    assert expected == outcome(bare(AGENTS, ip, port))


def test_an_address_rule_wider_than_the_built_in_denials_does_not_open_them() -> None:
    """0.0.0.0/0 allows public addresses only. An operator's exception allows the addresses it names."""
    policy = api("+0.0.0.0/0 +::/0 -93.184.216.0/24 +93.184.216.34")

    assert "api:1" == outcome(bare(policy, "8.8.8.8", 443))
    assert "!address-class:metadata" == outcome(bare(policy, "169.254.169.254", 443))
    assert "!address-class:private" == outcome(bare(policy, "10.1.2.3", 443))
    assert "api:1" == outcome(bare(policy, "10.1.2.3", 443, (IPv4Network("10.0.0.0/8"),)))
    assert "!api:3" == outcome(bare(policy, "93.184.216.34", 443)), "a denial wins whatever the order"
    assert "!ceiling" == outcome(bare(policy, "8.8.8.8", 22))
    assert "!default" == outcome(bare(api("", "allow"), "8.8.8.8", 443)), "a default opens no address"


def test_an_allowed_name_that_resolves_into_a_denied_network_is_not_dialled() -> None:
    """The operator's networks apply to every name, a caller's to all except always-allowed ones."""
    policy = api("+good.test -93.184.217.0/24 +93.184.217.9")

    assert "resolved" == outcome(resolved(policy, "good.test", "93.184.216.34", 443))
    assert "!api:2" == outcome(resolved(policy, "good.test", "::ffff:93.184.217.9", 443))
    assert "!always-deny:4" == outcome(resolved(policy, "good.test", "93.184.216.66", 443))
    assert "always-allow:1" == outcome(resolved(policy, "status.good.test", "93.184.217.9", 443))
    assert "!always-deny:4" == outcome(resolved(policy, "status.good.test", "93.184.216.66", 443))
    assert "?agents/not-there observe:watch" == outcome(resolved(WATCH, "good.test", "93.184.217.9", 443))


API = {
    "the first match decides": ("+good.test -good.test", "good.test", 443, "api:1 splice"),
    "also when it denies": ("-good.test +good.test", "good.test", 443, "!api:1"),
    "a wildcard in front hides what follows": ("-*.good.test +a.good.test", "a.good.test", 443, "!api:1"),
    "the apex is outside": ("+*.good.test", "good.test", 443, "!default"),
    "the bare star is inert": ("+*", "good.test", 443, "!default"),
    "the ceiling's ports": ("+good.test", "good.test", 8443, "!ceiling"),
    "the ceiling's names: a single label": ("+intranet", "intranet", 443, "!ceiling"),
    "the ceiling's names: localhost": ("+localhost", "localhost", 443, "!ceiling"),
    "the ceiling's names: metadata": ("+metadata.google.internal", "metadata.google.internal", 443, "!ceiling"),
    "the operator's denial outranks": ("+evil.test", "evil.test", 443, "!always-deny:1"),
    "the operator's allow outranks": ("-status.good.test", "status.good.test", 443, "always-allow:1 splice"),
    "a name rule of the API may span a suffix": ("+*.test", "a.good.test", 443, "api:1 splice"),
    "an address rule opens no name": ("+93.184.216.34", "good.test", 443, "!default"),
}


@pytest.mark.parametrize("case", API)
def test_an_api_policy_is_first_match_under_the_operator(case: str) -> None:
    """The caller sets the order, within the operator's limits."""
    rules, host, port, expected = API[case]

    assert expected == outcome(decide_flow(api(rules), FlowFacts(host, port, HTTPS)))


def test_default_allow_stays_under_the_ceiling() -> None:
    """Only public names, on ports 80 and 443."""
    policy = api("-good.test", "allow")

    assert "default splice" == outcome(decide_flow(policy, FlowFacts("other.test", 443, HTTPS)))
    assert "!api:1" == outcome(decide_flow(policy, FlowFacts("good.test", 443, HTTPS)))
    assert "!ceiling" == outcome(decide_flow(policy, FlowFacts("other.test", 22, HTTPS)))
    assert "!ceiling" == outcome(decide_name(policy, "localhost"))


def test_a_narrowed_policy_allows_what_both_allow() -> None:
    """The caller only removes permissions. Secrets of the named policy still apply."""
    both = narrow(AGENTS, api("+good.test +other.test +tls.good.test"))

    def flow(host: str, port: int) -> str:
        return outcome(decide_flow(both, FlowFacts(host, port, HTTPS)))

    assert "agents/api+api:1 inspect" == flow("good.test", 443)
    assert "agents/tls-only+api:3 splice" == flow("tls.good.test", 8443), "the named policy replaces the ceiling"
    assert "!default" == flow("other.test", 443) == flow("splice.test", 443)
    assert "agents/api+api:1 Authorization=token" == outcome(
        decide_request(both, RequestFacts("good.test", 443, HTTPS, "GET", "/v1/x"))
    )
    assert "!agents/no-admin" == outcome(
        decide_request(both, RequestFacts("good.test", 443, HTTPS, "GET", "/v1/admin/x"))
    )


OBSERVED: dict[str, tuple[Callable[[], AllowName | AllowFlow | AllowRequest | AllowAddress | Deny], str]] = {
    "a name": (lambda: decide_name(WATCH, "other.test"), "?default observe:watch"),
    "a flow": (lambda: decide_flow(WATCH, FlowFacts("other.test", 443, HTTPS)), "?default observe:watch splice"),
    "a flow that rules inspect": (
        lambda: decide_flow(WATCH, FlowFacts("good.test", 443, HTTPS)),
        "agents/api inspect",
    ),
    "a request, without the secret": (
        lambda: decide_request(WATCH, RequestFacts("good.test", 443, HTTPS, "GET", "/v1/admin/x")),
        "?agents/no-admin observe:watch",
    ),
    "an ambiguous path, without the secret": (
        lambda: decide_request(WATCH, RequestFacts("good.test", 443, HTTPS, "GET", "/v1/../v1/x")),
        "?ambiguous-path observe:watch",
    ),
    "an allowed request is as under enforce": (
        lambda: decide_request(WATCH, RequestFacts("good.test", 443, HTTPS, "GET", "/v1/x")),
        "agents/api Authorization=token",
    ),
    "the operator's denials stand": (lambda: decide_name(WATCH, "evil.test"), "!always-deny:1"),
    "bare addresses stay shut": (lambda: bare(WATCH, "93.184.216.35", 443), "!default"),
    "TRACE stays shut": (
        lambda: decide_request(WATCH, RequestFacts("good.test", 443, HTTPS, "TRACE", "/v1/x")),
        "!forbidden-method",
    ),
}


@pytest.mark.parametrize("case", OBSERVED)
def test_observe_lets_pass_what_rules_deny_and_says_so(case: str) -> None:
    """A request gets no secret unless rules allowed it. A denial that does not come from a rule stays in force."""
    decide, expected = OBSERVED[case]

    assert expected == outcome(decide())


def binding(name: str, host: str, **match: Any) -> dict[str, Any]:
    """Return a bearer binding whose credential has the binding's name."""
    return {"name": name, "match": {"hosts": [host], **match}, "auth": {"type": "bearer", "credential": name}}


def test_a_binding_gives_nothing_to_a_request_that_is_only_observed() -> None:
    """With a policy in mode observe, the caller's own binding applies only where that policy's rules allow."""
    bindings = [binding("mine", "good.test"), binding("far", "other.test")]
    both = narrow(WATCH, api("+good.test +other.test", bindings=bindings))

    def request(host: str, path: str) -> str:
        return outcome(decide_request(both, RequestFacts(host, 443, HTTPS, "GET", path)))

    assert "?default observe:watch+api:2" == request("other.test", "/v1/x")
    assert "?agents/no-admin observe:watch+api:1" == request("good.test", "/v1/admin/x")
    assert "?default observe:watch+api:2" == request("other.test", "/v1/../x")
    assert "!api:3" == outcome(
        decide_request(
            narrow(WATCH, api("+status.good.test +other.test -good.test")),
            RequestFacts("good.test", 443, HTTPS, "GET", "/v1/admin/x"),
        )
    )


def test_an_observed_denial_is_reported_whole() -> None:
    observed = Deny("default", "No rule of watch allows https to other.test:443.")
    facts = RequestFacts("other.test", 443, HTTPS, "GET", "/")
    assert AllowRequest("observe:watch", (), observed) == decide_request(WATCH, facts)


def test_one_rule_about_paths_wants_clear_paths_of_the_host() -> None:
    """Other rules of the host can be of any kind."""
    host = (HostPattern("good.test"),)
    wide = Rule("wide", Action.ALLOW, host, endpoints=STANDARD)
    shut = Rule("shut", Action.DENY, host, paths=(PathPattern("/admin/*"),))
    for rules in ((wide, shut), (shut, wide)):
        for path, expected in {"/a//b": "!ambiguous-path", "/admin/x": "!shut", "/a": "wide"}.items():
            facts = RequestFacts("good.test", 443, HTTPS, "GET", path)
            assert expected == outcome(decide_request(of_list(*rules), facts))


def test_an_observed_allow_with_a_secret_cannot_be_made() -> None:
    (plan,) = [plan for rule in WATCH.rules for plan in rule.injections if plan.secret == "token"][:1]
    with pytest.raises(ValueError, match="no secret"):
        AllowRequest("observe:watch", (plan,), Deny("default", "no rule"))


def test_bindings_add_headers_to_allowed_requests_and_only_to_them() -> None:
    """An exact host precedes a wildcard, method and path must match, and other requests are forwarded unchanged."""
    document = load_text("version: 1\nwildcard_bindings: true\n")
    policy = api(
        "+good.test +*.good.test",
        bindings=[
            binding("api", "good.test", paths=["/v1/*"], methods=["get"]),
            binding("exact", "a.good.test"),
            binding("wild", "*.good.test"),
        ],
        document=document,
    )

    def request(host: str, method: str = "GET", path: str = "/v1/x") -> str:
        return outcome(decide_request(policy, RequestFacts(host, 443, HTTPS, method, path)))

    assert "api:1 inspect" == outcome(decide_flow(policy, FlowFacts("good.test", 443, HTTPS)))
    assert "api:1 Authorization=inline:api" == request("good.test")
    assert "api:1" == request("good.test", "POST") == request("good.test", path="/v2")
    assert "!ambiguous-path" == request("good.test", path="/v2//x")
    assert "api:2 Authorization=inline:exact" == request("a.good.test")
    assert "api:2 Authorization=inline:wild" == request("b.good.test")
    assert "!default" == request("other.test")
    assert "api:1" == outcome(decide_request(policy, RequestFacts("good.test", 80, HTTP, "GET", "/v1/x")))


def test_two_secrets_for_one_header_are_denied() -> None:
    """A named rule and a binding apply to the same request."""
    both = narrow(AGENTS, api("+good.test", bindings=[binding("b", "good.test")]))

    assert "!injection-ambiguous" == outcome(
        decide_request(both, RequestFacts("good.test", 443, HTTPS, "GET", "/v1/x"))
    )
    assert "agents/open+api:1 Authorization=inline:b" == outcome(
        decide_request(both, RequestFacts("good.test", 443, HTTPS, "GET", "/open/x"))
    )


def test_deny_all_allows_nothing() -> None:
    """The policy without any rule."""
    assert "!default" == outcome(decide_name(DENY_ALL, "good.test"))
    assert "!default" == outcome(decide_flow(DENY_ALL, FlowFacts("good.test", 443, HTTPS)))
    assert "!default" == outcome(decide_request(DENY_ALL, RequestFacts("good.test", 443, HTTPS, "GET", "/")))
    assert "!default" == outcome(bare(DENY_ALL, "93.184.216.34", 443))


# ---- what a decision depends on

_BOUND = api("+good.test +splice.test", bindings=[binding("b", "good.test", paths=["/v1/*"])])
_OF_MANY = [AGENTS, WATCH, DENY_ALL, _BOUND, narrow(AGENTS, _BOUND)]
_NAMES = [
    "splice.test",
    "good.test",
    "a.cdn.test",
    "two.good.test",
    "status.good.test",
    "evil.test",
    "other.test",
    "x-",
]
_PATHS = ["/", "/v1/x", "/v1/admin/x", "/a/b", "/b/c", "/me/x", "/a//b", "/v1/%2e", "", "v1", "/v1?x", "/v1#x", "*"]
_METHODS = ["GET", "POST", "DELETE", "TRACE", "G T"]
_REQUESTS = st.builds(
    RequestFacts,
    st.sampled_from(_NAMES),
    st.sampled_from([80, 443, 8443]),
    st.sampled_from([HTTP, HTTPS]),
    st.sampled_from(_METHODS),
    st.sampled_from(_PATHS),
    st.sampled_from(["", "a=b"]),
)


@given(st.sampled_from(_OF_MANY), _REQUESTS, st.sampled_from(_METHODS), st.sampled_from(_PATHS), st.sampled_from("ab"))
def test_requests_that_are_judged_by_the_same_values_are_decided_equally(
    policy: CompiledPolicy, one: RequestFacts, method: str, path: str, query: str
) -> None:
    other = replace(one, method=method, path=path, query=query)
    if judged(policy, one) == judged(policy, other):
        assert decide_request(policy, one) == decide_request(policy, other)


def test_the_path_counts_only_where_something_reads_it() -> None:
    by_binding = RequestFacts("good.test", 443, HTTPS, "GET", "/v1/x")
    for policy, facts, counts in (
        (AGENTS, RequestFacts("splice.test", 443, HTTPS, "GET", "/v1/x"), False),
        (AGENTS, RequestFacts("splice.test", 443, HTTPS, "GET", "v1"), True),
        (AGENTS, by_binding, True),
        (api("+good.test"), by_binding, False),
        (_BOUND, by_binding, True),
    ):
        assert (facts.path if counts else None) == judged(policy, facts)[-1]


def test_everything_else_but_the_query_counts() -> None:
    facts = RequestFacts("splice.test", 80, HTTP, "GET", "/", "q")
    others = [replace(facts, **one) for one in ({"host": "x"}, {"port": 443}, {"scheme": HTTPS}, {"method": "DELETE"})]
    assert judged(AGENTS, facts) not in [judged(AGENTS, one) for one in others]
    assert judged(AGENTS, facts) == judged(AGENTS, replace(facts, query=""))


# ---- reference models

_HOSTS = ["good.test", "a.good.test", "b.a.good.test", "evil.test", "agood.test", "a.evil.test"]
_PATTERNS = ["good.test", "a.good.test", "*.good.test", "*.a.good.test", "evil.test", "*.evil.test", "agood.test"]
_RULES = st.lists(st.tuples(st.booleans(), st.sampled_from(_PATTERNS)), max_size=8)


def matches(pattern: str, host: str) -> bool:
    """Compare label by label, from the right."""
    labels, wanted = host.split(".")[::-1], pattern.split(".")[::-1]
    if wanted[-1] != "*":
        return labels == wanted
    return len(labels) >= len(wanted) and labels[: len(wanted) - 1] == wanted[:-1]


def deny_wins(rules: list[tuple[bool, str]], host: str) -> bool:
    """Decide as the YAML language: at least one rule allows and none denies."""
    verdicts = [allow for allow, pattern in rules if matches(pattern, host)]
    return bool(verdicts) and all(verdicts)


def first_match(rules: list[tuple[bool, str]], host: str, default: bool) -> bool:
    """Decide as the OpenSandbox language: the first match decides."""
    return next((allow for allow, pattern in rules if matches(pattern, host)), default)


@given(_RULES, st.sampled_from(_HOSTS), st.randoms())
def test_yaml_rules_equal_the_model_in_any_order_and_with_repetitions(
    rules: list[tuple[bool, str]], host: str, random: Any
) -> None:
    """Deny precedes allow. The decisions about name, flow and request agree."""
    shuffled = rules + rules[:2]
    random.shuffle(shuffled)
    lines = [f'- {{action: {"allow" if allow else "deny"}, host: "{pattern}"}}' for allow, pattern in shuffled]
    text = "version: 1\npolicies:\n  p:\n    rules:\n" + "\n".join(f"      {line}" for line in lines)
    policy = compile_named(load_text(text if lines else text + "      []"), "p")
    expected = deny_wins(rules, host)

    assert expected == (not isinstance(decide_name(policy, host), Deny))
    assert expected == (not isinstance(decide_flow(policy, FlowFacts(host, 443, HTTPS)), Deny))
    assert expected == (not isinstance(decide_request(policy, RequestFacts(host, 80, HTTP, "GET", "/")), Deny))


@given(_RULES, st.sampled_from(_HOSTS), st.booleans())
def test_api_rules_equal_the_model_in_their_order(rules: list[tuple[bool, str]], host: str, default: bool) -> None:
    """The first match decides. The decisions about name, flow and request agree."""
    words = " ".join(("+" if allow else "-") + pattern for allow, pattern in rules)
    policy = api(words, "allow" if default else "deny", document=PolicyDocument())
    expected = first_match(rules, host, default)

    assert expected == (not isinstance(decide_name(policy, host), Deny))
    assert expected == (not isinstance(decide_flow(policy, FlowFacts(host, 443, HTTPS)), Deny))
    assert expected == (not isinstance(decide_request(policy, RequestFacts(host, 80, HTTP, "GET", "/")), Deny))


@given(_RULES, _RULES, st.sampled_from(_HOSTS))
def test_a_narrowed_policy_is_the_conjunction(
    named: list[tuple[bool, str]], caller: list[tuple[bool, str]], host: str
) -> None:
    """It never allows more than either side."""

    def first(rules: list[tuple[bool, str]]) -> CompiledPolicy:
        return api(" ".join(("+" if a else "-") + p for a, p in rules), document=PolicyDocument())

    left, right = first(named), first(caller)
    facts = FlowFacts(host, 443, HTTPS)

    assert (first_match(named, host, False) and first_match(caller, host, False)) == (
        not isinstance(decide_flow(narrow(left, right), facts), Deny)
    )


def test_the_treatment_words_are_the_gateways() -> None:
    """They are written into records."""
    assert ["inspect", "splice"] == [str(word) for word in Treatment]


def test_a_wider_ceiling_opens_https_only() -> None:
    """Plain HTTP stays on port 80, for any ports that the operator adds for callers."""
    document = load_text("version: 1\nceiling: {ports: [80, 443, 8443]}\n")
    policy = api("+good.test", document=document)

    assert "api:1 splice" == outcome(decide_flow(policy, FlowFacts("good.test", 8443, HTTPS)))
    assert "!ceiling" == outcome(decide_flow(policy, FlowFacts("good.test", 8443, HTTP)))


def test_an_always_allowed_network_is_reached_by_tls_on_443_only() -> None:
    """It precedes the caller's denial there, and does not apply to other ports."""
    document = load_text("version: 1\nalways_allow: [93.184.216.0/24]\n")
    policy = api("-93.184.216.0/24", document=document)

    assert "always-allow:1" == outcome(bare(policy, "93.184.216.34", 443))
    assert "!scheme" == outcome(bare(policy, "93.184.216.34", 80))


PLAINTEXT = {
    "port 80 of the host that the operator named": ("plain.good.test", 80, HTTP, "p/r Authorization=plain"),
    "another port of it": ("plain.good.test", 8080, HTTP, "!plaintext-secret"),
    "port 81 of it": ("plain.good.test", 81, HTTP, "!plaintext-secret"),
    "port 80 of a host that the operator did not name": ("other.good.test", 80, HTTP, "!plaintext-secret"),
    "another port of that one": ("other.good.test", 8080, HTTP, "!plaintext-secret"),
    "TLS, wherever it is": ("other.good.test", 443, HTTPS, "p/r Authorization=plain"),
    "TLS on another port": ("other.good.test", 8443, HTTPS, "p/r Authorization=plain"),
}


@pytest.mark.parametrize("case", PLAINTEXT)
def test_a_secret_in_plain_http_needs_port_80_and_the_operators_word(case: str) -> None:
    """Also in a policy that was not loaded from a document; a document with such rules is refused."""
    host, port, scheme, expected = PLAINTEXT[case]
    plan = InjectionPlan("p/r", "plain", InjectionKind.BEARER, "Authorization")
    rule = Rule(
        "p/r",
        Action.ALLOW,
        (HostPattern("plain.good.test"), HostPattern("other.good.test")),
        endpoints=(*STANDARD, *(Endpoint(port, HTTP) for port in (81, 8080)), Endpoint(8443, HTTPS)),
        injections=(plan,),
    )
    policy = CompiledPolicy(
        "p", (RuleList("p", Precedence.DENY_WINS, rules=(rule,)),), plaintext_secrets=("plain.good.test",)
    )

    assert expected == outcome(decide_request(policy, RequestFacts(host, port, scheme, "GET", "/")))


def _plan(secret: str, kind: InjectionKind, header: str, username: str | None = None) -> InjectionPlan:
    return InjectionPlan("p/first", secret, kind, header, username)


RIVALS = {
    "the same plan twice": (_plan("s", InjectionKind.BASIC, "Authorization", "me"), "p/first+p/second Authorization=s"),
    "another secret": (_plan("t", InjectionKind.BASIC, "Authorization", "me"), "!injection-ambiguous"),
    "another user name": (_plan("s", InjectionKind.BASIC, "Authorization", "you"), "!injection-ambiguous"),
    "no user name": (_plan("s", InjectionKind.BASIC, "Authorization"), "!injection-ambiguous"),
    "another form": (_plan("s", InjectionKind.BEARER, "Authorization"), "!injection-ambiguous"),
    "the header as an API key": (_plan("s", InjectionKind.API_KEY, "Authorization"), "!injection-ambiguous"),
    "another header": (
        _plan("t", InjectionKind.API_KEY, "X-Api-Key"),
        "p/first+p/second Authorization=s X-Api-Key=t",
    ),
}


@pytest.mark.parametrize("case", RIVALS)
def test_two_plans_for_one_header_are_denied_unless_they_are_one(case: str) -> None:
    """In two lists, and in two rules of one list."""
    second, expected = RIVALS[case]
    first = _plan("s", InjectionKind.BASIC, "Authorization", "me")
    rules = tuple(
        Rule(name, Action.ALLOW, (HostPattern("good.test"),), endpoints=STANDARD, injections=(plan,))
        for name, plan in (("p/first", first), ("p/second", second))
    )
    facts = RequestFacts("good.test", 443, HTTPS, "GET", "/")
    two = CompiledPolicy("p", tuple(RuleList("p", Precedence.DENY_WINS, rules=(rule,)) for rule in rules))
    one = CompiledPolicy("p", (RuleList("p", Precedence.DENY_WINS, rules=rules),))

    assert expected == outcome(decide_request(two, facts))
    assert expected.replace("+p/second", "") == outcome(decide_request(one, facts))


def of_list(*rules: Rule) -> CompiledPolicy:
    return CompiledPolicy("p", (RuleList("p", Precedence.DENY_WINS, rules=rules),))


def test_a_name_needs_an_endpoint_that_no_denial_covers() -> None:
    """One endpoint is enough. A denial of a method allows nothing."""
    host = (HostPattern("good.test"),)
    both = Rule("allow", Action.ALLOW, host, endpoints=STANDARD)
    shut = [Rule(f"shut-{endpoint.port}", Action.DENY, host, endpoints=(endpoint,)) for endpoint in STANDARD]
    method = Rule("method", Action.DENY, host, endpoints=STANDARD, methods=("DELETE",))

    assert "allow" == outcome(decide_name(of_list(both, shut[0]), "good.test"))
    assert "allow" == outcome(decide_name(of_list(both, shut[1]), "good.test"))
    assert "!shut-80" == outcome(decide_name(of_list(both, *shut), "good.test"))
    assert "allow" == outcome(decide_name(of_list(both, method), "good.test"))
    assert "!default" == outcome(decide_name(of_list(method), "good.test"))
    assert "!default" == outcome(decide_flow(of_list(method), FlowFacts("good.test", 443, HTTPS)))


def test_what_a_later_list_observes_is_reported() -> None:
    """The first observed denial is reported, at any position of its list."""
    policy = CompiledPolicy("p", (*api("+other.test").lists, *WATCH.lists))

    assert "?default api:1+observe:watch" == outcome(decide_name(policy, "other.test"))
    assert "?default api:1+observe:watch splice" == outcome(decide_flow(policy, FlowFacts("other.test", 443, HTTPS)))
    assert "?default api:1+observe:watch" == outcome(
        decide_request(policy, RequestFacts("other.test", 443, HTTPS, "GET", "/"))
    )


def test_an_always_allowed_host_has_one_rule_however_many_lists_there_are() -> None:
    both = narrow(AGENTS, api("+status.good.test"))

    assert "always-allow:1 Authorization=status" == outcome(
        decide_request(both, RequestFacts("status.good.test", 443, HTTPS, "GET", "/me/x"))
    )
    assert "!ambiguous-path" == outcome(
        decide_request(both, RequestFacts("status.good.test", 443, HTTPS, "GET", "/me/../x"))
    )
    assert "!default" == outcome(decide_request(both, RequestFacts("status.good.test", 8443, HTTPS, "GET", "/me/x"))), (
        "its override is for the standard ports"
    )


def request(host: str, method: str = "GET", path: str = "/", port: int = 443, scheme: Scheme = HTTPS) -> RequestFacts:
    return RequestFacts(host, port, scheme, method, path)


CALLER = api("+good.test -evil.good.test")
DENIED: dict[str, tuple[Callable[[], object], Deny]] = {
    "a name that is not canonical": (
        lambda: decide_name(AGENTS, "GOOD.test"),
        Deny("invalid-name", "The host name is not in canonical form."),
    ),
    "a name that is always denied": (
        lambda: decide_name(AGENTS, "evil.test"),
        Deny("always-deny:1", "evil.test is denied by the operator."),
    ),
    "a name above the ceiling": (
        lambda: decide_name(CALLER, "localhost"),
        Deny("ceiling", "localhost is above the operator's ceiling."),
    ),
    "a name that a rule denies": (
        lambda: decide_name(AGENTS, "shut.cdn.test"),
        Deny("agents/shut", "shut.cdn.test is denied by rule agents/shut."),
    ),
    "a name that no rule allows": (
        lambda: decide_name(AGENTS, "other.test"),
        Deny("default", "No rule of agents allows other.test."),
    ),
    "a name that the caller denies": (
        lambda: decide_name(CALLER, "evil.good.test"),
        Deny("api:2", "evil.good.test is denied by rule api:2."),
    ),
    "a name that the caller does not allow": (
        lambda: decide_name(CALLER, "other.test"),
        Deny("default", "No rule of networkPolicy allows other.test."),
    ),
    "a scheme that is not spoken": (
        lambda: decide_flow(AGENTS, FlowFacts("good.test", 80, HTTPS)),
        Deny("scheme", "https is not spoken on port 80."),
    ),
    "a flow above the ceiling": (
        lambda: decide_flow(CALLER, FlowFacts("good.test", 8443, HTTPS)),
        Deny("ceiling", "good.test:8443 is above the operator's ceiling."),
    ),
    "a flow that a rule denies": (
        lambda: decide_flow(AGENTS, FlowFacts("shut.cdn.test", 443, HTTPS)),
        Deny("agents/shut", "shut.cdn.test:443 is denied by rule agents/shut."),
    ),
    "a flow that no rule allows": (
        lambda: decide_flow(AGENTS, FlowFacts("good.test", 80, HTTP)),
        Deny("default", "No rule of agents allows http to good.test:80."),
    ),
    "a flow that the caller denies": (
        lambda: decide_flow(CALLER, FlowFacts("evil.good.test", 443, HTTPS)),
        Deny("api:2", "evil.good.test:443 is denied by rule api:2."),
    ),
    "a method that is no token": (
        lambda: decide_request(AGENTS, request("good.test", "G T")),
        Deny("invalid-method", "The request's method is not a valid HTTP method."),
    ),
    "a method that is never relayed": (
        lambda: decide_request(AGENTS, request("good.test", "Track")),
        Deny("forbidden-method", "Track requests are never relayed."),
    ),
    "a target that is no path": (
        lambda: decide_request(AGENTS, request("tls.good.test", path="/x#y")),
        Deny("invalid-path", "The request's target is not a path."),
    ),
    "an ambiguous path": (
        lambda: decide_request(AGENTS, request("good.test", path="/v1//x")),
        Deny("ambiguous-path", "The request path is ambiguous (empty segment), and good.test has path rules."),
    ),
    "a path that a rule denies": (
        lambda: decide_request(AGENTS, request("good.test", path="/v1/admin/x")),
        Deny("agents/no-admin", "GET on this path of good.test is denied by rule agents/no-admin."),
    ),
    "a path that no rule allows": (
        lambda: decide_request(AGENTS, request("good.test", path="/v2")),
        Deny("default", "good.test is allowed, but not GET on this path (rules: agents/api, agents/open)."),
    ),
    "a secret in plain text": (
        lambda: decide_request(
            CompiledPolicy(AGENTS.name, AGENTS.lists), request("plain.good.test", port=80, scheme=HTTP)
        ),
        Deny("plaintext-secret", "The operator does not allow secrets to plain.good.test over plain HTTP."),
    ),
}


@pytest.mark.parametrize("case", DENIED)
def test_each_denial_names_its_rule_and_its_reason(case: str) -> None:
    decide, expected = DENIED[case]

    assert expected == decide()


BOUND = load_text("""
version: 1
client_credentials: {cookies: allow}
always_allow: [always.test]
policies:
  agents:
    rules:
      - {id: api, host: good.test, paths: ["/v1/*"], inject: {secret: t, as: bearer}}
      - {id: rest, host: good.test, ports: [80, 443]}
      - id: own
        host: own.test
        inject: {secret: t, as: bearer}
        client_credentials: {query: strip, "header:x-api-key": allow}
      - {id: more, host: own.test, paths: ["/more/*"], client_credentials: {query: refuse, headers: strip}}
      - {id: open, host: open.test, inspect: true}
      - {id: free, host: free.test, client_credentials: {headers: allow, cookies: refuse}}
      - {id: always, host: always.test, paths: ["/me"], inject: {secret: t, as: bearer}}
  watch:
    extends: [agents]
    mode: observe
""")
BASE = "headers refuse, cookies allow, query refuse"
HANDLINGS = {
    "a request with the secret": ("good.test", "/v1/x", BASE),
    "another request to a bound host": ("good.test", "/v2", BASE),
    "a host without secrets": ("open.test", "/", "None"),
    "what a rule says, with the document's default": (
        "own.test",
        "/",
        "headers refuse, cookies allow, query strip, header:x-api-key allow",
    ),
    "the strictest of two rules": (
        "own.test",
        "/more/x",
        "headers refuse, cookies allow, query refuse, header:x-api-key strip",
    ),
    "a rule without a secret": ("free.test", "/", "headers allow, cookies refuse, query refuse"),
    "a bound host that is always allowed": ("always.test", "/", BASE),
}


@pytest.mark.parametrize("case", HANDLINGS)
def test_a_bound_host_has_a_handling_of_the_clients_credentials(case: str) -> None:
    host, path, expected = HANDLINGS[case]
    policy = compile_named(BOUND, "agents")

    assert policy == CompiledPolicy.from_json(policy.to_json())
    decision = decide_request(policy, request(host, path=path))
    assert isinstance(decision, AllowRequest)
    assert expected == str(decision.client_credentials)
    assert decision.trial is None
    watched = decide_request(compile_named(BOUND, "watch"), request(host, path=path))
    assert isinstance(watched, AllowRequest)
    assert (expected, None if expected == "None" else "observe:watch") == (
        str(watched.client_credentials),
        watched.trial,
    )


def test_a_rule_that_handles_credentials_has_its_flows_inspected() -> None:
    policy = compile_named(BOUND, "agents")
    assert "agents/free inspect" == outcome(decide_flow(policy, FlowFacts("free.test", 443, HTTPS)))


def test_a_bound_host_is_bound_over_plain_http_too() -> None:
    decision = decide_request(compile_named(BOUND, "agents"), request("good.test", port=80, scheme=HTTP))
    assert isinstance(decision, AllowRequest)
    assert BASE == str(decision.client_credentials)


def test_a_host_of_an_api_binding_is_bound_for_all_of_its_requests() -> None:
    """If the operator says so; otherwise only for those that get its secret. Another host of the policy is not."""
    bound = [binding("b", "good.test", paths=["/v1/*"])]
    through = {"type": "passthrough", "substitutions": [{"credential": "p", "placeholder": "P", "in": ["body"]}]}
    bound.append({"name": "p", "match": {"hosts": ["pass.test"]}, "auth": through})
    hosts = "+good.test +open.test +pass.test"
    open_ = api(hosts, bindings=bound, document=BOUND)
    policy = api(hosts, bindings=bound, document=replace(BOUND, guard_bindings=True))
    stripped = "headers strip, cookies strip, query refuse"
    for each, path, expected in (
        (policy, "/v1/x", BASE),
        (policy, "/v2", BASE),
        (open_, "/v1/x", stripped),
        (open_, "/v2", "None"),
    ):
        decision = decide_request(each, request("good.test", path=path))
        assert isinstance(decision, AllowRequest)
        assert expected == str(decision.client_credentials)
        passing = decide_request(each, request("pass.test", path=path))
        assert isinstance(passing, AllowRequest)
        assert (1, None) == (len(passing.substitutions), passing.client_credentials)
    assert AllowRequest("api:2") == decide_request(policy, request("open.test"))
    both = decide_request(narrow(compile_named(BOUND, "watch"), policy), request("good.test", path="/v2"))
    assert isinstance(both, AllowRequest)
    assert both.trial is None, "the caller's list is enforced"


def test_a_refusal_of_credentials_is_a_denial_or_an_observed_one() -> None:
    enforced = refuse_credentials(AllowRequest("r"), ("query:key",))
    assert isinstance(enforced, Deny)
    assert ("client-credentials", True) == (enforced.rule, "query:key" in enforced.reason)
    tried = refuse_credentials(AllowRequest("r", trial="observe:watch"), ("query:key",))
    assert AllowRequest("observe:watch", observed=enforced) == tried


LENIENT = compile_named(
    load_text("""
version: 1
policies:
  agents:
    rules:
      - {id: npm, host: npm.test, methods: [GET], paths: ["/@corp%2fui", "/@corp/*"], encoded_slashes: allow}
      - {id: rest, host: npm.test, paths: ["/-/*"]}
      - {id: shut, action: deny, host: npm.test, paths: ["/@corp/Hidden*"]}
      - id: git
        host: git.test
        paths: ["/api/v4/projects/*"]
        encoded_slashes: allow
        inject: {secret: t, as: bearer}
      - {id: keys, host: s3.test, paths: ["/bucket/*"], empty_segments: allow}
      - {id: open, host: open.test, inject: {secret: t, as: bearer}}
"""),
    "agents",
)
FORMS = {
    "a scoped package": ("npm.test", "GET", "/@corp%2fui", "agents/npm"),
    "the same package, unencoded": ("npm.test", "GET", "/@corp/ui", "agents/npm"),
    "another scope": ("npm.test", "GET", "/@evil%2fui", "!ambiguous-path"),
    "another method": ("npm.test", "PUT", "/@corp%2fui", "!ambiguous-path"),
    "below another rule of the host": ("npm.test", "GET", "/-/a%2fb", "!ambiguous-path"),
    "a denial holds for the encoded form": ("npm.test", "GET", "/@corp/x%2f..%2fhidden", "!ambiguous-path"),
    "a denial holds for the other reading": ("npm.test", "GET", "/@corp/hidden%2fx", "!agents/shut"),
    "no dot segments": ("npm.test", "GET", "/@corp/..%2fx", "!ambiguous-path"),
    "no empty segments": ("npm.test", "GET", "/@corp//ui", "!ambiguous-path"),
    "a project of GitLab": ("git.test", "GET", "/api/v4/projects/group%2Fproject", "agents/git Authorization=t"),
    "an encoded slash in place of a prefix's slash": ("git.test", "GET", "/api/v4/projects%2Fx", "!ambiguous-path"),
    "a key of an object": ("s3.test", "GET", "/bucket//a///b", "agents/keys"),
    "an encoded slash in a key": ("s3.test", "GET", "/bucket/a%2Fb", "!ambiguous-path"),
    "a key that leaves its bucket": ("s3.test", "GET", "/bucket//../other", "!ambiguous-path"),
    "a host without path rules": ("open.test", "GET", "/a%2fb//c", "agents/open Authorization=t"),
    "dot segments at a host without path rules": ("open.test", "GET", "/a/../c", "agents/open Authorization=t"),
}


@pytest.mark.parametrize("case", FORMS)
def test_a_rule_permits_forms_of_a_path_for_its_own_requests(case: str) -> None:
    """A host without path rules needs no permission."""
    host, method, path, expected = FORMS[case]

    assert expected == outcome(decide_request(LENIENT, request(host, method, path)))


def test_a_binding_takes_an_encoded_slash_that_does_not_change_its_match() -> None:
    policy = api("+good.test +open.test", bindings=[binding("b", "good.test", paths=["/v1/*", "/v2/a"])])

    assert "api:1 Authorization=inline:b" == outcome(decide_request(policy, request("good.test", path="/v1/@a%2fb")))
    assert "api:1" == outcome(decide_request(policy, request("good.test", path="/v3/@a%2fb")))
    for path in ("/v1%2fx", "/v2%2fa", "/v1/a%2f..%2f..%2fv3", "/v1/a%252fb", "/v1/a//b", "/v1/a%5cb"):
        assert "!ambiguous-path" == outcome(decide_request(policy, request("good.test", path=path)))


def test_two_bindings_that_meet_on_a_request_are_denied() -> None:
    """Such a policy is never compiled. The decision still denies, if a policy was made in another way."""
    first, second = (
        Binding(name, (HostPattern("good.test"),), (HTTPS,), ("GET",), (PathPattern("/*"),))
        for name in ("first", "second")
    )
    policy = replace(api("+good.test"), bindings=(first, second))

    assert Deny("binding-ambiguous", "credential binding ambiguous") == decide_request(policy, request("good.test"))
    assert Deny("ambiguous-path", "request path contains ambiguous segments (empty segment)") == decide_request(
        policy, request("good.test", path="//x")
    )
    assert AllowRequest("api:1") == decide_request(policy, request("good.test", "PUT"))
    assert AllowRequest("api:1") == decide_request(replace(policy, bindings=(first,)), request("good.test"))


def test_rivals_are_named_by_their_bindings() -> None:
    both = narrow(AGENTS, api("+good.test", bindings=[binding("b", "good.test")]))

    assert Deny("injection-ambiguous", "agents/api and binding:b both set Authorization.") == decide_request(
        both, request("good.test", path="/v1/x")
    )
