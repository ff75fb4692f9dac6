"""Resolvers with IPv6 addresses: from the settings to a name that a sandbox queries, over UDP and over TCP.

It tests `gateway/dns/resolver.py`.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from dnslib import QTYPE, RR, A, DNSRecord

from testbed.internet import ADDRESSES, STATUS, Internet, ip
from testbed.stack import Stack
from tests.stacks import beside

pytestmark = pytest.mark.system

RESOLVER = "2606:2800:222::53"
UP, NET = "2606:2800:223::1", "2606:2800:223::2"
ZONE = "cdn.bank.example"
SHORT, LONG = f"short.{ZONE}", f"long.{ZONE}"
"""Names of one server. The answer for the second is truncated over UDP."""


class OverIpv6(Stack):
    """A Sallyport whose only resolver has an IPv6 address."""

    @property
    def settings(self) -> str:
        lines = super().settings.splitlines()
        ours = f'dns_upstreams = ["[{RESOLVER}]:53"]'
        return "\n".join(ours if line.startswith("dns_upstreams") else line for line in lines) + "\n"


@dataclass
class Resolver:
    """A DNS server on an IPv6 address of the internet. It records each question with its transport and source."""

    internet: Internet
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    @contextlib.contextmanager
    def serving(self) -> Iterator["Resolver"]:
        internet = self.internet
        for namespace, device, address in ((internet.up, "up0", UP), (internet.net, "net0", NET)):
            ip("-n", namespace, "-6", "addr", "add", f"{address}/64", "dev", device, "nodad")
        ip("-n", internet.up, "-6", "route", "add", f"{RESOLVER}/128", "via", NET)
        ip("-n", internet.net, "-6", "addr", "add", f"{RESOLVER}/128", "dev", "lo", "nodad")
        with (
            internet.open_socket(internet.net, socket.AF_INET6, socket.SOCK_DGRAM) as udp,
            internet.open_socket(internet.net, socket.AF_INET6, socket.SOCK_STREAM) as tcp,
        ):
            for sock in (udp, tcp):
                sock.bind((RESOLVER, 53))
            tcp.listen()
            threads = [threading.Thread(target=work) for work in (lambda: self._udp(udp), lambda: self._tcp(tcp))]
            for thread in threads:
                thread.start()
            try:
                yield self
            finally:
                for sock in (udp, tcp):
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
                for thread in threads:
                    thread.join(timeout=10)

    def _udp(self, sock: socket.socket) -> None:
        while True:
            query, peer = sock.recvfrom(4096)
            if not query:
                return
            sock.sendto(self._answer("udp", query, peer[0]), peer)

    def _tcp(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, peer = listener.accept()
                with sock, sock.makefile("rb") as stream:
                    reply = self._answer("tcp", stream.read(int.from_bytes(stream.read(2))), peer[0])
                    sock.sendall(len(reply).to_bytes(2) + reply)

    def _answer(self, way: str, query: bytes, peer: str) -> bytes:
        record = DNSRecord.parse(query)
        name = str(record.q.qname).rstrip(".")
        self.asked.append((way, name, peer))
        reply = record.reply()
        if way == "udp" and name == LONG:
            reply.header.tc = 1
        else:
            reply.add_answer(RR(record.q.qname, QTYPE.A, rdata=A(ADDRESSES[STATUS]), ttl=60))
        return bytes(reply.pack())


def test_a_resolver_with_an_ipv6_address_is_asked_over_udp_and_tcp() -> None:
    with beside(OverIpv6, "v6") as stack, Resolver(stack.internet).serving() as resolver:
        for runtime in ("runc", "runsc"):
            sandbox = stack.create(runtime, policy="bounded-names")
            try:
                for name in (SHORT, LONG):
                    done = sandbox.commands.run(f"curl -sS --max-time 30 http://{name}/{runtime}")
                    printed = "".join(message.text for message in (*done.logs.stdout, *done.logs.stderr))
                    assert f"this is {STATUS}" in printed
            finally:
                sandbox.kill()
                sandbox.close()
        notes = stack.internet.notes()

    assert {("udp", SHORT, UP), ("udp", LONG, UP), ("tcp", LONG, UP)} == set(resolver.asked)
    assert [] == [note for note in notes if "question" in note]  # No other resolver was asked.
    assert {f"/{runtime}" for runtime in ("runc", "runsc")} == {note["target"] for note in notes if "target" in note}
