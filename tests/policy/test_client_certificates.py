"""A client certificate is one more injection: its slot is the TLS connection, so it needs https and one secret."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from policy import cli
from policy.compile import compile_named
from policy.compiled import CompiledPolicy, secrets_of, secrets_to
from policy.decision import AllowFlow, AllowRequest, Deny, Treatment, decide_flow, decide_request
from policy.facts import RequestFacts, Scheme
from policy.injection import InjectionKind, InjectionPlan, render
from policy.load import load_text
from policy.names import HostPattern
from policy.problems import PolicyError
from policy.rules import STANDARD, Action, Mode, Precedence, Rule, RuleList

SLOT = "tls:client-certificate"
PLAN = InjectionPlan("agents/partner", "partner", InjectionKind.CLIENT_CERTIFICATE, "")
TEXT = """\
version: 1
policies:
  agents:
    rules:
      - id: partner
        host: api.partner.test
        paths: [/v1/*]
        inject: [{secret: partner, as: client-certificate}, {secret: token, as: bearer}]
      - {id: open, host: api.partner.test, paths: [/status]}
"""


def facts(path: str, scheme: Scheme = Scheme.HTTPS) -> RequestFacts:
    return RequestFacts("api.partner.test", 443 if scheme is Scheme.HTTPS else 80, scheme, "GET", path)


def test_a_rule_presents_the_certificate_for_its_requests_only() -> None:
    """Beside a header, at the paths of the rule; the flow is inspected, and the secret is granted at https only."""
    policy = compile_named(load_text(TEXT), "agents")
    inside, outside = decide_request(policy, facts("/v1/x")), decide_request(policy, facts("/status"))
    flow = decide_flow(policy, facts("/").flow)

    assert isinstance(inside, AllowRequest) and isinstance(outside, AllowRequest) and isinstance(flow, AllowFlow)
    assert {SLOT, "authorization"} == {plan.slot for plan in inside.plans}
    assert PLAN in inside.plans
    assert () == outside.plans
    assert Treatment.INSPECT is flow.treatment
    assert [("partner", 443, Scheme.HTTPS, SLOT)] == [
        (use.secret, use.port, use.scheme, use.slot)
        for use in secrets_of(policy)
        if use.kind == InjectionKind.CLIENT_CERTIFICATE
    ]
    assert PLAN in {at.plan for at in secrets_to(policy, "api.partner.test")}
    assert policy == CompiledPolicy.from_json(json.loads(json.dumps(policy.to_json())))


REFUSED = {
    "a header": (
        "{secret: s, as: client-certificate, header: X-A}",
        "5:68: as: client-certificate is sent in the TLS handshake and takes no header",
    ),
    "a user name": ("{secret: s, as: client-certificate, username: u}", "5:78: client-certificate takes no username"),
    "a name": (
        "{secret: s, as: client-certificate, name: n}",
        "5:68: as: client-certificate is sent in the TLS handshake",
    ),
    "two of them": (
        "[{secret: s, as: client-certificate}, {secret: t, as: client-certificate}]",
        "5:70: a second injection into the client certificate",
    ),
}


def document(inject: str, more: str = "") -> str:
    return f"version: 1\npolicies:\n  p:\n    rules:\n      - {{host: a.test{more}, inject: {inject}}}\n"


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_client_certificate_cannot_have_is_refused(case: str) -> None:
    inject, problem = REFUSED[case]
    with pytest.raises(PolicyError) as refused:
        load_text(document(inject))
    assert [problem] == [str(one).partition(":")[2].strip()[: len(problem)] for one in refused.value.problems]


def test_no_rule_presents_a_certificate_over_plain_http() -> None:
    """`plaintext_secrets` does not permit it either. A compiled policy with such a rule denies the request."""
    plain = "plaintext_secrets: [a.test]\n" + document(
        "{secret: s, as: client-certificate}", ", schemes: [http, https]"
    )
    with pytest.raises(PolicyError, match="a client certificate needs https, and this rule allows http"):
        load_text(plain)
    load_text(plain.replace("client-certificate", "bearer"))

    rule = Rule("r", Action.ALLOW, (HostPattern("api.partner.test"),), endpoints=STANDARD, injections=(PLAN,))
    policy = CompiledPolicy("p", (RuleList("p", Precedence.DENY_WINS, Mode.ENFORCE, (rule,)),))
    policy = replace(policy, plaintext_secrets=("api.partner.test",))
    assert isinstance(decide_request(policy, facts("/")), AllowRequest)
    denied = decide_request(policy, facts("/", Scheme.HTTP))
    assert isinstance(denied, Deny)
    assert "plaintext-secret" == denied.rule


def test_two_rules_with_different_certificates_conflict_in_one_request() -> None:
    """In a file that is an error. A conflict that appears later denies the request; equal plans do not conflict."""
    two = "      - {{host: api.partner.test, inject: {{secret: {}, as: client-certificate}}}}\n"
    with pytest.raises(PolicyError, match=r"set the client certificate of the same requests to api\.partner\.test"):
        load_text(TEXT + two.format("other"))
    load_text(TEXT + two.format("partner"))

    def policy(other: InjectionPlan) -> CompiledPolicy:
        rules = [
            Rule(plan.binding, Action.ALLOW, (HostPattern("api.partner.test"),), endpoints=STANDARD, injections=(plan,))
            for plan in (PLAN, other)
        ]
        return CompiledPolicy("p", (RuleList("p", Precedence.DENY_WINS, Mode.ENFORCE, tuple(rules)),))

    assert isinstance(decide_request(policy(replace(PLAN, binding="b")), facts("/")), AllowRequest)
    denied = decide_request(policy(replace(PLAN, binding="b", secret="other")), facts("/"))
    assert Deny("injection-ambiguous", "agents/partner and b both set the client certificate.") == denied


@pytest.mark.parametrize(("name", "username"), [("Authorization", None), ("", "me")])
def test_a_plan_of_a_certificate_has_no_name(name: str, username: str | None) -> None:
    with pytest.raises(ValueError, match=r"takes no (user)?name"):
        InjectionPlan("b", "s", InjectionKind.CLIENT_CERTIFICATE, name, username)


def test_a_certificate_is_never_rendered_into_a_header() -> None:
    with pytest.raises(ValueError, match="in the TLS handshake only"):
        render(PLAN, "a certificate in one line")


def test_explain_names_the_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "policies.yaml"
    file.write_text(TEXT)
    assert cli.OK == cli.explain(file, "agents", "api.partner.test", 443, "https", "GET", "/v1/x")
    assert (
        "  inject   the client certificate from secret partner as client-certificate (agents/partner)\n"
        in capsys.readouterr().out
    )
