"""One sandbox in hostd: its parts, its record, and its description in answers.

`sandboxes` changes it.
"""

import asyncio
import secrets
import socket
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import wire
from runtimes.engine.disk import DiskError
from runtimes.engine.docker import Docker, DockerError, UnknownImage, UnusableImage
from runtimes.net import netns, slots
from runtimes.records import Phase, SandboxRecord
from runtimes.workers import WorkerProcess
from wire.api.hostd import HostSandboxState, Printed, Runtime
from wire.api.states import HostState


@dataclass(slots=True)
class HostSandbox:
    """The parts of one sandbox. A part is None before it is made and after it was removed."""

    id: str
    generation: int
    runtime: Runtime
    seed: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """Of its placeholders, for its whole life: each of its workers gets it."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    slot: slots.Slot | None = None
    slot_index: int | None = None
    ingress: socket.socket | None = None
    worker: WorkerProcess | None = None
    watch: asyncio.Task[None] | None = None
    selection: str = ""
    """What `compiled` was compiled from, as a JSON text."""
    compiled: dict[str, Any] = field(default_factory=dict)
    """The policy that its next worker begins with."""
    policy: str = ""
    """The digest of the policy that its worker has confirmed."""
    images: tuple[str, ...] | None = None
    """Name and id of the image that it was started from, empty after a restore; None if a former release started it."""
    given: dict[str, str] = field(default_factory=dict, repr=False)
    """The variables that it got with its claim from a pool. No description of its container has them."""
    phase: Phase = "launching"
    container: str | None = None
    restarts: int = 0
    running: bool = False
    paused: bool = False
    """Whether it is paused. The kernel has the state for the next hostd (`process.freezer`)."""
    paused_by_docker: bool = False
    """Whether another program paused its container, with Docker."""
    capture: asyncio.Task[Any] | None = None
    """The capture of its files for a snapshot. Meanwhile its processes can be frozen, and it is not paused."""
    leaving: bool = False
    unended: list[WorkerProcess] = field(default_factory=list)
    """Former workers that could not be removed completely."""
    alarm: str = ""
    """Why it was cut off, or empty. After that only this entry is left of it."""
    printed: Printed | None = None
    """The end of its output, once its container was removed and if it could be read."""

    def record(self, worker_base: int, rules: str) -> SandboxRecord:
        """Return its record; `rules` is the digest of its slot's rules."""
        slot, index = self.slot, self.slot_index
        return SandboxRecord(
            sandbox=self.id,
            runtime=self.runtime,
            phase=self.phase,
            generation=self.generation,
            uid=None if index is None else worker_base + index,
            slot=index,
            sandbox_inode=None if slot is None else slot.sandbox_inode,
            gateway_inode=None if slot is None else slot.gateway_inode,
            rules=rules,
            container=self.container,
            policy=self.policy,
            selection=self.selection,
            compiled=self.compiled,
            seed=self.seed,
            images=self.images,
            given=self.given,
        )


async def describe(sandbox: HostSandbox, docker: Docker, running: Container[str] = ()) -> HostSandboxState:
    """Return the state of a sandbox for `list` and `inspect`. Docker is not asked for the containers in `running`."""
    state, reason, exit_code, oom = HostState.CREATING, "", None, False
    if sandbox.alarm:
        state, reason = HostState.ALARM, sandbox.alarm
    elif sandbox.container in running:
        state = HostState.RUNNING
    elif sandbox.container is not None:
        try:
            found = await docker.state(sandbox.container)
        except DockerError as error:
            state, reason = HostState.UNKNOWN, str(error)
        else:
            if found is None:
                state, reason = HostState.GONE, "another program removed the container"
            else:
                state, reason, oom = _container_state(found.status), found.error, found.oom
                exit_code = found.exit_code if state in (HostState.EXITED, HostState.DEAD) else None
                if state is HostState.UNKNOWN:
                    reason = f"Docker calls the state of the container {found.status[:40]!r}"
    if state is HostState.RUNNING and sandbox.paused:
        state, reason = HostState.PAUSED, "The sandbox is paused."
    return HostSandboxState(
        sandbox=sandbox.id,
        state=state,
        reason=reason,
        exit_code=exit_code,
        oom=oom,
        worker_pid=None if sandbox.worker is None else sandbox.worker.pid,
        container=sandbox.container,
        slot=sandbox.slot_index,
        generation=sandbox.generation,
        restarts=sandbox.restarts,
        policy=sandbox.policy,
        alarm=sandbox.alarm,
    )


_OF_CONTAINERS = frozenset(HostState) - {HostState.CREATING, HostState.GONE, HostState.ALARM}


def _container_state(status: str) -> HostState:
    return HostState(status) if status in _OF_CONTAINERS else HostState.UNKNOWN


_CODES: tuple[tuple[type[BaseException], wire.Code, Callable[[BaseException], str]], ...] = (
    (UnknownImage, wire.Code.UNKNOWN_IMAGE, lambda error: "there is no such image on this host"),
    (UnusableImage, wire.Code.IMAGE, str),
    (DockerError, wire.Code.DOCKER, str),
    (DiskError, wire.Code.DISK, str),
    (netns.NftError, wire.Code.NETWORK, str),
    (wire.RemoteError, wire.Code.GATEWAY, str),
    (wire.FrameError, wire.Code.TOO_LARGE, lambda error: "the configuration is too large for a gateway"),
    (TimeoutError, wire.Code.TIMEOUT, lambda error: "a step took too long"),
    (ConnectionError, wire.Code.UNAVAILABLE, str),
    (OSError, wire.Code.HOST, lambda error: f"{type(error).__name__}: {getattr(error, 'strerror', '')}"),
)


def as_refusal(error: BaseException) -> BaseException:
    """Return the error of a launch for its caller."""
    for kind, code, text in _CODES:
        if isinstance(error, kind):
            return wire.RequestError(code, text(error)[:500])
    return error
