"""The address table."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.addresses import AddressClass, classify, dialable, faces

C = AddressClass

CLASSES = {
    "the test rig's network is public": ("93.184.216.34", C.PUBLIC),
    "the test rig's IPv6 network is public": ("2606:2800:220:1::1", C.PUBLIC),
    "a resolver is public": ("8.8.8.8", C.PUBLIC),
    "just below a private range": ("9.255.255.255", C.PUBLIC),
    "just above a private range": ("11.0.0.0", C.PUBLIC),
    "the unspecified address": ("0.0.0.0", C.UNSPECIFIED),
    "this network": ("0.1.2.3", C.RESERVED),
    "ten": ("10.255.255.255", C.PRIVATE),
    "the middle private range": ("172.31.255.255", C.PRIVATE),
    "just above the middle private range": ("172.32.0.0", C.PUBLIC),
    "192.168": ("192.168.1.1", C.PRIVATE),
    "carrier NAT": ("100.127.255.255", C.SHARED),
    "loopback anywhere in its range": ("127.255.0.1", C.LOOPBACK),
    "link-local": ("169.254.1.1", C.LINK_LOCAL),
    "AWS metadata": ("169.254.169.254", C.METADATA),
    "ECS credentials": ("169.254.170.2", C.METADATA),
    "Alibaba metadata": ("100.100.100.200", C.METADATA),
    "Azure metadata": ("168.63.129.16", C.METADATA),
    "Oracle metadata": ("192.0.0.192", C.METADATA),
    "documentation 1": ("192.0.2.1", C.DOCUMENTATION),
    "documentation 2": ("198.51.100.255", C.DOCUMENTATION),
    "documentation 3": ("203.0.113.1", C.DOCUMENTATION),
    "benchmarks": ("198.19.255.255", C.RESERVED),
    "multicast": ("224.0.0.1", C.MULTICAST),
    "class E": ("240.0.0.1", C.RESERVED),
    "broadcast": ("255.255.255.255", C.MULTICAST),
    "IPv6 unspecified": ("::", C.UNSPECIFIED),
    "IPv6 loopback": ("::1", C.LOOPBACK),
    "unique local": ("fd12::1", C.PRIVATE),
    "AWS metadata in IPv6": ("fd00:ec2::254", C.METADATA),
    "AWS's resolver in IPv6": ("fd00:ec2::253", C.METADATA),
    "EKS pod identity in IPv6": ("fd00:ec2::23", C.METADATA),
    "Google's metadata in IPv6": ("fd20:ce::254", C.METADATA),
    "beside Google's metadata": ("fd20:ce::253", C.PRIVATE),
    "IPv6 link-local": ("fe80::1", C.LINK_LOCAL),
    "scoped link-local": ("fe80::1%eth0", C.LINK_LOCAL),
    "a scope makes any address local": ("2606:2800::1%eth0", C.LINK_LOCAL),
    "nor is a mapped one with a scope its IPv4 address": ("::ffff:93.184.216.34%eth0", C.LINK_LOCAL),
    "site-local": ("fec0::1", C.PRIVATE),
    "the end of site-local": ("feff:ffff::1", C.PRIVATE),
    "IPv6 multicast": ("ff02::1", C.MULTICAST),
    "IPv6 multicast in the world": ("ff0e::1", C.MULTICAST),
    "IPv6 documentation": ("2001:db8::1", C.DOCUMENTATION),
    "the newer documentation range": ("3fff::1", C.DOCUMENTATION),
    "discard only": ("100::1", C.RESERVED),
    "dummy prefix": ("100:0:0:1::1", C.RESERVED),
    "segment identifiers": ("5f00::1", C.RESERVED),
    "just below global unicast": ("1fff:ffff::1", C.RESERVED),
    "the first of global unicast": ("2000::1", C.PUBLIC),
    "the last of global unicast": ("3ffe:ffff:ffff::1", C.PUBLIC),
    "outside global unicast": ("4000::1", C.RESERVED),
    "the gateway's answer for names with IPv6 only": ("192.0.0.8", C.RESERVED),
    "mapped public is public": ("::ffff:93.184.216.34", C.PUBLIC),
    "mapped loopback": ("::ffff:127.0.0.1", C.LOOPBACK),
    "mapped metadata": ("::ffff:169.254.169.254", C.METADATA),
    "compatible loopback": ("::127.0.0.1", C.LOOPBACK),
    "compatible public stays shut": ("::93.184.216.34", C.TRANSLATED),
    "translated private": ("::ffff:0:10.0.0.1", C.PRIVATE),
    "NAT64 of a private address": ("64:ff9b::10.0.0.1", C.PRIVATE),
    "NAT64 of metadata": ("64:ff9b::a9fe:a9fe", C.METADATA),
    "NAT64 of a public address stays shut": ("64:ff9b::93.184.216.34", C.TRANSLATED),
    "local NAT64": ("64:ff9b:1::1", C.TRANSLATED),
    "6to4 of a private address": ("2002:0a00:0001::1", C.PRIVATE),
    "6to4 of loopback": ("2002:7f00:1::", C.LOOPBACK),
    "Teredo around a private client": ("2001:0:5db8:d822:0:0:f5ff:fffe", C.PRIVATE),
    "ISATAP around a private address": ("2606:2800::5efe:a00:1", C.PRIVATE),
}


@pytest.mark.parametrize("case", CLASSES)
def test_each_address_has_the_class_of_the_table(case: str) -> None:
    """Addresses of both families. Embedded addresses are unwrapped."""
    text, expected = CLASSES[case]

    assert expected == classify(text)


@pytest.mark.parametrize("case", CLASSES)
def test_only_public_addresses_are_dialable_without_an_exception(case: str) -> None:
    """The verdict follows from the class."""
    text, kind = CLASSES[case]

    assert (None if kind is C.PUBLIC else kind) == dialable(text)


EXCEPTIONS = {
    "a private range that the operator named": ("10.1.2.3", ("10.0.0.0/8",), None),
    "one private address": ("10.1.2.3", ("10.1.2.3/32",), None),
    "another private address": ("10.1.2.4", ("10.1.2.3/32",), C.PRIVATE),
    "everything opens nothing": ("10.1.2.3", ("0.0.0.0/0",), C.PRIVATE),
    "everything in IPv6 opens nothing": ("fd00::1", ("::/0",), C.PRIVATE),
    "a wider range than the entry opens nothing": ("169.254.3.4", ("169.0.0.0/8",), C.LINK_LOCAL),
    "a link-local range does not open metadata": ("169.254.169.254", ("169.254.0.0/16",), C.METADATA),
    "a unique local range does not open metadata": ("fd20:ce::254", ("fd20:ce::/32",), C.METADATA),
    "IPv6 metadata by its exact address": ("fd20:ce::254", ("fd20:ce::254/128",), None),
    "a unique local range": ("fd20:ce::253", ("fd20:ce::/32",), None),
    "metadata by its exact address": ("169.254.169.254", ("169.254.169.254/32",), None),
    "shared space does not open metadata": ("100.100.100.200", ("100.64.0.0/10",), C.METADATA),
    "multicast is never dialled": ("224.0.0.1", ("224.0.0.1/32",), C.MULTICAST),
    "the unspecified address is never dialled": ("0.0.0.0", ("0.0.0.0/32",), C.UNSPECIFIED),
    "the mapped form of an excepted address": ("::ffff:10.1.2.3", ("10.0.0.0/8",), None),
    "NAT64 does not follow from the inner exception": ("64:ff9b::10.0.0.1", ("10.0.0.0/8",), C.PRIVATE),
    "NAT64 alone does not open what it wraps": ("64:ff9b::10.0.0.1", ("64:ff9b::/96",), C.PRIVATE),
    "NAT64 opens wrapped public addresses": ("64:ff9b::93.184.216.34", ("64:ff9b::/96",), None),
    "NAT64 and the inner range": ("64:ff9b::10.0.0.1", ("64:ff9b::/96", "10.0.0.0/8"), None),
    "the prefix of an ISATAP address": ("2606:2800::5efe:93.184.216.34", ("2606:2800::/64",), None),
    "the prefix and the inner range": ("2606:2800::5efe:10.0.0.1", ("2606:2800::/64", "10.0.0.0/8"), None),
    "the prefix without the inner range": ("2606:2800::5efe:10.0.0.1", ("2606:2800::/64",), C.PRIVATE),
    "more than the prefix": ("2606:2800::5efe:93.184.216.34", ("2606:2800::/63",), C.TRANSLATED),
    "a scope is never excepted": ("fe80::1%eth0", ("fe80::/10",), C.LINK_LOCAL),
}


@pytest.mark.parametrize("case", EXCEPTIONS)
def test_an_exception_opens_what_it_names_and_nothing_beside_it(case: str) -> None:
    """A narrower entry of the table has precedence over an exception."""
    text, networks, expected = EXCEPTIONS[case]

    assert expected == dialable(text, tuple(ip_network(network) for network in networks))


@given(st.ip_addresses(v=4))
def test_ipv4_is_classified_totally_and_public_means_globally_reachable(address: IPv4Address) -> None:
    """No address that the standard library treats as special is public here."""
    kind = classify(address)

    if kind is C.PUBLIC:
        assert address.is_global and not address.is_multicast and not address.is_reserved
    assert kind is classify(str(address)) is classify(f"::ffff:{address}")


@given(st.ip_addresses(v=6))
def test_ipv6_is_classified_totally_and_public_means_global_unicast(address: IPv6Address) -> None:
    """Every address has a class, and PUBLIC exists only inside 2000::/3."""
    kind = classify(address)

    if kind is C.PUBLIC and address.ipv4_mapped is None:
        assert address in IPv6Network("2000::/3") and address.is_global


@given(st.ip_addresses(v=4), st.sampled_from(["64:ff9b::", "::", "::ffff:0:0:0", "6to4", "teredo", "isatap"]))
def test_a_wrapped_private_address_is_never_public(inner: IPv4Address, wrapping: str) -> None:
    """For any form of embedding, the result is the inner address's class, or TRANSLATED around a public address."""
    number = int(inner)
    match wrapping:
        case "6to4":
            outer = IPv6Address(0x2002 << 112 | number << 80 | 1)
        case "teredo":
            outer = IPv6Address(0x20010000 << 96 | number ^ 0xFFFFFFFF)
        case "isatap":
            outer = IPv6Address(0x26062800 << 96 | 0x5EFE << 32 | number)
        case _:
            outer = IPv6Address(int(ip_address(wrapping)) | number)
    expected = classify(inner)

    if int(outer) > 1:
        assert (C.TRANSLATED if expected is C.PUBLIC else expected) is classify(outer)


