"""What a worker enforces: the policy of its sandbox, and what all workers have in common; checked strictly.

- A part that cannot be refuses the whole configuration. The worker keeps the one that it had.
- Limits have defaults and bounds (`wire/gateway_limits.py`); a configuration can change them only within the bounds.
- Values are frozen; a change is a new `GatewayConfig`.
- The policy of a sandbox has forms of placeholders. Requests are decided with `resolved`, which has the sandbox's own.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from gateway.dns.queries import Upstream
from gateway.placeholders import NONE, Placeholders
from policy import placeholders
from policy.compiled import CompiledPolicy
from policy.decision import AllowAddress, AllowFlow, Deny, decide_flow
from policy.destination import decide_address
from policy.facts import Destination, FlowFacts
from policy.names import InvalidName, canonical_host
from wire.api.worker import Configure
from wire.api.zygote import Prepare
from wire.endpoints import parse_endpoint, routed
from wire.errors import ConfigError
from wire.gateway_limits import GatewayLimits

_MAX_LIST = 256
_KEPT = 256
"""Decisions about flows that are kept, and decisions about addresses."""


@dataclass(frozen=True, slots=True)
class WorkerConstants:
    """What all workers of a host have in common. The zygote reads it once; each worker inherits it.

    Attributes:
        upstream_roots: PEM of the authorities that may vouch for upstream servers.
        allowed_addresses: networks that may be dialled although they are not public.
        host_addresses: the operator's own name to address map; it is used instead of DNS.
        inside: the sandbox's address on its link.
    """

    upstream_roots: str = field(repr=False)
    dns_upstreams: tuple[Upstream, ...]
    inside: IPv4Address
    allowed_addresses: tuple[IPv4Network | IPv6Network, ...] = ()
    host_addresses: Mapping[str, tuple[IPv4Address | IPv6Address, ...]] = field(default_factory=dict)
    limits: GatewayLimits = field(default_factory=GatewayLimits)

    @classmethod
    def of(cls, given: Prepare) -> "WorkerConstants":
        """Return what `given` says.

        Raises:
            ConfigError: some part of it cannot be, or is out of range.
        """
        return cls(
            upstream_roots=given.upstream_roots,
            dns_upstreams=tuple(parse_upstream(item) for item in _list(given.dns_upstreams, "dns_upstreams")),
            inside=_inside(given.inside),
            allowed_addresses=tuple(_network(item) for item in _list(given.allowed_addresses, "allowed_addresses")),
            host_addresses=_host_addresses(given.host_addresses),
            limits=GatewayLimits.of(given.limits),
        )


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """One sandbox's gateway, as configured.

    Attributes:
        seed: of the sandbox's placeholders. A policy with placeholders needs one (ValueError).
        resolved: the policy, with the placeholders of this sandbox.
        known: the placeholders of this sandbox.
        flow, address: the decisions of the policy, the second one with the operator's exceptions. They depend on
            their argument only, so the last ones are kept.
    """

    sandbox: str
    generation: int
    policy: CompiledPolicy
    constants: WorkerConstants
    seed: str = field(default="", repr=False)
    resolved: CompiledPolicy = field(init=False, compare=False, repr=False)
    known: Placeholders = field(init=False, compare=False, default=NONE)
    flow: Callable[[FlowFacts], AllowFlow | Deny] = field(init=False, compare=False, repr=False)
    address: Callable[[Destination], AllowAddress | Deny] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "resolved", placeholders.resolve(self.policy, self.seed))
        object.__setattr__(self, "known", Placeholders(placeholders.known(self.policy, self.seed)))
        policy, exceptions = self.policy, self.constants.allowed_addresses

        @lru_cache(maxsize=_KEPT)
        def flow(facts: FlowFacts) -> AllowFlow | Deny:
            return decide_flow(policy, facts)

        @lru_cache(maxsize=_KEPT)
        def address(destination: Destination) -> AllowAddress | Deny:
            return decide_address(policy, destination, exceptions)

        object.__setattr__(self, "flow", flow)
        object.__setattr__(self, "address", address)

    @classmethod
    def of(cls, request: Configure, constants: WorkerConstants) -> "GatewayConfig":
        """Return what `request` says.

        Raises:
            ConfigError: its policy is no compiled policy, or needs a seed.
        """
        try:
            policy = CompiledPolicy.from_json(json.loads(request.policy))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"policy is not a compiled policy: {type(error).__name__}") from error
        try:
            return cls(request.sandbox, request.generation, policy, constants, request.seed)
        except ValueError as error:
            raise ConfigError(f"placeholders: {error}") from error


def parse_upstream(item: str) -> Upstream:
    """Read `ip:port`, an IPv6 address in brackets.

    Raises:
        ConfigError: it is something else.
    """
    try:
        return Upstream(*parse_endpoint(item))
    except ValueError:
        raise ConfigError("dns_upstreams holds something that is not ip:port") from None


def _list(items: tuple[str, ...], key: str) -> tuple[str, ...]:
    if len(items) > _MAX_LIST:
        raise ConfigError(f"{key} is not a list of at most {_MAX_LIST}")
    return items


def _inside(text: str) -> IPv4Address:
    try:
        return IPv4Address(text)
    except ValueError:
        raise ConfigError("inside is not an IPv4 address") from None


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError:
        raise ConfigError("allowed_addresses holds something that is not a network") from None


def _host_addresses(given: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[IPv4Address | IPv6Address, ...]]:
    result: dict[str, tuple[IPv4Address | IPv6Address, ...]] = {}
    for name, addresses in given.items():
        try:
            result[canonical_host(name)] = tuple(
                routed(ip_address(item)) for item in _list(addresses, "host_addresses")
            )
        except (InvalidName, ValueError):
            raise ConfigError("host_addresses holds something that is not a host and its addresses") from None
    return result
