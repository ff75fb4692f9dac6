"""One gateway worker: spawned with its channels, configured before it lets a flow in, watched by a pidfd.

- The order is fixed: audit and vault channels and cgroup, fork, configuration. A step that fails ends the child.
- When auditd or vaultd is a new process, it gets a new channel and lives on; it sends what it had to record then. A
  daemon that ends before it has the channel costs no worker: the worker refuses what needs the daemon, and asks again.
- Its identity (sandbox, generation) is given to auditd and vaultd by us, never by the worker.
- Its standard error is a pipe of its own, logged within bounds under the sandbox's id.
- A worker is ended through its pidfd: a number that was used again is never hit.
- It may ask for a new channel when one has ended, and for nothing else.
- What it answers is believed nowhere: it confirms exactly what it was given, or counts as one that does not.
- A worker that hangs counts as ended. The evidence is its progress (answers to `ping`, changes of its ledger) and what
  it does with the processor (`liveness`), never how long an answer takes.
"""

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import wire
from runtimes.daemons import Daemons
from runtimes.net.guard import NetGuard
from runtimes.process import liveness
from runtimes.process.adopted import readable
from runtimes.process.cgroups import Cgroups, GroupLimits
from runtimes.process.finish import both, finished, together
from runtimes.process.liveness import within
from runtimes.process.output import WORKER, Output, pipe
from wire.api import auditd, vaultd, worker
from wire.api.zygote import Fork
from wire.frames import close_all
from wire.serving import handler

_SPAWN_SECONDS = 20.0
_CONFIGURE_SECONDS = 20.0
_END_SECONDS = 5.0
_PAGE = 4096
_RECONNECT_SECONDS = 5.0
_CHANNELS = {"auditd": worker.ChannelName.AUDIT, "vaultd": worker.ChannelName.VAULT}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The sandbox of a worker, and where the worker runs."""

    sandbox: str
    generation: int
    uid: int
    gateway_netns: Path

    @property
    def cgroup(self) -> str:
        """The name of its control group."""
        return f"{self.sandbox}.{self.generation}"


class NotAttached(Exception):
    """A daemon ended or did not answer while a worker's channel was handed to it; the worker is as it was."""


class WorkerProcess:
    """A running worker. Make one with `spawn_worker`."""

    def __init__(
        self,
        identity: WorkerIdentity,
        pid: int,
        control: wire.Client,
        daemons: Daemons,
        cgroups: Cgroups,
        ledger: int,
        output: Output,
    ) -> None:
        """Watch process `pid`, which writes `output`; `ledger` is read for signs of life and stays the caller's."""
        self.identity = identity
        self.pid = pid
        self.control = control
        self._daemons = daemons
        self._cgroups = cgroups
        self._pidfd = os.pidfd_open(pid)
        self._ledger = os.dup(ledger)
        self._output = output
        self._gone = False
        self.reconnects = 0
        """How many new channels it was given."""

    def _page(self) -> bytes:
        return os.pread(self._ledger, _PAGE, 0)

    async def configure(self, policy: str, digest: str, seconds: float = _CONFIGURE_SECONDS) -> str:
        """Give it a compiled policy (JSON text) and wait for its word; return the digest of the one in force now.

        Args:
            digest: of the policy, which it has to confirm.
            seconds: what it gets for it, of its own time (`liveness.within`).

        Raises:
            wire.RemoteError: it refused; what it had stays in force.
            ConnectionError, TimeoutError: it is gone or stuck, or confirms something else.
        """
        request = worker.Configure(self.identity.sandbox, self.identity.generation, policy)
        answer = await within(self.pid, seconds, self.control.ask(request, timeout=None))
        if answer.digest != digest:
            raise ConnectionError("the worker confirmed something else")
        return digest

    async def reconnect(self, daemon: str) -> None:
        """Give it a new channel to auditd or vaultd, which is a new process, and wait for its word.

        Raises:
            NotAttached: the daemon's fault; try again.
            wire.RemoteError, ConnectionError, TimeoutError, OSError: it has none now; end it.
        """
        with contextlib.ExitStack() as stack:
            there, here = map(stack.enter_context, socket.socketpair())
            try:
                await attach(self._daemons, daemon, there, self.identity)
            except OSError as error:  # ConnectionError and TimeoutError are OSErrors
                raise NotAttached(type(error).__name__) from error
            given = self.control.ask(worker.Rebind(_CHANNELS[daemon]), fds=[here.fileno()], timeout=None)
            await within(self.pid, _RECONNECT_SECONDS, given)
            self.reconnects += 1

    async def guarded(self, pidfd: int) -> None:
        """Give it the pidfd of a new guard. A worker that does not take it is killed."""
        try:
            await within(self.pid, _RECONNECT_SECONDS, self.control.tell(worker.Guarded(), fds=[pidfd]))
        except (ConnectionError, TimeoutError):
            self.kill()

    async def ended(self) -> None:
        """Wait until it has ended, or hangs."""
        hangs = await liveness.ended(self.pid, self.control, worker.Beat(), self._page)
        if hangs is not None:
            _log.error("the worker of %s hangs: %s", self.identity.sandbox, hangs)

    def kill(self) -> None:
        """Kill it; every call that waits for it ends. `end` clears away what is left."""
        if self._gone:
            return
        if not select.select([self._pidfd], [], [], 0)[0]:
            self._daemons.killed(self.pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self) -> tuple[str, ...]:
        """Kill it and remove its group; return what is left. May be called again when something was."""
        if not self._gone:
            self.kill()
            await self.control.close()
            try:
                async with asyncio.timeout(_END_SECONDS):
                    await readable(self._pidfd)
            except TimeoutError:
                return (f"worker process {self.pid}",)
            self._gone = True
            os.close(self._pidfd)
            os.close(self._ledger)
            self._output.close()
        return await asyncio.to_thread(self._cgroups.remove, self.identity.cgroup)


