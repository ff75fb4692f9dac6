"""The documents of the credential vault: parsing, validation and changes, without values.

A vault is `{"revision", "credentials": {name: revision}, "bindings": [...]}` here and in the registry. Values are
passed separately, from the request to vaultd. No object of this module but `Change.values` contains them.

- Unknown keys, nulls and duplicate names are refused at any depth. Messages are the contract's.
  `policy.bindings` validates the content of a binding.
- vaultd's name of a credential is `inline:<revision>/<name>`. It cannot collide with a stored secret. A replaced value
  is another secret, so that the old and the new one exist beside each other until the change is in force.
- A value can be used only at the places of the bindings in its own write. A later write can use it elsewhere only if it
  contains the value again. vaultd enforces this, and this module reports it before.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policy.api import ApiPolicyError
from policy.bindings import (
    INLINE,
    MAX_PLACES,
    ApiBinding,
    binding_name,
    check_conflicts,
    number_of_places,
    parse_binding,
)
from policy.compile import uses_of
from policy.strict import Path, StrictError, members
from vault.grants import Grant, within

MAX_ENTRIES = 256
MAX_NAME = 200  # vaultd's names hold 256 bytes, prefix and revision included.
MAX_GRANTS = 256
"""Pairs of a credential and a place where it can be used. vaultd's limit is twice this, because old and new pairs exist
beside each other during a change.
"""
MAX_VALUE = 65536
_UNSENDABLE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")


class VaultText(Exception):
    """A refusal: status and the exact text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def _bad(text: str) -> VaultText:
    return VaultText(400, text)


