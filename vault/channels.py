"""The workers' channels: what a worker may ask, in which order a secret is released, and how a lease is called back.

The order of a release (invariant I5), each step only after the former:
1. the rate limit and the decision (`Custody.decide`); a denial is audited and answered;
2. the source of the secret has a valid value (`Sources.obtain`): only this step waits for a backend;
3. the record `secret.release` is on auditd's disk;
4. the decision is taken again, because the world may have changed meanwhile, and the value is read, if it is still
   valid (`Sources.current`); the uses that the lease permits are counted on disk, if the secret is limited;
5. the value leaves, to the channel that asked, and only there. Its lease ends before the value does.
Nothing can happen between steps 4 and 5: a later `revoke` follows the value on the same stream and finds the lease.

- Without an audit record nothing is released: not a secret, not an intermediate.
- A channel belongs to the sandbox and generation it was attached for; no message on it can change that.
- A revocation is answered once the worker has dropped the lease and aborted the flows that used it. A worker that has
  not answered within `REVOKE_TIMEOUT` (a change of the secret, or an operator's call: `URGENT_TIMEOUT`) loses its
  channel, and with it all its leases.
"""

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

import wire
from audit.client import AuditUnavailable
from policy.references import is_reference
from vault.conditions import Amount
from vault.custody import Consent, Custody, CustodyError
from vault.freeze import Extent
from vault.grants import Grant, GrantError, Refusal
from vault.sources import Sources
from vault.stores.port import StoreError
from wire.api import vaultd
from wire.api.vaultd import IssuedAuthority, Released, ReleasePurpose, Revoked, Value
from wire.frames import close_all
from wire.patience import Patience
from wire.serving import handler

REVOKE_TIMEOUT = 5.0
URGENT_TIMEOUT = 0.8
"""The limit where the secret itself ends: rotated, deleted, revoked, frozen, or withdrawn by its backend. With the rest
of the call it takes effect within a second."""
RELEASES = (20.0, 200.0)  # a second, and at once: leases make more than a few a minute unusual
INTERMEDIATES = (0.1, 8.0)

_log = logging.getLogger(__name__)

type Asked = vaultd.Intermediate | vaultd.Release
type Monotonic = Callable[[], float]


class Audit(Protocol):
    """The part of `audit.client.AuditClient` that vaultd uses."""

    async def accept(self, kind: str, decision: str, *, durable: bool = False, **fields: object) -> int:
        """Return once the record is accepted; raise AuditUnavailable."""
        ...

    def note(self, kind: str, decision: str = ..., **fields: object) -> None:
        """Queue an outcome."""
        ...


class Bucket:
    """A token bucket: `rate` a second, `burst` at once."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now

    def take(self, now: float) -> bool:
        """Take one token if there is one."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass(eq=False, slots=True)
class Channel:
    """One attached worker; `leases` has the secrets that were released to it and not called back since.

    Also one whose lease is over: a flow can outlive the lease under which it sent the secret.
    """

    sandbox: str
    generation: int
    releases: Bucket
    intermediates: Bucket
    leases: set[str] = field(default_factory=set)
    connection: wire.Client | None = None


