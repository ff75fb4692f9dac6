"""Fields of a worker's records about policy, hosts and addresses. Every record uses these names. Pure.

The names of addresses and hosts in a worker's records:

- `destination`: the address that the sandbox dialled. Policy judges it only for a flow without a name.
- `address`: the address that the worker dials; the worker chooses it.
- `host`: the name of the flow or request, in wire form, which policy judged.
- `peer_name`: the name in the server's verified certificate that matches `host`; it can be a wildcard.
- `asked_host`: the other name in Host, :authority or the target of a request that was refused for it.
"""

from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from gateway.config import GatewayConfig
from policy.decision import AllowAddress

type Announce = Callable[[IPv4Address | IPv6Address, AllowAddress | None], Awaitable[None]]
"""Records the address before it is dialled. If it raises, the address is not dialled."""


def of_policy(config: GatewayConfig | None, rule: object) -> dict[str, Any]:
    """Return the fields of the policy in force, and the operator's entry that `rule` names (None if it names none).

    Call it at the decision, before any wait. Then the entry belongs to the policy that decided.
    """
    if config is None:
        return {}
    policy = config.policy
    entry = policy.operator_entry(rule) if isinstance(rule, str) else None
    return {"policy": policy.digest, "policy_name": policy.name, "entry": entry}


def of_address(allowed: AllowAddress | None) -> tuple[str, dict[str, Any]]:
    """Return decision and fields of a dial's record: the verdict of policy on the resolved address."""
    if allowed is None:
        return "allow", {}
    if allowed.observed is None:
        return "allow", {"rule": allowed.rule}
    return "observe", {"rule": allowed.rule, "observed": allowed.observed.rule, "reason": allowed.observed.reason}
