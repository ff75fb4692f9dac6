"""Resolvers with IPv6 addresses: from the settings to a name that a sandbox queries, over UDP and over TCP.

It tests `gateway/dns/resolver.py`.
"""

from dataclasses import dataclass, field

import pytest
from dnslib import QTYPE, RR, A, DNSRecord

from testbed.internet import ADDRESSES, STATUS
from testbed.stack import Stack
from tests.stacks import beside
from tests.system import ipv6

pytestmark = pytest.mark.system

ZONE = "cdn.bank.example"
SHORT, LONG = f"short.{ZONE}", f"long.{ZONE}"
"""Names of one server. The answer for the second is truncated over UDP."""


class OverIpv6(Stack):
    """A Sallyport whose only resolver has an IPv6 address."""

    @property
    def settings(self) -> str:
        lines = super().settings.splitlines()
        ours = f'dns_upstreams = ["[{ipv6.RESOLVER}]:53"]'
        return "\n".join(ours if line.startswith("dns_upstreams") else line for line in lines) + "\n"


@dataclass
class Zone:
    """The answers of the resolver. It records each question with its transport and source."""

    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def answer(self, way: str, query: DNSRecord, peer: str) -> DNSRecord:
        name = str(query.q.qname).rstrip(".")
        self.asked.append((way, name, peer))
        reply = query.reply()
        if way == "udp" and name == LONG:
            reply.header.tc = 1
        else:
            reply.add_answer(RR(query.q.qname, QTYPE.A, rdata=A(ADDRESSES[STATUS]), ttl=60))
        return reply


def test_a_resolver_with_an_ipv6_address_is_asked_over_udp_and_tcp() -> None:
    zone = Zone()
    with beside(OverIpv6, "v6") as stack:
        ipv6.connect(stack.internet)
        with ipv6.resolver(stack.internet, zone.answer):
            _fetch(stack)
        notes = stack.internet.notes()

    assert {("udp", SHORT, ipv6.UP), ("udp", LONG, ipv6.UP), ("tcp", LONG, ipv6.UP)} == set(zone.asked)
    assert [] == [note for note in notes if "question" in note]  # No other resolver was asked.
    assert {f"/{runtime}" for runtime in ("runc", "runsc")} == {note["target"] for note in notes if "target" in note}


def _fetch(stack: Stack) -> None:
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
