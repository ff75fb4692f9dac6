"""The budget of requests refills with time, that of bytes never does. Excess is refused before it happens."""

from dataclasses import dataclass, field

import pytest

from gateway.budget import Budget, Over
from gateway.ledger import Ledger
from policy.rules import Limits

SPENT = Over("the sandbox has sent as many bytes as its policy allows", None)


@dataclass
class Account:
    """A budget whose clock and limits the test sets."""

    limits: Limits | None
    now: float = 1000.0
    spent: list[float] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger.fresh)

    def __post_init__(self) -> None:
        self.budget = Budget(self.ledger, self, lambda: self.now, lambda: self.spent.append(self.now))

    def requests(self, count: int) -> int:
        """Return how many of `count` requests are allowed now."""
        return sum(self.budget.request() is None for _ in range(count))


def test_without_a_policy_nothing_passes() -> None:
    account = Account(None)
    assert Over("no policy is active yet", None) == account.budget.request()
    assert not account.budget.send(1)


def test_without_limits_everything_passes() -> None:
    account = Account(Limits())
    assert 10_000 == account.requests(10_000)
    assert account.budget.send(1 << 50)
    assert [] == account.spent


def test_a_minutes_requests_pass_at_once_and_come_back_evenly() -> None:
    account = Account(Limits(requests_per_minute=60))
    assert 60 == account.requests(100)
    account.now += 0.5
    assert 0 == account.requests(1)
    account.now += 0.5
    assert 1 == account.requests(2)
    account.now += 3600
    assert 60 == account.requests(100)


@pytest.mark.parametrize(("rate", "elapsed", "wait"), [(60, 0.0, 1), (1, 0.0, 60), (1, 30.5, 30), (7, 0.0, 9)])
def test_after_the_named_wait_one_request_passes_and_not_a_second_earlier(rate: int, elapsed: float, wait: int) -> None:
    account = Account(Limits(requests_per_minute=rate))
    account.requests(rate)
    account.now += elapsed
    over = account.budget.request()
    assert Over(f"more than {rate} requests in a minute", wait) == over
    account.now += wait - 1
    assert (0 if wait > 1 else over is None) == account.requests(1)
    account.now += 1
    assert 1 == account.requests(1)


def test_a_tighter_policy_takes_effect_at_once_and_a_wider_one_does_not_fill_the_bucket() -> None:
    account = Account(Limits(requests_per_minute=60))
    account.limits = Limits(requests_per_minute=2)
    assert 2 == account.requests(10)
    account.limits = Limits(requests_per_minute=600)
    assert 0 == account.requests(10)
    account.now += 1
    assert 10 == account.requests(20)


def test_bytes_pass_up_to_the_limit_and_the_chunk_beyond_ends_it() -> None:
    account = Account(Limits(bytes_out=100))
    assert account.budget.send(60)
    assert account.budget.send(40)
    assert (None, []) == (account.budget.request(), account.spent)
    assert not account.budget.send(1)
    assert [1000.0] == account.spent


def test_after_the_end_a_smaller_chunk_does_not_pass_and_the_end_is_reported_once() -> None:
    account = Account(Limits(bytes_out=100))
    assert account.budget.send(90)
    assert [False, False] == [account.budget.send(11), account.budget.send(1)]
    assert [1000.0] == account.spent
    assert SPENT == account.budget.request()


def test_time_brings_no_byte_back_but_a_wider_policy_does() -> None:
    account = Account(Limits(bytes_out=100))
    account.budget.send(90)
    account.budget.send(11)
    account.now += 1e6
    assert not account.budget.send(1)
    account.limits = Limits(bytes_out=101)
    assert (None, True, False) == (account.budget.request(), account.budget.send(11), account.budget.send(1))
    assert [account.now] == account.spent[1:]
    account.limits = Limits()
    assert account.budget.send(1)


def test_a_policy_that_allows_less_than_was_sent_ends_it() -> None:
    account = Account(Limits())
    account.budget.send(90)
    account.limits = Limits(bytes_out=50)
    assert (SPENT, False) == (account.budget.request(), account.budget.send(1))
    assert [1000.0] == account.spent


def test_a_policy_without_a_rate_forgets_what_was_taken_under_one() -> None:
    account = Account(Limits(requests_per_minute=2))
    assert 2 == account.requests(3)
    account.limits = Limits()
    assert 1 == account.requests(1)
    account.limits = Limits(requests_per_minute=2)
    assert 2 == account.requests(3)


def test_what_was_sent_within_the_limit_ends_nothing() -> None:
    """Down to a limit of one byte."""
    account = Account(Limits(bytes_out=1))
    assert [True, True, True, False, False] == [account.budget.send(count) for count in (0, 1, 0, 1, 0)]
    assert [1000.0] == account.spent
    assert SPENT == account.budget.request()
