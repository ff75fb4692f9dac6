"""The order of one request: decide, count, record, lease, record, inject, forward; and the scrubbing of its response.

The gate gets mitmproxy's own flows. Each port records the order of its calls. Each step checks what the request would
be forwarded with.
"""

import gzip
import hashlib
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import pytest
from mitmproxy import flow as mitm_flow
from mitmproxy import http
from mitmproxy.connection import Client, ConnectionState, Server
from mitmproxy.http import HTTPFlow
from mitmproxy.proxy.layers.http import _hooks

from gateway.admission import Admission
from gateway.budget import Over
from gateway.effects import Effects
from gateway.engines.bodies import Bodies
from gateway.engines.engine import Http2Servers, Shared
from gateway.engines.mitm.gate import STAMP, Gate, Sentinel
from gateway.engines.pool import Pool
from gateway.engines.port import EngineLimits, InspectedFlow
from gateway.exchange import Exchange
from gateway.ledger import Ledger
from gateway.scrub.searched import MATCHES_FORGOTTEN, MAX_MATCHES, MAX_PARTIAL, KnownPatterns
from gateway.scrub.stream import Withheld
from gateway.tls.contexts import ClientContexts
from gateway.tls.hello import Refused
from policy.decision import AllowRequest, Deny
from policy.facts import Scheme
from tests.gateway.exchange_cases import (
    ALLOWED,
    HOST,
    OPEN,
    ORDER,
    PLAN,
    SECRET,
    USE,
    Ports,
)


@dataclass
class Bench:
    """A gate, and the flows that it judges."""

    ports: Ports = field(default_factory=Ports)
    ledger: Ledger = field(default_factory=Ledger.fresh)
    now: float = 0.0
    limits: EngineLimits = field(default_factory=EngineLimits)

    def __post_init__(self) -> None:
        self.admission = Admission(lambda: self.now)
        inspected = InspectedFlow(
            reader=None,  # type: ignore[arg-type]  # a gate has no connection
            writer=None,  # type: ignore[arg-type]
            first_bytes=b"",
            host=HOST,
            port=443,
            scheme=Scheme.HTTPS,
            original_destination=("203.0.113.9", 443),
            hello=None,
            peer=("192.0.2.2", 40000),
            flow_id="f1",
        )
        ports = self.ports
        self.shared = Shared(
            dialler=None,  # type: ignore[arg-type]  # a gate opens no connection
            identity=None,  # type: ignore[arg-type]
            clients=ClientContexts(),
            upstream=None,  # type: ignore[arg-type]
            known=KnownPatterns(),
            effects=Effects(
                ports, ports, ports, ports, self.ledger, self.admission, time.monotonic, lambda: datetime.now(UTC)
            ),
            limits=self.limits,
            beat=lambda: None,
            pool=Pool(self.limits),
            http2=Http2Servers(time.monotonic),
            bodies=Bodies(self.limits),
        )
        self.gate = Gate(inspected, self.shared)

    async def asked(self, flow: HTTPFlow | None = None) -> HTTPFlow:
        """Return a flow whose request the gate has judged."""
        flow = flow or request()
        await self.gate.requestheaders(flow)
        return flow

    async def answered(self, *headers: tuple[bytes, bytes], status: int = 200) -> HTTPFlow:
        """Return a flow with the head of a server's response."""
        flow = await self.asked()
        flow.response = response(*headers, status=status)
        await self.responded(flow)
        return flow

    async def responded(self, flow: HTTPFlow) -> None:
        """Send the flow's request on a connection, and judge the head of its response."""
        if not flow.server_conn.connected:
            connected(flow)
        await self.gate.sallyport_route(flow)
        await self.gate.responseheaders(flow)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def request(method: bytes = b"GET", path: bytes = b"/v1", headers: tuple[tuple[bytes, bytes], ...] = ()) -> HTTPFlow:
    client = Client(peername=("192.0.2.2", 40000), sockname=("203.0.113.9", 443), state=ConnectionState.OPEN)
    flow = HTTPFlow(client, Server(address=(HOST, 443)))
    flow.request = http.Request(
        host=HOST,
        port=443,
        method=method,
        scheme=b"https",
        authority=HOST.encode(),
        path=path,
        http_version=b"HTTP/2.0",
        headers=http.Headers([(name.lower(), value) for name, value in headers]),
        content=None,
        trailers=None,
        timestamp_start=0.0,
        timestamp_end=None,
    )
    return flow


