"""What all layers of one inspected flow know, and the words they are written in."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mitmproxy.http import HTTPFlow
from mitmproxy.proxy import commands

from gateway.hello import Refused
from policy.facts import FlowFacts, Scheme

if TYPE_CHECKING:
    from gateway.full.http2 import StrictHttp2Client, StrictHttp2Server

type Commands[T] = Generator[commands.Command, Any, T]


@dataclass
class RefusedRequestHook(commands.StartHook):  # type: ignore[no-untyped-call]
    """A request head was refused before it became a flow."""

    name = "sallyport_refused"
    blocking = False
    refused: Refused


@dataclass
class RouteHook(commands.StartHook):  # type: ignore[no-untyped-call]
    """A request is about to be sent on `flow.server_conn`."""

    name = "sallyport_route"
    blocking = True
    flow: HTTPFlow


@dataclass(slots=True)
class Pin:
    """The flow's destination, its limits, its HTTP/2 buffers.

    Attributes:
        sensitive: names, in lower case, of the headers that ever carried a secret on this flow.
        held_back: bytes of request bodies that wait for their requests to be decided, or for a connection.
        finished: told of a request, by the id of its mitmproxy flow, when its streams have ended early.
        reset_client: ends the client's connection so that it cannot take what it has for the whole.
        unfinished_head: which request head, counted from 0, has begun and is not complete; None while none is.
    """

    facts: FlowFacts
    response_buffer: int
    sensitive: set[bytes] = field(default_factory=set)
    downstream: "StrictHttp2Server | None" = None
    upstreams: "list[StrictHttp2Client]" = field(default_factory=list)
    held_back: Callable[[], int] = lambda: 0
    finished: Callable[[str], None] = lambda _flow: None
    reset_client: Callable[[], None] = lambda: None
    unfinished_head: Callable[[], int | None] = lambda: None

    @property
    def address(self) -> tuple[str, int]:
        return self.facts.host, self.facts.port

    @property
    def tls(self) -> bool:
        return self.facts.scheme is Scheme.HTTPS
