"""The text form of an address and a port, in settings and in messages between processes. Pure.

- `192.0.2.53:53` and `[2001:db8::53]:53`; no name, no zone, no port 0.
- An IPv4-mapped IPv6 address is its IPv4 address: packets to it are IPv4.
- Addresses without a route are refused, with the reason: multicast, unspecified, and IPv6 addresses that need an
  interface. (IPv4 link-local addresses are resolvers in some clouds, and have routes.)
"""

from ipaddress import IPv4Address, IPv6Address, ip_address

type Address = IPv4Address | IPv6Address


def parse_endpoint(text: str) -> tuple[Address, int]:
    """Return the address and the port of a text.

    Raises:
        ValueError: the text has another form, or its address cannot be routed to. The message is a sentence.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise ValueError(f"{text[:100]!a} is not address:port")
    try:
        address = ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        raise ValueError(f"{text[:100]!a} is not address:port") from None
    if bracketed is not (address.version == 6):
        raise ValueError(f"{text[:100]!a} is not address:port: an IPv6 address is written in brackets")
    return routed(address), int(port)


def routed(address: Address) -> Address:
    """Return the destination address of packets to `address`.

    Raises:
        ValueError: packets to the address are not routed. The message is a sentence.
    """
    if isinstance(address, IPv6Address):
        if address.scope_id is not None or address.is_link_local:
            raise ValueError(f"{address} needs an interface, and a gateway has only routes: use a routed address")
        address = address.ipv4_mapped or address
    if address.is_multicast or address.is_unspecified:
        raise ValueError(f"{address} is not the address of one host")
    return address
