"""The decisions: from facts and a compiled policy to an allow, or to a denial with its reason. Pure and total.

Order of authority; the first match decides:

1. Invalid facts (a name not in wire form, a method that is no token) and methods that are never relayed: denied.
2. Operator `always_deny`: names and addresses, on any port, for every source of the address.
3. The built-in address classes: an address that is not public, or is the gateway host's own, is denied, unless the
   operator has excepted it or mapped the host to it. Neither overrides an `always_deny`.
4. Operator `always_allow`: HTTP on port 80 and HTTPS on port 443. It overrides all that follows.
5. The rule lists; each must allow. In a `DENY_WINS` list a matching denial overrides each allow. In a `FIRST_MATCH`
   list the first matching rule decides; before it the operator's ceiling is applied.

- A flow is judged without its requests. Rules with methods or paths make it INSPECT. `decide_request` then judges each
  request completely, the flow included.
- `destination.decide_address` applies this order to every address of a flow.
- A name rule never allows a bare address, and an address rule never allows a name.
- Two different injections into one slot of a request are a denial, and so are two secrets for one placeholder on one
  surface.
- The answer says what happens to credentials that the client itself sends to a bound host, in requests of a rule with
  `client_credentials`, or in requests that a binding injects a secret into. The caller finds them.
- On a host with path rules an ambiguous path is a denial, unless a rule that allows the request permits its form.
- `sessions.decide_session` judges what is on a flow of PostgreSQL. Mode observe allows no such flow that a list denies.
- Mode observe turns a list's denial into an allow with the denial as `observed`. Such a request gets no injection.
  Invalid facts, `always_deny`, the ceiling, conflicting injections and bare addresses are denied in this mode, too.

The only negative answer is a `Deny`. An exception means that no decision was possible; the caller then denies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import combinations

from policy.client_credentials import OF_BINDINGS, RULE, ClientCredentials, Owned, refusal, strictest
from policy.compiled import CompiledPolicy
from policy.facts import FlowFacts, RequestFacts, Scheme
from policy.injection import InjectionPlan, SecretPlan, SubstitutionPlan
from policy.names import is_canonical
from policy.paths import Leniency, ambiguity
from policy.rules import (
    FORBIDDEN_METHODS,
    STANDARD,
    Action,
    Binding,
    Endpoint,
    Mode,
    Precedence,
    Rule,
    RuleList,
    is_token,
)

type Judged = tuple[str, int, Scheme, str, str | None]
"""Host, port, scheme, method, and the path if it counts."""

DEFAULT = "default"
"""The rule of a denial that no rule has made."""
_OF_BINDINGS = Leniency(encoded_slashes=True)
"""The egress API tolerates `%2F` that does not change which binding matches."""


@dataclass(frozen=True, slots=True)
class Deny:
    """A denial: the rule, and the reason as a sentence. Neither contains a query."""

    rule: str
    reason: str


class Treatment(StrEnum):
    """How a gateway handles an allowed flow."""

    INSPECT = "inspect"
    SPLICE = "splice"


@dataclass(frozen=True, slots=True)
class AllowName:
    """The name may be resolved. This permits no connection."""

    rule: str
    observed: Deny | None = None


@dataclass(frozen=True, slots=True)
class AllowFlow:
    """The flow may be opened to an address that the gateway resolves itself."""

    rule: str
    treatment: Treatment
    observed: Deny | None = None


@dataclass(frozen=True, slots=True)
class AllowRequest:
    """The request may be sent with these secrets; each injection owns its slot.

    `client_credentials` handles credentials of the client; None leaves them alone. If `trial` is the name of a list in
    mode observe, a refusal of them is only reported.
    """

    rule: str
    injections: tuple[InjectionPlan, ...] = ()
    observed: Deny | None = None
    substitutions: tuple[SubstitutionPlan, ...] = ()
    client_credentials: ClientCredentials | None = None
    trial: str | None = None
    plans: tuple[SecretPlan, ...] = field(init=False, compare=False, repr=False)
    """Every use of a secret."""
    owned: Owned = field(init=False, compare=False, repr=False)
    """What the secrets own, if credentials of the client are handled."""

    def __post_init__(self) -> None:
        plans: tuple[SecretPlan, ...] = (*self.injections, *self.substitutions)
        if plans and self.observed is not None:
            raise ValueError("a request with an observed denial gets no secret")
        object.__setattr__(self, "plans", plans)
        object.__setattr__(self, "owned", Owned() if self.client_credentials is None else Owned.by(plans))


@dataclass(frozen=True, slots=True)
class AllowAddress:
    """A flow may be opened to the address."""

    rule: str
    observed: Deny | None = None


@dataclass(frozen=True, slots=True)
class _Pass:
    """The answer of one rule list that does not deny."""

    rule: str
    injections: tuple[InjectionPlan, ...] = ()
    observed: Deny | None = None
    substitutions: tuple[SubstitutionPlan, ...] = ()
    client_credentials: ClientCredentials | None = None
    trial: str | None = None


def decide_name(policy: CompiledPolicy, host: str) -> AllowName | Deny:
    """Decide whether a name may be resolved: it may if policy can allow a flow to it."""
    early = _operator_on_host(policy, host)
    if isinstance(early, Deny):
        return early
    if early is not None:
        return AllowName(early)
    passed = _through_lists([_observing(rules, _name_in(rules, host)) for rules in policy.lists])
    return passed if isinstance(passed, Deny) else AllowName(passed.rule, passed.observed)


def decide_flow(policy: CompiledPolicy, facts: FlowFacts) -> AllowFlow | Deny:
    """Decide about a flow with a known server name, and choose its treatment."""
    passed = _flow(policy, facts)
    if isinstance(passed, Deny):
        return passed
    endpoint = Endpoint(facts.port, facts.scheme)
    inspect = (
        facts.scheme is not Scheme.HTTPS
        or any(rule.inspects and rule.covers(endpoint) for rules in policy.lists for rule in rules.of_host(facts.host))
        or any(binding.covers(facts.host, endpoint) for binding in policy.bindings)
    )
    return AllowFlow(passed.rule, Treatment.INSPECT if inspect else Treatment.SPLICE, passed.observed)


def decide_request(policy: CompiledPolicy, facts: RequestFacts) -> AllowRequest | Deny:
    """Decide about one request on an inspected flow, flow included, and plan its injections."""
    if not is_token(facts.method):
        return Deny("invalid-method", "The request's method is not a valid HTTP method.")
    if facts.method.upper() in FORBIDDEN_METHODS:
        return Deny("forbidden-method", f"{facts.method} requests are never relayed.")
    if not _is_path(facts.path):
        return Deny("invalid-path", "The request's target is not a path.")
    if facts.scheme is Scheme.POSTGRES:
        return Deny("scheme", "A database session has no HTTP requests.")
    flow = _flow(policy, facts.flow)
    if isinstance(flow, Deny):
        return flow
    endpoint = Endpoint(facts.port, facts.scheme)
    overridden = _operator_override(policy, facts.flow)
    lists = _through_lists(
        [_observing(rules, _request_in(rules, facts, endpoint, overridden)) for rules in policy.lists]
    )
    if isinstance(lists, Deny):
        return lists
    if lists.observed is not None:
        return AllowRequest(lists.rule, (), lists.observed)
    bound = _bindings(policy, facts, endpoint)
    if isinstance(bound, Deny):
        return bound
    injections = (*lists.injections, *(plan for binding in bound for plan in binding.injections))
    substitutions = (*lists.substitutions, *(plan for binding in bound for plan in binding.substitutions))
    settled = _settle(policy, facts, overridden or lists.rule, injections, substitutions)
    if isinstance(settled, Deny):
        return settled
    credentials = lists.client_credentials
    if credentials is None and policy.binds(facts.host):
        credentials = policy.client_credentials
    if credentials is None and any(binding.injections for binding in bound):
        credentials = OF_BINDINGS
    return settled if credentials is None else replace(settled, client_credentials=credentials, trial=lists.trial)


def judged(policy: CompiledPolicy, facts: RequestFacts) -> Judged:
    """Return what the decision about a request depends on: requests with equal values have equal decisions.

    No rule reads the query. The path counts if a rule or binding of the host reads it, or if it is none.
    """
    path = None if _is_path(facts.path) and not policy.reads_paths(facts.host) else facts.path
    return facts.host, facts.port, facts.scheme, facts.method, path


def _is_path(text: str) -> bool:
    return text.startswith("/") and "?" not in text and "#" not in text


def refuse_credentials(allowed: AllowRequest, refused: tuple[str, ...]) -> AllowRequest | Deny:
    """Decide about an allowed request in which the client itself sent credentials in slots that are refused."""
    denial = Deny(RULE, refusal(refused))
    return denial if allowed.trial is None else AllowRequest(allowed.trial, observed=denial)


def _flow(policy: CompiledPolicy, facts: FlowFacts) -> _Pass | Deny:
    """Decide about a flow without its treatment."""
    early = _operator_on_host(policy, facts.host)
    if isinstance(early, Deny):
        return early
    try:
        endpoint = Endpoint(facts.port, facts.scheme)
    except ValueError:
        return Deny("scheme", f"{facts.scheme} is not spoken on port {facts.port}.")
    if early is not None and endpoint in STANDARD:
        return _Pass(early)
    answers = [_flow_in(rules, facts, endpoint) for rules in policy.lists]
    if facts.scheme is Scheme.POSTGRES:
        return _through_lists(answers)
    return _through_lists([_observing(rules, answer) for rules, answer in zip(policy.lists, answers, strict=True)])


def _operator_on_host(policy: CompiledPolicy, host: str) -> str | Deny | None:
    """Return the operator's denial, the id of the operator's allow, or None if neither list has the host."""
    if not is_canonical(host):
        return Deny("invalid-name", "The host name is not in canonical form.")
    position = policy.denied.find_host(host)
    if position is not None:
        return Deny(f"always-deny:{position}", f"{host} is denied by the operator.")
    position = policy.allowed.find_host(host)
    return None if position is None else f"always-allow:{position}"


def _operator_override(policy: CompiledPolicy, facts: FlowFacts) -> str | None:
    """Return the id of the operator's allow if it covers this flow, otherwise None."""
    if (facts.port, facts.scheme) not in {(endpoint.port, endpoint.scheme) for endpoint in STANDARD}:
        return None
    position = policy.allowed.find_host(facts.host)
    return None if position is None else f"always-allow:{position}"


