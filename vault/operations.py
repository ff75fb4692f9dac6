"""What vaultd answers on its socket, and to which caller.

- The kernel reports the uid of the caller: uid 0 may do everything, the other allowed uids (serve) only what concerns
  sandboxes.
- A change that gives more than before (a secret stored, replaced or granted) is recorded first, or does not happen.
  A change that takes away happens even without a log, and is recorded when that is possible.
- A check made before a record was awaited is made again after it.
- No error message or record holds a value.
"""

import asyncio
import base64
import json
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import wire
from audit.client import AuditUnavailable
from policy.references import SecretReference, is_reference
from vault.authority import ANY
from vault.channels import Audit, Channels
from vault.custody import Custody, CustodyError, SandboxState
from vault.freeze import Extent, TooManyFreezesError
from vault.grants import Grant, GrantError, Refusal, SecretBinding, check, host_pattern, inline_name, secret_name
from vault.keyring import MasterKeyError
from vault.limit_record import TooManyLimitsError
from vault.limits import ReferenceLimit, limit_pattern
from vault.readings import Readings
from vault.secret import Secret
from vault.stores.port import StoreError, check_value
from vault.wrapping.sources import WRAPPING, KeySource
from wire.api import vaultd
from wire.frames import close_all
from wire.operations import Message

_CHECK = "check"
"""The sandbox for which an operator's check reads a reference. No sandbox has this id."""


