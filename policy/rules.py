"""The compiled form of a policy: frozen rules, and the index that finds the rules of a host.

- Every value is canonical: `__post_init__` refuses other values.
- A rule has hosts or addresses, never both. An allow rule has endpoints (port and scheme). A deny rule without
  endpoints covers every port of its `schemes`; without schemes it covers both.
- A rule list is `DENY_WINS` (order and repetition have no effect) or `FIRST_MATCH` (the OpenSandbox order). It ends in
  its default action, which is deny unless the document or the caller sets another one.
- The rules of a host are found with one dictionary lookup per label, for any number of rules.

`decision` makes the decisions.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network, ip_network

from policy.addresses import IPAddress
from policy.client_credentials import ClientCredentials
from policy.facts import Scheme
from policy.injection import InjectionPlan, SecretPlan, SubstitutionPlan, Surface
from policy.logins import AnyPlan, LoginPlan
from policy.names import HostPattern, is_local_name
from policy.paths import STRICT, Leniency, PathPattern, readings
from policy.provision import Provision

MAX_RULES = 4096
MAX_DATABASE = 63
_KNOWN_HOSTS = 256
MAX_NAMES = 1024  # hosts, methods or paths of one rule
ANY_PUBLIC = "any-public"
FORBIDDEN_METHODS = frozenset({"CONNECT", "TRACE", "TRACK"})

_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


def is_token(text: str) -> bool:
    """Whether a text is a valid HTTP method."""
    return 0 < len(text) <= 64 and _TOKEN.issuperset(text)


def check_port(port: int) -> None:
    """Raise ValueError unless the number is a TCP port."""
    if isinstance(port, bool) or not 1 <= port <= 65535:
        raise ValueError(f"{port} is not a port")


def check_range(name: str, value: int, most: int) -> None:
    """Raise ValueError unless 1 <= value <= most."""
    if isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name} must be from 1 to {most}")


def check_database(text: str) -> None:
    """Raise ValueError unless the text can be the name of a database: the server truncates a longer one."""
    if not 0 < len(text.encode("utf-8", "replace")) <= MAX_DATABASE or not text.isprintable():
        raise ValueError(f"the name of a database has at most {MAX_DATABASE} bytes and is printable")


def network_text(text: str) -> str:
    """Return the canonical text of an address or CIDR: without host bits, IPv4-mapped as IPv4, always with a
    length.

    Raises:
        ValueError: the text is no address or network, has a zone, or has a mask that is no prefix length.
    """
    address, slash, length = text.partition("/")
    if "%" in address or (slash and not (length.isascii() and length.isdigit() and str(int(length)) == length)):
        raise ValueError(f"{text[:100]!a} is not an address or network")
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text[:100]!a} is not an address or network") from None
    if isinstance(network, IPv6Network) and network.prefixlen >= 96:
        mapped = network.network_address.ipv4_mapped
        if mapped is not None:
            network = IPv4Network((mapped, network.prefixlen - 96))
    return str(network)


class Action(StrEnum):
    """The action of a rule."""

    DENY = "deny"
    ALLOW = "allow"


class Mode(StrEnum):
    """Whether denials of a rule list are enforced, or only reported."""

    ENFORCE = "enforce"
    OBSERVE = "observe"


class Precedence(StrEnum):
    """How the rules of one list take precedence over each other."""

    DENY_WINS = "deny-wins"
    FIRST_MATCH = "first-match"


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """A port and its scheme. Port 80 has HTTP, port 443 HTTPS; other ports have any."""

    port: int
    scheme: Scheme

    def __post_init__(self) -> None:
        check_port(self.port)
        if self.scheme is not {80: Scheme.HTTP, 443: Scheme.HTTPS}.get(self.port, self.scheme):
            raise ValueError(f"port {self.port} does not speak {self.scheme}")


STANDARD = (Endpoint(80, Scheme.HTTP), Endpoint(443, Scheme.HTTPS))


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. Empty `methods` or `paths` mean all; empty `endpoints` mean all (deny rules and API rules only).

    `schemes` limit a deny rule without ports: it covers every port with one of these schemes. `permits` has the forms
    of a path that requests of the rule may have although servers read them in two ways. `client_credentials` handles
    credentials that the client itself sends.
    `provisions` are what the sandbox gets for the secrets of the rule.
    """

    id: str
    action: Action
    hosts: tuple[HostPattern, ...] = ()
    addresses: tuple[str, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    methods: tuple[str, ...] = ()
    paths: tuple[PathPattern, ...] = ()
    inspect: bool = False
    injections: tuple[InjectionPlan, ...] = ()
    schemes: tuple[Scheme, ...] = ()
    substitutions: tuple[SubstitutionPlan, ...] = ()
    permits: Leniency = STRICT
    client_credentials: ClientCredentials | None = None
    provisions: tuple[Provision, ...] = ()
    login: LoginPlan | None = None
    databases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.schemes and (self.action is Action.ALLOW or self.endpoints):
            raise ValueError(f"rule {self.id!a}: only a deny rule without endpoints is about schemes")
        if bool(self.hosts) == bool(self.addresses):
            raise ValueError(f"rule {self.id!a} needs hosts or addresses, and not both")
        for address in self.addresses:
            if network_text(address) != address:
                raise ValueError(f"rule {self.id!a}: {address!a} is not a canonical network")
        for method in self.methods:
            if not is_token(method):
                raise ValueError(f"rule {self.id!a}: {method!a} is not a method")
        if self.addresses and (self.inspects or self.permits != STRICT):
            raise ValueError(f"rule {self.id!a}: what goes to a bare address cannot be inspected")
        if not {one.secret for one in self.provisions} <= {plan.secret for plan in self.plans}:
            raise ValueError(f"rule {self.id!a} provides a placeholder of a secret that it does not send")
        if self.plans and self.action is Action.DENY:
            raise ValueError(f"rule {self.id!a}: a deny rule injects nothing")
        if self.action is Action.DENY and not (self.permits == STRICT and self.client_credentials is None):
            raise ValueError(f"rule {self.id!a}: a deny rule permits no form of a path and no credential")
        if any(pattern.encoded_slashes for pattern in self.paths) and not self.permits.encoded_slashes:
            raise ValueError(f"rule {self.id!a}: a path contains %2F, but the rule does not permit encoded slashes")
        if self.plans and any(pattern.wildcard for pattern in self.hosts):
            raise ValueError(f"rule {self.id!a}: a secret is bound to exact hosts, not to a wildcard")
        for plan in self.injections:
            if plan.aws is not None:
                for pattern in self.hosts:
                    plan.aws.scope(pattern.text)
        self._check_sessions()

    def _check_sessions(self) -> None:
        """Check what a rule says about database sessions: it allows them alone, and each with a login."""
        if self.databases and self.login is None:
            raise ValueError(f"rule {self.id!a}: only a rule with a login names databases")
        if self.action is Action.DENY:
            return
        schemes = {endpoint.scheme for endpoint in self.endpoints}
        if schemes != {Scheme.POSTGRES} if self.login is not None else Scheme.POSTGRES in schemes:
            raise ValueError(f"rule {self.id!a}: database sessions need a login, and a rule of their own")
        if self.login is None:
            return
        of_requests = self.injections or self.substitutions or self.client_credentials is not None
        if self.narrow or of_requests or self.permits != STRICT:
            raise ValueError(f"rule {self.id!a}: database sessions have no requests")
        for database in self.databases:
            check_database(database)

    @property
    def plans(self) -> tuple[AnyPlan, ...]:
        """Every use of a secret."""
        return self.request_plans if self.login is None else (*self.request_plans, self.login)

    @property
    def request_plans(self) -> tuple[SecretPlan, ...]:
        """Every use of a secret in requests."""
        return (*self.injections, *self.substitutions)

    @property
    def narrow(self) -> bool:
        """Whether the rule has methods or paths, so that it cannot judge a flow without its requests."""
        return bool(self.methods or self.paths)

    @property
    def inspects(self) -> bool:
        """Whether a flow that this rule matches must be inspected."""
        return self.inspect or self.narrow or bool(self.plans) or self.client_credentials is not None

    @property
    def strict_paths(self) -> bool:
        """Whether requests that this rule can match need unambiguous paths."""
        return bool(self.paths) or any(Surface.PATH in plan.surfaces for plan in self.substitutions)

    def covers(self, endpoint: Endpoint) -> bool:
        """Whether the rule covers this endpoint."""
        if self.endpoints:
            return endpoint in self.endpoints
        return not self.schemes or endpoint.scheme in self.schemes

    def admits(self, database: str) -> bool:
        """Whether the rule allows sessions with a database. The server distinguishes letter case."""
        return self.login is not None and (not self.databases or database in self.databases)

    def accepts(self, method: str, path: str) -> bool:
        """Whether the rule matches a request. Denials ignore letter case, because some servers do."""
        if self.action is Action.DENY:
            return (not self.methods or method.upper() in {known.upper() for known in self.methods}) and (
                not self.paths or any(pattern.matches_any_case(path) for pattern in self.paths)
            )
        return (not self.methods or method in self.methods) and (
            not self.paths or any(pattern.matches(path) for pattern in self.paths)
        )


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The limit of what an API caller may allow: host patterns (or `any-public`) and ports."""

    hosts: tuple[str, ...] = (ANY_PUBLIC,)
    ports: tuple[int, ...] = (80, 443)
    _index: "HostIndex" = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for port in self.ports:
            check_port(port)
        object.__setattr__(
            self, "_index", HostIndex(tuple(HostPattern(host) for host in self.hosts if host != ANY_PUBLIC))
        )

    def admits_host(self, host: str) -> bool:
        """Whether a caller may allow this name."""
        return (ANY_PUBLIC in self.hosts and not is_local_name(host)) or bool(self._index.positions(host))

    def admits_port(self, port: int) -> bool:
        """Whether a caller may allow this port."""
        return port in self.ports


@dataclass(frozen=True, slots=True)
class RuleList:
    """Rules with one precedence, one mode and one default."""

    name: str
    precedence: Precedence
    mode: Mode = Mode.ENFORCE
    rules: tuple[Rule, ...] = ()
    default_action: Action = Action.DENY
    ceiling: Ceiling | None = None
    _index: "HostIndex" = field(init=False, compare=False, repr=False)
    _owners: tuple[Rule, ...] = field(init=False, compare=False, repr=False)
    _known: dict[str, tuple[Rule, ...]] = field(init=False, compare=False, repr=False)
    _networks: tuple[tuple[IPv4Network | IPv6Network, Rule], ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.default_action is Action.ALLOW and self.precedence is not Precedence.FIRST_MATCH:
            raise ValueError(f"rule list {self.name!a}: only an API policy may default to allow")
        if self.precedence is Precedence.FIRST_MATCH:
            if self.mode is not Mode.ENFORCE or any(
                rule.inspects or rule.endpoints or rule.schemes for rule in self.rules
            ):
                raise ValueError(f"rule list {self.name!a}: a first-match list is enforced and knows hosts only")
        else:
            for rule in self.rules:
                if rule.action is Action.ALLOW and not rule.endpoints:
                    raise ValueError(f"rule {rule.id!a} allows no endpoint")
        pairs = [(pattern, rule) for rule in self.rules for pattern in rule.hosts]
        object.__setattr__(self, "_index", HostIndex(tuple(pattern for pattern, _ in pairs)))
        object.__setattr__(self, "_owners", tuple(rule for _, rule in pairs))
        object.__setattr__(self, "_known", {})
        object.__setattr__(
            self, "_networks", tuple((ip_network(text), rule) for rule in self.rules for text in rule.addresses)
        )

    def of_host(self, host: str) -> tuple[Rule, ...]:
        """Return the rules of a host, each once, in the order of the list."""
        known = self._known.get(host)
        if known is None:
            found = map(self._owners.__getitem__, self._index.positions(host))
            known = tuple({id(rule): rule for rule in found}.values())
            if len(self._known) >= _KNOWN_HOSTS:
                self._known.clear()
            self._known[host] = known
        return known

    def of_address(self, address: IPAddress) -> tuple[Rule, ...]:
        """Return the rules of an address in the order of the list."""
        return tuple(rule for network, rule in self._networks if address in network)


@dataclass(frozen=True, slots=True)
class Binding:
    """A compiled credential binding of the API: requests, and the secrets that they get."""

    name: str
    hosts: tuple[HostPattern, ...]
    schemes: tuple[Scheme, ...]
    methods: tuple[str, ...]
    paths: tuple[PathPattern, ...]
    injections: tuple[InjectionPlan, ...] = ()
    substitutions: tuple[SubstitutionPlan, ...] = ()

    def __post_init__(self) -> None:
        if not (self.hosts and self.schemes and self.methods and self.paths):
            raise ValueError(f"binding {self.name!a} needs hosts, schemes, methods and paths")
        if any(pattern.encoded_slashes for pattern in self.paths):
            raise ValueError(f"binding {self.name!a}: a path contains %2F")

    @property
    def plans(self) -> tuple[SecretPlan, ...]:
        """Every use of a secret."""
        return (*self.injections, *self.substitutions)

    def covers(self, host: str, endpoint: Endpoint) -> bool:
        """Whether the binding can match requests to this host on this endpoint."""
        return endpoint in self.endpoints and any(pattern.matches(host) for pattern in self.hosts)

    def is_exact_for(self, host: str) -> bool:
        """Whether a pattern names the host exactly."""
        return any(pattern.text == host for pattern in self.hosts)

    def accepts(self, method: str, path: str) -> bool:
        """Whether the binding matches a request to a covered host."""
        return method in self.methods and any(pattern.matches(path) for pattern in self.paths)

    def divides(self, method: str, path: str) -> bool:
        """Whether the binding matches only one of the two readings of the path."""
        return len({self.accepts(method, reading) for reading in readings(path)}) > 1

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The scheme decides the port: https is 443, http is 80."""
        return tuple(endpoint for endpoint in STANDARD if endpoint.scheme in self.schemes)


@dataclass(frozen=True, slots=True)
class DnsSettings:
    """Limits of the data that a sandbox can encode in the names that its gateway resolves. All are per sandbox.

    They apply to DNS questions and to the names of TLS and HTTP flows. A denial by one of them has the rule `dns.` and
    the name of the limit. A rate cannot exceed the one that the kernel enforces in front of the gateway.
    """

    query_rate: int = 50
    """Names per second, sustained: DNS questions, and uncached names of flows."""
    query_burst: int = 500
    """Names in a burst. A name above the rate waits up to two seconds for its turn, or is refused."""
    max_label: int = 63
    """Characters of a label before a wildcard's suffix."""
    max_labels: int = 4
    """Labels before a wildcard's suffix."""
    max_name: int = 100
    """Characters before a wildcard's suffix in all, dots included."""
    entropy: int = 410
    """Hundredths of a bit per character in a part of a label that is longer than 24 characters. Hyphens divide parts.

    Random hexadecimal digits have at most 400.
    """
    unique_names: int = 1000
    """Distinct names below one wildcard in an hour."""

    def __post_init__(self) -> None:
        for name, most in (
            ("query_rate", 500),
            ("query_burst", 1000),
            ("max_label", 63),
            ("max_labels", 126),
            ("max_name", 253),
            ("entropy", 600),
            ("unique_names", 1_000_000),
        ):
            check_range(name, getattr(self, name), most)


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of a sandbox's traffic. None means that policy sets no limit."""

    connections: int = 512
    """Concurrent flows."""
    requests_per_minute: int | None = None
    bytes_out: int | None = None
    """Bytes that the sandbox sends during its whole life."""

    def __post_init__(self) -> None:
        check_range("connections", self.connections, 65_536)
        for name in ("requests_per_minute", "bytes_out"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 1 << 50)


class HostIndex:
    """Positions of patterns by the hosts they match."""

    __slots__ = ("_exact", "_suffix")

    def __init__(self, patterns: tuple[HostPattern, ...]) -> None:
        self._exact: dict[str, list[int]] = {}
        self._suffix: dict[str, list[int]] = {}
        for position, pattern in enumerate(patterns):
            table = self._suffix if pattern.wildcard else self._exact
            table.setdefault(pattern.suffix, []).append(position)

    def positions(self, host: str) -> list[int]:
        """Return the positions of all patterns that match, ascending."""
        found = list(self._exact.get(host, ()))
        if self._suffix:
            dot = host.find(".")
            while dot >= 0:
                found.extend(self._suffix.get(host[dot + 1 :], ()))
                dot = host.find(".", dot + 1)
        found.sort()
        return found
