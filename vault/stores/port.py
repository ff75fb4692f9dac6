"""What a store of secrets must do, and the one that keeps them in memory.

The properties every store has; `tests/vault` runs the same suite over each:
- `put` never replaces, `rotate` never creates; a version grows by one with each rotation and the binding stays.
- Metadata can be listed without touching a value.
- A replaced value is kept for `FORMER_FOR`, the last `MAX_FORMER` of them: servers may still send it back, and a
  gateway looks for it. It is never sent again.
- A value that cannot be read back exactly is an error (`DamagedSecretError`), never another value.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from vault import conditions
from vault.client_certificate import PEM_BEGIN, certificate_problem
from vault.grants import SecretBinding, secret_name
from vault.secret import Secret, value_problem
from wire import Code
from wire.api.vaultd import Metadata

MAX_SECRETS = 4096
MAX_FORMER = 4
FORMER_FOR = timedelta(hours=24)

type Clock = Callable[[], datetime]


class StoreError(Exception):
    """A store did not do what was asked; `code` is the code in the answer to the client. No message holds a value."""

    code = Code.STORAGE


class UnknownSecretError(StoreError):
    """No secret has this name."""

    code = Code.UNKNOWN_SECRET


class SecretExistsError(StoreError):
    """A secret already has this name."""

    code = Code.EXISTS


class UnfitSecretError(StoreError):
    """The store is full, or the value cannot be a secret."""

    code = Code.INVALID


class DamagedSecretError(StoreError):
    """A record is not what was sealed: changed, swapped, or sealed with another key."""

    code = Code.DAMAGED


@dataclass(frozen=True, slots=True)
class SecretInfo:
    """What may be known about a secret without knowing it."""

    name: str
    version: int
    created: datetime
    updated: datetime
    binding: SecretBinding

    @property
    def form(self) -> Metadata:
        """The form in a message."""
        return Metadata(self.name, self.version, self.created.isoformat(), self.updated.isoformat(), self.binding.form)

    @classmethod
    def of(cls, form: Metadata) -> "SecretInfo":
        """Return what `form` says.

        Raises:
            ValueError: some part of it cannot be.
        """
        created, updated = datetime.fromisoformat(form.created), datetime.fromisoformat(form.updated)
        return cls(secret_name(form.name), form.version, created, updated, SecretBinding.of(form.binding))

    def to_json(self) -> dict[str, Any]:
        """The form in files, and of `sallyport vault list --json`."""
        return {
            "name": self.name,
            "version": self.version,
            "created": self.created.isoformat(),
            "updated": self.updated.isoformat(),
            **self.binding.to_json(),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "SecretInfo":
        """Read `to_json`'s form."""
        binding = {key: document[key] for key in ("hosts", "ports", "schemes", "methods", "paths", "expires")}
        binding |= {key: document[key] for key in conditions.KEYS & document.keys()}
        return cls(
            secret_name(document["name"]),
            int(document["version"]),
            datetime.fromisoformat(document["created"]),
            datetime.fromisoformat(document["updated"]),
            SecretBinding.from_json(binding),
        )


@dataclass(frozen=True, slots=True)
class Former:
    """A value that was replaced, and until when it is looked for."""

    value: Secret
    until: datetime

    def to_json(self) -> dict[str, str]:
        """The form that is sealed."""
        return {"value": self.value.reveal(), "until": self.until.isoformat()}

    @classmethod
    def from_json(cls, document: dict[str, str]) -> "Former":
        """Read `to_json`'s form."""
        return cls(Secret(document["value"]), datetime.fromisoformat(document["until"]))


class Store(Protocol):
    """The port vaultd keeps secrets behind. Calls are short and block."""

    def put(self, name: str, value: Secret, binding: SecretBinding) -> SecretInfo:
        """Store a new secret. Raises SecretExistsError, UnfitSecretError."""
        ...

    def rotate(self, name: str, value: Secret) -> SecretInfo:
        """Replace a value. Raises UnknownSecretError, UnfitSecretError."""
        ...

    def delete(self, name: str) -> None:
        """Remove a secret, damaged ones too. Raises UnknownSecretError."""
        ...

    def info(self, name: str) -> SecretInfo:
        """Metadata of one secret. Raises UnknownSecretError, DamagedSecretError."""
        ...

    def list_infos(self) -> list[SecretInfo]:
        """Metadata of all readable secrets, by name."""
        ...

    def value(self, name: str) -> Secret:
        """The value. Raises UnknownSecretError, DamagedSecretError."""
        ...

    def former(self, name: str) -> tuple[Secret, ...]:
        """The values before it that a server may still send back. Raises UnknownSecretError, DamagedSecretError."""
        ...


