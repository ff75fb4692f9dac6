"""Frames that no honest network stack sends, from a sender of raw frames at the sandbox's end of a slot's link.

Raw sockets in the gateway's namespace get a copy of everything that passed the rules. So they show what was delivered
to the host's own stack there. The control is the same slot without its rules: the kernel then delivers what it can.
"""

import re
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from runtimes.net import netns, netstate, slots
from runtimes.net.plan import GATEWAY_SYSCTLS, PLAN
from runtimes.net.slots import Slot
from tests.system.test_fences import checksum

pytestmark = pytest.mark.system

INSIDE, GATEWAY, STRANGER = str(PLAN.inside), str(PLAN.gateway), "93.184.216.66"
OWN_MAC, GATEWAY_MAC = (bytes.fromhex(mac.replace(":", "")) for mac in (PLAN.inside_mac, PLAN.gateway_mac))
EVERYBODY = b"\xff" * 6
IPV4, ARP, IPV6, VLAN, QINQ = 0x0800, 0x0806, 0x86DD, 0x8100, 0x88A8
ICMP, TCP, UDP, ICMPV6 = 1, 6, 17, 58
HEARD = (ICMP, 2, 4, TCP, UDP, 33, 41, 47, 50, 51, 89, 103, 112, 132, 136, 253, 254)
FIN, SYN, RST, PUSH, ACK, URGENT = 1, 2, 4, 8, 16, 32
MORE = 0x2000
V6_INSIDE, V6_GATEWAY, V6_ALL = (socket.inet_pton(socket.AF_INET6, a) for a in ("fe80::2", "fe80::1", "ff02::1"))


def ethernet(payload: bytes, kind: int = IPV4, to: bytes = GATEWAY_MAC, source: bytes = OWN_MAC) -> bytes:
    return to + source + struct.pack("!H", kind) + payload


def ipv4(payload: bytes, protocol: int, **more: object) -> bytes:
    """Return a packet. `fragment` is the field with flags and offset, `options` follow the header."""
    source, to = str(more.get("source", INSIDE)), str(more.get("to", GATEWAY))
    options, fragment, version = more.get("options", b""), more.get("fragment", 0), more.get("version", 4)
    assert isinstance(options, bytes) and isinstance(fragment, int) and isinstance(version, int)
    words = 5 + len(options) // 4
    head = struct.pack("!BBHHHBBH", version << 4 | words, 0, 4 * words + len(payload), 77, fragment, 64, protocol, 0)
    head += socket.inet_aton(source) + socket.inet_aton(to) + options
    return head[:10] + checksum(head) + head[12:] + payload


def udp(port: int, data: bytes) -> bytes:
    return struct.pack("!HHHH", 4242, port, 8 + len(data), 0) + data


def tcp(flags: int, data: bytes = b"", port: int = 443, own: int = 4242, **ends: str) -> bytes:
    body = struct.pack("!HHIIBBHHH", own, port, 1, 1 if flags & ACK else 0, 5 << 4, flags, 65535, 0, 0) + data
    pseudo = socket.inet_aton(ends.get("source", INSIDE)) + socket.inet_aton(ends.get("to", GATEWAY))
    pseudo += struct.pack("!HH", TCP, len(body))
    padded = pseudo + body + bytes(len(body) % 2)
    return body[:16] + checksum(padded) + body[18:]


def icmp(kind: int, code: int, data: bytes) -> bytes:
    body = struct.pack("!BBHI", kind, code, 0, 1280 if code == 4 else 1) + data
    return body[:2] + checksum(body + bytes(len(body) % 2)) + body[4:]


def arp(operation: int, sender: str, target: str, mac: bytes = OWN_MAC) -> bytes:
    addresses = mac + socket.inet_aton(sender) + bytes(6) + socket.inet_aton(target)
    return struct.pack("!HHBBH", 1, IPV4, 6, 4, operation) + addresses


def ipv6(payload: bytes, following: int, to: bytes = V6_GATEWAY) -> bytes:
    return struct.pack("!IHBB", 6 << 28, len(payload), following, 255) + V6_INSIDE + to + payload