def response(*headers: tuple[bytes, bytes], status: int = 200, h2: bool = False) -> http.Response:
    version = b"HTTP/2.0" if h2 else b"HTTP/1.1"
    return http.Response(version, status, b"Said", http.Headers(headers), None, None, 0.0, 0.0)


def stamp(flow: HTTPFlow) -> Exchange:
    found = flow.metadata[STAMP]
    assert isinstance(found, Exchange)
    return found


def sends(flow: HTTPFlow) -> bool:
    """Return whether the request contains the secret."""
    return any(SECRET.encode() in value for _, value in flow.request.headers.fields)


def goes_on(bench: Bench, flow: HTTPFlow) -> bool:
    """Return whether the request can reach its server."""
    found = flow.metadata.get(STAMP)
    allowed = isinstance(found, Exchange) and found.allowed
    assert allowed is bench.gate.may_connect()
    return allowed or sends(flow)


def pass_on(flow: HTTPFlow, data: bytes) -> bytes:
    """Return the part of a piece of the response's body that is relayed."""
    assert flow.response is not None and callable(flow.response.stream)
    out = flow.response.stream(data)
    return out if isinstance(out, bytes) else b"".join(out)


# The order.


async def test_nothing_goes_on_before_the_last_step(bench: Bench) -> None:
    flow, early = request(), []
    bench.ports.on_step = lambda _number, step: early.append(step) if goes_on(bench, flow) else None
    await bench.asked(flow)

    assert ORDER == bench.ports.steps
    assert [] == early
    assert goes_on(bench, flow) and sends(flow)
    assert [SECRET] == flow.request.headers.get_all("x-api-key")


async def test_a_request_without_a_secret_is_counted_and_recorded(bench: Bench) -> None:
    bench.ports.decision, bench.ports.uses = OPEN, ()
    flow = await bench.asked()

    assert ["decide", "count", "request allow", "decide"] == bench.ports.steps
    assert goes_on(bench, flow)


STATUS = {"request allow": 503, "lease": 503, "secret.use allow": 503, "searched": 503}
"""The status of a request in which that step raises; None: the flow ends."""


@pytest.mark.parametrize("failing", range(len(ORDER)), ids=[f"{n} {step}" for n, step in enumerate(ORDER)])
async def test_a_step_that_raises_is_the_last_one(bench: Bench, failing: int) -> None:
    def broken(number: int, _step: str) -> None:
        if number == failing:
            raise ConnectionError("gone")

    bench.ports.on_step = broken
    flow = request()
    status = STATUS.get(ORDER[failing])
    if status is None:
        with pytest.raises(ConnectionError):
            await bench.asked(flow)
    else:
        await bench.asked(flow)
        assert flow.response is not None and status == flow.response.status_code
        assert ["r"] == bench.ports.denials()
    assert ORDER[: failing + 1] == bench.ports.steps
    assert not goes_on(bench, flow)
    if status is None:
        with pytest.raises(RuntimeError, match="no decision on this request"):
            await Sentinel().requestheaders(flow)


@pytest.mark.parametrize("late", [2, 3, 4, 5], ids=[ORDER[number] for number in (2, 3, 4, 5)])
async def test_a_flow_that_was_cut_during_a_step_sends_nothing(bench: Bench, late: int) -> None:
    """The log or the vault answers after the secret's revocation."""

    def cut(number: int, _step: str) -> None:
        if number == late:
            bench.gate.over = True

    bench.ports.on_step = cut
    flow = await bench.asked()

    assert not goes_on(bench, flow)
    # A revoked value is not recorded as used.
    assert ("secret.use allow" in bench.ports.steps) is (late > 3)


@pytest.mark.parametrize("late", [2, 3, 4, 5], ids=[ORDER[number] for number in (2, 3, 4, 5)])
@pytest.mark.parametrize(
    "changed", [Deny("new", "closed"), AllowRequest("new", (PLAN,)), OPEN], ids=["denied", "rule", "plan"]
)
async def test_a_policy_that_changed_during_a_step_voids_the_decision(
    bench: Bench, late: int, changed: AllowRequest | Deny
) -> None:
    def replaced(number: int, _step: str) -> None:
        if number == late:
            bench.ports.decision = changed

    bench.ports.on_step = replaced
    flow = await bench.asked()

    assert flow.response is not None and 403 == flow.response.status_code
    assert not goes_on(bench, flow)
    assert "request deny" == bench.ports.steps[-1]


