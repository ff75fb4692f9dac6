"""The constants of all workers, and a configuration, are accepted completely or not at all."""

import json
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any

import pytest

from gateway.config import GatewayConfig, WorkerConstants
from gateway.dns.queries import Upstream
from gateway.upstream import judge
from policy.compile import compile_named
from policy.compiled import DENY_ALL, CompiledPolicy
from policy.decision import Deny, decide_flow
from policy.destination import decide_address
from policy.facts import AddressSource, Destination, FlowFacts, Scheme
from policy.load import load_text
from wire.api.worker import Configure
from wire.api.zygote import Prepare
from wire.errors import ConfigError
from wire.gateway_limits import GatewayLimits

PREPARE = Prepare(
    upstream_roots="pem",
    dns_upstreams=("93.184.216.53:53", "[2001:db8::53]:5353"),
    inside="192.0.2.2",
    allowed_addresses=("10.1.0.0/16",),
    host_addresses={"Api.Corp.example": ("10.2.0.1",)},
    limits={"connections": 10},
)


def read(**changes: Any) -> WorkerConstants:
    return WorkerConstants.of(replace(PREPARE, **changes))


def test_constants_are_read() -> None:
    constants = read()
    assert "pem" == constants.upstream_roots
    assert (
        Upstream(IPv4Address("93.184.216.53"), 53),
        Upstream(IPv6Address("2001:db8::53"), 5353),
    ) == constants.dns_upstreams
    assert (ip_network("10.1.0.0/16"),) == constants.allowed_addresses
    assert {"api.corp.example": (IPv4Address("10.2.0.1"),)} == constants.host_addresses
    assert GatewayLimits(connections=10) == constants.limits
    assert IPv4Address("192.0.2.2") == constants.inside


def test_fixed_addresses_have_either_family_and_a_mapped_one_is_ipv4() -> None:
    constants = read(host_addresses={"a.example": ("2606:2800::1", "::ffff:10.0.0.1", "10.0.0.2")})
    expected = (IPv6Address("2606:2800::1"), IPv4Address("10.0.0.1"), IPv4Address("10.0.0.2"))
    assert {"a.example": expected} == constants.host_addresses


def test_what_is_not_given_has_defaults() -> None:
    constants = read(allowed_addresses=(), host_addresses={}, limits={})
    assert ((), {}, GatewayLimits()) == (constants.allowed_addresses, constants.host_addresses, constants.limits)


def test_a_configuration_is_its_policy_with_the_constants() -> None:
    constants = read()
    config = GatewayConfig.of(Configure("sbx-1", 3, json.dumps(DENY_ALL.to_json())), constants)
    assert GatewayConfig("sbx-1", 3, DENY_ALL, constants) == config


def _policy(port: int) -> CompiledPolicy:
    rule = f"{{id: one, host: good.example, ports: [{port}]}}"
    return compile_named(load_text(f"version: 1\npolicies:\n  p:\n    rules:\n      - {rule}\n"), "p")


def test_kept_decisions_are_those_of_the_policy_and_the_exceptions() -> None:
    """Asked twice. Another configuration has its own answers, and an address of the host itself is another question."""
    flows = [
        FlowFacts(host, port, scheme)
        for host in ("good.example", "other.example", "not canonical")
        for port in (80, 443, 8443)
        for scheme in Scheme
    ]
    for policy, constants in ((_policy(443), read()), (_policy(8443), read(allowed_addresses=()))):
        config = GatewayConfig("sbx-1", 3, policy, constants)
        for facts in flows * 2:
            assert decide_flow(policy, facts) == config.flow(facts)
            for address in (ip_address("93.184.216.34"), ip_address("10.1.0.1"), ip_address("2606:2800::1")):
                for own in (True, False):
                    for source, host in ((AddressSource.RESOLVED, facts.host), (AddressSource.LITERAL, None)):
                        place = Destination(host, address, facts.port, facts.scheme, source, own)
                        assert decide_address(policy, place, constants.allowed_addresses) == config.address(place)
                        assert config.address(place) == judge(config, replace(place, own=not own), own=own)


def test_no_more_than_some_decisions_are_kept() -> None:
    config = GatewayConfig("sbx-1", 3, DENY_ALL, read())
    answers = [config.flow(FlowFacts(f"h{number}.example", 443, Scheme.HTTPS)) for number in range(1000)]
    assert all(isinstance(answer, Deny) for answer in answers)
    assert 256 == config.flow.cache_info().currsize  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "policy", ["", "{}", "null", "[" * 100_000, json.dumps(DENY_ALL.to_json() | {"digest": "0" * 64})]
)
def test_what_is_no_compiled_policy_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError):
        GatewayConfig.of(Configure("sbx-1", 3, policy), read())


@pytest.mark.parametrize(
    "changes",
    [
        {"dns_upstreams": ("resolver.example:53",)},
        {"dns_upstreams": ("1.1.1.1",)},
        {"dns_upstreams": ("1.1.1.1:0",)},
        {"dns_upstreams": ("1.1.1.1:65536",)},
        {"dns_upstreams": ("1.1.1.1:53",) * 257},
        {"allowed_addresses": ("10.0.0.1/8",)},
        {"allowed_addresses": ("10.0.0.0/8",) * 257},
        {"host_addresses": {"bad name": ("10.0.0.1",)}},
        {"host_addresses": {"a.example": ("x",)}},
        {"host_addresses": {"a.example": ("10.0.0.1",) * 257}},
        {"host_addresses": {"a.example": ("fe80::1%eth0",)}},
        {"host_addresses": {"a.example": ("fe80::1",)}},
        {"host_addresses": {"a.example": ("2606:2800::1%eth0",)}},
        {"host_addresses": {"a.example": ("ff02::1",)}},
        {"inside": "::1"},
        {"inside": ""},
        {"limits": {"surprise": 1}},
        {"limits": {"connections": 0}},
        {"limits": {"connections": 4097}},
        {"limits": {"first_bytes": 11}},
    ],
)
def test_anything_else_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        read(**changes)