def _frames() -> Iterator[tuple[str, bytes, bool]]:
    """Name, frame, and whether the kernel alone would deliver it to a raw socket."""

    def named(name: str) -> bytes:
        return f"<{name}>".encode()

    for protocol in (*HEARD[1:3], *HEARD[5:], 0, 99, 255):
        name = f"protocol {protocol}"
        yield name, ethernet(ipv4(named(name), protocol)), protocol in HEARD
    begun = ipv4(tcp(SYN, own=443, port=4242, source=GATEWAY, to=INSIDE), TCP, source=GATEWAY, to=INSIDE)[:28]
    for kind, code in (
        (0, 0),
        (3, 3),
        (3, 4),
        (4, 0),
        (5, 1),
        (8, 0),
        (9, 0),
        (10, 0),
        (11, 0),
        (12, 0),
        (13, 0),
        (17, 0),
    ):
        name = f"icmp {kind}.{code}"
        inner = socket.inet_aton(INSIDE) + begun if kind == 5 else begun
        yield name, ethernet(ipv4(icmp(kind, code, inner + named(name)), ICMP)), True
    for port in (1, 67, 68, 123, 137, 161, 443, 853, 1900, 4500, 5353, 15001, 44772, 65535):
        name = f"udp {port}"
        yield name, ethernet(ipv4(udp(port, named(name)), UDP)), True
    for source in (
        GATEWAY,
        "192.0.2.0",
        "192.0.2.3",
        "127.0.0.1",
        "0.0.0.0",
        "255.255.255.255",
        "224.0.0.1",
        "10.0.0.53",
    ):
        name = f"from {source}"
        yield name, ethernet(ipv4(udp(53, named(name)), UDP, source=source)), False
        syn = tcp(SYN, named(f"syn {name}"), source=source)
        yield f"syn {name}", ethernet(ipv4(syn, TCP, source=source)), False
    for to in ("127.0.0.1", "127.0.0.53", "169.254.169.254", "255.255.255.255", "224.0.0.251", "192.0.2.3", STRANGER):
        name = f"to {to}"
        yield name, ethernet(ipv4(udp(9999, named(name)), UDP, to=to)), to == "255.255.255.255"
        yield (
            f"everybody {name}",
            ethernet(ipv4(udp(9999, named(f"everybody {name}")), UDP, to=to), to=EVERYBODY),
            False,
        )
    for title, options in {
        "loose source route": b"\x83\x07\x04" + socket.inet_aton(STRANGER) + b"\0",
        "strict source route": b"\x89\x07\x04" + socket.inet_aton(STRANGER) + b"\0",
        "record route": b"\x07\x07\x04" + bytes(4) + b"\0",
        "time stamp": b"\x44\x08\x05\x00" + bytes(4),
        "router alert": b"\x94\x04\x00\x00",
        "broken option": b"\x07\xff\x00\x00",
    }.items():
        yield (
            title,
            ethernet(ipv4(udp(53, named(title)), UDP, options=options)),
            title in ("record route", "time stamp", "router alert"),
        )
    for flags in (0, FIN, PUSH | URGENT | FIN, SYN | FIN, SYN | RST, RST, SYN | ACK, FIN | ACK, URGENT, 0xFF):
        name = f"flags {flags:#x}"
        yield name, ethernet(ipv4(tcp(flags, named(name)), TCP)), True
    whole = tcp(SYN, named("syn in two fragments") + bytes(16))
    yield "syn in two fragments", ethernet(ipv4(whole[:8], TCP, fragment=MORE)), True
    yield "its end", ethernet(ipv4(whole[8:], TCP, fragment=1)), False
    yield "a last fragment alone", ethernet(ipv4(named("a last fragment alone") + bytes(16), TCP, fragment=3)), False
    for title, kind, before in (
        ("vlan 0", VLAN, struct.pack("!HH", 0, IPV4)),
        ("vlan 5", VLAN, struct.pack("!HH", 5, IPV4)),
        ("two vlans", QINQ, struct.pack("!HHHH", 5, VLAN, 6, IPV4)),
        ("mpls", 0x8847, struct.pack("!I", 0x00010140)),
        ("pppoe", 0x8864, b"\x11\0\0\1\0\x40\0\x21"),
        ("lldp", 0x88CC, b""),
        ("eapol", 0x888E, b"\1\1\0\0"),
        ("stp", 0x0026, b"\x42\x42\3\0\0"),
        ("rarp", 0x8035, b""),
    ):
        yield title, ethernet(before + ipv4(udp(53, named(title)), UDP), kind), title == "vlan 0"
    for title, to, source in (
        ("another mac", GATEWAY_MAC, b"\2\0\0\0\0\x09"),
        ("the gateway's mac", GATEWAY_MAC, GATEWAY_MAC),
        ("to another mac", b"\2\0\0\0\0\x09", OWN_MAC),
        ("to everybody's mac", EVERYBODY, OWN_MAC),
    ):
        yield title, ethernet(ipv4(udp(53, named(title)), UDP), to=to, source=source), title != "to another mac"
    yield "version 5", ethernet(ipv4(udp(53, named("version 5")), UDP, version=5)), False
    for title, message in {
        "an answer nobody asked for": arp(2, GATEWAY, INSIDE),
        "a claim to the gateway's address": arp(2, GATEWAY, GATEWAY),
        "a question in another's name": arp(1, "192.0.2.3", GATEWAY),
        "a question with another's mac": arp(1, INSIDE, GATEWAY, b"\2\0\0\0\0\x09"),
        "a question about somebody else": arp(1, INSIDE, "192.0.2.3"),
    }.items():
        yield title, ethernet(message, ARP, to=EVERYBODY), False
    router = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0xC0, 1800, 0, 0) + b"\1\1" + OWN_MAC
    solicited = struct.pack("!BBHI", 136, 0, 0, 0xE0000000) + V6_GATEWAY + b"\2\1" + OWN_MAC
    chain = b"".join(bytes((60, 0)) + bytes(6) for _ in range(99))
    for title, packet in {
        "router advertisement": ipv6(router, ICMPV6, V6_ALL),
        "neighbour advertisement": ipv6(solicited, ICMPV6, V6_ALL),
        "redirect": ipv6(struct.pack("!BBHI", 137, 0, 0, 0) + V6_INSIDE + V6_GATEWAY, ICMPV6),
        "udp over ipv6": ipv6(udp(53, named("udp over ipv6")), UDP),
        "tcp over ipv6": ipv6(tcp(SYN), TCP),
        "hop by hop": ipv6(bytes((UDP, 0)) + bytes(6) + udp(53, named("hop by hop")), 0),
        "a hundred headers": ipv6(chain + bytes((UDP, 0)) + bytes(6) + udp(53, named("a hundred headers")), 60),
        "routing header": ipv6(bytes((UDP, 2, 0, 1)) + bytes(4) + V6_GATEWAY + udp(53, b"x"), 43),
        "atomic fragment": ipv6(bytes((UDP, 0)) + bytes(6) + udp(53, b"x"), 44),
    }.items():
        yield title, ethernet(packet, IPV6), False


