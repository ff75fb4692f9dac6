"""All sources of addresses have one order of authority. It is compared with a model as small as the order itself."""

from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.addresses import AddressClass, IPAddress, classify
from policy.api import parse_network_policy
from policy.bindings import parse_bindings
from policy.compile import compile_api, compile_named, narrow
from policy.compiled import CompiledPolicy
from policy.decision import AllowAddress, AllowFlow, Deny, decide_flow
from policy.destination import decide_address, decide_answer
from policy.facts import AddressSource, Destination, FlowFacts, Scheme
from policy.load import load_text
from policy.rules import STANDARD, Action, Endpoint, Mode, Precedence

HOSTS = ("good.test", "api.good.test")
PATTERNS = (*HOSTS, "*.good.test")
NETWORKS = ("93.184.216.0/24", "93.184.216.34/32", "10.0.0.0/8", "2606:2800::/32")
PLACES = (
    *("93.184.216.34", "93.184.216.9", "8.8.8.8", "10.1.2.3", "169.254.169.254", "0.0.0.0", "2606:2800::1"),
    *("::ffff:93.184.216.34", "64:ff9b::5db8:d822", "64:ff9b::a01:203"),
)
PORTS = (80, 443, 8443)
EXCEPTIONS = ("10.0.0.0/8", "10.1.2.3/32", "0.0.0.0/0", "169.254.169.254/32", "64:ff9b::/96", "93.184.216.9/32")


def targets(most: int) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from((*PATTERNS, *NETWORKS)), max_size=most, unique=True)


@st.composite
def rules(draw: st.DrawFn) -> str:
    """Draw one rule of the YAML language."""
    action = draw(st.sampled_from(("allow", "deny")))
    network = draw(st.booleans())
    parts = [f"action: {action}"]
    parts.append(f'{"address" if network else "host"}: "{draw(st.sampled_from(NETWORKS if network else PATTERNS))}"')
    ports = draw(
        st.sampled_from((None, *(((443, 8443), (8443,)) if network and action == "allow" else ((80,), PORTS))))
    )
    if ports is not None:
        parts.append(f"ports: [{', '.join(map(str, ports))}]")
    elif not network:
        schemes = draw(st.sampled_from((None, "http", "https")))
        if schemes is not None:
            parts.append(f"schemes: [{schemes}]")
    return "{" + ", ".join(parts) + "}"


@st.composite
def policies(draw: st.DrawFn) -> CompiledPolicy:
    """Draw policies of both languages, and combinations of them, with operator lists and bindings."""
    written = draw(st.lists(rules(), max_size=5))
    document = load_text(
        "\n".join(
            [
                "version: 1",
                f"always_deny: {draw(targets(2))}",
                f"always_allow: {draw(targets(2))}",
                f"ceiling: {{ports: {draw(st.sampled_from(([80, 443], [80, 443, 8443], [443])))}}}",
                "policies:",
                "  p:",
                f"    mode: {draw(st.sampled_from(('enforce', 'observe')))}",
                "    rules:" if written else "    rules: []",
                *(f"      - {rule}" for rule in written),
            ]
        )
    )
    named = compile_named(document, "p")
    listed = [{"action": draw(st.sampled_from(("allow", "deny"))), "target": target} for target in draw(targets(4))]
    api = compile_api(
        document,
        parse_network_policy({"defaultAction": draw(st.sampled_from(("allow", "deny"))), "egress": listed}),
    )
    kind = draw(st.sampled_from(("named", "api", "both")))
    return {"named": named, "api": api, "both": narrow(named, api)}[kind]


def stands_for(address: IPAddress) -> list[IPAddress]:
    """Return the address, and the IPv4 address to which its packets are delivered."""
    if isinstance(address, IPv6Address) and (address.ipv4_mapped or address in ip_network("64:ff9b::/96")):
        inner = IPv4Address(int(address) & 0xFFFFFFFF)
        return [inner] if address.ipv4_mapped else [address, inner]
    return [address]


def within(address: IPAddress, network: str) -> bool:
    return any(one in ip_network(network) for one in stands_for(address))