async def test_a_revocation_finds_a_flow_that_waits_for_its_secret(bench: Bench) -> None:
    found: list[bool] = []

    def look(_number: int, step: str) -> None:
        if step in ("lease", "searched"):
            found.append("api-token" in bench.gate.used)

    bench.ports.on_step = look
    await bench.asked()

    assert [True, True] == found
    assert {b"x-api-key"} == bench.gate.sensitive


# Requests that are not forwarded.


async def test_a_denied_request_is_neither_counted_nor_leased_for(bench: Bench) -> None:
    bench.ports.decision = Deny("no", "closed")
    flow = await bench.asked()

    assert ["decide", "request deny"] == bench.ports.steps
    assert flow.response is not None and 403 == flow.response.status_code
    assert not goes_on(bench, flow)
    await Sentinel().requestheaders(flow)


async def test_a_denial_stands_while_the_log_is_gone(bench: Bench) -> None:
    def broken(_number: int, step: str) -> None:
        if step == "request deny":
            raise ConnectionError("gone")

    bench.ports.decision = Deny("no", "closed")
    bench.ports.on_step = broken
    flow = await bench.asked()

    assert flow.response is not None and 403 == flow.response.status_code
    assert ["no"] == bench.ports.denials()  # to be sent when the log works again
    assert not goes_on(bench, flow)


@pytest.mark.parametrize("decision", [None, True, "allow", object()])
async def test_what_is_no_decision_ends_the_flow(bench: Bench, decision: object) -> None:
    bench.ports.decision = decision
    flow = request()
    with pytest.raises(TypeError):
        await bench.asked(flow)
    assert not goes_on(bench, flow)


@pytest.mark.parametrize(("retry", "status"), [(7, 429), (None, 403)])
async def test_one_request_too_many_is_recorded_and_goes_no_further(
    bench: Bench, retry: int | None, status: int
) -> None:
    bench.ports.over = Over("too many", retry)
    flow = await bench.asked()

    assert ["decide", "count", "request deny"] == bench.ports.steps
    assert flow.response is not None and status == flow.response.status_code
    assert not goes_on(bench, flow)


async def test_a_lease_that_is_refused_denies_the_request(bench: Bench) -> None:
    bench.ports.refused = "not on this path"
    flow = await bench.asked()

    assert [*ORDER[:4], "request deny"] == bench.ports.steps
    assert flow.response is not None and 403 == flow.response.status_code
    (denied,) = [fields for _, decision, fields in bench.ports.records if decision == "deny"]
    assert ("r", "not on this path", "api-token") == (denied["rule"], denied["reason"], denied["secret"])
    assert not goes_on(bench, flow)


async def test_a_secret_that_could_not_be_taken_out_again_is_not_sent(bench: Bench) -> None:
    bench.ports.secret = "short"
    flow = await bench.asked()

    assert flow.response is not None and 403 == flow.response.status_code
    assert "secret.use allow" not in bench.ports.steps
    assert b"short" not in bytes(flow.request.headers)


async def test_a_secret_that_is_not_looked_for_is_not_sent(bench: Bench) -> None:
    """Policy plans it for the request but does not list it for the host."""
    bench.ports.uses = ()
    flow = request()
    with pytest.raises(RuntimeError, match="a secret would be sent that responses are not searched for"):
        await bench.asked(flow)
    assert not goes_on(bench, flow)


@pytest.mark.parametrize(("name", "value"), [("host", "evil.test"), ("port", 80), ("scheme", b"http")])
async def test_a_request_leaves_for_the_destination_of_its_flow_only(bench: Bench, name: str, value: object) -> None:
    flow = request()
    setattr(flow.request.data, name, value)
    with pytest.raises(RuntimeError, match="the engine would send this request to another destination than the flow's"):
        await bench.asked(flow)
    assert not goes_on(bench, flow)


async def test_a_worker_with_too_many_requests_under_way_counts_and_asks_nothing(bench: Bench) -> None:
    bench.admission.begin()
    bench.now = 1e6
    flow = await bench.asked()

    assert ["decide"] == bench.ports.steps
    assert ["overload"] == bench.ports.denials()
    assert flow.response is not None and 503 == flow.response.status_code
    assert not goes_on(bench, flow)