FRAMES = tuple(_frames())


@contextmanager
def raw_sockets(slot: Slot) -> Iterator[dict[int, socket.socket]]:
    def make() -> dict[int, socket.socket]:
        return {number: socket.socket(socket.AF_INET, socket.SOCK_RAW, number) for number in HEARD}

    with ExitStack() as stack:
        made = netns.inside(slot.gateway, make)
        for sock in made.values():
            sock.setblocking(False)
            stack.enter_context(sock)
        yield made


def emit(slot: Slot, *frames: bytes) -> None:
    def send() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
            sock.bind((PLAN.inside_interface, 0))
            for frame in frames:
                sock.send(frame)

    netns.inside(slot.sandbox, send)


def delivered(heard: dict[int, socket.socket]) -> set[str]:
    """Return the names that arrived. The link delivers a frame before `send` returns."""
    found = set()
    for sock in heard.values():
        while True:
            try:
                data = sock.recv(65536)
            except BlockingIOError:
                break
            name = re.search(rb"<([a-z0-9 .']+)>", data)
            found.add(name[1].decode() if name else f"without a name: {data.hex()}")
    return found


def tracked(slot: Slot) -> int:
    count = Path("/proc/sys/net/netfilter/nf_conntrack_count")
    return netns.inside(slot.gateway, lambda: int(count.read_text()))


@pytest.fixture(name="slot")
def _slot(tmp_path: Path) -> Iterator[Slot]:
    made = slots.make(tmp_path, 7, PLAN)
    yield made
    slots.destroy(made)


def test_no_odd_frame_is_delivered_and_none_changes_the_gateway(slot: Slot) -> None:
    before = netstate.facts(slot.gateway, slot.gateway_inode, tuple(GATEWAY_SYSCTLS))
    with raw_sockets(slot) as heard:
        emit(slot, *(frame for _, frame, _ in FRAMES))
        assert set() == delivered(heard)
        emit(slot, ethernet(ipv4(udp(53, b"<honest>"), UDP)))
        assert {"honest"} == delivered(heard)
    assert before == netstate.facts(slot.gateway, slot.gateway_inode, tuple(GATEWAY_SYSCTLS))


