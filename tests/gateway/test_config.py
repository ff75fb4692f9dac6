"""A configuration is read whole or not at all."""

from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Any

import pytest

from gateway.config import ConfigError, GatewayConfig, GatewayLimits
from gateway.resolver import Upstream
from policy.compiled import DENY_ALL


def document(**changes: Any) -> dict[str, Any]:
    return {
        "sandbox": "sbx-000000000000000000000001",
        "generation": 3,
        "policy": DENY_ALL.to_json(),
        "upstream_roots": "pem",
        "dns_upstreams": ["93.184.216.53:53", "[2001:db8::53]:5353"],
        "allowed_addresses": ["10.1.0.0/16"],
        "host_addresses": {"Api.Corp.example": ["10.2.0.1"]},
        "inside": "192.0.2.2",
        "limits": {"connections": 10},
        **changes,
    }


def test_the_wire_form_is_read() -> None:
    config = GatewayConfig.from_json(document())
    assert DENY_ALL == config.policy
    assert (
        Upstream(IPv4Address("93.184.216.53"), 53),
        Upstream(IPv6Address("2001:db8::53"), 5353),
    ) == config.dns_upstreams
    assert (ip_network("10.1.0.0/16"),) == config.allowed_addresses
    assert {"api.corp.example": (IPv4Address("10.2.0.1"),)} == config.host_addresses
    assert GatewayLimits(connections=10) == config.limits


@pytest.mark.parametrize("key", ["sandbox", "generation", "policy", "upstream_roots", "dns_upstreams", "inside"])
def test_a_missing_key_is_refused(key: str) -> None:
    data = document()
    del data[key]
    with pytest.raises(ConfigError, match=key):
        GatewayConfig.from_json(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"extra": 1},
        {"sandbox": "../x"},
        {"sandbox": 1},
        {"generation": 0},
        {"generation": True},
        {"generation": "3"},
        {"policy": {}},
        {"policy": DENY_ALL.to_json() | {"digest": "0" * 64}},
        {"policy": None},
        {"upstream_roots": None},
        {"dns_upstreams": ["resolver.example:53"]},
        {"dns_upstreams": ["1.1.1.1"]},
        {"dns_upstreams": ["1.1.1.1:0"]},
        {"dns_upstreams": ["1.1.1.1:65536"]},
        {"dns_upstreams": "1.1.1.1:53"},
        {"allowed_addresses": ["10.0.0.1/8"]},
        {"allowed_addresses": [10]},
        {"host_addresses": {"bad name": ["10.0.0.1"]}},
        {"host_addresses": {"a.example": ["x"]}},
        {"host_addresses": []},
        {"inside": "::1"},
        {"limits": {"surprise": 1}},
        {"limits": {"connections": 0}},
        {"limits": {"connections": 10**9}},
        {"limits": {"first_bytes": 11}},
        {"limits": {"idle": 1.5}},
    ],
)
def test_anything_else_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        GatewayConfig.from_json(document(**changes))


@pytest.mark.parametrize("value", [None, [], "x", 1, {1: 2}])
def test_what_is_not_an_object_is_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        GatewayConfig.from_json(value)
