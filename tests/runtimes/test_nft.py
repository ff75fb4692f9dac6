"""The rulesets, compared as a whole with reviewed files. To write one again: SALLYPORT_WRITE_GOLDEN=1."""

import os
import re
from ipaddress import ip_address, ip_network
from pathlib import Path

from audit.records import record
from runtimes.net.drops import _record
from runtimes.net.nft import DROPS, MALFORMED, GuardPlan, render_floor, render_gateway, render_guard
from runtimes.net.plan import PLAN

_GOLDEN = Path(__file__).parent / "golden"
_GUARD = GuardPlan(
    first_uid=700001000,
    last_uid=700005095,
    resolvers=((ip_address("10.0.0.53"), 53), (ip_address("fd00::53"), 5353)),
    allowed=(ip_network("10.20.0.0/16"), ip_network("fd00:20::/64")),
)


def _compare(name: str, text: str) -> None:
    path = _GOLDEN / name
    if os.environ.get("SALLYPORT_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text


def test_the_gateway_ruleset_is_the_reviewed_one() -> None:
    _compare("gateway.nft", render_gateway(PLAN))


def test_every_counter_of_a_slot_has_a_record_that_the_log_takes() -> None:
    """Every drop is also in a named counter, except those that no frame of a sandbox can reach."""
    text = render_gateway(PLAN)
    named = set(re.findall(r"counter (\w+) \{", text))
    assert named == DROPS.keys() - {MALFORMED}
    assert named == set(re.findall(r'counter name "(\w+)"', text))
    for name in DROPS:
        item = _record("sbx-1", name, 3)
        assert 3 == record(item.kind, item.decision, **item.fields)["count"]
    unnamed = [line.strip() for line in text.splitlines() if line.endswith("counter drop")]
    assert ['iifname != "gw0" counter drop', "counter drop", 'oifname != "gw0" counter drop', "counter drop"] == unnamed


def test_the_guard_ruleset_is_the_reviewed_one() -> None:
    _compare("guard.nft", render_guard(_GUARD, "owner"))


def test_every_base_chain_of_a_slot_drops_by_default() -> None:
    hooks = re.findall(r"type .* hook .*", render_gateway(PLAN))
    assert len(hooks) == 6
    assert [hook for hook in hooks if "policy drop;" not in hook] == []


def test_a_slot_has_no_rule_that_accepts_what_is_forwarded() -> None:
    forward = re.search(r"chain forward \{(.*?)\n\t\}", render_gateway(PLAN), re.S)
    assert forward is not None
    assert "accept" not in forward.group(1)


def test_the_floor_ruleset_is_the_reviewed_one() -> None:
    _compare("floor.nft", render_floor(_GUARD))


def test_pinholes_and_allowed_ranges_come_before_the_closed_ones() -> None:
    text = render_guard(_GUARD, "owner")
    order = [text.index(part) for part in ("10.0.0.53", "10.20.0.0/16", "fib daddr", "127.0.0.0/8")]
    assert order == sorted(order)


def test_the_guard_accepts_nothing_for_what_a_flow_was_before() -> None:
    text = render_guard(_GUARD, "owner")
    assert "established" not in text
    assert 1 == text.count("accept\n")


def test_a_guard_without_pinholes_closes_every_private_range() -> None:
    text = render_guard(GuardPlan(1000, 1001), "owner")
    assert "daddr 10.0.0.53" not in text
    for closed in ("10.0.0.0/8", "169.254.0.0/16", "100.64.0.0/10", "fc00::/7", "fe80::/10", "64:ff9b::/96"):
        assert closed in text
