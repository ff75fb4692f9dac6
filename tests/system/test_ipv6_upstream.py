"""Servers with IPv6 addresses, from a sandbox with an IPv4 link: DNS, dials, injection, refusals, time-outs.

The upstream namespace, the guard and the worker are real. It tests `wire/routes.py`, `gateway/upstream.py` and
`gateway/dns/server.py`.
"""

import contextlib
import re
import select
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from ipaddress import IPv6Address
from typing import Any

import pytest
from dnslib import AAAA, QTYPE, RR, A, DNSRecord
from opensandbox.sync.sandbox import SandboxSync

from gateway.dns.server import STAND_IN
from testbed.internet import SILENT_ADDRESS, Internet, ip, received_field
from testbed.stack import Stack
from tests.conftest import ON_RUNC
from tests.stacks import beside
from tests.system import ipv6
from wire.api.hostd import Doctor

pytestmark = pytest.mark.system

ZONE = "six.example"
TOKEN = "tok-3c19d4be77"
V4, V6 = "93.184.224.{}", "2606:2800:224::{}"
DEAD_V6 = "2606:2800:225::dead"
EXCEPTED = "fd00:20::7"
REFUSED = {
    "private": ("fd00:1::1", "private"),
    "site-local": ("fec0::1", "private"),
    "link-local": ("fe80::1", "link-local"),
    "loopback": ("::1", "loopback"),
    "multicast": ("ff0e::1", "multicast"),
    "documentation": ("2001:db8::1", "documentation"),
    "metadata": ("fd20:ce::254", "metadata"),
    "mapped": ("::ffff:10.0.0.7", "private"),
    "nat64": ("64:ff9b::5db8:d80d", "translated"),
    "six-to-four": ("2002:a00:7::1", "private"),
    "own": (ipv6.UP, "own"),
    "own-mapped": ("::ffff:93.184.217.1", "own"),
}
"""Names of hosts with one address each, and the class that refuses it."""
SERVED = {
    "only": (V6.format(10),),
    "only-token": (V6.format(11),),
    "only-token2": (V6.format(19),),
    "both": (V4.format(12), V6.format(12)),
    "both-token": (V4.format(13), V6.format(13)),
    "dead": (SILENT_ADDRESS, V6.format(14)),
    "dead-token": (SILENT_ADDRESS, V6.format(15)),
    "fixed": (DEAD_V6, V4.format(16)),
    "mixed": ("10.0.0.7", V6.format(17)),
    "inside": (EXCEPTED,),
    "later": (V4.format(18), V6.format(18)),
    **{name: (address,) for name, (address, _) in REFUSED.items()},
}
"""The addresses of each name. Those of `REFUSED` that an interface can have are served, too."""
POLICY = f"""
version: 1
policies:
  agents:
    dns: {{unique_names: 100}}
    rules:
      - {{id: zone, host: "*.{ZONE}"}}
      - id: api
        hosts: [only-token.{ZONE}, only-token2.{ZONE}, both-token.{ZONE}, dead-token.{ZONE}]
        inject: {{secret: six-token, as: bearer}}
"""


class OverIpv6(Stack):
    """A Sallyport whose only resolver has an IPv6 address. The operator has excepted a network and mapped a name."""

    @property
    def settings(self) -> str:
        policy = self.directory / "six.yaml"
        policy.write_text(POLICY)
        ours = {
            "dns_upstreams": f'["[{ipv6.RESOLVER}]:53"]',
            "policy_file": f'"{policy}"',
        }
        lines = super().settings.splitlines()
        for number, line in enumerate(lines):
            key = line.partition(" = ")[0]
            lines[number] = f"{key} = {ours[key]}" if key in ours else line
        at = lines.index("[sallyport]") + 1
        fixed = ", ".join(f'"{address}"' for address in SERVED["fixed"])
        lines[at:at] = [
            'allowed_addresses = ["fd00:20::/64"]',
            f'host_addresses = {{"fixed.{ZONE}" = [{fixed}]}}',
        ]
        return "\n".join(lines) + "\n"


