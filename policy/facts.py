"""The subjects of decisions: one flow, one request or database session on a flow, or one address of a flow.

- `host` is in wire form (see `names.wire_host`). `port` is the destination port of the packet, never that of a header.
  `scheme` is the protocol of the bytes, never a guess from the port.
- `path` is the raw request path: it begins with `/` and has no `?`. `query` is the text after the `?`, without it.

These are plain values. `decision` checks them, and denies invalid ones.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from policy.addresses import IPAddress


class Scheme(StrEnum):
    """The protocol family seen on a flow."""

    HTTP = "http"
    HTTPS = "https"
    POSTGRES = "postgres"
    """The protocol of PostgreSQL, over TLS."""


@dataclass(frozen=True, slots=True)
class FlowFacts:
    """A TCP flow whose server name is known, before any request on it."""

    host: str
    port: int
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """One HTTP request. Its `repr` does not show the query, which may contain a secret."""

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


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """One database session on a flow of PostgreSQL: the name of the database that the client asks for."""

    host: str
    port: int
    database: str

    @property
    def flow(self) -> FlowFacts:
        """The flow this session is on."""
        return FlowFacts(self.host, self.port, Scheme.POSTGRES)


class AddressSource(StrEnum):
    """Where the address of a destination comes from."""

    LITERAL = "literal"
    """The packet: a TLS flow without a server name goes to the address that the client dialled."""
    RESOLVED = "resolved"
    """A DNS answer for the host."""
    MAPPED = "mapped"
    """The operator's map from names to fixed addresses."""


@dataclass(frozen=True, slots=True)
class Destination:
    """One address and port to which a flow would be opened.

    Attributes:
        host: the allowed name; None exactly for a literal address.
        own: whether the address belongs to the gateway's own host, according to its kernel.
    """

    host: str | None
    address: IPAddress
    port: int
    scheme: Scheme
    source: AddressSource
    own: bool = False
