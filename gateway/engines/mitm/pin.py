"""Values that all layers of one inspected flow share, and the hooks of this package."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mitmproxy.connection import Connection
from mitmproxy.http import HTTPFlow
from mitmproxy.proxy import commands

from gateway.presented import Presented
from gateway.tls.hello import Refused
from policy.facts import FlowFacts, Scheme

if TYPE_CHECKING:
    from gateway.engines.mitm.http2 import StrictHttp2Client, StrictHttp2Server

PRESENTED = "sallyport_presented"
"""The key, in the metadata of a mitmproxy flow, of the client certificate that its connection must present."""

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


def presented_for(flow: HTTPFlow) -> Presented | None:
    """Return the client certificate that the connection of a request must present, None if it must present none.

    Raises:
        RuntimeError: the request has no verdict.
    """
    if PRESENTED not in flow.metadata:
        raise RuntimeError("a connection for a request without a verdict")
    presented: Presented | None = flow.metadata[PRESENTED]
    return presented


@dataclass(slots=True)
class Pin:
    """The flow's destination, its limits, its HTTP/2 buffers.

    Attributes:
        sensitive: names, in lower case, of the headers that ever carried a secret on this flow.
        held_back: bytes of request bodies that wait for a verdict or a connection.
        collects: called with a mitmproxy flow and the size of a part of its request body, which is collected. Returns
            False if that is too much; the flow then has an answer.
        finished: called with the id of a mitmproxy flow if the streams of its request end early.
        presented: the client certificate of each connection to the server that presents one.
        unfinished_head: the number, from 0, of the request head that is incomplete; None if there is none.
    """

    facts: FlowFacts
    response_buffer: int
    sensitive: set[bytes] = field(default_factory=set)
    downstream: "StrictHttp2Server | None" = None
    upstreams: "list[StrictHttp2Client]" = field(default_factory=list)
    presented: dict[Connection, Presented] = field(default_factory=dict)
    held_back: Callable[[], int] = lambda: 0
    collects: Callable[[HTTPFlow, int], bool] = lambda _flow, _size: True
    finished: Callable[[str], None] = lambda _flow: None
    unfinished_head: Callable[[], int | None] = lambda: None

    @property
    def address(self) -> tuple[str, int]:
        return self.facts.host, self.facts.port

    @property
    def tls(self) -> bool:
        return self.facts.scheme is Scheme.HTTPS
