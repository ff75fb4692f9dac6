"""The selection of a sandbox: the input for the compilation of its policy. It contains nothing of the operator.

A selection can name one of the operator's policies. It has the caller's network policy and credential bindings. A
binding refers only to credentials of the sandbox's own vault: the compiled secret is always `inline:<credential>`.
"""

import json
from dataclasses import dataclass

from policy.api import ApiPolicy, ApiPolicyError, parse_network_policy
from policy.bindings import MAX_BINDINGS, MAX_PLACES, ApiBinding, number_of_places, parse_binding
from policy.compile import CompiledPolicy, Dropped, enforce
from policy.document import DENY_ALL_NAME, PolicyDocument

_KEYS = frozenset({"policy_name", "network_policy", "bindings"})
_MAX_NAME = 1024


@dataclass(frozen=True, slots=True)
class Selection:
    """The selection of one sandbox. Without a name and a network policy it selects the operator's default policy."""

    policy_name: str | None = None
    network_policy: ApiPolicy | None = None
    bindings: tuple[ApiBinding, ...] = ()

    def compiled(self, document: PolicyDocument) -> tuple[CompiledPolicy, tuple[Dropped, ...]]:
        """Compile the selection under the operator's document. Refused parts are omitted and returned."""
        return enforce(document, self.policy_name, self.network_policy, self.bindings)

    def to_text(self) -> str:
        """Return the JSON form, as a text."""
        form = {
            "policy_name": self.policy_name,
            "network_policy": None if self.network_policy is None else self.network_policy.to_wire(),
            "bindings": [binding.to_json() for binding in self.bindings],
        }
        return json.dumps(form)

    @classmethod
    def from_json(cls, value: object) -> "Selection":
        """Read the JSON form.

        Raises:
            ApiPolicyError: a member is unknown, missing, of another type or above a limit.
        """
        if not isinstance(value, dict) or value.keys() != _KEYS:
            raise ApiPolicyError("a selection has exactly policy_name, network_policy and bindings")
        name, policy, items = value["policy_name"], value["network_policy"], value["bindings"]
        if name is not None and not (isinstance(name, str) and 0 < len(name) <= _MAX_NAME):
            raise ApiPolicyError("policy_name is not a name")
        if not isinstance(items, list) or len(items) > MAX_BINDINGS:
            raise ApiPolicyError(f"bindings is not an array of at most {MAX_BINDINGS} bindings")
        bindings = tuple(parse_binding(item, ("bindings", position)) for position, item in enumerate(items))
        if number_of_places(bindings) > MAX_PLACES:
            raise ApiPolicyError(f"at most {MAX_PLACES} hosts, methods and paths in all bindings")
        return cls(name, None if policy is None else parse_network_policy(policy), bindings)


NOTHING = Selection(DENY_ALL_NAME)
"""A selection with deny-all: only what the operator always allows."""
