"""What vaultd is asked, on its socket (`CONTROL`) and on the channel of a sandbox's worker (`CHANNEL`).

The types bound counts and lengths. What the texts mean (names of hosts, methods, patterns of paths) is judged by
`vault.grants`.
"""

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from wire.ids import check_generation, check_sandbox
from wire.operations import Done, Operations, Request

MOST_GRANTS: Final = 512
"""Of one sandbox: twice what a credential vault may have, as a change puts new ones beside the old ones first."""
MOST_PATTERNS: Final = 1024
MOST_REFERENCES: Final = 4096
"""Of the operator's document: each reference with each of its destinations."""
MOST_LEASE_SECONDS: Final = 300
MOST_SELECTORS: Final = 64
MOST_FREEZES: Final = 1024
MOST_LIMITS: Final = 256
_MOST_METADATA: Final = 64
_MOST_IMAGES: Final = 8
_MOST_TEXT: Final = 256
_MOST_HEAD: Final = 16384


@dataclass(frozen=True, slots=True)
class Value:
    """The text of a secret, hidden in every representation of it."""

    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class GrantForm:
    """One secret for one destination; `host` is a name or `*.suffix`."""

    secret: str
    host: str
    port: int
    scheme: str


@dataclass(frozen=True, slots=True)
class Scope:
    """The methods and path patterns that a secret is limited to; None is no limit."""

    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ConditionForm:
    """Which sandboxes may have a secret, and its limits in uses and in bytes (`vault.conditions`)."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    uses: int | None = None
    sandbox_uses: int | None = None
    sent: int | None = None
    sandbox_sent: int | None = None


@dataclass(frozen=True, slots=True)
class BindingForm:
    """Where a stored secret may go; `expires` is an RFC 3339 time."""

    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    schemes: tuple[str, ...]
    scope: Scope
    expires: str | None
    conditions: ConditionForm = field(default_factory=ConditionForm)


@dataclass(frozen=True, slots=True)
class Metadata:
    """What may be known about a stored secret without knowing it; times are RFC 3339."""

    name: str
    version: int
    created: str
    updated: str
    binding: BindingForm


@dataclass(frozen=True, slots=True)
class Version:
    """The version of a secret that is stored now."""

    version: int


@dataclass(frozen=True, slots=True)
class Put(Request[Version]):
    """Store a new secret; an existing name is refused (`exists`)."""

    name: str
    value: Value
    binding: BindingForm


@dataclass(frozen=True, slots=True)
class Rotate(Request[Version]):
    """Replace the value of a secret, and revoke its leases."""

    name: str
    value: Value


@dataclass(frozen=True, slots=True)
class Delete(Request[Done]):
    """Delete a secret, and revoke its leases."""

    name: str


@dataclass(frozen=True, slots=True)
class Revoked:
    """The workers that have dropped their leases, and those that did not say so and lost their channel."""

    confirmed: int
    cut_off: int


@dataclass(frozen=True, slots=True)
class LimitForm:
    """What an operator takes away from references to backends (`vault.limits`); None is any.

    `pattern` is a reference, or the beginning of references and `*`; `expires` is an RFC 3339 time.
    """

    pattern: str
    hosts: tuple[str, ...] | None
    ports: tuple[int, ...] | None
    schemes: tuple[str, ...] | None
    expires: str | None
    conditions: ConditionForm


@dataclass(frozen=True, slots=True)
class Limit(Request[Revoked]):
    """Put a limit in force, in place of the one with the same pattern; end the leases of its references."""

    limit: LimitForm


@dataclass(frozen=True, slots=True)
class Unlimit(Request[Done]):
    """End the limit with this pattern; refused (`invalid`) if there is none."""

    pattern: str

    def __post_init__(self) -> None:
        _bounded(self.pattern, _MOST_TEXT, "a pattern")


@dataclass(frozen=True, slots=True)
class Frozen:
    """A freeze: of one sandbox (None: all), of one secret (None: all), since an RFC 3339 time."""

    sandbox: str | None
    secret: str | None
    since: str


@dataclass(frozen=True, slots=True)
class Used:
    """What all leases of a limited secret have permitted: uses, and bytes of requests."""

    uses: int
    sent: int


@dataclass(frozen=True, slots=True)
class Listed:
    """All stored secrets, the uses of what is limited, the freezes, and the limits of references."""

    secrets: tuple[Metadata, ...]
    used: Mapping[str, Used] = field(default_factory=dict)
    frozen: tuple[Frozen, ...] = ()
    limits: tuple[LimitForm, ...] = ()


@dataclass(frozen=True, slots=True)
class List(Request[Listed]):
    """Ask for the metadata of all stored secrets."""


@dataclass(frozen=True, slots=True)
class Rekey(Request[Done]):
    """Seal everything with the successor of the master key.

    `credentials` names the sources of wrapped keys whose credentials come with the request, one descriptor for each.
    """

    credentials: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reset(Request[Done]):
    """Count the uses of a secret from zero again."""

    name: str


@dataclass(frozen=True, slots=True)
class RevokeAll(Request[Revoked]):
    """End the leases of all workers, or of one sandbox's, or those of one secret. Grants stay."""

    sandbox: str | None = None
    secret: str | None = None


