"""The one address plan, and the limits of a slot."""

from dataclasses import replace
from ipaddress import ip_network

import pytest

from policy.rules import DnsSettings
from runtimes.net.plan import GATEWAY_SYSCTLS, PLAN, RESOLV_CONF, SANDBOX_SYSCTLS, hosts_file, slot_plan
from wire.gateway_limits import GatewayLimits


def test_both_ends_are_the_two_hosts_of_one_documentation_network() -> None:
    network = ip_network(f"{PLAN.gateway}/{PLAN.prefix}", strict=False)
    assert [PLAN.gateway, PLAN.inside] == list(network.hosts())
    assert network.subnet_of(ip_network("192.0.2.0/24"))


def test_neither_namespace_forwards_or_speaks_ipv6() -> None:
    for sysctls in (GATEWAY_SYSCTLS, SANDBOX_SYSCTLS):
        assert sysctls["net/ipv4/ip_forward"] == "0"
        assert sysctls["net/ipv6/conf/all/disable_ipv6"] == "1"
        assert sysctls["net/ipv6/conf/default/disable_ipv6"] == "1"


def test_the_gateway_is_the_only_resolver() -> None:
    assert [line for line in RESOLV_CONF.splitlines() if "nameserver" in line] == ["nameserver 192.0.2.1"]


def test_a_sandbox_finds_its_own_name() -> None:
    assert "192.0.2.2 sbx-1" in hosts_file("sbx-1").splitlines()


def test_no_policy_promises_more_questions_than_the_kernel_lets_through() -> None:
    DnsSettings(query_rate=PLAN.datagram_rate, query_burst=2 * PLAN.datagram_rate)
    for one_more in ({"query_rate": PLAN.datagram_rate + 1}, {"query_burst": 2 * PLAN.datagram_rate + 1}):
        with pytest.raises(ValueError, match="query_"):
            DnsSettings(**one_more)


def test_the_operators_limits_change_the_rate_and_the_number_of_connections_only() -> None:
    assert PLAN == slot_plan(GatewayLimits())
    wide = slot_plan(GatewayLimits(connections=4096, connection_rate=2000))
    assert replace(PLAN, syn_rate=2000, max_connections=4 * 4096) == wide
    narrow = slot_plan(GatewayLimits(connections=1, connection_rate=1))
    assert replace(PLAN, syn_rate=1) == narrow
    slow = slot_plan(GatewayLimits(), 5_000_000)
    assert replace(PLAN, bandwidth=5_000_000) == slow
    assert (500_000, 128 * 1024) == (slow.burst, replace(PLAN, bandwidth=64 * 1024).burst)