@dataclass(frozen=True, slots=True)
class CredentialVault:
    """The vault of one sandbox, without values."""

    revision: int
    credentials: Mapping[str, int] = field(default_factory=dict)
    bindings: tuple[ApiBinding, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the form that the registry stores."""
        bindings = [binding.to_json() for binding in self.bindings]
        return {"revision": self.revision, "credentials": dict(self.credentials), "bindings": bindings}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "CredentialVault":
        """Parse the form of `to_json`."""
        bindings = tuple(parse_binding(binding) for binding in document["bindings"])
        return cls(int(document["revision"]), dict(document["credentials"]), bindings)

    def secrets(self) -> list[str]:
        """Return vaultd's names of all present values."""
        return [f"{INLINE}{self._versioned(name)}" for name in sorted(self.credentials)]

    def secret(self, credential: str) -> str:
        """Return vaultd's name of one present value."""
        return f"{INLINE}{self._versioned(credential)}"

    def _versioned(self, credential: str) -> str:
        return f"{self.credentials[credential]}/{credential}"

    def compiled_bindings(self) -> tuple[ApiBinding, ...]:
        """Return the bindings, each credential with vaultd's name, to compile them."""
        return tuple(binding.renamed(self._versioned) for binding in self.bindings)

    def places(self) -> frozenset[Grant]:
        """Return where the bindings use the values, whether or not they are in force."""
        uses = uses_of(binding.compiled() for binding in self.compiled_bindings())
        return frozenset(Grant(use.secret, use.host, use.port, use.scheme) for use in uses)

    def shown_credentials(self) -> list[dict[str, Any]]:
        """Return CredentialMetadata, sorted by name."""
        return [
            {"name": name, "sourceType": "inline", "revision": self.credentials[name]}
            for name in sorted(self.credentials)
        ]

    def shown_bindings(self) -> list[dict[str, Any]]:
        """Return BindingMetadata, sorted by name."""
        return [
            {"name": binding.name, "revision": self.revision} | binding.to_wire()
            for binding in sorted(self.bindings, key=lambda item: item.name)
        ]

    def state(self) -> dict[str, Any]:
        """Return the State document."""
        return {
            "revision": self.revision,
            "credentials": self.shown_credentials(),
            "bindings": self.shown_bindings(),
        }


@dataclass(frozen=True, slots=True)
class Change:
    """A vault after a change, and its new values: vaultd's name -> value."""

    vault: CredentialVault
    values: Mapping[str, str] = field(repr=False)
    only_deletes: bool = False


def create(body: object) -> Change:
    """Parse a CreateRequest.

    Raises:
        VaultText: the fault.
    """
    document = _members(body, ("credentials", "bindings"))
    credentials = _named(_array(document, "credentials"), _credential, "credential")
    bindings = _named(_array(document, "bindings"), _binding, "binding")
    vault = CredentialVault(1, dict.fromkeys(credentials, 1), tuple(bindings.values()))
    _check_whole(vault)
    return Change(vault, {vault.secret(name): value for name, value in credentials.items()})


def mutate(current: CredentialVault, body: object) -> Change:
    """Parse a MutationRequest and apply it to a copy.

    Raises:
        VaultText: the fault.
    """
    document = _members(body, ("expectedRevision", "credentials", "bindings"))
    if "expectedRevision" in document:
        expected = document["expectedRevision"]
        if type(expected) is not int or expected < 0:
            raise _bad("expectedRevision must be a non-negative integer")
        if expected != current.revision:
            raise VaultText(409, f"expectedRevision {expected} does not match current revision {current.revision}")
    revision = current.revision + 1
    known = {binding.name: binding for binding in current.bindings}
    values, gone = _mutations(document, "credential", _credential, current.credentials)
    written, unbound = _mutations(document, "binding", _binding, known)
    credentials = {name: old for name, old in current.credentials.items() if name not in gone}
    credentials |= dict.fromkeys(values, revision)
    bindings = {name: old for name, old in known.items() if name not in unbound} | written
    vault = CredentialVault(revision, credentials, tuple(bindings.values()))
    _check_whole(vault)
    _check_places(current, vault, values)
    return Change(
        vault,
        {vault.secret(name): value for name, value in values.items()},
        only_deletes=not values and not written,
    )


type _Items = list[tuple[Path, object]]
"""Return the elements of an array, each with its position."""


def _mutations[T](
    body: Mapping[str, object], kind: str, parse: Callable[[object, Path], tuple[str, T]], existing: Mapping[str, Any]
) -> tuple[dict[str, T], frozenset[str]]:
    """Return the elements to write (replaced or added) and to delete."""
    key = f"{kind}s"
    document = _members(body.get(key, {}), ("add", "replace", "delete"), (key,))
    deleted = set()
    for _, item in _array(document, "delete", (key,)):
        name = _name(item, kind)
        if name in deleted:
            raise _bad(f'{kind} "{name}" mentioned by multiple operations')
        if name not in existing:
            raise _bad(f'{kind} "{name}" does not exist')
        deleted.add(name)
    written: dict[str, T] = {}
    for operation in ("replace", "add"):
        seen: set[str] = set()
        for path, entry in _array(document, operation, (key,)):
            name, value = parse(entry, path)
            if operation == "add" and name in seen:
                raise _bad(f'duplicate {kind} add name "{name}"')
            if name in deleted or name in written:
                raise _bad(f'{kind} "{name}" mentioned by multiple operations')
            if operation == "replace" and name not in existing:
                raise _bad(f'{kind} "{name}" does not exist')
            if operation == "add" and name in existing:
                raise _bad(f'{kind} "{name}" already exists')
            seen.add(name)
            written[name] = value
    return written, frozenset(deleted)


def _named[T](items: _Items, parse: Callable[[object, Path], tuple[str, T]], kind: str) -> dict[str, T]:
    found: dict[str, T] = {}
    for path, item in items:
        name, value = parse(item, path)
        if name in found:
            raise _bad(f'duplicate {kind} name "{name}"')
        found[name] = value
    return found


def _members(value: object, known: Sequence[str], path: Path = ()) -> dict[str, object]:
    try:
        return members(value, known, path)
    except StrictError as error:
        raise _bad(str(error)) from None


def _array(document: Mapping[str, object], key: str, path: Path = ()) -> _Items:
    items = document.get(key, [])
    if not isinstance(items, list):
        raise _bad(f"{key} must be an array")
    if len(items) > MAX_ENTRIES:
        raise _bad(f"{key}: at most {MAX_ENTRIES} entries")
    return [((*path, key, position), item) for position, item in enumerate(items)]


def _name(value: object, kind: str) -> str:
    try:
        name = binding_name(value, kind)
    except ApiPolicyError as error:
        raise _bad(str(error)) from None
    if len(name.encode("utf-8", "replace")) > MAX_NAME:
        raise _bad(f"{kind} name is too long or has a control character")
    return name


def _credential(item: object, path: Path) -> tuple[str, str]:
    document = _members(item, ("name", "source"), path)
    name = _name(document.get("name"), "credential")
    source = _members(document.get("source"), ("type", "value"), (*path, "source"))
    kind = source.get("type", "")
    if kind not in ("", "inline"):
        raise _bad(f'unsupported credential source type "{str(kind)[:40]}"')
    value = source.get("value")
    if not isinstance(value, str) or not value:
        raise _bad(f'credential "{name}" inline value cannot be empty')
    if len(value.encode("utf-8", "replace")) > MAX_VALUE:
        raise _bad(f'credential "{name}" inline value is too long')
    if value != value.strip() or _UNSENDABLE.search(value):
        raise _bad(f'credential "{name}" inline value cannot be sent in a header')
    return name, value


def _binding(item: object, path: Path) -> tuple[str, ApiBinding]:
    try:
        binding = parse_binding(item, path)
    except ApiPolicyError as error:
        raise _bad(str(error)) from None
    return binding.name, binding


def _check_places(current: CredentialVault, vault: CredentialVault, values: Mapping[str, str]) -> None:
    """Refuse a binding that uses a value at a place for which the value was not given."""
    given = {vault.secret(name) for name in values}
    kept = {place for place in vault.places() if place.secret not in given}
    if beyond := sorted((place.secret, place.host) for place in kept - within(kept, current.places())):
        secret, host = beyond[0]
        name = next(name for name in vault.credentials if vault.secret(name) == secret)
        raise _bad(
            f'credential "{name}" was not given for host "{host}": '
            f"give its value again in the same request (credentials.replace) to use it there"
        )


def _check_whole(vault: CredentialVault) -> None:
    if len(vault.credentials) > MAX_ENTRIES or len(vault.bindings) > MAX_ENTRIES:
        raise _bad(f"at most {MAX_ENTRIES} credentials and bindings")
    if number_of_places(vault.bindings) > MAX_PLACES:
        raise _bad(f"at most {MAX_PLACES} hosts, methods and paths in all bindings")
    for binding in vault.bindings:
        for credential in binding.credentials:
            if credential not in vault.credentials:
                raise _bad(f'binding "{binding.name}" references unknown credential "{credential}"')
    try:
        check_conflicts(vault.bindings)
    except ApiPolicyError as error:
        raise _bad(str(error)) from None