@pytest.mark.parametrize("step", ["request allow", "lease", "secret.use allow", "searched"])
async def test_a_request_is_under_way_until_it_may_be_forwarded(bench: Bench, step: str) -> None:
    waits: list[int | None] = []

    def look(_number: int, name: str) -> None:
        if name == step:
            bench.now += 1e6
            waits.append(bench.admission.retry_after())

    bench.ports.on_step = look
    await bench.asked()

    assert [60] == waits
    assert bench.admission.retry_after() is None


async def test_a_host_gets_no_request_once_its_answers_have_revealed_enough(bench: Bench) -> None:
    bench.ledger.reflections = MAX_PARTIAL
    flow = await bench.asked()

    assert ["reflection"] == bench.ports.denials()
    assert not goes_on(bench, flow)


async def test_a_request_that_mitmproxy_refused_is_refused(bench: Bench) -> None:
    flow = request()
    flow.error = mitm_flow.Error("malformed")
    await bench.asked(flow)

    assert [] == bench.ports.steps
    assert ["protocol"] == bench.ports.denials()
    assert not goes_on(bench, flow)


async def test_a_request_for_another_host_is_answered_and_not_judged(bench: Bench) -> None:
    flow = request()
    flow.request.data.authority = b"evil.test"
    await bench.asked(flow)

    assert [] == bench.ports.steps
    assert ["protocol"] == bench.ports.denials()
    assert flow.response is not None and 421 == flow.response.status_code
    assert not goes_on(bench, flow)
    await bench.gate.sallyport_refused(Refused("no head"))
    assert ["protocol", "protocol"] == bench.ports.denials()


# Requests that are forwarded.


NEVER = ("Accept-Encoding", "grpc-accept-encoding", "Range", "If-Range")


@pytest.mark.parametrize("name", NEVER)
@pytest.mark.parametrize("bound", [True, False])
async def test_a_host_that_is_sent_secrets_is_asked_for_whole_and_plain_documents(name: str, *, bound: bool) -> None:
    bench = Bench(Ports(OPEN, (USE,) if bound else ()))
    flow = await bench.asked(request(headers=((name.encode(), b"asked"),)))

    wanted = ["identity"] if bound and name == "Accept-Encoding" else [] if bound else ["asked"]
    assert wanted == flow.request.headers.get_all(name)
    assert bound is (["identity"] == flow.request.headers.get_all("accept-encoding"))
    assert bound is stamp(flow).scrub


async def test_the_host_that_is_sent_is_the_one_that_was_judged(bench: Bench) -> None:
    flow = await bench.asked(request(headers=((b"x-own", b"1"),)))
    assert (HOST, []) == (flow.request.authority, flow.request.headers.get_all("host"))
    assert "1" == flow.request.headers["x-own"]


async def test_what_was_judged_is_sent_and_not_what_was_written(bench: Bench) -> None:
    """A name with a port and capitals."""
    flow = request(path=b"/v1?q=1")
    flow.request.data.authority = b"GOOD.test:443"
    await bench.asked(flow)
    assert (HOST, "/v1?q=1") == (flow.request.authority, flow.request.path)


async def test_the_binding_owns_its_header(bench: Bench) -> None:
    flow = await bench.asked(request(headers=((b"x-API-key", b"mine"), (b"X_Api_Key", b"mine"))))
    assert SECRET.encode() in [value for _, value in flow.request.headers.fields]
    assert b"mine" not in bytes(flow.request.headers)


async def test_what_enforcing_would_deny_is_recorded_as_observed(bench: Bench) -> None:
    bench.ports.decision = AllowRequest("observe:p", (), Deny("p/no", "would be denied"))
    flow = await bench.asked()
    assert goes_on(bench, flow) and not sends(flow)
    assert ["request observe"] == [step for step in bench.ports.steps if step.startswith("request")]
    fields = bench.ports.records[0][2]
    assert ("observe:p", "p/no", "would be denied") == tuple(fields[name] for name in ("rule", "observed", "reason"))


async def test_the_trailers_of_a_request_are_dropped(bench: Bench) -> None:
    flow = await bench.asked()
    flow.request.trailers = http.Headers([(b"x-api-key", b"mine")])
    await bench.gate.request(flow)
    assert flow.request.trailers is None


