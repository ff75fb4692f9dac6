"""The two ways to speak to vaultd: a worker's channel, and the socket of the administrator, serve and hostd.

- A worker's channel was bound to one sandbox and generation when it was made; nothing sent on it names either.
- A lease ends by time, by revocation, and with the channel it came on: `VaultClient.current` knows all three, and the
  holder asks it before each use.
- Every failure to get a value is a `VaultError`; there is no answer without a value.

It keeps no leases itself and never writes a value anywhere.
"""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import wire
from vault.conditions import Amount
from vault.grants import Grant, GrantError, Refusal, RequestScope, SecretBinding
from vault.limits import ReferenceLimit
from vault.secret import Secret
from vault.stores.port import SecretInfo
from wire.api import vaultd
from wire.api.vaultd import GrantForm, ReleasePurpose, Value
from wire.frames import close_all
from wire.operations import Request
from wire.serving import handler

type OnRevoke = Callable[[frozenset[str] | None], Awaitable[None]]
"""Called with the names whose leases ended, or None for all of them."""

RELEASE_TIMEOUT = 10.0
CHECK_TIMEOUT = 20.0
REKEY_TIMEOUT = 60.0


class VaultError(Exception):
    """No value or certificate can be had. Leaves: `ReleaseRefusedError`, `VaultUnavailableError`."""


