"""Counts of uses and bytes: what all leases permitted never exceeds a limit, over any kill, reset and removal."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vault.budgets import MOST_BYTES, MOST_USES, Budgets
from vault.conditions import UNLIMITED, Amount, UseLimits
from vault.keyring import Keyring
from vault.stores.directory import SealedDirectory
from wire.api.vaultd import Used

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
        left = budgets.left("token", sandbox, limits).uses
        if not left:
            with pytest.raises(ValueError):
                budgets.take("token", sandbox, limits, None)
            break
        share = budgets.take("token", sandbox, limits, None)
        assert share.uses is not None
        assert 1 <= share.uses <= max(1, min(left // 1000, MOST_USES))
        assert share.sent is None
        permitted += share.uses
    assert Used(permitted, 0) == budgets.used("token")
    assert permitted <= most


@given(
    st.integers(1, 2**40),
    st.lists(st.tuples(st.sampled_from(["one", "two"]), st.integers(1, 2**22) | st.integers(1, 2**40)), max_size=40),
)
def test_leases_together_permit_at_most_the_bytes_of_the_limit(most: int, requests: list[tuple[str, int]]) -> None:
    """Each has the bytes that its request needs, and not many more."""
    budgets, limits, permitted = Budgets(), UseLimits(sent=most), 0
    for sandbox, size in requests:
        left = budgets.left("token", sandbox, limits).sent
        assert left is not None
        if size > left:
            with pytest.raises(ValueError):
                budgets.take("token", sandbox, limits, size)
            continue
        share = budgets.take("token", sandbox, limits, size)
        assert share.sent is not None
        assert size <= share.sent <= max(size, min(left // 1000, MOST_BYTES))
        assert share.uses is None
        permitted += share.sent
    assert Used(0, permitted) == budgets.used("token")
    assert permitted <= most


def test_the_uses_of_a_small_limit_are_given_one_at_a_time() -> None:
    """So none is lost with a lease that ends early."""
    budgets, limits = Budgets(), UseLimits(uses=3)
    assert [1, 1, 1] == [budgets.take("token", sandbox, limits, None).uses for sandbox in ("one", "two", "one")]
    assert Amount(0) == budgets.left("token", "two", limits)


def test_a_limit_of_each_sandbox_is_its_own_and_the_total_holds_beside_it() -> None:
    budgets, limits = Budgets(), UseLimits(uses=3, sandbox_uses=2)
    for sandbox in ("one", "one", "two"):
        assert Amount(1) == budgets.take("token", sandbox, limits, None)
    assert [Amount(0)] * 2 == [budgets.left("token", sandbox, limits) for sandbox in ("one", "two")]
    assert Amount(2) == budgets.left("other", "one", limits)


def test_so_is_a_limit_in_bytes() -> None:
    budgets, limits = Budgets(), UseLimits(sent=300, sandbox_sent=200)
    assert Amount(None, 150) == budgets.take("token", "one", limits, 150)
    assert [50, 150] == [budgets.left("token", sandbox, limits).sent for sandbox in ("one", "two")]
    assert budgets.refusal("token", "one", limits, 50) is None
    assert "the secret was sent with as many bytes as its limits allow" == budgets.refusal("token", "one", limits, 51)
    assert Amount(None, 150) == budgets.take("token", "two", limits, 150)
    assert budgets.refusal("token", "three", limits, 1)


def test_a_secret_with_limits_of_both_kinds_is_leased_for_one_request() -> None:
    """What is left of one kind is not held back by a lease without the other."""
    budgets, limits = Budgets(), UseLimits(uses=2**40, sent=2**40)
    assert Amount(1, 7) == budgets.take("token", "one", limits, 7)
    assert Amount(MOST_USES) == budgets.take("token", "one", UseLimits(uses=2**40), 7)
    assert Amount(None, MOST_BYTES) == budgets.take("token", "one", UseLimits(sent=2**40), 7)


def test_a_request_of_unknown_length_has_no_limit_in_bytes() -> None:
    budgets = Budgets()
    assert budgets.refusal("token", "one", UseLimits(uses=1), None) is None
    for limits in (UseLimits(sent=2**40), UseLimits(sandbox_sent=2**40)):
        assert "the length of this request is not known" in str(budgets.refusal("token", "one", limits, None))
        with pytest.raises(ValueError):
            budgets.take("token", "one", limits, None)
    assert Used(0, 0) == budgets.used("token")


def test_a_secret_without_limits_is_not_counted(directory: SealedDirectory) -> None:
    budgets = Budgets(directory)
    assert Amount() == budgets.left("token", "one", UNLIMITED) == budgets.take("token", "one", UNLIMITED, None)
    assert [] == directory.names()


def test_counts_outlive_the_process_until_they_are_reset(directory: SealedDirectory) -> None:
    limits = UseLimits(uses=2, sandbox_uses=2, sent=100, sandbox_sent=90)
    Budgets(directory).take("token", "one", limits, 60)
    again = Budgets(directory)
    assert (Used(1, 60), Amount(1, 30), Amount(1, 40)) == (
        again.used("token"),
        again.left("token", "one", limits),
        again.left("token", "two", limits),
    )
    again.forget("one")  # the sandbox was removed: the total stays
    assert (Used(1, 60), Amount(1, 40)) == (
        Budgets(directory).used("token"),
        Budgets(directory).left("token", "one", limits),
    )
    again.reset("token")
    assert (Used(0, 0), []) == (Budgets(directory).used("token"), directory.names())
    again.reset("never-counted")


@pytest.mark.parametrize("limits", [UseLimits(sandbox_uses=2), UseLimits(sandbox_sent=90)])
def test_a_removed_sandbox_leaves_no_count_of_its_own(directory: SealedDirectory, limits: UseLimits) -> None:
    budgets = Budgets(directory)
    budgets.take("token", "one", limits, 60)
    budgets.forget("one")
    assert budgets.left("token", "two", limits) == Budgets(directory).left("token", "one", limits)
    assert b'"one"' not in directory.read("token")[1]


def test_counts_of_a_version_without_limits_in_bytes_are_read(directory: SealedDirectory) -> None:
    directory.write("token", b"{}", b'{"secret": "token", "total": 3, "sandboxes": {"one": 2}}')
    budgets = Budgets(directory)
    assert (Used(3, 0), Amount(1, 5)) == (
        budgets.used("token"),
        budgets.left("token", "one", UseLimits(sandbox_uses=3, sent=5)),
    )


def test_what_cannot_be_counted_is_not_given(directory: SealedDirectory, tmp_path: Path) -> None:
    budgets, limits = Budgets(directory), UseLimits(uses=2)
    blocked = tmp_path / "budgets" / "+token.sealed"
    blocked.mkdir()
    with pytest.raises(OSError):
        budgets.take("token", "one", limits, None)
    blocked.rmdir()
    assert Amount(2) == budgets.left("token", "one", limits)


def test_counts_that_cannot_be_read_count_as_used_up(directory: SealedDirectory, tmp_path: Path) -> None:
    limits = UseLimits(uses=9)
    Budgets(directory).take("token", "one", limits, None)
    record = tmp_path / "budgets" / "=token.sealed"
    whole = record.read_bytes()
    record.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    budgets = Budgets(directory)
    assert Amount(0) == budgets.left("token", "one", limits)
    assert Amount(None, 0) == budgets.left("token", "one", UseLimits(sandbox_sent=9))
    budgets.reset("token")
    assert Amount(9) == budgets.left("token", "one", limits)
