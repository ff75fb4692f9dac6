"""Classifies IP addresses, to decide which a gateway may dial. `is_global` of `ipaddress` is not strict enough.

- Every address has exactly one class. Only PUBLIC is dialled without an exception. IPv6 is public only in 2000::/3.
- An IPv4 address inside an IPv6 address is judged, too. An IPv4-mapped address *is* its IPv4 address. The other
  embeddings (NAT64, 6to4, Teredo, compatible, translated, ISATAP) are TRANSLATED, also around a public address.
- An exception permits an address only if it is no wider than the table entry that refuses the address. `0.0.0.0/0`
  permits nothing, and `169.254.0.0/16` does not permit the metadata service inside it.

Sources: IANA special-purpose registries, RFC 6890, 5737, 9637, 6052, 3056, 4380; metadata services that
OpenSandbox's egress specification lists.
"""

from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

type IPAddress = IPv4Address | IPv6Address
type IPNetwork = IPv4Network | IPv6Network


class AddressClass(StrEnum):
    """The class of an address."""

    PUBLIC = "public"
    LOOPBACK = "loopback"
    PRIVATE = "private"
    SHARED = "shared"
    LINK_LOCAL = "link-local"
    METADATA = "metadata"
    MULTICAST = "multicast"
    DOCUMENTATION = "documentation"
    RESERVED = "reserved"
    UNSPECIFIED = "unspecified"
    TRANSLATED = "translated"


_NEVER = frozenset({AddressClass.UNSPECIFIED, AddressClass.MULTICAST})

_SPECIAL = (
    ("0.0.0.0/32", AddressClass.UNSPECIFIED),
    ("0.0.0.0/8", AddressClass.RESERVED),
    ("10.0.0.0/8", AddressClass.PRIVATE),
    ("100.64.0.0/10", AddressClass.SHARED),
    ("100.100.100.200/32", AddressClass.METADATA),  # Alibaba Cloud
    ("127.0.0.0/8", AddressClass.LOOPBACK),
    ("168.63.129.16/32", AddressClass.METADATA),  # Azure, a public range
    ("169.254.0.0/16", AddressClass.LINK_LOCAL),
    ("169.254.169.253/32", AddressClass.METADATA),  # AWS resolver
    ("169.254.169.254/32", AddressClass.METADATA),
    ("169.254.170.2/32", AddressClass.METADATA),  # AWS ECS task credentials
    ("169.254.170.23/32", AddressClass.METADATA),  # AWS EKS pod identity
    ("172.16.0.0/12", AddressClass.PRIVATE),
    ("192.0.0.0/24", AddressClass.RESERVED),
    ("192.0.0.192/32", AddressClass.METADATA),  # Oracle Cloud
    ("192.0.2.0/24", AddressClass.DOCUMENTATION),
    ("192.88.99.0/24", AddressClass.RESERVED),  # 6to4 relays, withdrawn
    ("192.168.0.0/16", AddressClass.PRIVATE),
    ("198.18.0.0/15", AddressClass.RESERVED),  # benchmarks
    ("198.51.100.0/24", AddressClass.DOCUMENTATION),
    ("203.0.113.0/24", AddressClass.DOCUMENTATION),
    ("224.0.0.0/4", AddressClass.MULTICAST),
    ("240.0.0.0/4", AddressClass.RESERVED),
    ("255.255.255.255/32", AddressClass.MULTICAST),  # broadcast
    ("::/128", AddressClass.UNSPECIFIED),
    ("::1/128", AddressClass.LOOPBACK),
    ("64:ff9b:1::/48", AddressClass.TRANSLATED),  # local NAT64: the position of the embedded address is not known
    ("2001::/23", AddressClass.RESERVED),
    ("2001:db8::/32", AddressClass.DOCUMENTATION),
    ("3fff::/20", AddressClass.DOCUMENTATION),
    ("fc00::/7", AddressClass.PRIVATE),
    ("fd00:ec2::254/128", AddressClass.METADATA),  # AWS
    ("fd00:ec2::23/128", AddressClass.METADATA),  # AWS EKS pod identity
    ("fd00:ec2::253/128", AddressClass.METADATA),  # AWS resolver
    ("fd20:ce::254/128", AddressClass.METADATA),  # Google Cloud
    ("fe80::/10", AddressClass.LINK_LOCAL),
    ("fec0::/10", AddressClass.PRIVATE),  # site-local
    ("ff00::/8", AddressClass.MULTICAST),
)

