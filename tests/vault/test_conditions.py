"""Which sandboxes a secret is for, and how often it may be used: values and their one file form."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vault.conditions import ANY_SANDBOX, UNLIMITED, Amount, ConditionError, Selectors, UseLimits, from_json, to_json
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
        {"max_bytes": 0},
        {"max_bytes": 1.5},
        {"max_bytes_per_sandbox": True},
        {"max_bytes_per_sandbox": 2**53},
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
    st.lists(st.none() | st.integers(1, 2**53 - 1), min_size=4, max_size=4),
)
def test_conditions_are_read_as_they_were_written(
    metadata: dict[str, str], images: list[str], numbers: list[int | None]
) -> None:
    """In files, and in the messages of a binding."""
    selectors, limits = Selectors.make(metadata, images), UseLimits(*numbers)
    assert (selectors, limits) == from_json(to_json(selectors, limits))
    binding = SecretBinding.make(["a.test"], selectors=selectors, limits=limits)
    assert binding == SecretBinding.from_json(binding.to_json())
    assert binding == SecretBinding.of(codec.decode(BindingForm, codec.encode(binding.form)))


def test_a_binding_of_an_older_vault_has_no_conditions() -> None:
    assert SecretBinding.make(["a.test"]) == SecretBinding.from_json({"hosts": ["a.test"]})
    assert not set(SecretBinding.make(["a.test"]).to_json()) & {"metadata", "images", "max_uses"}


@pytest.mark.parametrize(
    ("limits", "of_uses", "of_bytes"),
    [
        (UNLIMITED, False, False),
        (UseLimits(uses=1), True, False),
        (UseLimits(sandbox_uses=1), True, False),
        (UseLimits(sent=1), False, True),
        (UseLimits(sandbox_sent=1), False, True),
    ],
)
def test_what_is_limited_is_counted(limits: UseLimits, of_uses: bool, of_bytes: bool) -> None:
    assert (of_uses, of_bytes, of_uses or of_bytes) == (limits.of_uses, limits.of_bytes, limits.limited)


@pytest.mark.parametrize(
    ("amount", "size", "left"),
    [
        (Amount(), None, Amount()),
        (Amount(), 5, Amount()),
        (Amount(1), None, Amount(0)),
        (Amount(0), 5, None),
        (Amount(None, 5), 5, Amount(None, 0)),
        (Amount(None, 5), 6, None),
        (Amount(None, 5), None, None),
        (Amount(2, 5), 4, Amount(1, 1)),
        (Amount(0, 5), 4, None),
        (Amount(2, 3), 4, None),
    ],
)
def test_a_request_takes_one_use_and_its_bytes(amount: Amount, size: int | None, left: Amount | None) -> None:
    """`left` is None for a request that the amount does not cover."""
    assert (left is not None) == amount.covers(size)
    if left is not None:
        assert left == amount.less(size)


def test_bytes_are_added_to_a_number_of_bytes_only() -> None:
    assert Amount(1, 7) == Amount(1, 5).with_bytes(2)
    assert Amount(1, 5) == Amount(1, 5).with_bytes(None)
    assert Amount(1) == Amount(1).with_bytes(2)
