"""Launches sandboxes as a transaction, keeps each behind a live gateway, and removes them without residue.

- A launch has a fixed order: slot, worker (which denies everything), policy, plan, start. The container is created at
  the same time; it cannot start without its plan.
- A step that fails undoes all former steps. A sandbox whose worker has died stays closed: its packets end in a
  namespace without a way out, until the next worker has the same policy.
- hostd records each step before it takes it (`records`). After hostd's death, the next hostd can adopt a sandbox that
  runs and remove one that is incomplete. `adoption` decides which.
- hostd records a generation before it spawns a worker with it. No number is used twice.
- Each sandbox has one lock. Work on different sandboxes runs concurrently; the number of concurrent launches is
  bounded. A launch or removal that has begun is completed, also if its caller no longer waits.
- A removal kills the worker first. This ends the traffic, also if another task holds the lock or another step fails.
  The removal then checks processes, inodes, mounts, control groups and files.
- The seed of a sandbox's placeholders is made at its launch and is in its record: each of its workers gets it. A
  sandbox that begins with a snapshot is a new one.
- A worker that does not confirm a decided policy is killed after two seconds of its own time.
- A capture for a snapshot does not hold the lock. A pause waits for its end, a removal cancels it.

The module is long because launch, replacement, adoption, cutting off and removal change one state under one lock.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import wire
from runtimes.daemons import Daemons
from runtimes.engine import containers
from runtimes.engine.containers import keep_tmp_on_disk, plan_container, write_files
from runtimes.engine.disk import Disks
from runtimes.engine.disk_rate import DiskRate
from runtimes.engine.docker import (
    ContainerPlan,
    Docker,
    DockerError,
    Layout,
    LocalImage,
    Mount,
    UnknownImage,
    VolumeBind,
)
from runtimes.engine.plans import Plans
from runtimes.engine.printed import LogTail
from runtimes.ledgers import Ledgers
from runtimes.net import netns, slots
from runtimes.net.guard import NetGuard
from runtimes.net.nft import rules_digest
from runtimes.net.slot_pool import SlotPool
from runtimes.operator import Operator, Policy, policy_digest
from runtimes.pausing import Pausing
from runtimes.process.cgroups import Cgroups, GroupLimits, remove_container_groups
from runtimes.process.cpu_weight import Computing
from runtimes.process.finish import ShieldedTasks, both, finished, taken
from runtimes.process.liveness import within
from runtimes.records import RecordStore, SandboxRecord
from runtimes.rings import Rings
from runtimes.sandbox import HostSandbox, as_refusal, describe
from runtimes.spec import HostConfig, sandbox_users
from runtimes.volumes import Staged, Volumes
from runtimes.workers import NotAttached, WorkerIdentity, WorkerProcess, spawn_worker
from wire.api.hostd import (
    MOST_KEPT,
    HostSandboxState,
    Inspected,
    Launch,
    PolicyInForce,
    Printed,
    Removed,
    Runtime,
    SlotDescription,
)
from wire.api.states import HostState

_RESPAWN_BACKOFF = (0.0, 0.25, 0.5, 1.0, 2.0, 2.0, 5.0, 10.0, 30.0)
_CALM_SECONDS = 10.0
_PATIENCE_SECONDS = 5.0
_CHANNEL_SECONDS = 1.0
_CONFIRM_SECONDS = 20.0
_REMOVALS = 3
"""The attempts to remove each sandbox when hostd stops."""
_DECIDED_SECONDS = 2.0
_READ_SECONDS, _LAST_SECONDS = 5.0, 2.0
"""The limits of a wait for an output, and for the one of a sandbox that is being removed."""
_KEPT_LINES = 1000
"""The last lines that are read of a sandbox that is cut off."""
_CAPTURE_SECONDS = 15.0
"""The limit of the wait of a pause for a capture."""
_REFUSALS = frozenset({wire.Code.INVALID, wire.Code.AUDIT_UNAVAILABLE, wire.Code.INTERNAL})
"""The codes of a worker's refusal that the caller gets. The caller gets `gateway` for any other code."""

_log = logging.getLogger(__name__)


class LaunchableImages(Protocol):
    """The images that a sandbox may be started from."""

    async def image(self, name: str) -> LocalImage:
        """Return the image of a name; raise UnknownImage."""
        ...

    async def id_of(self, name: str) -> str:
        """Return the id of the image of a name, without a question to Docker; raise UnknownImage."""
        ...


@dataclass(frozen=True, slots=True)
class _Made:
    """A created container: its space on disk (bytes, None is no limit), its binds as Docker lists them, its volumes."""

    room: int | None
    mounts: tuple[Mount, ...]
    volumes: tuple[Staged, ...]


