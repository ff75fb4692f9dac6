"""A sandbox's counts outlive its worker."""

import os
import signal
import sys
from pathlib import Path

import pytest

from gateway.budget import Budget
from gateway.dns.names import NameBudget
from gateway.ledger import SIZE, Ledger
from gateway.ledger_page import map_ledger
from policy.compiled import CompiledPolicy
from policy.facts import Scheme
from policy.names import HostPattern
from policy.rules import Action, DnsSettings, Endpoint, Limits, Precedence, Rule, RuleList
from runtimes.ledgers import Ledgers
from tests.gateway.states import Bound


def _rule(host: str) -> Rule:
    return Rule("r", Action.ALLOW, (HostPattern(host),), endpoints=(Endpoint(443, Scheme.HTTPS),))


def mapped(ledgers: Ledgers) -> Ledger:
    """Return the ledger as a new worker maps it."""
    return map_ledger(ledgers.open("sbx-1"))


@pytest.fixture(name="ledgers")
def _ledgers(tmp_path: Path) -> Ledgers:
    ledgers = Ledgers(tmp_path / "ledgers")
    ledgers.create("sbx-1")
    return ledgers


def test_what_was_sent_outlives_the_worker_that_sent_it(ledgers: Ledgers) -> None:
    first, second = (Budget(mapped(ledgers), Bound(Limits(bytes_out=100)), lambda: 1.0, lambda: None) for _ in range(2))
    assert first.send(90)
    assert (False, True) == (second.send(11), first.request() is not None)


def test_requests_are_not_filled_up_by_a_new_worker(ledgers: Ledgers) -> None:
    first, second = (
        Budget(mapped(ledgers), Bound(Limits(requests_per_minute=10)), lambda: 1.0, lambda: None) for _ in range(2)
    )
    assert 10 == sum(first.request() is None for _ in range(20))
    assert 0 == sum(second.request() is None for _ in range(20))


def test_reflections_go_on_being_counted(ledgers: Ledgers) -> None:
    mapped(ledgers).reflections += 7
    assert 7 == mapped(ledgers).reflections


def test_matches_go_on_being_counted_and_are_forgotten_at_a_rate(ledgers: Ledgers) -> None:
    for _ in range(10):
        mapped(ledgers).match(100.0, 0.5)
    assert 10 == mapped(ledgers).matches(100.0, 0.5)
    assert (7, 0) == (mapped(ledgers).matches(106.0, 0.5), mapped(ledgers).matches(1000.0, 0.5))


def test_distinct_names_of_a_former_worker_count_until_their_hour_is_over(ledgers: Ledgers) -> None:
    wild = RuleList("r", Precedence.DENY_WINS, rules=(_rule("*.zone.example"),))
    policy = CompiledPolicy("p", (wild,), dns=DnsSettings(unique_names=10))

    def admitted(names: NameBudget, prefix: str, count: int, now: float) -> int:
        hosts = [f"{prefix}{index}.zone.example" for index in range(count)]
        return sum(names.admit(policy, host, now) is None for host in hosts)

    assert 8 == admitted(NameBudget(mapped(ledgers)), "a", 8, 5000.0)
    assert 2 == admitted(NameBudget(mapped(ledgers)), "n", 9, 6000.0)
    assert 9 == admitted(NameBudget(mapped(ledgers)), "l", 9, 9000.0)


def test_a_count_is_kept_by_a_process_that_is_killed_right_after_it(ledgers: Ledgers) -> None:
    pid = os.fork()
    if pid == 0:
        mapped(ledgers).sent += 5
        os.kill(os.getpid(), signal.SIGKILL)
    assert signal.SIGKILL == os.WTERMSIG(os.waitpid(pid, 0)[1])
    assert 5 == mapped(ledgers).sent


def test_a_missing_page_is_not_made_again(ledgers: Ledgers) -> None:
    assert () == ledgers.remove("sbx-1")
    with pytest.raises(FileNotFoundError):
        ledgers.open("sbx-1")


def test_a_page_is_made_once(ledgers: Ledgers) -> None:
    with pytest.raises(FileExistsError):
        ledgers.create("sbx-1")


def test_what_is_no_page_is_refused() -> None:
    for size in (0, SIZE - 8, SIZE * 2):
        fd = os.memfd_create("ledger")
        os.ftruncate(fd, size)
        with pytest.raises(ValueError, match="one page"):
            map_ledger(fd)


def test_a_sweep_keeps_what_lives(ledgers: Ledgers) -> None:
    ledgers.create("sbx-2")
    assert () == ledgers.sweep(keep=frozenset({"sbx-2"}))
    os.close(ledgers.open("sbx-2"))
    with pytest.raises(FileNotFoundError):
        ledgers.open("sbx-1")


def test_a_beat_changes_the_page_and_no_count() -> None:
    """The number wraps at its maximum."""
    memory = bytearray(SIZE)
    ledger = Ledger(memory)
    for expected in (1, 2):
        ledger.beat()
        assert [expected] == [number for number in memoryview(memory).cast("Q") if number]
    place = memory.index(2)
    memory[place : place + 8] = b"\xff" * 8
    ledger.beat()
    assert bytes(SIZE) == memory


def test_the_descriptor_of_a_ledger_is_closed(ledgers: Ledgers) -> None:
    fd = ledgers.open("sbx-1")
    map_ledger(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_memory_of_another_size_is_no_ledger() -> None:
    for size in (0, SIZE - 8, SIZE + 8):
        with pytest.raises(ValueError, match="one page"):
            Ledger(bytearray(size))


@pytest.mark.parametrize("beats", [0, 2**63 - 1, 2**64 - 1])
def test_a_beat_changes_the_page_however_many_there_were(beats: int) -> None:
    page = bytearray(SIZE)
    page[7 * 8 : 8 * 8] = beats.to_bytes(8, sys.byteorder)
    Ledger(page).beat()
    assert ((beats + 1) % 2**64).to_bytes(8, sys.byteorder) == page[7 * 8 : 8 * 8]


def test_names_are_forgotten_when_their_window_is_over() -> None:
    ledger = Ledger.fresh()
    for now, names, since in ((5000.0, 1, 5000.0), (8599.9, 2, 5000.0), (8600.0, 1, 8600.0)):
        ledger.name(now, 3600.0)
        assert (names, since) == (ledger.names, ledger.names_since)


def test_tokens_are_those_that_were_set_last() -> None:
    ledger = Ledger.fresh()
    assert ledger.tokens is None and -1 == ledger.exhausted_at
    for tokens, at in ((5.0, 10.0), (4.0, 11.0), (9.0, 12.0), (9.0, 13.0)):
        ledger.refill(tokens, at)
        assert (tokens, at) == (ledger.tokens, ledger.refilled)
    ledger.refill(None, 14.0)
    assert ledger.tokens is None
