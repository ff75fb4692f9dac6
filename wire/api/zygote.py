"""What hostd asks the zygote, and what the zygote reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from wire.ids import check_generation, check_sandbox
from wire.operations import Done, Notification, Operations, Request

DESCRIPTORS: Final = 11
"""That come with a `Fork`; `gateway.spawn.Descriptors` has their order."""
_LEAST_UID: Final = 1000
_MOST_UID: Final = 2**32 - 2
_MOST_GROUPS: Final = 64


@dataclass(frozen=True, slots=True)
class Prepare(Request[Done]):
    """Set what all workers have in common, before the first `Fork`. It holds for each later one.

    `gateway.config` says what the texts mean, and checks them. A refused `Prepare` changes nothing.

    Attributes:
        upstream_roots: PEM of the authorities that may vouch for upstream servers.
        dns_upstreams: resolvers, as `ip:port`.
        inside: the sandbox's address on its link.
        allowed_addresses: networks that may be dialled although they are not public.
        host_addresses: addresses by name; they are used instead of DNS.
        limits: fields of `wire.gateway_limits.GatewayLimits` that differ from its defaults.
    """

    upstream_roots: str = field(repr=False)
    dns_upstreams: tuple[str, ...]
    inside: str
    allowed_addresses: tuple[str, ...] = ()
    host_addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Forked:
    """The process id of a worker."""

    pid: int

    def __post_init__(self) -> None:
        _check_pid(self.pid)


@dataclass(frozen=True, slots=True)
class Fork(Request[Forked]):
    """Make a worker. `cgroup` has its control groups, as directories: one for each hierarchy."""

    sandbox: str
    generation: int
    uid: int
    gid: int
    cgroup: tuple[str, ...]

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)
        check_generation(self.generation)
        if not (_LEAST_UID <= self.uid <= _MOST_UID and _LEAST_UID <= self.gid <= _MOST_UID):
            raise ValueError("uid and gid are those of a worker")
        if len(self.cgroup) > _MOST_GROUPS or not all(directory.startswith("/") for directory in self.cgroup):
            raise ValueError("control groups are absolute directories")


@dataclass(frozen=True, slots=True)
class Identity:
    """The zygote's own process id."""

    pid: int

    def __post_init__(self) -> None:
        _check_pid(self.pid)


@dataclass(frozen=True, slots=True)
class Identify(Request[Identity]):
    """Ask which process it is."""


@dataclass(frozen=True, slots=True)
class Exited(Notification):
    """A worker has ended; `status` is its exit code, or the negative number of the signal that ended it."""

    pid: int
    status: int

    def __post_init__(self) -> None:
        _check_pid(self.pid)


def _check_pid(pid: int) -> None:
    if pid <= 1:
        raise ValueError("not the process id of a zygote or worker")


OPERATIONS: Final = Operations(Prepare, Fork, Identify)
REPORTS: Final = Operations(Exited)