def matches(host: str, pattern: str) -> bool:
    return host == pattern or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def is_network(target: str) -> bool:
    return "/" in target


def opened(address: IPAddress, exceptions: tuple[str, ...], mapped: bool) -> bool:
    """Return whether the operator permits dialling a special address."""
    kind = classify(address)
    if kind in (AddressClass.UNSPECIFIED, AddressClass.MULTICAST):
        return False
    entry = {AddressClass.METADATA: 32, AddressClass.PRIVATE: 8, AddressClass.LOOPBACK: 8, AddressClass.LINK_LOCAL: 16}
    plain = stands_for(address)[0]
    if len(stands_for(address)) == 2:  # NAT64: the outer address, and the inner one by itself
        outer = mapped or "64:ff9b::/96" in exceptions
        inner = stands_for(address)[1]
        return outer and (classify(inner) is AddressClass.PUBLIC or opened(inner, exceptions, mapped))
    if plain.version == 6:
        return mapped
    return mapped or any(
        plain in ip_network(one) and ip_network(one).prefixlen >= entry[kind]
        for one in exceptions
        if ip_network(one).version == 4
    )


def model(policy: CompiledPolicy, to: Destination, exceptions: tuple[str, ...]) -> bool:
    """Return whether the order of authority permits a flow."""
    address, host = to.address, to.host
    try:
        endpoint = Endpoint(to.port, to.scheme)
    except ValueError:
        return False
    for target in policy.always_deny:  # 1. the operator's denial, on any port, for any source
        if within(address, target) if is_network(target) else host is not None and matches(host, target):
            return False
    mapped = to.source is AddressSource.MAPPED  # 2. special addresses, unless excepted or mapped
    if classify(address) is not AddressClass.PUBLIC and not opened(address, exceptions, mapped):
        return False
    plain = stands_for(address)[0]
    own_is_closed = classify(address) is AddressClass.PUBLIC and f"{plain}/32" not in exceptions
    if to.own and not mapped and own_is_closed:
        return False
    allowed = [  # 3. the operator's permission, on its two ports
        target
        for target in policy.always_allow
        if (plain in ip_network(target) if is_network(target) else host is not None and matches(host, target))
    ]
    standard = endpoint in STANDARD
    if host is None:
        return to.scheme is Scheme.HTTPS and ((bool(allowed) and standard) or all_lists_open(policy, to, endpoint))
    if not isinstance(decide_flow(policy, FlowFacts(host, to.port, to.scheme)), AllowFlow):
        return False
    if standard and allowed:
        return True
    return not any(  # 4. the lists
        rule.action is Action.DENY and rule.covers(endpoint) and any(within(address, one) for one in rule.addresses)
        for rules in policy.lists
        if rules.mode is Mode.ENFORCE
        for rule in rules.rules
    )


def all_lists_open(policy: CompiledPolicy, to: Destination, endpoint: Endpoint) -> bool:
    for rules in policy.lists:
        if rules.ceiling is not None and to.port not in rules.ceiling.ports:
            return False
        about = [rule for rule in rules.rules if rule.addresses and rule.covers(endpoint)]
        if any(rule.action is Action.DENY and any(within(to.address, one) for one in rule.addresses) for rule in about):
            return False
        plain = stands_for(to.address)[0]
        if not any(
            rule.action is Action.ALLOW and any(plain in ip_network(o) for o in rule.addresses) for rule in about
        ):
            return False
    return True


EXCEPTED = st.lists(st.sampled_from(EXCEPTIONS), max_size=2, unique=True).map(tuple)
DESTINATIONS = tuple(
    Destination(host, ip_address(place), port, scheme, source, own)
    for source in AddressSource
    for host in ((None,) if source is AddressSource.LITERAL else HOSTS)
    for place in PLACES
    for port in PORTS
    for scheme in Scheme
    for own in (False, True)
)


@given(policies(), EXCEPTED)
def test_every_source_of_an_address_is_under_one_order(policy: CompiledPolicy, exceptions: tuple[str, ...]) -> None:
    """All destinations are judged under a drawn policy."""
    networks = tuple(ip_network(one) for one in exceptions)
    for to in DESTINATIONS:
        answer = decide_address(policy, to, networks)
        assert model(policy, to, exceptions) is isinstance(answer, AllowAddress), (to, answer)


