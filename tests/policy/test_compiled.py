"""A compiled policy: the values that it accepts, and its properties."""

from dataclasses import replace
from ipaddress import ip_address

import pytest

from policy.compile import (
    DENY_ALL,
)
from policy.compiled import inspected
from policy.facts import Scheme
from policy.names import HostPattern
from policy.paths import PathPattern
from policy.rules import (
    STANDARD,
    Action,
    Binding,
    Mode,
    Precedence,
    Rule,
    RuleList,
)

ENTRIES = {
    "always-deny:1": "x.test",
    "always-deny:2": "y.test",
    "always-allow:1": "s.test",
    **dict.fromkeys(("always-deny:0", "always-deny:3", "always-deny:", "always-deny", "always-allow:2", "always:1")),
    **dict.fromkeys(("always-deny:+1", "always-deny: 1", "always-deny:1:1", "always-deny:\u0661", "always-deny:-1")),
    **dict.fromkeys(("always-deny:\u00b2", "default", "")),
}


@pytest.mark.parametrize("rule", ENTRIES)
def test_the_entry_that_decided_is_found_by_its_rule(rule: str) -> None:
    policy = replace(DENY_ALL, always_deny=("x.test", "y.test"), always_allow=("s.test",))
    assert ENTRIES[rule] == policy.operator_entry(rule)


def test_a_compiled_policy_has_a_list_and_canonical_values() -> None:
    for parts in ({"lists": ()}, {"plaintext_secrets": ("good.test", "Good.test")}, {"always_deny": ("10.0.0.1/8",)}):
        with pytest.raises(ValueError):
            replace(DENY_ALL, **parts)


def test_addresses_of_the_operator_are_found_by_their_place_in_the_list() -> None:
    policy = replace(DENY_ALL, always_deny=("x.test", "10.0.0.0/8", "*.y.test", "93.184.0.0/16", "93.184.216.34/32"))
    assert (2, 4, None) == tuple(
        policy.denied.find_address(ip_address(ip)) for ip in ("10.1.2.3", "93.184.216.34", "8.8.8.8")
    )
    assert (1, 3, None) == tuple(policy.denied.find_host(host) for host in ("x.test", "a.y.test", "y.test"))


def test_the_mode_and_the_default_are_those_of_all_lists() -> None:
    watch = RuleList("w", Precedence.DENY_WINS, Mode.OBSERVE)
    wide = RuleList("o", Precedence.FIRST_MATCH, default_action=Action.ALLOW)
    for lists, mode, default in (
        ((watch,), Mode.OBSERVE, Action.DENY),
        ((wide,), Mode.ENFORCE, Action.ALLOW),
        ((watch, wide), Mode.ENFORCE, Action.DENY),
    ):
        policy = replace(DENY_ALL, lists=lists)
        assert (mode, default) == (policy.mode, policy.default_action)


def test_the_hosts_that_may_be_inspected_are_listed() -> None:
    plain = Rule("p", Action.ALLOW, (HostPattern("plain.test"),), endpoints=STANDARD)
    seen = Rule("s", Action.ALLOW, (HostPattern("b.test"), HostPattern("*.a.test")), endpoints=STANDARD, inspect=True)
    bound = Binding("b", (HostPattern("b.test"), HostPattern("c.test")), (Scheme.HTTPS,), ("GET",), (PathPattern("/"),))
    policy = replace(DENY_ALL, lists=(RuleList("l", Precedence.DENY_WINS, rules=(plain, seen)),), bindings=(bound,))
    assert ("*.a.test", "b.test", "c.test") == inspected(policy)
