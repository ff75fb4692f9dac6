"""The address table."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.addresses import AddressClass, classify, dialable

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
    "IPv6 link-local": ("fe80::1", C.LINK_LOCAL),
    "scoped link-local": ("fe80::1%eth0", C.LINK_LOCAL),
    "a scope makes any address local": ("2606:2800::1%eth0", C.LINK_LOCAL),
    "site-local": ("fec0::1", C.PRIVATE),
    "IPv6 multicast": ("ff02::1", C.MULTICAST),
    "IPv6 documentation": ("2001:db8::1", C.DOCUMENTATION),
    "the newer documentation range": ("3fff::1", C.DOCUMENTATION),
    "discard only": ("100::1", C.RESERVED),
    "outside global unicast": ("4000::1", C.RESERVED),
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
    """Both families, embedded addresses unwrapped."""
    text, expected = CLASSES[case]

    assert expected == classify(text)


@pytest.mark.parametrize("case", CLASSES)
def test_only_public_addresses_are_dialable_without_an_exception(case: str) -> None:
    """The verdict is the class."""
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
    "metadata by its exact address": ("169.254.169.254", ("169.254.169.254/32",), None),
    "shared space does not open metadata": ("100.100.100.200", ("100.64.0.0/10",), C.METADATA),
    "multicast is never dialled": ("224.0.0.1", ("224.0.0.1/32",), C.MULTICAST),
    "the unspecified address is never dialled": ("0.0.0.0", ("0.0.0.0/32",), C.UNSPECIFIED),
    "the mapped form of an excepted address": ("::ffff:10.1.2.3", ("10.0.0.0/8",), None),
    "NAT64 does not follow from the inner exception": ("64:ff9b::10.0.0.1", ("10.0.0.0/8",), C.PRIVATE),
    "NAT64 alone does not open what it wraps": ("64:ff9b::10.0.0.1", ("64:ff9b::/96",), C.PRIVATE),
    "NAT64 opens wrapped public addresses": ("64:ff9b::93.184.216.34", ("64:ff9b::/96",), None),
    "NAT64 and the inner range": ("64:ff9b::10.0.0.1", ("64:ff9b::/96", "10.0.0.0/8"), None),
    "a scope is never excepted": ("fe80::1%eth0", ("fe80::/10",), C.LINK_LOCAL),
}


@pytest.mark.parametrize("case", EXCEPTIONS)
def test_an_exception_opens_what_it_names_and_nothing_beside_it(case: str) -> None:
    """No exception is stronger than a narrower entry of the table."""
    text, networks, expected = EXCEPTIONS[case]

    assert expected == dialable(text, tuple(ip_network(network) for network in networks))


@given(st.ip_addresses(v=4))
def test_ipv4_is_classified_totally_and_public_means_globally_reachable(address: IPv4Address) -> None:
    """Nothing that the standard library calls special is public here."""
    kind = classify(address)

    if kind is C.PUBLIC:
        assert address.is_global and not address.is_multicast and not address.is_reserved
    assert kind is classify(str(address)) is classify(f"::ffff:{address}")


@given(st.ip_addresses(v=6))
def test_ipv6_is_classified_totally_and_public_means_global_unicast(address: IPv6Address) -> None:
    """The class exists for every address, and PUBLIC only inside 2000::/3."""
    kind = classify(address)

    if kind is C.PUBLIC and address.ipv4_mapped is None:
        assert address in IPv6Network("2000::/3") and address.is_global


@given(st.ip_addresses(v=4), st.sampled_from(["64:ff9b::", "::", "::ffff:0:0:0", "6to4", "teredo", "isatap"]))
def test_a_wrapped_private_address_is_never_public(inner: IPv4Address, wrapping: str) -> None:
    """Whatever wraps an address, the result is its class or, around a public one, TRANSLATED."""
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
    """Tests that used documentation addresses would pass for the wrong reason."""
    for network in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"):
        assert all(dialable(address) is C.DOCUMENTATION for address in IPv4Network(network))
    assert all(dialable(address) is None for address in IPv4Network("93.184.216.0/24"))
