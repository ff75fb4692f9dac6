"""Counts of uses: what all leases permitted together never exceeds a limit, over any kill, reset and removal."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vault.budgets import MOST_SHARE, Budgets
from vault.conditions import UNLIMITED, UseLimits
from vault.keyring import Keyring
from vault.stores.directory import SealedDirectory

KEYRING = Keyring(bytes(range(32)))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[SealedDirectory]:
    """Make an empty directory of counts."""
    made = SealedDirectory(tmp_path / "budgets", KEYRING, "budgets")
    yield made
    made.close()


@given(st.integers(1, 300_000), st.lists(st.sampled_from(["one", "two"]), max_size=60))
def test_leases_together_permit_at_most_the_limit(most: int, sandboxes: list[str]) -> None:
    budgets, limits, permitted = Budgets(), UseLimits(uses=most), 0
    for sandbox in sandboxes:
        left = budgets.left("token", sandbox, limits)
        if not left:
            with pytest.raises(ValueError):
                budgets.take("token", sandbox, limits)
            break
        share = budgets.take("token", sandbox, limits)
        assert share is not None
        assert 1 <= share <= max(1, min(left // 1000, MOST_SHARE))
        permitted += share
    assert permitted == budgets.used("token")
    assert permitted <= most


def test_the_uses_of_a_small_limit_are_given_one_at_a_time() -> None:
    """So none is lost with a lease that ends early."""
    budgets, limits = Budgets(), UseLimits(uses=3)
    assert [1, 1, 1] == [budgets.take("token", sandbox, limits) for sandbox in ("one", "two", "one")]
    assert 0 == budgets.left("token", "two", limits)


def test_a_limit_of_each_sandbox_is_its_own_and_the_total_holds_beside_it() -> None:
    budgets, limits = Budgets(), UseLimits(uses=3, sandbox_uses=2)
    for sandbox in ("one", "one", "two"):
        assert 1 == budgets.take("token", sandbox, limits)
    assert (0, 0) == (budgets.left("token", "one", limits), budgets.left("token", "two", limits))
    assert 2 == budgets.left("other", "one", limits)


def test_a_secret_without_limits_is_not_counted(directory: SealedDirectory) -> None:
    budgets = Budgets(directory)
    assert (None, None) == (budgets.left("token", "one", UNLIMITED), budgets.take("token", "one", UNLIMITED))
    assert [] == directory.names()


def test_counts_outlive_the_process_until_they_are_reset(directory: SealedDirectory) -> None:
    limits = UseLimits(uses=2, sandbox_uses=2)
    Budgets(directory).take("token", "one", limits)
    again = Budgets(directory)
    assert (1, 1, 1) == (again.used("token"), again.left("token", "one", limits), again.left("token", "two", limits))
    again.forget("one")  # the sandbox was removed: the total stays
    assert (1, 1) == (Budgets(directory).used("token"), Budgets(directory).left("token", "one", limits))
    again.reset("token")
    assert (0, []) == (Budgets(directory).used("token"), directory.names())
    again.reset("never-counted")


def test_what_cannot_be_counted_is_not_given(directory: SealedDirectory, tmp_path: Path) -> None:
    budgets, limits = Budgets(directory), UseLimits(uses=2)
    blocked = tmp_path / "budgets" / "+token.sealed"
    blocked.mkdir()
    with pytest.raises(OSError):
        budgets.take("token", "one", limits)
    blocked.rmdir()
    assert 2 == budgets.left("token", "one", limits)


def test_counts_that_cannot_be_read_count_as_used_up(directory: SealedDirectory, tmp_path: Path) -> None:
    limits = UseLimits(uses=9)
    Budgets(directory).take("token", "one", limits)
    record = tmp_path / "budgets" / "=token.sealed"
    record.write_bytes(record.read_bytes()[:-1] + b"x")
    budgets = Budgets(directory)
    assert 0 == budgets.left("token", "one", limits)
    budgets.reset("token")
    assert 9 == budgets.left("token", "one", limits)
