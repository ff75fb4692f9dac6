"""Which sandboxes a secret is for, and how often it may be used: values and their one file form."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vault.conditions import ANY_SANDBOX, UNLIMITED, ConditionError, Selectors, UseLimits, from_json, to_json
from vault.grants import GrantError, SecretBinding
from wire import codec
from wire.api.vaultd import BindingForm

TEAM = Selectors.make({"team": "a", "org/stage": "live"}, ["sallyport/base", "sha256:" + "0" * 64])


def test_a_secret_without_conditions_is_for_every_sandbox() -> None:
    assert ANY_SANDBOX.refusal({}, frozenset()) is None
    assert not UNLIMITED.limited


@pytest.mark.parametrize(
    ("metadata", "images", "fits"),
    [
        ({"team": "a", "org/stage": "live"}, {"sallyport/base"}, True),
        ({"team": "a", "org/stage": "live", "more": "x"}, {"other", "sha256:" + "0" * 64}, True),
        ({"team": "a"}, {"sallyport/base"}, False),
        ({"team": "A", "org/stage": "live"}, {"sallyport/base"}, False),
        ({"team": "", "org/stage": "live"}, {"sallyport/base"}, False),
        ({"team": "a", "org/stage": "live"}, set(), False),
        ({"team": "a", "org/stage": "live"}, {"sallyport/base2"}, False),
    ],
)
def test_every_pair_and_one_image_must_be_the_sandboxs(metadata: dict[str, str], images: set[str], fits: bool) -> None:
    assert fits == (TEAM.refusal(metadata, frozenset(images)) is None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"metadata": {"a b": "x"}},
        {"metadata": {"a": "x y"}},
        {"metadata": {"a": 5}},
        {"metadata": ["a"]},
        {"metadata": {f"k{number}": "" for number in range(65)}},
        {"images": ["-x"]},
        {"images": [""]},
        {"images": "base"},
        {"max_uses": 0},
        {"max_uses": True},
        {"max_uses": "5"},
        {"max_uses_per_sandbox": -1},
        {"max_uses_per_sandbox": 2**53},
    ],
)
def test_a_condition_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    """An empty or mistyped condition never means "any"."""
    with pytest.raises(ConditionError):
        from_json(wrong)
    with pytest.raises(GrantError):
        SecretBinding.from_json({"hosts": ["a.test"], **wrong})


TEXT = st.text("ab.-_", max_size=5)


@given(
    st.dictionaries(st.text("ab/", min_size=1, max_size=4), TEXT, max_size=4),
    st.lists(st.text("ab:", max_size=4).map(lambda text: f"x{text}"), max_size=3),
    st.none() | st.integers(1, 2**53 - 1),
    st.none() | st.integers(1, 2**53 - 1),
)
def test_conditions_are_read_as_they_were_written(
    metadata: dict[str, str], images: list[str], uses: int | None, sandbox_uses: int | None
) -> None:
    """In files, and in the messages of a binding."""
    selectors, limits = Selectors.make(metadata, images), UseLimits(uses, sandbox_uses)
    assert (selectors, limits) == from_json(to_json(selectors, limits))
    binding = SecretBinding.make(["a.test"], selectors=selectors, limits=limits)
    assert binding == SecretBinding.from_json(binding.to_json())
    assert binding == SecretBinding.of(codec.decode(BindingForm, codec.encode(binding.form)))


def test_a_binding_of_an_older_vault_has_no_conditions() -> None:
    assert SecretBinding.make(["a.test"]) == SecretBinding.from_json({"hosts": ["a.test"]})
    assert not set(SecretBinding.make(["a.test"]).to_json()) & {"metadata", "images", "max_uses"}
