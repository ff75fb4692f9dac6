"""The decision about a database session: from its facts and a compiled policy to an allow with a login, or to a denial.

- The flow is judged first, by `decision.decide_flow`, in its order of authority.
- Each rule list of the operator must have a rule that allows the session's database. An OpenSandbox list knows hosts
  only, and gives no login; so it can narrow what a named policy allows, and opens no session by itself.
- A session has exactly one login. Without one the gateway could not open it, with two it would have to choose.
- Mode observe allows no session that the rules deny: such a session would get no secret, so it could not begin.

Pure and total.
"""

from dataclasses import dataclass

from policy.compiled import CompiledPolicy
from policy.decision import Deny, decide_flow
from policy.facts import Scheme, SessionFacts
from policy.logins import LoginPlan
from policy.rules import Action, Endpoint, Precedence


@dataclass(frozen=True, slots=True)
class AllowSession:
    """The session may be opened, with this login and no other."""

    rule: str
    login: LoginPlan


def decide_session(policy: CompiledPolicy, facts: SessionFacts) -> AllowSession | Deny:
    """Decide about one database session, flow included."""
    flow = decide_flow(policy, facts.flow)
    if isinstance(flow, Deny):
        return flow
    endpoint = Endpoint(facts.port, Scheme.POSTGRES)
    ids: list[str] = []
    logins: dict[tuple[str, str | None], LoginPlan] = {}
    for rules, flow_rule in zip(policy.lists, flow.rule.split("+"), strict=True):
        if rules.precedence is Precedence.FIRST_MATCH:
            ids.append(flow_rule)
            continue
        matching = [one for one in rules.of_host(facts.host) if one.action is Action.ALLOW and one.covers(endpoint)]
        accepting = [one for one in matching if one.admits(facts.database)]
        if not accepting:
            known = ", ".join(one.id for one in matching)
            return Deny("default", f"{facts.host} is allowed, but not this database (rules: {known}).")
        ids.append(accepting[0].id)
        for one in accepting:
            if one.login is not None:
                logins.setdefault((one.login.secret, one.login.username), one.login)
    if not logins:
        return Deny("default", f"No rule gives database sessions with {facts.host} a login.")
    if len(logins) > 1:
        names = " and ".join(plan.binding for plan in logins.values())
        return Deny("injection-ambiguous", f"{names} give the session different logins.")
    return AllowSession("+".join(ids), next(iter(logins.values())))


def session_ports(policy: CompiledPolicy, port: int) -> bool:
    """Whether some rule allows database sessions on a port."""
    return any(
        endpoint.port == port and endpoint.scheme is Scheme.POSTGRES
        for rule in policy.rules
        if rule.action is Action.ALLOW
        for endpoint in rule.endpoints
    )
