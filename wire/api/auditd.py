"""What auditd is asked, on its socket (`CONTROL`) and on the channel of a producer (`CHANNEL`).

A gateway also has a ring (`AttachRing`), two files that hostd makes: `audit.shared_ring` says what they hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from wire.ids import check_digest, check_generation, check_sandbox
from wire.operations import Done, Operations, Request

type Value = str | int | bool | tuple[str, ...]
"""What a field of a record holds; `audit.records` says which field holds what."""

MOST_RECORDS: Final = 128
"""In one request."""
CONTROL_CHAIN: Final = "control"
"""The chain of the records that belong to no sandbox; no sandbox has this id."""
ANCHOR_VERSION: Final = 1
RING_BYTES: Final = 4096 + 256 * 1024
"""The size of a ring's file."""
CURSOR_BYTES: Final = 4096
"""The size of the file that holds a ring's cursor."""
RING_DESCRIPTORS: Final = 3
"""That come with an `AttachRing`: ring and cursor, both for reading and writing, and the eventfd of its wake-ups."""
_MOST_TIME = 64


class Producer(StrEnum):
    """A component that has a channel."""

    GATEWAY = "gateway"
    VAULT = "vault"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a producer wants recorded; auditd adds time, chain, sequence number and hash."""

    kind: str
    decision: str
    fields: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The sequence number of the last record that was written."""

    seq: int


@dataclass(frozen=True, slots=True)
class Record(Request[Accepted]):
    """Accept one record; `durable`: answer once it is on disk."""

    entry: Entry
    durable: bool = False


@dataclass(frozen=True, slots=True)
class Records(Request[Accepted]):
    """Accept all of these records, or none."""

    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.entries) <= MOST_RECORDS:
            raise ValueError(f"1 to {MOST_RECORDS} entries")


@dataclass(frozen=True, slots=True)
class Attach(Request[Done]):
    """Make the one descriptor that comes with it the channel of a producer: of a sandbox's gateway, or of vaultd."""

    producer: Producer
    sandbox: str | None
    generation: int

    def __post_init__(self) -> None:
        if (self.producer is Producer.GATEWAY) is (self.sandbox is None):
            raise ValueError("a channel is vaultd's, or that of a sandbox's gateway")
        if self.sandbox is not None:
            _check_chain(self.sandbox)
        check_generation(self.generation)


@dataclass(frozen=True, slots=True)
class AttachRing(Request[Done]):
    """Take records of one worker of a sandbox from its ring. A ring that is attached already stays attached."""

    sandbox: str
    generation: int

    def __post_init__(self) -> None:
        _check_chain(self.sandbox)
        check_generation(self.generation)


@dataclass(frozen=True, slots=True)
class CloseRing(Request[Done]):
    """Write what is left in the ring of a worker that has ended, and forget the ring."""

    sandbox: str
    generation: int

    def __post_init__(self) -> None:
        _check_chain(self.sandbox)
        check_generation(self.generation)


@dataclass(frozen=True, slots=True)
class CloseSandbox(Request[Accepted]):
    """End the chain of a sandbox, its channels and its rings. Records that are left in a ring are written first."""

    sandbox: str

    def __post_init__(self) -> None:
        _check_chain(self.sandbox)


@dataclass(frozen=True, slots=True)
class Head:
    """The last record of a chain: its sequence number and its hash."""

    seq: int
    hash: str

    def __post_init__(self) -> None:
        if self.seq < 0:
            raise ValueError("a sequence number is not negative")
        check_digest(self.hash)


@dataclass(frozen=True, slots=True)
class Anchor:
    """Where the log stands, and that much of it is on disk.

    Attributes:
        ts: RFC 3339, UTC.
        identity: fingerprint of the log's first key.
        key: fingerprint of the present key.
        file: number of the present file; `offset` is its length in bytes.
        log: hash over all lines.
        heads: of the open chains, by name.
    """

    version: int
    ts: str
    identity: str
    key: str
    file: int
    offset: int
    log: str
    heads: Mapping[str, Head]

    def __post_init__(self) -> None:
        if self.version != ANCHOR_VERSION:
            raise ValueError("an anchor of another version")
        if len(self.ts) > _MOST_TIME:
            raise ValueError("the time is too long")
        for text in (self.identity, self.key, self.log):
            check_digest(text)
        if self.file < 0 or self.offset < 0:
            raise ValueError("a place is not negative")
        for chain in self.heads:
            check_sandbox(chain)


@dataclass(frozen=True, slots=True)
class Heads(Request[Anchor]):
    """Ask where the log stands."""


def _check_chain(sandbox: str) -> None:
    check_sandbox(sandbox)
    if sandbox == CONTROL_CHAIN:
        raise ValueError("not a sandbox id")


CHANNEL: Final = Operations(Record, Records)
CONTROL: Final = Operations(Record, Records, Attach, AttachRing, CloseRing, CloseSandbox, Heads)
