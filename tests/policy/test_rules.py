"""The compiled form: refused values, and the exact limits."""

from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

import pytest

from policy.facts import Scheme
from policy.injection import InjectionKind, InjectionPlan, SubstitutionPlan, Surface
from policy.names import HostPattern
from policy.paths import Leniency, PathPattern
from policy.rules import (
    ANY_PUBLIC,
    STANDARD,
    Action,
    Binding,
    Ceiling,
    DnsSettings,
    Endpoint,
    HostIndex,
    Limits,
    Mode,
    Precedence,
    Rule,
    RuleList,
    check_port,
    check_range,
    is_token,
    network_text,
)

HTTP, HTTPS = Scheme.HTTP, Scheme.HTTPS
GOOD = (HostPattern("good.test"),)
WILD = (HostPattern("*.good.test"),)
PLAN = (InjectionPlan("r", "s", InjectionKind.BEARER, "Authorization"),)
NETWORK = ("93.184.216.0/24",)


def rule(action: Action = Action.ALLOW, **parts: Any) -> Rule:
    """Return a rule about good.test, if no other host is given."""
    return Rule("r", action, **({"hosts": GOOD} | parts))


def listed(precedence: Precedence = Precedence.DENY_WINS, *rules: Rule, **parts: Any) -> RuleList:
    return RuleList("l", precedence, rules=rules, **parts)


BUILT: dict[str, Callable[[], object]] = {
    "a deny rule about a scheme": lambda: rule(Action.DENY, schemes=(HTTP,)),
    "a deny rule about an endpoint": lambda: rule(Action.DENY, endpoints=STANDARD),
    "a deny rule about a method": lambda: rule(Action.DENY, methods=("DELETE",)),
    "an address": lambda: rule(hosts=(), addresses=NETWORK, endpoints=STANDARD),
    "a secret for an exact host": lambda: rule(injections=PLAN, endpoints=STANDARD),
    "a wildcard": lambda: rule(hosts=WILD, endpoints=STANDARD, inspect=True),
    "a caller's rule without endpoints": lambda: listed(Precedence.FIRST_MATCH, rule()),
    "a caller's default": lambda: listed(Precedence.FIRST_MATCH, default_action=Action.ALLOW),
    "a named list that observes": lambda: listed(Precedence.DENY_WINS, mode=Mode.OBSERVE),
    "a named deny rule without endpoints": lambda: listed(Precedence.DENY_WINS, rule(Action.DENY)),
    "HTTP on 8080": lambda: Endpoint(8080, HTTP),
    "HTTPS on 8080": lambda: Endpoint(8080, HTTPS),
    "a binding": lambda: Binding("b", GOOD, (HTTPS,), ("GET",), (PathPattern("/"),)),
}
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "an allow rule about a scheme": (lambda: rule(schemes=(HTTP,)), "about schemes"),
    "a scheme beside endpoints": (lambda: rule(Action.DENY, schemes=(HTTP,), endpoints=STANDARD), "about schemes"),
    "neither hosts nor addresses": (lambda: rule(hosts=()), "needs hosts or addresses"),
    "hosts and addresses": (lambda: rule(addresses=NETWORK), "needs hosts or addresses"),
    "host bits": (lambda: rule(hosts=(), addresses=("93.184.216.1/24",)), "not a canonical network"),
    "a second address with host bits": (
        lambda: rule(hosts=(), addresses=(*NETWORK, "93.184.217.1/24")),
        "not a canonical network",
    ),
    "a method that is no token": (lambda: rule(methods=("GET", "G T")), "is not a method"),
    "an inspected address": (lambda: rule(hosts=(), addresses=NETWORK, inspect=True), "cannot be inspected"),
    "methods of an address": (lambda: rule(hosts=(), addresses=NETWORK, methods=("GET",)), "cannot be inspected"),
    "paths of an address": (
        lambda: rule(hosts=(), addresses=NETWORK, paths=(PathPattern("/"),)),
        "cannot be inspected",
    ),
    "a secret for an address": (lambda: rule(hosts=(), addresses=NETWORK, injections=PLAN), "cannot be inspected"),
    "a denial with a secret": (lambda: rule(Action.DENY, injections=PLAN), "injects nothing"),
    "a secret for a wildcard": (lambda: rule(hosts=WILD, injections=PLAN), "not to a wildcard"),
    "a secret for a wildcard beside a host": (lambda: rule(hosts=(*GOOD, *WILD), injections=PLAN), "not to a wildcard"),
    "a named list that allows by default": (lambda: listed(default_action=Action.ALLOW), "default to allow"),
    "a caller's list that observes": (lambda: listed(Precedence.FIRST_MATCH, mode=Mode.OBSERVE), "knows hosts only"),
    "a caller's rule that inspects": (
        lambda: listed(Precedence.FIRST_MATCH, rule(), rule(inspect=True)),
        "knows hosts only",
    ),
    "a caller's rule with methods": (lambda: listed(Precedence.FIRST_MATCH, rule(methods=("GET",))), "hosts only"),
    "a caller's rule with endpoints": (lambda: listed(Precedence.FIRST_MATCH, rule(endpoints=STANDARD)), "hosts only"),
    "a caller's rule with schemes": (
        lambda: listed(Precedence.FIRST_MATCH, rule(Action.DENY, schemes=(HTTP,))),
        "knows hosts only",
    ),
    "a named allow rule without endpoints": (lambda: listed(Precedence.DENY_WINS, rule()), "allows no endpoint"),
    "a ceiling with port 0": (lambda: Ceiling(ports=(443, 0)), "0 is not a port"),
    "a ceiling with a host that is no pattern": (lambda: Ceiling(hosts=(ANY_PUBLIC, "Good.test")), "not a canonical"),
    "HTTPS on 80": (lambda: Endpoint(80, HTTPS), "does not speak"),
    "HTTP on 443": (lambda: Endpoint(443, HTTP), "does not speak"),
    "an endpoint on port 0": (lambda: Endpoint(0, HTTP), "0 is not a port"),
    "a binding without hosts": (lambda: Binding("b", (), (HTTPS,), ("GET",), (PathPattern("/"),)), "needs hosts"),
    "a binding without schemes": (lambda: Binding("b", GOOD, (), ("GET",), (PathPattern("/"),)), "needs hosts"),
    "a binding without methods": (lambda: Binding("b", GOOD, (HTTPS,), (), (PathPattern("/"),)), "needs hosts"),
    "a binding without paths": (lambda: Binding("b", GOOD, (HTTPS,), ("GET",), ()), "needs hosts"),
}


