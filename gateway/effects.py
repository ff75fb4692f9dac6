"""The ports of an exchange: policy, budget, vault, log, counts and time.

`gateway.exchange` calls these ports in a fixed order. The worker binds them to the channels of its sandbox
(`gateway.ports`). An engine passes them on, and calls none of them for a request.

- An exception from `Decider`, `Secrets` or `Recorder` means refusal: no byte is sent.
- `Recorder.accept` returns before the first byte of the recorded request is sent upstream.

Pure: types only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Protocol

from gateway.admission import Admission
from gateway.placeholders import Placeholders
from policy.compiled import SecretAt
from policy.decision import AllowRequest, Deny
from policy.facts import RequestFacts, SessionFacts
from policy.injection import SecretPlan
from policy.logins import LoginPlan
from policy.sessions import AllowSession
from vault.secret import Secret


@dataclass(frozen=True, slots=True)
class Over:
    """A request above a limit. `retry_after` is in whole seconds, None if waiting does not help."""

    rule: ClassVar[str] = "limits"
    reason: str
    retry_after: int | None


class Decider(Protocol):
    """The policy in force at the time of the call."""

    def decide_request(self, facts: RequestFacts) -> AllowRequest | Deny:
        """Judge one request. An exception means deny."""
        ...

    def secrets_to(self, host: str) -> tuple[SecretAt, ...]:
        """Return every secret that a request to this host can carry, with its binding. An exception means deny."""
        ...

    def placeholders(self) -> Placeholders:
        """Return the placeholders of the sandbox. An exception means deny."""
        ...


class SecretRefused(Exception):
    """A secret must not be sent in this request. `reason` is a sentence for the client, without the secret."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SecretsSuspended(Exception):
    """A secret is frozen, or its backend gives no value. Nothing is known of its value: no request to its hosts is sent
    (503).

    `reason` is a sentence for the client, without the secret.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Secrets(Protocol):
    """The secrets that this sandbox's worker may have."""

    async def lease(self, plan: SecretPlan, facts: RequestFacts, size: int | None) -> Secret:
        """Return the secret of `plan` for this one request: its destination, method and path.

        `size` is the number of the request's bytes as received, head and body; None: it is not known yet.
        Called before each use, once for each request and secret: each call counts as a use. The answer is valid for
        this request only.

        Raises:
            SecretRefused: the request is denied (403).
            SecretsSuspended: the request is refused (503), with the reason.
            Exception: the secret is not available; the request is refused (503).
        """
        ...

    async def searched(self, use: SecretAt) -> tuple[Secret, ...]:
        """Return the values to search for in responses of the host of `use`: the current one and former ones.

        Raises:
            SecretRefused: the sandbox has no such secret at that host.
            SecretsSuspended: the values are not available, with the reason.
            Exception: the values are not available.
        """
        ...


class Sessions(Protocol):
    """The database sessions that this sandbox may open, under the policy in force at the time of the call."""

    def decide_session(self, facts: SessionFacts) -> AllowSession | Deny:
        """Judge one session. An exception means deny."""
        ...

    async def login(self, plan: LoginPlan, facts: SessionFacts) -> Secret:
        """Return the secret of `plan` for this one login.

        Raises:
            SecretRefused: the session is denied.
            SecretsSuspended: the session is refused, with the reason.
            Exception: the secret is not available; the session is refused.
        """
        ...


class Allowance(Protocol):
    """The remaining budget of the sandbox."""

    def request(self) -> Over | None:
        """Count one allowed request. Return None, or the exceeded limit, which is answered with 429 or 403."""
        ...


class RecordForm(Protocol):
    """A record whose fields are fixed but for some, which are given at each use in the order of their names' tuple.

    An integer is not negative. A text has letters, digits and hyphens, but for `path`.
    """

    async def accept(self, *values: int | str) -> None:
        """See `Recorder.accept`."""
        ...

    def note(self, *values: int | str) -> None:
        """See `Recorder.note`."""
        ...


class Recorder(Protocol):
    """The audit log of this sandbox."""

    async def accept(self, kind: str, decision: str, **fields: object) -> None:
        """Return when the log has accepted the record. An exception means that the request is refused (503).

        Fields with the value None are omitted.
        """
        ...

    def note(self, kind: str, decision: str, **fields: object) -> None:
        """Record an outcome without waiting; the record can be lost."""
        ...

    def form(self, kind: str, decision: str, varying: tuple[str, ...], **fields: object) -> RecordForm:
        """Return a form of records with these fields, and with `varying` others. Repeated requests use it."""
        ...


class Disclosures(Protocol):
    """Counts of what responses to this sandbox have revealed about secrets. See `gateway.ledger.Ledger`."""

    reflections: int
    """Responses that ended with the apparent beginning of a secret."""

    def matches(self, now: float, forgotten: float) -> float:
        """Return the pieces of responses in which a secret was found, less `forgotten` of them per second."""
        ...

    def match(self, now: float, forgotten: float) -> None:
        """Count one more piece."""
        ...


@dataclass(frozen=True, slots=True)
class Effects:
    """The ports of all exchanges of one flow. `clock` gives monotonic seconds, `date` the present time in UTC."""

    decider: Decider
    allowance: Allowance
    secrets: Secrets
    recorder: Recorder
    disclosures: Disclosures
    admission: Admission
    clock: Callable[[], float]
    date: Callable[[], datetime]
