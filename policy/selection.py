"""What a sandbox was given, as it is sent to be compiled: it selects and narrows, and nothing in it is the operator's.

A selection names one of the operator's policies, or none, and has the caller's network policy and credential bindings.
A binding names credentials of the sandbox's own vault only: the compiled secret is `inline:<credential>`, whatever the
binding says.
"""

from dataclasses import dataclass
from typing import Any

from policy.api import ApiPolicy, ApiPolicyError, parse_network_policy
from policy.bindings import MAX_BINDINGS, MAX_PLACES, ApiBinding, number_of_places, parse_binding
from policy.compile import CompiledPolicy, Dropped, enforce
from policy.document import DENY_ALL_NAME, PolicyDocument

_KEYS = frozenset({"policy_name", "network_policy", "bindings"})
_MAX_NAME = 1024


@dataclass(frozen=True, slots=True)
class Selection:
    """What one sandbox was given. Without a name and a network policy it has the operator's default policy."""

    policy_name: str | None = None
    network_policy: ApiPolicy | None = None
    bindings: tuple[ApiBinding, ...] = ()

    def compiled(self, document: PolicyDocument) -> tuple[CompiledPolicy, tuple[Dropped, ...]]:
        """Compile it under the operator's document; parts that the document refuses are left out and returned."""
        return enforce(document, self.policy_name, self.network_policy, self.bindings)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "policy_name": self.policy_name,
            "network_policy": None if self.network_policy is None else self.network_policy.to_wire(),
            "bindings": [binding.to_json() for binding in self.bindings],
        }

    @classmethod
    def from_json(cls, value: object) -> "Selection":
        """Read the JSON form.

        Raises:
            ApiPolicyError: anything unknown, missing, of another type or beyond a bound.
        """
        if not isinstance(value, dict) or value.keys() != _KEYS:
            raise ApiPolicyError("a selection has exactly policy_name, network_policy and bindings")
        name, policy, items = value["policy_name"], value["network_policy"], value["bindings"]
        if name is not None and not (isinstance(name, str) and 0 < len(name) <= _MAX_NAME):
            raise ApiPolicyError("policy_name is not a name")
        if not isinstance(items, list) or len(items) > MAX_BINDINGS:
            raise ApiPolicyError(f"bindings is not an array of at most {MAX_BINDINGS}")
        bindings = tuple(parse_binding(item, ("bindings", position)) for position, item in enumerate(items))
        if number_of_places(bindings) > MAX_PLACES:
            raise ApiPolicyError(f"at most {MAX_PLACES} hosts, methods and paths in all bindings")
        return cls(name, None if policy is None else parse_network_policy(policy), bindings)


NOTHING = Selection(DENY_ALL_NAME)
"""Selects what the operator always allows, and nothing else."""
