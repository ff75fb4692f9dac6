"""What a gateway does with one request, as far as policy and the request alone can tell. Pure.

- The functions of the gateway are asked, in the gateway's order: name, flow, then the form of the request and the
  request itself where the flow is inspected.
- The strongest answer is "sent, if": what is known only at the time (addresses, certificates, budgets, the vault) is
  part of the answer, never left out.

It prints nothing and resolves nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
)
from policy.facts import RequestFacts, Scheme

type Form = Callable[[RequestFacts], str | None]
"""Says why a gateway refuses the form of a request, None if it does not; it belongs to the gateway."""

type Bounds = Callable[[CompiledPolicy, str], Deny | None]
"""Says which of the bounds on names a host is over, None if none; it belongs to the gateway, too."""

FORM_RULE = "protocol"
"""What the gateway's records call a refusal of form."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answers, up to the first denial. `conditions` are those under which the request is sent."""

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
    """Ask everything that can be asked; without `form` that the form is fine is one of the conditions.

    `bounds` None means that the name is not resolved: the operator has mapped it.
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
    if isinstance(decision, Deny):
        return Explanation(name, flow, decision)
    unchecked = () if form is not None else ("the gateway accepts its method, path and query (not checked here)",)
    return Explanation(name, flow, decision, (*unchecked, *places, *_of_request(request, decision)))


def _of_flow(policy: CompiledPolicy, request: RequestFacts) -> tuple[str, ...]:
    address = f"{request.host} resolves to an address that may be dialled"
    if policy.limits.requests_per_minute is None and policy.limits.bytes_out is None:
        return (address,)
    return address, "the sandbox is within the limits of its policy"


def _of_request(request: RequestFacts, allowed: AllowRequest) -> tuple[str, ...]:
    found = ["each of its headers has a form that the gateway accepts"]
    if request.scheme is Scheme.HTTPS:
        found.append("the server has a valid certificate for the host")
    if allowed.injections:
        found.append("it is no WebSocket handshake")
        secrets = dict.fromkeys(plan.secret for plan in allowed.injections)
        found += [f"the vault releases {secret} for it" for secret in secrets]
    return tuple(found)