def test_the_documentation_ranges_are_not_dialable_and_the_rigs_are() -> None:
    """Tests with documentation addresses would succeed for the wrong reason."""
    for network in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"):
        assert all(dialable(address) is C.DOCUMENTATION for address in IPv4Network(network))
    assert all(dialable(address) is None for address in IPv4Network("93.184.216.0/24"))


# The classes of five addresses of each network: just below it, its first, its middle, its last, just above it.
EDGES = {
    "0.0.0.0/32": (None, C.UNSPECIFIED, C.UNSPECIFIED, C.UNSPECIFIED, C.RESERVED),
    "0.0.0.0/8": (None, C.UNSPECIFIED, C.RESERVED, C.RESERVED, C.PUBLIC),
    "10.0.0.0/8": (C.PUBLIC, C.PRIVATE, C.PRIVATE, C.PRIVATE, C.PUBLIC),
    "100.64.0.0/10": (C.PUBLIC, C.SHARED, C.SHARED, C.SHARED, C.PUBLIC),
    "100.100.100.200/32": (C.SHARED, C.METADATA, C.METADATA, C.METADATA, C.SHARED),
    "127.0.0.0/8": (C.PUBLIC, C.LOOPBACK, C.LOOPBACK, C.LOOPBACK, C.PUBLIC),
    "168.63.129.16/32": (C.PUBLIC, C.METADATA, C.METADATA, C.METADATA, C.PUBLIC),
    "169.254.0.0/16": (C.PUBLIC, C.LINK_LOCAL, C.LINK_LOCAL, C.LINK_LOCAL, C.PUBLIC),
    "169.254.169.253/32": (C.LINK_LOCAL, C.METADATA, C.METADATA, C.METADATA, C.METADATA),
    "169.254.169.254/32": (C.METADATA, C.METADATA, C.METADATA, C.METADATA, C.LINK_LOCAL),
    "169.254.170.2/32": (C.LINK_LOCAL, C.METADATA, C.METADATA, C.METADATA, C.LINK_LOCAL),
    "169.254.170.23/32": (C.LINK_LOCAL, C.METADATA, C.METADATA, C.METADATA, C.LINK_LOCAL),
    "172.16.0.0/12": (C.PUBLIC, C.PRIVATE, C.PRIVATE, C.PRIVATE, C.PUBLIC),
    "192.0.0.0/24": (C.PUBLIC, C.RESERVED, C.RESERVED, C.RESERVED, C.PUBLIC),
    "192.0.0.192/32": (C.RESERVED, C.METADATA, C.METADATA, C.METADATA, C.RESERVED),
    "192.0.2.0/24": (C.PUBLIC, C.DOCUMENTATION, C.DOCUMENTATION, C.DOCUMENTATION, C.PUBLIC),
    "192.88.99.0/24": (C.PUBLIC, C.RESERVED, C.RESERVED, C.RESERVED, C.PUBLIC),
    "192.168.0.0/16": (C.PUBLIC, C.PRIVATE, C.PRIVATE, C.PRIVATE, C.PUBLIC),
    "198.18.0.0/15": (C.PUBLIC, C.RESERVED, C.RESERVED, C.RESERVED, C.PUBLIC),
    "198.51.100.0/24": (C.PUBLIC, C.DOCUMENTATION, C.DOCUMENTATION, C.DOCUMENTATION, C.PUBLIC),
    "203.0.113.0/24": (C.PUBLIC, C.DOCUMENTATION, C.DOCUMENTATION, C.DOCUMENTATION, C.PUBLIC),
    "224.0.0.0/4": (C.PUBLIC, C.MULTICAST, C.MULTICAST, C.MULTICAST, C.RESERVED),
    "240.0.0.0/4": (C.MULTICAST, C.RESERVED, C.RESERVED, C.MULTICAST, None),
    "255.255.255.255/32": (C.RESERVED, C.MULTICAST, C.MULTICAST, C.MULTICAST, None),
    "::/128": (None, C.UNSPECIFIED, C.UNSPECIFIED, C.UNSPECIFIED, C.LOOPBACK),
    "::1/128": (C.UNSPECIFIED, C.LOOPBACK, C.LOOPBACK, C.LOOPBACK, C.RESERVED),
    "64:ff9b:1::/48": (C.RESERVED, C.TRANSLATED, C.TRANSLATED, C.TRANSLATED, C.RESERVED),
    "2000::/3": (C.RESERVED, C.PUBLIC, C.PUBLIC, C.PUBLIC, C.RESERVED),
    "2001::/23": (C.PUBLIC, C.MULTICAST, C.RESERVED, C.RESERVED, C.PUBLIC),
    "2001:db8::/32": (C.PUBLIC, C.DOCUMENTATION, C.DOCUMENTATION, C.DOCUMENTATION, C.PUBLIC),
    "3fff::/20": (C.PUBLIC, C.DOCUMENTATION, C.DOCUMENTATION, C.DOCUMENTATION, C.PUBLIC),
    "fc00::/7": (C.RESERVED, C.PRIVATE, C.PRIVATE, C.PRIVATE, C.RESERVED),
    "fd00:ec2::254/128": (C.METADATA, C.METADATA, C.METADATA, C.METADATA, C.PRIVATE),
    "fd00:ec2::23/128": (C.PRIVATE, C.METADATA, C.METADATA, C.METADATA, C.PRIVATE),
    "fd00:ec2::253/128": (C.PRIVATE, C.METADATA, C.METADATA, C.METADATA, C.METADATA),
    "fd20:ce::254/128": (C.PRIVATE, C.METADATA, C.METADATA, C.METADATA, C.PRIVATE),
    "fe80::/10": (C.RESERVED, C.LINK_LOCAL, C.LINK_LOCAL, C.LINK_LOCAL, C.PRIVATE),
    "fec0::/10": (C.LINK_LOCAL, C.PRIVATE, C.PRIVATE, C.PRIVATE, C.MULTICAST),
    "ff00::/8": (C.PRIVATE, C.MULTICAST, C.MULTICAST, C.MULTICAST, None),
    # embedding networks; the addresses at their edges embed 0.0.0.0 or 255.255.255.255, the middle one 128.0.0.0
    "::/96": (None, C.UNSPECIFIED, C.TRANSLATED, C.MULTICAST, C.RESERVED),
    "::ffff:0:0/96": (C.RESERVED, C.UNSPECIFIED, C.PUBLIC, C.MULTICAST, C.RESERVED),
    "::ffff:0:0:0/96": (C.RESERVED, C.UNSPECIFIED, C.TRANSLATED, C.MULTICAST, C.RESERVED),
    "64:ff9b::/96": (C.RESERVED, C.UNSPECIFIED, C.TRANSLATED, C.MULTICAST, C.RESERVED),
    "2002::/16": (C.PUBLIC, C.UNSPECIFIED, C.TRANSLATED, C.MULTICAST, C.PUBLIC),
    "2001::/32": (C.PUBLIC, C.MULTICAST, C.MULTICAST, C.UNSPECIFIED, C.RESERVED),
    "2606:2800::5efe:0:0/96": (C.PUBLIC, C.UNSPECIFIED, C.TRANSLATED, C.MULTICAST, C.PUBLIC),
    "2606:2800::200:5efe:0:0/96": (C.PUBLIC, C.UNSPECIFIED, C.TRANSLATED, C.MULTICAST, C.PUBLIC),
}


