"""The effects that an exchange asks for: policy, budget, vault, log, counts and time.

`gateway.exchange` calls these ports in its own order. The worker binds them to the channels of its sandbox
(`gateway.ports`); an engine passes them on and calls none of them for a request.

- A port that fails refuses: an exception from `Decider`, `Secrets` or `Recorder` never lets a byte out.
- `Recorder.accept` returns before the first upstream byte of what it records.

Pure: types only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from gateway.admission import Admission
from policy.compiled import SecretAt
from policy.decision import AllowRequest, Deny
from policy.facts import RequestFacts
from policy.injection import InjectionPlan
from vault.secret import Secret


@dataclass(frozen=True, slots=True)
class Over:
    """A request that is one too many. `retry_after` is in whole seconds, None where waiting does not help."""

    rule: ClassVar[str] = "limits"
    reason: str
    retry_after: int | None


class Decider(Protocol):
    """The policy in force, as of the call."""

    def decide_request(self, facts: RequestFacts) -> AllowRequest | Deny:
        """Judge one request. Raising means deny."""
        ...

    def secrets_to(self, host: str) -> tuple[SecretAt, ...]:
        """Every use of a secret that requests to this host can make. Raising means deny."""
        ...


class SecretRefused(Exception):
    """A secret must not go into this request. `reason` is a sentence for the client, and holds no value."""

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


class Disclosures(Protocol):
    """What the responses to this sandbox have told about secrets so far. See `gateway.ledger.Ledger`."""

    reflections: int
    """Responses that ended with what looks like the beginning of a secret."""

    def matches(self, now: float, forgotten: float) -> float:
        """Pieces of responses in which a secret was found; `forgotten` of them are dropped in a second."""
        ...

    def match(self, now: float, forgotten: float) -> None:
        """Count one piece more."""
        ...


@dataclass(frozen=True, slots=True)
class Effects:
    """All that the exchanges of one flow can cause or ask. `clock` gives monotonic seconds."""

    decider: Decider
    allowance: Allowance
    secrets: Secrets
    recorder: Recorder
    disclosures: Disclosures
    admission: Admission
    clock: Callable[[], float]