class Channels:
    """All workers' channels, at most one for each sandbox."""

    def __init__(self, custody: Custody, sources: Sources, audit: Audit, monotonic: Monotonic = time.monotonic) -> None:
        self._custody = custody
        self._sources = sources
        self._audit = audit
        self._now = monotonic
        self._channels: dict[str, Channel] = {}

    async def attach(
        self, sandbox: str, generation: int, sock: socket.socket, images: Collection[str] | None = None
    ) -> None:
        """Serve `sock` as the channel of a sandbox's worker, in place of the one before; takes the socket over.

        Args:
            images: name and id of the image that the sandbox was started from; None: as before.

        Raises:
            CustodyError: unknown_sandbox, stale_generation.
        """
        try:
            self._custody.advance(sandbox, generation, images)
        except BaseException:
            sock.close()
            raise
        now = self._now()
        former = self._channels.get(sandbox)
        if former is not None and former.generation == generation:  # a new channel is no new allowance
            channel = Channel(sandbox, generation, former.releases, former.intermediates)
        else:
            channel = Channel(sandbox, generation, Bucket(*RELEASES, now), Bucket(*INTERMEDIATES, now))

        async def handle(_connection: wire.Client, request: Asked, fds: list[int]) -> IssuedAuthority | Released:
            close_all(fds)
            return await self.answer(channel, request)

        self._channels[sandbox] = channel  # from here on the former one is refused, even while it is being closed
        channel.connection = wire.Client(sock, handler(vaultd.CHANNEL, handle), takes=wire.NARROW)
        channel.connection.start()
        if former is not None and former.connection is not None:
            await former.connection.close()

    async def answer(self, channel: Channel, request: Asked) -> IssuedAuthority | Released:
        """Answer one request of a worker.

        Raises:
            wire.RequestError: it is refused, or a newer channel has replaced this one.
        """
        self._check_current(channel)
        match request:
            case vaultd.Intermediate():
                return await self._intermediate(channel)
            case vaultd.Release():
                return await self._release(channel, request)

    async def detach(self, sandbox: str) -> None:
        """Revoke all leases of a sandbox's worker and end its channel."""
        channel = self._channels.pop(sandbox, None)
        if channel is not None:
            await self._push(channel, None)
            if channel.connection is not None:
                await channel.connection.close()

    async def revoke(self, sandbox: str, secrets: Collection[str] | None, seconds: float | None = None) -> None:
        """Call back the leases that a sandbox's worker has of `secrets` (None: all)."""
        channel = self._channels.get(sandbox)
        if channel is None:
            return
        names = None if secrets is None else sorted(set(secrets) & channel.leases)
        if names is not None and not names:
            return
        channel.leases.difference_update(list(channel.leases) if names is None else names)
        await self._push(channel, names, seconds)

    async def revoke_everywhere(self, secret: str, sandboxes: Collection[str]) -> None:
        """Call back one secret from the workers of `sandboxes`; returns when each has dropped it or was cut off."""
        await asyncio.gather(*(self.revoke(sandbox, (secret,), URGENT_TIMEOUT) for sandbox in sandboxes))

    async def end_leases(self, extent: Extent) -> Revoked:
        """Call back what an operator ends, from all workers at once, whether or not a lease of theirs is known."""
        names = None if extent.secret is None else [extent.secret]
        meant = [one for one in self._channels.values() if extent.sandbox in (None, one.sandbox)]
        for channel in meant:
            channel.leases.difference_update(list(channel.leases) if names is None else names)
        confirmed = await asyncio.gather(*(self._push(channel, names, URGENT_TIMEOUT) for channel in meant))
        return Revoked(sum(confirmed), len(confirmed) - sum(confirmed))

    async def end_references(self, chosen: Callable[[str], bool]) -> Revoked:
        """Call back the chosen references from all workers that had them released."""
        meant = {
            channel: sorted(name for name in channel.leases if is_reference(name) and chosen(name))
            for channel in self._channels.values()
        }
        pushes = []
        for channel, names in meant.items():
            if names:
                channel.leases.difference_update(names)
                pushes.append(self._push(channel, names, URGENT_TIMEOUT))
        confirmed = await asyncio.gather(*pushes)
        return Revoked(sum(confirmed), len(confirmed) - sum(confirmed))

    async def close(self) -> None:
        """End all channels."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            if channel.connection is not None:
                await channel.connection.close()

    async def _push(self, channel: Channel, names: list[str] | None, seconds: float | None = None) -> bool:
        """Call leases back; return whether none of them is in use now: the worker says so, or its channel has ended."""
        if channel.connection is None or channel.connection.closed.is_set():
            return True
        try:
            async with Patience(REVOKE_TIMEOUT if seconds is None else seconds):  # whatever else it sends meanwhile
                await channel.connection.ask(vaultd.Revoke(None if names is None else tuple(names)), timeout=None)
        except (ConnectionError, TimeoutError, wire.RemoteError):
            _log.warning("the worker of %s did not confirm a revocation: its channel is closed", channel.sandbox)
            await channel.connection.close()
            return False
        return True

    def _check_current(self, channel: Channel) -> None:
        if self._channels.get(channel.sandbox) is not channel:
            raise wire.RequestError(wire.Code.STALE_GENERATION, "this channel has been replaced")

    async def _intermediate(self, channel: Channel) -> IssuedAuthority:
        if not channel.intermediates.take(self._now()):
            raise wire.RequestError(wire.Code.RATE_LIMITED, "too many intermediates")
        await self._accept("vault.intermediate", "allow", channel, {})
        self._check_current(channel)
        try:
            issued = self._custody.issue(channel.sandbox)
        except CustodyError as error:
            raise wire.RequestError(error.code, str(error)) from None
        return IssuedAuthority(issued.certificate_pem, issued.chain_pem, Value(issued.key_pem.reveal()))

    async def _release(self, channel: Channel, request: vaultd.Release) -> Released:
        method, path, scrub = request.method, request.path, request.purpose is ReleasePurpose.SCRUB
        try:
            wanted = Grant.make(request.secret, request.host, request.port, request.scheme)
            if wanted.wildcard:
                raise GrantError("a release is for one exact host")
        except GrantError as error:
            self._audit.note(
                "secret.release", "deny", **_owner_fields(channel), code=wire.Code.INVALID, reason=str(error)
            )
            raise wire.RequestError(wire.Code.INVALID, str(error)) from None
        about: dict[str, Any] = {**wanted.to_json(), "scheme": str(wanted.scheme), "method": method, "path": path}
        if scrub:
            about["action"] = str(ReleasePurpose.SCRUB)
        if not channel.releases.take(self._now()):
            self._audit.note("secret.release", "deny", **_owner_fields(channel), **about, code=wire.Code.RATE_LIMITED)
            raise wire.RequestError(wire.Code.RATE_LIMITED, "too many releases")
        size = request.size
        decision = self._custody.decide(channel.sandbox, wanted, method, path, size=size, scrub=scrub)
        if isinstance(decision, Consent):
            try:
                await self._sources.obtain(channel.sandbox, wanted.secret)
            except StoreError as error:
                decision = _no_value(wanted.secret, error)
        match decision:
            case Refusal(code, reason):
                await self._accept("secret.release", "deny", channel, {**about, "code": code, "reason": reason})
                raise wire.RequestError(code, reason)
            case Consent(lease, _):
                seconds = max(1, math.floor(lease.total_seconds()))
                await self._accept(
                    "secret.release", "allow", channel, {**about, "lease_seconds": seconds}, durable=True
                )
        # Nothing below may await: see the module docstring.
        refused: Refusal | None = None
        match self._custody.decide(channel.sandbox, wanted, method, path, size=size, scrub=scrub):
            case Refusal() as refusal:
                refused = refusal
            case Consent() as consent if self._channels.get(channel.sandbox) is channel:
                try:
                    current = self._sources.current(channel.sandbox, wanted)
                    permitted = Amount() if scrub else self._custody.take(channel.sandbox, wanted, size)
                except StoreError as error:
                    refused = _no_value(wanted.secret, error)
                except OSError as error:
                    refused = Refusal(wire.Code.STORAGE, f"its use cannot be counted: {error.strerror}")
                else:
                    seconds = math.floor(max(0.0, min(seconds, consent.lease.total_seconds(), current.seconds)))
                    channel.leases.add(wanted.secret)
                    former = tuple(Value(one.reveal()) for one in current.former)
                    value, scope = Value(current.value.reveal()), consent.scope.form
                    return Released(value, former, seconds, scope, permitted.uses, permitted.sent)
            case Consent():
                refused = Refusal(wire.Code.STALE_GENERATION, "this channel has been replaced")
        self._audit.note(
            "secret.release", "deny", **_owner_fields(channel), **about, code=refused.code, reason=refused.reason
        )
        raise wire.RequestError(refused.code, refused.reason)

    async def _accept(
        self, kind: str, decision: str, channel: Channel, fields: dict[str, Any], *, durable: bool = False
    ) -> None:
        try:
            await self._audit.accept(kind, decision, durable=durable, **_owner_fields(channel), **fields)
        except AuditUnavailable:
            raise wire.RequestError(wire.Code.AUDIT_UNAVAILABLE, "the audit log did not accept the record") from None


def _no_value(secret: str, error: StoreError) -> Refusal:
    return Refusal(error.code, f"{secret} has no value; for the operator: {error}")


def _owner_fields(channel: Channel) -> dict[str, Any]:
    return {"sandbox": channel.sandbox, "target_generation": channel.generation}
