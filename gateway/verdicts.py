"""Values that an engine and an exchange pass to each other, beside `gateway.translate.RequestParts`.

Pure values. Names and values of headers are bytes as on the wire, in order.
"""

from dataclasses import dataclass

from gateway.presented import Presented
from gateway.translate import Headers
from policy.facts import FlowFacts
from policy.injection import SecretPlan
from vault.secret import Secret

type Injected = tuple[tuple[SecretPlan, Secret], ...]
"""The secrets of one request, each with its place in the head."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The flow that exchanges belong to.

    Attributes:
        destination: the address that the sandbox dialled. For the record only.
        peer: the sandbox's address and port, for the record.
        engine: the engine's name in records.
    """

    facts: FlowFacts
    flow_id: str
    destination: str
    peer: tuple[str, int]
    engine: str


@dataclass(frozen=True, slots=True)
class Route:
    """A connection to the server: its address, and for TLS the verified name of the certificate."""

    address: str
    peer_name: str | None


@dataclass(frozen=True, slots=True)
class ForwardHead:
    """The request head to send, as it was judged.

    Attributes:
        authority: the `:authority` of HTTP/2; empty for HTTP/1, whose `Host` is the first header.
        headers: all headers, in order. Framing headers are those of the client.
    """

    target: bytes
    authority: bytes
    headers: Headers


@dataclass(frozen=True, slots=True)
class Forward:
    """The request may be sent, with this head. Its body goes through `Exchange.request_chunk`; trailers are dropped.

    Attributes:
        scrub: the response will be searched for secrets, so the request asks for the whole document without coding.
        injected: the secrets of the request. A connection that carried others must not carry this request.
        presented: the client certificate among them. The connection presents it in its handshake; None: none.
    """

    head: ForwardHead
    scrub: bool
    injected: Injected = ()
    presented: Presented | None = None


@dataclass(frozen=True, slots=True)
class Collect:
    """The verdict needs the whole body. The engine collects it, and gives it to `Exchange.request_whole`.

    If the body is larger than a limit, the engine calls `Exchange.refuse_body` instead.

    Attributes:
        expects: the client waits for `100 Continue`.
    """

    expects: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """A response that the gateway sends in place of the server's."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The final response head as received; header names and values without their line ends."""

    status: int
    http2: bool
    headers: Headers


@dataclass(frozen=True, slots=True)
class Relay:
    """The response head to send to the client.

    `buffered`: the engine collects the encoded body, up to the limit, and gives it to `Exchange.response_whole`.
    Otherwise each piece goes through `Exchange.response_chunk`.
    """

    status: int
    reason: str
    headers: Headers
    buffered: bool
