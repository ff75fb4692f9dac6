"""Any stored row can be enforced."""

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lifecycle.egress.credential_vault import CredentialVault, create
from lifecycle.sandboxes.registry import Sandbox, State
from lifecycle.sandboxes.stored import secrets, stored
from policy.compile import Part, enforce
from policy.decision import Deny, decide_flow
from policy.document import PolicyDocument
from policy.facts import FlowFacts, Scheme

NETWORK_POLICY = {
    "egress": [{"action": "allow", "target": "api.example.org"}, {"action": "deny", "target": "10.0.0.0/8"}],
    "defaultAction": "deny",
}
VAULT = create(
    {
        "credentials": [{"name": "one", "source": {"type": "inline", "value": "a value"}}],
        "bindings": [
            {
                "name": name,
                "match": {"hosts": ["api.example.org"], "paths": [f"/{name}/*"]},
                "auth": {"type": "bearer", "credential": "one"},
            }
            for name in ("a", "b")
        ],
    }
).vault.to_json()

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def row(network_policy: Any, vault: Any) -> Sandbox:
    return Sandbox(
        "sbx-1",
        State.RUNNING,
        "",
        "",
        0.0,
        0.0,
        None,
        "base",
        (),
        "runc",
        network_policy=network_policy,
        vault=vault,
    )


@st.composite
def damaged(draw: st.DrawFn, document: dict[str, Any]) -> Any:
    """Return the document with one value replaced or removed."""
    made = copy.deepcopy(document)
    here: Any = made
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        if not keys:
            return made
        key = draw(st.sampled_from(keys))
        if isinstance(here[key], dict | list) and draw(st.booleans()):
            here = here[key]
            continue
        if draw(st.booleans()):
            here[key] = draw(values)
        else:
            del here[key]
        return made


@given(st.just(NETWORK_POLICY) | damaged(NETWORK_POLICY) | values, st.just(VAULT) | damaged(VAULT) | values)
def test_what_cannot_be_read_is_out_of_force_and_named(network_policy: Any, vault: Any) -> None:
    """A damaged row gives no secret, and allows nothing, beyond those of the undamaged row."""
    read = stored(row(network_policy, vault))
    names = secrets(row(network_policy, vault))
    policy, _ = enforce(PolicyDocument(), None, read.network_policy, read.bindings)

    if any(item.part is Part.NETWORK_POLICY for item in read.dropped):
        assert isinstance(decide_flow(policy, FlowFacts("api.example.org", 443, Scheme.HTTPS)), Deny)
    assert all(item.reason for item in read.dropped)
    assert (names is None) == any(item.part is Part.VAULT for item in read.dropped)
    used = {f"inline:{credential}" for binding in read.bindings for credential in binding.credentials}
    assert used <= set(names or ())


def test_a_whole_row_is_read_whole() -> None:
    """A control for the test above."""
    read = stored(row(NETWORK_POLICY, VAULT))
    assert ((), CredentialVault.from_json(VAULT)) == (read.dropped, read.vault)
    assert read.network_policy is not None and NETWORK_POLICY == read.network_policy.to_wire()
    assert ["inline:1/one"] == secrets(row(NETWORK_POLICY, VAULT))