@pytest.mark.parametrize("text", EDGES)
def test_each_network_begins_and_ends_where_the_table_says(text: str) -> None:
    """Its first address, its middle, its last one, and both neighbours."""
    network = ip_network(text)
    first, last = int(network.network_address), int(network.broadcast_address)
    make = type(network.network_address)
    numbers = (first - 1, first, first + (last - first + 1) // 2, last, last + 1)
    whole = range(1 << network.max_prefixlen)

    assert EDGES[text] == tuple(classify(make(number)) if number in whole else None for number in numbers)


NEVER = {C.UNSPECIFIED, C.MULTICAST, C.PUBLIC}


@pytest.mark.parametrize("text", [text for text in EDGES if EDGES[text][2] not in NEVER and "5efe" not in text])
def test_an_exception_opens_a_network_at_its_full_width_and_no_wider_one_does(text: str) -> None:
    """Judged in the middle of the network."""
    network = ip_network(text)
    middle = network[network.num_addresses // 2]

    assert dialable(middle, (network,)) is None
    assert dialable(middle, (network.supernet(),)) is EDGES[text][2]
    assert dialable(middle) is EDGES[text][2]


ISATAP = {
    "a private address": ("2606:2800::5efe:10.0.0.1", C.PRIVATE, "10.0.0.1"),
    "a private address, as a global one": ("2606:2800::200:5efe:10.0.0.1", C.PRIVATE, "10.0.0.1"),
    "metadata": ("2606:2800::5efe:169.254.169.254", C.METADATA, "169.254.169.254"),
    "metadata, as a global one": ("2606:2800::200:5efe:169.254.169.254", C.METADATA, "169.254.169.254"),
    "loopback behind a unique local prefix": ("fd12::200:5efe:127.0.0.1", C.LOOPBACK, "127.0.0.1"),
    "a public address": ("2606:2800::5efe:93.184.216.34", C.TRANSLATED, "93.184.216.34"),
    "a public address, as a global one": ("2606:2800::200:5efe:93.184.216.34", C.TRANSLATED, "93.184.216.34"),
    "no wrapping: the group bit": ("2606:2800::100:5efe:10.0.0.1", C.PUBLIC, None),
    "no wrapping: another type": ("2606:2800::5eff:10.0.0.1", C.PUBLIC, None),
}


@pytest.mark.parametrize("case", ISATAP)
def test_an_isatap_address_is_judged_by_what_it_wraps(case: str) -> None:
    """With and without the bit for globally unique addresses.

    A denial of the inner address applies to the outer one.
    """
    text, kind, inner = ISATAP[case]

    assert kind is classify(text)
    assert faces(text) == (ip_address(text), *([] if inner is None else [ip_address(inner)]))


FACES = {
    "93.184.216.34": ["93.184.216.34"],
    "::ffff:93.184.216.34": ["93.184.216.34"],
    "2606:2800:220:1::1": ["2606:2800:220:1::1"],
    "::93.184.216.34": ["::93.184.216.34", "93.184.216.34"],
    "::ffff:0:93.184.216.34": ["::ffff:0:93.184.216.34", "93.184.216.34"],
    "64:ff9b::93.184.216.34": ["64:ff9b::93.184.216.34", "93.184.216.34"],
    "64:ff9b:1::93.184.216.34": ["64:ff9b:1::93.184.216.34"],
    "2002:5db8:d822::1": ["2002:5db8:d822::1", "93.184.216.34"],
    "2001:0:102:304::a247:27dd": ["2001:0:102:304::a247:27dd", "93.184.216.34"],
    "::": ["::"],
    "::1": ["::1"],
    "::2": ["::2", "0.0.0.2"],
}


@pytest.mark.parametrize("text", FACES)
def test_an_address_stands_for_itself_and_for_the_one_it_wraps(text: str) -> None:
    assert tuple(map(ip_address, FACES[text])) == faces(text)


@pytest.mark.parametrize("text", ["", "10.0.0", "10.0.0.0/8", "good.test", "::g", "010.0.0.1"])
def test_what_is_no_address_has_no_class(text: str) -> None:
    for judge in (classify, dialable, faces):
        with pytest.raises(ValueError):
            judge(text)
