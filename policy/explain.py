"""Predicts the gateway's verdict on one request from the policy and the request alone. Pure.

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
from policy.facts import RequestFacts, Scheme

type Form = Callable[[RequestFacts], str | None]
"""Returns why a gateway refuses the form of a request, None if it does not. The gateway implements it."""

type Bounds = Callable[[CompiledPolicy, str], Deny | None]
"""Returns the bound on names that a host exceeds, None if it exceeds none. The gateway implements it."""

FORM_RULE = "protocol"
"""The rule of a refused form in the gateway's records."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The verdicts, up to the first denial. The request is sent if all `conditions` hold."""

    name: AllowName | Deny
    flow: AllowFlow | Deny | None = None
    request: AllowRequest | Deny | None = None
    conditions: tuple[str, ...] = ()

    @property
    def sent(self) -> bool:
        """Whether the request is sent if the conditions hold."""
        if isinstance(self.flow, AllowFlow) and self.flow.treatment is Treatment.SPLICE:
            return True
        return isinstance(self.request, AllowRequest)


def explain(
    policy: CompiledPolicy, request: RequestFacts, form: Form | None, bounds: Bounds | None = None
) -> Explanation:
    """Return all verdicts on one request.

    Args:
        form: judges the form of the request; if None, a valid form is one of the conditions.
        bounds: judges the name; None if the name is not resolved because the operator has mapped it.
    """
    name = decide_name(policy, request.host)
    over = None if bounds is None else bounds(policy, request.host)
    if isinstance(name, Deny) or over is not None:
        return Explanation(name if isinstance(name, Deny) or over is None else over)
    flow = decide_flow(policy, request.flow)
    if isinstance(flow, Deny):
        return Explanation(name, flow)
    places = _of_flow(policy, request)
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


def _of_flow(policy: CompiledPolicy, request: RequestFacts) -> tuple[str, ...]:
    address = f"{request.host} resolves to an address that may be dialled"
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
        found.append("the server has a valid certificate for the host")
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
