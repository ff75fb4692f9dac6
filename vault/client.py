"""The two ways to speak to vaultd: a worker's channel, and the socket of the administrator, serve and hostd.

- A worker's channel was bound to one sandbox and generation when it was made; nothing sent on it names either.
- A lease ends by time, by revocation, and with the channel it came on: `VaultClient.current` knows all three, and the
  holder asks it before each use.
- Every failure to get a value is a `VaultError`; there is no answer without a value.

It keeps no leases itself and never writes a value anywhere.
"""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import wire
from vault.grants import Grant, Refusal, RequestScope, SecretBinding
from vault.secret import Secret

type OnRevoke = Callable[[frozenset[str] | None], Awaitable[None]]
"""Called with the names whose leases ended, or None for all of them."""

RELEASE_TIMEOUT = 10.0


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

    def check(self, method: str, path: str) -> Refusal | None:
        """Say why the secret must not go into this request, None if it may; `path` is raw and without its query."""
        return self.scope.check(method, path)


@dataclass(frozen=True, slots=True)
class Intermediate:
    """A worker's own certificate authority: PEM texts; `chain_pem` is the intermediate and then the root."""

    certificate_pem: str
    chain_pem: str
    key_pem: Secret


class VaultClient:
    """The worker's end of its channel."""

    def __init__(self, sock: socket.socket, on_revoke: OnRevoke | None = None) -> None:
        self._wire = wire.Client(sock, self._handle, gives=wire.NARROW)
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

    async def intermediate(self) -> Intermediate:
        """Have a new certificate authority issued, below the root of this sandbox's lineage.

        Raises:
            VaultError: none was issued.
        """
        answer = await self._call("intermediate")
        return Intermediate(
            _text(answer, "certificate_pem"), _text(answer, "chain_pem"), Secret(_text(answer, "key_pem"))
        )

    async def release(
        self,
        secret: str,
        host: str,
        port: int,
        scheme: str,
        *,
        method: str | None = None,
        path: str | None = None,
        purpose: str | None = None,
    ) -> Lease:
        """Have a secret released for one destination; on return its release is on disk in the audit log.

        Args:
            method, path: the request it is for. A secret that its owner bound to methods or paths is released only
                when they are given and match; `Lease.check` must then be asked again for each further request.
            purpose: `scrub` if the value is looked for in responses and sent in no request; methods and paths do not
                matter then.

        Raises:
            VaultError: the secret was not released.
        """
        for _ in range(3):
            epoch = self._epoch(secret)
            asked = time.monotonic()
            about = {"secret": secret, "host": host, "port": port, "scheme": scheme}
            if purpose is not None:
                about["purpose"] = purpose
            answer = await self._call("release", **about, method=method, path=path)
            if epoch != self._epoch(secret):
                continue  # revoked while the answer was under way: this value may be the old one
            seconds = answer.get("lease_seconds")
            if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds <= 300:
                raise VaultUnavailableError("vaultd answered without a valid lease time")
            scope = RequestScope.from_json(answer.get("scope"))
            return Lease(secret, Secret(_text(answer, "value")), asked + seconds, scope, epoch, _former(answer))
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

    async def _call(self, op: str, **parameters: Any) -> wire.Message:
        try:
            return await self._wire.call(op, (), RELEASE_TIMEOUT, **parameters)
        except wire.RemoteError as error:
            raise ReleaseRefusedError(error.code, error.message) from None
        except (ConnectionError, TimeoutError, wire.FrameError) as error:
            raise VaultUnavailableError(type(error).__name__) from None

    async def _handle(self, _client: wire.Client, op: str, parameters: wire.Message, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if op != "revoke":
            raise wire.RequestError(wire.Code.UNKNOWN_OP, "a worker only answers revoke")
        match parameters.get("secrets"):
            case list() as names:
                revoked: frozenset[str] | None = frozenset(str(name) for name in names)
                for name in revoked or ():
                    self._epochs[name] = self._epochs.get(name, 0) + 1
            case _:  # null, and anything that cannot be read: all of them
                revoked = None
                self._epoch_of_all += 1
        if self._on_revoke is not None:
            await self._on_revoke(revoked)


class AdminClient(wire.Client):
    """The client of vaultd's own socket; `await AdminClient.connect(path, uid)`.

    Which calls are answered depends on the uid of the caller: uid 0 all of them, serve those about sandboxes and `has`.

    All raise `wire.RemoteError` with vaultd's code, `ConnectionError` or `TimeoutError`.
    """

    async def put(self, name: str, value: Secret, binding: SecretBinding) -> None:
        """Store a new secret; an existing name is refused (`exists`)."""
        await self.call("put", name=name, value=value.reveal(), **binding.to_json())

    async def list_secrets(self) -> list[dict[str, Any]]:
        """Metadata of all secrets: name, version, created, updated and the binding; never a value."""
        secrets = (await self.call("list")).get("secrets", [])
        return list(secrets)

    async def rotate(self, name: str, value: Secret) -> int:
        """Replace a value, revoke its leases, return the new version."""
        return int((await self.call("rotate", name=name, value=value.reveal()))["version"])

    async def delete(self, name: str) -> None:
        """Delete a secret and revoke its leases."""
        await self.call("delete", name=name)

    async def rekey(self) -> None:
        """Have everything sealed with the successor of the master key; refused with `master_key`."""
        await self.call("rekey")

    async def has(self, name: str) -> bool:
        """Tell whether a secret of this name is stored."""
        return bool((await self.call("has", name=name))["exists"])

    async def open_sandbox(
        self,
        sandbox: str,
        lineage: str,
        grants: Sequence[Grant] = (),
        inline: Mapping[str, Secret] | None = None,
        bounds: Sequence[Grant] | None = None,
        names: Sequence[str] | None = None,
    ) -> str:
        """Register a sandbox; returns its root certificate (PEM). Refused with `unknown_secret` or `not_bound`.

        Args:
            bounds: where its inline secrets may ever be granted; None: where `grants` has them.
            names: hosts (or `*.suffix`) that its worker may sign for; None: any.
        """
        answer = await self.call(
            "open_sandbox",
            sandbox=sandbox,
            lineage=lineage,
            grants=[grant.to_json() for grant in grants],
            inline=_inline(inline or {}),
            bounds=_bounds(bounds),
            names=None if names is None else list(names),
        )
        return _text(answer, "root_pem")

    async def regrant(
        self,
        sandbox: str,
        grants: Sequence[Grant],
        inline: Mapping[str, Secret] | None = None,
        keep: Sequence[str] | None = None,
        bounds: Sequence[Grant] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Replace a sandbox's grants and inline secrets; ended ones are revoked.

        Its inline secrets are `inline` then, and those of the former ones that `keep` names (`unknown_secret` if there
        is no such). With neither, they stay as they are.

        Args:
            bounds: where its inline secrets may be granted; `not_bound` if `grants` goes beyond. A secret in `inline`
                gets them all, another one keeps those that it had. None: those of `grants`, and as before.
            names: hosts (or `*.suffix`) that its worker's next authority may sign for; None: as before.
        """
        await self.call(
            "regrant",
            sandbox=sandbox,
            grants=[grant.to_json() for grant in grants],
            inline=None if inline is None else _inline(inline),
            keep=None if keep is None else list(keep),
            bounds=_bounds(bounds),
            names=None if names is None else list(names),
        )

    async def close_sandbox(self, sandbox: str) -> None:
        """Forget everything of a sandbox; succeeds if it is not known."""
        await self.call("close_sandbox", sandbox=sandbox)

    async def attach(self, sandbox: str, generation: int, fd: int) -> None:
        """Hand vaultd one end of a socket pair as the channel of a sandbox's worker; `fd` stays the caller's."""
        await self.call("attach", (fd,), sandbox=sandbox, generation=generation)


def _bounds(bounds: Sequence[Grant] | None) -> list[dict[str, Any]] | None:
    return None if bounds is None else [bound.to_json() for bound in bounds]


def _inline(inline: Mapping[str, Secret]) -> dict[str, str]:
    return {name: value.reveal() for name, value in inline.items()}


def _former(answer: wire.Message) -> tuple[Secret, ...]:
    values = answer.get("former", [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise VaultUnavailableError("vaultd answered without former values")
    return tuple(map(Secret, values))


def _text(answer: wire.Message, key: str) -> str:
    value = answer.get(key)
    if not isinstance(value, str) or not value:
        raise VaultUnavailableError(f"vaultd answered without {key}")
    return value
