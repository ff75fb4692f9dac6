"""ClientHellos and first bytes of every kind: a flow reaches only its one valid name, if policy allows it.

The module tests `gateway/accept.py` and `gateway/refusal.py`.
"""

import pytest

from demo.sandboxes import DemoSandbox
from testbed.attacks import Attack, Verdicts, from_outside, from_sandbox
from testbed.internet import ADDRESSES, API, ATTACKER, GIT, STATUS, Internet
from testbed.stack import Stack
from tests.conftest import ON_RUNC

pytestmark = pytest.mark.system


def _get(host: str) -> str:
    return f"GET /v1/@@ HTTP/1.1\r\nHost: {host}\r\n\r\n"


def _odd(name: str, wire: str, host: str = API) -> Attack:
    """Return a handshake for `host` in which the bytes `wire`, of the same length, replace the name."""
    assert len(host) == len(wire)
    return Attack(name, (_get(host),), host, host, options={"hello": {"replace": [host, wire]}})


ECH = "fe0d0012000001000107000461626364000461626364"
"""An outer encrypted_client_hello extension."""

NOTHING_ARRIVES = (
    Attack("no name, to an allowed host", (_get(API),), None, API, options={"sni": None}),
    Attack("no name, to the attacker", (_get(API),), None, ATTACKER, options={"sni": None}),
    Attack("the attacker's name", (_get(ATTACKER),), ATTACKER, ATTACKER),
    _odd("NUL in the name", "api.bank.exampl\0"),
    _odd("NUL before an allowed suffix", "evil\0bank.example"[:16].ljust(16, "e")),
    _odd("a newline at the end", "api.bank.exampl\n"),
    _odd("a blank in the name", "api bank.example"),
    _odd("an 8-bit name", "api.bank.exampl\xe9"),
    _odd("a fullwidth letter", "api.bank.exa\xef\xbd\x8de"),
    _odd("an escape in the name", "api%2ebank.examp"),
    _odd("an empty label", "api..ank.example"),
    _odd("a leading dot", ".pi.bank.example"),
    _odd("two dots at the end", "api.bank.examp.."),
    _odd("a wildcard", "*.api.bank.examp"),
    _odd("an address", "093.184.216.0012"),
    _odd("an address in hexadecimal", "0x5d.0xb8.0xd8.1"),
    _odd("a suffix without its boundary", "apixbank.example"),
    _odd("a prefix of an allowed name", "api.bank.exampla"),
    _odd("a port in the name", "api.bank.exa:443"),
    _odd("user info in the name", "api@bank.example"),
    _odd("a name only like an allowed one", "api-bank.example"),
    Attack("an inner encrypted hello", (_get(API),), API, options={"hello": {"append": "fe0d000101"}}),
    Attack("an encrypted server name", (_get(API),), API, options={"hello": {"append": "ffce000401020304"}}),
    Attack("an encrypted hello to a spliced host", (_get(STATUS),), STATUS, STATUS, options={"hello": {"append": ECH}}),
    Attack(
        "a second server name",
        (_get(API),),
        API,
        options={"hello": {"append": "00000010000e00000b" + b"evil.exampl".hex()}},
    ),
    Attack(
        "an alert between the records",
        (_get(API),),
        API,
        options={"hello": {"record": 40, "between": "15030300020100"}},
    ),
    Attack(
        "a CCS between the records", (_get(API),), API, options={"hello": {"record": 40, "between": "140303000101"}}
    ),
    Attack("an empty record between", (_get(API),), API, options={"hello": {"record": 40, "between": "1603010000"}}),
    Attack("half a hello, then silence", (_get(API),), API, options={"hello": {"limit": 60}, "quiet": 12}),
    Attack("half a hello to a spliced host", (_get(STATUS),), STATUS, STATUS, options={"hello": {"limit": 100}}),
    Attack("a hello of 16 MB", ("\x16\x03\x01\x40\x00\x01\xff\xff\xff" + "a" * 70_000,), None),
    Attack("a hello of SSL 2", ("\x80\x2e\x01\x00\x02@@",), None),
    Attack("only protocols nobody speaks here", (_get(API),), API, options={"alpn": ["h3", "ftp", "dot"]}),
    Attack("a hundred protocols", (_get(API),), API, options={"alpn": [f"p{number}" for number in range(100)]}),
    Attack("clear HTTP on 443", (_get(API),), None),
    Attack("a line of text on 443", ("hello @@\r\n",), None),
    Attack("an SSH banner on 443", ("SSH-2.0-OpenSSH_9 @@\r\n",), None),
    Attack("Redis on 443", ("*1\r\n$4\r\nPING\r\n@@",), None, STATUS),
    Attack("random bytes on 443", ("\x00\x01\x02\xff\xfe@@",), None, STATUS),
    Attack("a question to Postgres", ("\x00\x00\x00\x08\x04\xd2\x16\x2f@@",), None, STATUS),
    Attack("text on 80", ("hello @@\r\n\r\n",), None, ATTACKER, 80),
    Attack("TLS on 80", (_get(API),), API, API, 80),
    Attack("TLS on 8443", (_get(STATUS),), STATUS, STATUS, 8443),
    Attack("a mail greeting", (0.2, "EHLO @@\r\n"), None, STATUS, 25),
    Attack("silence where the server would speak first", (), None, ATTACKER, 22),
    Attack("silence on 443", (), None, API, 443),
    Attack("a QUIC datagram", ("\xc0\x00\x00\x00\x01@@" + "\0" * 1200,), None, ATTACKER, 443, options={"udp": True}),
)

