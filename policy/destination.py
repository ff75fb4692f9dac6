"""The decision about the address of a flow. The same function judges literal, resolved and mapped addresses.

- It uses the order of authority of `decision`: `always_deny` for name and address on any port, the built-in address
  classes, `always_allow` on its two ports, the rule lists.
- An exception or a mapping of the operator overrides an address class, and nothing else.
- A denial of an IPv4 address also denies the IPv6 addresses in which it is embedded (`addresses.faces`).
- The decision includes the flow: if policy does not allow the host on this port, its addresses are denied.
- A literal address needs an address rule or an `always_allow` network. No default and no mode allows it.

Pure. The caller determines whether an address belongs to the gateway's own host.
"""

from ipaddress import ip_network

from policy.addresses import AddressClass, IPAddress, IPNetwork, classify, dialable, faces
from policy.compiled import CompiledPolicy
from policy.decision import AllowAddress, Deny, decide_flow
from policy.facts import AddressSource, Destination, FlowFacts, Scheme
from policy.names import is_canonical
from policy.rules import STANDARD, Action, Endpoint, Mode, Rule, RuleList


def decide_address(
    policy: CompiledPolicy, destination: Destination, exceptions: tuple[IPNetwork, ...] = ()
) -> AllowAddress | Deny:
    """Decide whether a flow may be opened to an address.

    `exceptions` are the networks that the operator permits in addition to public ones.
    """
    host, source = destination.host, destination.source
    if (host is None) is not (source is AddressSource.LITERAL):
        return Deny("invalid-address", "A literal address has no host name, and every other address has one.")
    if host is not None and not is_canonical(host):
        return Deny("invalid-name", "The host name is not in canonical form.")
    try:
        endpoint = Endpoint(destination.port, destination.scheme)
    except ValueError:
        return Deny("scheme", f"{destination.scheme} is not spoken on port {destination.port}.")
    every = faces(destination.address)
    address = every[0]
    denied = _always_denied(policy, destination, every)
    if denied is not None:
        return denied
    mapped = tuple(ip_network(face) for face in every) if source is AddressSource.MAPPED else ()
    refused = dialable(address, (*exceptions, *mapped))
    if refused is not None:
        return Deny(f"address-class:{refused}", f"{_named(destination, address)} is a {refused} address.")
    if destination.own and not mapped and not _excepted(address, exceptions):
        return Deny("address-class:own", f"{_named(destination, address)} is an address of the gateway's own host.")
    always = policy.allowed.find_address(address) if endpoint in STANDARD else None
    if host is None:
        return _literal(policy, every, endpoint, always)
    flow = decide_flow(policy, FlowFacts(host, endpoint.port, endpoint.scheme))
    if isinstance(flow, Deny):
        return flow
    if endpoint in STANDARD:
        by_name = policy.allowed.find_host(host)
        always = always if by_name is None else by_name
    return _resolved(policy, destination, every, endpoint) if always is None else AllowAddress(f"always-allow:{always}")


def decide_answer(
    policy: CompiledPolicy,
    host: str,
    address: IPAddress,
    source: AddressSource,
    exceptions: tuple[IPNetwork, ...] = (),
    *,
    own: bool = False,
) -> AllowAddress | Deny:
    """Decide whether a DNS answer may contain an address: it may if policy allows it for the host on some port."""
    endpoints = dict.fromkeys(STANDARD)
    for rules in policy.lists:
        if rules.ceiling is not None:
            endpoints |= {Endpoint(port, Scheme.HTTPS): None for port in rules.ceiling.ports if port != 80}
        for rule in rules.of_host(host):
            endpoints |= dict.fromkeys(rule.endpoints)
    first: Deny | None = None
    for endpoint in endpoints:
        answer = decide_address(
            policy, Destination(host, address, endpoint.port, endpoint.scheme, source, own), exceptions
        )
        if isinstance(answer, AllowAddress):
            return answer
        if first is None or first.rule == "default":
            first = answer
    assert first is not None  # noqa: S101 - there is always a standard endpoint
    return first


def _excepted(address: IPAddress, exceptions: tuple[IPNetwork, ...]) -> bool:
    """Whether the operator permits an own address of the host: by its class, or a public one by itself."""
    return classify(address) is not AddressClass.PUBLIC or ip_network(address) in exceptions


def _always_denied(policy: CompiledPolicy, destination: Destination, every: tuple[IPAddress, ...]) -> Deny | None:
    host = destination.host
    position = None if host is None else policy.denied.find_host(host)
    if position is not None:
        return Deny(f"always-deny:{position}", f"{host} is denied by the operator.")
    position = next((found for face in every if (found := policy.denied.find_address(face)) is not None), None)
    if position is None:
        return None
    return Deny(f"always-deny:{position}", f"{_named(destination, every[0])} is denied by the operator.")


def _literal(
    policy: CompiledPolicy, every: tuple[IPAddress, ...], endpoint: Endpoint, always: int | None
) -> AllowAddress | Deny:
    if endpoint.scheme is not Scheme.HTTPS:
        return Deny("scheme", "A bare address is reached by TLS only.")
    if always is not None:
        return AllowAddress(f"always-allow:{always}")
    where = f"{every[0]}:{endpoint.port}"
    names = []
    for rules in policy.lists:
        if rules.ceiling is not None and not rules.ceiling.admits_port(endpoint.port):
            return Deny("ceiling", f"Port {endpoint.port} is above the operator's ceiling.")
        denial = _denying(rules, every, endpoint)
        if denial is not None:
            return Deny(denial.id, f"{where} is denied by rule {denial.id}.")
        matching = [rule for rule in rules.of_address(every[0]) if rule.covers(endpoint)]
        if not matching:
            return Deny("default", f"No rule of {rules.name} allows the address {where}.")
        names.append(matching[0].id)
    return AllowAddress("+".join(names))


def _resolved(
    policy: CompiledPolicy, destination: Destination, every: tuple[IPAddress, ...], endpoint: Endpoint
) -> AllowAddress | Deny:
    """Judge an address of a host by the rule lists. The flow to the host is allowed."""
    watched: AllowAddress | None = None
    for rules in policy.lists:
        denial = _denying(rules, every, endpoint)
        if denial is None:
            continue
        denied = Deny(denial.id, f"{_named(destination, every[0])} is denied by rule {denial.id}.")
        if rules.mode is Mode.ENFORCE:
            return denied
        watched = watched or AllowAddress(f"observe:{rules.name}", denied)
    return watched or AllowAddress(str(destination.source))


def _denying(rules: RuleList, every: tuple[IPAddress, ...], endpoint: Endpoint) -> Rule | None:
    """Return a rule that denies one face of an address, at any place in the list."""
    return next(
        (
            rule
            for face in every
            for rule in rules.of_address(face)
            if rule.action is Action.DENY and rule.covers(endpoint)
        ),
        None,
    )


def _named(destination: Destination, address: IPAddress) -> str:
    if destination.host is None:
        return str(address)
    how = "resolves to" if destination.source is AddressSource.RESOLVED else "is mapped to"
    return f"{destination.host} {how} {address}, which"