async def test_a_long_path_is_in_the_record_by_its_digest(bench: Bench) -> None:
    path = "/" + "a" * 4000
    await bench.asked(request(path=path.encode()))
    fields = bench.ports.records[0][2]
    assert (path[:2048], hashlib.sha256(path.encode()).hexdigest()) == (fields["path"], fields["path_sha256"])


# The connection of a request.


def connected(flow: HTTPFlow, address: str = "198.51.100.7") -> None:
    flow.server_conn = Server(address=(HOST, 443))
    flow.server_conn.peername = (address, 443)
    flow.server_conn.state = ConnectionState.OPEN


async def test_a_request_goes_on_a_recorded_connection(bench: Bench) -> None:
    flow = await bench.asked()
    connected(flow)
    await bench.gate.sallyport_route(flow)
    assert "connect info" == bench.ports.steps[-1]
    assert ("198.51.100.7", flow.id) == tuple(bench.ports.records[-1][2][name] for name in ("address", "request_id"))

    second = await bench.asked()  # its own record already has the connection
    known = len(bench.ports.steps)
    assert "198.51.100.7" in [
        fields.get("address") for _, decision, fields in bench.ports.records if decision != "info"
    ]
    second.server_conn = flow.server_conn
    await bench.gate.sallyport_route(second)
    assert known == len(bench.ports.steps)

    flow.server_conn.state = ConnectionState.CLOSED
    await bench.asked()
    assert "address" not in bench.ports.records[-2][2]  # the request's record, before that of the secret

    connected(second, "198.51.100.8")  # another connection after all
    await bench.gate.sallyport_route(second)
    assert "connect info" == bench.ports.steps[-1]


async def test_a_connection_that_its_server_has_half_closed_is_recorded_too(bench: Bench) -> None:
    """The server still reads."""
    flow = await bench.asked()
    connected(flow)
    flow.server_conn.state = ConnectionState.CAN_WRITE
    await bench.gate.sallyport_route(flow)
    assert "connect info" == bench.ports.steps[-1]
    await bench.asked()
    assert "address" not in bench.ports.records[-2][2]  # no other request uses it


async def test_a_connection_without_an_address_carries_no_request(bench: Bench) -> None:
    flow = await bench.asked()
    connected(flow)
    flow.server_conn.peername = None
    with pytest.raises(RuntimeError, match="an upstream connection without an address"):
        await bench.gate.sallyport_route(flow)


@pytest.mark.parametrize("made", ["nothing", "a denial", "something else"])
async def test_a_request_without_an_allowance_is_not_routed(bench: Bench, made: str) -> None:
    flow = request()
    if made == "a denial":
        bench.ports.decision = Deny("no", "closed")
        await bench.asked(flow)
    elif made == "something else":
        flow.metadata[STAMP] = True
    connected(flow)
    with pytest.raises(RuntimeError, match=r"a step out of order|no decision on this request"):
        await bench.gate.sallyport_route(flow)
    assert "connect info" not in bench.ports.steps


async def test_a_connection_that_the_log_does_not_accept_carries_no_request(bench: Bench) -> None:
    def broken(_number: int, step: str) -> None:
        if step == "connect info":
            raise ConnectionError("gone")

    bench.ports.on_step = broken
    flow = await bench.asked()
    connected(flow)
    with pytest.raises(ConnectionError):
        await bench.gate.sallyport_route(flow)


# Scrubbing of responses.


async def test_an_answer_needs_a_decided_request(bench: Bench) -> None:
    for made in (None, True, object()):
        flow = request()
        flow.metadata[STAMP] = made
        flow.response = response()
        with pytest.raises(RuntimeError, match="no decision on this request"):
            await bench.gate.responseheaders(flow)
        with pytest.raises(RuntimeError, match="no decision on this request"):
            await bench.gate.response(flow)
    flow = await bench.asked()
    with pytest.raises(RuntimeError, match="no response"):
        await bench.gate.responseheaders(flow)
    with pytest.raises(RuntimeError, match="no response"):
        await bench.gate.response(flow)


async def test_an_answer_of_the_gate_itself_is_left_as_it_is(bench: Bench) -> None:
    bench.ports.decision = Deny("no", "closed")
    flow = await bench.asked()
    assert flow.response is not None
    before = flow.response.copy()
    await bench.gate.responseheaders(flow)
    await bench.gate.response(flow)
    assert (before.headers, before.content) == (flow.response.headers, flow.response.content)