def _observing(rules: RuleList, answer: _Pass | Deny) -> _Pass | Deny:
    if rules.mode is not Mode.OBSERVE:
        return answer
    trial = f"observe:{rules.name}"
    return _Pass(trial, observed=answer) if isinstance(answer, Deny) else replace(answer, trial=trial)


def _through_lists(answers: list[_Pass | Deny]) -> _Pass | Deny:
    """Return the first denial, or all passes combined."""
    passes = []
    for answer in answers:
        if isinstance(answer, Deny):
            return answer
        passes.append(answer)
    guards = [answer.client_credentials for answer in passes if answer.client_credentials is not None]
    trials = [answer.trial for answer in passes]
    return _Pass(
        "+".join(answer.rule for answer in passes),
        tuple(plan for answer in passes for plan in answer.injections),
        next((answer.observed for answer in passes if answer.observed is not None), None),
        tuple(plan for answer in passes for plan in answer.substitutions),
        strictest(guards) if guards else None,
        next(iter(trials), None) if all(trials) else None,
    )


def _name_in(rules: RuleList, host: str) -> _Pass | Deny:
    if rules.ceiling is not None and not rules.ceiling.admits_host(host):
        return Deny("ceiling", f"{host} is above the operator's ceiling.")
    matching = rules.of_host(host)
    if rules.precedence is Precedence.FIRST_MATCH:
        return _first_match(rules, matching, host)
    denials = [rule for rule in matching if rule.action is Action.DENY and not rule.narrow]
    for rule in matching:
        if rule.action is Action.ALLOW and any(
            not any(denial.covers(endpoint) for denial in denials) for endpoint in rule.endpoints
        ):
            return _Pass(rule.id)
    if denials:
        return Deny(denials[0].id, f"{host} is denied by rule {denials[0].id}.")
    return Deny(DEFAULT, f"No rule of {rules.name} allows {host}.")


