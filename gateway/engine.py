"""The seam between a worker, which owns the flow, and an engine, which inspects the HTTP inside it.

A worker accepts, reads the first bytes, decides to inspect, and hands an `InspectedFlow` to an `Engine`. Everything
an engine needs from outside comes through the ports below; it opens no socket, reads no file, knows no other sandbox.

- Each port failure is a refusal: an exception from `Decider`, `Secrets`, `Recorder` or `Dialler` never lets a byte out.
- `Recorder.accept` returns before the first upstream byte of what it records.
- `Dialler.dial` is the only way an engine reaches a network; the address is the gateway's own choice.
- `handle` returns when the flow is over, with both of its ends closed. It does not raise, except to be cancelled.

It does not describe how flows are accepted, spliced or resolved.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gateway.budget import Over
from gateway.hello import Hello
from policy.compiled import SecretAt
from policy.decision import AllowRequest, Deny
from policy.facts import RequestFacts, Scheme
from policy.injection import InjectionPlan
from vault.secret import Secret


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


class Decider(Protocol):
    """The policy in force, as of the call."""

    def decide_request(self, facts: RequestFacts) -> AllowRequest | Deny:
        """Judge one request. Raising means deny."""
        ...

    def secrets_to(self, host: str) -> tuple[SecretAt, ...]:
        """Every use of a secret that requests to this host can make. Raising means deny."""
        ...


class SecretRefused(Exception):
    """A secret must not go into this request. `reason` is a sentence for whoever sent it, and holds no value."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Secrets(Protocol):
    """The secrets this sandbox's worker may have."""

    async def lease(self, plan: InjectionPlan, facts: RequestFacts) -> Secret:
        """Return the secret of `plan` for this one request: its destination, method and path.

        Asked before each use; an answer is for no other request. `SecretRefused` means that the request is denied
        (403), any other exception that it is refused (503).
        """
        ...

    async def sought(self, use: SecretAt) -> tuple[Secret, ...]:
        """Return what is looked for in responses of the host of `use`: its value, and former ones.

        `SecretRefused` means that the sandbox has no such secret there, any other exception that this is not known.
        """
        ...


class Allowance(Protocol):
    """What the sandbox may still use."""

    def request(self) -> Over | None:
        """Take one allowed request, or say why there is none: it is answered with 429, or 403 if waiting is no use."""
        ...


class Recorder(Protocol):
    """This sandbox's way into the audit log."""

    async def accept(self, kind: str, decision: str, **fields: object) -> None:
        """Return once the record is accepted. Raising means the request is refused (503)."""
        ...

    def note(self, kind: str, decision: str, **fields: object) -> None:
        """Record an outcome, best effort, without waiting."""
        ...


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


class Engine(Protocol):
    """Something that inspects flows."""

    async def handle(self, flow: InspectedFlow) -> None:
        """Serve `flow` to its end."""
        ...

    def revoke(self, secrets: frozenset[str] | None) -> int:
        """Cut every live flow that used one of `secrets` (None: any secret); return how many."""
        ...

    def recheck(self) -> int:
        """Cut every live flow with a request in progress that policy no longer allows; return how many."""
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
