"""The add-ons of an inspected flow: decide each request, put secrets in, take them out of the answer.

Order for each request:
translate -> decide -> admit -> count -> allow record accepted -> lease -> use record accepted -> inject -> learn what
to look for -> forward.
Nothing has been sent to the server before that order is complete, and no connection to it opened.

- The allow record has the connection that the request goes on, where there is one already: its address, and the name
  in the server's certificate. For any other connection a `connect` record says so before the first byte of the request.

- Every request is judged alone, whatever came before it on its connection.
- A denial is an answer with a reason; one request too many is a 429, a failure of log or vault a 503, and one that an
  overloaded worker does not take on a 503 with a time to wait. Any other exception here ends the flow.
- What a host can be sent of secrets is taken out of each of its answers, whichever request it is for: values, header
  names, body, trailers. What that is is decided when the answer begins. Encoded bodies are decoded up to a limit first;
  what cannot be searched (a part of a document, an unknown charset) is withheld. Requests to such hosts ask for
  `identity` and for the whole document (no `Range`).
- `Sentinel` runs last and ends every flow that `Gate` did not stamp.

It opens no connection and knows no address. (Over 400 lines: the order of one request, read from top to bottom.)
"""

import base64
import hashlib
import re
import time
from dataclasses import dataclass, field

from mitmproxy import http
from mitmproxy.connection import Server
from mitmproxy.http import HTTPFlow
from mitmproxy.websocket import WebSocketData

from gateway import pages
from gateway.admission import Admission
from gateway.budget import RULE, Over
from gateway.charsets import searchable
from gateway.decode import decode
from gateway.engine import Allowance, Decider, EngineLimits, InspectedFlow, Recorder, SecretRefused, Secrets
from gateway.forms import Patterns
from gateway.full.contexts import certified
from gateway.hello import Refused
from gateway.inject import InjectionError, inject
from gateway.ledger import Ledger
from gateway.messages import BrokenFraming, MessageScrubber
from gateway.scrub import Scrubber, scrub_header
from gateway.sought import KnownPatterns, Sought, Withheld, too_short
from gateway.translate import Headers, RequestParts, Translated, translate
from policy.decision import AllowRequest, Deny
from policy.facts import FlowFacts, RequestFacts
from policy.injection import render

STAMP = "sallyport"
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te"}
    | {b"trailer", b"upgrade", b"alt-svc", b"http2-settings"}
)
_NOT_WITH_SECRETS = frozenset({b"accept-encoding", b"grpc-accept-encoding", b"range", b"if-range"})
_VERSIONS = {"HTTP/1.0": 10, "HTTP/1.1": 11, "HTTP/2.0": 20}
_WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Unstamped(Exception):
    """A request reached the end of the chain without a decision."""


@dataclass(slots=True, eq=False)
class Stamp:
    """The verdict on one request, and what became of it.

    Attributes:
        facts: None where none could be made.
        route: what the log knows of the connection it goes on: address, and verified name.
        whole: its server was asked for a whole document as it is.
        begun: its answer goes on to the client.
        withheld: the page in the place of its answer, as far as it was not sent.
    """

    flow_id: str
    allowed: bool
    facts: RequestFacts | None = None
    websocket: bool = False
    whole: bool = False
    begun: bool = False
    withheld: bytes | None = None
    sent: bool = False
    answered: bool = False
    route: tuple[str, str | None] | None = None
    started: float = field(default_factory=time.monotonic)
    bytes_up: int = 0
    bytes_down: int = 0


