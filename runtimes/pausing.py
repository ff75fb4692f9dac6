"""Pauses and resumes one sandbox: its processes, and its gateway worker.

- The processes are frozen first, and then the worker cuts every flow and forwards nothing more. So what the sandbox
  sent before is cut off too, and a program notices it only after the resume.
- A resume is the reverse: first the worker, then the processes.
- The kernel's freezer has the state, and nothing else records it. hostd, Docker or the control plane can be killed
  between any two steps: the next hostd reads the state and gives the sandbox a worker that fits it.
- A worker that does not confirm is killed. The next one is paused before it has a policy, if the sandbox is.
- A `docker pause` of another program counts as a pause: the sandbox gets the rest of it. It ends with `resume`, or if
  that program thaws the container.

The caller holds the sandbox's lock.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import wire
from runtimes.engine.docker import Docker, DockerError
from runtimes.process.freezer import Freeze, Freezer, NoProcesses
from runtimes.sandbox import HostSandbox
from runtimes.workers import WorkerProcess
from wire.api.hostd import Runtime

_log = logging.getLogger(__name__)


class Pausing:
    """The pauses of all sandboxes of this host."""

    def __init__(self, freezer: Freezer, docker: Docker) -> None:
        self._freezer = freezer
        self._docker = docker

    def was_paused(self, sandbox: HostSandbox) -> bool:
        """Return whether the kernel holds a sandbox's processes, or begins to."""
        return sandbox.container is not None and self._freezer.state(sandbox.container) is not Freeze.THAWED

    def differs(self, sandbox: HostSandbox, *, by_docker: bool | None) -> bool:
        """Return whether another program seems to have paused a sandbox, or ended a pause; `settle` handles that.

        Args:
            by_docker: whether Docker said, a moment ago, that it has paused the container; None if it did not answer.
        """
        if by_docker is None:
            by_docker = sandbox.paused_by_docker
        return sandbox.paused != (by_docker or self.was_paused(sandbox)) or sandbox.paused_by_docker != by_docker

    async def settle(self, sandbox: HostSandbox) -> None:
        """Complete what another program did to a sandbox: a pause, or the end of one.

        What made the caller ask can be out of date, so Docker and the kernel are asked again.

        Raises:
            wire.RequestError: as `pause` and `resume`.
            DockerError: Docker does not answer.
        """
        state = await self._docker.state(sandbox.container or "")
        sandbox.paused_by_docker = state is not None and state.status == "paused"
        is_paused = sandbox.paused_by_docker or self.was_paused(sandbox)
        if is_paused and not sandbox.paused:
            await self.pause(sandbox)
        elif sandbox.paused and not is_paused:
            _log.warning("another program has thawed %s", sandbox.id)
            await self.resume(sandbox)

    async def pause(self, sandbox: HostSandbox) -> None:
        """Freeze a sandbox. A paused one is no error.

        Raises:
            wire.RequestError: it has no process (`not_running`), or it cannot be frozen, and runs.
        """
        try:
            await self._freezer.freeze(sandbox.container or "")
        except NoProcesses:
            raise wire.RequestError(wire.Code.NOT_RUNNING, "no process of the sandbox is left") from None
        except (OSError, TimeoutError) as error:
            _log.error("%s cannot be frozen: %s: %s", sandbox.id, type(error).__name__, error)
            raise wire.RequestError(wire.Code.HOST, "its processes cannot be frozen") from None
        sandbox.paused = True
        await _confirmed(sandbox, lambda worker: worker.pause())

    async def resume(self, sandbox: HostSandbox) -> None:
        """Let a sandbox run. One that is not paused is no error.

        Raises:
            wire.RequestError: it has no process (`not_running`), or stays paused.
        """
        sandbox.paused = False
        await _confirmed(sandbox, lambda worker: worker.resume())
        try:
            await self._thaw(sandbox.container or "", sandbox)
        except FileNotFoundError:
            raise wire.RequestError(wire.Code.NOT_RUNNING, "no process of the sandbox is left") from None
        except (OSError, DockerError) as error:
            _log.error("%s cannot be thawed: %s: %s", sandbox.id, type(error).__name__, error)
            sandbox.paused = True
            await _confirmed(sandbox, lambda worker: worker.pause())
            raise wire.RequestError(wire.Code.HOST, "its processes cannot be thawed") from None

    async def _thaw(self, container: str, sandbox: HostSandbox) -> None:
        if not sandbox.paused_by_docker:
            await asyncio.to_thread(self._freezer.thaw, container)
            return
        if sandbox.runtime is Runtime.RUNSC:  # its kernel must run to answer; runc thaws by itself
            await asyncio.to_thread(self._freezer.thaw, container)
        try:
            await self._docker.unpause(container)
        except DockerError:
            state = await self._docker.state(container)  # the other program can have done it meanwhile
            if state is not None and state.status == "paused":
                raise
        await asyncio.to_thread(self._freezer.thaw, container)
        sandbox.paused_by_docker = False

    async def end(self, container: str) -> None:
        """Let the processes of a paused container end. None of them executes another instruction."""
        await asyncio.to_thread(self._freezer.end, container)


async def _confirmed(sandbox: HostSandbox, change: Callable[[WorkerProcess], Awaitable[None]]) -> None:
    """Let the worker confirm a change, or kill it. Without a worker the sandbox is closed."""
    if (worker := sandbox.worker) is None:
        return
    try:
        await change(worker)
    except (wire.RemoteError, ConnectionError, TimeoutError) as error:
        _log.warning("the worker of %s did not confirm and is replaced: %s", sandbox.id, type(error).__name__)
        worker.kill()