# The longest prefix first: the first match is the most specific entry.
_V4: list[tuple[IPv4Network, AddressClass]] = sorted(
    ((n, c) for n, c in ((ip_network(t), c) for t, c in _SPECIAL) if isinstance(n, IPv4Network)),
    key=lambda entry: -entry[0].prefixlen,
)
_V6: list[tuple[IPv6Network, AddressClass]] = sorted(
    ((n, c) for n, c in ((ip_network(t), c) for t, c in _SPECIAL) if isinstance(n, IPv6Network)),
    key=lambda entry: -entry[0].prefixlen,
)

_EVERYTHING_V6 = IPv6Network("::/0")
_GLOBAL_UNICAST = IPv6Network("2000::/3")

_MAPPED = IPv6Network("::ffff:0:0/96")
# (network, right shift that brings the embedded IPv4 address to the low 32 bits, mask to undo an obfuscation)
_WRAPPINGS = (
    (IPv6Network("::/96"), 0, 0),  # IPv4-compatible
    (IPv6Network("::ffff:0:0:0/96"), 0, 0),  # IPv4-translated, RFC 2765
    (IPv6Network("64:ff9b::/96"), 0, 0),  # NAT64
    (IPv6Network("2002::/16"), 80, 0),  # 6to4
    (IPv6Network("2001::/32"), 0, 0xFFFFFFFF),  # Teredo, the client's address
)
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})


def classify(ip: IPAddress | str) -> AddressClass:
    """Return the class of an address.

    Raises:
        ValueError: a text that is not one address.
    """
    return _judge(_parse(ip))[0]


def dialable(ip: IPAddress | str, exceptions: tuple[IPNetwork, ...] = ()) -> AddressClass | None:
    """Return None if the address may be dialled, otherwise the class that refuses it.

    Raises:
        ValueError: a text that is not one address.
    """
    address = _parse(ip)
    refused, entry, inner = _judge(address)
    if refused is AddressClass.PUBLIC:
        return None
    if refused in _NEVER or (isinstance(address, IPv6Address) and address.scope_id is not None):
        return refused
    if not any(_opens(exception, address, entry) for exception in exceptions):
        return refused
    # The outer address has an exception. The embedded address must be permitted, too.
    return dialable(inner, exceptions) if inner is not None else None


def faces(ip: IPAddress | str) -> tuple[IPAddress, ...]:
    """Return the address and the IPv4 address embedded in it, if there is one.

    A denial of one of them denies both: a packet to the outer address arrives at the inner one.

    Raises:
        ValueError: a text that is not one address.
    """
    address = _parse(ip)
    inner = _judge(address)[2]
    return (address,) if inner is None else (address, inner)


def _opens(exception: IPNetwork, address: IPAddress, entry: IPNetwork) -> bool:
    return exception.version == entry.version and address in exception and exception.prefixlen >= entry.prefixlen


def _parse(ip: IPAddress | str) -> IPAddress:
    address = ip_address(ip) if isinstance(ip, str) else ip
    if isinstance(address, IPv6Address) and address.scope_id is None and address in _MAPPED:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


@lru_cache(maxsize=4096)
def _judge(address: IPAddress) -> tuple[AddressClass, IPNetwork, IPv4Address | None]:
    """Return the class, its table entry, and the embedded IPv4 address (None if there is none)."""
    if isinstance(address, IPv4Address):
        for network4, kind in _V4:
            if address in network4:
                return kind, network4, None
        return AddressClass.PUBLIC, IPv4Network((address, 32)), None
    if address.scope_id is not None:
        # A zone names an interface of this machine, so the address is not public.
        return AddressClass.LINK_LOCAL, _EVERYTHING_V6, None
    number = int(address)
    if number > 1:  # :: and ::1 look like IPv4-compatible addresses and are not
        for network, shift, mask in _WRAPPINGS:
            if address in network:
                return _wrapped(IPv4Address((number >> shift & 0xFFFFFFFF) ^ mask), network)
        if number >> 32 & 0xFFFFFFFF in _ISATAP:
            return _wrapped(IPv4Address(number & 0xFFFFFFFF), IPv6Network((number >> 64 << 64, 64)))
    for network6, kind in _V6:
        if address in network6:
            return kind, network6, None
    if address in _GLOBAL_UNICAST:
        return AddressClass.PUBLIC, IPv6Network((address, 128)), None
    return AddressClass.RESERVED, IPv6Network((address, 128)), None


def _wrapped(inner: IPv4Address, network: IPv6Network) -> tuple[AddressClass, IPNetwork, IPv4Address]:
    kind = _judge(inner)[0]
    return (AddressClass.TRANSLATED if kind is AddressClass.PUBLIC else kind), network, inner
