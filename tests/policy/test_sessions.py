"""Which database sessions a policy allows: one host, port and database at a time, with exactly one login."""

from dataclasses import replace

import pytest

from policy.compile import compile_named
from policy.compiled import CompiledPolicy, secrets_of
from policy.decision import AllowFlow, Deny, Treatment, decide_flow, decide_name, decide_request
from policy.facts import FlowFacts, RequestFacts, Scheme, SessionFacts
from policy.load import load_text
from policy.logins import LoginPlan
from policy.names import HostPattern
from policy.rules import Action, Endpoint, Mode, Precedence, Rule, RuleList
from policy.sessions import AllowSession, decide_session, session_ports

HOST = "db.example.com"
RULES = """version: 1
policies:
  p:
    rules:
      - id: db
        host: db.example.com
        schemes: [postgres]
        databases: [ledger, Ledger]
        inject: {secret: s, as: postgres}
      - {id: any, host: any.example.com, schemes: [postgres], inject: {secret: t, as: postgres, username: u}}
      - {id: web, host: db.example.com}
      - {id: not-here, action: deny, host: closed.example.com, schemes: [postgres]}
      - {id: closed, host: closed.example.com, schemes: [postgres], inject: {secret: s, as: postgres}}
"""
POLICY = compile_named(load_text(RULES), "p")


def decided(
    policy: CompiledPolicy, host: str = HOST, database: str = "ledger", port: int = 5432
) -> AllowSession | Deny:
    return decide_session(policy, SessionFacts(host, port, database))


def denied(decision: AllowSession | Deny) -> str:
    assert isinstance(decision, Deny)
    return decision.rule


def test_a_session_gets_the_login_of_its_rule() -> None:
    assert AllowSession("p/db", LoginPlan("p/db", "s")) == decided(POLICY)
    assert AllowSession("p/any", LoginPlan("p/any", "t", "u")) == decided(POLICY, "any.example.com", "whatever")


@pytest.mark.parametrize(
    ("host", "database", "port", "rule"),
    [
        (HOST, "payroll", 5432, "default"),
        (HOST, "LEDGER", 5432, "default"),
        (HOST, "", 5432, "default"),
        (HOST, "ledger", 5433, "default"),
        (HOST, "ledger", 443, "scheme"),
        ("other.example.com", "ledger", 5432, "default"),
        ("closed.example.com", "ledger", 5432, "p/not-here"),
        ("DB.example.com", "ledger", 5432, "invalid-name"),
    ],
)
def test_what_no_rule_allows_is_denied(host: str, database: str, port: int, rule: str) -> None:
    assert rule == denied(decided(POLICY, host, database, port))


def test_a_session_needs_every_list() -> None:
    """A list of the API knows hosts only. It can narrow, and opens no session by itself."""
    allow = RuleList("api", Precedence.FIRST_MATCH, default_action=Action.ALLOW)
    endpoint = Endpoint(5432, Scheme.POSTGRES)
    deny = replace(allow, rules=(Rule("api[1]", Action.DENY, (HostPattern(HOST),)),))
    assert AllowSession("default+p/db", LoginPlan("p/db", "s")) == decided(
        replace(POLICY, lists=(allow, *POLICY.lists))
    )
    assert "api[1]" == denied(decided(replace(POLICY, lists=(deny, *POLICY.lists))))
    assert "default" == denied(decided(CompiledPolicy("api", (allow,))))
    assert isinstance(decide_flow(CompiledPolicy("api", (allow,)), FlowFacts(HOST, 5432, Scheme.POSTGRES)), AllowFlow)
    assert endpoint in POLICY.rules[0].endpoints


def test_two_logins_for_one_session_are_a_denial() -> None:
    other = replace(POLICY.rules[0], id="q/db", login=LoginPlan("q/db", "t"))
    lists = (*POLICY.lists, RuleList("q", Precedence.DENY_WINS, rules=(other,)))
    assert "injection-ambiguous" == denied(decided(replace(POLICY, lists=lists)))
    same = replace(other, login=LoginPlan("q/db", "s"))
    lists = (*POLICY.lists, RuleList("q", Precedence.DENY_WINS, rules=(same,)))
    assert AllowSession("p/db+q/db", LoginPlan("p/db", "s")) == decided(replace(POLICY, lists=lists))


def test_the_operators_lists_rule_and_observe_opens_nothing() -> None:
    assert "always-deny:1" == denied(decided(replace(POLICY, always_deny=(HOST,))))
    watching = replace(POLICY, lists=tuple(replace(one, mode=Mode.OBSERVE) for one in POLICY.lists))
    assert "default" == denied(decided(watching, database="payroll"))
    assert "default" == denied(decided(watching, "other.example.com"))
    other = FlowFacts("other.example.com", 5432, Scheme.POSTGRES)
    assert isinstance(decide_flow(watching, other), Deny)
    assert isinstance(decided(watching), AllowSession)


def test_a_host_with_sessions_is_inspected_and_has_no_requests() -> None:
    flow = decide_flow(POLICY, FlowFacts(HOST, 5432, Scheme.POSTGRES))
    assert isinstance(flow, AllowFlow)
    assert Treatment.INSPECT is flow.treatment
    web = decide_flow(POLICY, FlowFacts(HOST, 443, Scheme.HTTPS))
    assert isinstance(web, AllowFlow)
    assert Treatment.SPLICE is web.treatment
    assert not isinstance(decide_name(POLICY, "any.example.com"), Deny)
    assert not POLICY.binds(HOST)  # its requests are not guarded: none gets a secret
    request = decide_request(POLICY, RequestFacts(HOST, 5432, Scheme.POSTGRES, "GET", "/", ""))
    assert isinstance(request, Deny)
    assert "scheme" == request.rule


def test_the_vault_is_told_of_each_login() -> None:
    uses = {(use.secret, use.host, use.port, use.scheme.value) for use in secrets_of(POLICY)}
    assert {("s", HOST, 5432, "postgres"), ("t", "any.example.com", 5432, "postgres")} <= uses


def test_ports_of_sessions_are_those_of_allow_rules() -> None:
    assert session_ports(POLICY, 5432)
    assert not session_ports(POLICY, 5433)
    assert not session_ports(POLICY, 443)


def test_a_compiled_policy_keeps_its_sessions() -> None:
    assert POLICY == CompiledPolicy.from_json(POLICY.to_json())


@pytest.mark.parametrize(
    "wrong",
    [
        {"login": None},
        {"login": None, "databases": ()},
        {"endpoints": (Endpoint(5432, Scheme.POSTGRES), Endpoint(5432, Scheme.HTTPS))},
        {"endpoints": (Endpoint(5432, Scheme.HTTPS),)},
        {"endpoints": ()},
        {"methods": ("GET",)},
        {"databases": ("",)},
        {"databases": ("d" * 64,)},
        {"hosts": (HostPattern("*.example.com"),)},
        {"action": Action.DENY},
    ],
)
def test_a_rule_of_sessions_is_consistent(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"rule 'p/db'|name of a database"):
        replace(POLICY.rules[0], **wrong)  # type: ignore[arg-type]