@pytest.mark.parametrize("case", BUILT)
def test_what_makes_sense_can_be_built(case: str) -> None:
    """A control for the refusals below."""
    assert BUILT[case]() is not None


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_cannot_be_built(case: str) -> None:
    """A policy that was not loaded from a document obeys the same rules."""
    build, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        build()


def test_a_port_is_a_number_from_1_to_65535() -> None:
    check_port(1)
    check_port(65535)
    for wrong in (0, -1, 65536, True):
        with pytest.raises(ValueError, match="is not a port"):
            check_port(wrong)


def test_a_bounded_number_is_no_bool() -> None:
    check_range("n", 1, 1)
    check_range("n", 7, 7)
    for wrong in (0, 8, True):
        with pytest.raises(ValueError, match=r"^n must be from 1 to 7$"):
            check_range("n", wrong, 7)


def test_a_token_has_1_to_64_characters() -> None:
    """The characters are those of RFC 9110, 5.6.2."""
    assert is_token("G") and is_token("G" * 64)
    assert not is_token("") and not is_token("G" * 65)
    allowed = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert set(allowed) == {character for character in map(chr, range(0x180)) if is_token(f"a{character}")}


NETWORKS = {
    "93.184.216.34": "93.184.216.34/32",
    "93.184.216.34/24": "93.184.216.0/24",
    "0.0.0.0/0": "0.0.0.0/0",
    "2606:2800::1": "2606:2800::1/128",
    "2606:2800::1/32": "2606:2800::/32",
    "::ffff:93.184.216.34": "93.184.216.34/32",
    "::ffff:93.184.216.34/120": "93.184.216.0/24",
    "::ffff:0:0/96": "0.0.0.0/0",
    "::ffff:0:0/95": "::fffe:0:0/95",
    "::93.184.216.34/128": "::5db8:d822/128",
}


@pytest.mark.parametrize("text", NETWORKS)
def test_a_network_has_one_text(text: str) -> None:
    assert NETWORKS[text] == network_text(text) == network_text(NETWORKS[text])


@pytest.mark.parametrize(
    "text",
    [
        *("", "/24", "good.test", "10.0.0.0/33", "10.0.0.0/-1", "10.0.0.0/08", "10.0.0.0/", "10.0.0.0/ 8"),
        *("10.0.0.0/255.0.0.0", "10.0.0.0/8/8", "10.0.0.0/\u0668", "10.0.0.0/8x", "fe80::1%eth0", "fe80::%1/64"),
    ],
)
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an address or network$"):
        network_text(text)


