"""Compiles the operator's document and API requests into a `CompiledPolicy`.

- A named policy has the rules of its bases and its own; denials win. Its own settings override those of its bases.
- An API policy is a first-match list under the operator's ceiling. The operator's lists override both kinds.
- `narrow` keeps both policies, and both must allow. So a caller of the API can only remove access.
- A credential binding needs an explicit allow rule for each of its hosts. Plain HTTP and wildcard hosts also need an
  operator switch.
- `enforce` compiles an admitted selection under the document in force. It never refuses: it omits each part that the
  document does not allow, and returns these parts with the reasons.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from policy.api import ApiPolicy, ApiPolicyError
from policy.bindings import ApiBinding, conflicts
from policy.compiled import DENY_ALL, CompiledPolicy, SecretUse, inspected, secrets_of, uses_of
from policy.decision import Deny, decide_flow
from policy.document import DENY_ALL_NAME, PolicyDocument
from policy.facts import FlowFacts
from policy.names import HostPattern
from policy.references import is_reference
from policy.rules import Action, DnsSettings, Limits, Precedence, Rule, RuleList

__all__ = [
    "DENY_ALL",
    "CompiledPolicy",
    "Dropped",
    "Part",
    "SecretUse",
    "UnknownPolicy",
    "compile_api",
    "compile_default",
    "compile_named",
    "enforce",
    "inspected",
    "narrow",
    "references_of",
    "secrets_of",
    "uses_of",
]


class UnknownPolicy(ValueError):
    """The document has no policy of this name."""


class Part(StrEnum):
    """The parts of a sandbox's policy that `enforce` can omit."""

    POLICY = "policy"
    NETWORK_POLICY = "network-policy"
    VAULT = "credential-vault"
    BINDING = "binding"


@dataclass(frozen=True, slots=True)
class Dropped:
    """An omitted part and the reason. `name` is the name of the policy or binding, otherwise empty."""

    part: Part
    name: str
    reason: str


def references_of(document: PolicyDocument) -> tuple[SecretUse, ...]:
    """Return every use of a backend's secret that a rule of the document can make, sorted, each once.

    The rules of the operator are the only place of a reference, and name exact hosts. This list is the operator's
    statement where such a secret may go.
    """
    uses = uses_of(rule for source in document.policies.values() for rule in source.rules)
    return tuple(use for use in uses if is_reference(use.secret))


def compile_named(document: PolicyDocument, name: str) -> CompiledPolicy:
    """Compile one of the document's policies. `deny-all` always exists.

    Raises:
        UnknownPolicy: the document has no policy of this name.
    """
    if name == DENY_ALL_NAME:
        return _with_operator(document, name, RuleList(name, Precedence.DENY_WINS))
    if name not in document.policies:
        raise UnknownPolicy(f"there is no policy named {name[:100]!a}")
    lineage = document.lineage(name)
    return replace(
        _with_operator(
            document,
            name,
            RuleList(
                name,
                Precedence.DENY_WINS,
                document.policies[name].mode,
                tuple(rule for source in lineage for rule in source.rules),
            ),
        ),
        dns=next((source.dns for source in reversed(lineage) if source.dns is not None), DnsSettings()),
        limits=next((source.limits for source in reversed(lineage) if source.limits is not None), Limits()),
    )


def compile_default(document: PolicyDocument) -> CompiledPolicy:
    """Compile the default policy, for sandboxes without a named policy and network policy."""
    return compile_named(document, document.default)


def compile_api(
    document: PolicyDocument, network_policy: ApiPolicy, bindings: tuple[ApiBinding, ...] = ()
) -> CompiledPolicy:
    """Compile a caller's network policy and credential bindings under the operator's document.

    Raises:
        ApiPolicyError: the policy or the operator does not allow a binding.
    """
    policy, dropped = _compile_api(document, network_policy, bindings)
    if dropped:
        raise ApiPolicyError(dropped[0].reason)
    return policy


def enforce(
    document: PolicyDocument, name: str | None, network_policy: ApiPolicy | None, bindings: tuple[ApiBinding, ...] = ()
) -> tuple[CompiledPolicy, tuple[Dropped, ...]]:
    """Compile the selection of a sandbox, without the parts that the document refuses.

    If its named policy no longer exists, the sandbox gets `deny-all` and the operator's lists.

    Args:
        name: the named policy, None if there is none.
        network_policy: the caller's network policy, None if there is none.
        bindings: the caller's bindings; each needs a rule of `network_policy`.
    """
    try:
        named = compile_default(document) if name is None else compile_named(document, name)
    except UnknownPolicy as error:
        gone = Dropped(Part.POLICY, name or "", str(error))
        return compile_named(document, DENY_ALL_NAME), (gone, *_without(bindings, str(error)))
    if network_policy is None:
        return named, tuple(_without(bindings, "there is no network policy with a rule for its hosts"))
    asked, dropped = _compile_api(document, network_policy, bindings)
    return (asked if name is None else narrow(named, asked)), dropped


def narrow(named: CompiledPolicy, api: CompiledPolicy) -> CompiledPolicy:
    """Return the policy that allows what both policies allow. The named policy replaces the ceiling.

    The operator's `always_allow` stays in force. The lists of both policies come from one document; different lists are
    joined.
    """
    return replace(
        named,
        name=f"{named.name}+{api.name}",
        lists=(*named.lists, *(replace(rules, ceiling=None) for rules in api.lists)),
        always_deny=tuple(dict.fromkeys((*named.always_deny, *api.always_deny))),
        always_allow=tuple(target for target in named.always_allow if target in api.always_allow),
        plaintext_secrets=tuple(host for host in named.plaintext_secrets if host in api.plaintext_secrets),
        bindings=(*named.bindings, *api.bindings),
    )


