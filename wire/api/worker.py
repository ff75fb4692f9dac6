"""What hostd asks a worker (`CONTROL`), and what a worker asks hostd (`ASKED`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from wire.ids import check_digest, check_generation, check_sandbox
from wire.operations import Done, Notification, Operations, Request


class ChannelName(StrEnum):
    """A worker's channel to a daemon."""

    AUDIT = "audit"
    VAULT = "vault"


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a worker enforces. `gateway.config` says what the texts mean, and checks them.

    Attributes:
        policy: a compiled policy, as a JSON text. Only the worker reads it.
        upstream_roots: PEM of the authorities that may vouch for upstream servers.
        dns_upstreams: resolvers, as `ip:port`.
        inside: the sandbox's address on its link.
        allowed_addresses: networks that may be dialled although they are not public.
        host_addresses: addresses by name; they are used instead of DNS.
        limits: fields of `gateway.config.GatewayLimits` that differ from its defaults.
    """

    policy: str = field(repr=False)
    upstream_roots: str = field(repr=False)
    dns_upstreams: tuple[str, ...]
    inside: str
    allowed_addresses: tuple[str, ...] = ()
    host_addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The digest of the policy that is in force now."""

    digest: str

    def __post_init__(self) -> None:
        check_digest(self.digest)


@dataclass(frozen=True, slots=True)
class Configure(Request[Confirmed]):
    """Put a configuration in force. A refused one leaves the former in force."""

    sandbox: str
    generation: int
    configuration: Configuration

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)
        check_generation(self.generation)


@dataclass(frozen=True, slots=True)
class Pulse:
    """The digest of the policy that is in force, and the number of flows."""

    digest: str | None
    flows: int


@dataclass(frozen=True, slots=True)
class Beat(Request[Pulse]):
    """Ask for a sign of life. The worker also writes its ledger page: hostd sees that before it reads the answer."""


@dataclass(frozen=True, slots=True)
class Rebind(Request[Done]):
    """Use the one descriptor that comes with it as the channel to a daemon."""

    channel: ChannelName


@dataclass(frozen=True, slots=True)
class Guarded(Notification):
    """The one descriptor that comes with it is the pidfd of the guard."""


@dataclass(frozen=True, slots=True)
class RequestChannel(Request[Done]):
    """Ask for a new channel to a daemon: the former one has ended."""

    channel: ChannelName


CONTROL: Final = Operations(Beat, Configure, Rebind, Guarded)
ASKED: Final = Operations(RequestChannel)
