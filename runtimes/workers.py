"""One gateway worker: spawned with its channels, configured before it accepts a flow, observed by a pidfd.

- The order is fixed: ring, audit and vault channels and cgroup, fork, configuration. A step that fails ends the child.
- If auditd or vaultd is a new process, the worker gets a new channel and continues. It then sends the records that it
  has queued. If a daemon ends before it has the channel, no worker is ended: the worker refuses everything that needs
  the daemon, and requests a channel again.
- hostd gives its identity (sandbox, generation) to auditd and vaultd; the worker never does.
- Its standard error is its own pipe, logged within bounds under the sandbox's id.
- A worker is killed through its pidfd, so that a process which reuses the number is never signalled.
- A worker can request a new channel when one has ended, and nothing else.
- The answers of a worker are not trusted. It confirms exactly what it was given; any other answer counts as none.
- A worker that hangs counts as ended. The evidence is its progress (answers to `Beat`, changes of its ledger) and its
  use of the processor (`liveness`), never the time that an answer takes.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import wire
from runtimes.daemons import Daemons
from runtimes.net.guard import NetGuard
from runtimes.process import liveness
from runtimes.process.adopted import readable, readable_within
from runtimes.process.cgroups import Cgroups, GroupLimits
from runtimes.process.finish import both, finished, together
from runtimes.process.liveness import within
from runtimes.process.output import WORKER, Output, pipe
from runtimes.rings import RingFiles, RingKey, Rings
from wire.api import auditd, vaultd, worker
from wire.api.zygote import Fork
from wire.frames import close_all
from wire.serving import handler

_SPAWN_SECONDS = 20.0
_CONFIGURE_SECONDS = 20.0
_END_SECONDS = 5.0
_PAGE = 4096
_RECONNECT_SECONDS = 5.0
_PAUSE_SECONDS = 5.0
_CHANNELS = {"auditd": worker.ChannelName.AUDIT, "vaultd": worker.ChannelName.VAULT}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The sandbox of a worker, and where the worker runs."""

    sandbox: str
    generation: int
    uid: int
    gateway_netns: Path
    images: tuple[str, ...] | None = None
    """Name and id of the image that this hostd started the sandbox from; None if another hostd started it."""

    @property
    def ring(self) -> RingKey:
        """The key of its ring."""
        return self.sandbox, self.generation

    @property
    def cgroup(self) -> str:
        """The name of its control group."""
        return f"{self.sandbox}.{self.generation}"


class NotAttached(Exception):
    """A daemon ended or did not answer while it got a worker's new channel; the worker did not change."""


class WorkerProcess:
    """A running worker. `spawn_worker` makes it."""

    def __init__(
        self,
        identity: WorkerIdentity,
        pid: int,
        control: wire.Client,
        daemons: Daemons,
        cgroups: Cgroups,
        ledger: int,
        rings: Rings,
        ring: RingFiles,
        output: Output,
        asked: float,
    ) -> None:
        """Observe process `pid`, which writes `output`, and own `ring`. Its fork was requested at `asked` (monotonic).

        `ledger` is read for progress; the caller still owns it.
        """
        self.identity = identity
        self.pid = pid
        self.control = control
        self._daemons = daemons
        self._cgroups = cgroups
        self._pidfd = os.pidfd_open(pid)
        self._ledger = os.dup(ledger)
        self._rings = rings
        self._ring = ring
        self._output = output
        self._gone = False
        self._asked = asked
        self.took = 0.0
        """Seconds from the request for its fork until it confirmed its first policy."""
        self.reconnects = 0
        """The number of new channels that it was given."""

    def _page(self) -> bytes:
        return os.pread(self._ledger, _PAGE, 0)

    async def configure(self, policy: str, digest: str, seed: str, seconds: float = _CONFIGURE_SECONDS) -> str:
        """Give it a compiled policy (JSON text) and wait until it confirms it; return the confirmed digest.

        Args:
            digest: of the policy; the worker must confirm it.
            seed: of the sandbox's placeholders.
            seconds: the limit, in the worker's own time (`liveness.within`).

        Raises:
            wire.RemoteError: it refused; the former policy stays in force.
            ConnectionError, TimeoutError: it has ended or does not answer, or confirms something else.
        """
        request = worker.Configure(self.identity.sandbox, self.identity.generation, policy, seed)
        answer = await within(self.pid, seconds, self.control.ask(request, timeout=None))
        if answer.digest != digest:
            raise ConnectionError("the worker confirmed something else")
        self.took = self.took or time.monotonic() - self._asked
        return digest

    async def reconnect(self, daemon: str) -> None:
        """Give it a new channel to auditd or vaultd, which is a new process, and wait until it confirms it.

        Raises:
            NotAttached: the daemon failed; try again.
            wire.RemoteError, ConnectionError, TimeoutError, OSError: it has no channel now; end it.
        """
        with contextlib.ExitStack() as stack:
            there, here = map(stack.enter_context, socket.socketpair())
            try:
                await attach(self._daemons, daemon, there, self.identity)
                if daemon == "auditd":
                    await attach_ring(self._daemons, self._ring, self.identity.ring)
            except OSError as error:  # ConnectionError and TimeoutError are OSErrors
                raise NotAttached(type(error).__name__) from error
            given = self.control.ask(worker.Rebind(_CHANNELS[daemon]), fds=[here.fileno()], timeout=None)
            await within(self.pid, _RECONNECT_SECONDS, given)
            self.reconnects += 1

    async def guarded(self, pidfd: int) -> None:
        """Give it the pidfd of a new guard. A worker that does not accept it is killed."""
        try:
            await within(self.pid, _RECONNECT_SECONDS, self.control.tell(worker.Guarded(), fds=[pidfd]))
        except (ConnectionError, TimeoutError):
            self.kill()

    async def pause(self) -> None:
        """Let it end all flows and forward nothing more, and wait until it has.

        Raises:
            wire.RemoteError, ConnectionError, TimeoutError: it may still forward; end it.
        """
        await within(self.pid, _PAUSE_SECONDS, self.control.ask(worker.Pause(), timeout=None))

    async def resume(self) -> None:
        """Let it forward again.

        Raises:
            wire.RemoteError, ConnectionError, TimeoutError: it may not forward; end it.
        """
        await within(self.pid, _PAUSE_SECONDS, self.control.ask(worker.Resume(), timeout=None))

    async def ended(self) -> None:
        """Wait until it has ended, or hangs."""
        hangs = await liveness.ended(self.pid, self.control, worker.Beat(), self._page)
        if hangs is not None:
            _log.error("the worker of %s hangs: %s", self.identity.sandbox, hangs)

    def kill(self) -> None:
        """Kill it; every call that waits for it returns. `end` removes what is left."""
        if self._gone:
            return
        if not readable_within(self._pidfd, 0):
            self._daemons.killed(self.pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self) -> tuple[str, ...]:
        """Kill it and remove its group; return what is left. Can be called again if something is left."""
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
            self._ring.close()
            self._rings.ended(self.identity.ring)
            self._output.close()
        return await asyncio.to_thread(self._cgroups.remove, self.identity.cgroup)


