"""What vaultd asks the fetcher (`SOCKET`), and the fetcher vaultd on the same connection (`KEEPING`); what the fetcher
asks hostd (`REPORTS`), and what hostd passes (`CONTROL`).

The fetcher speaks to the backends of secrets. It has no master key and no sealed secret.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from wire.api.vaultd import Value
from wire.ids import check_sandbox
from wire.operations import Done, Operations, Request

MOST_SECONDS: Final = 7 * 24 * 3600
_MOST_REFERENCE: Final = 256
_MOST_REASON: Final = 300
MOST_KEPT_BYTES: Final = 16 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Fault(StrEnum):
    """Why a backend gives no value."""

    UNCONFIGURED = "unconfigured"  # the operator has not configured the backend, or not allowed the reference
    MISSING = "missing"  # the backend has no such secret, or the secret has no such field
    DENIED = "denied"  # the backend refuses this secret to Sallyport
    LOGIN = "login"  # the backend refuses Sallyport's own credential, or there is none
    SEALED = "sealed"
    STANDBY = "standby"
    UNREACHABLE = "unreachable"
    TLS = "tls"  # its certificate is not valid for its name under the configured roots
    TIMEOUT = "timeout"
    BUSY = "busy"  # a limit of the backend, or of the fetcher
    UNFIT = "unfit"  # the value cannot be a secret
    FAILED = "failed"


DEFINITE: Final = frozenset({Fault.UNCONFIGURED, Fault.MISSING, Fault.DENIED})
"""The backend has withdrawn the secret: also a value that was read before is not used any more."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault, and a sentence that says what to do. It contains no value."""

    fault: Fault
    reason: str

    def __post_init__(self) -> None:
        if len(self.reason) > _MOST_REASON:
            raise ValueError(f"a reason is at most {_MOST_REASON} characters")


@dataclass(frozen=True, slots=True)
class Reading:
    """A value that a backend gave.

    Attributes:
        fresh_seconds: after this time the backend is asked again. The value is used meanwhile.
        valid_seconds: after this time the value is not used any more.
        shared: it is the same value for every sandbox. Otherwise it was made for the one that asked.
    """

    value: Value = field(repr=False)
    fresh_seconds: int
    valid_seconds: int
    shared: bool

    def __post_init__(self) -> None:
        if not 0 <= self.fresh_seconds <= self.valid_seconds <= MOST_SECONDS:
            raise ValueError(f"seconds are from 0 to {MOST_SECONDS}, and a value is valid while it is fresh")


@dataclass(frozen=True, slots=True)
class Fetched:
    """A value, or else the problem."""

    reading: Reading | None
    problem: Problem | None

    def __post_init__(self) -> None:
        if (self.reading is None) is (self.problem is None):
            raise ValueError("a value or a problem")


@dataclass(frozen=True, slots=True)
class Fetch(Request[Fetched]):
    """Read a reference for a sandbox."""

    reference: str
    sandbox: str

    def __post_init__(self) -> None:
        _bounded(self.reference)
        check_sandbox(self.sandbox)


@dataclass(frozen=True, slots=True)
class Probed:
    """The problem of a reference, if it has one."""

    problem: Problem | None


@dataclass(frozen=True, slots=True)
class Probe(Request[Probed]):
    """Say whether there is such a secret, without making one."""

    reference: str

    def __post_init__(self) -> None:
        _bounded(self.reference)


@dataclass(frozen=True, slots=True)
class Release(Request[Done]):
    """A sandbox no longer uses a value that is not shared: the backend is asked to revoke it."""

    reference: str
    sandbox: str

    def __post_init__(self) -> None:
        _bounded(self.reference)
        check_sandbox(self.sandbox)


@dataclass(frozen=True, slots=True)
class BackendState:
    """A configured backend, and its present problem if it has one."""

    name: str
    about: str
    problem: Problem | None


@dataclass(frozen=True, slots=True)
class BackendStates:
    """All configured backends."""

    backends: tuple[BackendState, ...]


@dataclass(frozen=True, slots=True)
class Examine(Request[BackendStates]):
    """Ask each configured backend whether it can be used now."""


@dataclass(frozen=True, slots=True)
class KeptToken:
    """A refresh token that its issuer gave in place of the operator's.

    `origin` is the digest of what it descends from: the operator's credential, the client and the issuer's URL. A
    token of another origin is not used.
    """

    origin: str
    token: Value = field(repr=False)

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.origin):
            raise ValueError("an origin is a SHA-256 in hexadecimal")
        if not 0 < len(self.token.text.encode()) <= MOST_KEPT_BYTES:
            raise ValueError(f"a refresh token has from 1 to {MOST_KEPT_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class Recalled:
    """What vaultd keeps for a token of the settings; None: nothing that can be used."""

    kept: KeptToken | None


@dataclass(frozen=True, slots=True)
class Recall(Request[Recalled]):
    """Ask for the refresh token that vaultd keeps for a token of the settings."""

    name: str

    def __post_init__(self) -> None:
        _check_name(self.name)


@dataclass(frozen=True, slots=True)
class Keep(Request[Done]):
    """Keep a refresh token in place of the former one. It is on disk before the answer."""

    name: str
    kept: KeptToken

    def __post_init__(self) -> None:
        _check_name(self.name)


class Material(StrEnum):
    """What hostd opens for the fetcher, which cannot read it itself."""

    ENVIRONMENT = "environment"  # a variable of hostd's environment that the settings name
    FILE = "file"  # a file in a directory that the settings list
    CREDENTIAL = "credential"  # the fetcher's own credential for HashiCorp Vault


@dataclass(frozen=True, slots=True)
class Open(Request[Done]):
    """Ask hostd for a descriptor. Before hostd answers, it sends the descriptor with `Supply` and the same ticket."""

    ticket: int
    material: Material
    name: str = ""

    def __post_init__(self) -> None:
        _bounded(self.name)


@dataclass(frozen=True, slots=True)
class Supply(Request[Done]):
    """The one descriptor that comes with it is the answer to the request with this ticket."""

    ticket: int


def _bounded(text: str) -> None:
    if len(text) > _MOST_REFERENCE:
        raise ValueError(f"at most {_MOST_REFERENCE} characters")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError("not the name of a token")


SOCKET: Final = Operations(Fetch, Probe, Release, Examine)
KEEPING: Final = Operations(Recall, Keep)
REPORTS: Final = Operations(Open)
CONTROL: Final = Operations(Supply)