@pytest.mark.parametrize(
    "codings", [(b"gzip",), (b"gzip", b"chunked"), (b"chunked", b"chunked"), (b"identity",), (b"gzip, chunked",)]
)
async def test_an_answer_in_another_transfer_coding_ends_the_flow(bench: Bench, codings: tuple[bytes, ...]) -> None:
    with pytest.raises(RuntimeError, match="a response in a transfer coding other than chunked"):
        await bench.answered(*((b"Transfer-Encoding", coding) for coding in codings))


@pytest.mark.parametrize(
    ("header", "status", "reason"),
    [
        ((b"Content-Type", b"text/plain; charset=utf-7"), 200, "charset"),
        ((b"Grpc-Encoding", b"gzip"), 200, "compressed messages"),
        ((b"Grpc-Encoding", b"identity"), 200, None),
        ((b"Content-Type", b"text/plain"), 206, None),  # the whole document was requested, and is searched to its end
        ((b"Content-Type", b"text/plain; charset=utf-8"), 200, None),
    ],
)
async def test_an_answer_that_cannot_be_searched_is_withheld(
    bench: Bench, header: tuple[bytes, bytes], status: int, reason: str | None
) -> None:
    flow = await bench.answered(header, status=status)
    shown = pass_on(flow, b"the answer in pieces, long enough to be let out at once. " * 20) + pass_on(flow, b"")
    assert flow.response is not None
    if reason is None:
        assert (status, True) == (flow.response.status_code, b"the answer" in shown)
        return
    assert 502 == flow.response.status_code
    assert b"the answer" not in shown and reason.encode() in shown
    assert ["scrub"] == bench.ports.denials()
    flow.response.trailers = http.Headers([(b"x-token", SECRET.encode())])
    await bench.gate.response(flow)
    assert flow.response.trailers is None


async def test_a_withheld_answer_shows_its_page_once_and_no_byte_of_its_body(bench: Bench) -> None:
    flow = await bench.answered((b"Grpc-Encoding", b"gzip"))
    pieces = [pass_on(flow, b"\1\0\0\0\4zzzz"), pass_on(flow, b"more"), pass_on(flow, b"")]
    assert [True, False, False] == [b"withheld" in piece for piece in pieces]
    assert b"" == b"".join(pieces[1:])
    empty = await bench.answered((b"Grpc-Encoding", b"gzip"))  # without a body of its own
    assert empty.response is not None
    empty.response.data.content = None
    await bench.gate.response(empty)
    assert b"withheld" in (empty.response.data.content or b"")


async def test_a_part_of_a_document_that_was_not_asked_for_whole_is_withheld() -> None:
    """A secret was bound to its host after the request was sent with its range."""
    ports = Ports(OPEN, ())
    bench = Bench(ports)
    flow = await bench.asked(request(headers=((b"Range", b"bytes=3-8"),)))
    ports.uses = (USE,)
    flow.response = response(status=206)
    await bench.responded(flow)
    assert 502 == flow.response.status_code


@pytest.mark.parametrize("failure", ["unknown", "cut"])
async def test_an_answer_of_which_it_is_not_known_what_to_take_out_does_not_begin(failure: str) -> None:
    ports = Ports(OPEN, ())
    bench = Bench(ports)
    flow = await bench.asked()
    ports.uses = (USE,)

    def late(_number: int, step: str) -> None:
        if step != "searched":
            return
        if failure == "unknown":
            raise ConnectionError("gone")
        bench.gate.over = True

    ports.on_step = late
    flow.response = response((b"X-Token", SECRET.encode()))
    if failure == "cut":
        with pytest.raises(ConnectionAbortedError):
            await bench.responded(flow)
    else:
        await bench.responded(flow)
        assert 502 == flow.response.status_code
        assert SECRET not in str(flow.response.headers)
    assert not stamp(flow).begun


async def test_an_answer_does_not_begin_once_answers_have_revealed_enough(bench: Bench) -> None:
    flow = await bench.asked()
    bench.ledger.reflections = MAX_PARTIAL
    flow.response = response()
    await bench.responded(flow)
    assert flow.response is not None and 502 == flow.response.status_code


