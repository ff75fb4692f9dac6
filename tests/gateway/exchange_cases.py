"""One table of cases for all engines: requests, and the required outcome for the request and its response.

A driver carries a case out and returns what the ports, the server and the client received. `test_exchange` drives the
pure exchange. Each engine has its own driver beside its tests. All use the same `check`.
"""

import base64
import gzip
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gateway.effects import Over, SecretRefused, SecretsSuspended
from gateway.ledger import Ledger
from gateway.placeholders import NONE, Placeholders
from gateway.scrub.searched import MAX_PARTIAL
from policy.client_credentials import DEFAULT, ClientCredentials, Handling
from policy.compiled import SecretAt
from policy.decision import AllowRequest, Deny
from policy.facts import RequestFacts, Scheme
from policy.injection import InjectionKind, InjectionPlan, SecretPlan, SubstitutionPlan, Surface
from policy.rules import Endpoint
from tests.gateway.record_forms import PlainForms
from vault.secret import Secret

HOST = "good.test"
SECRET = "tok/en+3v4l-UE_9~x"
PLAN = InjectionPlan("api", "api-token", InjectionKind.API_KEY, "X-Api-Key")
USE = SecretAt(PLAN, HOST, Endpoint(443, Scheme.HTTPS))
ALLOWED = AllowRequest("r", (PLAN,))
OPEN = AllowRequest("r")
GUARDED = AllowRequest("r", (PLAN,), client_credentials=DEFAULT)
STRIPPED = AllowRequest("r", (PLAN,), client_credentials=ClientCredentials(*(Handling.STRIP,) * 3))
FORWARDED = AllowRequest("r", (PLAN,), client_credentials=ClientCredentials(*(Handling.ALLOW,) * 3))
MAX_DECODED = 4096
"""The limit of the bytes of an encoded body that are searched, and of the decoded ones."""

ORDER = ["decide", "count", "request allow", "lease", "secret.use allow", "searched", "decide"]
"""The steps of a request with a secret. `connect info` follows."""
PLAIN = ["decide", "count", "request allow", "decide"]
"""The steps of a request to a host that gets no secret."""

