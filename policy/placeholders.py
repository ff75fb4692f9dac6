"""The placeholders of one sandbox: a compiled policy with its forms, and the sandbox's seed, become texts. Pure.

- `resolve` returns the policy that a worker decides with: each placeholder that a rule provides is the sandbox's own.
- `provided` returns the variables and files that the sandbox gets.
- Both derive a placeholder from the seed alone, so that every worker of a sandbox agrees with what the sandbox got. No
  other seed gives it: the placeholder of another sandbox is an unknown text.
- Rules that provide one variable agree about it (`schema`). Rules that provide one file each add their text to it, in
  the order of the rules.
"""

from dataclasses import replace

from policy.compiled import CompiledPolicy
from policy.injection import SubstitutionPlan
from policy.provision import Provision, ProvisionKind, derived
from policy.rules import Rule
from wire.api.provided import Provided, ProvidedFile


def provisions_of(policy: CompiledPolicy) -> tuple[Provision, ...]:
    """Return what the rules of a policy provide, each once, in the order of the rules."""
    return tuple(dict.fromkeys(provision for rule in policy.rules for provision in rule.provisions))


def variables_of(policy: CompiledPolicy) -> frozenset[str]:
    """Return the names of the variables that a policy provides."""
    return frozenset(one.name for one in provisions_of(policy) if one.kind is ProvisionKind.ENV)


def provided(policy: CompiledPolicy, seed: str) -> Provided:
    """Return what the sandbox with this seed gets.

    Raises:
        ValueError: the seed is none, or it is too much.
    """
    variables: dict[str, str] = {}
    files: dict[str, str] = {}
    for provision in provisions_of(policy):
        if provision.kind is ProvisionKind.ENV:
            variables[provision.name] = provision.content(seed)
        else:
            files[provision.name] = files.get(provision.name, "") + provision.content(seed)
    return Provided(variables, tuple(ProvidedFile(path, content) for path, content in files.items()))


def known(policy: CompiledPolicy, seed: str) -> dict[str, str]:
    """Return the placeholders of the sandbox with this seed, each with the name of its secret.

    Raises:
        ValueError: there are placeholders, and the seed is none.
    """
    return {provision.placeholder(seed): provision.secret for provision in provisions_of(policy)}


def resolve(policy: CompiledPolicy, seed: str) -> CompiledPolicy:
    """Return the policy with the placeholders of the sandbox with this seed. Its digest is another one.

    Raises:
        ValueError: there are placeholders, and the seed is none.
    """
    if not any(plan.issued for rule in policy.rules for plan in rule.substitutions):
        return policy
    lists = tuple(replace(rules, rules=tuple(_resolved(rule, seed) for rule in rules.rules)) for rules in policy.lists)
    return replace(policy, lists=lists)


def _resolved(rule: Rule, seed: str) -> Rule:
    plans = tuple(_issued(plan, seed) for plan in rule.substitutions)
    return rule if plans == rule.substitutions else replace(rule, substitutions=plans)


def _issued(plan: SubstitutionPlan, seed: str) -> SubstitutionPlan:
    return replace(plan, placeholder=derived(seed, plan.issued, plan.placeholder)) if plan.issued else plan
