"""What records say of the policy that decided, under the same names everywhere. Pure.

The names of addresses and hosts in a worker's records:

- `destination`: where the sandbox addressed its packets. It decides nothing but a literal address.
- `address`: where the worker dials, its own choice.
- `host`: the name that the flow or request is for, in wire form; policy judged it.
- `peer_name`: the name in the server's verified certificate that `host` matched (a wildcard, perhaps).
- `asked_host`: what Host, :authority or the target of a refused request named instead of `host`.
"""

from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from gateway.config import GatewayConfig
from policy.decision import AllowAddress

type Announce = Callable[[IPv4Address | IPv6Address, AllowAddress | None], Awaitable[None]]
"""Records that this address is dialled next; raising means that it is not."""


def of_policy(config: GatewayConfig | None, rule: object) -> dict[str, Any]:
    """The policy in force, and the operator's entry that `rule` names (None if it names none).

    Called where the decision is made, before anything is waited for: the entry is that of the list that decided.
    """
    if config is None:
        return {}
    policy = config.policy
    entry = policy.operator_entry(rule) if isinstance(rule, str) else None
    return {"policy": policy.digest, "policy_name": policy.name, "entry": entry}


def of_address(allowed: AllowAddress | None) -> tuple[str, dict[str, Any]]:
    """Decision and fields of the record of a dial: what policy said of the address a name resolved to."""
    if allowed is None:
        return "allow", {}
    if allowed.observed is None:
        return "allow", {"rule": allowed.rule}
    return "observe", {"rule": allowed.rule, "observed": allowed.observed.rule, "reason": allowed.observed.reason}
