"""Predicts the gateway's verdict on one request or database session from the policy and the facts alone. Pure.

- It calls the gateway's functions in the gateway's order: name, flow, and for an inspected flow the form of the request
  and the request.
- The strongest answer is "sent, if": it lists as conditions what is known only at run time (addresses, certificates,
  budgets, the vault).

The module prints and resolves nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from policy.client_credentials import Handling, Owned, examine
from policy.compiled import CompiledPolicy
from policy.decision import (
    AllowFlow,
    AllowName,
    AllowRequest,
    Deny,
    Treatment,
    decide_flow,
    decide_name,
    decide_request,
    refuse_credentials,
)
from policy.facts import FlowFacts, RequestFacts, Scheme, SessionFacts
from policy.sessions import AllowSession, decide_session

type Form = Callable[[RequestFacts], str | None]
"""Returns why a gateway refuses the form of a request, None if it does not. The gateway implements it."""

type Bounds = Callable[[CompiledPolicy, str], Deny | None]
"""Returns the bound on names that a host exceeds, None if it exceeds none. The gateway implements it."""

_CERTIFIED = "the server has a valid certificate for the host"
FORM_RULE = "protocol"
"""The rule of a refused form in the gateway's records."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The verdicts, up to the first denial. The request is sent, or the session begins, if all `conditions` hold."""

    name: AllowName | Deny
    flow: AllowFlow | Deny | None = None
    request: AllowRequest | AllowSession | Deny | None = None
    conditions: tuple[str, ...] = ()

    @property
    def sent(self) -> bool:
        """Whether the request is sent if the conditions hold."""
        if isinstance(self.flow, AllowFlow) and self.flow.treatment is Treatment.SPLICE:
            return True
        return isinstance(self.request, AllowRequest | AllowSession)


def explain(
    policy: CompiledPolicy, request: RequestFacts, form: Form | None, bounds: Bounds | None = None
) -> Explanation:
    """Return all verdicts on one request.

    Args:
        form: judges the form of the request; if None, a valid form is one of the conditions.
        bounds: judges the name; None if the name is not resolved because the operator has mapped it.
    """
    begun = _begin(policy, request.flow, bounds)
    name, flow = begun.name, begun.flow
    if flow is None or isinstance(flow, Deny):
        return begun
    places = _of_flow(policy, request.host)
    if flow.treatment is Treatment.SPLICE:
        return Explanation(name, flow, None, (*places, "the ClientHello does not hide the host (ECH)"))
    refused = None if form is None else form(request)
    if refused is not None:
        return Explanation(name, flow, Deny(FORM_RULE, f"The gateway does not accept the request: {refused}."))
    decision = decide_request(policy, request)
    if isinstance(decision, AllowRequest):
        decision = _with_query(request, decision)
    if isinstance(decision, Deny):
        return Explanation(name, flow, decision)
    unchecked = () if form is not None else ("the gateway accepts its method, path and query (not checked here)",)
    return Explanation(name, flow, decision, (*unchecked, *places, *_of_request(request, decision)))


def explain_session(policy: CompiledPolicy, session: SessionFacts, bounds: Bounds | None = None) -> Explanation:
    """Return all verdicts on one database session. `bounds`: see `explain`."""
    begun = _begin(policy, session.flow, bounds)
    if begun.flow is None or isinstance(begun.flow, Deny):
        return begun
    decision = decide_session(policy, session)
    if isinstance(decision, Deny):
        return Explanation(begun.name, begun.flow, decision)
    conditions = (
        *_of_flow(policy, session.host),
        _CERTIFIED,
        "the server logs in with SCRAM-SHA-256 over TLS",
        f"the vault releases {decision.login.secret} for it",
    )
    return Explanation(begun.name, begun.flow, decision, conditions)


def _begin(policy: CompiledPolicy, facts: FlowFacts, bounds: Bounds | None) -> Explanation:
    """Return the verdicts on the name and the flow, up to the first denial."""
    name = decide_name(policy, facts.host)
    over = None if bounds is None else bounds(policy, facts.host)
    if isinstance(name, Deny) or over is not None:
        return Explanation(name if isinstance(name, Deny) or over is None else over)
    return Explanation(name, decide_flow(policy, facts))


def _of_flow(policy: CompiledPolicy, host: str) -> tuple[str, ...]:
    address = f"{host} resolves to an address that may be dialled"
    if policy.limits.requests_per_minute is None and policy.limits.bytes_out is None:
        return (address,)
    return address, "the sandbox is within the limits of its policy"


def _with_query(request: RequestFacts, allowed: AllowRequest) -> AllowRequest | Deny:
    """Judge credentials in the query. The headers are not known here."""
    if allowed.client_credentials is None:
        return allowed
    refused = examine(allowed.client_credentials, Owned.by(allowed.plans), (), request.query).refused
    return refuse_credentials(allowed, refused) if refused else allowed


def _of_request(request: RequestFacts, allowed: AllowRequest) -> tuple[str, ...]:
    found = ["each of its headers has a form that the gateway accepts"]
    if request.scheme is Scheme.HTTPS:
        found.append(_CERTIFIED)
    handling = allowed.client_credentials
    if handling is not None:
        slots = [one.slot for one in handling.slots if one.handling is Handling.REFUSE and "query:" not in one.slot]
        slots += ["headers"] * (handling.headers is Handling.REFUSE) + ["cookies"] * (
            handling.cookies is Handling.REFUSE
        )
        found += [f"the client sends no credential of its own in {', '.join(slots)}"] if slots else []
    if allowed.plans:
        secrets = dict.fromkeys(plan.secret for plan in allowed.plans)
        always = {plan.secret for plan in allowed.injections}
        condition = ", if it has the placeholder"
        found += [f"the vault releases {secret} for it{'' if secret in always else condition}" for secret in secrets]
    return tuple(found)