BOUNDS: dict[str, tuple[type, int]] = {
    "query_rate": (DnsSettings, 500),
    "query_burst": (DnsSettings, 1000),
    "max_label": (DnsSettings, 63),
    "max_labels": (DnsSettings, 126),
    "max_name": (DnsSettings, 253),
    "entropy": (DnsSettings, 600),
    "unique_names": (DnsSettings, 1_000_000),
    "connections": (Limits, 65_536),
    "requests_per_minute": (Limits, 1 << 50),
    "bytes_out": (Limits, 1 << 50),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_setting_has_bounds(name: str) -> None:
    """From 1 to the maximum, and no other value."""
    kind, most = BOUNDS[name]
    for value in (1, most):
        assert value == getattr(kind(**{name: value}), name)
    for value in (0, most + 1, True):
        with pytest.raises(ValueError, match=rf"^{name} must be from 1 to {most}$"):
            kind(**{name: value})


def test_limits_that_policy_does_not_set_do_not_limit() -> None:
    assert (512, None, None) == (Limits().connections, Limits().requests_per_minute, Limits().bytes_out)
    assert Limits(requests_per_minute=None, bytes_out=None) == Limits()


def test_the_rules_about_a_host_are_found_once_and_in_their_order() -> None:
    """A rule that names a host by two patterns counts once."""
    first = rule(hosts=(HostPattern("*.good.test"),))
    second = rule(hosts=(HostPattern("a.good.test"), HostPattern("*.good.test"), HostPattern("b.a.good.test")))
    third = rule(hosts=(HostPattern("*.a.good.test"), HostPattern("good.test")))
    rules = RuleList("l", Precedence.FIRST_MATCH, rules=(first, second, third))

    assert (first, second) == rules.of_host("a.good.test")
    assert (first, second, third) == rules.of_host("b.a.good.test")
    assert (third,) == rules.of_host("good.test")
    assert () == rules.of_host("test") == rules.of_host("agood.test")


def test_the_positions_of_patterns_are_ascending() -> None:
    patterns = tuple(map(HostPattern, ("*.c.test", "a.b.c.test", "*.b.c.test", "*.test", "a.b.c.test", "*.a.b.c.test")))

    assert [0, 1, 2, 3, 4] == HostIndex(patterns).positions("a.b.c.test")
    assert [3] == HostIndex(patterns).positions("c.test")
    assert [] == HostIndex(patterns).positions("test") == HostIndex(()).positions("a.test")
    assert [0] == HostIndex(patterns[1:2]).positions("a.b.c.test")
    assert [] == HostIndex(patterns[:1]).positions("xc.test")


def test_the_rules_about_an_address_are_found_in_their_order() -> None:
    wide = rule(hosts=(), addresses=("2606:2800::/32", "93.184.0.0/16"))
    narrow = rule(hosts=(), addresses=("93.184.216.34/32",))
    rules = RuleList("l", Precedence.FIRST_MATCH, rules=(narrow, wide))

    assert (narrow, wide) == rules.of_address(ip_address("93.184.216.34"))
    assert (wide,) == rules.of_address(ip_address("2606:2800::1"))
    assert () == rules.of_address(ip_address("8.8.8.8"))


def test_a_rule_inspects_for_methods_paths_and_secrets() -> None:
    """`narrow`, `inspects` and `strict_paths` of each kind of rule."""

    def kinds(made: Rule) -> tuple[bool, bool, bool]:
        return made.narrow, made.inspects, made.strict_paths

    def substitution(surface: Surface) -> tuple[SubstitutionPlan]:
        return (SubstitutionPlan("p/r", "s", "{S}", (surface,)),)

    assert (False, False, False) == kinds(rule())
    assert (False, True, False) == kinds(rule(inspect=True))
    assert (True, True, False) == kinds(rule(methods=("GET",)))
    assert (True, True, True) == kinds(rule(paths=(PathPattern("/*"),)))
    assert (False, True, False) == kinds(rule(injections=PLAN))
    assert (False, True, True) == kinds(rule(substitutions=substitution(Surface.PATH)))
    assert (False, True, False) == kinds(rule(substitutions=substitution(Surface.QUERY)))


def test_only_an_allow_rule_for_names_permits_forms_of_a_path() -> None:
    """A path with `%2F` needs the permission."""
    scoped, permits = (PathPattern("/@corp%2Fui"),), Leniency(encoded_slashes=True)
    assert permits == rule(paths=scoped, permits=permits).permits
    with pytest.raises(ValueError, match="does not permit encoded slashes"):
        rule(paths=scoped)
    with pytest.raises(ValueError, match="does not permit encoded slashes"):
        rule(paths=scoped, permits=Leniency(empty_segments=True))
    with pytest.raises(ValueError, match="a deny rule permits no form"):
        rule(action=Action.DENY, endpoints=(), permits=permits)
    with pytest.raises(ValueError, match="bare address"):
        rule(hosts=(), addresses=("93.184.216.34/32",), permits=permits)


def test_a_rule_covers_its_endpoints_or_its_schemes_or_all() -> None:
    every = (*STANDARD, Endpoint(8443, HTTP), Endpoint(8443, HTTPS))

    def covered(made: Rule) -> list[Endpoint]:
        return [endpoint for endpoint in every if made.covers(endpoint)]

    assert [*every] == covered(rule())
    assert [every[1], every[2]] == covered(rule(endpoints=(every[2], every[1])))
    assert [every[0], every[2]] == covered(rule(Action.DENY, schemes=(HTTP,)))


ACCEPTS = {
    "all": ((), (), {"GET /a", "get /a", "PUT /b", "GET /A"}),
    "a method": (("GET",), (), {"GET /a", "GET /A"}),
    "a path": ((), ("/a",), {"GET /a", "get /a"}),
    "both": (("GET",), ("/a",), {"GET /a"}),
    "one of two": (("GET", "PUT"), ("/a", "/b"), {"GET /a", "PUT /b"}),
}
DENIES = {
    "all": ACCEPTS["all"],
    "a method": (("GET",), (), {"GET /a", "get /a", "GET /A"}),
    "a method in lower case": (("get",), (), {"GET /a", "get /a", "GET /A"}),
    "a path": ((), ("/a",), {"GET /a", "get /a", "GET /A"}),
    "both": (("PUT",), ("/a",), set[str]()),
    "one of two": (("GET", "PUT"), ("/c", "/b"), {"PUT /b"}),
}


@pytest.mark.parametrize(
    ("action", "case"), [*((Action.ALLOW, case) for case in ACCEPTS), *((Action.DENY, case) for case in DENIES)]
)
def test_an_allow_matches_exactly_and_a_denial_in_any_case(action: Action, case: str) -> None:
    methods, paths, expected = (ACCEPTS if action is Action.ALLOW else DENIES)[case]
    made = rule(action, methods=methods, paths=tuple(map(PathPattern, paths)))

    assert expected == {
        request for request in ("GET /a", "get /a", "PUT /b", "GET /A") if made.accepts(*request.split(" "))
    }


def test_a_binding_is_about_its_hosts_schemes_methods_and_paths() -> None:
    binding = Binding("b", (*GOOD, *WILD), (HTTPS,), ("GET", "PUT"), (PathPattern("/a"), PathPattern("/b/*")))

    assert (STANDARD[1],) == binding.endpoints
    assert STANDARD == Binding("b", GOOD, (HTTP, HTTPS), ("GET",), (PathPattern("/"),)).endpoints
    assert binding.covers("good.test", STANDARD[1]) and binding.covers("a.good.test", STANDARD[1])
    assert not binding.covers("good.test", STANDARD[0]) and not binding.covers("good.test", Endpoint(8443, HTTPS))
    assert not binding.covers("other.test", STANDARD[1])
    assert binding.is_exact_for("good.test") and not binding.is_exact_for("a.good.test")
    assert binding.accepts("GET", "/a") and binding.accepts("PUT", "/b/x")
    assert not binding.accepts("get", "/a") and not binding.accepts("GET", "/A") and not binding.accepts("POST", "/a")


def test_the_ceiling_admits_public_names_or_the_listed_ones() -> None:
    wide, listed_too = Ceiling(), Ceiling(hosts=(ANY_PUBLIC, "git.internal", "*.corp"))
    narrow = Ceiling(hosts=("good.test", "*.good.test"), ports=(443,))

    assert [True, False, False] == [wide.admits_host(host) for host in ("good.test", "git.internal", "a.corp")]
    assert [True] * 3 == [listed_too.admits_host(host) for host in ("good.test", "git.internal", "a.corp")]
    assert not wide.admits_host("any-public"), "it is a word of the ceiling and no host"
    assert not listed_too.admits_host("other.internal") and not listed_too.admits_host("corp")
    assert narrow.admits_host("good.test") and narrow.admits_host("a.good.test") and not narrow.admits_host("a.test")
    assert [True, True, False] == [wide.admits_port(port) for port in (80, 443, 8443)]
    assert [False, True, False] == [narrow.admits_port(port) for port in (80, 443, 8443)]