@given(policies(), EXCEPTED)
def test_a_dns_answer_shows_what_could_be_dialled_on_some_port(
    policy: CompiledPolicy, exceptions: tuple[str, ...]
) -> None:
    networks = tuple(ip_network(one) for one in exceptions)
    spoken = [(80, Scheme.HTTP), (443, Scheme.HTTPS), (8443, Scheme.HTTP), (8443, Scheme.HTTPS)]
    for to in DESTINATIONS:
        if to.host is None or (to.port, to.scheme) != spoken[1]:
            continue
        shown = isinstance(decide_answer(policy, to.host, to.address, to.source, networks, own=to.own), AllowAddress)
        dialled = [decide_address(policy, replace(to, port=port, scheme=scheme), networks) for port, scheme in spoken]
        possible = any(isinstance(one, AllowAddress) for one in dialled)
        assert shown is possible, to


ORDER = """
version: 1
always_deny: [10.6.6.6/32, evil.test]
always_allow: [93.184.217.0/24, status.test]
policies:
  p:
    rules:
      - {host: good.test, ports: [80, 443, 8443]}
      - {host: status.test, ports: [8443]}
      - {action: deny, address: 93.184.217.0/24}
      - {action: deny, address: 93.184.218.0/24}
"""
DECIDED = {
    "a mapping does not lift always_deny": ("good.test", "10.6.6.6", 443, "mapped", "!always-deny:1"),
    "nor for the IPv6 address that stands for it": ("good.test", "64:ff9b::a06:606", 443, "mapped", "!always-deny:1"),
    "on no port": ("good.test", "10.6.6.6", 8443, "mapped", "!always-deny:1"),
    "a mapping lifts the class": ("good.test", "10.1.2.3", 443, "mapped", "mapped"),
    "and nothing beyond it": ("good.test", "93.184.218.1", 443, "mapped", "!p/rule-4"),
    "a mapped name is held to its ports": ("good.test", "10.1.2.3", 22, "mapped", "!default"),
    "an exception does not lift always_deny": ("good.test", "10.6.6.6", 443, "resolved", "!always-deny:1"),
    "always_allow lifts an address denial on 443": ("good.test", "93.184.217.1", 443, "resolved", "always-allow:1"),
    "and on no other port": ("good.test", "93.184.217.1", 8443, "resolved", "!p/rule-3"),
    "nor by name": ("status.test", "93.184.218.1", 8443, "resolved", "!p/rule-4"),
    "but by name on 443": ("status.test", "93.184.218.1", 443, "resolved", "always-allow:2"),
    "it lifts no class": ("status.test", "127.0.0.1", 443, "resolved", "!address-class:loopback"),
    "a name that is always denied is dialled nowhere": ("evil.test", "93.184.216.34", 443, "mapped", "!always-deny:2"),
    "a literal address in an always-allowed network": (None, "93.184.217.1", 443, "literal", "always-allow:1"),
    "on another port": (None, "93.184.217.1", 8443, "literal", "!p/rule-3"),
    "an IPv6 address that stands for a denied one": (
        *("good.test", "64:ff9b::5db8:da01", 443, "resolved"),
        "!address-class:translated",
    ),
}


@pytest.mark.parametrize("case", DECIDED)
def test_the_order_of_authority(case: str) -> None:
    host, place, port, source, expected = DECIDED[case]
    policy = compile_named(load_text(ORDER), "p")
    to = Destination(host, ip_address(place), port, Scheme.HTTPS, AddressSource(source))
    answer = decide_address(policy, to, (ip_network("10.6.0.0/16"),))
    assert expected == (f"!{answer.rule}" if isinstance(answer, Deny) else answer.rule)
    assert not isinstance(answer, Deny) or answer.reason


