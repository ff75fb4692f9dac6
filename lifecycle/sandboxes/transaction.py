"""Creations: a sandbox is made as a whole or not at all.

A creation is a transaction: row `Pending` -> audit record -> vault -> hostd -> row `Running`. A step that fails undoes
the former ones; what cannot be undone at once stays as a row `Stopping` that the reaper works on until it is gone.

- The row is written before a step starts: a crash leaves rows, never a sandbox without a row.
- If the caller disconnects before the answer, the sandbox is removed. A caller that waits too long gets `Pending` and
  an id.
- Creations are bounded in number, launches in concurrency.

It knows no HTTP; refusals are `ApiError`s because their codes are the contract's.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import wire
from lifecycle.api.credentials import Tokens
from lifecycle.api.errors import ApiError, busy, invalid, unavailable, unknown_sandbox
from lifecycle.daemon_clients import Auditd, Hostd, Unreachable, Vaultd, explained
from lifecycle.egress.policies import Compiled, Policies, PolicyRefused
from lifecycle.sandboxes.clock import Clock
from lifecycle.sandboxes.creation import Plan
from lifecycle.sandboxes.journal import Journal
from lifecycle.sandboxes.locks import Locks
from lifecycle.sandboxes.orchestrator import Orchestrator
from lifecycle.sandboxes.registry import Registry, RegistryError, Sandbox, State
from policy.problems import meant
from wire.api.hostd import Launch, Runtime

_NAMED_IMAGES = 20
_TOO_MANY = "Too many sandboxes at once on this server."

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CreationBounds:
    """How much at once, and for how long a caller is kept waiting."""

    launches: int
    pending: int
    sandboxes: int
    answer_seconds: float


class Creation:
    """One creation under way."""

    def __init__(self, sandbox: str, task: asyncio.Task[Sandbox]) -> None:
        self.sandbox = sandbox
        self.task = task
        self.answered = False
        self.abandoned = False


class Creations:
    """Makes sandboxes; everything after that is the orchestrator's.

    Attributes:
        settle: called with the id of a sandbox whose policy may not be in force; on return it is, if it can be.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        registry: Registry,
        hostd: Hostd,
        vaultd: Vaultd,
        auditd: Auditd,
        *,
        policies: Policies,
        journal: Journal,
        locks: Locks,
        clock: Clock,
        expiry_changed: asyncio.Event,
        settle: Callable[[str], Awaitable[None]],
        tokens: Tokens,
        bounds: CreationBounds,
        new_id: Callable[[], str] = lambda: f"sbx-{secrets.token_hex(12)}",
    ) -> None:
        self._orchestrator = orchestrator
        self._registry = registry
        self._hostd = hostd
        self._vaultd = vaultd
        self._auditd = auditd
        self._policies = policies
        self._journal = journal
        self._locks = locks
        self._clock = clock
        self._expiry_changed = expiry_changed
        self._settle = settle
        self._tokens = tokens
        self._bounds = bounds
        self._new_id = new_id
        self._launches = asyncio.Semaphore(bounds.launches)
        self._beginning = 0
        self._making: set[str] = set()
        self._creations: dict[str, Creation] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def is_making(self, sandbox: str) -> bool:
        """Whether a sandbox is being created now: a row `Pending` of any other was left behind."""
        return sandbox in self._making

    async def begin(self, plan: Plan) -> Creation:
        """Write a sandbox down and start to make it; see `finish`.

        Raises:
            ApiError: it cannot be made.
        """
        if len(self._creations) + self._beginning >= self._bounds.pending:
            raise busy(_TOO_MANY)
        self._beginning += 1  # before the first wait: calls that come together are counted together
        try:
            if await self._registry.count() + self._beginning > self._bounds.sandboxes:
                raise busy(_TOO_MANY)
            return await self._begin(plan)
        finally:
            self._beginning -= 1

    async def _begin(self, plan: Plan) -> Creation:
        network_policy = plan.network_policy
        version = self._policies.version
        compiled = await self._admit(plan)
        await self._check_image(plan.image)
        now = self._clock()
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
        self._making.add(sandbox)
        try:
            await self._registry.put(row)
        except BaseException:
            self._making.discard(sandbox)
            raise
        making = self._make(row, plan, compiled, version)
        task = asyncio.get_running_loop().create_task(making, name=f"create:{sandbox}")
        creation = self._creations[sandbox] = Creation(sandbox, task)
        task.add_done_callback(lambda _: self._ended(sandbox))
        return creation

    async def _admit(self, plan: Plan) -> Compiled:
        try:
            return await self._policies.admit(plan.policy_name, plan.network_policy)
        except PolicyRefused as error:
            raise invalid(str(error)) from None

    def _ended(self, sandbox: str) -> None:
        self._creations.pop(sandbox, None)
        self._making.discard(sandbox)

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
        row = await self._registry.get(creation.sandbox)
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
            await self._orchestrator.remove(creation.sandbox, "the caller went away")

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)

        def done(finished: asyncio.Task[Any]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                _log.warning("%s ended with %s", finished.get_name(), type(error).__name__)

        task.add_done_callback(done)

    async def _check_image(self, name: str) -> None:
        try:
            await self._hostd.check_image(name)
        except wire.RemoteError as error:
            if error.code in (wire.Code.UNKNOWN_IMAGE, wire.Code.INVALID):
                raise await self._no_image(name) from None
            raise _failure(error) from None
        except Unreachable as error:
            raise unavailable("DOCKER::INITIALIZATION_ERROR", f"Sandboxes cannot be started now: {error}.") from None

    async def _no_image(self, name: str) -> ApiError:
        message = f"Image {name[:200]!r} is not available on this server and cannot be pulled"
        with contextlib.suppress(wire.RemoteError, Unreachable):
            names = await self._hostd.images()
            more = ", and others" if len(names) > _NAMED_IMAGES else ""
            there = f"available: {', '.join(names[:_NAMED_IMAGES])}{more}" if names else "it has no image"
            message += f"{meant(name, names)}; {there}"
        return ApiError(400, "DOCKER::SANDBOX_IMAGE_PULL_FAILED", f"{message}.")

    async def _make(self, row: Sandbox, plan: Plan, compiled: Compiled, version: int) -> Sandbox:
        policies = self._policies
        async with self._launches, self._locks.hold(row.id):
            try:
                if version != policies.version:  # there is another document since this one began to wait
                    version, compiled = policies.version, await self._admit(plan)
                in_force = await self._start(row, plan, compiled)
                running = await self._running(row, in_force if in_force == compiled.digest else "", version)
            except Exception as error:  # noqa: BLE001 - closes: whatever failed, the former steps are undone
                failure = _failure(error)
                await self._undo(row, failure)
                raise failure from None
        self._expiry_changed.set()
        if not running.policy_digest:
            await self._settle(running.id)
        return running

    async def _running(self, row: Sandbox, agreed: str, version: int) -> Sandbox:
        """Write down that it runs; `agreed` is the policy in force, empty if another one was compiled here."""
        now = self._clock()
        policies = self._policies

        def change(current: Sandbox) -> Sandbox:
            # The operator's document may have changed since this policy was compiled: then the new one is applied. It
            # is compared here, in the order of the database's calls: a later reader of all rows finds this one.
            digest = agreed if version == policies.version else ""
            moved = current.moved(State.RUNNING, "CONTAINER_RUNNING", "Sandbox container started successfully.", now)
            return replace(moved, policy_digest=digest)

        running = await self._registry.update(row.id, change)
        if running is None:
            raise unknown_sandbox(row.id)
        return running

    async def _start(self, row: Sandbox, plan: Plan, compiled: Compiled) -> str:
        await self._auditd.record(
            "lifecycle.create",
            "allow",
            sandbox=row.id,
            image=row.image,
            runtime=row.runtime,
            policy=compiled.digest,
            cpu_nanos=plan.resources.cpu_nanos,
            memory_bytes=plan.resources.memory_bytes,
            disk_bytes=plan.resources.disk_bytes,
        )
        root_pem = await self._vaultd.open_sandbox(row.id, row.lineage, compiled.grants, compiled.names)
        launch = Launch(
            sandbox=row.id,
            runtime=Runtime(row.runtime),
            image=row.image,
            entrypoint=tuple(plan.command),
            env={**plan.env, "OPENSANDBOX_ID": row.id},
            cpu_nanos=plan.resources.cpu_nanos,
            memory_bytes=plan.resources.memory_bytes,
            pids=plan.resources.pids,
            disk_bytes=plan.resources.disk_bytes,
            isolation=plan.isolation,
            ca_root=root_pem,
            execd_token_sha256=hashlib.sha256(self._tokens.execd(row.id).encode()).hexdigest(),
            selection=compiled.selection.to_text(),
        )
        return await self._hostd.launch(launch)

    async def _undo(self, row: Sandbox, failure: ApiError) -> None:
        creation = self._creations.get(row.id)
        answered = creation is not None and creation.answered
        await self._journal.note("lifecycle.create_failed", "info", sandbox=row.id, code=failure.code)
        now = self._clock()
        try:
            residue = await self._hostd.remove(row.id)
            await self._vaultd.close_sandbox(row.id)
        except (Unreachable, wire.RemoteError) as error:
            _log.warning("undoing the creation of %s is left to the reaper: %s", row.id, error)
            residue = ("unknown",)
        try:
            if residue:
                await self._registry.put(row.moved(State.STOPPING, "CLEANUP_PENDING", failure.message, now))
                self._expiry_changed.set()
            elif answered:
                await self._registry.put(row.moved(State.FAILED, "CREATE_FAILED", failure.message, now))
            else:
                await self._registry.delete(row.id)
        except RegistryError as error:
            _log.warning("the row of %s is left to the observer: %s", row.id, type(error).__name__)

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
            return ApiError(500, "DOCKER::SANDBOX_START_FAILED", f"Sandbox could not be started: {error}.")
        case wire.RemoteError(code=wire.Code.UNKNOWN_IMAGE):
            return ApiError(400, "DOCKER::SANDBOX_IMAGE_PULL_FAILED", error.message)
        case wire.RemoteError(code=wire.Code.UNAVAILABLE):
            return unavailable("DOCKER::INITIALIZATION_ERROR", f"The host cannot start sandboxes now: {error.message}.")
        case wire.RemoteError(code=wire.Code.TOO_LARGE):
            return invalid("The environment, the command and the policy of this call are too large together.")
        case wire.RemoteError(code=wire.Code.UNKNOWN_SECRET | wire.Code.NOT_BOUND):
            return invalid(f"The policy needs a secret this server cannot grant: {error.message}.")
        case wire.RemoteError(code=wire.Code.FULL | wire.Code.DISK):
            return busy(f"No room for another sandbox: {error.message}.")
        case wire.RemoteError():
            _log.warning("creation failed: %s: %s", error.code, error.message)
            return ApiError(500, "DOCKER::SANDBOX_START_FAILED", f"Sandbox could not be started: {explained(error)}.")
        case _:
            _log.warning("creation failed with %s", type(error).__name__)
            return ApiError(500, "DOCKER::SANDBOX_START_FAILED", "Sandbox could not be started.")
