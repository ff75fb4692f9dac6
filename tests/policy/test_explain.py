"""`policy explain` never reports that a request is sent if the gateway refuses it."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.client_credentials import GuardedRequest, guard
from gateway.dns.names import over_bounds
from gateway.tls.hello import RequestHead, read_head
from gateway.translate import RequestParts, Translated, refusal_of_form, translate
from policy.cli import _split
from policy.compile import compile_named
from policy.compiled import CompiledPolicy
from policy.decision import AllowFlow, AllowRequest, Deny, Treatment, decide_flow, decide_request
from policy.explain import explain
from policy.facts import RequestFacts, Scheme
from policy.load import load_text

DOCUMENT = load_text(
    """
version: 1
always_deny: [evil.test]
always_allow: [status.test]
policies:
  wide: {rules: [{id: all, host: api.test, schemes: [http, https]}]}
  paths:
    rules:
      - {id: v1, host: api.test, paths: [/v1/*], methods: [GET, POST]}
      - {id: in, host: status.test, inspect: true}
  secret:
    rules:
      - {id: in, host: api.test, inject: {secret: token, as: bearer}}
      - {id: plain, host: api.test, schemes: [http]}
      - {id: no, action: deny, host: api.test, paths: [/admin*]}
      - id: own
        host: own.test
        inject: {secret: token, as: bearer}
        client_credentials: {cookies: refuse, "header:x-api-key": allow, "header:x-trace": refuse}
  watching: {mode: observe, rules: [{id: v1, host: api.test, paths: [/v1]}]}
"""
)
POLICIES = {name: compile_named(DOCUMENT, name) for name in DOCUMENT.policies}

PARTS = st.sampled_from(
    [
        *(
            "/",
            "//",
            ".",
            "..",
            "v1",
            "admin",
            "%2e",
            "%2F",
            "%",
            "%zz",
            ";a=b",
            " ",
            "#x",
            "?a=b",
            "?",
            "?key=b",
            "\\",
            "\r\n",
        ),
        *("\0", "\x7f", "ä", "http://evil.test/", "*", '"', "a", "A", "x" * 9000, "\tHost: evil.test"),
    ]
)
TARGETS = st.lists(PARTS, max_size=6).map("".join) | st.lists(PARTS, max_size=6).map(lambda parts: "/" + "".join(parts))
METHODS = st.sampled_from(
    ["GET", "POST", "get", "CONNECT", "TRACE", "track", "PRI", "", "G T", "X" * 40, "GET\r\n", "Ä"]
)


def gateway(policy: CompiledPolicy, request: RequestFacts, target: str) -> bool:
    """Return whether a gateway forwards a request that a client writes with this target.

    It uses only the gateway's pure parts.
    """
    flow = decide_flow(policy, request.flow)
    if not isinstance(flow, AllowFlow):
        return False
    if flow.treatment is Treatment.SPLICE:
        return True
    authority = request.host if request.port in (80, 443) else f"{request.host}:{request.port}"
    raw = f"{request.method} {target} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode("utf-8", "surrogatepass")
    head = read_head(raw)
    if not isinstance(head, RequestHead):
        return False
    translated = translate(RequestParts(11, head.method, head.target, b"", b"", head.headers), request.flow)
    if not isinstance(translated, Translated):
        return False
    decision = decide_request(policy, translated.facts)
    return isinstance(decision, AllowRequest) and isinstance(guard(translated, decision), GuardedRequest)


@given(
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(["api.test", "status.test", "evil.test", "other.test"]),
    st.sampled_from([80, 443, 8443]),
    st.sampled_from(Scheme),
    METHODS,
    TARGETS,
)
@example("wide", "api.test", 443, Scheme.HTTPS, "GET", "/a b")
@example("wide", "api.test", 443, Scheme.HTTPS, "PRI", "/")
@example("secret", "api.test", 80, Scheme.HTTP, "GET", "/")
def test_what_is_said_to_be_sent_is_forwarded(
    name: str, host: str, port: int, scheme: Scheme, method: str, target: str
) -> None:
    """For every policy, place, method and target. A request that the gateway forwards is not reported as denied."""
    policy = POLICIES[name]
    request = RequestFacts(host, port, scheme, method, *_split(target))
    explained = explain(policy, request, refusal_of_form)
    if explained.sent:
        assert explained.conditions
        assert gateway(policy, request, target)
    elif gateway(policy, request, target):
        # Except if the request line, or its target, is parsed as another request.
        assert any(part in method + target for part in ("\r\n", "http://", "\0")) or target.endswith("?")


@pytest.mark.parametrize(
    ("policy", "host", "conditions"),
    [
        ("wide", "api.test", ["resolves", "ECH"]),
        ("paths", "status.test", ["resolves", "certificate"]),
        ("secret", "api.test", ["resolves", "certificate", "credential of its own in headers", "releases token"]),
        ("secret", "own.test", ["credential of its own in header:x-trace, headers, cookies"]),
    ],
)
def test_what_is_known_only_at_the_time_is_a_condition(policy: str, host: str, conditions: list[str]) -> None:
    request = RequestFacts(host, 443, Scheme.HTTPS, "GET", "/")
    told = " ".join(explain(POLICIES[policy], request, refusal_of_form).conditions)
    assert conditions == [condition for condition in conditions if condition in told]
    assert "not checked" in " ".join(explain(POLICIES["secret"], request, None).conditions) or host != "api.test"


@pytest.mark.parametrize("policy", ["secret", "watching"])
def test_a_credential_in_the_query_is_judged(policy: str) -> None:
    """As the gateway judges it. Mode observe has no secret for a host without an injection."""
    for query, sent in (("a=1", True), ("a=1&api_key=x", policy != "secret")):
        request = RequestFacts("api.test", 443, Scheme.HTTPS, "GET", "/v1", query)
        explained = explain(POLICIES[policy], request, refusal_of_form)
        assert sent is explained.sent
        if not sent:
            assert isinstance(explained.request, Deny)
            assert "client-credentials" == explained.request.rule


@pytest.mark.parametrize(
    ("label", "rule"), [("short", None), (".".join(["x" * 60] * 3), "dns.max_name"), ("a.b.c.d.e.f.g", "dns.")]
)
def test_a_name_over_the_bounds_is_not_said_to_be_sent(label: str, rule: str | None) -> None:
    """The gateway does not resolve such a name for any protocol."""
    policy = compile_named(load_text("version: 1\npolicies: {wild: {rules: [{id: w, host: '*.api.test'}]}}"), "wild")
    request = RequestFacts(f"{label}.api.test", 443, Scheme.HTTPS, "GET", "/")
    explained = explain(policy, request, refusal_of_form, over_bounds)
    assert (rule is None) is explained.sent
    if rule is not None:
        assert isinstance(explained.name, Deny)
        assert explained.name.rule.startswith(rule)
