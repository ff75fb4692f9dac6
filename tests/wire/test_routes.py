"""What the kernel says about routes, without a packet."""

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest

from wire import routes

PUBLIC, EXCEPTED = ip_address("2000::1"), ip_network("fd00:20::/64")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_packets_to_an_own_address_come_from_it(address: str) -> None:
    assert ip_address(address) == routes.source(ip_address(address))
    assert routes.own_address(ip_address(address))


def test_a_link_local_address_without_its_interface_has_no_route() -> None:
    assert routes.source(IPv6Address("fe80::1")) is None
    assert not routes.own_address(IPv6Address("fe80::1"))


def test_a_kernel_without_ipv6_has_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> socket.socket:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr("wire.routes.socket.socket", refused)
    assert routes.source(IPv6Address("2606:2800::1")) is None
    assert not routes.reaches_ipv6((EXCEPTED,))


@pytest.mark.parametrize(
    ("sources", "excepted", "reaches"),
    [
        ({}, (), False),
        ({}, (EXCEPTED,), False),
        ({PUBLIC: ip_address("2606:2800::9")}, (), True),
        ({PUBLIC: ip_address("fd00::9")}, (), True),  # its addresses are translated on the way
        ({PUBLIC: ip_address("fe80::9%eth0")}, (), False),
        ({EXCEPTED.network_address: ip_address("fd00:20::9")}, (), False),
        ({EXCEPTED.network_address: ip_address("fd00:20::9")}, (ip_network("10.0.0.0/8"), EXCEPTED), True),
        ({ip_address("10.0.0.0"): ip_address("10.0.0.9")}, (ip_network("10.0.0.0/8"),), False),
    ],
)
def test_ipv6_is_reached_by_a_route_to_the_internet_or_to_an_exception(
    sources: dict[IPv4Address | IPv6Address, IPv4Address | IPv6Address],
    excepted: tuple[routes.Network, ...],
    reaches: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "source", sources.get)
    assert reaches is routes.reaches_ipv6(excepted)
