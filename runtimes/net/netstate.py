"""The state of a network namespace, read from the kernel as facts that can be compared.

- A namespace is read only if its inode is that of the namespace that was made at the path.
- A fact is a line of text that is equal for every slot. Counters, timers and state that traffic alone changes are not
  facts.
- It reads raw netlink dumps with the standard library, which takes a fifth of a millisecond for a namespace. To parse
  them takes as long again, so `look` does it only if their digest is not a known one.
- An answer that is truncated, refused or late is an error, never an empty state.

This module changes nothing and judges nothing; `watch` does. Its functions block: call them in a worker thread.
"""

import contextlib
import hashlib
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from runtimes.net import netns
from runtimes.net.nft import MALFORMED

_TIMEOUT = 5.0
_BUFFER = 1 << 16
"""More than the kernel sends at once. Larger ones would be mapped and unmapped for each answer."""
_MOST_MESSAGES = 4096
_ROUTE, _NETFILTER = 0, 12
_REQUEST, _DUMP, _INTERRUPTED = 0x1, 0x300, 0x10
_ERROR, _DONE = 2, 3
_GETLINK, _GETADDR, _GETROUTE, _GETNEIGH, _GETRULE, _GETQDISC = 18, 22, 26, 30, 34, 38
_GETGEN, _GETOBJ = 10 << 8 | 16, 10 << 8 | 19
_COUNTER = 1
_NTF_PROXY = 0x08
_QUIET_NEIGHBOURS = 0x01 | 0x20 | 0x40
"""INCOMPLETE, FAILED and NOARP: the kernel makes these entries, and no packet is sent to them. (NONE is 0.)"""
_FAMILIES = {socket.AF_INET: 4, socket.AF_INET6: 16}

type Attributes = dict[int, bytes]


def _messages(sock: socket.socket, kind: int, body: bytes, flags: int = _DUMP) -> Iterator[bytes]:
    """Send a request and yield the payload of each answer.

    Raises:
        OSError: the answer was an error, truncated or late.
    """
    sock.send(struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | flags, 1, 0) + body)
    for _ in range(_MOST_MESSAGES):
        data, _, received, _ = sock.recvmsg(_BUFFER)
        if received & socket.MSG_TRUNC:
            raise OSError("a netlink answer was cut short")
        at = 0
        while at < len(data):
            length, answer, answered, _, _ = struct.unpack_from("=IHHII", data, at)
            payload = data[at + 16 : at + length]
            if answered & _INTERRUPTED:
                raise OSError("the state changed while it was read")
            if answer == _DONE:
                return
            if answer == _ERROR:
                raise OSError(-struct.unpack_from("=i", payload)[0], "netlink refused")
            yield payload
            if flags != _DUMP:
                return
            at += length + 3 & ~3
    raise OSError("a netlink answer has no end")


def attributes(payload: bytes) -> Attributes:
    """Parse netlink attributes."""
    found: Attributes = {}
    at = 0
    while at + 4 <= len(payload):
        length, kind = struct.unpack_from("=HH", payload, at)
        if length < 4:
            break
        found[kind & 0x3FFF] = payload[at + 4 : at + length]
        at += length + 3 & ~3
    return found


def _text(value: bytes | None) -> str:
    return "-" if value is None else value.rstrip(b"\0").decode("ascii", "replace")


def _number(value: bytes | None) -> int:
    return int.from_bytes(value or b"", "little")


def _address(value: bytes | None) -> str:
    if value is None:
        return "any"
    return str(ip_address(value)) if len(value) in _FAMILIES.values() else value.hex()


def link_fact(payload: bytes) -> str:
    """Describe one link of a dump."""
    _, _, index, flags, _ = struct.unpack_from("=BxHiII", payload)
    found = attributes(payload[16:])
    kind = _text(attributes(found.get(18, b"")).get(1))
    program = attributes(found.get(43, b"")).get(2, b"\0") != b"\0"
    words = [f"link {_text(found.get(3))} number {index} of kind {kind} with address {found.get(1, b'').hex(':')}"]
    words += [f"in link {_number(found[10])}"] if 10 in found else []
    words += ["with a program"] if program else []
    return " ".join([*words, "up" if flags & 1 else "down"])


