"""The seam between a worker, which owns the flow, and an engine, which inspects the HTTP inside it.

A worker accepts, reads the first bytes, decides to inspect, and hands an `InspectedFlow` to an `Engine`. Everything
an engine needs from outside comes through the ports below; it opens no socket, reads no file, knows no other sandbox.
An engine frames messages and moves bytes. What becomes of each request is the work of `gateway.exchange`, which calls
the ports of `gateway.effects` itself.

- An exception from a port never lets a byte out.
- `Dialler.dial` is the only way an engine reaches a network; the address is the gateway's own choice.
- `handle` returns when the flow is over, with both of its ends closed. It does not raise, except to be cancelled.

It does not describe how flows are accepted, spliced or resolved.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gateway.effects import Allowance, Decider, Recorder, Secrets
from gateway.hello import Hello
from gateway.ledger import Ledger
from policy.facts import Scheme


@dataclass(frozen=True, slots=True)
class InspectedFlow:
    """One accepted TCP connection that policy wants inspected.

    Attributes:
        reader, writer: the client's connection. `first_bytes` were already read from it; the engine replays them.
        host: canonical name from SNI or Host, for which the flow was allowed; nothing else is served on this flow.
        port, scheme: the real destination port and the protocol seen.
        original_destination: where the sandbox's packet was addressed. For the record only, never dialled.
        hello: the ClientHello that `first_bytes` begin with; None exactly when `scheme` is HTTP.
        peer: the sandbox's address and port, for the record.
        flow_id: names this flow in the records of both sides.
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


class Dialler(Protocol):
    """The way out."""

    async def dial(
        self, host: str, port: int, scheme: Scheme, flow: Mapping[str, object]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        """Resolve, judge and connect to `host`; return the streams and the IP address they reach. TCP only.

        Each address is in the log before it is dialled, together with the fields of `flow`.

        Raises:
            OSError: no address, none that may be dialled, or no connection (also TimeoutError).
        """
        ...


@dataclass(frozen=True, slots=True)
class Leaf:
    """A certificate for one host with the chain to serve (leaf first, root not included), PEM, and its PEM key."""

    chain_pem: bytes
    key_pem: bytes


class Identity(Protocol):
    """The sandbox's certificate authority, as far as the worker has it."""

    def leaf(self, host: str) -> Leaf:
        """A currently valid leaf with exactly one name, `host`. Equal calls may return the same object."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one sandbox may use of an engine.

    Attributes:
        flows: concurrent flows; one more is closed at once.
        upstream_connections: per flow.
        idle_seconds: without a byte in either direction; also how long a side may take nothing of what is left for it
            when the flow is over.
        handshake_seconds: for the client's TLS handshake, from the start of the flow, for each request head, from its
            first byte, and for the server's handshake; three times as long for a dial.
        scrub_body_bytes: largest encoded response body (and decoded result) that is decoded to be scrubbed.
        backlog_bytes: data of one flow waiting to go on, in each direction, before its sender is no longer read. An
            HTTP/2 stream has its own, much smaller window.
    """

    flows: int = 512
    upstream_connections: int = 32
    idle_seconds: int = 900
    handshake_seconds: float = 10.0
    scrub_body_bytes: int = 8 * 1024 * 1024
    backlog_bytes: int = 8 * 1024 * 1024


class Engine(Protocol):
    """Something that inspects flows."""

    @property
    def flows(self) -> int:
        """How many flows are being served."""
        ...

    async def handle(self, flow: InspectedFlow) -> None:
        """Serve `flow` to its end."""
        ...

    def reconfigure(self, *, upstream_roots: str, limits: EngineLimits) -> None:
        """Use other roots and limits for flows that begin from now on.

        Raises:
            ValueError: see `MakeEngine`; nothing has changed then.
        """
        ...

    def revoke(self, secrets: frozenset[str] | None) -> int:
        """Cut every live flow that used one of `secrets` (None: any secret); return how many."""
        ...

    def recheck(self) -> int:
        """Cut every live flow with a request in progress that policy no longer allows; return how many."""
        ...


class MakeEngine(Protocol):
    """How an engine is made, inside a running loop."""

    def __call__(
        self,
        *,
        decider: Decider,
        allowance: Allowance,
        secrets: Secrets,
        recorder: Recorder,
        dialler: Dialler,
        identity: Identity,
        ledger: Ledger,
        upstream_roots: str,
        limits: EngineLimits,
    ) -> Engine:
        """Make an engine.

        Args:
            ledger: what the sandbox has used up.
            upstream_roots: PEM text of all certificates that servers are verified against.

        Raises:
            ValueError: `upstream_roots` holds no certificate, or something else.
        """
        ...
