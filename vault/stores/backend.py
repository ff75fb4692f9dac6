"""The asynchronous port behind which each backend of secrets is, in the fetcher.

The properties that each backend has; `tests/vault/test_backends.py` runs the same cases over each:
- `read` returns a value that can be a secret, or raises `NoValueError` with a fault and a sentence that says what to
  do. Neither a message nor a log has a value.
- A value has two times: until the first it is fresh, until the second it is valid. A backend with leases ends both
  with the lease.
- What a backend makes for one sandbox is not shared, and `release` revokes it. After `release` no read has a value that
  was kept from before.
- `close` gives back everything that the backend made.

`unleased` gives the times of values without a lease of their own: they are read again after `refresh` seconds, and are
used for `VALID_SECONDS` at most without a successful read.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Protocol

from policy.references import SecretReference
from vault.secret import Secret
from vault.stores.port import stored_problem
from wire.api.fetcher import Fault, Problem

VALID_SECONDS: Final = 300


class NoValueError(Exception):
    """A backend gives no value."""

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(f"{fault}: {reason}")
        self.fault = fault
        self.reason = reason

    @property
    def problem(self) -> Problem:
        """The form in a message."""
        return Problem(self.fault, self.reason[:300])


@dataclass(frozen=True, slots=True)
class BackendValue:
    """A value and its times, in seconds; see `wire.api.fetcher.Reading`."""

    value: Secret = field(repr=False)
    fresh: int
    valid: int
    shared: bool = True


class Backend(Protocol):
    """One backend. Calls for different secrets run at the same time."""

    @property
    def about(self) -> str:
        """What the backend is, for an operator: an address or a number of names, and no secret."""
        ...

    async def read(self, reference: SecretReference, sandbox: str) -> BackendValue:
        """Read a reference of this backend for a sandbox. Raises NoValueError."""
        ...

    async def probe(self, reference: SecretReference) -> None:
        """Say whether there is such a secret, without making one: no lease, no token, no run of a command.

        Raises:
            NoValueError: there is none.
        """
        ...

    async def release(self, reference: SecretReference, sandbox: str) -> None:
        """Revoke what was made for a sandbox, and forget what is kept of the value: the next read asks the source.

        Raises:
            NoValueError: it is not revoked.
        """
        ...

    async def examine(self) -> None:
        """Ask whether the backend can be used now. Raises NoValueError."""
        ...

    async def close(self) -> None:
        """Give back what the backend made, as far as that is possible."""
        ...


def unleased(text: str, refresh: int) -> BackendValue:
    """Return a value that has no lease of its own.

    Raises:
        NoValueError: it cannot be a secret.
    """
    return BackendValue(fit(text), refresh, VALID_SECONDS)


def fit(text: str) -> Secret:
    """Return a value that could also be stored with `vault put`.

    Raises:
        NoValueError: it cannot.
    """
    if problem := stored_problem(text, datetime.now(UTC)):
        raise NoValueError(Fault.UNFIT, f"{problem}: store another value in the backend")
    return Secret(text)