def _flow_in(rules: RuleList, facts: FlowFacts, endpoint: Endpoint) -> _Pass | Deny:
    where = f"{facts.host}:{facts.port}"
    if rules.ceiling is not None and not (
        rules.ceiling.admits_host(facts.host) and rules.ceiling.admits_port(facts.port)
    ):
        return Deny("ceiling", f"{where} is above the operator's ceiling.")
    if rules.ceiling is not None and facts.scheme is Scheme.POSTGRES:
        return Deny("ceiling", "Database sessions are above the operator's ceiling: only a named policy allows them.")
    if rules.ceiling is not None and facts.scheme is Scheme.HTTP and facts.port != 80:
        return Deny("ceiling", f"Plain HTTP on port {facts.port} is above the operator's ceiling.")
    matching = [rule for rule in rules.of_host(facts.host) if rule.covers(endpoint)]
    if rules.precedence is Precedence.FIRST_MATCH:
        return _first_match(rules, matching, where)
    for rule in matching:
        if rule.action is Action.DENY and not rule.narrow:
            return Deny(rule.id, f"{where} is denied by rule {rule.id}.")
    for rule in matching:
        if rule.action is Action.ALLOW:
            return _Pass(rule.id)
    return Deny(DEFAULT, f"No rule of {rules.name} allows {facts.scheme} to {where}.")


