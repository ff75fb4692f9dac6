"""The pure exchange carries out each case, in its order and no other. No event loop runs."""

import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway import response_head
from gateway.admission import Admission
from gateway.effects import Effects
from gateway.exchange import MAX_RECORDED_PATH, Exchange, Session
from gateway.scrub.searched import MATCHES_FORGOTTEN, MAX_MATCHES, KnownPatterns
from gateway.scrub.stream import Withheld
from gateway.translate import Headers, RequestParts
from gateway.verdicts import Answer, Collect, Forward, Origin, Relay, ResponseHead, Route
from policy.compiled import SecretAt
from policy.decision import AllowRequest, Deny
from policy.facts import FlowFacts, RequestFacts, Scheme
from policy.injection import SecretPlan, SubstitutionPlan, Surface
from policy.rules import Endpoint
from tests.gateway.exchange_cases import (
    ACCEPTED,
    ALLOWED,
    BODY,
    CASES,
    CONNECTED,
    FORWARDED,
    GRPC,
    GUARDED,
    HANDSHAKE,
    HOST,
    MASKED,
    MAX_BODY,
    MAX_DECODED,
    OPEN,
    ORDER,
    PLAN,
    SECRET,
    STRIPPED,
    USE,
    Case,
    Ports,
    Seen,
    check,
)
from tests.gateway.signature_cases import SIGNED
from vault.secret import Secret

NOW = datetime(2026, 1, 2, tzinfo=UTC)
DESTINATION = (HOST, 443, b"https")
ROUTE = Route("198.51.100.7", HOST)
PARTS = RequestParts(11, b"GET", b"/v1", b"", b"", ((b"Host", HOST.encode()),))
_FRAMING = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection"})


