"""A sandbox's selection survives its JSON form, and selects nothing more."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from policy.api import parse_network_policy
from policy.bindings import parse_binding
from policy.load import load_text
from policy.rules import Action
from policy.selection import NOTHING, Selection

LOOSE = """
version: 1
policies:
  team:
    rules: [{id: api, host: api.example.org, inject: {secret: stored, as: bearer}}]
"""
AUTHS: tuple[dict[str, Any], ...] = (
    {"type": "bearer", "credential": "1/a b"},
    {"type": "basic", "credential": "2/x"},
    {"type": "apiKey", "name": "x-key", "credential": "3/y"},
    {"type": "customHeaders", "headers": [{"name": "x-1", "credential": "1/a"}, {"name": "x-2", "credential": "1/b"}]},
    {"type": "passthrough"},
)
_names = st.sampled_from(["a.example", "*.b.example", "10.0.0.0/8", "*", "C.example"])


@given(
    st.none() | st.text(min_size=1, max_size=40),
    st.none() | st.lists(st.tuples(st.sampled_from(["allow", "deny"]), _names), max_size=8),
    st.lists(st.sampled_from(AUTHS), max_size=4),
)
def test_what_is_sent_is_what_was_selected(
    name: str | None, rules: list[tuple[str, str]] | None, auths: list[dict[str, Any]]
) -> None:
    """Two processes that read one selection compile the same policy."""
    bindings = tuple(
        parse_binding({"name": f"b{number}", "match": {"hosts": [f"h{number}.example"]}, "auth": auth})
        for number, auth in enumerate(auths)
    )
    policy = None
    if rules is not None:
        policy = parse_network_policy(
            {"egress": [{"action": action, "target": target} for action, target in rules], "defaultAction": "allow"}
        )
    selection = Selection(name, policy, bindings)
    assert selection == Selection.from_json(json.loads(selection.to_text()))


def test_the_selection_of_nothing_allows_what_the_operator_always_allows_only() -> None:
    document = load_text(LOOSE + "always_allow: [time.example.org]\n")
    policy, dropped = NOTHING.compiled(document)
    assert ((), ("time.example.org",), ()) == (policy.rules, policy.always_allow, dropped)
    assert Action.DENY is policy.default_action
