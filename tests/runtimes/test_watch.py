"""The differences that count as a change: a pure comparison, without a namespace."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from runtimes.alarms import Alarms, Breach
from runtimes.checks.watch import SlotReference, compare_gateway, compare_sandbox, in_turn
from runtimes.daemons import Daemons
from wire.api.auditd import Accepted, Entry, Record

GATEWAY = frozenset({"link gw0 number 2 up", "address 192.0.2.1/30 on link 2", "setting net/ipv4/ip_forward is 0"})
SANDBOX = frozenset({"link eth0 number 2 up", "address 192.0.2.2/30 on link 2", "route any/0 on link 2"})
GOLDEN = SlotReference(GATEWAY, SANDBOX, "")


def test_what_was_made_is_right() -> None:
    assert None is compare_gateway(GOLDEN, GATEWAY)
    assert None is compare_sandbox(GOLDEN, SANDBOX)


@pytest.mark.parametrize(
    ("came", "rule"),
    [
        ("link eth1 number 3 up", "isolation.link"),
        ("address 10.0.0.1/24 on link 2", "isolation.address"),
        ("route any/0 by 10.0.0.2 on link 2", "isolation.route"),
        ("policy of family 2", "isolation.policy"),
        ("setting net/ipv4/ip_forward is 1", "isolation.setting"),
    ],
)
def test_an_arrival_is_reported_on_both_sides(came: str, rule: str) -> None:
    for finding in (compare_gateway(GOLDEN, GATEWAY | {came}), compare_sandbox(GOLDEN, SANDBOX | {came})):
        assert finding is not None
        assert rule == finding.rule
        assert came in finding.reason


@pytest.mark.parametrize("came", ["neighbour 192.0.2.3 at 02 on link 2, static", "queue clsact on link 2 below 1"])
def test_neighbours_and_queues_count_at_the_gateway_only(came: str) -> None:
    assert None is compare_sandbox(GOLDEN, SANDBOX | {came})
    assert compare_gateway(GOLDEN, GATEWAY | {came}) is not None


def test_what_runsc_takes_from_its_side_is_no_change() -> None:
    assert None is compare_sandbox(GOLDEN, frozenset({"link eth0 number 2 up"}))


@pytest.mark.parametrize("gone", sorted(GATEWAY))
def test_at_the_gateway_nothing_may_be_missing(gone: str) -> None:
    finding = compare_gateway(GOLDEN, GATEWAY - {gone})
    assert finding is not None
    assert f"missing {gone}" in finding.reason


def test_a_link_may_not_go_from_the_sandbox() -> None:
    assert compare_sandbox(GOLDEN, SANDBOX - {"link eth0 number 2 up"}) is not None


@pytest.mark.parametrize("seen", [[], ["queue noqueue on link 2 below 1"], ["queue tbf on link 2 below 1 with 02"]])
def test_the_limit_of_a_link_may_not_go_or_change(seen: list[str]) -> None:
    """At both ends."""
    limit = "queue tbf on link 2 below 1 with 01"
    golden = SlotReference(GATEWAY | {limit}, SANDBOX | {limit}, "")
    assert None is compare_sandbox(golden, SANDBOX | {limit})
    for finding in (compare_gateway(golden, GATEWAY | {*seen}), compare_sandbox(golden, SANDBOX | {*seen})):
        assert finding is not None
        assert "isolation.queue" == finding.rule


def test_the_cause_is_named_before_its_consequences_and_the_reason_is_bounded() -> None:
    consequences = {f"route 10.0.{number}.0/24 on link 3" for number in range(200)}
    finding = compare_gateway(GOLDEN, GATEWAY | consequences | {"link eth1 number 3 up"})
    assert finding is not None
    assert "isolation.link" == finding.rule
    assert finding.reason.startswith("gateway side: unexpected link eth1")
    assert "198 more" in finding.reason
    assert len(finding.reason) <= 400


class Auditd:
    """An audit log that refuses until the test allows records, and keeps those that it accepted."""

    def __init__(self) -> None:
        self.up = False
        self.taken: list[Entry] = []

    async def ask(self, request: Record, timeout: float) -> Accepted:
        if not self.up:
            raise ConnectionError("down")
        self.taken.append(request.entry)
        return Accepted(len(self.taken))


async def test_alarms_wait_for_auditd_in_their_order_and_what_did_not_fit_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runtimes.alarms._RETRY_SECONDS", 0.01)
    auditd = Auditd()
    alarms = Alarms(cast(Daemons, SimpleNamespace(client=lambda _name: auditd)))
    alarms.start()
    for number in range(300):
        alarms.report(Breach("isolation.link", str(number)), f"sandbox-{number}")
    await asyncio.sleep(0.05)
    assert [] == auditd.taken
    auditd.up = True
    await alarms.stop()

    assert [str(number) for number in range(256)] == [item.fields["reason"] for item in auditd.taken]
    assert [44] == [item.fields["count"] for item in auditd.taken if "count" in item.fields]
    assert {("alarm", "deny")} == {(item.kind, item.decision) for item in auditd.taken}


@pytest.mark.parametrize(
    ("number", "most", "every", "rounds"),
    [(1, 24, 1, 1), (24, 24, 1, 1), (500, 24, 1, 21), (5, 2, 20, 20), (500, 2, 20, 250)],
)
def test_each_slot_has_its_turn_and_no_round_has_too_many(number: int, most: int, every: int, rounds: int) -> None:
    turn, seen = 0.0, []
    for _ in range(rounds):
        places, turn = in_turn(turn, number, most, every)
        assert len(places) <= most
        seen += places
    assert set(range(number)) == set(seen)
    assert len(seen) <= number + most


def test_a_turn_continues_when_slots_come_and_go() -> None:
    _, turn = in_turn(0.0, 100, 24)
    assert frozenset({0, 1, 2}) == in_turn(turn, 3, 24)[0]
    assert frozenset() == in_turn(turn, 0, 24)[0]


def test_settings_are_compared_only_if_they_were_read() -> None:
    assert frozenset() == GOLDEN.of_gateway(state=False, settings=False)
    assert GATEWAY == GOLDEN.of_gateway(state=True, settings=True)
    assert {"setting net/ipv4/ip_forward is 0"} == GOLDEN.of_gateway(state=False, settings=True)
    assert GATEWAY - {"setting net/ipv4/ip_forward is 0"} == GOLDEN.of_gateway(state=True, settings=False)
