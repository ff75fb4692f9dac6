"""The OpenSandbox `networkPolicy`: parsing, patch operations, and the JSON form.

- A policy keeps each target as the client wrote it, and compares targets in canonical form.
- `{}`, a `null` document and an absent `defaultAction` mean deny. An unknown action, default or key is refused, and so
  is a null at any depth (see `strict`).
- The error texts are those of OpenSandbox, because its clients show them.

This module handles the form of rules; `compile_api` gives them their meaning.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from policy.names import InvalidName, parse_any_pattern
from policy.rules import MAX_RULES, Action, network_text
from policy.strict import Path, StrictError, decode, located, members

INERT = "*"
"""The bare wildcard: it is accepted and kept, but matches nothing."""

MAX_TARGET = 1024


class ApiPolicyError(ValueError):
    """A policy, patch or binding was refused. `status` is the HTTP status; the message is the body's text."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class NetworkRule:
    """One rule: the target as written (trimmed), and in canonical form (`*`, a host pattern, or a CIDR)."""

    action: Action
    target: str
    canonical: str

    @property
    def is_network(self) -> bool:
        """Whether the target is an address or network."""
        return "/" in self.canonical

    @property
    def is_inert(self) -> bool:
        """Whether the rule can never match; the API then returns a warning."""
        return self.canonical == INERT

    def to_wire(self) -> dict[str, str]:
        """Return the JSON form."""
        return {"action": str(self.action), "target": self.target}


@dataclass(frozen=True, slots=True)
class ApiPolicy:
    """A caller's policy: ordered rules, first match wins, and a default."""

    rules: tuple[NetworkRule, ...] = ()
    default_action: Action = Action.DENY

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form, `egress` always a list."""
        return {"egress": [rule.to_wire() for rule in self.rules], "defaultAction": str(self.default_action)}

    def status_mode(self) -> str:
        """Return the `mode` word of a PolicyStatus."""
        if self.rules:
            return "enforcing"
        return "allow_all" if self.default_action is Action.ALLOW else "deny_all"


def decode_json(body: bytes, prefix: str) -> object:
    """Parse a request body. A duplicate key in an object is refused.

    Raises:
        ApiPolicyError: the body is not JSON, or has a duplicate key. The text begins with `prefix`.
    """
    try:
        return decode(body)
    except StrictError as error:
        raise ApiPolicyError(f"{prefix}{error}") from None


def parse_network_policy(value: object) -> ApiPolicy:
    """Read a NetworkPolicy object; `None` and `{}` are deny-all.

    Raises:
        ApiPolicyError: with `invalid policy: ` and the reason.
    """
    prefix = "invalid policy: "
    if value is None:
        return ApiPolicy()
    fields = _members(value, ("defaultAction", "egress"), (), prefix)
    rules = _parse_rules(fields.get("egress", []), ("egress",), prefix)
    return _limited(ApiPolicy(rules, _default_action(fields.get("defaultAction", ""), prefix)))


def parse_patch(value: object) -> tuple[NetworkRule, ...]:
    """Read the body of a PATCH.

    Raises:
        ApiPolicyError: with `invalid patch rules: ` and the reason.
    """
    prefix = "invalid patch rules: "
    rules = () if value is None else _parse_rules(value, (), prefix)
    if not rules:
        raise ApiPolicyError(f"{prefix}empty array")
    return rules


def parse_delete(value: object) -> tuple[str, ...]:
    """Read the body of a DELETE.

    Raises:
        ApiPolicyError: with `invalid delete targets: ` and the reason.
    """
    prefix = "invalid delete targets: "
    if value is not None and not isinstance(value, list):
        raise ApiPolicyError(f"{prefix}expected an array of strings")
    if not value:
        raise ApiPolicyError(f"{prefix}empty array")
    if not all(isinstance(target, str) for target in value):
        raise ApiPolicyError(f"{prefix}expected an array of strings")
    return tuple(value)


def merge_patch(policy: ApiPolicy, patch: Iterable[NetworkRule]) -> ApiPolicy:
    """Put the patch's rules first. Of several rules with one canonical target, only the first is kept.

    Raises:
        ApiPolicyError: the result has too many rules.
    """
    merged: dict[str, NetworkRule] = {}
    for rule in (*patch, *policy.rules):
        merged.setdefault(rule.canonical, rule)
    return _limited(replace(policy, rules=tuple(merged.values())))


def delete_targets(policy: ApiPolicy, targets: Iterable[str]) -> ApiPolicy:
    """Remove every rule for one of the targets. Unknown and blank targets are ignored."""
    gone = set()
    for target in targets:
        try:
            gone.add(canonical_target(target.strip()))
        except ValueError:
            continue
    return replace(policy, rules=tuple(rule for rule in policy.rules if rule.canonical not in gone))


def canonical_target(target: str) -> str:
    """Return the canonical form of a trimmed target: `*`, a host pattern, or a CIDR.

    Raises:
        ValueError: the target is none of these.
    """
    if target == INERT:
        return INERT
    if len(target) > MAX_TARGET:
        raise InvalidName("target too long")
    try:
        return network_text(target)
    except ValueError:
        return parse_any_pattern(target).text


def _members(value: object, known: tuple[str, ...], path: Path, prefix: str) -> dict[str, object]:
    """Return the members of an object, whose keys may be in any case."""
    try:
        return members(value, known, path, fold=True)
    except StrictError as error:
        raise ApiPolicyError(f"{prefix}{error}") from None


def _default_action(value: object, prefix: str) -> Action:
    word = value.strip().lower() if isinstance(value, str) else None
    match word:
        case "" | "deny":
            return Action.DENY
        case "allow":
            return Action.ALLOW
        case _:
            raise ApiPolicyError(f'{prefix}unsupported defaultAction "{_shown(value)}"')


def _parse_rules(value: object, path: Path, prefix: str) -> tuple[NetworkRule, ...]:
    if not isinstance(value, list):
        raise ApiPolicyError(f"{prefix}{located(path, 'expected an array of rules')}")
    if len(value) > MAX_RULES:
        raise ApiPolicyError(_too_many(len(value)), 413)
    return tuple(_parse_rule(item, (*path, position), prefix) for position, item in enumerate(value))


def _parse_rule(value: object, path: Path, prefix: str) -> NetworkRule:
    fields = _members(value, ("action", "target"), path, prefix)
    action, target = fields.get("action", ""), fields.get("target", "")
    word = action.strip().lower() if isinstance(action, str) else None
    if word not in ("", "deny", "allow"):
        raise ApiPolicyError(f'{prefix}unsupported action "{_shown(action)}"')
    if not isinstance(target, str):
        raise ApiPolicyError(f'{prefix}unsupported target "{_shown(target)}"')
    text = target.strip()
    if not text:
        raise ApiPolicyError(f"{prefix}egress target cannot be empty")
    try:
        canonical = canonical_target(text)
    except ValueError:
        raise ApiPolicyError(f'{prefix}unsupported target "{_shown(text)}"') from None
    return NetworkRule(Action.ALLOW if word == "allow" else Action.DENY, text, canonical)


def _limited(policy: ApiPolicy) -> ApiPolicy:
    if len(policy.rules) > MAX_RULES:
        raise ApiPolicyError(_too_many(len(policy.rules)), 413)
    return policy


def _too_many(count: int) -> str:
    return f"egress rule total count {count} exceeds limit {MAX_RULES}"


def _shown(value: object) -> str:
    """Quote a client's value in an error: short, printable, ASCII."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:200].encode("ascii", "backslashreplace").decode("ascii").replace("\n", "\\n").replace("\r", "\\r")