async def attach(daemons: Daemons, daemon: str, end: socket.socket, identity: WorkerIdentity) -> None:
    """Hand `end` to auditd or vaultd as the channel of the worker that is `identity`.

    Raises:
        wire.RemoteError, ConnectionError, TimeoutError: it was not taken.
    """
    requests: dict[str, wire.Request[wire.Done]] = {
        "auditd": auditd.Attach(auditd.Producer.GATEWAY, identity.sandbox, identity.generation),
        "vaultd": vaultd.Attach(identity.sandbox, identity.generation),
    }
    await daemons.attach(daemon, end, requests[daemon])


async def spawn_worker(
    identity: WorkerIdentity,
    ingress: socket.socket,
    ledger: int,
    daemons: Daemons,
    guard: NetGuard,
    cgroups: Cgroups,
    limits: GroupLimits,
    ended: Callable[[str], None],
) -> WorkerProcess:
    """Make a worker that refuses everything until it is configured; `ledger` stays the caller's.

    `ended` gets the name of the daemon to which the worker has no channel any more, as the worker reports.

    Raises:
        ConnectionError, TimeoutError, wire.RemoteError, OSError: a step failed; nothing of it is left.
    """
    zygote, parent = daemons.zygote()
    with contextlib.ExitStack() as stack:
        # closed when done: each end is then with its new owner, and the death of that owner is seen at once
        control_here, control_there = map(stack.enter_context, socket.socketpair())
        audit_there, audit_here = map(stack.enter_context, socket.socketpair())
        vault_there, vault_here = map(stack.enter_context, socket.socketpair())
        netns_fd = os.open(identity.gateway_netns, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, netns_fd)
        reading, errors = pipe()
        stack.callback(os.close, errors)
        output = Output(identity.sandbox, reading, WORKER)
        # Made before there is a worker: it can pass no descriptors to us.
        asked = handler(worker.ASKED, partial(_asked, ended))
        control = wire.Client(control_here.dup(), asked, takes=wire.NARROW)
        try:
            group, _ = await both(
                asyncio.to_thread(cgroups.create, identity.cgroup, limits),
                together(
                    attach(daemons, "auditd", audit_there, identity), attach(daemons, "vaultd", vault_there, identity)
                ),
            )
            fork = Fork(
                identity.sandbox, identity.generation, identity.uid, identity.uid, tuple(str(path) for path in group)
            )
            given = (control_there, audit_here, vault_here, netns_fd, guard.pidfd, ingress, ledger, errors)
            fds = [one.fileno() if isinstance(one, socket.socket) else one for one in given]
            forked = await zygote.ask(fork, fds=fds, timeout=_SPAWN_SECONDS)
            control.start()
            pid = _child(forked.pid, parent)
            return WorkerProcess(identity, pid, control, daemons, cgroups, ledger, output)
        except BaseException:
            output.close()
            await control.close()
            await finished(asyncio.to_thread(cgroups.remove, identity.cgroup))
            raise


async def _asked(
    ended: Callable[[str], None], _control: wire.Client, request: worker.RequestChannel, fds: list[int]
) -> None:
    """Answer a worker."""
    close_all(fds)
    ended(next(daemon for daemon, channel in _CHANNELS.items() if channel is request.channel))


def _child(pid: int, parent: int) -> int:
    """Return `pid` if it is a process that the zygote has made.

    Raises:
        ConnectionError: it is not.
        OSError: there is no such process.
    """
    if f"\nPPid:\t{parent}\n" in Path(f"/proc/{pid}/status").read_text():
        return pid
    raise ConnectionError("the zygote names a process that is not its own")