def test_a_binding_opens_no_address() -> None:
    """Its host is judged like any other."""
    document = load_text("version: 1\nalways_deny: [93.184.216.0/24]\n")
    network_policy = parse_network_policy({"egress": [{"action": "allow", "target": "good.test"}]})
    bindings = parse_bindings(
        [{"name": "b", "match": {"hosts": ["good.test"]}, "auth": {"type": "bearer", "credential": "c"}}]
    )
    policy = compile_api(document, network_policy, bindings)
    to = Destination("good.test", ip_address("93.184.216.34"), 443, Scheme.HTTPS, AddressSource.RESOLVED)
    assert "always-deny:1" == decide_address(policy, to).rule


DENIALS = {
    "neither": ("", {(80, "http"), (443, "https"), (8443, "http"), (8443, "https")}),
    "http": ("schemes: [http]", {(80, "http"), (8443, "http")}),
    "https": ("schemes: [https]", {(443, "https"), (8443, "https")}),
    "both schemes": ("schemes: [http, https]", {(80, "http"), (443, "https"), (8443, "http"), (8443, "https")}),
    "a port": ("ports: [8443]", {(8443, "http"), (8443, "https")}),
    "a port and a scheme": ("ports: [8443], schemes: [http]", {(8443, "http")}),
}


@pytest.mark.parametrize("case", DENIALS)
def test_a_denial_is_as_wide_as_it_is_written(case: str) -> None:
    """Without ports it applies to all ports, with the schemes that it names."""
    extra, denied = DENIALS[case]
    document = load_text(f"""
version: 1
policies:
  p:
    rules:
      - {{host: good.test, ports: [80, 443]}}
      - {{host: good.test, ports: [8443], schemes: [http, https]}}
      - {{action: deny, host: good.test{", " if extra else ""}{extra}}}
""")
    policy = compile_named(document, "p")
    assert Precedence.DENY_WINS is policy.lists[0].precedence
    every = {(80, Scheme.HTTP), (443, Scheme.HTTPS), (8443, Scheme.HTTP), (8443, Scheme.HTTPS)}
    assert denied == {
        (port, str(scheme))
        for port, scheme in every
        if isinstance(decide_flow(policy, FlowFacts("good.test", port, scheme)), Deny)
    }
    assert policy == CompiledPolicy.from_json(policy.to_json())


