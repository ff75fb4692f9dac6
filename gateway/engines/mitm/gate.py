"""The add-ons of an inspected flow: they translate mitmproxy's hooks into the steps of `gateway.exchange`.

`Gate` makes no decision. It carries out the verdict that an exchange returns for a request or a response.

- An exception of an exchange propagates to the caller of the hook, which aborts the flow (`connection`).
- A body that the exchange needs as a whole stays in mitmproxy's stream until it is complete, up to the limits.
- A request is stamped with its exchange after the verdict was carried out.
- `Sentinel` runs last and aborts every flow without a stamp.

The add-ons open no connection.
"""

import time

from mitmproxy import http
from mitmproxy.connection import Server
from mitmproxy.http import HTTPFlow

from gateway import pages
from gateway.engines.bodies import BodyRefused, Collected
from gateway.engines.engine import Shared
from gateway.engines.mitm.pin import PRESENTED, presented_for
from gateway.engines.port import InspectedFlow
from gateway.exchange import HTTP2, Exchange, Session
from gateway.presented import presented_plans
from gateway.tls.contexts import certified
from gateway.tls.hello import Refused
from gateway.translate import Headers, RequestParts
from gateway.verdicts import Answer, Collect, Forward, Origin, ResponseHead, Route
from policy.facts import FlowFacts
from policy.injection import SecretPlan

STAMP = "sallyport"
ENGINE = "mitm"


class Gate:
    """The exchanges of one flow, for mitmproxy."""

    def __init__(self, flow: InspectedFlow, shared: Shared) -> None:
        facts = FlowFacts(flow.host, flow.port, flow.scheme)
        origin = Origin(facts, flow.flow_id, flow.original_destination[0], flow.peer, ENGINE)
        self.session = Session(
            origin, shared.effects, shared.known, shared.limits.scrub_body_bytes, shared.limits.request_body_bytes
        )
        self._bodies = shared.bodies
        self._collected: dict[str, Collected] = {}
        self._host = flow.host
        self._server: tuple[Server, frozenset[SecretPlan]] | None = None
        """The connection of the last request, and the plan of the client certificate that it presents."""

    # Properties and methods for the connection.

    @property
    def used(self) -> set[str]:
        """See `Session.used`."""
        return self.session.used

    @property
    def sensitive(self) -> set[bytes]:
        """See `Session.sensitive`."""
        return self.session.sensitive

    @property
    def active(self) -> dict[str, Exchange]:
        """See `Session.active`."""
        return self.session.active

    @property
    def over(self) -> bool:
        """Whether the flow was aborted. mitmproxy may still finish hooks that were under way."""
        return self.session.over

    @over.setter
    def over(self, value: bool) -> None:
        self.session.over = value

    def may_connect(self) -> bool:
        """See `Session.may_connect`."""
        return self.session.may_connect()

    def still_allowed(self) -> bool:
        """See `Session.still_allowed`."""
        return self.session.still_allowed()

    def finished(self, flow_id: str) -> None:
        """See `Session.finished`."""
        self._release(flow_id)
        self.session.finished(flow_id)

    def collects(self, flow: HTTPFlow, size: int) -> bool:
        """Count bytes of a body that mitmproxy collects. False: they are too many, and the flow has an answer."""
        collected = self._collected.get(flow.id)
        if collected is None:
            return True
        try:
            collected.count(size)
        except BodyRefused as refused:
            self._release(flow.id)
            _answer(flow, _exchange(flow).refuse_body(refused.status))
            return False
        return True

    def close(self) -> None:
        """Forget the bodies: the flow has ended."""
        for flow_id in list(self._collected):
            self._release(flow_id)

    def _release(self, flow_id: str) -> None:
        collected = self._collected.pop(flow_id, None)
        if collected is not None:
            collected.release()

    # Hooks, in the order in which they happen.

    async def sallyport_refused(self, refused: Refused) -> None:
        self.session.refused(refused)

    async def requestheaders(self, flow: HTTPFlow) -> None:
        exchange = Exchange(self.session, flow.id)
        if flow.error is not None:  # mitmproxy's own validation refused the request and answers 400
            exchange.malformed("malformed request")
            flow.metadata[STAMP] = exchange
            return
        request = flow.request
        parts = RequestParts(
            version=HTTP2,
            method=request.data.method,
            target=request.data.path,
            # mitmproxy has overwritten :scheme with the connection's. StrictHttp2Server compared it before.
            scheme=request.data.scheme,
            authority=request.data.authority,
            headers=_fields(request.headers),
            ended=request.data.timestamp_end is not None,  # see `StrictStream`
        )
        destination = (request.data.host, request.data.port, request.data.scheme)
        verdict = await exchange.request(parts, destination, self._open_route)
        if isinstance(verdict, Forward):
            self._forward(flow, exchange, verdict)
        elif isinstance(verdict, Collect):  # not streamed: `request` gets the whole body
            self._collected[flow.id] = self._bodies.collect()
        else:
            _answer(flow, verdict)
        flow.metadata[STAMP] = exchange

    def _open_route(self, plans: frozenset[SecretPlan]) -> Route | None:
        """Return the open connection for the next request, None if there is none."""
        if self._server is None:
            return None
        server, presented = self._server
        return self._route(server) if server.connected and presented == presented_plans(plans) else None

    def _route(self, server: Server) -> Route:
        if server.peername is None:
            raise RuntimeError("an upstream connection without an address")
        return Route(
            server.peername[0], certified(server.certificate_list[0].altnames, self._host) if server.tls else None
        )

    def _forward(self, flow: HTTPFlow, exchange: Exchange, forward: Forward) -> None:
        def stream(data: bytes) -> list[bytes]:
            sent = exchange.request_chunk(data)
            return [sent] if sent else []

        _set_head(flow, forward)
        flow.request.stream = stream

    async def sallyport_route(self, flow: HTTPFlow) -> None:
        """Record the connection before the request is sent on it."""
        exchange = _exchange(flow)
        await exchange.connection(self._route(flow.server_conn))
        presented = presented_for(flow)
        self._server = flow.server_conn, frozenset() if presented is None else frozenset({presented.plan})
        if flow.id in self._collected:
            exchange.request_chunk(flow.request.data.content or b"")

    async def request(self, flow: HTTPFlow) -> None:
        flow.request.trailers = None
        exchange = flow.metadata.get(STAMP)
        if flow.id in self._collected:
            await self._whole(flow, _exchange(flow))
        if isinstance(exchange, Exchange):
            exchange.request_sent()

    async def _whole(self, flow: HTTPFlow, exchange: Exchange) -> None:
        verdict = await exchange.request_whole(flow.request.data.content or b"")
        if isinstance(verdict, Answer):
            self._release(flow.id)
            _answer(flow, verdict)
        else:
            _set_head(flow, verdict[0])
            flow.request.data.content = verdict[1]

    async def responseheaders(self, flow: HTTPFlow) -> None:
        exchange, response = _exchange(flow), _response(flow)
        if flow.id in self._collected:  # mitmproxy has handed it on, and would keep it until the stream ends
            flow.request.data.content = None
            self._release(flow.id)
        if not exchange.allowed:
            return
        head = ResponseHead(response.status_code, response.is_http2, _fields(response.headers))
        verdict = await exchange.response(head)
        if isinstance(verdict, Answer):
            response = flow.response = _made(verdict)
        else:
            response.reason = verdict.reason
            response.headers = http.Headers(verdict.headers)
            if verdict.buffered:
                return  # not streamed: `response` gets the whole body, up to the buffer's limit

        def stream(data: bytes) -> list[bytes]:
            shown = exchange.response_chunk(data) if data else exchange.response_end()
            # Never an empty chunk: in chunked coding it would end the body.
            return [shown] if shown else []

        response.stream = stream

    async def response(self, flow: HTTPFlow) -> None:
        exchange, response = _exchange(flow), _response(flow)
        if not exchange.allowed:
            return
        if response.trailers is not None:
            trailers = exchange.response_trailers(_fields(response.trailers))
            response.trailers = http.Headers(trailers) if trailers else None
        if not response.stream:
            whole = exchange.response_whole(response.data.content or b"")
            if isinstance(whole, Answer):
                flow.response = _made(whole)
            else:
                response.headers, response.data.content = http.Headers(whole[0]), whole[1]
        elif exchange.withheld and (page := exchange.response_end()):
            response.data.content = page  # the body had no chunk
        exchange.finish()

    async def error(self, flow: HTTPFlow) -> None:
        self.session.finished(flow.id)
        exchange = flow.metadata.get(STAMP)
        if isinstance(exchange, Exchange):
            exchange.failed()