def address_fact(payload: bytes) -> str:
    """Describe one address of a dump."""
    _, prefix, _, _, index = struct.unpack_from("=BBBBI", payload)
    found = attributes(payload[8:])
    return f"address {_address(found.get(2, found.get(1)))}/{prefix} on link {index}"


def route_fact(payload: bytes) -> str:
    """Describe one route of a dump."""
    _, bits, _, _, table, _, _, kind, _ = struct.unpack_from("=BBBBBBBBI", payload)
    found = attributes(payload[12:])
    words = [f"route {_address(found.get(1))}/{bits} of type {kind} in table {_number(found.get(15)) or table}"]
    for number, word in ((5, "by"), (18, "by family and")):
        words += [f"{word} {_address(found[number])}"] if number in found else []
    words += ["by several"] if 9 in found else []
    words += ["encapsulated"] if 21 in found else []
    return " ".join([*words, f"on link {_number(found.get(4))}"])


def neighbour_fact(payload: bytes) -> str | None:
    """Describe one neighbour of a dump; None for one to which no packet is sent."""
    _, index, state, flags, _ = struct.unpack_from("=BxxxiHBB", payload)
    found = attributes(payload[12:])
    if flags & _NTF_PROXY:
        return f"neighbour {_address(found.get(1))} answered for on link {index}"
    if state == 0 or state & _QUIET_NEIGHBOURS:
        return None
    kept = "static" if state & 0x80 else "learnt"
    return f"neighbour {_address(found.get(1))} at {found.get(2, b'').hex(':')} on link {index}, {kept}"


def policy_fact(payload: bytes) -> str:
    """Describe one routing rule of a dump."""
    family, *rest = struct.unpack_from("=BBBBBBBB", payload)
    found = attributes(payload[12:])
    properties = " ".join(f"{kind}:{value.hex()}" for kind, value in sorted(found.items()))
    return f"policy of family {family}: {bytes(rest).hex()} {properties}"


def queue_fact(payload: bytes) -> str:
    """Describe one queue of a dump, with its rates; programs and redirections are attached to queues."""
    _, index, _, parent, _ = struct.unpack_from("=BxxxiIII", payload)
    found = attributes(payload[20:])
    options = f" with {found[2].hex()}" if found.get(2) else ""
    return f"queue {_text(found.get(1))} on link {index} below {parent:x}{options}"


_SKIP_STATISTICS = struct.pack("=HHI", 8, 29, 1 << 3)

type Dump = tuple[int, bytes, Callable[[bytes], str | None]]

SANDBOX_DUMPS: tuple[Dump, ...] = (
    (_GETLINK, bytes(16) + _SKIP_STATISTICS, link_fact),
    (_GETADDR, bytes(8), address_fact),
    (_GETROUTE, bytes(12), route_fact),
    (_GETRULE, bytes(12), policy_fact),
    (_GETQDISC, bytes(20), queue_fact),
)
"""Links, addresses, routes, routing rules and queues. A link's payload has its own IPv4 settings, too, which are no
facts.
"""

DUMPS: tuple[Dump, ...] = (
    *SANDBOX_DUMPS,
    (_GETNEIGH, bytes(12), neighbour_fact),
    (_GETNEIGH, bytes(10) + bytes((_NTF_PROXY, 0)), neighbour_fact),
)
"""Everything, that is also neighbours."""


def look(dumps: Sequence[Dump], known: bytes | None = None) -> tuple[bytes, frozenset[str] | None]:
    """Return a digest of the state of the caller's namespace, and its facts: None if the digest is `known`.

    Raises:
        OSError: it could not be read.
    """
    state = hashlib.blake2b(digest_size=16)
    unread: list[tuple[Callable[[bytes], str | None], bytes]] = []
    found: set[str | None] = set()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _ROUTE) as sock:
        sock.settimeout(_TIMEOUT)
        for kind, body, describe in dumps:
            state.update(struct.pack("=I", kind))
            for payload in _messages(sock, kind, body):
                if kind in (_GETNEIGH, _GETQDISC):  # timers and counts differ at each look
                    fact = describe(payload)
                    found.add(fact)
                    state.update(repr(fact).encode())
                else:
                    unread.append((describe, payload))
                    state.update(payload)
    digest = state.digest()
    if digest == known:
        return digest, None
    found.update(describe(payload) for describe, payload in unread)
    return digest, frozenset(fact for fact in found if fact is not None)