class Gate:
    """Judges and changes the requests of one flow."""

    def __init__(
        self,
        flow: InspectedFlow,
        decider: Decider,
        allowance: Allowance,
        secrets: Secrets,
        recorder: Recorder,
        limits: EngineLimits,
        ledger: Ledger,
        known: KnownPatterns,
        admission: Admission,
    ) -> None:
        self._flow = flow
        self._admission = admission
        self._sought = Sought(flow.host, decider, secrets, ledger, recorder, known)
        self._facts = FlowFacts(flow.host, flow.port, flow.scheme)
        self._decider = decider
        self._allowance = allowance
        self._secrets = secrets
        self._recorder = recorder
        self._limits = limits
        self.used = self._sought.names
        """Names of the secrets that were sent on this flow, or may come back on it."""
        self.sensitive: set[bytes] = set()
        """Names, in lower case, of the headers they were sent in."""
        self.active: dict[str, Stamp] = {}
        """Allowed requests that are not both sent and answered whole."""
        self._server: Server | None = None
        self.over = False
        """Whether the flow was cut: mitmproxy lets what was under way go on."""

    # What the connection asks.

    def may_connect(self) -> bool:
        """Whether an upstream connection has a reason to exist now."""
        return any(stamp.allowed for stamp in self.active.values())

    def still_allowed(self) -> bool:
        """Whether policy, as it is now, allows every request in progress."""
        for stamp in self.active.values():
            if stamp.facts is None or isinstance(self._decider.decide_request(stamp.facts), Deny):
                return False
            if stamp.begun and not self._sought.complete():
                return False  # its server can be sent what is not looked for in the answer that is under way
        return True

    def finished(self, flow_id: str) -> None:
        """Nothing of this request goes on in either direction any more."""
        self.active.pop(flow_id, None)

    def refused(self, refused: Refused) -> None:
        """Record a request that never became one."""
        where = self._where() | ({} if refused.asked_host is None else {"asked_host": refused.asked_host})
        self._recorder.note("request", "deny", rule="protocol", reason=refused.reason, **where)

    # Hooks, in the order in which they happen.

    async def sallyport_refused(self, refused: Refused) -> None:
        self.refused(refused)

    async def sallyport_route(self, flow: HTTPFlow) -> None:
        """Have the log know the connection before the request goes on it."""
        stamp = flow.metadata.get(STAMP)
        if not isinstance(stamp, Stamp) or not stamp.allowed:
            raise Unstamped("a request without a decision is about to be sent")
        self._server = flow.server_conn
        route = self._route()
        if route is not None and route != stamp.route:
            await self._recorder.accept("connect", "info", **self._where(), **_routed(route), request_id=flow.id)
        stamp.route = route

    def _route(self) -> tuple[str, str | None] | None:
        """Address and verified name of the connection that is there for the next request."""
        server = self._server
        if server is None or not server.connected or server.peername is None:
            return None
        return server.peername[0], certified(server, self._flow.host) if server.tls else None

    async def requestheaders(self, flow: HTTPFlow) -> None:
        if flow.error is not None:  # refused by mitmproxy's own validation, which answers 400 after this
            flow.metadata[STAMP] = Stamp(flow.id, allowed=False)
            self.refused(Refused("malformed request"))
            return
        request = flow.request
        parts = RequestParts(
            version=_VERSIONS[request.http_version],
            method=request.data.method,
            target=request.data.path,
            scheme=self._h2_scheme(request),
            authority=request.data.authority,
            headers=tuple((bytes(name), bytes(value)) for name, value in request.headers.fields),
        )
        translated = translate(parts, self._facts)
        if isinstance(translated, Refused):
            self.refused(translated)
            self._answer(flow, None, translated.status, pages.refusal(translated.status, translated.reason))
            return
        decision = self._decide(translated)
        if isinstance(decision, Deny):
            await self._deny(flow, translated, decision)
            return
        wait = self._admission.retry_after()
        if wait is not None:
            self._turn_away(flow, translated.facts, wait)
            return
        over = self._allowance.request()
        if over is not None:
            await self._deny_over(flow, translated, over)
            return
        route = self._route()
        with self._admission.under_way():
            headers = await self._permit(flow, translated, decision, route)
        if headers is None:
            return
        if self._decide(translated) != decision:
            # Policy was replaced while log and vault were asked; what was decided under the old one is void.
            await self._deny(flow, translated, Deny(decision.rule, "the policy changed while this request was waiting"))
            return
        if not self._sought.covers(decision.injections):
            raise Unstamped("a secret that is not looked for is about to be sent")
        self._forward(flow, translated, headers, route)

    def _h2_scheme(self, request: http.Request) -> bytes:
        # mitmproxy has overwritten :scheme with the connection's own by now; StrictHttp2Server compared it before.
        return request.data.scheme if request.is_http2 else b""

    def _decide(self, translated: Translated) -> AllowRequest | Deny:
        decision = self._decider.decide_request(translated.facts)
        if isinstance(decision, AllowRequest) and translated.websocket and self._sought.bound():
            return Deny(decision.rule, "WebSocket is off for hosts that are sent secrets")
        if isinstance(decision, AllowRequest) and (reason := self._sought.refusal()) is not None:
            return Deny("reflection", reason)
        if not isinstance(decision, AllowRequest | Deny):
            raise TypeError("a decision is AllowRequest or Deny")
        return decision

    async def _deny(self, flow: HTTPFlow, translated: Translated, denied: Deny, *, secret: str | None = None) -> None:
        facts = translated.facts
        what = f"{facts.method} {facts.scheme.value}://{translated.host_header.decode('ascii')}{facts.path[:512]}"
        accepts = [value for name, value in translated.headers if name.lower() == b"accept"]
        self._answer(flow, facts, 403, pages.denial(denied.rule, denied.reason, what, accepts))
        await self._record_denial(facts, denied, secret)

    async def _deny_over(self, flow: HTTPFlow, translated: Translated, over: Over) -> None:
        denied = Deny(RULE, over.reason)
        if over.retry_after is None:
            await self._deny(flow, translated, denied)
            return
        self._answer(flow, translated.facts, 429, pages.over(over.reason, over.retry_after))
        await self._record_denial(translated.facts, denied, None)

    def _turn_away(self, flow: HTTPFlow, facts: RequestFacts, wait: int) -> None:
        reason = "the worker has too many requests under way"
        where = self._where() | {"method": facts.method, "path": facts.path}
        self._recorder.note("request", "deny", rule="overload", reason=reason, **where)
        self._answer(flow, facts, 503, pages.busy(wait))

    async def _record_denial(self, facts: RequestFacts, denied: Deny, secret: str | None) -> None:
        try:
            await self._record("request", "deny", facts, rule=denied.rule, reason=denied.reason, secret=secret)
        except Exception:  # noqa: BLE001 - the answer is a denial already; a log that does not answer changes nothing
            where = {**self._where(), "method": facts.method, "path": facts.path}
            self._recorder.note("request", "deny", rule=denied.rule, reason=denied.reason, **where)

    async def _permit(
        self, flow: HTTPFlow, translated: Translated, allowed: AllowRequest, route: tuple[str, str | None] | None
    ) -> Headers | None:
        """The headers to forward, or None once the request has been answered with a failure."""
        facts = translated.facts
        observed = allowed.observed
        asked: str | None = None
        try:
            await self._record(
                "request",
                "allow" if observed is None else "observe",
                facts,
                request_id=flow.id,
                rule=allowed.rule,
                observed=None if observed is None else observed.rule,
                reason=None if observed is None else observed.reason,
                websocket=translated.websocket or None,
                injections=[plan.binding for plan in allowed.injections] or None,
                **_routed(route),
            )
            rendered: list[tuple[str, str]] = []
            # Before the first wait, so that a revocation that happens meanwhile finds this flow.
            self.used |= {plan.secret for plan in allowed.injections}
            self.sensitive |= {plan.slot.encode("ascii") for plan in allowed.injections}
            for plan in allowed.injections:
                asked = plan.secret
                value = await self._secrets.lease(plan, facts)
                if self.over:  # the secret may have been called back meanwhile
                    raise ConnectionAbortedError
                if (short := too_short(plan, value)) is not None:
                    raise SecretRefused(short)
                rendered.append(render(plan, value.reveal()))
                await self._record(
                    "secret.use", "allow", facts, rule=allowed.rule, secret=plan.secret, binding=plan.binding
                )
            headers = inject(translated.headers, rendered)
            await self._sought.learn()
            if self.over:
                raise ConnectionAbortedError
        except SecretRefused as error:
            await self._deny(flow, translated, Deny(allowed.rule, error.reason), secret=asked)
            return None
        except Exception as error:  # noqa: BLE001 - denies: whichever port failed, the request goes no further
            reason = "a secret cannot be sent" if isinstance(error, InjectionError | ValueError) else "not available"
            self._recorder.note("request", "deny", rule=allowed.rule, reason=reason, **self._where())
            self._answer(flow, facts, 503, pages.failure(503))
            return None
        return headers

    def _forward(
        self, flow: HTTPFlow, translated: Translated, headers: Headers, route: tuple[str, str | None] | None
    ) -> None:
        request = flow.request
        if (request.data.host, request.data.port, request.data.scheme) != (
            self._flow.host,
            self._flow.port,
            self._flow.scheme.value.encode("ascii"),
        ):
            raise Unstamped("a request is about to leave for another destination")
        stamp = Stamp(flow.id, allowed=True, facts=translated.facts, websocket=translated.websocket, route=route)
        fields = list(headers)
        if self._sought.patterns is not None:
            stamp.whole = True
            fields = [one for one in fields if one[0].lower() not in _NOT_WITH_SECRETS]
            fields.append((b"accept-encoding", b"identity"))
        if request.is_http2:
            request.data.authority = translated.host_header
        else:
            request.data.authority = b""
            fields.insert(0, (b"Host", translated.host_header))
            if translated.websocket:
                fields += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
            elif translated.close:
                fields.append((b"Connection", b"close"))
        request.data.path = translated.target
        request.headers = http.Headers(fields)
        request.stream = self._counted_up(stamp)
        flow.metadata[STAMP] = stamp
        self.active[flow.id] = stamp

    def _counted_up(self, stamp: Stamp):  # type: ignore[no-untyped-def]  # mitmproxy's own loose signature
        def count(data: bytes) -> list[bytes]:
            stamp.bytes_up += len(data)
            return [data] if data else []

        return count

    async def request(self, flow: HTTPFlow) -> None:
        flow.request.trailers = None
        stamp = flow.metadata.get(STAMP)
        if isinstance(stamp, Stamp):
            stamp.sent = True
            self._settle(stamp)

    async def responseheaders(self, flow: HTTPFlow) -> None:
        stamp = flow.metadata.get(STAMP)
        response = flow.response
        if not isinstance(stamp, Stamp) or response is None:
            raise Unstamped("a response without a decided request")
        if not stamp.allowed:
            return
        if response.status_code == 101 and not _accepts(flow, stamp):
            raise Unstamped("101 without a valid WebSocket handshake")
        if [value.lower() for value in response.headers.get_all("transfer-encoding")] not in ([], ["chunked"]):
            raise Unstamped("a response in a transfer coding that is not chunked")
        reason = await self._unsearchable(flow, stamp, response)
        if reason is not None:
            self._withhold(flow, stamp, reason)
            return
        stamp.begun = True
        patterns = self._sought.patterns
        response.reason = pages.reason_phrase(response.status_code)
        response.headers = http.Headers(self._cleaned(response.headers, response.status_code))
        if patterns is not None and _encodings(response.headers) not in ([], ["identity"]):
            return  # not streamed: `response` gets the whole body, within the limit of the buffer
        scrubber = None if patterns is None else self._scrubber(flow, response, patterns)

        def stream(data: bytes) -> list[bytes]:
            stamp.bytes_down += len(data)
            if scrubber is not None:
                data = self._scrubbed(scrubber, data)
            # Never an empty chunk: in chunked coding it would end the body.
            return [data] if data else []

        response.stream = stream

    async def _unsearchable(self, flow: HTTPFlow, stamp: Stamp, response: http.Response) -> str | None:
        """Why the response must not go on, None if what must be kept out of it can be found in it."""
        try:
            await self._sought.learn()
        except Exception:  # noqa: BLE001 - withholds: what is not known cannot be kept out
            return "what must be kept out of the response is not known"
        if self.over:
            raise ConnectionAbortedError
        if self._sought.patterns is None:
            return None
        if response.status_code == 101:
            raise Unstamped("a tunnel to a host that is sent secrets")
        if not stamp.whole and response.status_code == 206:
            return "a part of a document cannot be searched for secrets"
        if not searchable(response.headers.get_all("content-type")):
            return "a response in this charset cannot be searched for secrets"
        if response.headers.get("grpc-encoding", "identity") != "identity":
            return "compressed messages cannot be searched for secrets"
        return self._sought.refusal()

    def _withhold(self, flow: HTTPFlow, stamp: Stamp, reason: str) -> None:
        """Answer 502 in the place of the server; what it still sends is thrown away."""
        self._recorder.note("request", "deny", rule="scrub", reason=reason, **self._where())
        fields, page = pages.refusal(502, f"The answer was withheld: {reason}.")
        body = b"" if flow.request.method == "HEAD" else page
        now = time.time()
        flow.response = http.Response(b"HTTP/1.1", 502, b"Bad Gateway", http.Headers(fields), b"", None, now, now)
        stamp.withheld = body

        def instead(_data: bytes) -> list[bytes]:
            left, stamp.withheld = stamp.withheld, b""
            return [left] if left else []

        flow.response.stream = instead

    def _scrubber(self, flow: HTTPFlow, response: http.Response, patterns: Patterns) -> Scrubber | MessageScrubber:
        grpc = re.match(r"application/grpc(?:[+; ]|\Z)", response.headers.get("content-type", "").lower())
        both = flow.request.is_http2 and response.is_http2
        return MessageScrubber(patterns) if grpc and both else Scrubber(patterns)

    def _scrubbed(self, scrubber: Scrubber | MessageScrubber, data: bytes) -> bytes:
        """What of the body goes on; no data is its end. What may not be shown ends the flow."""
        try:
            return self._sought.counted(
                scrubber, lambda: scrubber.feed(data) if data else scrubber.finish(), self._where()
            )
        except (Withheld, BrokenFraming) as error:
            self._recorder.note("request", "deny", rule="scrub", reason=str(error), **self._where())
            raise

    def _cleaned(self, headers: http.Headers, status: int) -> list[tuple[bytes, bytes]]:
        closes = b"close" in headers.get("connection", "").lower().encode("latin-1", "replace")
        out: list[tuple[bytes, bytes]] = []
        for name, raw in headers.fields:
            if name.lower() in _HOP_BY_HOP:
                continue
            value = b" ".join(raw.replace(b"\0", b" ").split(None) if b"\r" in raw or b"\n" in raw else [raw])
            value = value.replace(b"\0", b"")
            out.append((name, value))
        out = self._without_secrets(out)
        if status == 101:
            out += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
        elif closes:
            out.append((b"Connection", b"close"))
        return out

    def _without_secrets(self, fields: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Headers or trailers with values scrubbed; those with a secret in their name are left out."""
        patterns = self._sought.patterns
        if patterns is None:
            return fields
        kept = [(name, scrub_header(patterns, value)) for name, value in fields if not patterns.spans(name)]
        if kept != fields:
            self._sought.match(self._where())
        return kept

    async def response(self, flow: HTTPFlow) -> None:
        stamp = flow.metadata.get(STAMP)
        response = flow.response
        if not isinstance(stamp, Stamp) or response is None:
            raise Unstamped("a response without a decided request")
        if not stamp.allowed:
            return
        if stamp.withheld is not None:
            response.trailers = None
            if stamp.withheld:
                response.data.content = stamp.withheld
        elif self._sought.patterns is not None:
            self._scrub_rest(flow, response, self._sought.patterns)
        if stamp.websocket and response.status_code == 101:
            flow.websocket = flow.websocket or WebSocketData()
        else:
            stamp.answered = True
            self._settle(stamp)
        self._outcome(stamp, response.status_code)

    def _settle(self, stamp: Stamp) -> None:
        if stamp.sent and stamp.answered:
            self.finished(stamp.flow_id)

    def _scrub_rest(self, flow: HTTPFlow, response: http.Response, patterns: Patterns) -> None:
        if response.trailers is not None:
            response.trailers = http.Headers(self._without_secrets(list(response.trailers.fields)))
        body = response.data.content
        if response.stream or not body:
            return
        decoded = decode(_encodings(response.headers), body, self._limits.scrub_body_bytes)
        if decoded is None:
            fields, page = pages.failure(502)
            flow.response = http.Response(
                b"HTTP/1.1", 502, b"Bad Gateway", http.Headers(fields), page, None, time.time(), time.time()
            )
            return
        scrubber = Scrubber(patterns)
        response.data.content = self._scrubbed(scrubber, decoded) + self._scrubbed(scrubber, b"")
        for name in ("content-encoding", "transfer-encoding", "content-length"):
            response.headers.pop(name, None)
        response.headers["content-length"] = str(len(response.data.content))

    async def error(self, flow: HTTPFlow) -> None:
        self.finished(flow.id)
        stamp = flow.metadata.get(STAMP)
        if isinstance(stamp, Stamp) and stamp.allowed:
            self._outcome(stamp, None)

    # Answers and records.

    def _answer(
        self, flow: HTTPFlow, facts: RequestFacts | None, status: int, page: tuple[pages.Fields, bytes]
    ) -> None:
        fields, body = page
        # What is left frames the rest of the request and says whether the client wants its connection closed.
        flow.request.headers = http.Headers(
            [
                (name, value)
                for name, value in flow.request.headers.fields
                if name.lower() in (b"content-length", b"transfer-encoding")
                or (name.lower() == b"connection" and b"close" in value.lower())
            ]
        )
        if flow.request.method == "HEAD":
            body = b""
        flow.request.stream = True  # "do not wait for the body": see StrictStream.start_request_stream
        flow.response = http.Response(
            b"HTTP/1.1",
            status,
            pages.reason_phrase(status).encode("ascii"),
            http.Headers(fields),
            body,
            None,
            time.time(),
            time.time(),
        )
        flow.metadata[STAMP] = Stamp(flow.id, allowed=False, facts=facts)

    def _where(self) -> dict[str, object]:
        flow = self._flow
        return {
            "host": flow.host,
            "port": flow.port,
            "scheme": flow.scheme.value,
            "flow": flow.flow_id,
            "destination": flow.original_destination[0],
            "peer": f"{flow.peer[0]}:{flow.peer[1]}",
            "engine": "full",
        }

    async def _record(self, kind: str, decision: str, facts: RequestFacts, **more: object) -> None:
        # `path` may be cut by the log; `path_sha256` is of all of it.
        where: dict[str, object] = {"method": facts.method, "path": facts.path}
        if len(facts.path) > 2048:
            where["path_sha256"] = hashlib.sha256(facts.path.encode()).hexdigest()
            where["path"] = facts.path[:2048]
        fields = {**self._where(), **where, **more}
        await self._recorder.accept(
            kind, decision, **{name: value for name, value in fields.items() if value is not None}
        )

    def _outcome(self, stamp: Stamp, status: int | None) -> None:
        fields: dict[str, object] = {
            **self._where(),
            **{name: value for name, value in _routed(stamp.route).items() if value is not None},
            "request_id": stamp.flow_id,
            "bytes_up": stamp.bytes_up,
            "bytes_down": stamp.bytes_down,
            "duration_ms": int((time.monotonic() - stamp.started) * 1000),
        }
        if status is None:
            fields["error"] = "upstream or client failed"
        else:
            fields["status"] = status
        if stamp.facts is not None:
            fields["method"] = stamp.facts.method
            fields["path"] = stamp.facts.path[:2048]
        self._recorder.note("request", "info", **fields)


class Sentinel:
    """The last add-on: what `Gate` has not stamped goes no further."""

    async def requestheaders(self, flow: HTTPFlow) -> None:
        self._check(flow)

    async def request(self, flow: HTTPFlow) -> None:
        self._check(flow)

    async def responseheaders(self, flow: HTTPFlow) -> None:
        self._check(flow)

    def _check(self, flow: HTTPFlow) -> None:
        stamp = flow.metadata.get(STAMP)
        if not isinstance(stamp, Stamp) or stamp.flow_id != flow.id:
            raise Unstamped("no decision on this request")
        if not stamp.allowed and flow.response is None and flow.error is None:
            raise Unstamped("a refused request without an answer")


def _routed(route: tuple[str, str | None] | None) -> dict[str, str | None]:
    return {} if route is None else {"address": route[0], "peer_name": route[1]}


def _encodings(headers: http.Headers) -> list[str]:
    values = headers.get_all("content-encoding")
    return [part.strip().lower() for value in values for part in value.split(",") if part.strip()]


def _accepts(flow: HTTPFlow, stamp: Stamp) -> bool:
    """Whether a 101 completes the WebSocket handshake of an allowed request."""
    response = flow.response
    if not stamp.websocket or response is None:
        return False
    key = flow.request.headers.get("sec-websocket-key", "").encode("ascii", "replace")
    digest = hashlib.sha1(key + _WEBSOCKET_GUID, usedforsecurity=False).digest()
    return response.headers.get("upgrade", "").lower() == "websocket" and response.headers.get_all(
        "sec-websocket-accept"
    ) == [base64.b64encode(digest).decode("ascii")]