@dataclass(frozen=True, slots=True)
class FreezeSecrets(Request[Revoked]):
    """Release no secret until `UnfreezeSecrets`, or none of one sandbox, or not this one; and end such leases."""

    sandbox: str | None = None
    secret: str | None = None


@dataclass(frozen=True, slots=True)
class UnfreezeSecrets(Request[Done]):
    """End the freeze that was begun with the same values; refused (`invalid`) if there is none."""

    sandbox: str | None = None
    secret: str | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """The root certificate (PEM) that the sandbox's programs are to trust."""

    root_pem: str


@dataclass(frozen=True, slots=True)
class OpenSandbox(Request[Opened]):
    """Register a sandbox.

    Attributes:
        lineage: the lineage of its certificate authorities.
        inline: values of its own, by name.
        bounds: where its inline secrets may ever be granted; None: where `grants` has them.
        names: hosts (or `*.suffix`) that its worker's authorities may sign for; None: any.
        metadata: that of its create call.
    """

    sandbox: str
    lineage: str
    grants: tuple[GrantForm, ...] = ()
    inline: Mapping[str, Value] = field(default_factory=dict)
    bounds: tuple[GrantForm, ...] | None = None
    names: tuple[str, ...] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)
        _bounded(self.metadata, _MOST_METADATA, "pairs of metadata")
        _bounded(self.lineage, _MOST_TEXT, "a lineage")
        _bounded(self.grants, MOST_GRANTS, "grants")
        _bounded(self.inline, MOST_GRANTS, "inline secrets")
        _bounded(self.bounds or (), MOST_GRANTS, "bounds")
        _bounded(self.names or (), MOST_PATTERNS, "names to sign for")


@dataclass(frozen=True, slots=True)
class Regrant(Request[Done]):
    """Replace the grants of a sandbox, and its inline secrets.

    Its inline secrets are `inline` then, and those of the former ones that `keep` names. With neither, they stay.

    Attributes:
        bounds: where its inline secrets may be granted. A secret in `inline` gets them all, another one keeps those
            that it had. None: those of `grants`, and as before.
        names: hosts (or `*.suffix`) that its worker's next authority may sign for; None: as before.
        metadata: that of the create call that got this sandbox from a pool; None: as before.
    """

    sandbox: str
    grants: tuple[GrantForm, ...]
    inline: Mapping[str, Value] | None = None
    keep: tuple[str, ...] | None = None
    bounds: tuple[GrantForm, ...] | None = None
    names: tuple[str, ...] | None = None
    metadata: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)
        _bounded(self.metadata or {}, _MOST_METADATA, "pairs of metadata")
        _bounded(self.grants, MOST_GRANTS, "grants")
        _bounded(self.inline or {}, MOST_GRANTS, "inline secrets")
        _bounded(self.keep or (), MOST_GRANTS, "kept names")
        _bounded(self.bounds or (), MOST_GRANTS, "bounds")
        _bounded(self.names or (), MOST_PATTERNS, "names to sign for")


@dataclass(frozen=True, slots=True)
class Narrow(Request[Done]):
    """Take away every grant that is not in `grants`, every inline secret that is not in `keep`, every bound that is not
    in `bounds`; None takes away none.
    """

    sandbox: str
    grants: tuple[GrantForm, ...]
    keep: tuple[str, ...] | None = None
    bounds: tuple[GrantForm, ...] | None = None

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)
        _bounded(self.grants, MOST_GRANTS, "grants")
        _bounded(self.keep or (), MOST_GRANTS, "kept names")
        _bounded(self.bounds or (), MOST_GRANTS, "bounds")


@dataclass(frozen=True, slots=True)
class CloseSandbox(Request[Done]):
    """Forget everything of a sandbox; an unknown one is no error."""

    sandbox: str

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)


@dataclass(frozen=True, slots=True)
class Attach(Request[Done]):
    """Make the one descriptor that comes with it the channel of a sandbox's worker.

    `images` are name and id of the image that the sandbox was started from, none after a restore; None: as before.
    """

    sandbox: str
    generation: int
    images: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_sandbox(self.sandbox)
        _bounded(self.images or (), _MOST_IMAGES, "names of an image")
        check_generation(self.generation)


@dataclass(frozen=True, slots=True)
class IssuedAuthority:
    """A worker's own certificate authority (PEM): `chain_pem` is the intermediate and then the root."""

    certificate_pem: str
    chain_pem: str
    key_pem: Value