class VaultOperations:
    """Answers on vaultd's socket."""

    def __init__(
        self,
        custody: Custody,
        channels: Channels,
        readings: Readings,
        audit: Audit,
        rekey: Callable[[Mapping[KeySource, int]], Awaitable[None]],
        administrators: frozenset[int] = frozenset({0}),
    ) -> None:
        self._custody = custody
        self._store = custody.store
        self._channels = channels
        self._readings = readings
        self._audit = audit
        self._rekey = rekey
        self._rekeying = asyncio.Lock()
        self._administrators = administrators

    async def handle(self, connection: wire.Client, request: Message, fds: list[int]) -> object:
        """Answer one request of `wire.api.vaultd.CONTROL`; see `wire.serving.Handler`."""
        try:
            if not isinstance(request, vaultd.SANDBOX_REQUESTS) and connection.peer.uid not in self._administrators:
                raise wire.RequestError(wire.Code.FORBIDDEN, f"uid {connection.peer.uid} may not do this")
            return await self._answer(request, f"uid:{connection.peer.uid}", fds)
        except GrantError as error:
            raise wire.RequestError(wire.Code.INVALID, str(error)) from None
        except (StoreError, CustodyError) as error:
            raise wire.RequestError(error.code, str(error)) from None
        except MasterKeyError as error:
            raise wire.RequestError(wire.Code.MASTER_KEY, str(error)) from None
        except AuditUnavailable:
            raise wire.RequestError(wire.Code.AUDIT_UNAVAILABLE, "the audit log did not accept the record") from None
        except OSError as error:
            raise wire.RequestError(wire.Code.STORAGE, f"the vault's files: {error.strerror}") from None
        finally:
            close_all(fds)

    async def _answer(self, request: Message, actor: str, fds: list[int]) -> object:
        match request:
            case vaultd.List():
                return self._listed()
            case vaultd.Put():
                return await self._put(request, actor)
            case vaultd.Rotate():
                return await self._rotate(request, actor)
            case vaultd.Delete():
                await self._delete(request, actor)
            case vaultd.Reset():
                await self._reset(request, actor)
            case vaultd.Limit():
                return await self._limit(request, actor)
            case vaultd.Unlimit():
                await self._unlimit(request, actor)
            case vaultd.RevokeAll():
                return await self._revoke_all(request, actor)
            case vaultd.FreezeSecrets():
                return await self._freeze(request, actor)
            case vaultd.UnfreezeSecrets():
                await self._unfreeze(request, actor)
            case vaultd.Rekey():
                await self._reseal(request, actor, fds)
            case vaultd.OpenSandbox():
                return await self._open(request, actor)
            case vaultd.Regrant():
                await self._regrant(request, actor)
            case vaultd.Narrow():
                await self._narrow(request, actor)
            case vaultd.CloseSandbox():
                await self._close(request, actor)
            case vaultd.Attach():
                await self._attach(request, fds)
            case vaultd.Refer():
                await self._refer(request, actor)
            case vaultd.CheckReference():
                return await self._check_reference(request)
            case vaultd.ProbeReference():
                await self._readings.probe(_reference(request.reference))
            case vaultd.ListBackends():
                return await self._list_backends()
            case vaultd.WriteLogin():
                await self._write_login(request, actor, fds)
            case _:
                raise TypeError(f"{type(request).__name__} is no request of vaultd's socket")
        return None

    def _listed(self) -> vaultd.Listed:
        infos, custody = self._store.list_infos(), self._custody
        names = {info.name for info in infos if info.binding.limits.limited}
        names |= {name for name in custody.budgets.counted() if is_reference(name)}
        used = {name: custody.budgets.used(name) for name in sorted(names)}
        return vaultd.Listed(tuple(info.form for info in infos), used, custody.freezes.forms, custody.limits.forms)

    async def _put(self, request: vaultd.Put, actor: str) -> vaultd.Version:
        name, value = secret_name(request.name), Secret(request.value.text)
        binding = SecretBinding.of(request.binding)
        check_value(value, datetime.now(UTC))
        if self._has(name):
            raise wire.RequestError(wire.Code.EXISTS, "a secret already has this name; rotate or delete it")
        await self._audit.accept(
            "vault.put", "info", durable=True, secret=name, hosts=sorted(binding.hosts), actor=actor
        )
        if not self._has(name):
            self._custody.budgets.reset(name)  # what was counted for a deleted secret of this name
        return vaultd.Version(self._store.put(name, value, binding).version)

    async def _rotate(self, request: vaultd.Rotate, actor: str) -> vaultd.Version:
        name, value = secret_name(request.name), Secret(request.value.text)
        self._store.info(name)
        check_value(value, datetime.now(UTC))
        await self._audit.accept("vault.rotate", "info", durable=True, secret=name, actor=actor)
        info = self._store.rotate(name, value)
        await self._channels.revoke_everywhere(name, self._custody.users(name))
        return vaultd.Version(info.version)

    async def _delete(self, request: vaultd.Delete, actor: str) -> None:
        name = secret_name(request.name)
        self._store.delete(name)
        self._audit.note("vault.delete", "info", secret=name, actor=actor)
        await self._channels.revoke_everywhere(name, self._custody.users(name))

    async def _reset(self, request: vaultd.Reset, actor: str) -> None:
        name = request.name
        if not is_reference(name):
            self._store.info(secret_name(name))
        elif name not in self._custody.budgets.counted():
            raise wire.RequestError(wire.Code.UNKNOWN_SECRET, "no use of this reference is counted")
        await self._audit.accept("vault.reset", "info", durable=True, secret=name, actor=actor)
        self._custody.budgets.reset(name)

    async def _limit(self, request: vaultd.Limit, actor: str) -> vaultd.Revoked:
        limit, limits = ReferenceLimit.of(request.limit), self._custody.limits
        about = {"secret": limit.pattern, "hosts": sorted(limit.hosts or ()), "actor": actor}
        replaces = limit.pattern in limits
        if replaces:  # it can permit more than the former one
            await self._audit.accept("vault.limit", "info", durable=True, **about)
        try:
            limits.put(limit)
        except TooManyLimitsError as error:
            raise wire.RequestError(wire.Code.FULL, str(error)) from None
        if not replaces:
            self._audit.note("vault.limit", "info", **about)
        return await self._channels.end_references(limit.matches)

    async def _unlimit(self, request: vaultd.Unlimit, actor: str) -> None:
        pattern, limits = limit_pattern(request.pattern), self._custody.limits
        if pattern not in limits:
            raise wire.RequestError(wire.Code.INVALID, "there is no limit of exactly this pattern")
        await self._audit.accept("vault.unlimit", "info", durable=True, secret=pattern, actor=actor)
        limits.remove(pattern)

    async def _revoke_all(self, request: vaultd.RevokeAll, actor: str) -> vaultd.Revoked:
        extent = self._known_extent(request.sandbox, request.secret)
        self._audit.note("vault.revoke_all", "info", sandbox=extent.sandbox, secret=extent.secret, actor=actor)
        self._readings.withdraw(extent)
        return await self._channels.end_leases(extent)

    async def _freeze(self, request: vaultd.FreezeSecrets, actor: str) -> vaultd.Revoked:
        extent = self._known_extent(request.sandbox, request.secret)
        try:
            self._custody.freezes.begin(extent, datetime.now(UTC))
        except TooManyFreezesError as error:
            raise wire.RequestError(wire.Code.FULL, str(error)) from None
        self._audit.note("vault.freeze", "info", sandbox=extent.sandbox, secret=extent.secret, actor=actor)
        self._readings.withdraw(extent)
        revoked = await self._channels.end_leases(extent)
        self._custody.freezes.save()  # not earlier: a slow disk must not delay the workers
        return revoked

    async def _unfreeze(self, request: vaultd.UnfreezeSecrets, actor: str) -> None:
        extent = _extent(request.sandbox, request.secret)
        self._check_frozen(extent)
        about = {"sandbox": extent.sandbox, "secret": extent.secret, "actor": actor}
        await self._audit.accept("vault.unfreeze", "info", durable=True, **about)
        self._check_frozen(extent)
        self._custody.freezes.remove(extent)

    def _known_extent(self, sandbox: str | None, secret: str | None) -> Extent:
        """Return an extent; a name of nothing is refused, as it is probably misspelled."""
        extent = _extent(sandbox, secret)
        if sandbox is not None and not self._custody.known(sandbox):
            raise wire.RequestError(wire.Code.UNKNOWN_SANDBOX, "the sandbox is not open")
        if secret is not None and not self._custody.mentions(secret):
            raise wire.RequestError(wire.Code.UNKNOWN_SECRET, "no secret has this name, and no sandbox is granted it")
        return extent

    def _check_frozen(self, extent: Extent) -> None:
        if extent not in self._custody.freezes:
            raise wire.RequestError(wire.Code.INVALID, f"there is no freeze of exactly {extent}")

    async def _open(self, request: vaultd.OpenSandbox, actor: str) -> vaultd.Opened:
        planned = self._custody.plan(
            request.sandbox,
            request.lineage,
            _grants(request.grants),
            _inline(request.inline) or {},
            _bounds(request.bounds),
            _patterns(request.names),
            request.metadata,
        )
        await self._audit.accept("vault.open", "info", **_about(planned), lineage=planned.lineage, actor=actor)
        return vaultd.Opened(self._custody.open(planned))

    async def _regrant(self, request: vaultd.Regrant, actor: str) -> None:
        grants, inline, keep = _grants(request.grants), _inline(request.inline), _names(request.keep)
        bounds, patterns = _bounds(request.bounds), _patterns(request.names)
        wanted = (request.sandbox, grants, inline, keep, bounds, patterns, request.metadata)
        planned = self._custody.replan(*wanted)
        if self._custody.narrows(planned):
            self._audit.note("vault.regrant", "info", **_about(planned), actor=actor)
        else:
            await self._audit.accept("vault.regrant", "info", durable=True, **_about(planned), actor=actor)
            planned = self._custody.replan(*wanted)
        await self._replace(planned)

    async def _narrow(self, request: vaultd.Narrow, actor: str) -> None:
        planned = self._custody.narrowed(
            request.sandbox, _grants(request.grants), _names(request.keep), _bounds(request.bounds)
        )
        self._audit.note("vault.regrant", "info", **_about(planned), actor=actor)
        await self._replace(planned)

    async def _replace(self, planned: SandboxState) -> None:
        sandbox = planned.sandbox
        try:
            ended = self._custody.regrant(planned)
        except OSError:
            await self._channels.revoke(sandbox, None)
            raise
        await self._channels.revoke(sandbox, ended)

    async def _close(self, request: vaultd.CloseSandbox, actor: str) -> None:
        sandbox = request.sandbox
        known = self._custody.known(sandbox)
        try:
            self._custody.close(sandbox)
        finally:
            await self._channels.detach(sandbox)
        if known:
            self._audit.note("vault.close", "info", sandbox=sandbox, actor=actor)

    async def _reseal(self, request: vaultd.Rekey, actor: str, fds: list[int]) -> None:
        if len(fds) != len(request.credentials) or not set(request.credentials) <= set(WRAPPING):
            raise wire.RequestError(
                wire.Code.INVALID, "a change of the master key comes with one descriptor per source"
            )
        await self._audit.accept("vault.rekey", "info", durable=True, actor=actor)
        async with self._rekeying:  # a successor that was read before another change must not be applied after it
            await self._rekey({KeySource(each): fd for each, fd in zip(request.credentials, fds, strict=True)})

    async def _attach(self, request: vaultd.Attach, fds: list[int]) -> None:
        if len(fds) != 1 or not stat.S_ISSOCK(os.fstat(fds[0]).st_mode):
            raise wire.RequestError(wire.Code.INVALID, "attach comes with one socket")
        sock = socket.socket(fileno=fds.pop())
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
            sock.close()
            raise wire.RequestError(wire.Code.INVALID, "attach comes with one unix stream socket")
        await self._channels.attach(request.sandbox, request.generation, sock, request.images)

    async def _refer(self, request: vaultd.Refer, actor: str) -> None:
        uses, former = frozenset(_grants(request.uses)), self._custody.referred
        if uses == former:
            return
        about: dict[str, Any] = {"count": len(uses), "actor": actor}
        if former is not None and uses <= former:
            self._audit.note("vault.refer", "info", **about)
        else:
            try:
                await self._audit.accept("vault.refer", "info", durable=True, **about)
            except AuditUnavailable:
                await self._end_references(self._custody.refer(uses & (former or frozenset())))
                raise
        await self._end_references(self._custody.refer(uses))

    async def _end_references(self, names: frozenset[str]) -> None:
        """End the leases of references that lost a destination."""
        for name in names:
            await self._channels.revoke_everywhere(name, self._custody.users(name))

    async def _check_reference(self, request: vaultd.CheckReference) -> vaultd.Checked:
        return vaultd.Checked(*await self._readings.check(_reference(request.reference), _CHECK))

    async def _list_backends(self) -> vaultd.BackendLines:
        return vaultd.BackendLines(
            tuple(
                vaultd.BackendLine(state.name, state.about, "" if state.problem is None else state.problem.reason)
                for state in await self._readings.examine()
            )
        )

    async def _write_login(self, request: vaultd.WriteLogin, actor: str, fds: list[int]) -> None:
        if len(fds) != 1 or not stat.S_ISFIFO(os.fstat(fds[0]).st_mode):
            raise wire.RequestError(wire.Code.INVALID, "a login is written into one pipe")
        wanted = Grant.make(secret_name(request.secret), request.host, request.port, "https")
        about: dict[str, Any] = {**wanted.to_json(), "scheme": "https", "action": "login", "actor": actor}
        if refused := self._login_refusal(wanted):
            self._audit.note("secret.release", "deny", **about, code=refused.code, reason=refused.reason)
            raise wire.RequestError(refused.code, refused.reason)
        await self._audit.accept("secret.release", "allow", durable=True, **about)
        if refused := self._login_refusal(wanted):
            raise wire.RequestError(refused.code, refused.reason)
        login = registry_login(wanted.host, wanted.port, self._store.value(wanted.secret).reveal())
        if login is None:
            raise wire.RequestError(wire.Code.INVALID, "the secret is no login of the form user:password")
        os.set_blocking(fds[0], False)
        if os.write(fds[0], login) != len(login):
            raise wire.RequestError(wire.Code.TOO_LARGE, "the login does not fit into the pipe")

    def _login_refusal(self, wanted: Grant) -> Refusal | None:
        if (frozen := self._custody.freezes.refusal(None, wanted.secret)) is not None:
            return frozen
        binding = self._store.info(wanted.secret).binding
        return check(binding, wanted, datetime.now(UTC)) or binding.scope.check("GET", "/v2/")

    def _has(self, name: str) -> bool:
        try:
            self._store.info(name)
        except StoreError as error:
            return error.code != wire.Code.UNKNOWN_SECRET
        return True


