"""Asks the kernel how it would route packets of this process. No packet is sent.

A connected UDP socket has the source address that the kernel has chosen for the destination. So it shows whether there
is a route, and whether the destination is the host itself. A gateway worker can read no routing table.
"""

import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

type Address = IPv4Address | IPv6Address
type Network = IPv4Network | IPv6Network

_IPV6_INTERNET = IPv6Address("2000::1")
"""Stands for every public IPv6 address. No host has it: 2000::/16 is not allocated."""
_PORT = 9


def source(address: Address) -> Address | None:
    """Return the address from which packets to `address` would be sent. None if there is no route."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.connect((str(address), _PORT))
            return ip_address(probe.getsockname()[0])
    except OSError:
        return None  # also on a kernel without IPv6


def own_address(address: Address) -> bool:
    """Whether the address belongs to the host itself, also if it is public."""
    return source(address) == address


def reaches_ipv6(excepted: Iterable[Network]) -> bool:
    """Whether the host has a route to the IPv6 internet or to an excepted IPv6 network, and an address to send from.

    A host without a routed IPv6 address has only link-local ones. Servers cannot answer these.
    """
    networks = (network.network_address for network in excepted if network.version == 6)
    sources = (source(address) for address in (_IPV6_INTERNET, *networks))
    return any(found is not None and not found.is_link_local for found in sources)