def test_without_the_rules_the_kernel_delivers_them(slot: Slot) -> None:
    """The control: the frames that are not delivered above can be delivered."""
    netns.load_rules(slot.gateway, "flush ruleset\n")
    with raw_sockets(slot) as heard:
        emit(slot, *(frame for _, frame, _ in FRAMES))
        assert {name for name, _, arrives in FRAMES if arrives} <= delivered(heard)


@pytest.mark.parametrize("kind", ["acknowledgements", "fragments"])
def test_what_begins_no_connection_takes_no_place_in_the_table(kind: str, slot: Slot) -> None:
    """Neither frames of no connection, nor fragments that begin one, above the rate of new connections."""
    count = 4 * PLAN.syn_rate
    frames: list[bytes] = []
    for port in range(1024, 1024 + count):
        if kind == "fragments":
            syn = tcp(SYN, own=port)
            frames += [ethernet(ipv4(syn[:8], TCP, fragment=MORE)), ethernet(ipv4(syn[8:], TCP, fragment=1))]
        else:
            frames.append(ethernet(ipv4(tcp(ACK, own=port), TCP)))
    with netns.inside(slot.gateway, lambda: socket.create_server(("0.0.0.0", PLAN.proxy_port))):
        emit(slot, *frames)
        assert 0 == tracked(slot)


def counted(slot: Slot) -> dict[str, int]:
    return dict(netstate.gateway(slot.gateway, slot.gateway_inode, ()).counters)


def grown(slot: Slot, *frames: bytes) -> dict[str, int]:
    before = counted(slot)
    emit(slot, *frames)
    after = counted(slot)
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def test_every_frame_that_is_dropped_is_in_exactly_one_counter(slot: Slot) -> None:
    """Also twice in the same order: no frame leaves a state that lets another pass uncounted."""
    for name, frame, _ in (*FRAMES, *FRAMES):
        assert [1] == list(grown(slot, frame).values()), name


DROPPED = {
    "tcp": ethernet(ipv4(tcp(ACK), TCP)),
    "tcp to a stranger": ethernet(ipv4(tcp(FIN | ACK, to=STRANGER), TCP, to=STRANGER)),
    "tcp from a stranger": ethernet(ipv4(tcp(SYN, source=STRANGER), TCP, source=STRANGER)),
    "quic": ethernet(ipv4(udp(443, bytes((0xC3, 0, 0, 0, 1)) + bytes(1200)), UDP, to=STRANGER)),
    "udp": ethernet(ipv4(udp(5353, b"x"), UDP)),
    "udp to a stranger": ethernet(ipv4(udp(123, b"x"), UDP, to=STRANGER)),
    "icmp": ethernet(ipv4(icmp(8, 0, b"x"), ICMP)),
    "icmp to a stranger": ethernet(ipv4(icmp(8, 0, b"x"), ICMP, to=STRANGER)),
    "ipv6": ethernet(ipv6(udp(443, b"x"), UDP), IPV6),
    "arp": ethernet(arp(2, GATEWAY, GATEWAY), ARP, to=EVERYBODY),
    "fragments": ethernet(ipv4(udp(53, bytes(16))[:16], UDP, fragment=MORE)),
    "fragments of tcp": ethernet(ipv4(tcp(SYN)[:8], TCP, fragment=MORE)),
    "other": ethernet(ipv4(b"x", 47)),
    "other than ip": ethernet(b"x" * 50, 0x88CC),
    "malformed": ethernet(ipv4(udp(53, b"x"), UDP)[:10] + b"\0\1" + ipv4(udp(53, b"x"), UDP)[12:]),
}


@pytest.mark.parametrize("kind", DROPPED)
def test_each_kind_has_its_own_counter(kind: str, slot: Slot) -> None:
    """A thousand frames count as a thousand, or are counted above a rate."""
    frame = DROPPED[kind]
    name = kind.partition(" ")[0]
    assert {name if name == "malformed" else f"drop_{name}": 1} == grown(slot, frame)
    assert 1000 == sum(grown(slot, *[frame] * 1000).values())


def test_what_passes_is_in_no_counter(slot: Slot) -> None:
    with raw_sockets(slot) as heard:
        assert {} == grown(slot, ethernet(ipv4(udp(53, b"<honest>"), UDP)))
        assert {"honest"} == delivered(heard)