class ReleaseRefusedError(VaultError):
    """vaultd answered no; `code` is stable (`not_granted`, `not_bound`, `audit_unavailable`, `rate_limited`...)."""

    def __init__(self, code: wire.Code, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.reason = message


class VaultUnavailableError(VaultError):
    """vaultd did not answer, or the channel has ended."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A secret a worker may use until `expires` (`time.monotonic()`), within `scope`.

    `former` are the values before it that its host may still send back; they are looked for and never sent.
    """

    secret: str
    value: Secret
    expires: float
    scope: RequestScope
    epoch: int = field(repr=False, default=0)
    former: tuple[Secret, ...] = ()
    permits: Amount = field(default_factory=Amount)
    """How many requests may carry the secret under this lease, and how many bytes they may have. The holder counts."""

    def check(self, method: str | None, path: str | None) -> Refusal | None:
        """Say why the secret must not go into this request, None if it may; `path` is raw and without its query.

        A login has no method and no path. A secret that is limited to some is refused for it.
        """
        return self.scope.check(method, path)


@dataclass(frozen=True, slots=True)
class WorkerAuthority:
    """A worker's own certificate authority: PEM texts; `chain_pem` is the intermediate and then the root."""

    certificate_pem: str
    chain_pem: str
    key_pem: Secret


class VaultClient:
    """The worker's end of its channel."""

    def __init__(self, sock: socket.socket, on_revoke: OnRevoke | None = None) -> None:
        self._wire = wire.Client(sock, handler(vaultd.WORKER, self._revoked), gives=wire.NARROW)
        self._on_revoke = on_revoke
        self._epochs: dict[str, int] = {}
        self._epoch_of_all = 0

    @classmethod
    def from_fd(cls, fd: int, on_revoke: OnRevoke | None = None) -> Self:
        """Take over the inherited descriptor `fd` and start reading; needs a running loop."""
        client = cls(socket.socket(fileno=fd), on_revoke)
        client.start()
        return client

    def start(self) -> None:
        """Begin to read; call once, inside a running loop."""
        self._wire.start()

    @property
    def closed(self) -> asyncio.Event:
        """Set once the channel has ended: every lease is over then, and nothing more can be had."""
        return self._wire.closed

    async def close(self) -> None:
        """End the channel."""
        await self._wire.close()

    async def intermediate(self) -> WorkerAuthority:
        """Have a new certificate authority issued, below the root of this sandbox's lineage.

        Raises:
            VaultError: none was issued.
        """
        issued = await self._ask(vaultd.Intermediate())
        return WorkerAuthority(issued.certificate_pem, issued.chain_pem, Secret(issued.key_pem.text))

    async def release(
        self,
        secret: str,
        host: str,
        port: int,
        scheme: str,
        *,
        method: str | None = None,
        path: str | None = None,
        purpose: ReleasePurpose | None = None,
        size: int | None = None,
    ) -> Lease:
        """Have a secret released for one destination; on return its release is on disk in the audit log.

        Args:
            size: the bytes of the request it is for; None: unknown.
            method, path: the request it is for. A secret that its owner bound to methods or paths is released only
                when they are given and match; `Lease.check` must then be asked again for each further request.
            purpose: what it is released for, if not for a request.

        Raises:
            VaultError: the secret was not released.
        """
        for _ in range(3):
            epoch = self._epoch(secret)
            asked = time.monotonic()
            released = await self._ask(vaultd.Release(secret, host, port, scheme, method, path, purpose, size))
            if epoch != self._epoch(secret):
                continue  # revoked while the answer was under way: this value may be the old one
            try:
                scope = RequestScope.of(released.scope)
            except GrantError:
                raise VaultUnavailableError("vaultd answered with a scope that cannot be") from None
            former = tuple(Secret(value.text) for value in released.former)
            expires = asked + released.lease_seconds
            permits = Amount(released.uses, released.sent)
            return Lease(secret, Secret(released.value.text), expires, scope, epoch, former, permits)
        raise VaultUnavailableError("the secret kept changing while it was released")

    def current(self, lease: Lease) -> bool:
        """Tell whether `lease` may still be used: not expired, not revoked, and its channel is alive."""
        return (
            not self._wire.closed.is_set()
            and time.monotonic() < lease.expires
            and lease.epoch == self._epoch(lease.secret)
        )

    def _epoch(self, secret: str) -> int:
        return self._epoch_of_all + self._epochs.get(secret, 0)

    async def _ask[Answer](self, request: Request[Answer]) -> Answer:
        try:
            return await self._wire.ask(request, timeout=RELEASE_TIMEOUT)
        except wire.RemoteError as error:
            raise ReleaseRefusedError(error.code, error.message) from None
        except (ConnectionError, TimeoutError, wire.FrameError) as error:
            raise VaultUnavailableError(type(error).__name__) from None

    async def _revoked(self, _client: wire.Client, request: vaultd.Revoke, fds: list[int]) -> None:
        close_all(fds)
        if request.secrets is None:
            revoked: frozenset[str] | None = None
            self._epoch_of_all += 1
        else:
            revoked = frozenset(request.secrets)
            for name in revoked:
                self._epochs[name] = self._epochs.get(name, 0) + 1
        if self._on_revoke is not None:
            await self._on_revoke(revoked)


class AdminClient(wire.Client):
    """The client of vaultd's own socket; `await AdminClient.connect(path, uid)`.

    Which calls are answered depends on the uid of the caller: uid 0 all of them, serve those about sandboxes.

    All raise `wire.RemoteError` with vaultd's code, `ConnectionError` or `TimeoutError`.
    """

    async def put(self, name: str, value: Secret, binding: SecretBinding) -> None:
        """Store a new secret; an existing name is refused (`exists`)."""
        await self.ask(vaultd.Put(name, Value(value.reveal()), binding.form))

    async def list_secrets(self) -> tuple[SecretInfo, ...]:
        """What may be known of all secrets; never a value."""
        return tuple(map(SecretInfo.of, (await self.ask(vaultd.List())).secrets))

    async def listed(self) -> vaultd.Listed:
        """The stored secrets, their uses, and the freezes in force."""
        return await self.ask(vaultd.List())

    async def reset(self, name: str) -> None:
        """Count the uses of a secret from zero again."""
        await self.ask(vaultd.Reset(name))

    async def limit(self, limit: ReferenceLimit) -> vaultd.Revoked:
        """Put a limit of references in force, in place of the one with the same pattern; end their leases."""
        return await self.ask(vaultd.Limit(limit.form))

    async def unlimit(self, pattern: str) -> None:
        """End a limit of references."""
        await self.ask(vaultd.Unlimit(pattern))

    async def revoke_all(self, sandbox: str | None = None, secret: str | None = None) -> vaultd.Revoked:
        """End the leases of all workers, or those of a sandbox's worker, or those of one secret."""
        return await self.ask(vaultd.RevokeAll(sandbox, secret))

    async def freeze(self, sandbox: str | None = None, secret: str | None = None) -> vaultd.Revoked:
        """Release no secret until `unfreeze`, or those of a sandbox, or one secret; and end such leases."""
        return await self.ask(vaultd.FreezeSecrets(sandbox, secret))

    async def unfreeze(self, sandbox: str | None = None, secret: str | None = None) -> None:
        """End the freeze that was begun with the same values."""
        await self.ask(vaultd.UnfreezeSecrets(sandbox, secret))

    async def check(self, reference: str) -> vaultd.Checked:
        """Read a reference to a backend's secret; its value is not returned."""
        return await self.ask(vaultd.CheckReference(reference), timeout=CHECK_TIMEOUT)

    async def probe(self, reference: str) -> None:
        """Say whether a backend has a secret, without making one; refused with the reason."""
        await self.ask(vaultd.ProbeReference(reference), timeout=CHECK_TIMEOUT)

    async def backends(self) -> tuple[vaultd.BackendLine, ...]:
        """The configured backends, with their problems."""
        return (await self.ask(vaultd.ListBackends(), timeout=CHECK_TIMEOUT)).backends

    async def rotate(self, name: str, value: Secret) -> int:
        """Replace a value, revoke its leases, return the new version."""
        return (await self.ask(vaultd.Rotate(name, Value(value.reveal())))).version

    async def delete(self, name: str) -> None:
        """Delete a secret and revoke its leases."""
        await self.ask(vaultd.Delete(name))

    async def rekey(self, credentials: Mapping[str, int] | None = None) -> None:
        """Have everything sealed with the successor of the master key; refused with `master_key`.

        Args:
            credentials: descriptors of PIN and credential, by the source of wrapped keys.
        """
        passed = credentials or {}
        await self.ask(vaultd.Rekey(tuple(passed)), tuple(passed.values()), timeout=REKEY_TIMEOUT)

    async def open_sandbox(
        self,
        sandbox: str,
        lineage: str,
        grants: Sequence[Grant] = (),
        inline: Mapping[str, Secret] | None = None,
        bounds: Sequence[Grant] | None = None,
        names: Sequence[str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Register a sandbox (`wire.api.vaultd.OpenSandbox`); returns its root certificate (PEM)."""
        return (
            await self.ask(
                vaultd.OpenSandbox(
                    sandbox,
                    lineage,
                    _forms(grants),
                    _values(inline or {}),
                    _some(bounds),
                    _texts(names),
                    dict(metadata or {}),
                )
            )
        ).root_pem

    async def regrant(
        self,
        sandbox: str,
        grants: Sequence[Grant],
        inline: Mapping[str, Secret] | None = None,
        keep: Sequence[str] | None = None,
        bounds: Sequence[Grant] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Replace a sandbox's grants and inline secrets (`wire.api.vaultd.Regrant`); ended ones are revoked."""
        values = None if inline is None else _values(inline)
        await self.ask(vaultd.Regrant(sandbox, _forms(grants), values, _texts(keep), _some(bounds), _texts(names)))

    async def narrow(
        self, sandbox: str, grants: Sequence[Grant], keep: Sequence[str] | None, bounds: Sequence[Grant] | None
    ) -> None:
        """Take grants and inline secrets away (`wire.api.vaultd.Narrow`)."""
        await self.ask(vaultd.Narrow(sandbox, _forms(grants), _texts(keep), _some(bounds)))

    async def close_sandbox(self, sandbox: str) -> None:
        """Forget everything of a sandbox; succeeds if it is not known."""
        await self.ask(vaultd.CloseSandbox(sandbox))

    async def attach(self, sandbox: str, generation: int, fd: int, images: Sequence[str] | None = None) -> None:
        """Hand vaultd one end of a socket pair as the channel of a sandbox's worker; `fd` stays the caller's.

        `images` are name and id of the sandbox's image; None: as before.
        """
        await self.ask(vaultd.Attach(sandbox, generation, _texts(images)), (fd,))


def _forms(grants: Sequence[Grant]) -> tuple[GrantForm, ...]:
    return tuple(grant.form for grant in grants)


def _some(grants: Sequence[Grant] | None) -> tuple[GrantForm, ...] | None:
    return None if grants is None else _forms(grants)


def _texts(texts: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if texts is None else tuple(texts)


def _values(inline: Mapping[str, Secret]) -> dict[str, Value]:
    return {name: Value(value.reveal()) for name, value in inline.items()}