async def test_the_secret_is_taken_out_of_each_place_of_an_answer(bench: Bench) -> None:
    secret = SECRET.encode()
    flow = await bench.answered((b"X-Seen", b"a " + secret + b" b"), (b"X-" + secret.hex().encode(), b"1"))
    assert flow.response is not None
    assert ((b"X-Seen", b"a [REDACTED] b"),) == flow.response.headers.fields
    assert "OK" == flow.response.reason  # the server's own phrase could contain the secret
    body = b"".join(pass_on(flow, piece) for piece in (b"a " + secret[:5], secret[5:] + b" b", b""))
    assert b"a " + b"*" * len(secret) + b" b" == body

    flow.response.trailers = http.Headers(
        [(b"x-checksum", b"77"), (b"x-token", b"t=" + secret), (b"x-" + secret.hex().encode(), b"1")]
    )
    await bench.gate.response(flow)
    assert ((b"x-checksum", b"77"), (b"x-token", b"t=[REDACTED]")) == flow.response.trailers.fields
    assert 3 == round(bench.ledger.matches(time.monotonic(), MATCHES_FORGOTTEN))  # head, body, trailers


async def test_a_match_beyond_the_bound_is_not_shown(bench: Bench) -> None:
    flow = await bench.answered()
    soon = time.monotonic() + 3600
    for _ in range(MAX_MATCHES):
        bench.ledger.match(soon, 0)
    second = await bench.asked()
    assert second.response is not None and 403 == second.response.status_code
    with pytest.raises(Withheld):
        pass_on(flow, SECRET.encode() + b"x" * 400)
    assert flow.response is not None
    flow.response.trailers = http.Headers([(b"x-token", SECRET.encode())])
    with pytest.raises(Withheld):
        await bench.gate.response(flow)


BETWEEN_NEIGHBOURS = {
    b"connection": b"x",
    b"keep-alive": b"timeout=5",
    b"proxy-connection": b"keep-alive",
    b"proxy-authenticate": b"Basic",
    b"proxy-authorization": b"Basic eA==",
    b"te": b"trailers",
    b"trailer": b"x-token",
    b"upgrade": b"h2c",
    b"alt-svc": b'h3=":443"',
    b"http2-settings": b"AAMAAABkAARAAAAA",
}


@pytest.mark.parametrize("name", BETWEEN_NEIGHBOURS)
async def test_headers_between_neighbours_stay_between_them(bench: Bench, name: bytes) -> None:
    """`Alt-Svc` would send the client past this gateway."""
    flow = await bench.answered((name.upper(), BETWEEN_NEIGHBOURS[name]), (b"X-Other", b"1"))
    assert flow.response is not None
    assert [(b"X-Other", b"1")] == list(flow.response.headers.fields)


async def test_a_header_value_is_one_line(bench: Bench) -> None:
    flow = await bench.answered((b"X-Folded", b"a\r\n b\0c"), (b"X-Nul", b"a\0b"))
    assert flow.response is not None
    assert [(b"X-Folded", b"a b c"), (b"X-Nul", b"ab")] == list(flow.response.headers.fields)


@pytest.mark.parametrize("cut", [False, True])
async def test_an_encoded_body_is_shown_decoded_and_searched_or_not_at_all(bench: Bench, *, cut: bool) -> None:
    encoded = gzip.compress(b"a " + SECRET.encode() + b" b")[: -4 if cut else None]
    flow = await bench.answered((b"Content-Encoding", b"gzip"))
    assert flow.response is not None and not flow.response.stream
    flow.response.data.content = encoded
    await bench.gate.response(flow)
    shown = b"a " + b"*" * len(SECRET) + b" b"
    assert (502 if cut else 200) == flow.response.status_code
    assert (not cut) is (shown == flow.response.data.content)
    assert "content-encoding" not in flow.response.headers


async def test_a_body_that_decodes_to_more_than_is_searched_is_not_shown() -> None:
    bench = Bench(limits=replace(EngineLimits(), scrub_body_bytes=1000))
    flow = await bench.answered((b"Content-Encoding", b"gzip"))
    assert flow.response is not None
    flow.response.data.content = gzip.compress(bytes(1001))
    await bench.gate.response(flow)
    assert 502 == flow.response.status_code


# Compressed gRPC.


GRPC = (b"Content-Type", b"application/grpc+proto")