@dataclass(frozen=True, slots=True)
class Intermediate(Request[IssuedAuthority]):
    """Ask for a new certificate authority, below the root of the sandbox's lineage."""


class ReleasePurpose(StrEnum):
    """What a secret is released for, if not for a request."""

    SCRUB = "scrub"
    """The value is looked for in responses and sent in no request: methods and paths do not matter."""


@dataclass(frozen=True, slots=True)
class Released:
    """A secret that the worker may use for `lease_seconds`, within `scope`.

    `uses` is the number of requests that may carry it, `sent` the number of their bytes; None: any number.
    `former` are the values before it that its host may still send back; they are looked for and never sent.
    """

    value: Value
    former: tuple[Value, ...]
    lease_seconds: int
    scope: Scope
    uses: int | None = None
    sent: int | None = None

    def __post_init__(self) -> None:
        if min(1 if self.uses is None else self.uses, 1 if self.sent is None else self.sent) < 1:
            raise ValueError("a lease permits at least one use and one byte")
        if not 0 <= self.lease_seconds <= MOST_LEASE_SECONDS:
            raise ValueError(f"a lease is at most {MOST_LEASE_SECONDS} seconds")


@dataclass(frozen=True, slots=True)
class Release(Request[Released]):
    """Ask for a secret for one destination.

    `method` and `path` are those of the request it is for, `size` is the number of its bytes; None: unknown.
    """

    secret: str
    host: str
    port: int
    scheme: str
    method: str | None = None
    path: str | None = None
    purpose: ReleasePurpose | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        _bounded(self.method or "", _MOST_HEAD, "a method")
        _bounded(self.path or "", _MOST_HEAD, "a path")
        if self.size is not None and self.size < 1:
            raise ValueError("a request has at least one byte")


@dataclass(frozen=True, slots=True)
class Refer(Request[Done]):
    """The operator's document names these references to secrets of backends, each for exact hosts, and no others."""

    uses: tuple[GrantForm, ...]

    def __post_init__(self) -> None:
        _bounded(self.uses, MOST_REFERENCES, "references")


@dataclass(frozen=True, slots=True)
class Checked:
    """A reference can be read: seconds until it is read again, and seconds for which a value of it is used at most."""

    fresh_seconds: int
    valid_seconds: int


@dataclass(frozen=True, slots=True)
class CheckReference(Request[Checked]):
    """Read a reference, and forget its value."""

    reference: str

    def __post_init__(self) -> None:
        _bounded(self.reference, _MOST_TEXT, "a reference")


@dataclass(frozen=True, slots=True)
class ProbeReference(Request[Done]):
    """Say whether there is such a secret, without making one; refused with the reason."""

    reference: str

    def __post_init__(self) -> None:
        _bounded(self.reference, _MOST_TEXT, "a reference")


@dataclass(frozen=True, slots=True)
class BackendLine:
    """A configured backend: its name, what it is, and its problem (empty: none)."""

    name: str
    about: str
    problem: str


@dataclass(frozen=True, slots=True)
class BackendLines:
    """All configured backends."""

    backends: tuple[BackendLine, ...]


@dataclass(frozen=True, slots=True)
class ListBackends(Request[BackendLines]):
    """Ask each configured backend of secrets whether it can be used now."""


@dataclass(frozen=True, slots=True)
class WriteLogin(Request[Done]):
    """Write a secret, as the login of a registry, into the pipe that comes with the request.

    The secret is `user:password`. What is written has the form of `auth.json` of container tools.
    """

    secret: str
    host: str
    port: int

    def __post_init__(self) -> None:
        _bounded(self.secret, _MOST_TEXT, "a name")
        _bounded(self.host, _MOST_TEXT, "a host")


@dataclass(frozen=True, slots=True)
class Revoke(Request[Done]):
    """End the leases of these secrets, None: of all. The answer says that the worker uses them no more."""

    secrets: tuple[str, ...] | None


def _bounded(value: Sized, most: int, what: str) -> None:
    if len(value) > most:
        raise ValueError(f"{what}: at most {most}")


CHANNEL: Final = Operations(Intermediate, Release)
CONTROL: Final = Operations(
    *(Put, Rotate, Delete, List, Reset, Limit, Unlimit, RevokeAll, FreezeSecrets, UnfreezeSecrets, Rekey),
    *(OpenSandbox, Regrant, Narrow, CloseSandbox, Attach, WriteLogin),
    *(Refer, CheckReference, ProbeReference, ListBackends),
)
SANDBOX_REQUESTS: Final = (OpenSandbox, Regrant, Narrow, CloseSandbox)
"""What other users than root may ask."""
WORKER: Final = Operations(Revoke)
"""What vaultd asks a worker."""
