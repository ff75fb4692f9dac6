"""The operator's document after reading, before compilation. Its values and references are checked.

- Every reference (a default, an `extends`) exists, and `extends` has no cycles.
- A policy can extend a preset. No sandbox gets a preset by its name.
- `PolicyDocument()` is the shipped default: no policies, deny-all, the standard ceiling.
"""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from policy.client_credentials import DEFAULT, ClientCredentials
from policy.rules import Ceiling, DnsSettings, Limits, Mode, Rule

DENY_ALL_NAME: Final = "deny-all"
PRESET: Final = "preset/"
"""The beginning of the names of presets. The names of the operator's policies have no slash."""


@dataclass(frozen=True, slots=True)
class PolicySource:
    """One named policy as written: its own rules, and the policies that it extends."""

    name: str
    extends: tuple[str, ...] = ()
    mode: Mode = Mode.ENFORCE
    rules: tuple[Rule, ...] = ()
    dns: DnsSettings | None = None
    limits: Limits | None = None


type Presets = MappingProxyType[str, PolicySource]
"""Presets by their names."""
NO_PRESETS: Final[Presets] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Remark:
    """A warning for the author of the file. `line` and `column` count from 1."""

    line: int
    column: int
    text: str


@dataclass(frozen=True, slots=True)
class PolicyDocument:
    """One operator file. Targets are canonical host patterns and CIDRs."""

    origin: str = "(built in)"
    ceiling: Ceiling = field(default_factory=Ceiling)
    default: str = DENY_ALL_NAME
    always_deny: tuple[str, ...] = ()
    always_allow: tuple[str, ...] = ()
    plaintext_secrets: tuple[str, ...] = ()
    wildcard_bindings: bool = False
    client_credentials: ClientCredentials = DEFAULT
    guard_bindings: bool = False
    policies: MappingProxyType[str, PolicySource] = field(default_factory=lambda: MappingProxyType({}))
    remarks: tuple[Remark, ...] = ()
    presets: Presets = NO_PRESETS

    def lineage(self, name: str) -> tuple[PolicySource, ...]:
        """Return the policies whose rules `name` has: bases first, each once, itself last."""
        ordered: dict[str, PolicySource] = {}

        def visit(current: str) -> None:
            if current not in ordered:
                source = self.presets[current] if current.startswith(PRESET) else self.policies[current]
                for base in source.extends:
                    visit(base)
                ordered[current] = source

        visit(name)
        return tuple(ordered.values())