def _with_operator(document: PolicyDocument, name: str, rules: RuleList) -> CompiledPolicy:
    return CompiledPolicy(
        name,
        (rules,),
        always_deny=document.always_deny,
        always_allow=document.always_allow,
        plaintext_secrets=document.plaintext_secrets,
        client_credentials=document.client_credentials,
        guard_bindings=document.guard_bindings,
    )


def _compile_api(
    document: PolicyDocument, network_policy: ApiPolicy, bindings: tuple[ApiBinding, ...]
) -> tuple[CompiledPolicy, tuple[Dropped, ...]]:
    rules = RuleList(
        "networkPolicy",
        Precedence.FIRST_MATCH,
        rules=tuple(
            Rule(f"api:{position}", rule.action, addresses=(rule.canonical,))
            if rule.is_network
            else Rule(f"api:{position}", rule.action, hosts=(HostPattern(rule.canonical),))
            for position, rule in enumerate(network_policy.rules, start=1)
            if not rule.is_inert
        ),
        default_action=network_policy.default_action,
        ceiling=document.ceiling,
    )
    policy = _with_operator(document, "networkPolicy", rules)
    refusals: dict[str, str] = {}
    for first, second in conflicts(bindings):
        for name in (first, second):
            refusals.setdefault(name, f'bindings "{first}" and "{second}" can match the same request')
    for binding in bindings:
        if binding.name not in refusals and (reason := _refusal(document, policy, binding)) is not None:
            refusals[binding.name] = reason
    if refusals:
        refusals |= _takeovers(bindings, refusals)
    kept = tuple(binding.compiled() for binding in bindings if binding.name not in refusals)
    dropped = tuple(Dropped(Part.BINDING, name, reason) for name, reason in refusals.items())
    return replace(policy, bindings=kept), dropped


def _without(bindings: tuple[ApiBinding, ...], reason: str) -> list[Dropped]:
    return [Dropped(Part.BINDING, item.name, f'binding "{item.name}": {reason}') for item in bindings]


def _takeovers(bindings: tuple[ApiBinding, ...], refusals: Mapping[str, str]) -> dict[str, str]:
    """Refuse the wildcard bindings that would match the hosts of a refused exact binding.

    Otherwise a host would get the wildcard's secret as the effect of a stricter document.
    """
    refused: dict[str, str] = {}
    while True:
        above: dict[str, str] = {}  # suffixes above a host of a refused binding -> that binding
        for binding in bindings:
            if binding.name in refusals or binding.name in refused:
                for host in binding.hosts:
                    labels = [] if host.startswith("*.") else host.split(".")
                    above |= {".".join(labels[first:]): binding.name for first in range(1, len(labels))}
        found = {
            binding.name: f'binding "{binding.name}" host "{host}" would take the place of '
            f'binding "{above[host[2:]]}", which is not in force'
            for binding in bindings
            if binding.name not in refusals and binding.name not in refused
            for host in binding.hosts
            if host.startswith("*.") and host[2:] in above
        }
        if not found:
            return refused
        refused |= found


def _refusal(document: PolicyDocument, policy: CompiledPolicy, binding: ApiBinding) -> str | None:
    """Return why a binding is refused: a host has no explicit allow rule, or an operator switch is off."""
    compiled = binding.compiled()
    for pattern in compiled.hosts:
        refusal = f'binding "{binding.name}" host "{pattern.text}" is not allowed by egress policy'
        if pattern.wildcard:
            if not document.wildcard_bindings:
                return f'binding "{binding.name}": wildcard hosts are not enabled by the operator'
            if not _wildcard_covered(policy, pattern):
                return refusal
        elif not _explicitly_allowed(policy, pattern.text):
            return refusal
        for endpoint in compiled.endpoints:
            plain = endpoint.port == 80
            if plain and compiled.plans and pattern.text not in document.plaintext_secrets:
                return f'binding "{binding.name}": scheme http is not enabled by the operator for host "{pattern.text}"'
            # One name below the suffix is enough: no rule before the covering one matches a part of the suffix.
            host = f"any.{pattern.suffix}" if pattern.wildcard else pattern.text
            if isinstance(decide_flow(policy, FlowFacts(host, endpoint.port, endpoint.scheme)), Deny):
                return refusal
    return None


def _explicitly_allowed(policy: CompiledPolicy, host: str) -> bool:
    """Whether a rule, not a default, allows the host. The caller's policy has one list."""
    matching = policy.lists[0].of_host(host)
    return bool(matching) and matching[0].action is Action.ALLOW


def _wildcard_covered(policy: CompiledPolicy, wanted: HostPattern) -> bool:
    """Whether one allow rule covers the whole wildcard, without a denial inside it before that rule."""
    if any(wanted.matches(target.removeprefix("*.")) or target == wanted.text for target in policy.always_deny):
        return False
    for rule in policy.lists[0].rules:
        for pattern in rule.hosts:
            covers = pattern.wildcard and (pattern == wanted or pattern.matches(wanted.suffix))
            if covers:
                return rule.action is Action.ALLOW
            if rule.action is Action.DENY and wanted.matches(pattern.suffix):
                return False
    return False