class MemoryStore:
    """Secrets in this process only: for tests and for trying things out."""

    def __init__(self, clock: Clock = lambda: datetime.now(UTC)) -> None:
        self._clock = clock
        self._secrets: dict[str, tuple[SecretInfo, Secret]] = {}
        self._former: dict[str, tuple[Former, ...]] = {}

    def put(self, name: str, value: Secret, binding: SecretBinding) -> SecretInfo:
        """See `Store`."""
        info = new_info(name, value, binding, self._clock(), self._secrets)
        self._secrets[name] = (info, value)
        return info

    def rotate(self, name: str, value: Secret) -> SecretInfo:
        """See `Store`."""
        now = self._clock()
        info = rotated_info(self.info(name), value, now)
        self._former[name] = with_former(self._former.get(name, ()), self.value(name), now)
        self._secrets[name] = (info, value)
        return info

    def delete(self, name: str) -> None:
        """See `Store`."""
        if self._secrets.pop(name, None) is None:
            raise UnknownSecretError("no secret has this name")
        self._former.pop(name, None)

    def info(self, name: str) -> SecretInfo:
        """See `Store`."""
        return self._get(name)[0]

    def list_infos(self) -> list[SecretInfo]:
        """See `Store`."""
        return [self._secrets[name][0] for name in sorted(self._secrets)]

    def value(self, name: str) -> Secret:
        """See `Store`."""
        return self._get(name)[1]

    def former(self, name: str) -> tuple[Secret, ...]:
        """See `Store`."""
        self._get(name)
        return still_former(self._former.get(name, ()), self._clock())

    def _get(self, name: str) -> tuple[SecretInfo, Secret]:
        try:
            return self._secrets[name]
        except KeyError:
            raise UnknownSecretError("no secret has this name") from None


def new_info(name: str, value: Secret, binding: SecretBinding, now: datetime, present: Collection[str]) -> SecretInfo:
    """The metadata of a secret about to be stored beside the names in `present`; raises as `Store.put`."""
    secret_name(name)
    if name in present:
        raise SecretExistsError("a secret already has this name")
    if len(present) >= MAX_SECRETS:
        raise UnfitSecretError(f"the store holds {MAX_SECRETS} secrets, its limit")
    check_value(value, now)
    return SecretInfo(name, 1, now, now, binding)


def rotated_info(info: SecretInfo, value: Secret, now: datetime) -> SecretInfo:
    """The metadata after a rotation; raises as `Store.rotate`."""
    check_value(value, now)
    return replace(info, version=info.version + 1, updated=now)


def with_former(former: Collection[Former], value: Secret, now: datetime, most: int = MAX_FORMER) -> tuple[Former, ...]:
    """What is kept once `value` was replaced, the latest last."""
    kept = [one for one in former if one.until > now and one.value != value]
    return (*kept, Former(value, now + FORMER_FOR))[-most:]


def still_former(former: Collection[Former], now: datetime) -> tuple[Secret, ...]:
    """The values of `former` that are still looked for."""
    return tuple(one.value for one in former if one.until > now)


def check_value(value: Secret, now: datetime) -> None:
    """Raise UnfitSecretError for a value that cannot be stored."""
    if problem := stored_problem(value.reveal(), now):
        raise UnfitSecretError(problem)


def stored_problem(text: str, now: datetime) -> str | None:
    """Return why `text` cannot be stored, without quoting it; None if it can.

    It is a value for a header, or a client certificate: PEM text, which begins with `PEM_BEGIN`.
    """
    return certificate_problem(text, now) if text.startswith(PEM_BEGIN) else value_problem(text)
