"""`vault://mount/path#field`: KV version 1 and 2, and secrets that Vault makes with a lease (databases, clouds).

- The mount tells what the secret is (`sys/internal/ui/mounts`), as Vault's own command asks.
- A value of KV is the same for every sandbox. It has no lease: see `vault.stores.backend.unleased`.
- A secret with a lease is made for one sandbox. All references of that sandbox to one path share one lease, so user
  name and password belong together. The lease is renewed when half of its time is over; when it cannot be renewed
  for half of its first time, another secret is made.
- `valid` never exceeds the lease, nor the token that the lease belongs to.
- A lease is revoked with the sandbox's last reference to it, and all leases at the end of the fetcher.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakValueDictionary

from policy.references import SecretReference
from vault.stores.backend import BackendValue, NoValueError, fit, unleased
from vault.stores.hvac.config import Auth, HashicorpServer
from vault.stores.hvac.login import Token, VaultLogin
from vault.stores.hvac.session import VaultAnswer
from vault.stores.supplied import Supplier
from wire.api.fetcher import MOST_SECONDS, Fault

MAX_LEASES: Final = 4096
_MOUNT_SECONDS: Final = 300.0
_MOST_MOUNTS: Final = 1024
_SAME_SECONDS: Final = 2.0
"""Reads of one KV secret within this time are one read: its fields, and other sandboxes."""

type _Key = tuple[str, str]
"""A path and a sandbox."""


@dataclass(frozen=True, slots=True)
class _Mount:
    path: str
    kind: str
    version: str
    until: float


@dataclass(frozen=True, slots=True)
class _Document:
    """A KV secret as it was read."""

    data: dict[str, Any] = field(repr=False)
    until: float


@dataclass(slots=True, eq=False)
class _Lease:
    id: str
    data: dict[str, Any] = field(repr=False)
    first: int
    expires: float
    token: Token
    renewable: bool
    users: set[SecretReference] = field(default_factory=set)

    def seconds(self, now: float) -> int:
        """The time for which the secret may be used."""
        return int(max(0.0, min(self.expires, self.token.expires) - now))


class HvacBackend:
    """See `vault.stores.backend.Backend`."""

    def __init__(self, server: HashicorpServer, supplier: Supplier, refresh: int) -> None:
        self._server = server
        self._login = VaultLogin(server, supplier)
        self._refresh = refresh
        self._mounts: dict[str, _Mount] = {}
        self._documents: dict[str, _Document] = {}
        self._leases: dict[_Key, _Lease] = {}
        self._locks: WeakValueDictionary[_Key, asyncio.Lock] = WeakValueDictionary()

    @property
    def about(self) -> str:
        """See `Backend`."""
        return f"{self._server.address}, {self._server.auth}"

    async def read(self, reference: SecretReference, sandbox: str) -> BackendValue:
        """See `Backend`."""
        mount = await self._permitted(reference)
        if mount.kind == "kv":
            return await self._kept(reference, mount)
        async with self._lock((reference.path, sandbox)):
            return await self._leased(reference, sandbox)

    async def probe(self, reference: SecretReference) -> None:
        """See `Backend`. Of a secret with a lease only the mount is known."""
        mount = await self._permitted(reference)
        if mount.kind == "kv":
            await self._kept(reference, mount)

    async def release(self, reference: SecretReference, sandbox: str) -> None:
        """See `Backend`."""
        self._documents.pop(reference.path, None)
        key = (reference.path, sandbox)
        async with self._lock(key):
            lease = self._leases.get(key)
            if lease is None or lease.users - {reference}:
                if lease is not None:
                    lease.users.discard(reference)
                return
            await self._revoke(lease)
            del self._leases[key]

    async def examine(self) -> None:
        """See `Backend`."""
        await self._login.health()

    async def close(self) -> None:
        """See `Backend`."""
        if self._server.auth is Auth.TOKEN:
            await asyncio.gather(*map(self._revoke, self._leases.values()), return_exceptions=True)
        self._leases.clear()
        await self._login.close()

    async def _permitted(self, reference: SecretReference) -> _Mount:
        if not self._server.permits(reference.path):
            raise NoValueError(Fault.UNCONFIGURED, "sallyport.vault.hashicorp.allowed does not have this path: add it")
        return await self._mount(reference.path)

    async def _kept(self, reference: SecretReference, mount: _Mount) -> BackendValue:
        async with self._lock((reference.path, "")):
            data = await self._document(reference.path, mount)
        return unleased(_text(data, reference), self._refresh)

    def _lock(self, key: _Key) -> asyncio.Lock:
        """Return the lock of a key, which exists while it is in use."""
        return self._locks.setdefault(key, asyncio.Lock())

    async def _mount(self, path: str) -> _Mount:
        now = time.monotonic()
        known = [each for each in self._mounts.values() if path.startswith(each.path) and each.until > now]
        if known:
            return max(known, key=lambda each: len(each.path))
        answer, _ = await self._login.ask("get", f"sys/internal/ui/mounts/{path}")
        _check(answer, path, self._server)
        found, kind, options = answer.data.get("path"), answer.data.get("type"), answer.data.get("options")
        if not isinstance(found, str) or not isinstance(kind, str) or not path.startswith(found):
            raise NoValueError(Fault.FAILED, "Vault does not say what is mounted there")
        version = options.get("version") if isinstance(options, dict) else None
        mount = _Mount(found, kind, version if isinstance(version, str) else "1", now + _MOUNT_SECONDS)
        self._mounts = {key: each for key, each in self._mounts.items() if each.until > now}
        if len(self._mounts) < _MOST_MOUNTS:
            self._mounts[found] = mount
        return mount

    async def _document(self, path: str, mount: _Mount) -> dict[str, Any]:
        now = time.monotonic()
        self._documents = {key: each for key, each in self._documents.items() if each.until > now}
        if path in self._documents:
            return self._documents[path].data
        second = mount.version == "2"
        asked = f"{mount.path}data/{path.removeprefix(mount.path)}" if second else path
        answer, _ = await self._login.ask("get", asked)
        _check(answer, asked, self._server)
        data = answer.data.get("data") if second else answer.data
        if not isinstance(data, dict):
            raise NoValueError(Fault.MISSING, f"Vault has deleted the newest version of {path}: write another one")
        self._documents[path] = _Document(data, time.monotonic() + _SAME_SECONDS)
        return data

    async def _leased(self, reference: SecretReference, sandbox: str) -> BackendValue:
        key = (reference.path, sandbox)
        lease = self._leases.get(key)
        if lease is not None and lease.seconds(time.monotonic()) * 2 < lease.first:
            lease = await self._renewed(lease)
        if lease is None:
            self._forget_ended()
            if len(self._leases) >= MAX_LEASES:
                raise NoValueError(Fault.BUSY, f"there are {MAX_LEASES} leases, the limit")
            users = self._leases[key].users if key in self._leases else set()
            asked = time.monotonic()
            answer, token = await self._login.ask("get", reference.path)
            _check(answer, reference.path, self._server)
            identity, duration = answer.body.get("lease_id"), answer.body.get("lease_duration")
            if not isinstance(identity, str) or not identity or type(duration) is not int or duration <= 0:
                return unleased(_text(answer.data, reference), self._refresh)
            renewable = answer.body.get("renewable") is True
            lease = _Lease(identity, answer.data, duration, asked + duration, token, renewable, users)
            self._leases[key] = lease
        lease.users.add(reference)
        left = min(MOST_SECONDS, lease.seconds(time.monotonic()))
        return BackendValue(fit(_text(lease.data, reference)), min(left, max(1, left // 2)), left, shared=False)

    async def _renewed(self, lease: _Lease) -> _Lease | None:
        """Renew a lease; None if another secret is needed."""
        if not lease.renewable:
            return None
        asked = time.monotonic()
        body = {"lease_id": lease.id, "increment": f"{lease.first}s"}
        answer, token = await self._login.ask("put", "sys/leases/renew", body)
        duration = answer.body.get("lease_duration")
        if answer.status != 200 or type(duration) is not int or duration * 2 < lease.first:
            return None
        lease.expires = asked + duration
        if token.text == lease.token.text:
            lease.token = token
        return lease if lease.seconds(time.monotonic()) * 2 >= lease.first else None

    async def _revoke(self, lease: _Lease) -> None:
        if lease.expires <= time.monotonic():
            return
        answer, _ = await self._login.ask("put", "sys/leases/revoke", {"lease_id": lease.id})
        if answer.status not in (200, 204, 400):  # 400: it does not exist any more
            raise NoValueError(
                Fault.DENIED, "Vault does not let Sallyport revoke: give its policy `update` on sys/leases/revoke"
            )

    def _forget_ended(self) -> None:
        now = time.monotonic()
        self._leases = {key: lease for key, lease in self._leases.items() if lease.expires > now}


def _check(answer: VaultAnswer, path: str, server: HashicorpServer) -> None:
    """Raise NoValueError for an answer without a secret."""
    if answer.status == 200:
        return
    if answer.status == 404:
        raise NoValueError(Fault.MISSING, f"Vault has nothing at {path}: write it, or correct the reference")
    if answer.status in (401, 403):
        raise NoValueError(
            Fault.DENIED,
            f"Vault does not let Sallyport read {path}: give its policy `read` there ({server.auth} login)",
        )
    raise NoValueError(Fault.FAILED, f"Vault answers {answer.status} for {path}: see its log")


def _text(data: dict[str, Any], reference: SecretReference) -> str:
    """Return the field, or the fields joined by a colon."""
    values = [data.get(name) for name in reference.fields]
    for name, value in zip(reference.fields, values, strict=True):
        if not isinstance(value, str):
            raise NoValueError(Fault.MISSING, f"the secret in Vault has no field {name} with a text")
    return ":".join(map(str, values))