def _first_match(rules: RuleList, matching: tuple[Rule, ...] | list[Rule], where: str) -> _Pass | Deny:
    if matching:
        first = matching[0]
        if first.action is Action.ALLOW:
            return _Pass(first.id)
        return Deny(first.id, f"{where} is denied by rule {first.id}.")
    if rules.default_action is Action.ALLOW:
        return _Pass(DEFAULT)
    return Deny(DEFAULT, f"No rule of {rules.name} allows {where}.")


def _request_in(rules: RuleList, facts: RequestFacts, endpoint: Endpoint, overridden: str | None) -> _Pass | Deny:
    if overridden is None:
        flow = _flow_in(rules, facts.flow, endpoint)
        if isinstance(flow, Deny) or rules.precedence is Precedence.FIRST_MATCH:
            return flow
    matching = [rule for rule in rules.of_host(facts.host) if rule.covers(endpoint)]
    problem = ambiguity(facts.path) if any(rule.strict_paths for rule in matching) else None
    accepting = [
        rule
        for rule in matching
        if rule.action is Action.ALLOW
        and rule.accepts(facts.method, facts.path)
        and (problem is None or ambiguity(facts.path, rule.permits) is None)
    ]
    if problem is not None and not accepting:
        return Deny("ambiguous-path", f"The request path is ambiguous ({problem}), and {facts.host} has path rules.")
    if overridden is None:
        for rule in matching:
            if rule.action is Action.DENY and rule.accepts(facts.method, facts.path):
                return Deny(rule.id, f"{facts.method} on this path of {facts.host} is denied by rule {rule.id}.")
    injections = tuple(plan for rule in accepting for plan in rule.injections)
    substitutions = tuple(plan for rule in accepting for plan in rule.substitutions)
    stated = [rule.client_credentials for rule in accepting if rule.client_credentials is not None]
    credentials = strictest(stated) if stated else None
    if overridden is not None:
        return _Pass(overridden, injections, None, substitutions, credentials)
    if not accepting:
        allows = ", ".join(rule.id for rule in matching if rule.action is Action.ALLOW)
        return Deny(DEFAULT, f"{facts.host} is allowed, but not {facts.method} on this path (rules: {allows}).")
    return _Pass(accepting[0].id, injections, None, substitutions, credentials)


def _bindings(policy: CompiledPolicy, facts: RequestFacts, endpoint: Endpoint) -> tuple[Binding, ...] | Deny:
    covering = [binding for binding in policy.bindings if binding.covers(facts.host, endpoint)]
    if not covering:
        return ()
    problem = ambiguity(facts.path, _OF_BINDINGS)
    if problem is None and any(binding.divides(facts.method, facts.path) for binding in covering):
        problem = "an encoded slash changes which binding matches"
    if problem is not None:
        return Deny("ambiguous-path", f"request path contains ambiguous segments ({problem})")
    matching = [binding for binding in covering if binding.accepts(facts.method, facts.path)]
    exact = [binding for binding in matching if binding.is_exact_for(facts.host)]
    best = exact or matching
    if len(best) > 1:
        return Deny("binding-ambiguous", "credential binding ambiguous")
    return tuple(best)


def _settle(
    policy: CompiledPolicy,
    facts: RequestFacts,
    rule: str,
    injections: tuple[InjectionPlan, ...],
    substitutions: tuple[SubstitutionPlan, ...],
) -> AllowRequest | Deny:
    """Check that the plans have no conflict with each other or with this flow."""
    kept: list[InjectionPlan] = []
    for plan in injections:
        if not any(map(plan.agrees, kept)):
            kept.append(plan)
    conflict = _conflict(kept) or _conflict(substitutions)
    if conflict is not None:
        return Deny("injection-ambiguous", conflict)
    sends = bool(kept or substitutions)
    if sends and facts.scheme is Scheme.HTTP and not (facts.port == 80 and facts.host in policy.plaintext_secrets):
        return Deny("plaintext-secret", f"The operator does not allow secrets to {facts.host} over plain HTTP.")
    if facts.scheme is Scheme.HTTP and any(plan.handshake for plan in kept):
        return Deny("plaintext-secret", f"A client certificate cannot be presented to {facts.host} over plain HTTP.")
    return AllowRequest(rule, tuple(kept), None, substitutions)


def _conflict[P: (InjectionPlan, SubstitutionPlan)](plans: Sequence[P]) -> str | None:
    """Return why one request cannot have all these plans, None if it can."""
    for first, second in combinations(plans, 2):
        if first.collides(second):
            return f"{first.binding} and {second.binding} both set {second.place}."
    return None