class Sandboxes:
    """All sandboxes of this host."""

    def __init__(
        self,
        config: HostConfig,
        operator: Operator,
        docker: Docker,
        images: LaunchableImages,
        daemons: Daemons,
        guard: NetGuard,
        cgroups: Cgroups,
        pausing: Pausing,
        records: RecordStore,
        rings: Rings,
        volumes: Volumes,
    ) -> None:
        self._config = config
        self._operator = operator
        self._run = Path(config.run_dir)
        self._docker = docker
        self._images = images
        self._daemons = daemons
        self._guard = guard
        self._cgroups = cgroups
        self._pausing = pausing
        self._records = records
        self._limits = GroupLimits()
        self._disks = Disks(Path(config.state_dir) / "hostd" / "disks")
        self._disk_rate = DiskRate(Path(config.state_dir) / "hostd" / "disk-limits", config.disk_bandwidth)
        self._ledgers = Ledgers(Path(config.state_dir) / "hostd" / "ledgers")
        self._rings = rings
        self._volumes = volumes
        self._known: dict[str, HostSandbox] = {}
        self._launching = asyncio.Semaphore(config.launch_concurrency)
        self._endings = ShieldedTasks()
        self._reconnecting: set[asyncio.Task[None]] = set()
        self._documents = 0
        """The number of documents of the operator that the compiler has read."""
        self._following: asyncio.Task[None] | None = None
        self._asked: set[tuple[str, str]] = set()
        self._rules = rules_digest(config.slot_plan)
        self.plans = Plans(self._run / "plans")
        self.slots = SlotPool(self._run / "netns", config.uids.workers, config.slot_plan)
        self.closing = False
        self.refusal: Callable[[], str] = lambda: ""
        """Returns why no launch is allowed now, or an empty text. Each launch calls it."""
        self.gone: Callable[[], None] = lambda: None
        """Called after a sandbox was removed completely."""

    async def launch(self, spec: Launch) -> PolicyInForce:
        """Launch one sandbox. Return its policy when its container has started.

        Raises:
            wire.RequestError: the launch failed; no part of the sandbox is left.
        """
        if self.closing:
            raise wire.RequestError(wire.Code.UNAVAILABLE, "the host is stopping")
        if why := self.refusal():
            raise wire.RequestError(wire.Code.UNAVAILABLE, f"nothing is launched: {why}"[:300])
        if spec.sandbox in self._known:
            raise wire.RequestError(wire.Code.EXISTS, "there is a sandbox of this id")
        self._operator.judge(spec, len(self._known))
        sandbox = HostSandbox(spec.sandbox, 1, spec.runtime)
        self._known[spec.sandbox] = sandbox
        return await self._endings.whole(self._make(sandbox, spec))

    async def _make(self, sandbox: HostSandbox, spec: Launch) -> PolicyInForce:
        async with sandbox.lock:
            try:
                async with self._launching:
                    if sandbox.leaving or self.closing:
                        raise wire.RequestError(wire.Code.UNAVAILABLE, "the sandbox is being removed")
                    return await self._launch(sandbox, spec)
            except BaseException as error:
                residue = await self._unmake(sandbox)
                if residue:
                    _log.error("launch of %s left: %s", spec.sandbox, "; ".join(residue))
                raise as_refusal(error) from error

    def adopt(self, record: SandboxRecord, slot: slots.Slot) -> None:
        """Adopt a sandbox that runs. It gets a worker as soon as possible, with the policy that was in force.

        Raises:
            OSError: its ingress listener cannot be made; the sandbox was not adopted.
        """
        sandbox = HostSandbox(record.sandbox, record.generation, record.runtime, phase="running", running=True)
        sandbox.seed, sandbox.images, sandbox.given = record.seed, record.images, dict(record.given)
        sandbox.slot, sandbox.slot_index, sandbox.container = slot, slot.index, record.container
        sandbox.selection, sandbox.compiled, sandbox.policy = record.selection, record.compiled, record.policy
        sandbox.paused = self._pausing.was_paused(sandbox)
        sandbox.ingress = self._listen(record.sandbox)
        self.plans.adopt(record.container or "")
        self.slots.reserve(slot.index)
        self._known[record.sandbox] = sandbox
        sandbox.watch = asyncio.create_task(self._watch(sandbox), name=f"watch-{record.sandbox}")

    async def gated(self, seconds: float) -> None:
        """Wait until every running sandbox has a worker, for at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(sandbox.running and sandbox.worker is None for sandbox in self._known.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    def _write_down(self, sandbox: HostSandbox) -> None:
        self._records.write(sandbox.record(self._config.uids.worker_base, self._rules))

    async def _launch(self, sandbox: HostSandbox, spec: Launch) -> PolicyInForce:
        began = time.monotonic()
        compiled, provided = await self._operator.compile(spec.selection, sandbox.seed)
        sandbox.selection, sandbox.compiled = spec.selection, compiled
        self._write_down(sandbox)
        # Gateway and container are made concurrently. The container cannot start without the plan.
        image = asyncio.create_task(self._image(spec), name=f"image-{spec.sandbox}")
        (slotted, gated), (created, made) = await both(
            self._gate(sandbox, spec, image), self._create(sandbox, spec, image)
        )
        self._plan(sandbox, spec, made)
        await self._docker.start(sandbox.container or "")
        await asyncio.to_thread(self._limit_disk, sandbox)
        if spec.volumes:
            await self._volumes.settle(spec.sandbox)
        sandbox.phase = "running"
        self._write_down(sandbox)
        sandbox.running = True
        sandbox.watch = asyncio.create_task(self._watch(sandbox), name=f"watch-{spec.sandbox}")
        ended = time.monotonic()
        seconds = {
            "slot": slotted - began,
            "gateway": gated - slotted,
            "worker": 0.0 if sandbox.worker is None else sandbox.worker.took,
            "create": created - began,
            "start": ended - max(gated, created),
            "launch": ended - began,
        }
        timing = {f"{name}_ms": round(value * 1000, 1) for name, value in seconds.items()}
        _log.info("launched %s on %s: %s", spec.sandbox, spec.runtime, json.dumps(timing))
        return PolicyInForce(sandbox.policy, provided)

    async def _image(self, spec: Launch) -> LocalImage:
        """Return the image of a launch, once: the vault learns of the image that the container is made of."""
        if spec.snapshot is None:
            return await self._images.image(spec.image)
        return await self._docker.snapshot_image(spec.snapshot)

    async def _gate(self, sandbox: HostSandbox, spec: Launch, image: asyncio.Task[LocalImage]) -> tuple[float, float]:
        """Take a slot and spawn a worker that has confirmed its policy. Return the time at which each was complete."""
        sandbox.slot = await self.slots.take()
        sandbox.slot_index = sandbox.slot.index
        slotted = time.monotonic()
        sandbox.ingress = self._listen(spec.sandbox)
        self._write_down(sandbox)
        self._ledgers.create(spec.sandbox)
        await self._daemons.available(_PATIENCE_SECONDS)  # a daemon that died is usually back earlier
        # The files of a restored sandbox are those of a former one: it has no image for the vault.
        sandbox.images = (spec.image, (await image).id) if spec.snapshot is None else ()
        sandbox.worker = await self._spawn(sandbox)
        return slotted, time.monotonic()

    async def _create(self, sandbox: HostSandbox, spec: Launch, found: asyncio.Task[LocalImage]) -> tuple[float, _Made]:
        """Create the container, without its plan. Return the time, and what the plan needs."""
        image = await found
        volumes = await self._volumes.stage(spec.sandbox, spec.volumes)
        files = write_files(self._run / "sandboxes" / spec.sandbox, spec, self._operator.ca_bundle(spec.ca_root))
        binds = [VolumeBind(volume.source, volume.target, volume.read_only) for volume in volumes]
        plan = plan_container(spec, image.id, files, Path(self._config.execd), binds)
        layout, _ = await both(self._contain(sandbox, plan), self._prepare_disk(spec))
        room = await self._attach_disk(spec, layout.layer)
        if sandbox.runtime is Runtime.RUNSC:
            await asyncio.to_thread(keep_tmp_on_disk, layout)
        return time.monotonic(), _Made(room, layout.mounts, volumes)

    async def _contain(self, sandbox: HostSandbox, plan: ContainerPlan) -> Layout:
        sandbox.container = await self._docker.create(plan)
        self._write_down(sandbox)
        await self._docker.judge_users(sandbox.container, plan.image)
        return await self._docker.layout(sandbox.container)

    def _listen(self, sandbox: str) -> socket.socket:
        """Make the ingress listener. Connections wait in it while there is no worker."""
        listener = wire.bind_unix(self._run / "ingress" / f"{sandbox}.sock", 0o660, (0, self._config.uids.serve))
        listener.listen(128)
        return listener

    async def _spawn(self, sandbox: HostSandbox) -> WorkerProcess:
        """Return a new worker that has confirmed its policy. A worker that does not confirm it is ended."""
        if sandbox.slot is None or sandbox.ingress is None or sandbox.slot_index is None:
            raise RuntimeError("no slot")
        identity = WorkerIdentity(
            sandbox=sandbox.id,
            generation=sandbox.generation,
            uid=self._config.uids.worker_base + sandbox.slot_index,
            gateway_netns=sandbox.slot.gateway,
            images=sandbox.images,
        )
        ledger, guard = self._ledgers.open(sandbox.id), self._guard.lives
        try:
            worker = await spawn_worker(
                identity,
                sandbox.ingress,
                ledger,
                self._rings,
                self._daemons,
                self._guard,
                self._cgroups,
                self._limits,
                partial(self._channel_ended, sandbox),
            )
        finally:
            os.close(ledger)
        try:
            if sandbox.paused:
                await worker.pause()
            compiled = sandbox.compiled
            sandbox.policy = await worker.configure(json.dumps(compiled), policy_digest(compiled), sandbox.seed)
            while guard != self._guard.lives:  # `guard_changed` informs the workers that exist already
                guard = self._guard.lives
                await worker.guarded(self._guard.pidfd)
        except BaseException:
            await finished(worker.end())
            raise
        return worker

    async def _prepare_disk(self, spec: Launch) -> None:
        if spec.disk_bytes is not None:
            await asyncio.to_thread(self._disks.prepare, spec.sandbox, spec.disk_bytes)

    async def _attach_disk(self, spec: Launch, layer: Path | None) -> int | None:
        """Mount the sandbox's own disk under the container's root file system. Return its bytes, None: no limit."""
        if spec.disk_bytes is None:
            return None
        if layer is None:
            raise DockerError("the storage driver is not overlay2: what a sandbox writes cannot be bounded")
        return await asyncio.to_thread(self._disks.attach, spec.sandbox, layer)

    def _limit_disk(self, sandbox: HostSandbox) -> None:
        number = self._disks.number(sandbox.id)
        if number is not None and sandbox.container is not None:
            self._disk_rate.limit(sandbox.container, number)

    def _unlimit_disk(self, sandbox: HostSandbox) -> list[str]:
        """Remove the limit of a sandbox's device, so that its removal does not wait for it; return what is left."""
        number = self._disks.number(sandbox.id)
        try:
            if number is not None:
                self._disk_rate.clear(number)
        except OSError as error:
            return [f"disk limit of {number}: {error.strerror}"]
        return []

    def _plan(self, sandbox: HostSandbox, spec: Launch, made: _Made) -> None:
        """Write the launch plan. It lets the container start, once."""
        if sandbox.slot is None or sandbox.container is None:
            raise RuntimeError("no slot")
        planned = {volume.target for volume in made.volumes}
        plan = {
            "container": sandbox.container,
            "sandbox": sandbox.id,
            "runtime": spec.runtime,
            "netns": str(sandbox.slot.sandbox),
            "netns_inode": sandbox.slot.sandbox_inode,
            "binds": {
                mount.destination: [mount.source, mount.read_only]
                for mount in made.mounts
                if mount.destination not in planned
            },
            "volumes": {
                volume.target: [volume.source, volume.read_only, volume.device, volume.inode] for volume in made.volumes
            },
            "room": made.room,
            "isolation": spec.isolation,
            "users": sandbox_users(sandbox.slot.index),
        }
        self.plans.write(sandbox.container, plan)

    async def _watch(self, sandbox: HostSandbox) -> None:
        """Replace the worker of a sandbox each time it has ended."""
        attempt = 0
        while True:
            worker = sandbox.worker
            born = time.monotonic()
            if worker is not None:
                await worker.ended()
            async with sandbox.lock:
                if not sandbox.running:
                    return
                attempt = 0 if time.monotonic() - born > _CALM_SECONDS else attempt
                await self._respawn(sandbox, attempt)
                attempt += 1

    async def _respawn(self, sandbox: HostSandbox, attempt: int) -> None:
        old, sandbox.worker = sandbox.worker, None
        if old is not None:
            if left := await taken("gateway worker", finished(old.end())):
                _log.error("the ended worker of %s left: %s", sandbox.id, "; ".join(left))
                sandbox.unended.append(old)
            _log.warning("worker of %s ended (generation %d)", sandbox.id, sandbox.generation)
        await self._daemons.available()
        await asyncio.sleep(_RESPAWN_BACKOFF[min(attempt, len(_RESPAWN_BACKOFF) - 1)])
        if attempt:
            await self._daemons.fresh_zygote()
        sandbox.generation += 1
        sandbox.restarts += 1
        try:
            self._write_down(sandbox)
            sandbox.worker = await self._spawn(sandbox)
        except Exception as error:  # noqa: BLE001 - closes: it stays without a worker, and the next attempt comes
            _log.warning("no new worker for %s: %s", sandbox.id, type(error).__name__)

    def reconnect(self, daemon: str) -> None:
        """Give every worker a channel to the new process of auditd or vaultd. This does not wait."""
        for sandbox in list(self._known.values()):
            self._begin(self._reconnect(sandbox, daemon), f"reconnect-{sandbox.id}")

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._reconnecting.add(task)
        task.add_done_callback(self._reconnecting.discard)

    def _channel_ended(self, sandbox: HostSandbox, daemon: str) -> None:
        """Give a worker the new channel that it requests, one at a time. While the daemon is down all workers wait."""
        if sandbox.worker is not None and (sandbox.id, daemon) not in self._asked and self._daemons.connected(daemon):
            self._asked.add((sandbox.id, daemon))
            self._begin(self._renew_channel(sandbox, daemon, sandbox.worker.reconnects), f"channel-{sandbox.id}")

    async def _renew_channel(self, sandbox: HostSandbox, daemon: str, reconnects: int) -> None:
        try:
            _log.warning("worker of %s has lost its channel to %s", sandbox.id, daemon)
            await self._reconnect(sandbox, daemon, reconnects)
            await asyncio.sleep(_CHANNEL_SECONDS)
        finally:
            self._asked.discard((sandbox.id, daemon))

    async def _reconnect(self, sandbox: HostSandbox, daemon: str, reconnects: int | None = None) -> None:
        # Under the lock, because a worker in its spawn can be attached to the former process.
        async with sandbox.lock:
            if (worker := sandbox.worker) is None or reconnects not in (None, worker.reconnects):
                return  # it has a new channel already
            try:
                await worker.reconnect(daemon)
            except NotAttached as error:  # the worker requests a channel of the daemon's next process
                _log.warning("%s took no channel of %s: %s", daemon, sandbox.id, error)
            except (OSError, wire.RemoteError) as error:  # ConnectionError and TimeoutError are OSErrors
                _log.warning("worker of %s has no channel to %s: %s", sandbox.id, daemon, type(error).__name__)
                worker.kill()  # a new worker is spawned

    async def guard_changed(self, pidfd: int) -> None:
        """Send all workers the new guard concurrently: a worker that does not read delays no other."""
        workers = [sandbox.worker for sandbox in self._known.values() if sandbox.worker is not None]
        await asyncio.gather(*(worker.guarded(pidfd) for worker in workers))

    async def configure(self, name: str, selection: str, *, decided: bool) -> PolicyInForce:
        """Put another policy in force and return it. After a refusal the former policy stays in force.

        hostd records the policy after the worker has confirmed it. If a process dies meanwhile, one of the two policies
        is in force afterwards.

        Args:
            decided: a new worker gets this policy from now on, also if the present worker does not confirm it.
        """
        sandbox = self._get(name)
        while True:
            document = self._documents
            policy, provided = await self._operator.compile(selection, sandbox.seed)
            if decided:  # before the lock: a spawn can hold it
                sandbox.selection, sandbox.compiled = selection, policy
            async with self._turn(sandbox, decided=decided):
                if self._get(name) is not sandbox:  # it was removed and launched again
                    raise wire.RequestError(wire.Code.UNAVAILABLE, "the sandbox is being removed")
                if document == self._documents:
                    digest = await self._put_in_force(sandbox, selection, policy, decided=decided)
                    return PolicyInForce(digest, provided)

    async def claimable(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return those of the sandboxes whose image may still be started, under the name that they were started by."""
        there = {name: images for name in names if (one := self._known.get(name)) and (images := one.images)}
        listed = {images: await self._is_listed(*images) for images in set(there.values())}
        return tuple(name for name, images in there.items() if listed[images])

    async def claim(self, name: str, selection: str, env: Mapping[str, str]) -> PolicyInForce:
        """Put the policy of a claim in force at an idle member, and return it. Its output shows no value of `env`.

        Raises:
            wire.RequestError: `unknown_image`, because its image may not be started now; and those of `configure`.
        """
        sandbox = self._get(name)
        if not sandbox.images or not await self._is_listed(*sandbox.images):
            raise wire.RequestError(wire.Code.UNKNOWN_IMAGE, "the image of this sandbox may not be started any more")
        sandbox.given = dict(env)
        return await self.configure(name, selection, decided=False)

    async def _is_listed(self, image: str, ident: str) -> bool:
        try:
            return await self._images.id_of(image) == ident
        except UnknownImage:
            return False

    def document_changed(self) -> None:
        """Put the operator's new document in force in every sandbox. This does not depend on `serve`."""
        self._documents += 1
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow(), name="follow-document")

    async def _follow(self) -> None:
        done = 0
        while done != self._documents:
            done = self._documents
            for outcome in await asyncio.gather(
                *(self._recompile(sandbox) for sandbox in list(self._known.values())), return_exceptions=True
            ):
                if isinstance(outcome, Exception):
                    _log.error("a sandbox is not under the changed document: %s", type(outcome).__name__)

    async def _recompile(self, sandbox: HostSandbox) -> None:
        """Compile a sandbox's selection under the present document and put the policy in force.

        A selection that cannot be compiled closes the sandbox.
        """
        async with self._turn(sandbox, decided=True):
            if not sandbox.running:
                return
            try:
                policy, _ = await self._operator.compile(sandbox.selection, sandbox.seed)
            except wire.RequestError as error:
                if error.code == wire.Code.UNAVAILABLE:  # a new compiler reports its document
                    return
                policy = {}
            if policy == sandbox.compiled:
                return
            try:
                await self._put_in_force(sandbox, sandbox.selection, policy, decided=True)
            except wire.RequestError as error:
                _log.warning("%s is not under the changed document yet: %s", sandbox.id, error.code)

    async def _put_in_force(self, sandbox: HostSandbox, selection: str, policy: Policy, *, decided: bool) -> str:
        """Let the worker confirm a policy, and record it. The caller holds the lock."""
        if decided:
            self._keep(sandbox, selection, policy)
        if sandbox.worker is None or not sandbox.running:
            raise wire.RequestError(wire.Code.UNAVAILABLE, "the sandbox has no gateway worker now")
        try:
            digest = await sandbox.worker.configure(
                json.dumps(policy),
                policy_digest(policy),
                sandbox.seed,
                _DECIDED_SECONDS if decided else _CONFIRM_SECONDS,
            )
        except wire.FrameError:
            if decided:
                sandbox.worker.kill()
            raise wire.RequestError(wire.Code.TOO_LARGE, "the policy is too large for a gateway") from None
        except wire.RemoteError as error:
            # After "internal" its state is unknown. A former policy must not stay in force after a decision.
            unchanged = sandbox.policy == policy_digest(policy) != ""
            if error.code == wire.Code.INTERNAL or (decided and not unchanged):
                sandbox.worker.kill()
            code = error.code if error.code in _REFUSALS else wire.Code.GATEWAY
            raise wire.RequestError(code, error.message[:500]) from error
        except (ConnectionError, TimeoutError) as error:
            # Its state is unknown. A new worker has a known policy.
            sandbox.worker.kill()
            raise wire.RequestError(wire.Code.UNAVAILABLE, "the gateway worker did not confirm") from error
        former = sandbox.selection, sandbox.compiled, sandbox.policy
        sandbox.selection, sandbox.compiled, sandbox.policy = selection, policy, digest
        try:
            self._write_down(sandbox)
        except OSError as error:
            sandbox.selection, sandbox.compiled, sandbox.policy = former
            sandbox.worker.kill()
            raise wire.RequestError(wire.Code.UNAVAILABLE, "the policy could not be written down") from error
        return digest

    @contextlib.asynccontextmanager
    async def _turn(self, sandbox: HostSandbox, *, decided: bool) -> AsyncIterator[None]:
        """Hold the lock. If a worker delays a decided policy, it is killed."""
        if decided and (worker := sandbox.worker) is not None:
            try:
                await within(worker.pid, _DECIDED_SECONDS, sandbox.lock.acquire())
            except TimeoutError:
                worker.kill()
                await sandbox.lock.acquire()
        else:
            await sandbox.lock.acquire()
        try:
            yield
        finally:
            sandbox.lock.release()

    def _keep(self, sandbox: HostSandbox, selection: str, policy: Policy) -> None:
        """Let the next worker begin with a policy. If it cannot be recorded, hostd's death loses it."""
        sandbox.selection, sandbox.compiled = selection, policy
        try:
            self._write_down(sandbox)
        except OSError as error:
            _log.error("the configuration of %s is not written down: %s", sandbox.id, error.strerror)

    def _get(self, name: str) -> HostSandbox:
        if (sandbox := self._known.get(name)) is None:
            raise wire.RequestError(wire.Code.UNKNOWN_SANDBOX, "there is no such sandbox")
        return sandbox

    async def pause(self, name: str) -> None:
        """Freeze a sandbox. On return none of its processes runs, and its gateway forwards nothing.

        Raises:
            wire.RequestError: it has no process (`not_running`), or it cannot be frozen, and runs.
        """
        await self._endings.whole(self._change_pause(self._get(name), self._pausing.pause))

    async def resume(self, name: str) -> None:
        """Let a paused sandbox run.

        Raises:
            wire.RequestError: it has no process (`not_running`), or stays paused.
        """
        await self._endings.whole(self._change_pause(self._get(name), self._pausing.resume))

    async def _change_pause(self, sandbox: HostSandbox, change: Callable[[HostSandbox], Awaitable[None]]) -> None:
        if sandbox.capture is not None:
            await asyncio.wait({sandbox.capture}, timeout=_CAPTURE_SECONDS)
        async with sandbox.lock:
            if not sandbox.running:
                raise wire.RequestError(wire.Code.NOT_RUNNING, "the sandbox is being removed, or has been cut off")
            if sandbox.capture is not None:
                raise wire.RequestError(wire.Code.BUSY, "a snapshot of the sandbox is being taken")
            await change(sandbox)

    async def capture[T](self, name: str, capture: Callable[[HostSandbox], Coroutine[Any, Any, T]]) -> T:
        """Run `capture` on a running sandbox. A removal cancels it, and so does the end of the caller.

        Raises:
            wire.RequestError: the sandbox does not run, is paused or removed (`not_running`), or is captured (`busy`).
        """
        sandbox = self._get(name)
        async with sandbox.lock:
            if not sandbox.running or sandbox.paused or sandbox.container is None:
                raise wire.RequestError(wire.Code.NOT_RUNNING, "the sandbox does not run")
            if sandbox.capture is not None:
                raise wire.RequestError(wire.Code.BUSY, "a snapshot of the sandbox is being taken")
            task = asyncio.create_task(capture(sandbox), name=f"capture-{name}")
            sandbox.capture = task
        task.add_done_callback(lambda _: self._captured(sandbox))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await finished(asyncio.wait({task}))
            raise
        if task.cancelled():
            raise wire.RequestError(wire.Code.NOT_RUNNING, "the sandbox was removed meanwhile")
        return task.result()

    def _captured(self, sandbox: HostSandbox) -> None:
        sandbox.capture = None

    def _compare_pause(self, sandbox: HostSandbox, *, by_docker: bool | None) -> None:
        """Begin to complete a pause, or the end of one, that another program made."""
        try:
            differs = self._pausing.differs(sandbox, by_docker=by_docker)
        except OSError as error:
            _log.warning("it cannot be read whether %s is frozen: %s", sandbox.id, error.strerror)
            return
        if differs:
            self._begin(self._settle_pause(sandbox), f"pause-{sandbox.id}")

    async def _settle_pause(self, sandbox: HostSandbox) -> None:
        with contextlib.suppress(wire.RequestError, DockerError, OSError):  # the next list compares again
            await self._change_pause(sandbox, self._pausing.settle)

    async def remove(self, name: str, turn: asyncio.Semaphore | None = None, *, lines: int = 0) -> Removed:
        """Remove a sandbox. Return what is left of it. An unknown sandbox can still have a container.

        Its traffic ends at once. What takes longer waits for its `turn`.

        Args:
            lines: the last lines of its output that are read before its container is removed.
        """
        sandbox = self._known.get(name)
        if sandbox is None:
            sandbox = HostSandbox(name, 1, self._config.runtimes[0])
        sandbox.running, sandbox.leaving = False, True
        if sandbox.watch is not None:
            sandbox.watch.cancel()  # this also cancels a spawn
        _kill(sandbox)
        return await self._endings.whole(self._leave(sandbox, turn or asyncio.Semaphore(), lines))

    async def _leave(self, sandbox: HostSandbox, turn: asyncio.Semaphore, lines: int) -> Removed:
        async with turn, sandbox.lock:
            residue = await self._unmake(sandbox, lines=lines)
            return Removed(residue, sandbox.printed if lines else None)

    def watched(self) -> tuple[tuple[str, slots.Slot, str], ...]:
        """Return (id, slot, container) of every running sandbox."""
        return tuple(
            (sandbox.id, sandbox.slot, sandbox.container)
            for sandbox in self._known.values()
            if sandbox.running and sandbox.slot is not None and sandbox.container is not None
        )

    def computing(self) -> tuple[Computing, ...]:
        """Return the container and the worker of each running sandbox that has both."""
        return tuple(
            Computing(sandbox.container, sandbox.worker.pid, sandbox.worker.identity.cgroup)
            for sandbox in self._known.values()
            if sandbox.running and sandbox.container is not None and sandbox.worker is not None
        )

    async def cut(self, name: str, slot: slots.Slot, why: str) -> None:
        """Cut a sandbox off permanently and remove its parts. It is listed with its alarm until its removal.

        Does nothing if another sandbox runs in `slot` now.
        """
        sandbox = self._known.get(name)
        if sandbox is None or not sandbox.running or sandbox.slot is not slot:
            return
        sandbox.running, sandbox.alarm = False, why
        if sandbox.watch is not None:
            sandbox.watch.cancel()
        _kill(sandbox)
        await asyncio.to_thread(slots.sever, slot)
        async with sandbox.lock:
            if self._known.get(name) is sandbox:
                residue = await finished(self._unmake(sandbox, forget=False, lines=_KEPT_LINES))
                if residue:
                    _log.error("cutting off %s left: %s", name, "; ".join(residue))

    def names(self) -> tuple[str, ...]:
        """Return the ids of all sandboxes."""
        return tuple(self._known)

    async def remove_all(self) -> tuple[str, ...]:
        """Remove all sandboxes. Return what is left of them.

        A few have their turn at once, because dockerd does not remove hundreds in time. A removal that failed is tried
        again.
        """
        residue: list[str] = []
        for _ in range(_REMOVALS):
            turn = asyncio.Semaphore(self._config.launch_concurrency)
            removals = (self.remove(name, turn) for name in list(self._known))
            residue.clear()
            for result in await asyncio.gather(*removals, return_exceptions=True):
                if isinstance(result, BaseException):
                    residue.append(f"removal failed: {type(result).__name__}")
                else:
                    residue += result.residue
            if not residue:
                break
        return tuple(residue)

    async def release(self) -> None:
        """End all workers. Everything else stays for the next hostd."""
        for sandbox in list(self._known.values()):
            sandbox.running = False
            if sandbox.watch is not None:
                sandbox.watch.cancel()
                await asyncio.gather(sandbox.watch, return_exceptions=True)
            if sandbox.worker is not None:
                await sandbox.worker.end()

    async def _unmake(self, sandbox: HostSandbox, *, forget: bool = True, lines: int = 0) -> tuple[str, ...]:
        """Remove all parts of a sandbox, in any state. The caller holds the lock."""
        _kill(sandbox)
        if sandbox.capture is not None:
            sandbox.capture.cancel()
            await asyncio.wait({sandbox.capture})
        sandbox.running = False
        sandbox.phase = "removing"
        if sandbox.id in self._known:
            with contextlib.suppress(Exception):  # without it the next hostd adopts it, and `serve` removes it
                self._write_down(sandbox)
        if sandbox.watch is not None:
            sandbox.watch.cancel()
            await asyncio.gather(sandbox.watch, return_exceptions=True)
            sandbox.watch = None
        residue: list[str] = []
        workers = [*sandbox.unended, *([] if sandbox.worker is None else [sandbox.worker])]
        sandbox.unended, sandbox.worker = [], None
        for worker in workers:
            if left := await taken("gateway worker", worker.end()):
                residue += left
                sandbox.unended.append(worker)
        if sandbox.ingress is not None:
            sandbox.ingress.close()
            sandbox.ingress = None
        residue += await taken("container", self._remove_container(sandbox, lines))
        if sandbox.slot is not None:
            left = await taken("slot", asyncio.to_thread(slots.destroy, sandbox.slot))
            residue += left
            sandbox.slot = sandbox.slot if left else None
        residue += await taken("files", asyncio.to_thread(self._remove_files, sandbox))
        if sandbox.slot_index is not None and not residue:
            self.slots.release(sandbox.slot_index)
            sandbox.slot_index = None
        if not residue and self._known.get(sandbox.id, sandbox) is sandbox:
            self._records.remove(sandbox.id)
            if forget:
                self._known.pop(sandbox.id, None)
                self.gone()
        return tuple(residue)

    async def _remove_container(self, sandbox: HostSandbox, lines: int) -> list[str]:
        """Remove the container, also parts that Docker does not remove after its own death or a failed start.

        While Docker is down its processes are ended; the next attempt removes the container itself. The end of its
        output is read before.
        """
        known = {sandbox.container} if sandbox.container is not None else set()
        left = []
        for container in known:
            await self._pausing.end(container)
        unlimited = await asyncio.to_thread(self._unlimit_disk, sandbox)
        if lines and sandbox.printed is None and sandbox.container is not None:
            try:
                query = LogTail(lines, most=MOST_KEPT)
                sandbox.printed = await self._read(sandbox, query, _LAST_SECONDS)
            except Exception as error:  # noqa: BLE001 - closes: no output keeps a sandbox from being removed
                _log.warning("the output of %s is lost: %s", sandbox.id, type(error).__name__)
        try:
            known |= {container for container, _ in await self._docker.ours(sandbox.id)}
            for container in known:
                await self._docker.remove(container)
            left = [f"container {container}" for container, _ in await self._docker.ours(sandbox.id)]
        except DockerError as error:
            left = [f"container of {sandbox.id}: {error}"]
        for container in known:
            self.plans.forget(container)
            left += await asyncio.to_thread(containers.end_processes, container)
            left += await asyncio.to_thread(remove_container_groups, container)
        left += await asyncio.to_thread(self._disks.detach, sandbox.id)
        left += await self._volumes.release(sandbox.id)
        return left + unlimited

    def _remove_files(self, sandbox: HostSandbox) -> list[str]:
        paths = [self._run / "ingress" / f"{sandbox.id}.sock", self._run / "sandboxes" / sandbox.id]
        paths[0].unlink(missing_ok=True)
        shutil.rmtree(paths[1], ignore_errors=True)
        return [*(f"file {path}" for path in paths if os.path.lexists(path)), *self._ledgers.remove(sandbox.id)]

    async def list(self) -> tuple[HostSandboxState, ...]:
        """Return the state of every sandbox."""
        running: frozenset[str] = frozenset()
        with contextlib.suppress(DockerError):  # then Docker is asked for each container
            running = await self._docker.running()
        known = list(self._known.values())
        states = tuple(await asyncio.gather(*(describe(sandbox, self._docker, running) for sandbox in known)))
        for sandbox, state in zip(known, states, strict=True):
            by_docker = state.state is HostState.PAUSED and sandbox.container not in running
            if sandbox.running and not sandbox.lock.locked() and sandbox.capture is None:
                self._compare_pause(sandbox, by_docker=None if state.state is HostState.UNKNOWN else by_docker)
        return states

    async def inspect(self, name: str) -> Inspected:
        """Return the state of one sandbox and its network namespaces."""
        sandbox = self._get(name)
        described = await describe(sandbox, self._docker)
        if (slot := sandbox.slot) is None:
            return Inspected(described, None)
        links = tuple(await asyncio.to_thread(netns.links, slot.sandbox))
        inodes = tuple(sorted(slot.inodes))
        return Inspected(described, SlotDescription(str(slot.sandbox), str(slot.gateway), inodes, links))

    async def output(self, name: str, lines: int, since: int | None) -> Printed:
        """Return the last lines of the output of a sandbox's entrypoint. Of one that was cut off, what was read then.

        Raises:
            wire.RequestError: there is no such sandbox, or Docker does not give the output (`docker`).
        """
        sandbox = self._get(name)
        if sandbox.printed is not None:
            kept = sandbox.printed.text.removesuffix("\n").split("\n")
            return Printed("\n".join(kept[-lines:]), sandbox.printed.truncated and lines > len(kept))
        if sandbox.container is None:
            return Printed("", False)
        try:
            return await self._read(sandbox, LogTail(lines, since), _READ_SECONDS)
        except DockerError as error:
            raise wire.RequestError(wire.Code.DOCKER, str(error)) from error

    async def _read(self, sandbox: HostSandbox, query: LogTail, seconds: float) -> Printed:
        own = containers.environment(sandbox.id, {})
        container = sandbox.container or ""
        return Printed(*await self._docker.output(container, query, own, sandbox.given, seconds))


def _kill(sandbox: HostSandbox) -> None:
    """Kill the workers of a sandbox, which ends its traffic. This does not wait."""
    for worker in (*sandbox.unended, *([] if sandbox.worker is None else [sandbox.worker])):
        worker.kill()