LISTS = """
version: 1
always_deny: [10.6.6.6/32, evil.test, 93.184.219.0/24]
always_allow: [93.184.217.0/24]
ceiling: {ports: [80, 443, 8443]}
policies:
  p:
    rules:
      - {host: good.test, ports: [80, 443, 8443]}
      - {address: 93.184.216.34, ports: [443, 8443]}
      - {action: deny, address: 93.184.218.0/24}
      - {action: deny, address: 93.184.216.34, ports: [8443]}
  watch:
    extends: [p]
    mode: observe
"""
LITERAL, RESOLVED, MAPPED = AddressSource.LITERAL, AddressSource.RESOLVED, AddressSource.MAPPED
REASONS = {
    "a literal address with a name": (
        ("good.test", "93.184.216.34", 443, LITERAL),
        Deny("invalid-address", "A literal address has no host name, and every other address has one."),
    ),
    "a resolved address without a name": (
        (None, "93.184.216.34", 443, RESOLVED),
        Deny("invalid-address", "A literal address has no host name, and every other address has one."),
    ),
    "a mapped address without a name": (
        (None, "93.184.216.34", 443, MAPPED),
        Deny("invalid-address", "A literal address has no host name, and every other address has one."),
    ),
    "a name that is not canonical": (
        ("Good.test", "93.184.216.34", 443, RESOLVED),
        Deny("invalid-name", "The host name is not in canonical form."),
    ),
    "port 0": (("good.test", "93.184.216.34", 0, RESOLVED), Deny("scheme", "https is not spoken on port 0.")),
    "TLS on 80": ((None, "93.184.216.34", 80, LITERAL), Deny("scheme", "https is not spoken on port 80.")),
    "a name that is always denied": (
        ("evil.test", "93.184.216.34", 443, RESOLVED),
        Deny("always-deny:2", "evil.test is denied by the operator."),
    ),
    "a name that is always denied, at a private address": (
        ("evil.test", "10.1.2.3", 443, RESOLVED),
        Deny("always-deny:2", "evil.test is denied by the operator."),
    ),
    "an address that is always denied": (
        ("good.test", "10.6.6.6", 443, MAPPED),
        Deny("always-deny:1", "good.test is mapped to 10.6.6.6, which is denied by the operator."),
    ),
    "an address that stands for one that is always denied": (
        ("good.test", "64:ff9b::5db8:db07", 443, RESOLVED),
        Deny("always-deny:3", "good.test resolves to 64:ff9b::5db8:db07, which is denied by the operator."),
    ),
    "a literal address that is always denied": (
        (None, "93.184.219.7", 443, LITERAL),
        Deny("always-deny:3", "93.184.219.7 is denied by the operator."),
    ),
    "a class": (
        ("good.test", "10.1.2.3", 443, RESOLVED),
        Deny("address-class:private", "good.test resolves to 10.1.2.3, which is a private address."),
    ),
    "a literal class": (
        (None, "169.254.169.254", 443, LITERAL),
        Deny("address-class:metadata", "169.254.169.254 is a metadata address."),
    ),
    "a flow that is not allowed": (
        ("other.test", "93.184.216.34", 443, RESOLVED),
        Deny("default", "No rule of p allows https to other.test:443."),
    ),
    "an address that a rule denies": (
        ("good.test", "93.184.218.1", 443, RESOLVED),
        Deny("p/rule-3", "good.test resolves to 93.184.218.1, which is denied by rule p/rule-3."),
    ),
    "a literal address that a rule denies on its port": (
        (None, "93.184.216.34", 8443, LITERAL),
        Deny("p/rule-4", "93.184.216.34:8443 is denied by rule p/rule-4."),
    ),
    "a literal address that no rule allows": (
        (None, "8.8.8.8", 443, LITERAL),
        Deny("default", "No rule of p allows the address 8.8.8.8:443."),
    ),
    "a literal address that a rule allows": ((None, "93.184.216.34", 443, LITERAL), AllowAddress("p/rule-2")),
    "a resolved address": (("good.test", "93.184.216.34", 443, RESOLVED), AllowAddress("resolved")),
    "a mapped address": (("good.test", "127.0.0.1", 443, MAPPED), AllowAddress("mapped")),
}


def judged(name: str, host: str | None, place: str, port: int, source: AddressSource, **more: bool) -> object:
    policy = compile_named(load_text(LISTS), name)
    return decide_address(policy, Destination(host, ip_address(place), port, Scheme.HTTPS, source, **more))


@pytest.mark.parametrize("case", REASONS)
def test_each_answer_about_an_address_is_reported_whole(case: str) -> None:
    (host, place, port, source), expected = REASONS[case]
    assert expected == judged("p", host, place, port, source)


def test_an_address_of_the_host_is_denied_whatever_allows_its_name() -> None:
    place = "93.184.216.34"
    denied = Deny("address-class:own", f"good.test resolves to {place}, which is an address of the gateway's own host.")
    assert denied == judged("p", "good.test", place, 443, RESOLVED, own=True)
    assert Deny("address-class:own", f"{place} is an address of the gateway's own host.") == judged(
        "p", None, place, 443, LITERAL, own=True
    )
    assert AllowAddress("mapped") == judged("p", "good.test", place, 443, MAPPED, own=True)


@pytest.mark.parametrize(
    ("place", "exception", "allowed"),
    [
        ("93.184.216.34", "93.184.216.34/32", True),
        ("93.184.216.34", "93.184.216.0/24", False),
        ("10.1.2.3", "10.0.0.0/8", True),
    ],
)
def test_an_address_of_the_host_is_opened_by_its_class_or_by_itself(place: str, exception: str, allowed: bool) -> None:
    policy = compile_named(load_text(LISTS), "p")
    to = Destination("good.test", ip_address(place), 443, Scheme.HTTPS, RESOLVED, own=True)
    answer = decide_address(policy, to, (ip_network(exception),))
    assert ("resolved" if allowed else "address-class:own") == answer.rule