UPGRADE = (b"Upgrade", b"websocket")
KEY = (b"Sec-WebSocket-Key", b"dGhlIHNhbXBsZSBub25jZQ==")
ACCEPT = (b"Sec-WebSocket-Accept", b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")
ACCEPTED = (UPGRADE, (b"Connection", b"Upgrade"), ACCEPT)
HANDSHAKE = (UPGRADE, (b"Connection", b"Upgrade"), (b"Sec-WebSocket-Version", b"13"), KEY)

UPGRADE_SENT = (b"upgrade", b"websocket")

type Fields = tuple[tuple[bytes, bytes], ...]


@dataclass
class Ports(PlainForms):
    """Policy, budget, vault and log of one flow. They record the order of their calls."""

    decision: object = ALLOWED
    uses: tuple[SecretAt, ...] = (USE,)
    over: Over | None = None
    secret: str = SECRET
    refused: str | None = None
    leased_paths: tuple[str, ...] = ("/v1",)
    """The paths that a lease may be asked for: those that the client sent."""
    steps: list[str] = field(default_factory=list)
    sizes: list[int | None] = field(default_factory=list)
    """The bytes of the requests that leases were asked for."""
    records: list[tuple[str, str, dict[str, object]]] = field(default_factory=list)
    on_step: Callable[[int, str], None] = lambda _number, _step: None
    """Called with the number and name of each step, before it ends. It may raise."""
    revoke: Callable[[], object] = lambda: None
    """Revokes the secret. The driver of a flow sets it."""
    ledger: Ledger = field(default_factory=Ledger.fresh)
    known: Placeholders = NONE

    def _step(self, name: str) -> None:
        self.steps.append(name)
        self.on_step(len(self.steps) - 1, name)

    def decide_request(self, _facts: RequestFacts) -> AllowRequest | Deny:
        self._step("decide")
        return self.decision  # type: ignore[return-value]  # a test returns something else

    def secrets_to(self, _host: str) -> tuple[SecretAt, ...]:
        return self.uses

    def placeholders(self) -> Placeholders:
        return self.known

    def request(self) -> Over | None:
        self._step("count")
        return self.over

    async def lease(self, plan: SecretPlan, facts: RequestFacts, size: int | None) -> Secret:
        assert plan in [use.plan for use in self.uses] or plan == PLAN
        assert facts.path in self.leased_paths
        self.sizes.append(size)
        self._step("lease")
        if self.refused is not None:
            raise SecretRefused(self.refused)
        return Secret(self.secret)

    async def searched(self, _use: SecretAt) -> tuple[Secret, ...]:
        self._step("searched")
        return (Secret(self.secret),)

    async def accept(self, kind: str, decision: str, **fields: object) -> None:
        self._step(f"{kind} {decision}")
        self.note(kind, decision, **fields)

    def note(self, kind: str, decision: str, **fields: object) -> None:
        self.records.append((kind, decision, {name: value for name, value in fields.items() if value is not None}))

    def denials(self) -> list[object]:
        return [fields["rule"] for kind, decision, fields in self.records if (kind, decision) == ("request", "deny")]

    def misses(self) -> list[object]:
        return [
            fields["reason"] for kind, decision, fields in self.records if (kind, decision) == ("secret.use", "info")
        ]


@dataclass
class Seen:
    """The outcome of a case. Header names are in lower case; headers for framing are left out.

    Attributes:
        target, authority, sent, body_sent: what the server received; `sent` is None if it received no byte.
        length: the server's `Content-Length`, None without one; `chunked`: its body was chunked.
        status: the status of the client's response, None without a response.
        whole: the client can see that the response is complete.
    """

    ports: Ports
    target: bytes = b""
    authority: bytes = b""
    sent: Fields | None = None
    body_sent: bytes = b""
    length: bytes | None = None
    chunked: bool = False
    status: int | None = None
    reason: bytes = b""
    headers: Fields = ()
    body: bytes = b""
    trailers: Fields = ()
    whole: bool = False


type Action = Callable[[Ports], None]


@dataclass(frozen=True)
class Case:
    """One request, the server's response, and the required outcome.

    Attributes:
        during: actions by the number of the step in which they happen.
        pieces: the response's body, or the frames of an accepted WebSocket, as they arrive.
        steps: of the ports, exactly.
        sent: headers that the server receives, exactly except for `Host` and framing; None: not a byte.
        far: the body that the server receives; None: the client's body.
        chunked: the client sends its body in the chunked coding, of HTTP/1.1.
        misses: the reasons of records that a placeholder is absent.
        shown: the client's status; None: the flow ends without a response.
        got: headers that the client receives, exactly except for framing; None: those of a page.
        text: the body that the client receives.
        page: a part of the body, if it is a page.
        whole: False if the flow ends within the response.
        denied: rules of the denials in the log.
        known: the placeholders of the sandbox.
        far_end: judges what the server received, in place of the comparison with `sent`.
    """

    name: str
    steps: list[str]
    shown: int | None
    decision: object = ALLOWED
    uses: tuple[SecretAt, ...] = (USE,)
    over: Over | None = None
    secret: str = SECRET
    refused: str | None = None
    during: Mapping[int, Action] = field(default_factory=dict)
    http2: bool = False
    method: bytes = b"GET"
    path: bytes = b"/v1"
    host: bytes = HOST.encode()
    headers: Fields = ()
    body: bytes = b""
    status: int = 200
    answer: Fields = ()
    pieces: tuple[bytes, ...] = (b"ok",)
    trailers: Fields = ()
    sent: Fields | None = None
    target: bytes = b"/v1"
    far: bytes | None = None
    chunked: bool = False
    misses: tuple[str, ...] = ()
    got: Fields | None = None
    text: bytes | None = None
    page: bytes = b""
    got_trailers: Fields = ()
    whole: bool = True
    denied: tuple[str, ...] = ()
    known: Placeholders = NONE
    far_end: "Callable[[Case, Seen], None] | None" = None

    def ports(self) -> Ports:
        """Return ports that behave as the case specifies."""
        path = self.path.partition(b"?")[0].decode()
        ports = Ports(self.decision, self.uses, self.over, self.secret, self.refused, (path,), known=self.known)

        def act(number: int, _step: str) -> None:
            if number in self.during:
                self.during[number](ports)

        ports.on_step = act
        return ports


def check(case: Case, seen: Seen) -> None:
    """Compare the outcome of a case with the required one."""
    assert case.steps == seen.ports.steps
    assert list(case.denied) == seen.ports.denials()
    if case.far_end is not None:
        case.far_end(case, seen)
    else:
        assert _cookies_last(case.sent) == _cookies_last(seen.sent)
    if case.sent is not None:
        far = case.body if case.far is None else case.far
        assert (case.target, HOST.encode(), far) == (seen.target, seen.authority, seen.body_sent)
        if case.far is not None:  # it was collected
            assert (b"%d" % len(far), False) == (seen.length, seen.chunked)
    assert list(case.misses) == seen.ports.misses()
    # Data in transit when a flow ends can be lost.
    assert case.shown == seen.status or (seen.status is None and not case.whole)
    shown = b"\n".join([seen.reason, seen.body, *(b"%s: %s" % one for one in (*seen.headers, *seen.trailers))])
    for form in (SECRET.encode(), SECRET.encode().hex().encode(), base64.b64encode(SECRET.encode())):
        assert form not in shown
    if case.shown is None:
        return
    assert case.whole is seen.whole
    if case.got is not None and seen.status is not None:
        assert case.got == seen.headers
    if case.text is not None:
        assert case.text == seen.body or (case.text.startswith(seen.body) and not case.whole)
    assert case.page in seen.body
    assert case.got_trailers == seen.trailers


def _cookies_last(headers: Fields | None) -> Fields | None:
    """Return headers in the order in which mitmproxy sends them over HTTP/2."""
    return None if headers is None else tuple(sorted(headers, key=lambda one: one[0] == b"cookie"))


def fail(_ports: Ports) -> None:
    """Fail as a port whose channel is closed."""
    raise ConnectionError("gone")


def freeze(_ports: Ports) -> None:
    """Answer as the port of a frozen secret."""
    raise SecretsSuspended("it is frozen")


def revoke(ports: Ports) -> None:
    """Revoke the secret."""
    ports.revoke()


def spend(ports: Ports) -> None:
    """Use up the number of reflections that responses may reveal."""
    ports.ledger.reflections = MAX_PARTIAL


def decided(decision: AllowRequest | Deny) -> Action:
    """Return an action that replaces the policy's decision."""

    def replace(ports: Ports) -> None:
        ports.decision = decision

    return replace


def bind(ports: Ports) -> None:
    """Bind the first secret to the host."""
    ports.uses = (USE,)


def split(data: bytes, *at: int) -> tuple[bytes, ...]:
    """Return `data` in pieces that end at these places."""
    places = [0, *at, len(data)]
    return tuple(data[begin:end] for begin, end in itertools.pairwise(places))


INJECTED = ((b"x-api-key", SECRET.encode()), (b"accept-encoding", b"identity"))
CONNECTED = [*ORDER, "connect info"]
PLAIN_CONNECTED = [*PLAIN, "connect info"]
STARS = b"*" * len(SECRET)
BODY = b"a " + SECRET.encode() + b" b"
MASKED = b"a " + STARS + b" b"
HEX = SECRET.encode().hex().encode()
FRAMES = b"\x01\x0b= " + SECRET[:9].encode() + b"\x80\x0b" + SECRET[9:].encode() + b" b"
"""A text message in two fragments, which divide the secret."""
GRPC = (b"content-type", b"application/grpc")
MESSAGE = b"\0\0\0\0\2ok"

REQUESTS = [
    Case("denied", ["decide", "request deny"], 403, decision=Deny("no", "closed"), page=b"closed", denied=("no",)),
    Case(
        "denied, and the log is gone",
        ["decide", "request deny"],
        403,
        decision=Deny("no", "closed"),
        during={1: fail},
        denied=("no",),
    ),
    Case(
        "denied to HEAD",
        ["decide", "request deny"],
        403,
        decision=Deny("no", "closed"),
        method=b"HEAD",
        text=b"",
        denied=("no",),
    ),
    Case("allowed", PLAIN_CONNECTED, 200, decision=OPEN, uses=(), sent=(), got=(), text=b"ok"),
    Case(
        "allowed with a body",
        PLAIN_CONNECTED,
        200,
        decision=OPEN,
        uses=(),
        method=b"POST",
        body=b"x=1",
        sent=(),
        got=(),
        text=b"ok",
    ),
    Case("injected", CONNECTED, 200, sent=INJECTED, got=(), text=b"ok"),
    Case("injected over HTTP/2", CONNECTED, 200, http2=True, sent=INJECTED, got=(), text=b"ok"),
    Case(
        "the binding owns its header",
        CONNECTED,
        200,
        headers=((b"x-api-KEY", b"mine"), (b"X_Api_Key", b"mine"), (b"X-Own", b"1")),
        sent=((b"x-own", b"1"), *INJECTED),
        text=b"ok",
    ),
    Case(
        "a credential of the client is refused",
        ["decide", "request deny"],
        403,
        decision=GUARDED,
        headers=((b"Authorization", b"Bearer own"),),
        page=b"header:authorization",
        denied=("client-credentials",),
    ),
    Case(
        "a credential of the client is refused over HTTP/2",
        ["decide", "request deny"],
        403,
        decision=GUARDED,
        http2=True,
        headers=((b"private-token", b"own"),),
        page=b"header:private-token",
        denied=("client-credentials",),
    ),
    Case(
        "a credential in the query is refused",
        ["decide", "request deny"],
        403,
        decision=GUARDED,
        path=b"/v1?a=1&access%5Ftoken=own",
        page=b"query:*token",
        denied=("client-credentials",),
    ),
    Case(
        "cookies of the client are left out, and what the binding owns is replaced",
        CONNECTED,
        200,
        decision=GUARDED,
        path=b"/v1?a=1",
        headers=((b"Cookie", b"s=1; t=2"), (b"X-Own", b"1"), (b"x_api_key", b"own")),
        sent=((b"x-own", b"1"), *INJECTED),
        target=b"/v1?a=1",
        text=b"ok",
    ),
    Case(
        "cookies of the client are left out over HTTP/2",
        CONNECTED,
        200,
        decision=GUARDED,
        http2=True,
        headers=((b"cookie", b"s=1"), (b"cookie", b"t=2"), (b"x-own", b"1")),
        sent=((b"x-own", b"1"), *INJECTED),
        text=b"ok",
    ),
    Case(
        "credentials of the client are left out",
        CONNECTED,
        200,
        decision=STRIPPED,
        path=b"/v1?a=%31&token=own&b",
        headers=((b"Authorization", b"Bearer own"), (b"X-Own", b"1")),
        sent=((b"x-own", b"1"), *INJECTED),
        target=b"/v1?a=%31&b",
        text=b"ok",
    ),
    Case(
        "the query of the client is left out whole, over HTTP/2",
        CONNECTED,
        200,
        decision=STRIPPED,
        http2=True,
        path=b"/v1?token=own",
        sent=INJECTED,
        text=b"ok",
    ),
    Case(
        "credentials of the client are allowed",
        CONNECTED,
        200,
        decision=FORWARDED,
        path=b"/v1?token=own",
        headers=((b"Authorization", b"Bearer own"), (b"Cookie", b"s=1")),
        sent=((b"authorization", b"Bearer own"), (b"cookie", b"s=1"), *INJECTED),
        target=b"/v1?token=own",
        text=b"ok",
    ),
    Case(
        "in mode observe a credential of the client is reported and sent without the secret",
        ["decide", "count", "request observe", "searched", "decide", "connect info"],
        200,
        decision=AllowRequest("r", (PLAN,), client_credentials=DEFAULT, trial="observe:watch"),
        headers=((b"Authorization", b"Bearer own"), (b"Cookie", b"s=1")),
        sent=((b"authorization", b"Bearer own"), (b"cookie", b"s=1"), (b"accept-encoding", b"identity")),
        text=b"ok",
    ),
    Case(
        "whole and plain documents are asked for",
        CONNECTED,
        200,
        headers=((b"Accept-Encoding", b"gzip"), (b"Range", b"bytes=3-8"), (b"If-Range", b"x")),
        sent=INJECTED,
        text=b"ok",
    ),
    Case(
        "hop-by-hop headers of the client stay behind",
        PLAIN_CONNECTED,
        200,
        decision=OPEN,
        uses=(),
        headers=((b"Keep-Alive", b"1"), (b"Proxy-Authorization", b"x"), (b"X-Forwarded-For", b"x"), (b"X-Own", b"1")),
        sent=((b"x-own", b"1"),),
        text=b"ok",
    ),
    Case(
        "what was judged is sent",
        PLAIN_CONNECTED,
        200,
        decision=OPEN,
        uses=(),
        path=b"https://GOOD.test:443/v1?q=1",
        host=b"Good.test:443",
        sent=(),
        target=b"/v1?q=1",
        text=b"ok",
    ),
    Case("another host", [], 421, host=b"evil.test", denied=("protocol",)),
    Case("a method that is never relayed", [], 405, method=b"TRACE", denied=("protocol",)),
    Case(
        "observed",
        ["decide", "count", "request observe", "decide", "connect info"],
        200,
        decision=AllowRequest("observe:p", (), Deny("p/no", "would be denied")),
        uses=(),
        sent=(),
        text=b"ok",
    ),
    Case(
        "over the budget for now",
        ["decide", "count", "request deny"],
        429,
        over=Over("too many", 7),
        denied=("limits",),
    ),
    Case("over the budget", ["decide", "count", "request deny"], 403, over=Over("all sent", None), denied=("limits",)),
    Case(
        "the limit of reflected values is reached",
        ["decide", "request deny"],
        403,
        during={0: spend},
        denied=("reflection",),
    ),
    Case(
        "the lease is refused",
        [*ORDER[:4], "request deny"],
        403,
        refused="not on this path",
        page=b"not on this path",
        denied=("r",),
    ),
    Case("a secret that could not be taken out", [*ORDER[:4], "request deny"], 403, secret="short", denied=("r",)),
    Case("a value that is no header value", ORDER[:4], 503, secret="with a\nline break", denied=("r",)),
    Case("a secret that is not looked for", [*ORDER[:5], "decide"], None, uses=()),
    Case("no decision", ["decide"], None, decision=None),
    Case("the decision fails", ORDER[:1], None, during={0: fail}),
    Case("the count fails", ORDER[:2], None, during={1: fail}),
    Case("the record is refused", ORDER[:3], 503, during={2: fail}, denied=("r",)),
    Case("the lease fails", ORDER[:4], 503, during={3: fail}, denied=("r",)),
    Case("the secret is frozen", ORDER[:4], 503, during={3: freeze}, page=b"Not sent: it is frozen.", denied=("r",)),
    Case(
        "a secret that could come back is frozen",
        ["decide", "count", "request allow", "searched"],
        503,
        decision=OPEN,
        during={3: freeze},
        page=b"Not sent: it is frozen.",
        denied=("r",),
    ),
    Case("the record of the use is refused", ORDER[:5], 503, during={4: fail}, denied=("r",)),
    Case("what to look for is not known", ORDER[:6], 503, during={5: fail}, denied=("r",)),
    Case("the second decision fails", ORDER, None, during={6: fail}),
    Case("the record of the connection is refused", CONNECTED, None, during={7: fail}),
    Case("revoked during the lease", ORDER[:4], None, during={3: revoke}, denied=("r",)),
    Case("revoked during the record of the use", ORDER[:6], None, during={4: revoke}, denied=("r",)),
    Case("revoked while it is asked what to look for", ORDER[:6], None, during={5: revoke}, denied=("r",)),
    Case("revoked during the record of the connection", CONNECTED, None, during={7: revoke}),
    *(
        Case(
            f"policy becomes {name} during {ORDER[number]}",
            [*ORDER, "request deny"],
            403,
            during={number: decided(decision)},
            page=b"the policy changed",
            denied=("r",),
        )
        for number in (2, 3, 4, 5)
        for name, decision in (("another rule", AllowRequest("new", (PLAN,))), ("another plan", OPEN))
    ),
    Case(
        "policy denies during the lease",
        [*ORDER, "request deny"],
        403,
        during={3: decided(Deny("new", "closed"))},
        denied=("r",),
    ),
]

UPGRADES = [
    Case(
        "an upgrade with a secret",
        CONNECTED,
        101,
        headers=(*HANDSHAKE, (b"Sec-WebSocket-Extensions", b"permessage-deflate")),
        status=101,
        answer=(*ACCEPTED, (b"x-seen", SECRET.encode())),
        pieces=(*split(FRAMES, 1, 4, 12), b"\x89\x00"),
        sent=((b"sec-websocket-version", b"13"), (b"sec-websocket-key", KEY[1]), *INJECTED, UPGRADE_SENT),
        got=((b"sec-websocket-accept", ACCEPT[1]), (b"x-seen", b"[REDACTED]"), UPGRADE_SENT),
        text=FRAMES.replace(SECRET[:9].encode(), b"*" * 9).replace(SECRET[9:].encode(), b"*" * 9) + b"\x89\x00",
    ),
    Case(
        "an upgrade without a secret for a host that is sent secrets",
        ["decide", "count", "request allow", "searched", "decide", "connect info"],
        101,
        decision=OPEN,
        headers=HANDSHAKE,
        status=101,
        answer=ACCEPTED,
        pieces=(b"\x82\x12" + SECRET.encode(),),
        sent=(
            (b"sec-websocket-version", b"13"),
            (b"sec-websocket-key", KEY[1]),
            (b"accept-encoding", b"identity"),
            UPGRADE_SENT,
        ),
        got=((b"sec-websocket-accept", ACCEPT[1]), UPGRADE_SENT),
        text=b"\x82\x12" + STARS,
    ),
    Case(
        "an upgrade with a secret, and an extension that was not requested",
        CONNECTED,
        None,
        headers=HANDSHAKE,
        status=101,
        answer=(*ACCEPTED, (b"Sec-WebSocket-Extensions", b"permessage-deflate")),
        pieces=(),
        sent=((b"sec-websocket-version", b"13"), (b"sec-websocket-key", KEY[1]), *INJECTED, UPGRADE_SENT),
    ),
    Case(
        "an upgrade with a secret, and a malformed frame",
        CONNECTED,
        101,
        headers=HANDSHAKE,
        status=101,
        answer=ACCEPTED,
        pieces=(b"\x81\x02ok", b"\xc1\x02ok"),
        sent=((b"sec-websocket-version", b"13"), (b"sec-websocket-key", KEY[1]), *INJECTED, UPGRADE_SENT),
        text=b"\x81\x02ok",
        whole=False,
        denied=("scrub",),
    ),
    Case(
        "an upgrade",
        PLAIN_CONNECTED,
        101,
        decision=OPEN,
        uses=(),
        headers=HANDSHAKE,
        status=101,
        answer=ACCEPTED,
        pieces=(),
        sent=(
            (b"sec-websocket-version", b"13"),
            (b"sec-websocket-key", KEY[1]),
            UPGRADE_SENT,
        ),
        got=((b"sec-websocket-accept", ACCEPT[1]), UPGRADE_SENT),
    ),
    *(
        Case(
            f"an upgrade with {name}",
            PLAIN_CONNECTED,
            None,
            decision=OPEN,
            uses=(),
            headers=HANDSHAKE,
            status=101,
            answer=answer,
            pieces=(),
            sent=((b"sec-websocket-version", b"13"), (b"sec-websocket-key", KEY[1]), UPGRADE_SENT),
        )
        for name, answer in {
            "another key": (UPGRADE, (b"Connection", b"Upgrade"), (ACCEPT[0], base64.b64encode(bytes(20)))),
            "two keys": (UPGRADE, (b"Connection", b"Upgrade"), ACCEPT, ACCEPT),
            "another protocol": ((b"Upgrade", b"h2c"), (b"Connection", b"Upgrade"), ACCEPT),
        }.items()
    ),
    Case(
        "an upgrade that nobody asked for",
        PLAIN_CONNECTED,
        None,
        decision=OPEN,
        uses=(),
        headers=(KEY,),
        status=101,
        answer=ACCEPTED,
        pieces=(),
        sent=((b"sec-websocket-key", KEY[1]),),
    ),
    Case(
        "a secret is bound after the handshake was sent",
        [*PLAIN_CONNECTED, "searched"],
        None,
        decision=OPEN,
        uses=(),
        headers=HANDSHAKE,
        status=101,
        answer=ACCEPTED,
        pieces=(),
        during={4: bind},
        sent=((b"sec-websocket-version", b"13"), (b"sec-websocket-key", KEY[1]), UPGRADE_SENT),
    ),
]


def _response(name: str, shown: int = 200, **more: object) -> Case:
    """Return the case of a response to a request with a secret."""
    return Case(name, CONNECTED, shown, sent=INJECTED, **more)  # type: ignore[arg-type]


RESPONSES = [
    _response(
        "secrets in the head",
        answer=((b"x-seen", b"a " + SECRET.encode() + b" b"), (b"x-" + HEX, b"1"), (b"x-other", b"1")),
        got=((b"x-seen", b"a [REDACTED] b"), (b"x-other", b"1")),
        text=b"ok",
    ),
    _response("a secret in the body", pieces=(BODY,), got=(), text=MASKED),
    _response("a secret in one-byte pieces", pieces=tuple(bytes([one]) for one in BODY), text=MASKED),
    *(
        _response(f"a secret in pieces cut at {at}", pieces=split(BODY, at), text=MASKED)
        for at in (1, 2, 3, 11, 19, 20, 21)
    ),
    _response("two secrets over three pieces", pieces=split(BODY + BODY, 5, 30), text=MASKED + MASKED),
    _response(
        "another form of a secret",
        pieces=split(b"a " + HEX + b" b", 9),
        text=b"a " + b"*" * len(HEX) + b" b",
    ),
    _response("the beginning of a secret at the end", pieces=split(b"a tok/en+3v", 4), text=b"a *********"),
    _response("a secret over HTTP/2", http2=True, pieces=split(BODY, 7), got=(), text=MASKED),
    Case(
        "a secret that this request was not sent",
        ["decide", "count", "request allow", "searched", "decide", "connect info"],
        200,
        decision=OPEN,
        pieces=split(BODY, 7),
        sent=((b"accept-encoding", b"identity"),),
        text=MASKED,
    ),
    Case(
        "a secret that was bound after the request was sent",
        [*PLAIN_CONNECTED, "searched"],
        200,
        decision=OPEN,
        uses=(),
        during={4: bind},
        pieces=split(BODY, 7),
        sent=(),
        text=MASKED,
    ),
    _response(
        "headers between neighbours",
        answer=(
            (b"Alt-Svc", b'h3=":443"'),
            (b"Proxy-Authenticate", b"Basic"),
            (b"Keep-Alive", b"1"),
            (b"X-Other", b"1"),
        ),
        got=((b"x-other", b"1"),),
        text=b"ok",
    ),
    _response(
        "compressed",
        answer=((b"content-encoding", b"gzip"), (b"x-other", b"1")),
        pieces=split(gzip.compress(BODY), 3, 12),
        got=((b"x-other", b"1"),),
        text=MASKED,
    ),
    _response("compressed and cut", 502, answer=((b"content-encoding", b"gzip"),), pieces=(gzip.compress(BODY)[:-4],)),
    _response("compressed in an unknown way", 502, answer=((b"content-encoding", b"compress"),), pieces=(b"zzzz",)),
    _response(
        "compressed to more than is searched",
        502,
        answer=((b"content-encoding", b"gzip"),),
        pieces=(gzip.compress(bytes(MAX_DECODED + 1)),),
    ),
    _response(
        "an unknown charset",
        502,
        answer=((b"content-type", b"text/plain; charset=utf-7"),),
        pieces=split(BODY, 7),
        page=b"charset",
        denied=("scrub",),
    ),
    Case(
        "a part of a document",
        [*PLAIN_CONNECTED, "searched"],
        502,
        decision=OPEN,
        uses=(),
        during={4: bind},
        headers=((b"Range", b"bytes=3-8"),),
        status=206,
        sent=((b"range", b"bytes=3-8"),),
        page=b"a part of a document",
        denied=("scrub",),
    ),
    Case(
        "what to take out is not known",
        [*PLAIN_CONNECTED, "searched"],
        502,
        decision=OPEN,
        uses=(),
        during={4: bind, 5: fail},
        pieces=(BODY,),
        sent=(),
        page=b"does not know which secrets",
        denied=("scrub",),
    ),
    Case(
        "revoked before the response begins",
        [*PLAIN_CONNECTED, "searched"],
        None,
        decision=OPEN,
        uses=(),
        during={4: bind, 5: revoke},
        pieces=(BODY,),
        sent=(),
    ),
    _response(
        "the limit of reflected values is reached meanwhile", 502, during={7: spend}, pieces=(BODY,), denied=("scrub",)
    ),
]

GRPC_CALLS = [
    _response(
        "messages and trailers",
        http2=True,
        answer=(GRPC,),
        pieces=(MESSAGE, MESSAGE),
        trailers=((b"grpc-status", b"0"), (b"grpc-message", b"for " + SECRET.encode()), (b"x-" + HEX, b"1")),
        got=(GRPC,),
        text=MESSAGE + MESSAGE,
        got_trailers=((b"grpc-status", b"0"), (b"grpc-message", b"for [REDACTED]")),
    ),
    _response(
        "a secret in a message",
        http2=True,
        answer=(GRPC,),
        pieces=split(b"\0\0\0\0" + bytes([len(BODY)]) + BODY, 3, 9, 20),
        text=b"\0\0\0\0" + bytes([len(BODY)]) + MASKED,
    ),
    _response(
        "a compressed message",
        http2=True,
        answer=(GRPC,),
        pieces=(MESSAGE, b"\1\0\0\0\4zzzz"),
        text=MESSAGE,
        whole=False,
        denied=("scrub",),
    ),
    _response(
        "compression that the head announces",
        502,
        http2=True,
        answer=(GRPC, (b"grpc-encoding", b"gzip")),
        pieces=(b"\1\0\0\0\4zzzz",),
        trailers=((b"x-token", SECRET.encode()),),
        page=b"compressed messages",
        denied=("scrub",),
    ),
]

PLACEHOLDER = "__TOKEN__"
ENCODED = b"tok%2Fen%2B3v4l-UE_9~x"
MAX_BODY = 2048
"""The limit of a collected request body."""


def _substitution(*surfaces: Surface) -> SubstitutionPlan:
    username = "me" if Surface.BASIC in surfaces else ""
    return SubstitutionPlan("api", "api-token", PLACEHOLDER, surfaces, username)


def _substituted(
    name: str, *surfaces: Surface, shown: int | None = 200, steps: list[str] = CONNECTED, **more: object
) -> Case:
    """Return the case of a request whose placeholders are replaced on `surfaces`."""
    plan = _substitution(*surfaces)
    given: dict[str, object] = {
        "decision": AllowRequest("r", (), None, (plan,)),
        "uses": (SecretAt(plan, HOST, Endpoint(443, Scheme.HTTPS)),),
        "sent": ((b"accept-encoding", b"identity"),),
        **more,
    }
    return Case(name, steps, shown, **given)  # type: ignore[arg-type]


JSON = ((b"content-type", b"application/json"),)
FORM = ((b"content-type", b"application/x-www-form-urlencoded"),)
JUDGED_PATH = [*ORDER[:4], "decide", *ORDER[4:], "connect info"]
WHOLE = ["decide", "count", "decide", *ORDER[2:], "connect info"]
"""The steps of a request whose body was collected."""
MISSED = ["decide", "count", "request allow", "searched", "decide", "connect info"]
"""The steps of a request without the placeholder: no lease."""
NO_BODY: Fields = ((b"accept-encoding", b"identity"),)


def _typed(kind: Fields) -> Fields:
    return (*kind, *NO_BODY)


SUBSTITUTIONS = [
    _substituted(
        "a path",
        Surface.PATH,
        path=b"/v1/__TOKEN__-",
        shown=403,
        steps=[*ORDER[:4], "request deny"],
        sent=None,
        page=b"request path contains ambiguous substituted segments",
        denied=("r",),
    ),
    _substituted(
        "a path with a value that has no separator",
        Surface.PATH,
        path=b"/v1/__TOKEN__/a__TOKEN__b",
        secret="3v4l-UE_9~x y",
        target=b"/v1/3v4l-UE_9~x%20y/a3v4l-UE_9~x%20yb",
        steps=JUDGED_PATH,
    ),
    _substituted(
        "a path whose value makes a dot segment",
        Surface.PATH,
        path=b"/v1/__TOKEN__",
        secret="........",
        shown=403,
        steps=[*ORDER[:4], "request deny"],
        sent=None,
        page=b"request path contains ambiguous substituted segments",
        denied=("r",),
    ),
    _substituted(
        "a query, in names and values",
        Surface.QUERY,
        path=b"/v1?a=__TOKEN__&__TOKEN__=b&c=%5f_TOKEN__",
        target=b"/v1?a=" + ENCODED + b"&" + ENCODED + b"=b&c=%5f_TOKEN__",
    ),
    _substituted(
        "a query over HTTP/2",
        Surface.QUERY,
        http2=True,
        path=b"/v1?a=__TOKEN__",
        target=b"/v1?a=" + ENCODED,
        steps=CONNECTED,
    ),
    _substituted(
        "a header, but not one that routes",
        Surface.HEADER,
        headers=((b"Authorization", b"token __TOKEN__"), (b"X-Own", b"__TOKEN__,__TOKEN__"), (b"X-Else", b"1")),
        sent=(
            (b"authorization", b"token " + SECRET.encode()),
            (b"x-own", SECRET.encode() + b"," + SECRET.encode()),
            (b"x-else", b"1"),
            *NO_BODY,
        ),
    ),
    _substituted(
        "the handshake of a WebSocket",
        Surface.PATH,
        Surface.QUERY,
        Surface.HEADER,
        path=b"/v1/__TOKEN__?token=__TOKEN__",
        shown=101,
        steps=JUDGED_PATH,
        secret="3v4l-UE_9~x y",
        headers=(*HANDSHAKE, (b"X-Own", b"__TOKEN__")),
        status=101,
        answer=(*ACCEPTED, (b"x-seen", b"3v4l-UE_9~x%20y")),
        pieces=(b"\x82\x0d3v4l-UE_9~x y",),
        target=b"/v1/3v4l-UE_9~x%20y?token=3v4l-UE_9~x%20y",
        sent=(
            (b"sec-websocket-version", b"13"),
            (b"sec-websocket-key", KEY[1]),
            (b"x-own", b"3v4l-UE_9~x y"),
            *NO_BODY,
            UPGRADE_SENT,
        ),
        got=((b"sec-websocket-accept", ACCEPT[1]), (b"x-seen", b"[REDACTED]"), UPGRADE_SENT),
        text=b"\x82\x0d" + b"*" * 13,
    ),
    _substituted(
        "a value that is too short to be kept out of responses",
        Surface.QUERY,
        path=b"/v1?__TOKEN__",
        secret="short",
        shown=403,
        sent=None,
        steps=[*ORDER[:4], "request deny"],
        page=b"shorter than 8 characters",
        denied=("r",),
    ),
    _substituted(
        "no surface but the declared one",
        Surface.HEADER,
        method=b"POST",
        path=b"/v1?a=__TOKEN__",
        headers=((b"X-Own", b"__TOKEN__"),),
        body=b"__TOKEN__",
        target=b"/v1?a=__TOKEN__",
        sent=((b"x-own", SECRET.encode()), *NO_BODY),
    ),
    *(
        _substituted(
            f"a JSON body over {'HTTP/2' if http2 else 'HTTP/1.1'}{', chunked' if chunked else ''}",
            Surface.BODY,
            http2=http2,
            chunked=chunked,
            method=b"POST",
            headers=JSON,
            body=b'{"__TOKEN__": ["a __TOKEN__", __TOKEN__]}',
            secret='a"b\\c/d-\u00e9',
            far=b'{"a\\"b\\\\c/d-\\u00e9": ["a a\\"b\\\\c/d-\\u00e9", __TOKEN__]}',
            sent=_typed(JSON),
            steps=WHOLE,
        )
        for http2, chunked in ((False, False), (False, True), (True, False))
    ),
    _substituted(
        "a form",
        Surface.BODY,
        method=b"POST",
        headers=FORM,
        body=b"a=__TOKEN__&b=%2",
        secret="a b+c&d=e",
        far=b"a=a+b%2Bc%26d%3De&b=%2",
        sent=_typed(FORM),
        steps=WHOLE,
    ),
    _substituted(
        "a text",
        Surface.BODY,
        method=b"PUT",
        body=b"<a>__TOKEN__</a>",
        far=b"<a>" + SECRET.encode() + b"</a>",
        steps=WHOLE,
    ),
    _substituted(
        "a body that is not UTF-8",
        Surface.BODY,
        method=b"PUT",
        body=b"\xff__TOKEN__",
        far=b"\xff__TOKEN__",
        steps=["decide", "count", "decide", *MISSED[2:]],
        misses=("no placeholder",),
    ),
    *(
        _substituted(
            f"a body that is {name}",
            Surface.BODY,
            method=b"PUT",
            headers=(header,),
            body=b"__TOKEN__",
            sent=((header[0].lower(), header[1]), *NO_BODY),
            steps=MISSED,
            misses=("the body is of a kind in which placeholders are not replaced",),
        )
        for name, header in {
            "multipart": (b"Content-Type", b"multipart/form-data; boundary=x"),
            "compressed": (b"Content-Encoding", b"gzip"),
            "in another charset": (b"Content-Type", b"text/plain; charset=utf-16"),
        }.items()
    ),
    _substituted(
        "no placeholder", Surface.PATH, Surface.QUERY, Surface.HEADER, steps=MISSED, misses=("no placeholder",)
    ),
    _substituted(
        "no placeholder in a body",
        Surface.BODY,
        method=b"POST",
        body=b"nothing",
        far=b"nothing",
        steps=["decide", "count", "decide", *MISSED[2:]],
        misses=("no placeholder",),
    ),
    *(
        _substituted(
            f"a body above the limit over {'HTTP/2' if http2 else 'HTTP/1.1'}{', chunked' if chunked else ''}",
            Surface.BODY,
            http2=http2,
            chunked=chunked,
            method=b"POST",
            body=b"__TOKEN__" + bytes(MAX_BODY),
            shown=413,
            sent=None,
            steps=["decide", "count"],
            denied=("limits",),
        )
        for http2, chunked in ((False, False), (False, True), (True, False))
    ),
    _substituted(
        "a body that becomes larger than the limit",
        Surface.BODY,
        method=b"POST",
        body=b"__TOKEN__" * (MAX_BODY // len(PLACEHOLDER)),
        shown=403,
        sent=None,
        steps=[*WHOLE[:5], "request deny"],
        denied=("r",),
    ),
    _substituted(
        "policy changes while a body is collected",
        Surface.BODY,
        method=b"POST",
        body=b"__TOKEN__",
        during={1: decided(OPEN)},
        shown=403,
        sent=None,
        steps=["decide", "count", "decide", "request deny"],
        page=b"the policy changed",
        denied=("r",),
    ),
    _substituted(
        "the record of a use in a body is refused",
        Surface.BODY,
        method=b"POST",
        body=b"__TOKEN__",
        during={5: fail},
        shown=503,
        sent=None,
        steps=WHOLE[:6],
        denied=("r",),
    ),
    _substituted(
        "revoked during the lease for a body",
        Surface.BODY,
        method=b"POST",
        body=b"__TOKEN__",
        during={4: revoke},
        shown=None,
        sent=None,
        steps=WHOLE[:5],
        denied=("r",),
    ),
    _substituted(
        "a rule denies the path with its secret",
        Surface.PATH,
        path=b"/v1/__TOKEN__",
        secret="3v4l-UE_9~x",
        during={3: decided(Deny("no", "closed"))},
        shown=403,
        sent=None,
        steps=[*JUDGED_PATH[:5], "request deny"],
        denied=("r",),
    ),
    *(
        _substituted(
            f"a value with {name} in a {surface}",
            surface,
            path=b"/v1/__TOKEN__?__TOKEN__",
            headers=((b"X-Own", b"__TOKEN__"),),
            secret=f"long{octet}value",
            shown=503,
            sent=None,
            steps=ORDER[:4],
            denied=("r",),
        )
        for surface in (Surface.PATH, Surface.QUERY, Surface.HEADER)
        for name, octet in {"CR": "\r", "LF": "\n", "NUL": "\0"}.items()
    ),
]


def _placed(name: str, kind: InjectionKind, named: str, **more: object) -> Case:
    """Return the case of a request with an injection that is no plain header."""
    plan = InjectionPlan("api", "api-token", kind, named)
    given: dict[str, object] = {
        "decision": AllowRequest("r", (plan,)),
        "uses": (SecretAt(plan, HOST, Endpoint(443, Scheme.HTTPS)),),
        "sent": NO_BODY,
        **more,
    }
    return Case(name, CONNECTED, 200, **given)  # type: ignore[arg-type]


COOKIE = b"s-3v4l~UE_9+x/y="
PLACES = [
    _placed("a key in the query", InjectionKind.QUERY, "key", target=b"/v1?key=" + ENCODED),
    *(
        _placed(
            f"the binding owns its query parameter over {'HTTP/2' if http2 else 'HTTP/1.1'}",
            InjectionKind.QUERY,
            "key",
            http2=http2,
            path=b"/v1?a=%2F&key=mine&%6bey=mine;KEY=mine&b=&&monkey=1&%6B%65%79&c",
            target=b"/v1?a=%2F&b=&&monkey=1&c&key=" + ENCODED,
            answer=((b"location", b"https://other.test/?key=" + ENCODED),),
            pieces=(b'{"url":"/v1?key=' + ENCODED + b'"}',),
            got=((b"location", b"https://other.test/?key=[REDACTED]"),),
            text=b'{"url":"/v1?key=' + b"*" * len(ENCODED) + b'"}',
        )
        for http2 in (False, True)
    ),
    *(
        _placed(
            f"the binding owns its cookie over {'HTTP/2' if http2 else 'HTTP/1.1'}",
            InjectionKind.COOKIE,
            "sid",
            http2=http2,
            headers=(
                (b"x-own", b"1"),
                (b"cookie", b"a=1;  sid=mine;b=2"),
                (b"cookie", b"sid=mine"),
                (b"cookie", b"SID=c"),
            ),
            secret=COOKIE.decode(),
            sent=((b"x-own", b"1"), (b"cookie", b"a=1;b=2; SID=c; sid=" + COOKIE), *NO_BODY),
            answer=((b"set-cookie", b"sid=" + COOKIE + b"; Path=/"),),
            got=((b"set-cookie", b"sid=[REDACTED]; Path=/"),),
        )
        for http2 in (False, True)
    ),
]

KNOWN = Placeholders({PLACEHOLDER: "api-token"})
STRAY = ["decide", "count", "request deny"]


def _basic(login: bytes) -> Fields:
    return ((b"authorization", b"Basic " + base64.b64encode(login)),)


def _stray(name: str, *, http2: bool = False, **more: object) -> Case:
    """Return the case of a request with a placeholder to a host that no rule binds it to."""
    given: dict[str, object] = {"decision": OPEN, "uses": (), "page": b"where no rule replaces it", **more}
    return Case(name, STRAY, 403, http2=http2, known=KNOWN, denied=("placeholder",), **given)  # type: ignore[arg-type]


ISSUED = [
    _stray("a known placeholder in a query elsewhere", path=b"/v1?a=__TOKEN__"),
    _stray("a known placeholder in a path elsewhere", path=b"/v1/a__TOKEN__"),
    _stray("a known placeholder in a path elsewhere, over HTTP/2", path=b"/v1/a__TOKEN__", http2=True),
    _stray("a known placeholder elsewhere, encoded", path=b"/v1?a=%5F%5fT%4fKEN__"),
    _stray("a known placeholder in a header elsewhere", headers=((b"Cookie", b"a=1; b=__TOKEN__"),)),
    _stray("a known placeholder in the name of a header", headers=((b"a__TOKEN__", b"1"),)),
    _stray("a known placeholder in the password of a login elsewhere", headers=_basic(b"me:a__TOKEN__")),
    _stray("a known placeholder in the user of a login elsewhere", headers=_basic(b"__TOKEN__:")),
    Case(
        "an unknown placeholder elsewhere is a text",
        PLAIN_CONNECTED,
        200,
        decision=OPEN,
        uses=(),
        path=b"/v1?a=__OTHER__",
        target=b"/v1?a=__OTHER__",
        sent=(),
        known=KNOWN,
    ),
    Case(
        "a known placeholder in a header that an injection owns",
        CONNECTED,
        200,
        headers=((b"x-api-key", b"__TOKEN__"),),
        sent=INJECTED,
        known=KNOWN,
    ),
    Case(
        "a known placeholder beside the header that an injection owns",
        [*ORDER[:4], "request deny"],
        403,
        headers=((b"x-api-key", b"__TOKEN__"), (b"x-other", b"__TOKEN__")),
        known=KNOWN,
        page=b"where no rule replaces it",
        denied=("placeholder",),
    ),
    *(
        _substituted(
            f"a known placeholder as the password of a login over {'HTTP/2' if http2 else 'HTTP/1.1'}",
            Surface.BASIC,
            http2=http2,
            headers=_basic(b"me:__TOKEN__"),
            secret="a:b\u00e9-3v4l-UE_9~x",
            sent=(*_basic("me:a:b\u00e9-3v4l-UE_9~x".encode()), *NO_BODY),
            known=KNOWN,
        )
        for http2 in (False, True)
    ),
    *(
        _substituted(
            f"no password that is replaced: {name}",
            Surface.BASIC,
            headers=headers,
            shown=403,
            steps=[*MISSED[:3], "request deny"],
            sent=None,
            page=b"where no rule replaces it",
            denied=("placeholder",),
            known=KNOWN,
        )
        for name, headers in {
            "the user": _basic(b"__TOKEN__:x"),
            "that of another user": _basic(b"you:__TOKEN__"),
            "a part of it": _basic(b"me:__TOKEN__x"),
            "no login": ((b"authorization", b"Bearer __TOKEN__"),),
            "another header": ((b"x-own", _basic(b"me:__TOKEN__")[0][1]),),
        }.items()
    ),
    _substituted(
        "a known placeholder on a surface and on another",
        Surface.HEADER,
        headers=((b"x-own", b"__TOKEN__"),),
        path=b"/v1?a=__TOKEN__",
        shown=403,
        steps=[*ORDER[:4], "request deny"],
        sent=None,
        page=b"where no rule replaces it",
        denied=("placeholder",),
        known=KNOWN,
    ),
    _substituted(
        "a known placeholder in a part of a body in which none is replaced",
        Surface.BODY,
        method=b"POST",
        headers=JSON,
        body=b'{"a": __TOKEN__}',
        shown=403,
        steps=[*WHOLE[:4], "request deny"],
        sent=None,
        page=b"where no rule replaces it",
        denied=("placeholder",),
        known=KNOWN,
    ),
    _substituted(
        "a known placeholder in a body, replaced",
        Surface.BODY,
        method=b"POST",
        headers=JSON,
        body=b'{"a": "__TOKEN__"}',
        far=b'{"a": "' + SECRET.encode() + b'"}',
        sent=_typed(JSON),
        steps=WHOLE,
        known=KNOWN,
    ),
]

CASES = [*REQUESTS, *UPGRADES, *RESPONSES, *GRPC_CALLS, *SUBSTITUTIONS, *PLACES, *ISSUED]