ONE = ("/v1/@@",)
SOME_ARRIVES = (
    Attack("an honest handshake", (_get(API),), arrives=ONE),
    Attack("an honest handshake with a spliced host", (_get(STATUS),), STATUS, STATUS, arrives=ONE),
    Attack("an allowed name at the attacker's address", (_get(API),), API, ATTACKER, arrives=ONE),
    Attack("a spliced name at the attacker's address", (_get(STATUS),), STATUS, ATTACKER, arrives=ONE),
    *(
        Attack(f"a hello in {what}, {host}", (_get(host),), host, host, arrives=ONE, options={"hello": shape})
        for host in (API, STATUS)
        for what, shape in (
            ("single bytes", {"segment": 1}),
            ("segments of 7", {"segment": 7}),
            ("records of 1 byte", {"record": 1}),
            ("records of 5 bytes", {"record": 5}),
            ("records of 100 in segments of 3", {"record": 100, "segment": 3}),
        )
    ),
    Attack("HTTP/2 offered, HTTP/1.1 preferred", (_get(API),), arrives=ONE, options={"alpn": ["h2", "http/1.1"]}),
)


@pytest.fixture(scope="module", name="denied", params=ON_RUNC)
def _denied(
    request: pytest.FixtureRequest, internet: Internet, stack: Stack, sandboxes: dict[str, DemoSandbox]
) -> Verdicts:
    return from_sandbox(NOTHING_ARRIVES, internet, stack, sandboxes[request.param].id)


@pytest.fixture(scope="module", name="allowed", params=ON_RUNC)
def _allowed(
    request: pytest.FixtureRequest, internet: Internet, stack: Stack, sandboxes: dict[str, DemoSandbox]
) -> Verdicts:
    return from_sandbox(SOME_ARRIVES, internet, stack, sandboxes[request.param].id)


def test_not_one_frame_leaves_for_any_of_them(denied: Verdicts) -> None:
    assert [] == denied.data_frames()
    assert {} == denied.received_requests


@pytest.mark.parametrize("attack", NOTHING_ARRIVES, ids=lambda attack: attack.name)
def test_no_answer_of_any_server_comes_back_for(attack: Attack, denied: Verdicts) -> None:
    assert "HTTP/1.1 200" not in denied.answer(attack)
    assert "hello from the attacker" not in denied.answer(attack)
    assert not denied.heard(attack)


def test_every_refused_connection_is_in_the_log_with_its_port(denied: Verdicts) -> None:
    refused = [
        record for record in denied.records if record["kind"] in ("flow", "request") and record["decision"] == "deny"
    ]
    connections = [attack for attack in NOTHING_ARRIVES if not attack.options.get("udp")]

    assert len(connections) <= len(refused)
    assert {attack.port for attack in connections} <= {record["port"] for record in refused}


def test_without_a_gate_they_all_reach_their_host(internet: Internet) -> None:
    """This is the control. A TLS client that ends after an unexpected answer has already sent its first flight."""
    outside = from_outside(NOTHING_ARRIVES, internet)
    reached = {(frame.destination, frame.destination_port) for frame in outside.data_frames()}

    assert {(ADDRESSES[attack.host], attack.port) for attack in NOTHING_ARRIVES} <= reached


@pytest.mark.parametrize("attack", SOME_ARRIVES, ids=lambda attack: attack.name)
def test_exactly_one_request_arrives_of(attack: Attack, allowed: Verdicts) -> None:
    assert allowed.expected(attack) == allowed.arrived(attack)
    assert "HTTP/1.1 200" in allowed.answer(attack)


def test_whichever_address_is_dialled_the_gateway_goes_to_the_name(allowed: Verdicts) -> None:
    assert {ADDRESSES[API], ADDRESSES[STATUS]} == {frame.destination for frame in allowed.data_frames()}
    assert {API, STATUS} == {host for host, *_ in allowed.received_requests}


def test_a_spliced_flow_carries_no_secret(allowed: Verdicts) -> None:
    spliced = [note for note in allowed.noted if note["host"] == STATUS and "headers" in note]

    assert [] != spliced
    assert [] == [note for note in spliced if any(name.lower() == "authorization" for name, _ in note["headers"])]


def test_after_all_of_this_an_honest_client_works(denied: Verdicts, sandboxes: dict[str, DemoSandbox]) -> None:
    for sandbox in sandboxes.values():
        code, printed = sandbox.run(
            f"curl -sS --max-time 20 https://{API}/v1/alive && git ls-remote https://{GIT}/ledger.git"
        )
        assert 0 == code, printed
