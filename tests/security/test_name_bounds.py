"""Every way to ask for a name has the same decision and budget. Beyond a bound, no name reaches its server.

The ways are DNS over UDP and TCP, the server name of a TLS flow (spliced and inspected), and the Host of an HTTP flow,
also with an absolute target and in a WebSocket upgrade. Inside a flow of an allowed name they are Host, absolute target
and HTTP/2's `:authority`. The authoritative server records each query. The module tests `gateway/dns/server.py`.
"""

import secrets
import struct
from collections.abc import Iterator

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection

from testbed.attacks import Attack, Verdicts, from_outside, from_sandbox
from testbed.internet import API, DNS_ADDRESS, Internet
from testbed.stack import Stack
from tests.conftest import ON_RUNC

pytestmark = pytest.mark.system

RESOLVER = "192.0.2.1"
OPENED, SPLICED = "in.bank.example", "cdn.bank.example"
BUDGET = 14
"""The value of `unique_names` in the policy."""
BEYOND = {
    "k3j9x0q8w7e6r5t4y3u2i1o0pz@": "dns.entropy",
    f"{'a' * 41}@": "dns.max_label",
    "a.b.c.d.e@": "dns.max_labels",
    f"{'b' * 36}@.{'c' * 36}.{'d' * 36}": "dns.max_name",
}
"""The labels before a zone (`@` stands for a tag), with the rule that refuses them."""


def _dns(name: str) -> str:
    labels = "".join(chr(len(label)) + label for label in name.split("."))
    return struct.pack("!6H", 0x4D4D, 0x0100, 1, 0, 0, 0).decode("latin-1") + labels + "\0\0\1\0\1"


def _h2(authority: str) -> str:
    connection = H2Connection(H2Configuration(header_encoding=None))
    connection.initiate_connection()
    fields = ((b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/"), (b":authority", authority.encode()))
    connection.send_headers(1, fields, end_stream=True)
    return connection.data_to_send().decode("latin-1")


def _get(host: str, target: str = "/", more: str = "") -> str:
    return f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n"


_UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def _ways(name: str, *, far: str | None = None) -> Iterator[Attack]:
    """Yield every way to ask for `name`. `far` is the destination of the packets."""
    to, dns = far or API, far or RESOLVER
    message = _dns(name)
    framed = len(message).to_bytes(2).decode("latin-1") + message
    yield Attack(f"{name} by UDP", (message,), None, dns, 53, options={"udp": True, "quiet": 0.3})
    yield Attack(f"{name} by TCP", (framed,), None, dns, 53, options={"quiet": 0.3})
    yield Attack(f"{name} by SNI", (_get(name),), name, to, 443)
    yield Attack(f"{name} by h2", (_h2(name),), name, to, 443, options={"alpn": ["h2"]})
    yield Attack(f"{name} by Host", (_get(name),), None, to, 80)
    yield Attack(f"{name} by absolute target", (_get(name, f"http://{name}/"),), None, to, 80)
    yield Attack(f"{name} by WebSocket", (_get(name, "/", _UPGRADE),), None, to, 80)


def _inside(front: str, name: str) -> Iterator[Attack]:
    """Yield the ways to ask for `name` on a flow that was allowed for `front`."""
    yield Attack(f"{name} as Host behind {front}", (_get(name),), front, API, 443)
    yield Attack(f"{name} as target behind {front}", (_get(front, f"https://{name}/"),), front, API, 443)
    yield Attack(f"{name} as authority behind {front}", (_h2(name),), front, API, 443, options={"alpn": ["h2"]})


def _asked(verdicts: Verdicts) -> set[str]:
    """Return the names in the queries at the authoritative server."""
    return {str(note["question"]) for note in verdicts.noted if note["host"] == DNS_ADDRESS and "question" in note}


def _refused(verdicts: Verdicts, name: str) -> list[str]:
    """Return the rule of each denial of a name by a bound."""
    return [
        str(record["rule"])
        for record in verdicts.records
        if record.get("host") == name and record["decision"] == "deny" and str(record.get("rule")).startswith("dns.")
    ]


@pytest.fixture(params=ON_RUNC, name="runtime")
def _runtime(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(name="victim")
def _victim(stack: Stack, runtime: str) -> Iterator[str]:
    sandbox = stack.create(runtime, policy="bounded-names")
    try:
        yield str(sandbox.id)
    finally:
        sandbox.kill()
        sandbox.close()


def test_a_name_beyond_a_bound_is_refused_by_every_way(internet: Internet, stack: Stack, victim: str) -> None:
    tag = secrets.token_hex(2)
    names = {f"{free.replace('@', tag)}.{zone}": rule for free, rule in BEYOND.items() for zone in (OPENED, SPLICED)}
    attacks = tuple(attack for name in names for attack in _ways(name))
    verdicts = from_sandbox(attacks, internet, stack, victim)

    assert set() == _asked(verdicts)
    assert {name: [rule] * 7 for name, rule in names.items()} == {name: _refused(verdicts, name) for name in names}
    pages = [verdicts.answer(one) for one in attacks if one.port == 80]
    rules = [rule for rule in names.values() for _ in range(3)]
    assert [] == [
        page for page, rule in zip(pages, rules, strict=True) if "HTTP/1.1 403" not in page or rule not in page
    ]


def test_all_ways_share_one_budget_of_distinct_names(internet: Internet, stack: Stack, victim: str) -> None:
    """The first names use up the budget, each by another way.

    A new name is then denied by all ways, a former one by none.
    """
    tag = secrets.token_hex(2)
    first = [f"n{number}-{tag}.{OPENED}" for number in range(BUDGET)]
    attacks = tuple(tuple(_ways(name))[number % 7] for number, name in enumerate(first))
    verdicts = from_sandbox(attacks, internet, stack, victim)
    assert set(first) == _asked(verdicts)
    assert {name: [] for name in first} == {name: _refused(verdicts, name) for name in first}

    new = [f"one-too-many-{tag}.{OPENED}", f"another-{tag}.{OPENED}"]
    again = tuple(attack for name in (*new, first[0], first[3]) for attack in _ways(name))
    inside = tuple(_inside(first[0], new[0]))
    verdicts = from_sandbox((*again, *inside), internet, stack, victim)
    assert set() == _asked(verdicts) - set(first)
    assert {name: ["dns.unique_names"] * 7 for name in new} == {name: _refused(verdicts, name) for name in new}
    assert [[], []] == [_refused(verdicts, first[0]), _refused(verdicts, first[3])]

    sandbox = stack.connect(victim)
    try:
        usual = tuple(_ways(f"usual-{tag}.{SPLICED}"))  # another wildcard has its own budget
        verdicts = from_sandbox(usual, internet, stack, victim)
    finally:
        sandbox.close()
    assert {f"usual-{tag}.{SPLICED}"} == _asked(verdicts)


def test_where_no_gate_stands_such_names_reach_their_server(internet: Internet) -> None:
    """This is the control."""
    name = f"{next(iter(BEYOND)).replace('@', 'ctl')}.{OPENED}"
    attacks = tuple(_ways(name, far=DNS_ADDRESS))[:2]
    assert {name} == _asked(from_outside(attacks, internet))