def settings(sysctls: Sequence[str]) -> frozenset[str]:
    """Return the values of sysctls, such as `net/ipv4/ip_forward`, in the caller's namespace, as facts.

    The kernel finds the directory of a namespace among those of all namespaces, one after the other. So each is opened
    once, and not once for each value.
    """
    found = set()
    with contextlib.ExitStack() as stack:
        directories: dict[str, int] = {}
        for name in sysctls:
            first, family, rest = name.split("/", 2)
            if (top := f"{first}/{family}") not in directories:
                directories[top] = os.open(f"/proc/sys/{top}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, directories[top])
            found.add(f"setting {name} is {_setting(rest, directories[top])}")
    return frozenset(found)


def _facts(sysctls: Sequence[str]) -> frozenset[str]:
    _, found = look(DUMPS)
    return (found or frozenset()) | settings(sysctls)


def _setting(name: str, directory: int) -> str:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return "missing"
    try:
        return os.read(fd, 256).decode("ascii", "replace").strip()
    finally:
        os.close(fd)


def _nftables() -> socket.socket:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETFILTER)
    sock.settimeout(_TIMEOUT)
    return sock


def current_generation() -> int:
    """Return the generation of nft's rules in the caller's namespace, which grows with each change."""
    with _nftables() as sock:
        (payload,) = _messages(sock, _GETGEN, struct.pack("!BBH", 0, 0, 0), 0)
    return int.from_bytes(attributes(payload[4:])[1], "big")


def counter(payload: bytes) -> tuple[str, int] | None:
    """Return name and packets of one named counter of a dump; None for another object."""
    found = attributes(payload[4:])
    if int.from_bytes(found.get(3, b""), "big") != _COUNTER:
        return None
    return _text(found.get(2)), int.from_bytes(attributes(found.get(4, b"")).get(2, b""), "big")


def counters() -> dict[str, int]:
    """Return the packets of each counter of the caller's namespace, and those that the IP stack itself has dropped."""
    found = {MALFORMED: _malformed(Path("/proc/thread-self/net/snmp").read_text())}
    with _nftables() as sock:
        for name, packets in filter(None, map(counter, _messages(sock, _GETOBJ, struct.pack("!BBH", 0, 0, 0)))):
            found[name] = found.get(name, 0) + packets
    return found


def _malformed(snmp: str) -> int:
    """Return the number of packets that the IP stack dropped for their header or destination, between both tables."""
    names, values = (line.split() for line in snmp.splitlines() if line.startswith("Ip: "))
    counted = dict(zip(names, values, strict=True))
    return sum(int(counted[name]) for name in ("InHdrErrors", "InAddrErrors", "InDiscards"))


@dataclass(frozen=True, slots=True)
class Gateway:
    """The state of a gateway namespace: its facts, the generation of nft's rules, and the packets in nft's counters."""

    facts: frozenset[str]
    generation: int
    counters: Mapping[str, int]


def facts(path: Path, inode: int, sysctls: Sequence[str]) -> frozenset[str]:
    """Return the facts of the namespace at `path`, without nft's rules.

    Raises:
        netns.WrongNamespaceError: the namespace does not have `inode`.
        OSError: it could not be read.
    """
    return netns.inside(path, lambda: _facts(sysctls), inode)


def gateway(path: Path, inode: int, sysctls: Sequence[str]) -> Gateway:
    """Return the facts of a gateway's namespace, and nft's generation and counters there.

    Raises:
        netns.WrongNamespaceError, OSError: as `facts`.
    """
    return netns.inside(path, lambda: Gateway(_facts(sysctls), current_generation(), counters()), inode)


def generation(path: Path | None) -> int:
    """Return the generation of nft's rules, which grows with each change, at `path` (None: the caller's)."""
    return current_generation() if path is None else netns.inside(path, current_generation)