class Sentinel:
    """The last add-on: refuses requests and responses without a verdict."""

    async def requestheaders(self, flow: HTTPFlow) -> None:
        self._check(flow, collecting=_exchange(flow).collecting)

    async def request(self, flow: HTTPFlow) -> None:
        self._check(flow)

    async def responseheaders(self, flow: HTTPFlow) -> None:
        self._check(flow)

    def _check(self, flow: HTTPFlow, *, collecting: bool = False) -> None:
        exchange = _exchange(flow)
        if exchange.request_id != flow.id:
            raise RuntimeError("no decision on this request")
        if not exchange.allowed and not collecting and flow.response is None and flow.error is None:
            raise RuntimeError("a refused request without an answer")


def _exchange(flow: HTTPFlow) -> Exchange:
    exchange = flow.metadata.get(STAMP)
    if not isinstance(exchange, Exchange):
        raise RuntimeError("no decision on this request")
    return exchange


def _response(flow: HTTPFlow) -> http.Response:
    if flow.response is None:
        raise RuntimeError("no response")
    return flow.response


def _fields(headers: http.Headers) -> Headers:
    return tuple((bytes(name), bytes(value)) for name, value in headers.fields)


def _set_head(flow: HTTPFlow, forward: Forward) -> None:
    head = forward.head
    flow.metadata[PRESENTED] = forward.presented
    flow.request.data.path = head.target
    flow.request.data.authority = head.authority
    flow.request.headers = http.Headers(head.headers)


def _answer(flow: HTTPFlow, answer: Answer) -> None:
    flow.request.headers = http.Headers()
    flow.request.stream = True  # "do not wait for the body": see StrictStream.start_request_stream
    flow.response = _made(answer)


def _made(answer: Answer) -> http.Response:
    now = time.time()
    reason = pages.reason_phrase(answer.status).encode("ascii")
    headers = http.Headers(answer.headers)
    return http.Response(b"HTTP/1.1", answer.status, reason, headers, answer.body, None, now, now)