@pytest.mark.parametrize("kind", [b"application/grpc", b"application/grpc+proto", b"application/grpc; x=1"])
async def test_a_compressed_message_of_grpc_ends_the_flow(bench: Bench, kind: bytes) -> None:
    """Over HTTP/2 on both sides, where single messages are known."""
    flow = await bench.asked()
    flow.response = response((b"Content-Type", kind), h2=True)
    await bench.responded(flow)
    assert b"\0\0\0\0\2ok" == pass_on(flow, b"\0\0\0\0\2ok")
    packed = gzip.compress(SECRET.encode())
    with pytest.raises(Exception, match="compressed gRPC messages"):
        pass_on(flow, b"\1" + len(packed).to_bytes(4, "big") + packed)
    assert ["scrub"] == bench.ports.denials()


async def test_messages_of_grpc_are_taken_one_by_one_over_http2_only(bench: Bench) -> None:
    flow = await bench.asked()
    flow.response = response(GRPC)
    await bench.responded(flow)
    assert b"" == pass_on(flow, b"\0\0\0\0\2ok")  # the end of the body is held back
    assert b"\0\0\0\0\2ok" == pass_on(flow, b"")


# Requests in progress.


async def test_a_request_is_in_progress_until_both_sides_are_through(bench: Bench) -> None:
    first = await bench.answered()
    await bench.gate.request(first)
    assert bench.gate.may_connect()
    await bench.gate.response(first)
    assert not bench.gate.may_connect()

    second = await bench.answered()
    await bench.gate.response(second)
    assert bench.gate.may_connect()
    await bench.gate.request(second)
    assert not bench.gate.may_connect()

    third = await bench.asked()
    await bench.gate.error(third)
    assert not bench.gate.may_connect()


async def test_what_is_in_progress_is_judged_by_the_policy_in_force(bench: Bench) -> None:
    flow = await bench.asked()
    assert bench.gate.still_allowed()
    bench.ports.decision = Deny("new", "closed")
    assert not bench.gate.still_allowed()
    bench.ports.decision = ALLOWED
    stamp(flow).facts = None
    assert not bench.gate.still_allowed()
    await bench.gate.error(flow)
    assert bench.gate.still_allowed()


async def test_an_answer_under_way_ends_when_its_host_may_be_sent_another_secret(bench: Bench) -> None:
    flow = await bench.asked()
    other = replace(USE, plan=replace(PLAN, secret="other-token"))
    bench.ports.uses = (USE, other)
    assert bench.gate.still_allowed()  # the patterns are fixed when the response begins
    bench.ports.uses = (USE,)
    flow.response = response()
    await bench.responded(flow)
    assert bench.gate.still_allowed()
    bench.ports.uses = (USE, other)
    assert not bench.gate.still_allowed()


# The sentinel.


HOOKS = ("requestheaders", "request", "responseheaders")


@pytest.mark.parametrize("hook", HOOKS)
async def test_the_sentinel_ends_what_was_not_stamped(bench: Bench, hook: str) -> None:
    check = getattr(Sentinel(), hook)
    await check(await bench.asked())

    other = await bench.asked()
    for made in (None, True, {"allowed": True}, stamp(other), Exchange(bench.gate.session, "another")):
        flow = request()
        flow.response = response()
        if made is not None:
            flow.metadata[STAMP] = made
        with pytest.raises(RuntimeError, match="no decision on this request"):
            await check(flow)


@pytest.mark.parametrize("hook", HOOKS)
async def test_the_sentinel_ends_a_refused_request_without_an_answer(bench: Bench, hook: str) -> None:
    check = getattr(Sentinel(), hook)
    bench.ports.decision = Deny("no", "closed")
    flow = await bench.asked()
    await check(flow)  # it has its page
    flow.response = None
    with pytest.raises(RuntimeError, match="a refused request without an answer"):
        await check(flow)
    flow.error = mitm_flow.Error("malformed")  # mitmproxy answers
    await check(flow)


def test_the_hooks_of_gate_and_sentinel_are_those_that_mitmproxy_calls() -> None:
    """mitmproxy would never call a hook of another name."""
    names = {hook.name for hook in vars(_hooks).values() if isinstance(hook, type) and hasattr(hook, "name")}
    own = {"sallyport_refused", "sallyport_route"}
    for addon in (Gate, Sentinel):
        hooks = {name for name, one in vars(addon).items() if callable(one) and not name.startswith("_")}
        judged = hooks & (names | own)
        assert {"requestheaders", "request", "responseheaders"} <= judged
