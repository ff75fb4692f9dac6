"""The packets with which a client begins: strict, limited, and equal for each division into segments."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.startup import (
    MAX_PACKET,
    PASSED,
    SSL_REQUEST,
    CancelRequest,
    GssRequest,
    NotPostgres,
    SslRequest,
    Startup,
    cancel_packet,
    denial,
    error,
    negotiated,
    read_packet,
    startup_packet,
)
from gateway.tls.hello import NeedMore, Refused

GSS_REQUEST = struct.pack("!II", 8, 80877104)


def startup(*texts: str | bytes, code: int = 3 << 16, end: bytes = b"\0") -> bytes:
    """Return a startup packet with these texts, each with its end."""
    body = b"".join((text.encode() if isinstance(text, str) else text) + b"\0" for text in texts) + end
    return struct.pack("!II", len(body) + 8, code) + body


WHOLE = startup("user", "app", "database", "ledger", "application_name", "job")


def test_the_packets_of_honest_clients_are_read() -> None:
    assert SslRequest(8) == read_packet(SSL_REQUEST)
    assert GssRequest(8) == read_packet(GSS_REQUEST)
    assert CancelRequest(b"\0\0\0\x07secr", 16) == read_packet(cancel_packet(b"\0\0\0\x07secr"))
    assert Startup(0, "ledger", (("application_name", "job"),), (), len(WHOLE)) == read_packet(WHOLE)
    newer = startup("user", "app", "_pq_.compression", "on", code=(3 << 16) + 2)
    assert Startup(2, "app", (), ("_pq_.compression",), len(newer)) == read_packet(newer)


def test_a_database_without_a_name_is_that_of_the_user() -> None:
    for texts in (("user", "app"), ("user", "app", "database", "")):
        packet = read_packet(startup(*texts))
        assert isinstance(packet, Startup)
        assert "app" == packet.database


def test_settings_are_known_in_any_letter_case() -> None:
    packet = read_packet(startup("user", "app", "DateStyle", "ISO", "TimeZone", "UTC"))
    assert isinstance(packet, Startup)
    assert (("datestyle", "ISO"), ("timezone", "UTC")) == packet.parameters


REFUSED = {
    "replication": startup("user", "app", "replication", "database"),
    "replication that is off": startup("user", "app", "replication", "false"),
    "replication, upper case": startup("user", "app", "REPLICATION", "on"),
    "options": startup("user", "app", "options", "-c role=postgres"),
    "options, upper case": startup("user", "app", "Options", "-c role=postgres"),
    "the user, twice": startup("user", "app", "user", "postgres"),
    "the user, in two letter cases": startup("user", "app", "USER", "postgres"),
    "the database, twice": startup("user", "app", "database", "ledger", "database", "payroll"),
    "a setting, in two letter cases": startup("user", "app", "TimeZone", "UTC", "timezone", "CET"),
    "a role": startup("user", "app", "role", "postgres"),
    "another setting": startup("user", "app", "session_preload_libraries", "x"),
    "no user": startup("database", "ledger"),
    "an empty user": startup("user", ""),
    "an empty name": startup("user", "app", "", "x"),
    "a long database": startup("user", "app", "database", "d" * 64),
    "a name without value": startup("user", "app", "database"),
    "no end": startup("user", "app", end=b""),
    "two ends": startup("user", "app", end=b"\0\0"),
    "bytes after the end": startup("user", "app", end=b"\0x"),
    "a control character": startup("user", "app", "database", "led\nger"),
    "no UTF-8": startup("user", b"\xff"),
    "nothing": struct.pack("!II", 8, 3 << 16),
    "version 2": startup("user", "app", code=2 << 16),
    "a short cancel request": struct.pack("!II", 12, 80877102) + b"1234",
    "a long cancel request": cancel_packet(bytes(261)),
    "a long request for TLS": struct.pack("!III", 12, 80877103, 0),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_gateway_does_not_relay_is_refused(case: str) -> None:
    verdict = read_packet(REFUSED[case])
    assert isinstance(verdict, Refused)
    assert verdict.reason.isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1",
        b"\x16\x03\x01",
        b"\0\1",
        b"\0\0\xff\xff",
        struct.pack("!II", MAX_PACKET + 1, 3 << 16),
        bytes(8),
    ],
)
def test_other_bytes_are_no_packet(data: bytes) -> None:
    assert NotPostgres() == read_packet(data)


@given(cut=st.integers(1, len(WHOLE)), after=st.binary(max_size=20))
def test_the_verdict_does_not_depend_on_segments(cut: int, after: bytes) -> None:
    part = read_packet(WHOLE[:cut])
    assert read_packet(WHOLE) == (part if cut == len(WHOLE) else read_packet(WHOLE + after))
    assert cut == len(WHOLE) or isinstance(part, NeedMore)


@given(data=st.binary(max_size=200), prefix=st.sampled_from([b"", *REFUSED.values(), WHOLE[:8]]))
def test_the_reader_never_raises_and_never_passes_another_parameter(data: bytes, prefix: bytes) -> None:
    verdict = read_packet(prefix + data)
    if isinstance(verdict, Startup):
        assert {name for name, _ in verdict.parameters} <= PASSED


def test_the_packet_for_the_server_has_the_user_of_the_login() -> None:
    sent = read_packet(startup_packet("app", "ledger", (("timezone", "UTC"),)))
    assert isinstance(sent, Startup)
    assert ("ledger", (("timezone", "UTC"),), 0) == (sent.database, sent.parameters, sent.minor)
    assert b"user\0app\0" in startup_packet("app", "ledger", ())


def test_the_answers_have_the_form_of_the_protocol() -> None:
    assert b"v\0\0\0\x12\0\3\0\0\0\0\0\1_pq_.\0" == negotiated(("_pq_.",))
    assert b"E\0\0\0\x22SFATAL\0VFATAL\0C08006\0Mgone\0\0"[:1] == error("08006", "gone")[:1]
    shown = denial("agents/db", "not this database", "ask")
    assert len(shown) == 1 + int.from_bytes(shown[1:5])
    assert b"C28000\0MDenied by policy rule agents/db: not this database\0Hask\0\0" in shown