def ended[T](work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, which awaits only ports that answer at once."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("an exchange waits for something that is no port")


def session_of(ports: Ports, now: Callable[[], float] = lambda: 0.0) -> Session:
    effects = Effects(ports, ports, ports, ports, ports.ledger, Admission(now), now, lambda: NOW)
    origin = Origin(FlowFacts(HOST, 443, Scheme.HTTPS), "f1", "203.0.113.9", ("192.0.2.2", 40000), "pure")
    session = Session(origin, effects, KnownPatterns(), MAX_DECODED, MAX_BODY)

    def revoke() -> None:
        session.over = session.over or "api-token" in session.used

    ports.revoke = revoke
    return session


def fields(headers: Headers) -> Headers:
    return tuple((name.lower(), value) for name, value in headers if name.lower() not in _FRAMING)


def parts_of(case: Case) -> RequestParts:
    framing = ((b"content-length", str(len(case.body)).encode()),) if case.body else ()
    framing = ((b"transfer-encoding", b"chunked"),) if case.chunked else framing
    if case.http2:
        return RequestParts(20, case.method, case.path, b"https", case.host, (*case.headers, *framing))
    return RequestParts(11, case.method, case.path, b"", b"", ((b"Host", case.host), *case.headers, *framing))


def no_connection(_plans: frozenset[SecretPlan]) -> None:
    """There is no connection yet."""


def drive(case: Case) -> Seen:
    """Act as an engine that does no framing and connects at once."""
    ports = case.ports()
    seen, session = Seen(ports), session_of(ports)
    exchange = Exchange(session, "q1")
    try:
        _request(case, seen, session, exchange)
    except Exception:  # noqa: BLE001 - as an engine: the flow ends
        seen.whole = False
    if seen.sent is None:
        assert not exchange.begun
    if session.over and not exchange.begun:
        seen.status, seen.body, seen.headers = None, b"", ()
    return seen


def _request(case: Case, seen: Seen, session: Session, exchange: Exchange) -> None:
    verdict = ended(exchange.request(parts_of(case), DESTINATION, no_connection))
    body = case.body
    if isinstance(verdict, Collect):
        assert not exchange.allowed
        if len(body) > MAX_BODY:
            verdict = exchange.refuse_body(413)
        else:
            whole = ended(exchange.request_whole(body))
            verdict, body = (whole, b"") if isinstance(whole, Answer) else whole
    assert exchange.allowed is session.may_connect() is isinstance(verdict, Forward)
    if isinstance(verdict, Answer):
        seen.status, seen.headers, seen.body, seen.whole = verdict.status, fields(verdict.headers), verdict.body, True
        return
    ended(exchange.connection(ROUTE))
    head = verdict.head
    host = [value for name, value in head.headers if name.lower() == b"host"]
    seen.target, seen.authority, seen.sent = head.target, head.authority or host[0], fields(head.headers)
    framing = {name.lower(): value for name, value in head.headers}
    seen.length, seen.chunked = framing.get(b"content-length"), b"transfer-encoding" in framing
    seen.body_sent = exchange.request_chunk(body)
    exchange.request_sent()
    answered = ended(exchange.response(ResponseHead(case.status, case.http2, case.answer)))
    seen.status, seen.headers = answered.status, fields(answered.headers)
    seen.reason = answered.reason.encode() if isinstance(answered, Relay) else b""
    if isinstance(answered, Relay) and answered.buffered:
        searched = exchange.response_whole(b"".join(case.pieces))
        if isinstance(searched, Answer):
            seen.status, seen.headers, seen.body = searched.status, fields(searched.headers), searched.body
        else:
            seen.headers, seen.body = fields(searched[0]), searched[1]
    elif exchange.tunnel:
        exchange.open_tunnel()
        assert session.may_connect()
        for piece in case.pieces:
            seen.body += exchange.tunnel_down(piece)
        exchange.close_tunnel("the server ended it")
    else:
        for piece in case.pieces:
            seen.body += exchange.response_chunk(piece)
        seen.body += exchange.response_end()
        seen.trailers = fields(exchange.response_trailers(case.trailers))
    if not exchange.tunnel:
        exchange.finish()
    assert not session.may_connect()
    seen.whole = True


@pytest.mark.parametrize("case", [*CASES, *SIGNED], ids=lambda case: case.name)
def test_the_case(case: Case) -> None:
    check(case, drive(case))


def test_the_names_of_cases_are_distinct() -> None:
    assert len([*CASES, *SIGNED]) == len({case.name for case in (*CASES, *SIGNED)})


WHERE: dict[str, object] = {
    "host": HOST,
    "port": 443,
    "scheme": "https",
    "flow": "f1",
    "destination": "203.0.113.9",
    "peer": "192.0.2.2:40000",
    "engine": "pure",
}
REQUESTED = WHERE | {"method": "GET", "path": "/v1"}
ROUTED = {"address": ROUTE.address, "peer_name": HOST}

type Record = tuple[str, str, dict[str, object]]


def denial(reason: str, rule: str = "r", fields: dict[str, object] = REQUESTED, **more: object) -> Record:
    return "request", "deny", fields | {"rule": rule, "reason": reason} | more


def outcome(status: int, down: int) -> Record:
    counts = {"bytes_up": 0, "bytes_down": down, "duration_ms": 0, "status": status}
    return "request", "info", REQUESTED | ROUTED | {"request_id": "q1"} | counts


ALLOW: Record = "request", "allow", REQUESTED | {"request_id": "q1", "rule": "r", "injections": ["api"]}
ALLOW_OPEN: Record = "request", "allow", REQUESTED | {"request_id": "q1", "rule": "r"}
SENT: Record = "secret.use", "allow", REQUESTED | {"rule": "r", "secret": "api-token", "binding": "api"}
CONNECT: Record = "connect", "info", WHERE | ROUTED | {"request_id": "q1"}
RECORDS: dict[str, list[Record]] = {
    "injected": [ALLOW, SENT, CONNECT, outcome(200, 2)],
    "allowed": [ALLOW_OPEN, CONNECT, outcome(200, 2)],
    "an upgrade": [
        ("request", "allow", ALLOW_OPEN[2] | {"websocket": True}),
        CONNECT,
        outcome(101, 0),
        ("request", "info", outcome(101, 0)[2] | {"websocket": True, "reason": "the server ended it"}),
    ],
    "observed": [
        (
            "request",
            "observe",
            REQUESTED | {"request_id": "q1", "rule": "observe:p", "observed": "p/no", "reason": "would be denied"},
        ),
        CONNECT,
        outcome(200, 2),
    ],
    "denied": [denial("closed", "no")],
    "denied, and the log is gone": [denial("closed", "no")],
    "over the budget for now": [denial("too many", "limits")],
    "over the budget": [denial("all sent", "limits")],
    "the lease is refused": [ALLOW, denial("not on this path", secret="api-token")],
    "a secret that could not be taken out": [
        ALLOW,
        denial(
            "the secret is shorter than 8 characters and could not be kept out of responses",
            secret="api-token",
        ),
    ],
    "the lease fails": [ALLOW, denial("not available", fields=WHERE)],
    "a value that is no header value": [ALLOW, denial("a secret cannot be sent", fields=WHERE)],
    "another host": [denial("this connection serves another host", "protocol", WHERE, asked_host="evil.test")],
    "a method that is never relayed": [denial("method not supported", "protocol", WHERE)],
    "a part of a document": [
        ALLOW_OPEN,
        CONNECT,
        denial("a part of a document cannot be searched for secrets", "scrub", WHERE),
        outcome(502, 0),
    ],
    "what to take out is not known": [
        ALLOW_OPEN,
        CONNECT,
        denial("the gateway does not know which secrets to remove from it", "scrub", WHERE),
        outcome(502, 0),
    ],
    "a compressed message": [
        ALLOW,
        SENT,
        CONNECT,
        denial("compressed gRPC messages cannot be searched for secrets", "scrub", WHERE),
    ],
}


@pytest.mark.parametrize("name", RECORDS)
def test_the_records_of_a_case_have_their_fields_and_no_other(name: str) -> None:
    (case,) = (one for one in CASES if one.name == name)
    assert RECORDS[name] == drive(case).ports.records


@pytest.mark.parametrize("length", [MAX_RECORDED_PATH, MAX_RECORDED_PATH + 1])
def test_a_path_that_is_cut_in_a_record_is_recorded_with_its_hash(length: int) -> None:
    path = "/".ljust(length, "a")
    ports = Ports(Deny("no", "closed"))
    ended(Exchange(session_of(ports), "q1").request(replace(PARTS, target=path.encode()), DESTINATION, no_connection))
    whole = {} if length == MAX_RECORDED_PATH else {"path_sha256": hashlib.sha256(path.encode()).hexdigest()}
    expected = denial("closed", "no", REQUESTED | {"path": path[:MAX_RECORDED_PATH]}, **whole)
    assert [expected] == ports.records


@pytest.mark.parametrize(
    ("accept", "kind"),
    [((), b"text/plain; charset=utf-8"), (((b"Accept", b"application/json"),), b"application/json")],
    ids=["text", "json"],
)
def test_the_page_of_a_denial_has_method_host_and_path_of_the_request(accept: Headers, kind: bytes) -> None:
    """Without the query, and with only the beginning of a long path."""
    path = b"/".ljust(600, b"a")
    parts = replace(PARTS, method=b"PUT", target=path + b"?q=1", headers=(*PARTS.headers, *accept))
    answer = ended(Exchange(session_of(Ports(Deny("no", "closed"))), "q1").request(parts, DESTINATION, no_connection))
    assert isinstance(answer, Answer)
    assert kind == dict(answer.headers)[b"content-type"]
    assert path[:512] in answer.body and path[:513] not in answer.body and b"q=1" not in answer.body
    assert b"PUT https://good.test/aaa" in answer.body


# The exchange enforces its order.


def forwarded(ports: Ports | None = None) -> Exchange:
    """Return an exchange whose request may be sent."""
    exchange = Exchange(session_of(ports or Ports()), "q1")
    assert isinstance(ended(exchange.request(PARTS, DESTINATION, no_connection)), Forward)
    return exchange


def connected(ports: Ports | None = None) -> Exchange:
    exchange = forwarded(ports)
    ended(exchange.connection(ROUTE))
    return exchange


def streaming(ports: Ports | None = None) -> Exchange:
    exchange = connected(ports)
    ended(exchange.response(ResponseHead(200, False, ())))
    return exchange


def refused() -> Exchange:
    """Return an exchange that was answered."""
    exchange = Exchange(session_of(Ports(Deny("no", "closed"))), "q1")
    assert isinstance(ended(exchange.request(PARTS, DESTINATION, no_connection)), Answer)
    return exchange


def failed() -> Exchange:
    """Return an exchange whose judgement raised."""
    exchange = Exchange(session_of(Ports(None)), "q1")
    with pytest.raises(TypeError):
        ended(exchange.request(PARTS, DESTINATION, no_connection))
    return exchange


HANDSHAKE_PARTS = replace(PARTS, headers=(*PARTS.headers, *HANDSHAKE))


def tunnelling(ports: Ports | None = None) -> Exchange:
    """Return an exchange with an open WebSocket."""
    exchange = Exchange(session_of(ports or Ports()), "q1")
    assert isinstance(ended(exchange.request(HANDSHAKE_PARTS, DESTINATION, no_connection)), Forward)
    ended(exchange.connection(ROUTE))
    assert isinstance(ended(exchange.response(ResponseHead(101, False, ACCEPTED))), Relay)
    exchange.open_tunnel()
    return exchange


STEPS: dict[str, Callable[[Exchange], object]] = {
    "malformed": lambda one: one.malformed("no"),
    "request": lambda one: ended(one.request(PARTS, DESTINATION, no_connection)),
    "connection": lambda one: ended(one.connection(ROUTE)),
    "request_chunk": lambda one: one.request_chunk(b""),
    "response": lambda one: ended(one.response(ResponseHead(200, False, ()))),
    "response_chunk": lambda one: one.response_chunk(b"x"),
    "response_end": lambda one: one.response_end(),
    "response_whole": lambda one: one.response_whole(b"x"),
    "response_trailers": lambda one: one.response_trailers(()),
    "finish": lambda one: one.finish(),
    "open_tunnel": lambda one: one.open_tunnel(),
    "tunnel_up": lambda one: one.tunnel_up(b""),
    "tunnel_down": lambda one: one.tunnel_down(b""),
    "close_tunnel": lambda one: one.close_tunnel("over"),
}


def unrecorded() -> Exchange:
    """Return an exchange whose connection the log did not accept."""
    ports = Ports()
    exchange = forwarded(ports)

    def broken(_number: int, _step: str) -> None:
        raise ConnectionError("gone")

    ports.on_step = broken
    with pytest.raises(ConnectionError):
        ended(exchange.connection(ROUTE))
    ports.on_step = lambda _number, _step: None
    return exchange


POSSIBLE: dict[str, tuple[Callable[[], Exchange], set[str]]] = {
    "new": (lambda: Exchange(session_of(Ports()), "q1"), {"malformed", "request"}),
    "failed": (failed, set()),
    "answered": (refused, set()),
    "forwarded": (forwarded, {"connection"}),
    "unrecorded": (unrecorded, {"connection"}),
    "connected": (connected, {"connection", "request_chunk", "response"}),
    "streaming": (
        streaming,
        {"request_chunk", "response_chunk", "response_end", "response_trailers", "finish"},
    ),
    "tunnelling": (tunnelling, {"request_chunk", "tunnel_up", "tunnel_down", "close_tunnel"}),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("stage", POSSIBLE)
def test_a_step_out_of_order_is_a_violation(stage: str, step: str) -> None:
    """An engine that omits or repeats a step cannot continue."""
    make, possible = POSSIBLE[stage]
    exchange = make()
    if step in possible:
        STEPS[step](exchange)
        return
    with pytest.raises(RuntimeError, match="a step out of order"):
        STEPS[step](exchange)


@pytest.mark.parametrize(
    "destination",
    [("evil.test", 443, b"https"), (HOST, 80, b"https"), (HOST, 443, b"http")],
    ids=["host", "port", "scheme"],
)
def test_a_request_is_judged_for_the_destination_of_its_flow_only(destination: tuple[str, int, bytes]) -> None:
    ports = Ports()
    exchange = Exchange(session_of(ports), "q1")
    with pytest.raises(RuntimeError, match="the engine would send this request to another destination than the flow's"):
        ended(exchange.request(PARTS, destination, no_connection))
    assert ([], False) == (ports.steps, exchange.allowed)


def test_a_secret_that_is_not_looked_for_is_not_sent() -> None:
    with pytest.raises(RuntimeError, match=r"^a secret would be sent that responses are not searched for$"):
        ended(Exchange(session_of(Ports(uses=())), "q1").request(PARTS, DESTINATION, no_connection))


def test_a_tunnel_is_opened_by_a_valid_handshake_only() -> None:
    with pytest.raises(RuntimeError, match=r"^101 without a valid WebSocket handshake$"):
        ended(connected(Ports(OPEN, ())).response(ResponseHead(101, False, ())))


def test_frames_of_a_client_are_read_and_relayed_unchanged_where_secrets_are_searched() -> None:
    ports = Ports()
    exchange = tunnelling(ports)
    ping, malformed = b"\x89\x81abcd\x40", b"GET /admin HTTP/1.1\r\n"
    assert [ping, ping] == [exchange.tunnel_up(ping + ping[:3]), exchange.tunnel_up(ping[3:])]
    with pytest.raises(Withheld):
        tunnelling(ports).tunnel_up(malformed)
    assert ("protocol", "a WebSocket frame with a reserved bit: no extension was negotiated") == (
        ports.records[-1][2]["rule"],
        ports.records[-1][2]["reason"],
    )
    assert malformed == tunnelling(Ports(OPEN, ())).tunnel_up(malformed)  # control: a host without secrets


def test_the_end_of_a_websocket_is_recorded_with_its_bytes() -> None:
    ports = Ports()
    exchange = tunnelling(ports)
    exchange.tunnel_up(b"\x89\x80abcd")
    exchange.tunnel_down(b"\x8a\x00")
    assert exchange.session.may_connect()
    exchange.close_tunnel("the client ended it")
    assert not exchange.session.may_connect()
    expected = {"status": 101, "websocket": True, "bytes_up": 6, "bytes_down": 2, "reason": "the client ended it"}
    assert expected == {name: ports.records[-1][2][name] for name in expected}


def test_messages_with_secrets_count_like_other_responses() -> None:
    ports = Ports()
    exchange = tunnelling(ports)
    for _ in range(MAX_MATCHES):
        exchange.tunnel_down(b"\x82\x12" + SECRET.encode())
    with pytest.raises(Withheld, match="too many responses held a secret"):
        exchange.tunnel_down(b"\x82\x12" + SECRET.encode())


def test_nothing_may_be_sent_before_the_last_step() -> None:
    ports = Ports()
    session = session_of(ports)
    exchange = Exchange(session, "q1")
    early: list[bool] = []
    ports.on_step = lambda _number, _step: early.append(exchange.allowed or session.may_connect())
    ended(exchange.request(PARTS, DESTINATION, no_connection))
    assert (ORDER, [False] * len(ORDER)) == (ports.steps, early)
    assert exchange.allowed and session.may_connect()


def test_a_revocation_finds_the_session_before_its_secret_is_there() -> None:
    ports = Ports()
    session = session_of(ports)
    found: list[str] = []
    ports.on_step = lambda _number, step: found.append(step) if "api-token" in session.used else None
    ended(Exchange(session, "q1").request(PARTS, DESTINATION, no_connection))
    assert ["lease", "secret.use allow", "searched", "decide"] == found
    assert {b"x-api-key"} == session.sensitive


def test_a_connection_that_the_record_has_is_not_recorded_again() -> None:
    ports = Ports()
    session = session_of(ports)
    exchange = Exchange(session, "q1")
    ended(exchange.request(PARTS, DESTINATION, lambda _plans: ROUTE))
    ended(exchange.connection(ROUTE))
    assert ORDER == ports.steps
    assert [ROUTE.address, HOST] == [ports.records[0][2][name] for name in ("address", "peer_name")]
    ended(exchange.connection(replace(ROUTE, address="198.51.100.8")))
    assert CONNECTED == ports.steps


@pytest.mark.parametrize("decision", [ALLOWED, OPEN, Deny("no", "closed")])
def test_a_connection_is_reserved_for_the_secrets_of_an_allowed_request(decision: object) -> None:
    """Once, after the decision and before the record. The forwarded request names the same plans and their values."""
    ports = Ports(decision)
    asked: list[tuple[list[str], frozenset[SecretPlan]]] = []

    def reserve(plans: frozenset[SecretPlan]) -> None:
        asked.append((list(ports.steps), plans))

    verdict = ended(Exchange(session_of(ports), "q1").request(PARTS, DESTINATION, reserve))
    if isinstance(decision, Deny):
        assert [] == asked
        return
    plans = frozenset({PLAN}) if decision is ALLOWED else frozenset()
    assert [(["decide", "count"], plans)] == asked
    assert isinstance(verdict, Forward)
    assert [(plan, SECRET) for plan in plans] == [(plan, value.reveal()) for plan, value in verdict.injected]


def test_an_overloaded_worker_counts_and_asks_nothing() -> None:
    ports, now = Ports(), 0.0
    session = session_of(ports, lambda: now)
    session.effects.admission.begin()
    now = 30.0
    answer = ended(Exchange(session, "q1").request(PARTS, DESTINATION, no_connection))
    assert isinstance(answer, Answer)
    assert (503, (b"retry-after", b"30")) == (answer.status, answer.headers[-1])
    assert (["decide"], ["overload"]) == (ports.steps, ports.denials())


@pytest.mark.parametrize("step", ["request allow", "lease", "secret.use allow", "searched"])
def test_a_request_is_under_way_until_it_may_be_forwarded(step: str) -> None:
    ports, now, waits = Ports(), 0.0, []
    session = session_of(ports, lambda: now)

    def look(_number: int, name: str) -> None:
        nonlocal now
        if name == step:
            now += 1e6
            waits.append(session.effects.admission.retry_after())

    ports.on_step = look
    ended(Exchange(session, "q1").request(PARTS, DESTINATION, no_connection))
    assert ([60], None) == (waits, session.effects.admission.retry_after())


# Relayed responses.


def test_a_match_beyond_the_bound_is_not_shown() -> None:
    ports = Ports()
    exchange = streaming(ports)
    for _ in range(MAX_MATCHES):
        ports.ledger.match(1.0, MATCHES_FORGOTTEN)
    with pytest.raises(Withheld):
        exchange.response_chunk(BODY + b"x" * 400)
    with pytest.raises(Withheld):
        exchange.response_trailers(((b"x-token", SECRET.encode()),))
    assert ["scrub"] == ports.denials()
    assert "too many responses held a secret; try again later" == ports.records[-1][2]["reason"]


def test_each_request_of_a_flow_carries_the_value_that_is_leased_for_it() -> None:
    """A rotation between two requests with the same head: the header of the first one is not used again."""
    ports = Ports()
    session = session_of(ports)
    for number, secret in enumerate((SECRET, "another-value-of-it", SECRET)):
        ports.secret = secret
        verdict = ended(Exchange(session, f"q{number}").request(PARTS, DESTINATION, no_connection))
        assert isinstance(verdict, Forward)
        sent = [value for name, value in verdict.head.headers if name == PLAN.name.encode()]
        assert [secret.encode()] == sent


def test_the_same_value_is_put_where_the_decision_in_force_wants_it() -> None:
    class Kept(Ports):
        value = Secret(SECRET)

        async def lease(self, plan: SecretPlan, facts: RequestFacts, _size: int | None) -> Secret:
            return self.value

    ports = Kept(uses=(USE, replace(USE, plan=replace(PLAN, name="X-Other"))))
    session = session_of(ports)
    for number, name in enumerate((PLAN.name, "X-Other", PLAN.name)):
        ports.decision = AllowRequest("r", (replace(PLAN, name=name),))
        verdict = ended(Exchange(session, f"q{number}").request(PARTS, DESTINATION, no_connection))
        assert isinstance(verdict, Forward)
        assert [name.encode()] == [name for name, value in verdict.head.headers if value == SECRET.encode()]


def test_a_request_takes_one_use_of_a_secret_in_however_many_places_it_is_sent() -> None:
    """And each request takes its own, also on one flow, and with the same head."""
    other = replace(PLAN, binding="more", name="X-More")

    class Counted(Ports):
        async def lease(self, plan: SecretPlan, facts: RequestFacts, size: int | None) -> Secret:
            assert plan in (PLAN, other)
            return await super().lease(PLAN, facts, size)

    ports = Counted(AllowRequest("r", (PLAN, other)), (USE, replace(USE, plan=other)))
    session = session_of(ports)
    for number in (1, 2):
        verdict = ended(Exchange(session, f"q{number}").request(PARTS, DESTINATION, no_connection))
        assert isinstance(verdict, Forward)
        assert 2 == [value for _, value in verdict.head.headers].count(SECRET.encode())
        assert (number, 2 * number) == (ports.steps.count("lease"), ports.steps.count("secret.use allow"))


@pytest.mark.parametrize("same", [True, False])
def test_a_lease_is_asked_for_with_the_bytes_of_its_request(same: bool) -> None:
    """Those that the sandbox sent, of each request of a flow alone. A WebSocket has no number of bytes."""
    host = (b"Host", HOST.encode())
    heads: tuple[Headers, ...] = ((host,), (host, (b"Content-Length", b"7")), (host, *HANDSHAKE), (host,))
    ports, head = Ports(), len(b"GET/v1Host" + HOST.encode())
    session = session_of(ports)
    for number, headers in enumerate(heads):
        parts = PARTS if same and headers == PARTS.headers else replace(PARTS, headers=headers)
        verdict = ended(Exchange(session, f"q{number}").request(parts, DESTINATION, no_connection))
        assert isinstance(verdict, Forward)
    assert [head, head + len("Content-Length7") + 7, None, head] == ports.sizes


def test_no_more_of_a_body_is_sent_than_its_secret_was_leased_for() -> None:
    """Whatever the engine lets through. Without a secret, or without a known length, there is no such limit."""
    host, length = (b"Host", HOST.encode()), (b"Content-Length", b"7")
    chunked = (b"Transfer-Encoding", b"chunked")
    for decision, headers, more in (
        (ALLOWED, (host, length), False),
        (ALLOWED, (host,), False),
        (ALLOWED, (host, chunked), True),
        (OPEN, (host, length), True),
    ):
        ports = Ports(decision)
        exchange = Exchange(session_of(ports), "q1")
        parts = replace(PARTS, method=b"POST", headers=headers)
        assert isinstance(ended(exchange.request(parts, DESTINATION, no_connection)), Forward)
        ended(exchange.connection(ROUTE))
        if length in headers:
            assert [b"four", b"thr"] == [exchange.request_chunk(b"four"), exchange.request_chunk(b"thr")]
        if more:
            assert b"x" == exchange.request_chunk(b"x")
        else:
            with pytest.raises(RuntimeError, match=r"^more bytes than secrets were leased for$"):
                exchange.request_chunk(b"x")
            assert "a longer body than the head says" == ports.records[-1][2]["reason"]


def test_a_collected_body_has_a_length_that_nothing_announced() -> None:
    """It counts as it came, before a secret is put into it."""
    plan = SubstitutionPlan("api", "api-token", "__TOKEN__", (Surface.BODY,))
    ports = Ports(AllowRequest("r", (), None, (plan,)), uses=(replace(USE, plan=plan),))
    headers = ((b"Host", HOST.encode()), (b"Content-Type", b"application/json"), (b"Transfer-Encoding", b"chunked"))
    exchange, body = Exchange(session_of(ports), "q1"), b'{"key": "__TOKEN__"}'
    parts = RequestParts(11, b"POST", b"/v1", b"", b"", headers)
    assert isinstance(ended(exchange.request(parts, DESTINATION, no_connection)), Collect)
    assert not isinstance(ended(exchange.request_whole(body)), Answer)
    head = sum(map(len, (b"POST/v1", *(each for field in headers for each in field))))
    assert [head + len(body)] == ports.sizes


def test_a_repeated_request_asks_for_a_searchable_document_as_soon_as_the_host_can_be_sent_a_secret() -> None:
    """The decision and the headers are the same objects before and after the change of policy."""
    ports = Ports(OPEN, uses=())
    session = session_of(ports)
    asked = []
    for uses in ((), (USE,), (USE,)):
        ports.uses = uses
        verdict = ended(Exchange(session, "q1").request(PARTS, DESTINATION, no_connection))
        assert isinstance(verdict, Forward)
        asked.append((verdict.scrub, (b"accept-encoding", b"identity") in verdict.head.headers))
    assert [(False, False), (True, True), (True, True)] == asked


@dataclass(frozen=True)
class Step:
    """One request of a flow, and what is in force then."""

    parts: RequestParts
    decision: AllowRequest | Deny
    secret: str
    route: Route | None
    status: int | None


LONG = "/" + "x" * MAX_RECORDED_PATH
WITH_A_CREDENTIAL = replace(PARTS, headers=(*PARTS.headers, (b"X-Auth-Token", b"of the client")))
STEPS_OF_A_FLOW = st.builds(
    Step,
    st.sampled_from(
        (
            PARTS,
            replace(PARTS, headers=PARTS.headers),
            replace(PARTS, target=b"/v2?q=1"),
            replace(PARTS, target=LONG.encode()),
            replace(PARTS, method=b"POST"),
            WITH_A_CREDENTIAL,
            replace(PARTS, headers=(*PARTS.headers, *HANDSHAKE)),
        )
    ),
    st.sampled_from(
        (
            ALLOWED,
            AllowRequest("r", (PLAN,)),
            AllowRequest("other", (PLAN,)),
            OPEN,
            STRIPPED,
            FORWARDED,
            AllowRequest("seen", observed=Deny("no", "closed")),
            Deny("no", "closed"),
        )
    ),
    st.sampled_from((SECRET, "another-value-of-it")),
    st.sampled_from((None, ROUTE, Route("198.51.100.8", HOST))),
    st.sampled_from((200, 404, None)),
)


def _carried_out(session: Session, ports: Ports, step: Step, name: str) -> tuple[Answer | Forward, list[Record]]:
    ports.decision, ports.secret, before = step.decision, step.secret, len(ports.records)
    ports.leased_paths = "/v1", "/v2", LONG
    exchange = Exchange(session, name)
    verdict = ended(exchange.request(step.parts, DESTINATION, lambda _plans: step.route))
    if isinstance(verdict, Forward):
        ended(exchange.connection(step.route or ROUTE))
        exchange.request_sent()
        if step.status is None:
            exchange.failed()
        else:
            ended(exchange.response(ResponseHead(step.status, False, ())))
            exchange.response_end()
            exchange.finish()
    return verdict, ports.records[before:]


def between_others(decision: AllowRequest, parts: RequestParts) -> list[Step]:
    """Return a request between two of another form, under one decision."""
    return [Step(one, decision, SECRET, ROUTE, 200) for one in (PARTS, parts, PARTS)]


@given(st.lists(STEPS_OF_A_FLOW, min_size=1, max_size=8))
@example(between_others(STRIPPED, WITH_A_CREDENTIAL))
@example(between_others(FORWARDED, WITH_A_CREDENTIAL))
@example(between_others(ALLOWED, replace(PARTS, target=LONG.encode())))
@example(between_others(ALLOWED, replace(PARTS, target=b"/v2")))
def test_a_request_fares_as_if_it_were_the_first_of_its_flow(steps: list[Step]) -> None:
    """What equal requests have in common is prepared once, and nothing of it is used for another request."""
    ports = Ports()
    session = session_of(ports)
    for number, step in enumerate(steps):
        verdict, records = _carried_out(session, ports, step, f"q{number}")
        alone = Ports()
        expected, expected_records = _carried_out(session_of(alone), alone, step, f"q{number}")
        assert (replaced_secrets(expected), expected_records) == (replaced_secrets(verdict), records)


def replaced_secrets(verdict: Answer | Forward) -> object:
    """Return a verdict with the texts of its secrets, which are compared by identity otherwise."""
    if isinstance(verdict, Answer):
        return verdict
    return verdict.head, verdict.scrub, [(plan, value.reveal()) for plan, value in verdict.injected]


@pytest.mark.parametrize(("value", "kept"), [(SECRET.encode(), 0), (b"nothing of it", 1)])
def test_no_copy_of_a_response_head_with_a_secret_is_kept(value: bytes, kept: int) -> None:
    response_head._facts_before.cache_clear()
    exchange = forwarded()
    ended(exchange.connection(ROUTE))
    ended(exchange.response(ResponseHead(200, False, ((b"x-token", b"Bearer " + value),))))
    assert kept == response_head._facts_before.cache_info().currsize


def test_what_is_held_back_of_a_body_that_ends_abruptly_is_not_shown() -> None:
    exchange = streaming()
    assert b"" == exchange.response_chunk(b"a " + SECRET.encode()[:7])
    exchange.failed()
    assert not exchange.session.may_connect()


@pytest.mark.parametrize("both", [(True, False), (False, True)], ids=["server HTTP/1.1", "client HTTP/1.1"])
def test_messages_of_grpc_are_taken_one_by_one_over_http2_only(both: tuple[bool, bool]) -> None:
    case = Case("", [], 200, http2=both[0])
    exchange = Exchange(session_of(Ports()), "q1")
    ended(exchange.request(parts_of(case), DESTINATION, no_connection))
    ended(exchange.connection(ROUTE))
    ended(exchange.response(ResponseHead(200, both[1], (GRPC,))))
    assert b"" == exchange.response_chunk(b"\0\0\0\0\2ok")
    assert b"\0\0\0\0\2ok" == exchange.response_end()


def test_a_withheld_response_shows_its_page_once_and_nothing_else() -> None:
    exchange = connected()
    answer = ended(exchange.response(ResponseHead(200, False, ((b"content-type", b"text/html; charset=utf-7"),))))
    assert isinstance(answer, Answer) and exchange.withheld
    pieces = [exchange.response_chunk(BODY), exchange.response_chunk(BODY), exchange.response_end()]
    assert [True, False, False] == [b"withheld" in piece for piece in pieces]
    assert b"" == b"".join(pieces[1:])
    assert () == exchange.response_trailers(((b"x-token", b"1"),))


@pytest.mark.parametrize("coding", [b"gzip", b"gzip, chunked", b"identity"])
def test_a_response_in_another_transfer_coding_ends_the_flow(coding: bytes) -> None:
    with pytest.raises(RuntimeError, match="transfer coding"):
        ended(connected().response(ResponseHead(200, False, ((b"Transfer-Encoding", coding),))))


def test_a_header_value_is_one_line() -> None:
    head = ResponseHead(200, False, ((b"X-Folded", b"a\r\n b\0c"), (b"X-Nul", b"a\0b")))
    relay = ended(connected().response(head))
    assert ((b"X-Folded", b"a b c"), (b"X-Nul", b"ab")) == relay.headers


# Requests in progress.


def test_a_request_is_in_progress_until_it_is_sent_and_answered() -> None:
    first, second = streaming(), streaming()
    first.request_sent()
    assert first.session.may_connect()
    first.finish()
    assert not first.session.may_connect()
    second.finish()
    assert second.session.may_connect()
    second.request_sent()
    assert not second.session.may_connect()


def test_what_is_in_progress_is_judged_by_the_policy_in_force() -> None:
    ports = Ports()
    exchange = streaming(ports)
    assert exchange.session.still_allowed()
    ports.uses = (USE, replace(USE, plan=replace(USE.plan, secret="other-token")))
    assert not exchange.session.still_allowed()  # its host can get a secret that is not searched for
    ports.uses, ports.decision = (USE,), Deny("new", "closed")
    assert not exchange.session.still_allowed()
    ports.decision = ALLOWED
    assert exchange.session.still_allowed()
    exchange.failed()
    ports.decision = Deny("new", "closed")
    assert exchange.session.still_allowed()


def test_the_outcome_is_in_the_log() -> None:
    now = 1.0
    ports = Ports(OPEN, ())
    session = session_of(ports, lambda: now)
    exchange = Exchange(session, "q1")
    ended(exchange.request(PARTS, DESTINATION, lambda _plans: ROUTE))
    ended(exchange.connection(ROUTE))
    exchange.request_chunk(b"up")
    ended(exchange.response(ResponseHead(204, False, ())))
    exchange.response_chunk(MASKED)
    now = 1.5
    exchange.finish()
    kind, decision, outcome = ports.records[-1]
    assert ("request", "info") == (kind, decision)
    expected = {"status": 204, "bytes_up": 2, "bytes_down": len(MASKED), "duration_ms": 500, "method": "GET"}
    assert expected == {name: outcome[name] for name in expected}
    assert ("f1", "q1", "pure", "198.51.100.7", HOST) == tuple(
        outcome[name] for name in ("flow", "request_id", "engine", "address", "peer_name")
    )
    failure = connected(ports)
    failure.failed()
    assert "upstream or client failed" == ports.records[-1][2]["error"]


@pytest.mark.parametrize(("rule", "sent"), [("default", True), ("p/shut", False), ("binding-ambiguous", False)])
def test_a_path_with_its_secret_needs_no_rule_that_allows_it_but_none_that_denies_it(rule: str, sent: bool) -> None:
    """Rules and bindings name the path with the placeholder: they cannot name the one with the secret."""
    plan = SubstitutionPlan("api", "api-token", "__TOKEN__", (Surface.PATH,))

    class Scoped(Ports):
        def decide_request(self, facts: RequestFacts) -> object:
            return AllowRequest("r", (), None, (plan,)) if "__TOKEN__" in facts.path else Deny(rule, "closed")

    uses = (SecretAt(plan, HOST, Endpoint(443, Scheme.HTTPS)),)
    ports = Scoped(uses=uses, secret="3v4l-UE_9~x", leased_paths=("/bot__TOKEN__/me",))
    parts = RequestParts(11, b"GET", b"/bot__TOKEN__/me", b"", b"", ((b"Host", HOST.encode()),))
    verdict = ended(Exchange(session_of(ports), "q1").request(parts, DESTINATION, no_connection))

    assert sent is isinstance(verdict, Forward)
    if isinstance(verdict, Forward):
        assert b"/bot3v4l-UE_9~x/me" == verdict.head.target
    else:
        assert isinstance(verdict, Answer)
        assert (403, True) == (verdict.status, b"a rule denies the path with its secret" in verdict.body)


def test_a_body_that_is_announced_above_the_limit_is_refused_before_it_is_read() -> None:
    """One at the limit is collected, and then judged as a whole. Nothing is leased for either before."""
    plan = SubstitutionPlan("api", "api-token", "__TOKEN__", (Surface.BODY,))
    ports = Ports(AllowRequest("r", (), None, (plan,)))

    def asked(size: int) -> Answer | Collect | Forward:
        headers = ((b"Host", HOST.encode()), (b"Content-Length", b"%d" % size), (b"Expect", b"100-continue"))
        parts = RequestParts(11, b"POST", b"/v1", b"", b"", headers)
        return ended(Exchange(session_of(ports), "q1").request(parts, DESTINATION, no_connection))

    refused = asked(MAX_BODY + 1)
    assert isinstance(refused, Answer)
    assert (413, Collect(expects=True)) == (refused.status, asked(MAX_BODY))
    assert ["decide", "count"] * 2 == ports.steps


OWN = ((b"Host", HOST.encode()), (b"Authorization", b"own"), (b"Cookie", b"s=1"))


@pytest.mark.parametrize(
    ("decision", "stripped", "forwarded"),
    [
        (ALLOWED, None, None),
        (STRIPPED, ["header:authorization", "cookie", "query:token"], None),
        (FORWARDED, None, ["header:authorization", "cookie", "query:token"]),
    ],
)
def test_what_happened_to_credentials_of_the_client_is_recorded(
    decision: object, stripped: list[str] | None, forwarded: list[str] | None
) -> None:
    """By name. Neither a value nor the query is recorded."""
    ports = Ports(decision)
    parts = replace(PARTS, target=b"/v1?token=query-value", headers=OWN)
    assert isinstance(ended(Exchange(session_of(ports), "q1").request(parts, DESTINATION, no_connection)), Forward)

    (fields,) = [fields for kind, outcome, fields in ports.records if (kind, outcome) == ("request", "allow")]
    assert (stripped, forwarded) == (fields.get("stripped"), fields.get("forwarded"))
    assert "query-value" not in str(ports.records)
    assert "own" not in str([fields[name] for name in ("stripped", "forwarded") if name in fields])


def test_a_refused_credential_of_the_client_is_recorded_without_its_value() -> None:
    ports = Ports(GUARDED)
    parts = replace(PARTS, target=b"/v1?token=query-value", headers=((b"Host", HOST.encode()), (b"X-Auth", b"v4lue")))
    answer = ended(Exchange(session_of(ports), "q1").request(parts, DESTINATION, no_connection))

    assert isinstance(answer, Answer)
    assert 403 == answer.status
    ((kind, outcome, fields),) = ports.records
    assert ("request", "deny", "client-credentials") == (kind, outcome, fields["rule"])
    assert "(header:x-auth, query:token)" in str(fields["reason"])
    for text in (str(ports.records), answer.body.decode()):
        assert "v4lue" not in text
        assert "query-value" not in text


@pytest.mark.parametrize(
    ("now", "stays"),
    [(OPEN, True), (FORWARDED, True), (GUARDED, False), (STRIPPED, False)],
)
def test_a_request_in_progress_ends_if_its_credentials_are_no_longer_permitted(now: object, stays: bool) -> None:
    """Refused or stripped: a request that could not be sent like this any more does not continue."""
    ports = Ports(FORWARDED)
    session = session_of(ports)
    exchange = Exchange(session, "q1")
    assert isinstance(ended(exchange.request(replace(PARTS, headers=OWN), DESTINATION, no_connection)), Forward)
    assert session.still_allowed()

    ports.decision = now
    assert stays is session.still_allowed()


def test_equal_requests_are_guarded_under_the_decision_in_force() -> None:
    """What the guard left of an earlier request is not used again after policy changed."""
    ports = Ports(FORWARDED)
    session = session_of(ports)
    parts = replace(PARTS, headers=OWN)

    def ask(name: str) -> Answer | Forward:
        return ended(Exchange(session, name).request(parts, DESTINATION, no_connection))

    first = ask("q1")
    assert isinstance(first, Forward)
    assert (b"Cookie", b"s=1") in first.head.headers
    ports.decision = STRIPPED
    second = ask("q2")
    assert isinstance(second, Forward)
    assert not {b"Cookie", b"Authorization"} & {name for name, _ in second.head.headers}
    ports.decision = GUARDED
    assert isinstance(ask("q3"), Answer)
