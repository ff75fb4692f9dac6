"""The engine port: between a worker, which owns the flow, and an engine, which frames the HTTP inside it.

A worker accepts a connection, reads its first bytes, decides to inspect it, and passes an `InspectedFlow` to an
`Engine`. An engine uses only the ports below: it opens no socket, reads no file, and has no access to other sandboxes.
An engine frames messages and moves bytes. `gateway.exchange` judges each request, and calls the ports of
`gateway.effects` itself.

- After an exception from a port no byte is sent.
- An engine reaches a network only through `Dialler.dial`. The gateway chooses the address.
- `handle` returns when the flow has ended and its connections are closed, or idle for later flows of the sandbox. It
  raises only if it is cancelled.

The port does not cover how flows are accepted, spliced or resolved.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gateway.effects import Allowance, Decider, Recorder, Secrets, Sessions
from gateway.ledger import Ledger
from gateway.tls.hello import Hello
from policy.facts import Scheme


@dataclass(frozen=True, slots=True)
class InspectedFlow:
    """One accepted TCP connection that policy wants inspected.

    Attributes:
        reader, writer: the client's connection.
        first_bytes: bytes already read from the connection; the engine reads them first.
        host: canonical name from SNI or Host, for which the flow was allowed. The flow serves no other host.
        port, scheme: the real destination port and the protocol seen.
        original_destination: the address that the sandbox dialled. For the record only, never dialled.
        hello: the ClientHello that `first_bytes` begin with; None when `scheme` is HTTP, and for a cancel request of a
            PostgreSQL client, which `first_bytes` then are.
        peer: the sandbox's address and port, for the record.
        flow_id: identifies this flow in the records of the worker and the engine.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    first_bytes: bytes
    host: str
    port: int
    scheme: Scheme
    original_destination: tuple[str, int]
    hello: Hello | None
    peer: tuple[str, int]
    flow_id: str


def describe(flow: InspectedFlow, engine: str) -> Mapping[str, object]:
    """Return the fields of a record about the flow as a whole."""
    return {
        "host": flow.host,
        "port": flow.port,
        "scheme": flow.scheme.value,
        "flow": flow.flow_id,
        "destination": flow.original_destination[0],
        "engine": engine,
    }


class Dialler(Protocol):
    """Opens upstream connections."""

    async def dial(
        self, host: str, port: int, scheme: Scheme, flow: Mapping[str, object]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        """Resolve, judge and connect to `host` over TCP; return the streams and their IP address.

        The log accepts a record of each address, with the fields of `flow`, before the address is dialled.

        Raises:
            OSError: the host has no address, none is allowed, or none could be connected (also TimeoutError).
        """
        ...


@dataclass(frozen=True, slots=True)
class Leaf:
    """A certificate for one host. The chain has the leaf first and no root. Chain and key are PEM."""

    chain_pem: bytes
    key_pem: bytes


class LeafIssuer(Protocol):
    """Issues certificates for the hosts of inspected flows."""

    def leaf(self, host: str) -> Leaf:
        """Return a currently valid leaf with exactly one name, `host`. Equal calls may return the same object."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of one sandbox in an engine.

    Attributes:
        flows: concurrent flows. A further flow is closed at once.
        upstream_connections: connections per flow. A flow in HTTP/1.1 uses one at a time.
        idle_connections: upstream connections that are kept for later requests, together. Each live flow may have one
            in addition to this limit and the next one.
        idle_per_destination: those among them to one host, port and scheme.
        connection_idle_seconds: the time for which a connection without a request is kept. Common servers end one after
            60 seconds or later.
        connection_age_seconds: the time from its handshake after which a connection carries no further request.
        idle_seconds: the longest time without a byte in either direction. At the end of a flow, also the longest time
            in which a side takes none of the bytes that are left for it.
        handshake_seconds: the time for the client's TLS handshake (from the start of the flow), for each request head
            (from its first byte), and for the server's handshake. A dial has three times as long.
        scrub_body_bytes: the largest encoded response body, and the largest decoded one, that is scrubbed.
        request_body_bytes: the largest request body that is collected because policy puts a secret into it. Four of
            this size can be collected at once.
        backlog_bytes: the data of one flow, per direction, that may wait before the engine stops reading from its
            sender. An HTTP/2 stream has its own, much smaller window.
    """

    flows: int = 512
    upstream_connections: int = 32
    idle_connections: int = 32
    idle_per_destination: int = 8
    connection_idle_seconds: float = 30.0
    connection_age_seconds: float = 300.0
    idle_seconds: int = 900
    handshake_seconds: float = 10.0
    scrub_body_bytes: int = 8 * 1024 * 1024
    request_body_bytes: int = 8 * 1024 * 1024
    backlog_bytes: int = 8 * 1024 * 1024


class Engine(Protocol):
    """Inspects the flows of one sandbox."""

    @property
    def flows(self) -> int:
        """The number of live flows."""
        ...

    async def handle(self, flow: InspectedFlow) -> None:
        """Serve `flow` to its end."""
        ...

    def reconfigure(self, *, upstream_roots: str, limits: EngineLimits) -> None:
        """Use other roots and limits for flows that begin from now on, and end idle upstream connections.

        Raises:
            ValueError: see `MakeEngine`; the old values stay in force.
        """
        ...

    def revoke(self, secrets: frozenset[str] | None) -> int:
        """Abort every live flow that used one of `secrets` (None: any secret); return their number.

        Idle upstream connections that carried one of them end.
        """
        ...

    def recheck(self) -> int:
        """Abort every live flow with a request in progress that policy no longer allows; return their number.

        Idle upstream connections end, and those in use carry no further request.
        """
        ...

    def drop_idle(self) -> None:
        """End all idle upstream connections. Those in use carry no further request."""
        ...

    def cancellable(self, key: bytes, port: int) -> str | None:
        """Return the host of the live database session on `port` with this cancel key; None if there is none."""
        ...


class MakeEngine(Protocol):
    """Makes an engine, inside a running event loop."""

    def __call__(
        self,
        *,
        decider: Decider,
        allowance: Allowance,
        secrets: Secrets,
        sessions: Sessions,
        recorder: Recorder,
        dialler: Dialler,
        identity: LeafIssuer,
        ledger: Ledger,
        upstream_roots: str,
        limits: EngineLimits,
    ) -> Engine:
        """Make an engine.

        Args:
            ledger: the counts of the sandbox.
            upstream_roots: PEM text of all certificates that servers are verified against.

        Raises:
            ValueError: `upstream_roots` has no certificate, or other content.
        """
        ...