@dataclass
class World:
    """The running server, its internet, and the questions that its resolver was asked: (name, type)."""

    stack: Stack
    sandboxes: dict[str, SandboxSync] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def answer(self, _way: str, query: DNSRecord, _peer: str) -> DNSRecord:
        name, kind = str(query.q.qname).rstrip("."), QTYPE[query.q.qtype]
        self.asked.append((name.removesuffix(f".{ZONE}"), kind))
        reply = query.reply()
        for address in SERVED.get(name.removesuffix(f".{ZONE}"), ()):
            if (":" in address) is (kind == "AAAA"):
                data = AAAA(tuple(IPv6Address(address).packed)) if kind == "AAAA" else A(address)
                reply.add_answer(RR(query.q.qname, query.q.qtype, rdata=data, ttl=60))
        return reply

    def run(self, runtime: str, command: str) -> str:
        done = self.sandboxes[runtime].commands.run(command)
        return "".join(message.text for message in (*done.logs.stdout, *done.logs.stderr))

    def fetch(self, runtime: str, name: str, options: str = "") -> str:
        return self.run(runtime, f"curl -sS --max-time 60 {options} https://{name}.{ZONE}/{runtime}-{name}")

    def records(self, runtime: str, kind: str, name: str | None) -> list[dict[str, Any]]:
        host = None if name is None else f"{name}.{ZONE}"
        return [
            record
            for record in self.stack.audit_records()
            if (record["kind"], record.get("sandbox"), record.get("host")) == (kind, self.sandboxes[runtime].id, host)
        ]

    def answers(self, runtime: str, name: str) -> list[dict[str, Any]]:
        """Return the records of answers to the sandbox. They are written soon after the answer."""
        deadline = time.monotonic() + 30
        while True:
            found = [record for record in self.records(runtime, "dns", name) if "addresses" in record]
            if found or time.monotonic() > deadline:
                return found
            select.select([], [], [], 0.05)

    def dialled(self, runtime: str, name: str) -> list[str]:
        """Return the addresses that the worker has dialled for `name`."""
        records = self.records(runtime, "connect", name)
        return [record["address"] for record in records if record["decision"] == "allow"]

    def families(self) -> str:
        """Return the finding of doctor about the namespace from which workers dial."""
        return next(check.detail for check in self.stack.ask(Doctor()).checks if check.name == "upstream")

    def received(self, runtime: str, name: str) -> list[dict[str, Any]]:
        return [note for note in self.stack.internet.notes() if note.get("target") == f"/{runtime}-{name}"]


@contextlib.contextmanager
def world(runtimes: Iterable[str]) -> Iterator[World]:
    with beside(OverIpv6, "six") as stack, contextlib.ExitStack() as hosts:
        made = World(stack)
        internet = stack.internet
        ipv6.connect(internet)
        _routes(internet)
        for name, addresses in SERVED.items():
            there = [address for address in addresses if _servable(address)]
            hosts.enter_context(ipv6.host(internet, f"{name}.{ZONE}", *there))
        hosts.enter_context(ipv6.resolver(internet, made.answer))
        tokens = [f"--host={name}.{ZONE}" for name in SERVED if "-token" in name]
        stack.sallyport("vault", "put", "six-token", *tokens, stdin=TOKEN)
        for runtime in runtimes:
            made.sandboxes[runtime] = stack.create(runtime)
        try:
            yield made
        finally:
            for sandbox in made.sandboxes.values():
                sandbox.kill()
                sandbox.close()


def _servable(address: str) -> bool:
    unservable = (SILENT_ADDRESS, DEAD_V6, ipv6.UP, "::1")
    return address not in unservable and not address.startswith(("fe80", "ff0e", "::ffff"))


def _routes(internet: Internet) -> None:
    """Everything is routed to the servers: also what may not be dialled."""
    for destination in ("default", "fd00:20::/64"):
        ip("-n", internet.up, "-6", "route", "add", destination, "via", ipv6.NET)
    ip("-n", internet.net, "-6", "route", "add", "blackhole", f"{DEAD_V6}/128")


@pytest.fixture(scope="module")
def six(some_runtimes: tuple[str, ...]) -> Iterator[World]:
    with world(some_runtimes) as made:
        yield made


one_runtime = pytest.mark.parametrize("runtime", ON_RUNC)


@one_runtime
@pytest.mark.parametrize("name", ["only", "both", "mixed", "inside"])
def test_a_spliced_flow_reaches_a_host_over_the_family_that_it_has(six: World, runtime: str, name: str) -> None:
    """The first family is IPv4. An address that policy refuses is passed over; an excepted network is open."""
    assert f"this is {name}.{ZONE}" in six.fetch(runtime, name)
    expected = {"only": SERVED["only"], "both": SERVED["both"][:1], "mixed": SERVED["mixed"][1:], "inside": (EXCEPTED,)}
    assert list(expected[name]) == six.dialled(runtime, name)
    assert 1 == len(six.received(runtime, name))


