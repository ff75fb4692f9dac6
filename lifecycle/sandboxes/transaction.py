"""The creation of sandboxes: complete, or nothing is left.

A creation is a transaction: row `Pending` -> audit record -> vault -> hostd -> entrypoint -> row `Running`. After a
failed step the earlier steps are undone. If that is not possible at once, a row `Stopping` stays, and the reaper
retries until everything is removed.

- The row is written before the first step. So a crash leaves rows, never a sandbox without a row.
- A claim converts an idle member of a pool instead of a launch: its row, its grants and its policy, then its execd,
  which starts the entrypoint. If a step fails, the member is removed like a failed launch.
- A sandbox whose policy provides variables or files waits for them: its execd gets them with its first init, and then
  starts the entrypoint. hostd derives them. They are in no row, and a call that sets such a variable itself is refused.
- A sandbox whose entrypoint cannot be started, or ends with an error before it was seen to run, was not created. The
  refusal has its exit code and the end of its output. An entrypoint after a hook is not waited for.
- If the caller disconnects before the answer, the sandbox is removed. A caller that waits for longer than the limit
  gets `Pending` and an id.
- The number of creations, that of concurrent launches and the wait for a launch are bounded. A creation above a bound
  is refused (429). One that was removed while it waited is not launched.
- Ceilings are checked in the transaction that writes the row (`ceilings`).

This module does not use HTTP. Refusals are `ApiError`s because the contract defines their codes.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import wire
from lifecycle.api.credentials import Tokens
from lifecycle.api.errors import ApiError, busy, invalid, no_database, unavailable, unknown_sandbox
from lifecycle.api.models import HOOKS_VARIABLE
from lifecycle.daemon_clients import Auditd, Hostd, Unreachable, Vaultd, explained
from lifecycle.egress.policies import Compiled, Policies, PolicyRefused
from lifecycle.proxy.handover import NotHandedOver
from lifecycle.sandboxes import volumes
from lifecycle.sandboxes.bounds import CreationBounds
from lifecycle.sandboxes.clock import Clock
from lifecycle.sandboxes.creation import Plan, claimed
from lifecycle.sandboxes.history import Given, Removal
from lifecycle.sandboxes.journal import Journal
from lifecycle.sandboxes.locks import Locks
from lifecycle.sandboxes.members import Members, unknown_pool
from lifecycle.sandboxes.orchestrator import Orchestrator
from lifecycle.sandboxes.registry import Registry, RegistryError, Sandbox, State
from lifecycle.sandboxes.starting import Starting
from lifecycle.snapshots.errors import no_artifact
from policy.problems import meant
from runtimes.engine.trust import CA_VARIABLES
from wire.api.hostd import Launch, PolicyInForce, Runtime
from wire.api.provided import Provided, ProvidedFile

_NAMED_IMAGES = 20
_ABANDONED_SECONDS = 1.0
_FIRST_LAUNCH_SECONDS = 1.0
_LONGEST_RETRY_SECONDS = 60
_SERVING_SECONDS = 60.0
"""The wait for the execd of a sandbox that must get its placeholders."""
_LATEST = 0.2
"""The weight of the latest launch in the average of their times."""

_log = logging.getLogger(__name__)


type HandOver = Callable[[str, str, Sequence[str], Mapping[str, str], Sequence[ProvidedFile]], Awaitable[None]]
"""Gives a waiting execd what it starts with: sandbox, token, entrypoint, variables, files."""


class Creation:
    """A creation in progress."""

    def __init__(self, sandbox: str, task: asyncio.Task[Sandbox]) -> None:
        self.sandbox = sandbox
        self.task = task
        self.answered = False
        self.abandoned = False


class Creations:
    """The creation of sandboxes. The orchestrator does everything after it.

    Attributes:
        settle: called with the id of a sandbox whose policy is possibly not in force. On return it is, if that is
            possible.
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
        starting: Starting,
        settle: Callable[[str], Awaitable[None]],
        tokens: Tokens,
        members: Members,
        hand_over: HandOver,
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
        self._starting = starting
        self._settle = settle
        self._tokens = tokens
        self._members = members
        self._hand_over = hand_over
        self._bounds = bounds
        self._new_id = new_id
        self._launches = asyncio.Semaphore(bounds.launches)
        self._launch_seconds = _FIRST_LAUNCH_SECONDS
        self._beginning = 0
        self._making: set[str] = set()
        self._creations: dict[str, Creation] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def is_making(self, sandbox: str) -> bool:
        """Return whether a sandbox is being created now. The row `Pending` of any other sandbox is a leftover."""
        return sandbox in self._making

    async def begin(self, plan: Plan, key_label: str = "") -> Creation:
        """Write the row of a sandbox and start its creation; see `finish`.

        Args:
            key_label: the label of the caller's API key.

        Raises:
            ApiError: the sandbox cannot be created.
        """
        if len(self._creations) + self._beginning >= self._bounds.pending:
            raise busy("Too many sandboxes are being created on this server.", self._retry_seconds())
        self._beginning += 1  # Increased before the first await, so that concurrent calls count each other.
        try:
            if plan.claim is not None:
                plan = await self._completed(plan, plan.claim.pool)
            return await self._begin(plan, key_label)
        finally:
            self._beginning -= 1

    def _retry_seconds(self) -> int:
        """Return the seconds after which the present creations are probably complete."""
        creations = len(self._creations) + self._beginning
        seconds = math.ceil(creations * self._launch_seconds / self._bounds.launches)
        return max(1, min(_LONGEST_RETRY_SECONDS, seconds))

    async def _completed(self, plan: Plan, pool: str) -> Plan:
        found = await self._registry.pool(pool)
        if found is None:
            raise unknown_pool(pool)
        return claimed(plan, found)

    async def _begin(self, plan: Plan, key_label: str) -> Creation:
        version = self._policies.version
        compiled = await self._admit(plan)
        if plan.claim is None:
            if plan.snapshot is None:
                await self.check_image(plan.image)
            row = self._row(self._new_id(), plan, compiled, key_label)
            self._making.add(row.id)
            try:
                given = Given.of(plan.resources, {**plan.env, **dict.fromkeys(compiled.variables, "")})
                await self._registry.admit(row, self._bounds.sandboxes, self._bounds.ceilings, given)
            except BaseException:
                self._making.discard(row.id)
                raise
        else:
            row = await self._members.claim(
                plan.claim.pool,
                lambda members: self._claimable(plan.image, members),
                lambda member: self._row(member.id, plan, compiled, key_label),
                self._making,
                self._bounds.ceilings,
            )
        sandbox = row.id
        making = self._make(row, plan, compiled, version)
        task = asyncio.get_running_loop().create_task(making, name=f"create:{sandbox}")
        creation = self._creations[sandbox] = Creation(sandbox, task)
        task.add_done_callback(lambda _: self._ended(sandbox))
        return creation

    def _row(self, sandbox: str, plan: Plan, compiled: Compiled, key_label: str) -> Sandbox:
        now, policy = self._clock(), plan.network_policy
        return Sandbox(
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
            network_policy=None if policy is None else policy.to_wire(),
            policy_digest=compiled.digest,
            credential_proxy=plan.credential_proxy,
            secure_access=plan.secure_access,
            lineage=sandbox,
            renew_seconds=plan.renew_seconds,
            pool=plan.held_for if plan.claim is None else plan.claim.pool,
            idle=bool(plan.held_for),
            cpu_nanos=plan.resources.cpu_nanos,
            memory_bytes=plan.resources.memory_bytes,
            disk_bytes=plan.resources.disk_bytes,
            key_label=key_label,
            snapshot=plan.snapshot,
        )

    async def _admit(self, plan: Plan) -> Compiled:
        try:
            compiled = await self._policies.admit(plan.policy_name, plan.network_policy)
        except PolicyRefused as error:
            raise invalid(str(error)) from None
        if both := sorted(compiled.variables & plan.env.keys()):
            raise invalid(f"env: the policy provides {both[0]} with a placeholder, so a call cannot set it.")
        return compiled

    def _ended(self, sandbox: str) -> None:
        self._creations.pop(sandbox, None)
        self._making.discard(sandbox)

    async def finish(self, creation: Creation) -> Sandbox:
        """Wait for a creation, within the limit for its caller, and return the row to answer with.

        Raises:
            ApiError: the creation failed. Nothing of it is left.
        """
        await asyncio.wait({creation.task}, timeout=self._bounds.answer_seconds)
        if creation.task.done():
            return creation.task.result()
        creation.answered = True
        self._keep(creation.task)
        try:
            row = await self._registry.get(creation.sandbox)
        except RegistryError:
            self.abandon(creation)  # Its caller gets an error and no id.
            raise
        if row is None:
            return await creation.task
        return row

    def abandon(self, creation: Creation) -> None:
        """Remove the sandbox as soon as it is created, because its caller has disconnected and does not know the id."""
        creation.abandoned = True
        self._keep(asyncio.get_running_loop().create_task(self._after_abandoned(creation)))

    async def _after_abandoned(self, creation: Creation) -> None:
        await asyncio.wait({creation.task})
        if creation.task.cancelled() or creation.task.exception() is not None:
            return
        while True:
            try:
                with contextlib.suppress(ApiError):  # The row is left as Stopping, and the reaper retries.
                    await self._orchestrator.remove(creation.sandbox, "the caller went away")
                return
            except RegistryError:  # Without that row the reaper does not find it.
                await asyncio.sleep(_ABANDONED_SECONDS)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)

        def done(finished: asyncio.Task[Any]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                _log.warning("%s ended with %s", finished.get_name(), type(error).__name__)

        task.add_done_callback(done)

    async def check_image(self, name: str) -> None:
        try:
            await self._hostd.check_image(name)
        except wire.RemoteError as error:
            if error.code in (wire.Code.UNKNOWN_IMAGE, wire.Code.INVALID):
                raise await self._no_image(name) from None
            raise _failure(error) from None
        except Unreachable as error:
            raise unavailable("DOCKER::INITIALIZATION_ERROR", f"Sandboxes cannot be started now: {error}.") from None

    async def _claimable(self, image: str, members: Sequence[str]) -> frozenset[str]:
        """Return those of the members whose image may still be started. Without one the image is checked."""
        try:
            found = await self._hostd.claimable(members)
        except wire.RemoteError as error:
            raise _failure(error) from None
        except Unreachable as error:
            raise unavailable("DOCKER::INITIALIZATION_ERROR", f"Sandboxes cannot be started now: {error}.") from None
        if not found:
            await self.check_image(image)
        return found

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
        async with contextlib.AsyncExitStack() as launching:
            turn = plan.claim is not None or await self._turn(launching)
            # The turn comes before the lock, so that a removal need not wait.
            began = asyncio.get_running_loop().time()
            async with self._locks.hold(row.id):
                try:
                    if not turn:
                        message = f"No turn to start within {self._bounds.queue_seconds:g} s."
                        raise busy(message, self._retry_seconds())
                    await self._check_wanted(row.id)
                    if version != policies.version:  # A newer document came while this task waited.
                        version, compiled = policies.version, await self._admit(plan)
                    start = self._start if plan.claim is None else self._convert
                    in_force = await start(row, plan, compiled)
                    await launching.aclose()
                    if plan.claim is None:
                        took = asyncio.get_running_loop().time() - began
                        self._launch_seconds += _LATEST * (took - self._launch_seconds)
                    started = not plan.held_for and HOOKS_VARIABLE not in plan.env
                    await self._starting.wait(row.id, started=started)
                    running = await self._running(row, in_force if in_force == compiled.digest else "", version)
                except Exception as error:  # noqa: BLE001 - closes: whatever failed, the former steps are undone
                    failure = _failure(error)
                    await self._undo(row, failure)
                    raise failure from None
        self._expiry_changed.set()
        if not running.policy_digest:
            await self._settle(running.id)
        return running

    async def _turn(self, launching: contextlib.AsyncExitStack) -> bool:
        """Wait for a turn to launch. Return whether there was one in time."""
        try:
            async with asyncio.timeout(self._bounds.queue_seconds):
                await launching.enter_async_context(self._launches)
        except TimeoutError:
            return False
        return True

    async def _check_wanted(self, sandbox: str) -> None:
        """Refuse to launch a sandbox that was removed while it waited for its turn.

        Raises:
            ApiError: 404.
        """
        current = await self._registry.get(sandbox)
        if current is None or current.state is not State.PENDING:
            raise unknown_sandbox(sandbox)

    async def _running(self, row: Sandbox, agreed: str, version: int) -> Sandbox:
        """Write the row as Running. `agreed` is the policy in force, or empty if hostd compiled another one."""
        now = self._clock()
        policies = self._policies

        def change(current: Sandbox) -> Sandbox:
            # The operator's document may have changed since this policy was compiled. Then the new policy is applied.
            # The comparison is made here, in the order of the database's calls, so that a later reader of all rows
            # finds this row.
            digest = agreed if version == policies.version else ""
            moved = current.moved(State.RUNNING, "CONTAINER_RUNNING", "Sandbox container started successfully.", now)
            return replace(moved, policy_digest=digest)

        running = await self._registry.update(row.id, change)
        if running is None:
            raise unknown_sandbox(row.id)
        return running

    async def _convert(self, row: Sandbox, plan: Plan, compiled: Compiled) -> str:
        """Put the caller's policy in force at a member, then let its execd start the entrypoint."""
        await self._auditd.record(
            "lifecycle.claim",
            "allow",
            sandbox=row.id,
            pool=row.pool,
            image=row.image,
            runtime=row.runtime,
            policy=compiled.digest,
        )
        env = {name: value for name, value in plan.env.items() if name not in CA_VARIABLES}
        # Nothing runs in the member before all three have ended, so they need no order.
        steps = await asyncio.gather(
            self._vaultd.regrant(row.id, compiled.grants, compiled.names, metadata=row.metadata),
            self._hostd.claim(row.id, compiled.selection, env),
            self._note_handed_over(row.id, (*env, *compiled.variables)),
            return_exceptions=True,
        )
        for step in steps:
            if isinstance(step, BaseException):
                raise step
        in_force = steps[1]
        assert isinstance(in_force, PolicyInForce)  # noqa: S101 - narrows what the loop has established
        await self._begin_with(row, plan, env, in_force.provided)
        return in_force.digest

    async def _note_handed_over(self, sandbox: str, names: tuple[str, ...]) -> None:
        with contextlib.suppress(RegistryError):  # Without this its output is not shown.
            await self._registry.record(sandbox, lambda history: history.handed_over(names))

    async def _begin_with(self, row: Sandbox, plan: Plan, env: Mapping[str, str], provided: Provided) -> None:
        """Let the execd of a sandbox start the entrypoint, with these variables and what its policy provides."""
        both = {**env, **provided.variables}
        await self._hand_over(row.id, self._tokens.execd(row.id), plan.command, both, provided.files)

    async def _start(self, row: Sandbox, plan: Plan, compiled: Compiled) -> str:
        await self._auditd.record(
            "lifecycle.create",
            "allow",
            sandbox=row.id,
            image=row.image,
            snapshot=row.snapshot,
            runtime=row.runtime,
            policy=compiled.digest,
            cpu_nanos=plan.resources.cpu_nanos,
            memory_bytes=plan.resources.memory_bytes,
            disk_bytes=plan.resources.disk_bytes,
            **({"pool": row.pool} if row.pool else {}),
            volumes=[volumes.described(volume) for volume in plan.volumes] or None,
        )
        root_pem = await self._vaultd.open_sandbox(row.id, row.lineage, compiled.grants, compiled.names, row.metadata)
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
            held=bool(plan.held_for) or compiled.provides,
            ca_root=root_pem,
            execd_token_sha256=hashlib.sha256(self._tokens.execd(row.id).encode()).hexdigest(),
            selection=compiled.selection.to_text(),
            volumes=plan.volumes,
            snapshot=row.snapshot,
        )
        try:
            in_force = await self._hostd.launch(launch)
        except wire.RemoteError as error:
            if row.snapshot is not None and error.code == wire.Code.UNKNOWN_IMAGE:
                raise no_artifact(row.snapshot) from None
            raise
        if launch.held and not plan.held_for:
            await self._starting.wait(row.id, started=False, seconds=_SERVING_SECONDS)
            hooks = {name: plan.env[name] for name in (HOOKS_VARIABLE,) if name in plan.env}
            await self._begin_with(row, plan, hooks, in_force.provided)
        elif in_force.provided and not launch.held:
            raise unavailable("DOCKER::INITIALIZATION_ERROR", "The policy changed while the sandbox was being started.")
        return in_force.digest

    async def _undo(self, row: Sandbox, failure: ApiError) -> None:
        creation = self._creations.get(row.id)
        answered = creation is not None and creation.answered and not creation.abandoned
        await self._journal.note("lifecycle.create_failed", "info", sandbox=row.id, code=failure.code)
        now, message = self._clock(), failure.stored or failure.message
        try:
            residue = (await self._hostd.remove(row.id)).residue
            await self._vaultd.close_sandbox(row.id)
        except (Unreachable, wire.RemoteError) as error:
            _log.warning("undoing the creation of %s is left to the reaper: %s", row.id, error)
            residue = ("unknown",)
        try:
            if residue:
                await self._registry.put(row.moved(State.STOPPING, "CLEANUP_PENDING", message, now))
                self._expiry_changed.set()
            elif answered:
                await self._registry.update(row.id, lambda current: _failed(current, message, now))
            else:
                await self._registry.delete(row.id, Removal(now, f"its creation failed: {message.rstrip('.')}"))
        except RegistryError as error:
            _log.warning("the row of %s is left to the observer: %s", row.id, type(error).__name__)

    async def close(self) -> None:
        """Cancel the creations in progress. Their rows are enough for the next start."""
        tasks = [creation.task for creation in self._creations.values()] + list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failed(row: Sandbox, message: str, now: float) -> Sandbox:
    """Return the row of a creation that failed. A removal that has begun goes on."""
    return row if row.state is State.STOPPING else row.moved(State.FAILED, "CREATE_FAILED", message, now)


def _failure(error: Exception) -> ApiError:
    """Translate a failure into the contract's codes, without internal details."""
    match error:
        case ApiError():
            return error
        case RegistryError():
            return no_database()
        case NotHandedOver(refused=True):
            reason = "a file that the policy provides cannot be written in this image"
            return ApiError(500, "DOCKER::SANDBOX_START_FAILED", f"Sandbox could not be started: {reason}.")
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
        case wire.RemoteError() if (refused := volumes.refusal(error)) is not None:
            return refused
        case wire.RemoteError():
            _log.warning("creation failed: %s: %s", error.code, error.message)
            return ApiError(500, "DOCKER::SANDBOX_START_FAILED", f"Sandbox could not be started: {explained(error)}.")
        case _:
            _log.warning("creation failed with %s", type(error).__name__)
            return ApiError(500, "DOCKER::SANDBOX_START_FAILED", "Sandbox could not be started.")