async def attach(daemons: Daemons, daemon: str, end: socket.socket, identity: WorkerIdentity) -> None:
    """Give `end` to auditd or vaultd as the channel of the worker with `identity`.

    Raises:
        wire.RemoteError, ConnectionError, TimeoutError: it was not accepted.
    """
    requests: dict[str, wire.Request[wire.Done]] = {
        "auditd": auditd.Attach(auditd.Producer.GATEWAY, identity.sandbox, identity.generation),
        "vaultd": vaultd.Attach(identity.sandbox, identity.generation, identity.images),
    }
    await daemons.attach(daemon, end, requests[daemon])


async def attach_ring(daemons: Daemons, ring: RingFiles, key: RingKey) -> None:
    """Let auditd take the records of a worker from `ring`.

    Raises:
        wire.RemoteError, ConnectionError, TimeoutError: it was not accepted.
    """
    await daemons.client("auditd").ask(auditd.AttachRing(*key), fds=ring.for_auditd)


async def spawn_worker(
    identity: WorkerIdentity,
    ingress: socket.socket,
    ledger: int,
    rings: Rings,
    daemons: Daemons,
    guard: NetGuard,
    cgroups: Cgroups,
    limits: GroupLimits,
    ended: Callable[[str], None],
) -> WorkerProcess:
    """Make a worker that refuses everything until it is configured.

    The caller keeps the ownership of `ledger`.

    `ended` gets the name of the daemon to which the worker has no channel any more, as the worker reports.

    Raises:
        ConnectionError, TimeoutError, wire.RemoteError, OSError: a step failed; nothing of it is left.
    """
    zygote, parent = daemons.zygote()
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as keep_ring:
        keep_ring.callback(rings.ended, identity.ring)
        ring = rings.create(identity.ring)
        keep_ring.callback(ring.close)
        # Closed at the end: then only the new owner has each end, so that the owner's death is noticed at once.
        control_here, control_there = map(stack.enter_context, socket.socketpair())
        audit_there, audit_here = map(stack.enter_context, socket.socketpair())
        vault_there, vault_here = map(stack.enter_context, socket.socketpair())
        netns_fd = os.open(identity.gateway_netns, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, netns_fd)
        reading, errors = pipe()
        stack.callback(os.close, errors)
        output = Output(identity.sandbox, reading, WORKER)
        # Made before the worker, and narrow: the worker can pass no descriptors to hostd.
        asked = handler(worker.ASKED, partial(_asked, ended))
        control = wire.Client(control_here.dup(), asked, takes=wire.NARROW)
        try:
            group, _ = await both(
                asyncio.to_thread(cgroups.create, identity.cgroup, limits),
                together(
                    attach(daemons, "auditd", audit_there, identity),
                    attach(daemons, "vaultd", vault_there, identity),
                    attach_ring(daemons, ring, identity.ring),
                ),
            )
            fork = Fork(
                identity.sandbox, identity.generation, identity.uid, identity.uid, tuple(str(path) for path in group)
            )
            channels = (control_there, audit_here, vault_here)
            given = (*channels, netns_fd, guard.pidfd, ingress, ledger, *ring.for_worker, errors)
            fds = [one.fileno() if isinstance(one, socket.socket) else one for one in given]
            began = time.monotonic()
            forked = await zygote.ask(fork, fds=fds, timeout=_SPAWN_SECONDS)
            control.start()
            pid = _child(forked.pid, parent)
            spawned = WorkerProcess(identity, pid, control, daemons, cgroups, ledger, rings, ring, output, began)
            keep_ring.pop_all()
            return spawned
        except BaseException:
            output.close()
            await control.close()
            await finished(asyncio.to_thread(cgroups.remove, identity.cgroup))
            raise


async def _asked(
    ended: Callable[[str], None], _control: wire.Client, request: worker.RequestChannel, fds: list[int]
) -> None:
    """Handle the request of a worker."""
    close_all(fds)
    ended(next(daemon for daemon, channel in _CHANNELS.items() if channel is request.channel))


def _child(pid: int, parent: int) -> int:
    """Return `pid` if it is a child process of the zygote.

    Raises:
        ConnectionError: it is not.
        OSError: there is no such process.
    """
    if f"\nPPid:\t{parent}\n" in Path(f"/proc/{pid}/status").read_text():
        return pid
    raise ConnectionError("the zygote names a process that is not its own")