@one_runtime
@pytest.mark.parametrize("name", ["only-token", "both-token", "dead-token"])
def test_a_secret_is_injected_into_requests_over_both_families(six: World, runtime: str, name: str) -> None:
    assert f"this is {name}.{ZONE}" in six.fetch(runtime, name)
    (note,) = six.received(runtime, name)
    assert f"Bearer {TOKEN}" == received_field(note, "authorization")
    dialled = SERVED[name][:1] if name == "both-token" else SERVED[name]
    assert list(dialled) == six.dialled(runtime, name)
    (verified,) = (record for record in six.records(runtime, "connect", name) if record["decision"] == "info")
    assert (SERVED[name][0 if name == "both-token" else -1], f"{name}.{ZONE}") == (
        verified["address"],
        verified["peer_name"],
    )


@one_runtime
@pytest.mark.parametrize("name", ["dead", "fixed"])
def test_a_host_whose_first_family_is_silent_is_reached_over_the_other_in_bounded_time(
    six: World, runtime: str, name: str
) -> None:
    """IPv4 is silent, or the IPv6 address that the operator has put first."""
    assert f"this is {name}.{ZONE}" in six.fetch(runtime, name)
    first, second = (record for record in six.records(runtime, "connect", name) if record["decision"] == "allow")
    assert SERVED[name] == (first["address"], second["address"])
    waited = datetime.fromisoformat(second["ts"]) - datetime.fromisoformat(first["ts"])
    assert 1.5 < waited.total_seconds() < 4.5


@one_runtime
@pytest.mark.parametrize("name", REFUSED)
def test_an_ipv6_address_that_is_not_public_is_neither_shown_nor_dialled(six: World, runtime: str, name: str) -> None:
    address, kind = REFUSED[name]
    assert "Could not resolve host" in six.fetch(runtime, name)
    answers = {(one["decision"], one["rule"], len(one["addresses"])) for one in six.answers(runtime, name)}
    assert {("deny", f"address-class:{kind}", 0)} == answers

    assert "SSL routines" in six.fetch(runtime, name, f"--resolve {name}.{ZONE}:443:{V4.format(12)}")
    (denied,) = (record for record in six.records(runtime, "flow", name) if record["decision"] == "deny")
    assert f"address-class:{kind}" == denied["rule"]
    assert address.removeprefix("::ffff:") in denied["reason"]
    assert [] == six.records(runtime, "connect", name)
    assert [] == six.received(runtime, name)


@one_runtime
def test_the_sandbox_sees_ipv4_addresses_only(six: World, runtime: str) -> None:
    """A name with IPv6 addresses only has the stand-in; the log has the addresses that can be dialled."""
    answers = {
        name: re.findall(r"^(\S+) ", six.run(runtime, f"getent ahosts {name}.{ZONE}"), re.MULTILINE)
        for name in ("only", "both")
    }
    assert ({str(STAND_IN)}, {SERVED["both"][0]}) == (set(answers["only"]), set(answers["both"]))
    for name in answers:
        assert {SERVED[name]} == {tuple(record["addresses"]) for record in six.answers(runtime, name)}


@one_runtime
def test_the_stand_in_by_itself_leads_nowhere(six: World, runtime: str) -> None:
    assert "unrecognized name" in six.run(runtime, f"curl -sS --max-time 60 https://{STAND_IN}/")
    (denied,) = (record for record in six.records(runtime, "flow", None) if record.get("decision") == "deny")
    assert (str(STAND_IN), "address-class:reserved") == (denied["destination"], denied["rule"])
    assert "Bearer" not in six.run(runtime, f"curl -sS --max-time 60 http://{STAND_IN}/")


@one_runtime
def test_a_secret_is_injected_over_ipv6_for_a_client_that_speaks_only_http2(six: World, runtime: str) -> None:
    assert f"this is only-token2.{ZONE}" in six.fetch(runtime, "only-token2", "--http2-prior-knowledge")
    (note,) = six.received(runtime, "only-token2")
    assert f"Bearer {TOKEN}" == received_field(note, "authorization")
    assert list(SERVED["only-token2"]) == six.dialled(runtime, "only-token2")


def test_without_a_route_no_ipv6_address_is_asked_for_or_dialled(six: World) -> None:
    """The route goes away while the workers run. The resolver has a route of its own."""
    assert "IPv4 and IPv6" in six.families()
    ip("-n", six.stack.internet.up, "-6", "route", "del", "default")
    assert "no IPv6 route" not in six.families()  # The excepted network still has one.
    ip("-n", six.stack.internet.up, "-6", "route", "del", "fd00:20::/64")
    assert "no IPv6 route" in six.families()
    assert f"this is later.{ZONE}" in six.fetch("runc", "later")
    assert [("later", "A")] == [question for question in six.asked if question[0] == "later"]
    assert [SERVED["later"][0]] == six.dialled("runc", "later")