def test_what_an_observed_rule_denies_is_reported_and_no_literal_address_is_opened_by_it() -> None:
    observed = Deny("p/rule-3", "good.test resolves to 93.184.218.1, which is denied by rule p/rule-3.")
    assert AllowAddress("observe:watch", observed) == judged("watch", "good.test", "93.184.218.1", 443, RESOLVED)
    assert Deny("p/rule-3", "93.184.218.1:443 is denied by rule p/rule-3.") == judged(
        "watch", None, "93.184.218.1", 443, LITERAL
    )


def test_a_literal_address_needs_every_list_and_the_ceiling() -> None:
    document = load_text(LISTS)

    def api(*targets: str) -> CompiledPolicy:
        egress = [{"action": "allow", "target": target} for target in targets]
        return compile_api(document, parse_network_policy({"egress": egress}))

    def literal(policy: CompiledPolicy, port: int = 443, scheme: Scheme = Scheme.HTTPS) -> object:
        return decide_address(policy, Destination(None, ip_address("93.184.216.34"), port, scheme, LITERAL))

    both = narrow(compile_named(document, "p"), api("93.184.216.0/24"))
    assert AllowAddress("p/rule-2+api:1") == literal(both)
    assert Deny("default", "No rule of networkPolicy allows the address 93.184.216.34:443.") == literal(
        narrow(compile_named(document, "p"), api("93.184.217.0/24"))
    )
    assert AllowAddress("api:1") == literal(api("93.184.216.0/24"), 8443)
    assert Deny("ceiling", "Port 8444 is above the operator's ceiling.") == literal(api("93.184.216.0/24"), 8444)
    assert Deny("scheme", "A bare address is reached by TLS only.") == literal(
        api("93.184.216.0/24"), 8443, Scheme.HTTP
    )


def test_a_dns_answer_is_denied_for_a_reason_that_says_more_than_the_default() -> None:
    """The first such reason among the ports that could be dialled."""
    policy = compile_named(load_text(LISTS), "p")

    def answer(host: str, place: str, **more: bool) -> object:
        return decide_answer(policy, host, ip_address(place), RESOLVED, **more)

    assert AllowAddress("resolved") == answer("good.test", "93.184.216.34")
    assert Deny("default", "No rule of p allows https to other.test:443.") == answer("other.test", "93.184.216.34")
    assert Deny("p/rule-3", "good.test resolves to 93.184.218.1, which is denied by rule p/rule-3.") == answer(
        "good.test", "93.184.218.1"
    )
    assert Deny(
        "address-class:own", "good.test resolves to 93.184.216.34, which is an address of the gateway's own host."
    ) == answer("good.test", "93.184.216.34", own=True)
    odd = load_text("version: 1\npolicies: {q: {rules: [{host: odd.test, ports: [8443]}]}}\n")
    assert AllowAddress("resolved") == decide_answer(
        compile_named(odd, "q"), "odd.test", ip_address("93.184.216.34"), RESOLVED
    )


SHOWN = {
    "one of the ceiling's ports, 80": ("ceiling: {ports: [80]}", None),
    "one of the ceiling's ports, 8443": ("ceiling: {ports: [8443]}", None),
    "a port behind others on which the address is denied": (
        "policies: {q: {rules: [{host: good.test, ports: [80, 443, 8443]}, "
        "{action: deny, address: 93.184.216.34, ports: [80, 443]}]}}",
        "q",
    ),
}


@pytest.mark.parametrize("case", SHOWN)
def test_one_port_is_enough_for_a_dns_answer(case: str) -> None:
    text, name = SHOWN[case]
    document = load_text(f"version: 1\n{text}\n")
    allowed = parse_network_policy({"egress": [{"action": "allow", "target": "good.test"}]})
    policy = compile_api(document, allowed) if name is None else compile_named(document, name)
    assert AllowAddress("resolved") == decide_answer(policy, "good.test", ip_address("93.184.216.34"), RESOLVED)


def test_a_denied_address_is_denied_on_the_ports_of_its_rule() -> None:
    place = "93.184.216.34"
    denied = Deny("p/rule-4", f"good.test resolves to {place}, which is denied by rule p/rule-4.")
    assert denied == judged("p", "good.test", place, 8443, RESOLVED)
    assert AllowAddress("resolved") == judged("p", "good.test", place, 443, RESOLVED)
