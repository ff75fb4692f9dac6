"""The OpenSandbox network policy."""

from typing import Any

import pytest

from policy.api import (
    ApiPolicy,
    ApiPolicyError,
    canonical_target,
    decode_json,
    delete_targets,
    merge_patch,
    parse_delete,
    parse_network_policy,
    parse_patch,
)
from policy.rules import MAX_RULES, Action


def rule(action: str, target: str) -> dict[str, str]:
    """Return a rule in its wire form."""
    return {"action": action, "target": target}


CLOSED: dict[str, Any] = {
    "null": None,
    "an empty object": {},
    "a default with blanks and capitals": {"defaultAction": "Deny "},
    "an empty default": {"defaultAction": ""},
}

REFUSED: dict[str, tuple[Any, str]] = {
    "an unknown default": ({"defaultAction": "x"}, 'invalid policy: unsupported defaultAction "x"'),
    "a default of another type": ({"defaultAction": True}, 'invalid policy: unsupported defaultAction "true"'),
    "an unknown action": ({"egress": [rule("permit", "a.test")]}, 'invalid policy: unsupported action "permit"'),
    "a blank target": ({"egress": [rule("allow", "  ")]}, "invalid policy: egress target cannot be empty"),
    "a missing target": ({"egress": [{"action": "allow"}]}, "invalid policy: egress target cannot be empty"),
    "a URL": ({"egress": [rule("allow", "https://a.test")]}, 'invalid policy: unsupported target "https://a.test"'),
    "a port": ({"egress": [rule("allow", "a.test:443")]}, 'invalid policy: unsupported target "a.test:443"'),
    "an inner wildcard": ({"egress": [rule("allow", "a.*.test")]}, 'invalid policy: unsupported target "a.*.test"'),
    "two stars": ({"egress": [rule("allow", "**.test")]}, 'invalid policy: unsupported target "**.test"'),
    "an IPv6 zone": ({"egress": [rule("allow", "fe80::1%eth0")]}, 'invalid policy: unsupported target "fe80::1%eth0"'),
    "an address in disguise": ({"egress": [rule("allow", "127.1")]}, 'invalid policy: unsupported target "127.1"'),
    "a dotted mask": (
        {"egress": [rule("allow", "10.0.0.0/255.0.0.0")]},
        'invalid policy: unsupported target "10.0.0.0/255.0.0.0"',
    ),
    "the same key in two cases": ({"egress": [], "Egress": []}, 'invalid policy: duplicate key "egress"'),
    "a misspelt key": (
        {"egres": [rule("allow", "a.test")], "defaultAction": "allow"},
        'invalid policy: unknown field "egres"',
    ),
    "an unknown key of a rule": (
        {"egress": [rule("allow", "a.test"), {**rule("deny", "b.test"), "methods": ["GET"]}]},
        'invalid policy: unknown field "egress[1].methods"',
    ),
    "a null list": ({"egress": None}, "invalid policy: egress: must not be null"),
    "a null default": ({"defaultAction": None}, "invalid policy: defaultAction: must not be null"),
    "a null action": (
        {"egress": [{"action": None, "target": "a.test"}]},
        "invalid policy: egress[0].action: must not be null",
    ),
    "a list": ([], "invalid policy: expected an object"),
    "rules that are no list": ({"egress": {}}, "invalid policy: egress: expected an array of rules"),
    "a rule that is no object": ({"egress": ["a.test"]}, "invalid policy: egress[0]: expected an object"),
}

CANONICAL = {
    "names are folded": ("Good.TEST.", "good.test"),
    "U-labels become A-labels": ("münchen.test", "xn--mnchen-3ya.test"),
    "a single label is allowed": ("intranet", "intranet"),
    "a wildcard over anything is the contract's": ("*.test", "*.test"),
    "an address is a network of one": ("93.184.216.34", "93.184.216.34/32"),
    "host bits are masked": ("10.1.2.3/8", "10.0.0.0/8"),
    "IPv6 is compressed": ("2606:2800:0:0::1", "2606:2800::1/128"),
    "a mapped address is its IPv4 address": ("::ffff:10.1.2.3", "10.1.2.3/32"),
    "a mapped network too": ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
    "the bare star is inert": ("*", "*"),
}


@pytest.mark.parametrize("case", CLOSED)
def test_whatever_says_nothing_is_deny_all(case: str) -> None:
    """Empty, null and missing values open nothing."""
    assert ApiPolicy() == parse_network_policy(CLOSED[case])
    assert "deny_all" == ApiPolicy().status_mode()


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_with_the_contracts_text(case: str) -> None:
    """With status 400 and the exact message."""
    value, message = REFUSED[case]
    with pytest.raises(ApiPolicyError) as caught:
        parse_network_policy(value)

    assert (400, message) == (caught.value.status, str(caught.value))


@pytest.mark.parametrize("case", CANONICAL)
def test_targets_are_compared_in_canonical_form(case: str) -> None:
    """Each target has one canonical form."""
    text, expected = CANONICAL[case]

    assert expected == canonical_target(text)


def test_targets_are_echoed_as_written_and_in_order() -> None:
    """GET returns the caller's own text, trimmed, with `egress` before `defaultAction`."""
    policy = parse_network_policy({"defaultAction": "ALLOW", "EGRESS": [rule(" Deny ", " Good.TEST. "), rule("", "*")]})

    assert {
        "egress": [rule("deny", "Good.TEST."), rule("deny", "*")],
        "defaultAction": "allow",
    } == policy.to_wire()
    assert ["egress", "defaultAction"] == list(policy.to_wire())
    assert "enforcing" == policy.status_mode()
    assert "allow_all" == ApiPolicy(default_action=Action.ALLOW).status_mode()


