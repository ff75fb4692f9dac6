"""What a decision is about: one flow, one request on a flow, or one address that a flow would be opened to.

- `host` is in wire form (see `names.wire_host`); `port` is the one the packet was addressed to, never one a client
  wrote into a header; `scheme` is what is really spoken, never what the port suggests.
- `path` is the raw request path: it begins with `/` and has no `?`. `query` is what followed the `?`, without it.

These are plain values. Whether they make sense is judged by `decision`, which denies what it cannot understand.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from policy.addresses import IPAddress


class Scheme(StrEnum):
    """The protocol family seen on a flow."""

    HTTP = "http"
    HTTPS = "https"


@dataclass(frozen=True, slots=True)
class FlowFacts:
    """A TCP flow whose server name is known, before any request on it."""

    host: str
    port: int
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """One HTTP request. The query is never shown by `repr`: it may carry somebody's secret."""

    host: str
    port: int
    scheme: Scheme
    method: str
    path: str
    query: str = field(default="", repr=False)

    @property
    def flow(self) -> FlowFacts:
        """The flow this request is on."""
        return FlowFacts(self.host, self.port, self.scheme)


class AddressSource(StrEnum):
    """Where the address of a destination comes from."""

    LITERAL = "literal"
    """The packet: a TLS flow without a server name is opened to the address that the client dialled."""
    RESOLVED = "resolved"
    """A DNS answer for the host."""
    MAPPED = "mapped"
    """The operator's own name to address map."""


@dataclass(frozen=True, slots=True)
class Destination:
    """One address and port that a flow would be opened to.

    Attributes:
        host: the name that was allowed; None exactly for a literal address.
        own: the address is one of the gateway's own machine, which only its kernel knows.
    """

    host: str | None
    address: IPAddress
    port: int
    scheme: Scheme
    source: AddressSource
    own: bool = False
