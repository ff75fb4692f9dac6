"""What hostd asks a worker (`CONTROL`), and what a worker asks hostd (`ASKED`)."""

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
class Confirmed:
    """The digest of the policy that is in force now."""

    digest: str

    def __post_init__(self) -> None:
        check_digest(self.digest)


@dataclass(frozen=True, slots=True)
class Configure(Request[Confirmed]):
    """Put a compiled policy, a JSON text that only the worker reads, in force. A refused one leaves the former.

    `seed` is that of the sandbox's placeholders. A policy with placeholders is refused without it.
    """

    sandbox: str
    generation: int
    policy: str = field(repr=False)
    seed: str = field(default="", repr=False)

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
class Pause(Request[Done]):
    """Forward nothing more: every flow is cut before the answer, and new ones wait for `Resume`."""


@dataclass(frozen=True, slots=True)
class Resume(Request[Done]):
    """Forward again what policy allows."""


@dataclass(frozen=True, slots=True)
class RequestChannel(Request[Done]):
    """Ask for a new channel to a daemon: the former one has ended."""

    channel: ChannelName


CONTROL: Final = Operations(Beat, Configure, Rebind, Guarded, Pause, Resume)
ASKED: Final = Operations(RequestChannel)
