"""`CompiledPolicy`: all data for the decisions about one sandbox, as one frozen value.

- Two policies are equal if and only if their digests are equal. The digest is the SHA-256 of the canonical JSON of all
  other fields. It is always computed, never set.
- `from_json` accepts exactly the output of `to_json`, and checks the digest.
- A policy has at least one rule list. A denial of any list is a denial. `DENY_ALL` has one empty list.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any

from policy.addresses import IPAddress, IPNetwork
from policy.client_credentials import DEFAULT, ClientCredentials
from policy.facts import Scheme
from policy.logins import AnyPlan
from policy.names import HostPattern, is_canonical
from policy.rules import (
    Action,
    Binding,
    DnsSettings,
    Endpoint,
    HostIndex,
    Limits,
    Mode,
    Precedence,
    Rule,
    RuleList,
    network_text,
)
from wire import codec

FORMAT = 2


class Targets:
    """The index of one operator list of host patterns and networks. Positions count from 1."""

    __slots__ = ("_host_positions", "_index", "_networks")

    def __init__(self, targets: tuple[str, ...]) -> None:
        hosts: list[tuple[int, HostPattern]] = []
        self._networks: list[tuple[int, IPNetwork]] = []
        for position, target in enumerate(targets, start=1):
            if is_network(target):
                if network_text(target) != target:
                    raise ValueError(f"{target!a} is not a canonical network")
                self._networks.append((position, ip_network(target)))
            else:
                hosts.append((position, HostPattern(target)))
        self._host_positions = [position for position, _ in hosts]
        self._index = HostIndex(tuple(pattern for _, pattern in hosts))

    def find_host(self, host: str) -> int | None:
        """Return the position of the first target that matches a host."""
        found = self._index.positions(host)
        return self._host_positions[found[0]] if found else None

    def find_address(self, address: IPAddress) -> int | None:
        """Return the position of the first target that contains an address."""
        return next((position for position, network in self._networks if address in network), None)


@dataclass(frozen=True, slots=True)
class CompiledPolicy:
    """The policy of one sandbox. All `lists` must allow. `bindings` only add secrets to allowed requests.

    `client_credentials` is for requests to bound hosts whose rules have none. With `guard_bindings` the hosts of
    bindings are bound, too.
    """

    name: str
    lists: tuple[RuleList, ...]
    always_deny: tuple[str, ...] = ()
    always_allow: tuple[str, ...] = ()
    plaintext_secrets: tuple[str, ...] = ()
    bindings: tuple[Binding, ...] = ()
    dns: DnsSettings = field(default_factory=DnsSettings)
    limits: Limits = field(default_factory=Limits)
    client_credentials: ClientCredentials = DEFAULT
    guard_bindings: bool = False
    digest: str = field(init=False, compare=False)
    denied: Targets = field(init=False, compare=False, repr=False)
    allowed: Targets = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.lists:
            raise ValueError("a policy needs a rule list")
        for host in self.plaintext_secrets:
            if not is_canonical(host):
                raise ValueError(f"{host!a} is not a canonical host")
        object.__setattr__(self, "denied", Targets(self.always_deny))
        object.__setattr__(self, "allowed", Targets(self.always_allow))
        object.__setattr__(self, "digest", codec.digest(self._body()))

    @property
    def mode(self) -> Mode:
        """The mode: OBSERVE only if no list enforces."""
        return Mode.ENFORCE if any(rules.mode is Mode.ENFORCE for rules in self.lists) else Mode.OBSERVE

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules of all lists, in order."""
        return tuple(rule for rules in self.lists for rule in rules.rules)

    @property
    def default_action(self) -> Action:
        """The action for a public name without a rule."""
        return Action.DENY if any(rules.default_action is Action.DENY for rules in self.lists) else Action.ALLOW

    def binds(self, host: str) -> bool:
        """Whether this host is bound."""
        return any(rule.request_plans for rules in self.lists for rule in rules.of_host(host)) or (
            self.guard_bindings
            and any(
                binding.injections and any(pattern.matches(host) for pattern in binding.hosts)
                for binding in self.bindings
            )
        )

    def reads_paths(self, host: str) -> bool:
        """Whether a rule or binding of this host reads the paths of requests."""
        return any(rule.strict_paths for rules in self.lists for rule in rules.of_host(host)) or any(
            pattern.matches(host) for binding in self.bindings for pattern in binding.hosts
        )

    def operator_entry(self, rule: str) -> str | None:
        """Return the entry of an operator's list that a decision's `rule` names, such as `always-deny:2`."""
        name, _, position = rule.partition(":")
        entries = {"always-deny": self.always_deny, "always-allow": self.always_allow}.get(name, ())
        if not position.isascii() or not position.isdigit() or not 1 <= int(position) <= len(entries):
            return None
        return entries[int(position) - 1]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, digest included."""
        return {**self._body(), "digest": self.digest}

    @classmethod
    def from_json(cls, document: object) -> "CompiledPolicy":
        """Return the policy of a JSON form.

        Raises:
            codec.CodecError: the value is not an output of `to_json`.
        """
        if not isinstance(document, dict):
            raise codec.CodecError("$: expected an object")
        body = dict(document)
        claimed, version = body.pop("digest", None), body.pop("format", None)
        if type(version) is not int or version != FORMAT:
            raise codec.CodecError(f"$.format: expected {FORMAT}")
        policy: CompiledPolicy = codec.decode(cls, body)
        if claimed != policy.digest:
            raise codec.CodecError("$.digest: does not match the policy")
        return policy

    def _body(self) -> dict[str, Any]:
        body = codec.encode(self)
        assert isinstance(body, dict)  # noqa: S101 - for mypy: a dataclass encodes to an object
        return {**body, "format": FORMAT}


@dataclass(frozen=True, slots=True, order=True)
class SecretUse:
    """One secret at one host of a policy, which needs a grant of the vault. A wildcard `host` begins with `*.`.

    `kind` and `slot` are those of the plan.
    """

    secret: str
    host: str
    port: int
    scheme: Scheme
    kind: str
    slot: str
    binding: str


def secrets_of(policy: CompiledPolicy) -> tuple[SecretUse, ...]:
    """Return every use of a secret that the policy can make, sorted, each once."""
    return uses_of((*policy.rules, *policy.bindings))


def uses_of(sources: Iterable[Rule | Binding]) -> tuple[SecretUse, ...]:
    """Return every use of a secret that these rules and bindings can make, sorted, each once."""
    uses = {
        SecretUse(plan.secret, pattern.text, endpoint.port, endpoint.scheme, plan.kind, plan.slot, plan.binding)
        for source in sources
        for plan in source.plans
        for pattern in source.hosts
        for endpoint in source.endpoints
    }
    return tuple(sorted(uses))


def inspected(policy: CompiledPolicy) -> tuple[str, ...]:
    """Return every host, or `*.` and suffix, whose TLS flows the policy can inspect, sorted, each once."""
    sources: tuple[Rule | Binding, ...] = (*(rule for rule in policy.rules if rule.inspects), *policy.bindings)
    return tuple(sorted({pattern.text for source in sources for pattern in source.hosts}))


@dataclass(frozen=True, slots=True)
class SecretAt:
    """One plan that a request to one exact host can use."""

    plan: AnyPlan
    host: str
    endpoint: Endpoint


def secrets_to(policy: CompiledPolicy, host: str) -> tuple[SecretAt, ...]:
    """Return every plan that a request to this host can use, each once."""
    rules = (rule for rules in policy.lists for rule in rules.of_host(host))
    bindings = (binding for binding in policy.bindings if any(pattern.matches(host) for pattern in binding.hosts))
    sources: tuple[Rule | Binding, ...] = (*rules, *bindings)
    uses = (
        SecretAt(plan, host, endpoint) for source in sources for plan in source.plans for endpoint in source.endpoints
    )
    return tuple(dict.fromkeys(uses))


def is_network(target: str) -> bool:
    """Whether an operator target is an address or CIDR. No host pattern has that form."""
    try:
        network_text(target)
    except ValueError:
        return False
    return True


DENY_ALL = CompiledPolicy("deny-all", (RuleList("deny-all", Precedence.DENY_WINS),))
