"""Sandboxes from creation to removal.

A creation is a transaction: row `Pending` -> audit record -> vault -> hostd -> row `Running`. A step that fails undoes
the former ones; what cannot be undone at once stays as a row `Stopping` that the reaper works on until it is gone.

- Nothing is started that was not first written down: a crash leaves rows, never a sandbox nobody knows.
- A caller who goes away before the answer leaves nothing behind; one who waits too long is told `Pending` and an id.
- All writes to one sandbox are serial (`lock`); creations are bounded in number, launches in concurrency.
- The control plane's own changes are in the audit log before they happen; removal alone does not wait for it, since
  to refuse a removal would leave more running, not less.

It knows no HTTP; refusals are `ApiError`s because their codes are the contract's.
"""

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import wire
from lifecycle.auth import Tokens
from lifecycle.creation import Plan
from lifecycle.errors import ApiError, busy, invalid, unavailable, unknown_sandbox
from lifecycle.labels import patched
from lifecycle.peers import Auditd, Hostd, Unreachable, Vaultd
from lifecycle.policies import Compiled, Policies, Refused
from lifecycle.registry import Registry, Sandbox, State

_log = logging.getLogger(__name__)
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts of a gateway's configuration that are the same for all sandboxes."""

    upstream_roots: str = field(repr=False)
    dns_upstreams: tuple[str, ...] = ()
    allowed_addresses: tuple[str, ...] = ()
    host_addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    inside: str = "192.0.2.2"

    def configuration(self, sandbox: str, generation: int, compiled: Compiled) -> dict[str, Any]:
        """Return the GatewayConfig of one sandbox."""
        return {
            "sandbox": sandbox,
            "generation": generation,
            "policy": compiled.policy.to_json(),
            "upstream_roots": self.upstream_roots,
            "dns_upstreams": list(self.dns_upstreams),
            "allowed_addresses": list(self.allowed_addresses),
            "host_addresses": {host: list(addresses) for host, addresses in self.host_addresses.items()},
            "inside": self.inside,
            "limits": dict(self.limits),
        }


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much at once, and for how long a caller is kept waiting."""

    launches: int = 4
    pending: int = 128
    sandboxes: int = 1000
    answer_seconds: float = 20.0


class Creation:
    """One creation under way."""

    def __init__(self, sandbox: str, task: asyncio.Task[Sandbox]) -> None:
        self.sandbox = sandbox
        self.task = task
        self.answered = False
        self.abandoned = False


class Orchestrator:
    """Creates, changes and removes sandboxes."""

    def __init__(
        self,
        registry: Registry,
        hostd: Hostd,
        vaultd: Vaultd,
        auditd: Auditd,
        policies: Policies,
        tokens: Tokens,
        gateway: Gateway,
        bounds: Bounds,
        *,
        clock: Callable[[], float],
        new_id: Callable[[], str] = lambda: f"sbx-{secrets.token_hex(12)}",
    ) -> None:
        self.registry = registry
        self.hostd = hostd
        self.vaultd = vaultd
        self.auditd = auditd
        self.policies = policies
        self.gateway = gateway
        self.clock = clock
        self.expiry_changed: Callable[[], None] = lambda: None
        self.forget: list[Callable[[str], Awaitable[None]]] = []
        """Called with the id of each sandbox that is gone, to drop what is kept for it."""
        self._tokens = tokens
        self._bounds = bounds
        self._new_id = new_id
        self._launches = asyncio.Semaphore(bounds.launches)
        self._creations: dict[str, Creation] = {}
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- reading

    async def get(self, sandbox: str) -> Sandbox:
        """Return a sandbox.

        Raises:
            ApiError: 404.
        """
        row = await self.registry.get(sandbox) if _ID.fullmatch(sandbox) else None
        if row is None or self._is_over(row):
            raise unknown_sandbox(sandbox)
        return row

    def _is_over(self, row: Sandbox) -> bool:
        return row.expires_at is not None and row.expires_at <= self.clock()

    # -- creation

    async def begin(self, plan: Plan) -> Creation:
        """Write a sandbox down and start to make it; see `finish`.

        Raises:
            ApiError: it cannot be made.
        """
        if len(self._creations) >= self._bounds.pending or await self.registry.count() >= self._bounds.sandboxes:
            raise busy("Too many sandboxes at once on this server.")
        network_policy = plan.network_policy
        try:
            compiled = await self.policies.compile(plan.policy_name, network_policy)
        except Refused as error:
            raise invalid(str(error)) from None
        await self._check_image(plan.image)
        now = self.clock()
        sandbox = self._new_id()
        row = Sandbox(
            id=sandbox,
            state=State.PENDING,
            reason="CONTAINER_STARTING",
            message="Sandbox is being created.",
            changed_at=now,
            created_at=now,
            expires_at=None if plan.timeout is None else now + plan.timeout,
            image=plan.image,
            entrypoint=plan.entrypoint,
            runtime=plan.runtime,
            metadata=dict(plan.metadata),
            extensions=dict(plan.extensions),
            platform=None if plan.platform is None else dict(plan.platform),
            policy_name=plan.policy_name,
            network_policy=None if network_policy is None else network_policy.to_wire(),
            policy_digest=compiled.digest,
            credential_proxy=plan.credential_proxy,
            secure_access=plan.secure_access,
            lineage=sandbox,
            renew_seconds=plan.renew_seconds,
        )
        await self.registry.put(row)
        task = asyncio.get_running_loop().create_task(self._make(row, plan, compiled), name=f"create:{sandbox}")
        creation = self._creations[sandbox] = Creation(sandbox, task)
        task.add_done_callback(lambda _: self._creations.pop(sandbox, None))
        return creation

    async def finish(self, creation: Creation) -> Sandbox:
        """Wait for a creation, as long as its caller may be kept waiting, and return what to answer.

        Raises:
            ApiError: it failed; nothing of it is left.
        """
        await asyncio.wait({creation.task}, timeout=self._bounds.answer_seconds)
        if creation.task.done():
            return creation.task.result()
        creation.answered = True
        self._keep(creation.task)
        row = await self.registry.get(creation.sandbox)
        if row is None:
            return await creation.task
        return row

    def abandon(self, creation: Creation) -> None:
        """Its caller is gone and will never learn the id: remove the sandbox as soon as it is made."""
        creation.abandoned = True
        self._keep(asyncio.get_running_loop().create_task(self._after_abandoned(creation)))

    async def _after_abandoned(self, creation: Creation) -> None:
        await asyncio.wait({creation.task})
        if creation.task.cancelled() or creation.task.exception() is not None:
            return
        with contextlib.suppress(ApiError):  # the row is left as Stopping, and the reaper goes on
            await self.remove(creation.sandbox, "the caller went away")

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)

        def done(finished: asyncio.Task[Any]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                _log.warning("%s ended with %s", finished.get_name(), type(error).__name__)

        task.add_done_callback(done)

    async def _check_image(self, name: str) -> None:
        try:
            await self.hostd.image(name)
        except wire.RemoteError as error:
            if error.code in ("unknown_image", "invalid"):
                raise ApiError(
                    400,
                    "DOCKER::SANDBOX_IMAGE_PULL_FAILED",
                    f"Image {name[:200]!r} is not available on this server and cannot be pulled.",
                ) from None
            raise _failure(error) from None
        except Unreachable as error:
            raise unavailable("DOCKER::INITIALIZATION_ERROR", f"{error}.") from None

    async def _make(self, row: Sandbox, plan: Plan, compiled: Compiled) -> Sandbox:
        async with self._launches, self.lock(row.id):
            try:
                await self._start(row, plan, compiled)
            except Exception as error:  # noqa: BLE001 - closes: whatever failed, the former steps are undone
                failure = _failure(error)
                await self._undo(row, failure)
                raise failure from None
            now = self.clock()
            running = await self.registry.update(
                row.id,
                lambda current: current.moved(
                    State.RUNNING, "CONTAINER_RUNNING", "Sandbox container started successfully.", now
                ),
            )
        self.expiry_changed()
        if running is None:
            raise unknown_sandbox(row.id)
        return running

    async def _start(self, row: Sandbox, plan: Plan, compiled: Compiled) -> None:
        await self.auditd.record(
            "lifecycle.create",
            "allow",
            sandbox=row.id,
            image=row.image,
            runtime=row.runtime,
            policy=compiled.digest,
            cpu_nanos=plan.resources.cpu_nanos,
            memory_bytes=plan.resources.memory_bytes,
        )
        root_pem = await self.vaultd.open_sandbox(row.id, row.lineage, compiled.grants)
        await self.hostd.launch(
            sandbox=row.id,
            generation=1,
            runtime=row.runtime,
            image=row.image,
            entrypoint=list(plan.command),
            env={**plan.env, "OPENSANDBOX_ID": row.id},
            cpu_nanos=plan.resources.cpu_nanos,
            memory_bytes=plan.resources.memory_bytes,
            pids=plan.resources.pids,
            ca_bundle=self.gateway.upstream_roots.rstrip("\n") + "\n" + root_pem,
            execd_token_sha256=hashlib.sha256(self._tokens.execd(row.id).encode()).hexdigest(),
            gateway=self.gateway.configuration(row.id, 1, compiled),
        )

    async def _undo(self, row: Sandbox, failure: ApiError) -> None:
        creation = self._creations.get(row.id)
        answered = creation is not None and creation.answered
        await self._note("lifecycle.create_failed", "info", sandbox=row.id, code=failure.code)
        now = self.clock()
        try:
            residue = await self.hostd.remove(row.id)
            await self.vaultd.close_sandbox(row.id)
        except (Unreachable, wire.RemoteError) as error:
            _log.warning("undoing the creation of %s is left to the reaper: %s", row.id, error)
            residue = ["unknown"]
        if residue:
            await self.registry.put(row.moved(State.STOPPING, "CLEANUP_PENDING", failure.message, now))
            self.expiry_changed()
        elif answered:
            await self.registry.put(row.moved(State.FAILED, "CREATE_FAILED", failure.message, now))
        else:
            await self.registry.delete(row.id)
        with contextlib.suppress(Unreachable, wire.RemoteError):
            await self.auditd.close_sandbox(row.id)

    # -- removal

    async def remove(self, sandbox: str, reason: str) -> None:
        """Remove a sandbox and everything that was made for it; on return it is gone.

        Raises:
            ApiError: 404, or 500 if something of it is left; the reaper will then go on.
        """
        if not _ID.fullmatch(sandbox):
            raise unknown_sandbox(sandbox)
        async with self.lock(sandbox):
            now = self.clock()
            row = await self.registry.update(
                sandbox, lambda current: current.moved(State.STOPPING, "REMOVING", f"Removing: {reason}.", now)
            )
            if row is None:
                raise unknown_sandbox(sandbox)
            await self._note("lifecycle.remove", "info", sandbox=sandbox, reason=reason)
            try:
                residue = await self.hostd.remove(sandbox)
                await self.vaultd.close_sandbox(sandbox)
            except (Unreachable, wire.RemoteError) as error:
                self.expiry_changed()
                raise ApiError(500, "DOCKER::SANDBOX_DELETE_FAILED", f"Removal is being retried: {error}.") from None
            if residue:
                self.expiry_changed()
                _log.warning("removal of %s left %d things behind", sandbox, len(residue))
                raise ApiError(
                    500, "DOCKER::SANDBOX_DELETE_FAILED", f"Removal is being retried: {len(residue)} things are left."
                )
            with contextlib.suppress(Unreachable, wire.RemoteError):
                await self.auditd.close_sandbox(sandbox)
            await self.registry.delete(sandbox)
        for forget in self.forget:
            await forget(sandbox)

    # -- changes

    async def patch_metadata(self, sandbox: str, patch: Mapping[str, str | None]) -> Sandbox:
        """Apply a merge patch to the metadata; atomic, also among concurrent ones."""
        await self.get(sandbox)

        def change(row: Sandbox) -> Sandbox:
            return replace(row, metadata=patched(row.metadata, patch))

        row = await self.registry.update(sandbox, change)
        if row is None:
            raise unknown_sandbox(sandbox)
        return row

    async def renew(self, sandbox: str, expires_at: datetime) -> Sandbox:
        """Set the expiry: later, earlier or the same, but in the future."""
        await self.get(sandbox)
        moment = (expires_at if expires_at.tzinfo else expires_at.replace(tzinfo=UTC)).timestamp()
        now = self.clock()
        if moment <= now:
            raise ApiError(400, "DOCKER::INVALID_EXPIRATION", "expiresAt must be in the future.")

        def change(row: Sandbox) -> Sandbox:
            if row.expires_at is None:
                raise ApiError(409, "DOCKER::INVALID_EXPIRATION", "This sandbox has manual cleanup and no expiry.")
            if row.expires_at <= now or row.state is State.STOPPING:
                raise unknown_sandbox(sandbox)
            return replace(row, expires_at=moment)

        row = await self.registry.update(sandbox, change)
        if row is None:
            raise unknown_sandbox(sandbox)
        self.expiry_changed()
        return row

    async def touch(self, row: Sandbox) -> None:
        """Count an access: move the expiry of a running sandbox that asked for it, never back."""
        moment = self.clock() + (row.renew_seconds or 0)
        if row.renew_seconds is None or row.expires_at is None or row.state is not State.RUNNING:
            return

        def change(current: Sandbox) -> Sandbox:
            if current.expires_at is None or current.expires_at >= moment:
                return current
            return replace(current, expires_at=moment)

        await self.registry.update(row.id, change)

    async def pause(self, sandbox: str) -> None:
        """Freeze a running sandbox."""
        await self._move(sandbox, "pause", State.RUNNING, State.PAUSED, "SANDBOX_NOT_RUNNING", "SANDBOX_PAUSE_FAILED")

    async def resume(self, sandbox: str) -> None:
        """Thaw a paused sandbox."""
        await self._move(sandbox, "resume", State.PAUSED, State.RUNNING, "SANDBOX_NOT_PAUSED", "SANDBOX_RESUME_FAILED")

    async def _move(self, sandbox: str, op: str, before: State, after: State, wrong: str, failed: str) -> None:
        await self.get(sandbox)
        async with self.lock(sandbox):
            row = await self.get(sandbox)
            if row.state is not before:
                raise ApiError(409, f"DOCKER::{wrong}", f"Sandbox is {row.state}, not {before}.")
            await self.record(f"lifecycle.{op}", "info", sandbox=sandbox)
            try:
                await self.hostd.call(op, sandbox=sandbox)
            except wire.RemoteError as error:
                if error.code == "unknown_op":
                    raise ApiError(501, "SANDBOX::API_NOT_SUPPORTED", f"This server cannot {op} sandboxes.") from None
                raise ApiError(500, f"DOCKER::{failed}", f"{op} failed: {error.code}.") from None
            except Unreachable as error:
                raise ApiError(500, f"DOCKER::{failed}", f"{op} failed: {error}.") from None
            reason = "CONTAINER_PAUSED" if after is State.PAUSED else "CONTAINER_RUNNING"
            now = self.clock()
            await self.registry.update(sandbox, lambda current: current.moved(after, reason, "", now))

    # -- for the others

    @contextlib.asynccontextmanager
    async def lock(self, sandbox: str) -> AsyncIterator[None]:
        """Hold the sandbox's lock: all that changes it does."""
        lock, users = self._locks.get(sandbox, (asyncio.Lock(), 0))
        self._locks[sandbox] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[sandbox]
            if users == 1:
                del self._locks[sandbox]
            else:
                self._locks[sandbox] = (lock, users - 1)

    async def record(self, kind: str, decision: str, **fields: Any) -> None:
        """Have a change recorded before it is made.

        Raises:
            ApiError: 503, and it must not be made.
        """
        try:
            await self.auditd.record(kind, decision, **fields)
        except (Unreachable, wire.RemoteError) as error:
            _log.warning("audit refused %s: %s", kind, error)
            raise unavailable("AUDIT::UNAVAILABLE", "The audit log does not accept records.") from None

    async def _note(self, kind: str, decision: str, **fields: Any) -> None:
        try:
            await self.auditd.record(kind, decision, **fields)
        except (Unreachable, wire.RemoteError) as error:
            _log.warning("audit did not take %s: %s", kind, error)

    async def close(self) -> None:
        """Stop what is under way; rows tell the next start where it was."""
        tasks = [creation.task for creation in self._creations.values()] + list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failure(error: Exception) -> ApiError:
    """Say to the caller what went wrong, in the contract's codes and without our details."""
    match error:
        case ApiError():
            return error
        case Unreachable(daemon="auditd"):
            return unavailable("AUDIT::UNAVAILABLE", "The audit log does not accept records.")
        case Unreachable():
            return ApiError(500, "DOCKER::SANDBOX_START_FAILED", f"{error}.")
        case wire.RemoteError(code="unknown_image"):
            return ApiError(400, "DOCKER::SANDBOX_IMAGE_PULL_FAILED", error.message)
        case wire.RemoteError(code="unavailable"):
            return unavailable("DOCKER::INITIALIZATION_ERROR", f"The host cannot start sandboxes now: {error.message}.")
        case wire.RemoteError(code="unknown_secret" | "not_bound"):
            return invalid(f"The policy needs a secret this server cannot grant: {error.message}.")
        case wire.RemoteError(code="full"):
            return busy(f"No room for another sandbox: {error.message}.")
        case wire.RemoteError():
            return ApiError(500, "DOCKER::SANDBOX_START_FAILED", f"{error.code}: {error.message}")
        case _:
            _log.warning("creation failed with %s", type(error).__name__)
            return ApiError(500, "DOCKER::SANDBOX_START_FAILED", "Sandbox could not be started.")