def _extent(sandbox: str | None, secret: str | None) -> Extent:
    try:
        return Extent(sandbox, secret)
    except ValueError as error:
        raise wire.RequestError(wire.Code.INVALID, str(error)) from None


def _reference(text: str) -> str:
    try:
        return str(SecretReference.parse(text))
    except ValueError as error:
        raise wire.RequestError(wire.Code.INVALID, str(error)) from None


def registry_login(host: str, port: int, value: str) -> bytes | None:
    """Return a registry's login in the form of `auth.json`; None if `value` is not `user:password`."""
    user, colon, password = value.partition(":")
    if not (user and colon and password):
        return None
    name = host if port == 443 else f"{host}:{port}"
    return json.dumps({"auths": {name: {"auth": base64.b64encode(value.encode()).decode()}}}).encode()


def _grants(forms: Sequence[vaultd.GrantForm]) -> list[Grant]:
    return [Grant.of(form) for form in forms]


def _bounds(forms: Sequence[vaultd.GrantForm] | None) -> list[Grant] | None:
    return None if forms is None else _grants(forms)


def _patterns(names: Sequence[str] | None) -> list[str] | None:
    return None if names is None else [ANY if name == ANY else host_pattern(name) for name in names]


def _inline(values: Mapping[str, vaultd.Value] | None) -> dict[str, Secret] | None:
    return None if values is None else {inline_name(name): Secret(value.text) for name, value in values.items()}


def _names(names: Sequence[str] | None) -> list[str] | None:
    return None if names is None else [inline_name(name) for name in names]


def _about(state: SandboxState) -> dict[str, Any]:
    return {
        "sandbox": state.sandbox,
        "secrets": sorted({grant.secret for grant in state.grants}),
        "hosts": sorted({grant.host for grant in state.grants}),
        "count": len(state.grants),
    }