def test_a_patch_goes_in_front_and_the_first_of_equal_targets_stays() -> None:
    """Within the patch, and between patch and base. The default does not change."""
    base = parse_network_policy({"defaultAction": "allow", "egress": [rule("deny", "a.test"), rule("allow", "b.test")]})
    patch = parse_patch([rule("allow", "c.test"), rule("allow", "A.test."), rule("deny", "C.TEST")])
    merged = merge_patch(base, patch)

    assert [("allow", "c.test"), ("allow", "A.test."), ("allow", "b.test")] == [
        (str(item.action), item.target) for item in merged.rules
    ]
    assert Action.ALLOW is merged.default_action


def test_a_delete_removes_every_rule_of_a_target_and_ignores_the_rest() -> None:
    """Unknown, blank and unreadable targets change nothing, and a repetition has no effect."""
    base = parse_network_policy(
        {"egress": [rule("allow", "a.test"), rule("allow", "10.0.0.0/8"), rule("deny", "A.test")]}
    )
    gone = delete_targets(base, ["A.TEST.", "", "b.test", "not a target"])

    assert ["10.0.0.0/8"] == [item.target for item in gone.rules]
    assert gone == delete_targets(gone, ["a.test", " "])
    assert ApiPolicy() == delete_targets(gone, ["10.9.9.9/8"])


def test_empty_patches_and_deletes_are_refused() -> None:
    """With the contract's texts."""
    for value in (None, []):
        with pytest.raises(ApiPolicyError, match=r"^invalid patch rules: empty array$"):
            parse_patch(value)
        with pytest.raises(ApiPolicyError, match=r"^invalid delete targets: empty array$"):
            parse_delete(value)
    with pytest.raises(ApiPolicyError, match=r"^invalid delete targets: "):
        parse_delete([1])
    with pytest.raises(ApiPolicyError, match=r'^invalid patch rules: unsupported action "x"$'):
        parse_patch([rule("x", "a.test")])


def test_the_rule_limit_counts_the_merged_list() -> None:
    """With 413 and the contract's text."""
    base = parse_network_policy({"egress": [rule("allow", f"h{n}.test") for n in range(MAX_RULES)]})
    with pytest.raises(ApiPolicyError) as caught:
        merge_patch(base, parse_patch([rule("allow", "one-more.test")]))

    assert (413, "egress rule total count 4097 exceeds limit 4096") == (caught.value.status, str(caught.value))


def test_a_key_given_twice_in_json_is_refused() -> None:
    """At any depth, for known and unknown keys: the last value is not used silently."""
    for text in ('{"egress": [], "egress": null}', '{"egress": [{"x": 1, "x": 2}]}'):
        with pytest.raises(ApiPolicyError, match=r'^invalid policy: duplicate key "(egress|x)"$'):
            decode_json(text.encode(), "invalid policy: ")


@pytest.mark.parametrize(
    "text", [b"{", b'{"a": NaN}', b'{"a": -Infinity}', b"{} {}", "{}".encode("utf-16"), b"[" * 100_000]
)
def test_what_is_no_json_is_refused(text: bytes) -> None:
    """Also text that only some parsers accept as JSON."""
    with pytest.raises(ApiPolicyError, match=r"^invalid policy: not valid JSON$"):
        decode_json(text, "invalid policy: ")


@pytest.mark.parametrize("value", [7, {}, "a.test", ["a.test", 7], [None]])
def test_a_delete_is_a_list_of_texts(value: Any) -> None:
    with pytest.raises(ApiPolicyError, match=r"^invalid delete targets: expected an array of strings$"):
        parse_delete(value)
    assert ("a.test", " ") == parse_delete(["a.test", " "])


def test_a_target_that_is_unknown_does_not_end_a_delete() -> None:
    policy = parse_network_policy({"egress": [rule("allow", "a.test"), rule("deny", "b.test")]})
    assert [] == list(delete_targets(policy, ["no target", " a.test ", "c.test", "b.test"]).rules)


def test_a_target_has_at_most_1024_characters() -> None:
    """An address may have leading zeros. A longer text is not parsed."""
    with pytest.raises(ValueError, match="target too long"):
        canonical_target("a" * 1025)
    with pytest.raises(ValueError, match="longer than 253"):
        canonical_target("a" * 1024)


def test_a_list_of_rules_is_bounded_before_it_is_read() -> None:
    for value in ([7] * (MAX_RULES + 1), [rule("allow", "a.test")] * (MAX_RULES + 1)):
        with pytest.raises(
            ApiPolicyError, match=rf"^egress rule total count {MAX_RULES + 1} exceeds limit {MAX_RULES}$"
        ):
            parse_network_policy({"egress": value})


def test_what_is_shown_of_a_wrong_value_is_one_short_line_of_ascii() -> None:
    for target, shown in {
        "a\r\nb": "a\\r\\nb",
        "\u00e4 b": "\\xe4 b",
        "x" * 300 + "/": "x" * 200,
    }.items():
        with pytest.raises(ApiPolicyError) as caught:
            parse_network_policy({"egress": [rule("allow", target)]})
        assert f'invalid policy: unsupported target "{shown}"' == str(caught.value)
    with pytest.raises(ApiPolicyError, match=r'^invalid policy: unsupported target "7"$'):
        parse_network_policy({"egress": [{"action": "allow", "target": 7}]})
