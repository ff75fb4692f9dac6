"""What hostd tells a worker to enforce, read strictly.

- Every key of the wire form is known and of its type; an unknown or missing one refuses the whole configuration, and
  whoever had an older one keeps it.
- Limits have defaults and ceilings here; a configuration can narrow or widen them within the ceilings only.
- Values are frozen; a change is a new `GatewayConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

from gateway.resolver import Upstream
from policy.compiled import CompiledPolicy
from policy.names import InvalidName, canonical_host
from wire.endpoints import parse_endpoint
from wire.ids import SANDBOX_ID

_REQUIRED = frozenset({"sandbox", "generation", "policy", "upstream_roots", "dns_upstreams", "inside"})
_OPTIONAL = frozenset({"allowed_addresses", "host_addresses", "limits"})
_MAX_LIST = 256


class ConfigError(ValueError):
    """The configuration is not one; the message names the key, never a value."""


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Bounds of one worker. Times in seconds, sizes in bytes, rates per second.

    Attributes:
        connections: redirected TCP connections at once.
        first_bytes: until the ClientHello or request head must be complete.
        connect: for one upstream address.
        dial_rate: upstream connections, refilled evenly; twice that as a burst.
        idle: of a flow, without a byte in either direction.
        total: of a spliced flow.
        scrub_body_bytes: largest response body that is searched for secrets.
    """

    connections: int = 512
    first_bytes: int = 10
    connect: int = 5
    dial_rate: int = 50
    idle: int = 900
    total: int = 86400
    scrub_body_bytes: int = 8 * 1024 * 1024


_CEILINGS = GatewayLimits(
    connections=4096,
    first_bytes=10,
    connect=30,
    dial_rate=10000,
    idle=86400,
    total=30 * 86400,
    scrub_body_bytes=1 << 30,
)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """One sandbox's gateway, as configured.

    Attributes:
        upstream_roots: PEM of the authorities that may vouch for upstream servers.
        allowed_addresses: networks that may be dialled although they are not public.
        host_addresses: the operator's own name to address map; it is used instead of DNS.
        inside: the sandbox's address on its link.
    """

    sandbox: str
    generation: int
    policy: CompiledPolicy
    upstream_roots: str = field(repr=False)
    dns_upstreams: tuple[Upstream, ...]
    inside: IPv4Address
    allowed_addresses: tuple[IPv4Network | IPv6Network, ...] = ()
    host_addresses: Mapping[str, tuple[IPv4Address | IPv6Address, ...]] = field(default_factory=dict)
    limits: GatewayLimits = GatewayLimits()

    @classmethod
    def from_json(cls, document: object) -> "GatewayConfig":
        """Read the wire form.

        Raises:
            ConfigError: anything unknown, missing, of another type or out of range.
        """
        data = _object(document, "gateway")
        keys = frozenset(data)
        if keys - _REQUIRED - _OPTIONAL:
            raise ConfigError(f"unknown key {min(keys - _REQUIRED - _OPTIONAL)[:64]!r}")
        if _REQUIRED - keys:
            raise ConfigError(f"missing key {min(_REQUIRED - keys)!r}")
        sandbox = _text(data["sandbox"], "sandbox")
        if not SANDBOX_ID.fullmatch(sandbox):
            raise ConfigError("sandbox is not a sandbox id")
        try:
            policy = CompiledPolicy.from_json(_object(data["policy"], "policy"))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"policy is not a compiled policy: {type(error).__name__}") from error
        return cls(
            sandbox=sandbox,
            generation=_integer(data["generation"], "generation", 1, 2**53),
            policy=policy,
            upstream_roots=_text(data["upstream_roots"], "upstream_roots"),
            dns_upstreams=tuple(parse_upstream(item) for item in _list(data["dns_upstreams"], "dns_upstreams")),
            inside=_inside(data["inside"]),
            allowed_addresses=tuple(
                _network(item) for item in _list(data.get("allowed_addresses", []), "allowed_addresses")
            ),
            host_addresses=_host_addresses(data.get("host_addresses", {})),
            limits=_limits(data.get("limits", {})),
        )


def parse_upstream(item: object) -> Upstream:
    """Read `ip:port`, an IPv6 address in brackets.

    Raises:
        ConfigError: it is something else.
    """
    try:
        return Upstream(*parse_endpoint(_text(item, "dns_upstreams")))
    except ValueError:
        raise ConfigError("dns_upstreams holds something that is not ip:port") from None


def _object(value: object, key: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{key} is not an object")
    return value


def _list(value: object, key: str) -> list[object]:
    if not isinstance(value, list) or len(value) > _MAX_LIST:
        raise ConfigError(f"{key} is not a list of at most {_MAX_LIST}")
    return value


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{key} is not a text")
    return value


def _integer(value: object, key: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{key} is not an integer from {low} to {high}")
    return value


def _inside(value: object) -> IPv4Address:
    try:
        return IPv4Address(_text(value, "inside"))
    except ValueError:
        raise ConfigError("inside is not an IPv4 address") from None


def _network(value: object) -> IPv4Network | IPv6Network:
    try:
        return ip_network(_text(value, "allowed_addresses"))
    except ValueError:
        raise ConfigError("allowed_addresses holds something that is not a network") from None


def _host_addresses(value: object) -> dict[str, tuple[IPv4Address | IPv6Address, ...]]:
    result: dict[str, tuple[IPv4Address | IPv6Address, ...]] = {}
    for name, addresses in _object(value, "host_addresses").items():
        try:
            host = canonical_host(name)
            result[host] = tuple(ip_address(_text(item, "host_addresses")) for item in _list(addresses, name))
        except (InvalidName, ValueError):
            raise ConfigError("host_addresses holds something that is not a host and its addresses") from None
    return result


def _limits(value: object) -> GatewayLimits:
    given = _object(value, "limits")
    known = {item.name for item in fields(GatewayLimits)}
    if set(given) - known:
        raise ConfigError(f"unknown limit {min(set(given) - known)[:64]!r}")
    return GatewayLimits(
        **{name: _integer(number, f"limits.{name}", 1, getattr(_CEILINGS, name)) for name, number in given.items()}
    )
