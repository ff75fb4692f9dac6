"""The rulesets, compared as a whole with reviewed files. To write one again: SALLYPORT_WRITE_GOLDEN=1."""

import os
import re
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from audit.records import record
from policy.addresses import _SPECIAL, dialable
from runtimes.net.drops import _record
from runtimes.net.nft import DROPS, MALFORMED, GuardPlan, render_floor, render_gateway, render_guard, rules_digest
from runtimes.net.plan import PLAN, slot_plan
from wire.gateway_limits import GatewayLimits

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


_RULES = re.findall(r"ip6? daddr \{ (.*) \} counter reject", render_guard(GuardPlan(1000, 1001), "owner"))
_CLOSED = [ip_network(text) for rule in _RULES for text in rule.split(", ")]
_EDGES = [
    type(network.network_address)(number)
    for network in (*_CLOSED, *(ip_network(text) for text, _ in _SPECIAL))
    for first, last in [(int(network.network_address), int(network.broadcast_address))]
    for number in (first - 1, first, last, last + 1)
    if 0 <= number < 1 << network.max_prefixlen
]
_ISATAP = st.builds(
    lambda network, bits, inner: IPv6Address(network << 64 | bits << 32 | inner),
    st.integers(0, (1 << 64) - 1) | st.just(0x2606280002200001),
    st.sampled_from((0x5EFE, 0x2005EFE, 0x1005EFE)),
    st.integers(0, (1 << 32) - 1),
)


def _guard_closes(address: IPv4Address | IPv6Address) -> bool:
    isatap = address.version == 6 and int(address) >> 32 & 0xFDFFFFFF == 0x5EFE
    return isatap or any(address in network for network in _CLOSED)


def _classifier_refuses(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        return True  # a packet to it is IPv4
    return dialable(address) is not None


def test_the_guard_closes_at_each_edge_what_the_classifier_refuses() -> None:
    assert [] == [address for address in _EDGES if _guard_closes(address) is not _classifier_refuses(address)]


@given(st.ip_addresses(v=4) | st.ip_addresses(v=6) | _ISATAP)
def test_the_guard_closes_what_the_classifier_refuses_and_nothing_else(address: IPv4Address | IPv6Address) -> None:
    assert _guard_closes(address) is _classifier_refuses(address)


def test_the_guard_refuses_no_dial_that_a_worker_permits() -> None:
    """Each of a dial's four attempts counts. Narrower limits of the workers do not narrow the guard."""
    wide = _GUARD.widened(GatewayLimits(connections=4096, dial_rate=2000))
    assert (8192, 8000) == (wide.connections, wide.rate)
    assert "limit rate over 8000/second burst 16000 packets" in render_guard(wide, "owner")
    assert "ct count over 8192" in render_guard(wide, "owner")
    assert _GUARD == _GUARD.widened(GatewayLimits()) == _GUARD.widened(GatewayLimits(connections=1, dial_rate=1))


def test_slots_with_other_limits_have_another_digest() -> None:
    other = slot_plan(GatewayLimits(connection_rate=2000))
    assert "limit rate over 2000/second burst 4000 packets" in render_gateway(other)
    slow, slower = (slot_plan(GatewayLimits(), bandwidth) for bandwidth in (2_000_000, 1_000_000))
    assert rules_digest(PLAN) == rules_digest(slot_plan(GatewayLimits()))
    assert 4 == len({rules_digest(plan) for plan in (PLAN, other, slow, slower)})
