"""The test network of the ways out: a separate upstream with every far end.

    gateway worker -> [up] ===veth=== [net] attacker, metadata, resolver, one allowed host
      control run  -> [ctl] ==veth===   |

- It has no other connection. No real address is dialled, and it works without a network.
- This process counts arrivals from frames and accepted connections.
- The end of its context removes the namespaces with everything in them.
"""

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dnslib import QTYPE, RCODE, RR, A, DNSError, DNSRecord

from lifecycle.posture import interrupts, ways_out
from lifecycle.posture.attempts import (
    ATTACKER_ADDRESS,
    ATTACKER_V6,
    METADATA_ADDRESS,
    QUIC_INITIAL,
    ProbeError,
    Report,
    report,
)
from lifecycle.posture.capture import Capture, in_namespace

ATTACKER, ALLOWED = "www.attacker.example", "status.bank.example"
ALLOWED_ADDRESS, RESOLVER = "93.184.216.13", "93.184.216.53"
GATEWAY_PORTS, HOST_PORTS = (8080, 15002), ways_out.HOST_PORTS
_UP, _UP_FAR, _CONTROL, _CONTROL_FAR = "93.184.217.1", "93.184.217.2", "93.184.218.2", "93.184.218.1"
_TRY_SECONDS = 60.0


class ProbeNetworkError(Exception):
    """A step failed. The message names it."""


class Counter:
    """A listener in a namespace that counts connections. Use as a context manager."""

    def __init__(self, netns: str, ports: tuple[int, ...]) -> None:
        self.hits = 0
        self._listeners = [in_namespace(netns, lambda port=port: _listener(port)) for port in ports]  # type: ignore[misc]
        self._threads = [threading.Thread(target=self._accept, args=(item,)) for item in self._listeners]

    def __enter__(self) -> "Counter":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.hits += 1
            connection.close()


def _listener(port: int) -> socket.socket:
    return socket.create_server(("0.0.0.0", port))  # noqa: S104 - in a namespace of ours


class ProbeNetwork:
    """The namespaces `<name>-up`, `-net` and `-ctl`. Use as a context manager."""

    def __init__(self, name: str, directory: Path) -> None:
        self.up, self.net, self.control = (f"{name}-{part}" for part in ("up", "net", "ctl"))
        self._directory = directory
        self._resources = ExitStack()

    @staticmethod
    def path(namespace: str) -> str:
        """Return the file of a namespace."""
        return f"/run/netns/{namespace}"

    def __enter__(self) -> "ProbeNetwork":
        with ExitStack() as resources:
            for namespace in (self.up, self.net, self.control):
                _ip("netns", "add", namespace)
                resources.callback(_ip, "netns", "del", namespace)
                _ip("-n", namespace, "link", "set", "lo", "up")
            in_namespace(self.path(self.net), lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))
            self._link(self.up, "up0", _UP, "net0", _UP_FAR)
            self._link(self.control, "ctl0", _CONTROL, "net1", _CONTROL_FAR)
            for place, device, address in (
                (self.control, "ctl0", "2606:2800:221::2/64"),
                (self.net, "net1", "2606:2800:221::1/64"),
                (self.net, "lo", f"{ATTACKER_V6}/128"),
            ):
                _ip("-n", place, "-6", "addr", "add", address, "dev", device, "nodad")
            _ip("-n", self.control, "-6", "route", "add", "default", "via", "2606:2800:221::1")
            for address in (ATTACKER_ADDRESS, ALLOWED_ADDRESS, RESOLVER, METADATA_ADDRESS):
                _ip("-n", self.net, "addr", "add", f"{address}/32", "dev", "lo")
            resources.enter_context(_resolver(self.path(self.net)))
            self.host = resources.enter_context(Counter(self.path(self.up), HOST_PORTS))
            self.wire = resources.enter_context(Capture(self.path(self.net), None))
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        interrupts.ignore()
        self._resources.close()

    def _link(self, near: str, near_name: str, near_address: str, far_name: str, far_address: str) -> None:
        _ip("-n", near, "link", "add", near_name, "type", "veth", "peer", "name", far_name, "netns", self.net)
        for namespace, name, address in ((near, near_name, near_address), (self.net, far_name, far_address)):
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", name)
            _ip("-n", namespace, "link", "set", name, "up")
        _ip("-n", near, "route", "add", "default", "via", far_address)

    def try_ungated(self, probe: str) -> Report:
        """Try one way from the place without a gate. Return the report of the probe.

        Raises:
            ProbeError: it was not tried to its end.
        """
        resolver = self._directory / "resolv.conf"
        resolver.write_text(f"nameserver {RESOLVER}\noptions timeout:1 attempts:1\n")
        script = 'mount --bind "$1" /etc/resolv.conf && exec "$2" -I "$3" one "$4"'
        values = (str(resolver), sys.executable, str(ways_out.__file__), probe)
        command = ["nsenter", f"--net={self.path(self.control)}", "unshare", "-m", "sh", "-c", script, "sh", *values]
        given = targets(resolver=RESOLVER, gateway=_CONTROL_FAR, inside=_CONTROL, interface="ctl0", gateway_mac="")
        try:
            done = subprocess.run(
                command,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PROBE_TARGETS": json.dumps(given)},
                capture_output=True,
                text=True,
                timeout=_TRY_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ProbeError(f"probe {probe} did not end within {_TRY_SECONDS:.0f} s") from None
        return report(probe, done.returncode, done.stdout + done.stderr)


def targets(**places: object) -> dict[str, Any]:
    """Return the parameters of a probe: the far ends, and the place it starts from."""
    return {
        "attacker_name": ATTACKER,
        "attacker": ATTACKER_ADDRESS,
        "attacker_v6": ATTACKER_V6,
        "allowed_name": ALLOWED,
        "quic_initial": QUIC_INITIAL.read_text(),
        "tunnel_zone": "t.attacker.example",
        "dns": RESOLVER,
        "metadata": METADATA_ADDRESS,
        "host": _UP,
        **places,
    }


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ProbeNetworkError(f"ip {' '.join(arguments)}: {done.stderr.strip()[:200]}")


@contextmanager
def _resolver(netns: str) -> Iterator[None]:
    """Run a resolver that answers the two existing names and denies all others."""
    sock = in_namespace(netns, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    sock.bind((RESOLVER, 53))
    sock.settimeout(0.1)
    ending = threading.Event()

    def serve() -> None:
        while not ending.is_set():
            try:
                data, client = sock.recvfrom(4096)
                sock.sendto(_answer(DNSRecord.parse(data)).pack(), client)
            except (OSError, DNSError):
                continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
        sock.close()


def _answer(query: DNSRecord) -> DNSRecord:
    reply: DNSRecord = query.reply()
    name = str(query.q.qname).rstrip(".").lower()
    address = {ATTACKER: ATTACKER_ADDRESS, ALLOWED: ALLOWED_ADDRESS}.get(name)
    if address is None:
        reply.header.rcode = RCODE.NXDOMAIN
    elif query.q.qtype == QTYPE.A:
        reply.add_answer(RR(query.q.qname, QTYPE.A, rdata=A(address), ttl=60))
    return reply
