"""The daemons that hostd starts, and its channels to them: auditd, vaultd, compiler, zygote, serve, fetcher.

- hostd binds the sockets of auditd, vaultd and fetcher, in a directory that only root can write, and passes them to
  each of the daemon's processes. So connections wait while a daemon is restarted, and its name is never free. Only
  root and serve can connect, to the fetcher only root and vaultd. The daemon itself calls `listen`, so clients see its
  uid. hostd does not have the socket of an adopted daemon. It replaces that socket by a new one when this daemon is
  restarted.
- serve gets the API's socket (`api_listener`).
- auditd, vaultd and serve are adopted from a former hostd if hostd would start them in exactly the same way, because
  other processes reach them by their sockets. vaultd is adopted only together with auditd, to which it holds a
  channel. zygote, compiler and fetcher are never adopted, because their channels led to the former hostd.
- There is a fetcher only if the operator has configured a backend of secrets.
- hostd gives vaultd an audit channel at each of its starts. Without auditd vaultd ends, and is restarted. The number
  of that channel is never repeated after any kill, because it is on disk before it is used.
- After a restart of auditd or vaultd, every worker gets a new channel, because the former one ended with the old
  daemon.
- A daemon that hangs is killed and restarted. hostd asks serve over the connection that serve itself has made to
  hostd, from serve's first request on.
- The zygote is renewed after a signal has ended a worker. The reason: a fork has its parent's address space layout,
  and an attacker must not get a second attempt at the same layout.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import assert_never

import wire
from runtimes.process import api_listener, predecessor
from runtimes.process.daemon_groups import DaemonGroups
from runtimes.process.finish import together
from runtimes.process.liveness import ended
from runtimes.process.supervisor import (
    InheritedDescriptors,
    Program,
    Supervised,
    interpreter_paths,
    module_argv,
    ping,
)
from runtimes.references import ReferenceFollower
from runtimes.spec import HostConfig, ProcessConfig
from runtimes.supplies import Supplies, opened
from wire.api import auditd, compiler, fetcher, vaultd
from wire.api.zygote import REPORTS, Exited, Identify, Prepare
from wire.frames import close_all
from wire.serving import handler
from wire.sockets import LISTEN_FD

_log = logging.getLogger(__name__)


_FORGET_SECONDS = 5.0
_END_SECONDS = 3.0
_UP_SECONDS = 60.0
_FORK_SECONDS = 5.0
ADOPTABLE = ("auditd", "vaultd", "serve")
_LOCKING = ("vaultd", "fetcher")
"""They have secrets in their memory."""


class Daemons:
    """All daemons: `start` starts them, `stop` ends them in a fixed order, serve first and auditd last."""

    def __init__(
        self,
        config: HostConfig,
        constants: Prepare,
        reconnect: Callable[[str], None],
        changed: Callable[[], None],
    ) -> None:
        """Store the parameters.

        Args:
            constants: sent to each zygote, for its workers.
            reconnect: called with the name of each daemon that is a new process for the workers.
            changed: called when the compiler has another document of the operator.
        """
        self._config = config
        self._constants = constants
        self._run = Path(config.run_dir)
        self._reconnect = reconnect
        self._changed = changed
        self._vault_generation = FileCounter(Path(config.state_dir) / "hostd" / "vault-generation")
        self._groups = DaemonGroups(config.run_dir)
        self._vault_head = Path(config.state_dir) / "hostd" / "vault-head"
        self._clients: dict[str, wire.Client] = {}
        self._supervised: dict[str, Supervised] = {}
        self._controls: dict[str, socket.socket] = {}
        self._zygote_pid = 0
        self._serve_read = -1
        self._listener: socket.socket | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._attaching: asyncio.Task[None] | None = None
        self._killed: set[int] = set()
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._sockets = {
            "auditd": self._run / "audit.sock",
            "vaultd": self._run / "vault.sock",
            "fetcher": self._run / "fetcher.sock",
        }
        self._supplies = Supplies(config.supplies)
        fetches = any(item.name == "fetcher" for item in config.processes)
        self._references = ReferenceFollower(self) if fetches else None
        self._bound: dict[str, socket.socket] = {}

    async def start(self) -> None:
        """Start all daemons but serve concurrently; adopt auditd and vaultd if they run and match.

        Raises:
            supervisor.NotReady: one of them does not become ready; call `stop`.
        """
        alone = [item for item in self._config.processes if item.name in ("zygote", "compiler", "fetcher")]
        await together(*map(self._start, alone), self._start_vault())

    async def _start_vault(self) -> None:
        auditd, vaultd = self._named("auditd"), self._named("vaultd")
        if await self._adopted(auditd):
            if not await self._adopted(vaultd):
                await self._start(vaultd)
        else:
            await together(self._start(auditd), self._start(vaultd))

    def _named(self, name: str) -> ProcessConfig:
        return next(item for item in self._config.processes if item.name == name)

    def listen(self) -> None:
        """Get the API's socket from the watchdog, or make it. To be called before anything is started.

        Raises:
            OSError: its address is taken, or not one of this host.
        """
        if (address := self._config.listen) is not None:
            notes = self._run / "config"
            self._listener = api_listener.inherited() or api_listener.obtain(address.host, address.port, notes)

    async def start_serve(self) -> None:
        """Start or adopt serve, if there is one, and wait until it listens.

        Raises:
            supervisor.NotReady: it cannot listen; its output says why.
        """
        for item in self._config.processes:
            if item.name == "serve" and not await self._adopted(item):
                await self._start(item)

    async def _adopted(self, process: ProcessConfig) -> bool:
        """Adopt a daemon of a former hostd if it would be started in exactly the same way; return whether it was."""
        daemon = self._daemon(process)
        left = await asyncio.to_thread(predecessor.take, self._run / "config", process.name, daemon.program.identity)
        if left is None or not await daemon.adopt(left, partial(self._answers, process.name)):
            return False
        self._supervised[process.name] = daemon
        return True

    async def _start(self, process: ProcessConfig) -> None:
        """Start a daemon, after the former process was ended."""
        await asyncio.to_thread(predecessor.end, self._run / "config", process.name, _END_SECONDS)
        daemon = self._daemon(process)
        self._supervised[process.name] = daemon
        await daemon.start()

    async def _answers(self, name: str) -> None:
        if (path := self._sockets.get(name)) is not None:
            await ping(path, self._uid(name))

    def _uid(self, name: str) -> int:
        return {"auditd": self._config.uids.auditd, "vaultd": self._config.uids.vaultd}[name]

    def _bind(self, name: str) -> InheritedDescriptors:
        """Return the daemon's socket: that of its former process, if hostd has it."""
        if name not in self._bound:
            client = self._config.uids.vaultd if name == "fetcher" else self._config.uids.serve
            self._bound[name] = wire.bind_unix(self._sockets[name], 0o660, (0, client))
        return InheritedDescriptors({LISTEN_FD: os.dup(self._bound[name].fileno())})

    async def _audit_socket(self) -> InheritedDescriptors:
        return self._bind("auditd")

    def _daemon(self, process: ProcessConfig) -> Supervised:
        uids = self._config.uids
        match process.name:
            case "auditd":
                parts = (self._audit_socket, lambda: self._answers("auditd"), self._auditd_up)
                return self._make(process, uids.auditd, None, *parts)
            case "vaultd":
                parts = (self._vault_channel, lambda: self._answers("vaultd"), self._vaultd_up)
                return self._make(process, uids.vaultd, None, *parts)
            case "compiler":
                channel = partial(self._control_channel, "compiler")
                return self._make(process, uids.compiler, None, channel, self._compiler_ready, _nothing)
            case "fetcher":
                return self._make(process, uids.fetcher, None, self._fetcher_channels, self._fetcher_ready, _nothing)
            case "zygote":
                netns, channel = self._config.upstream_netns, partial(self._control_channel, "zygote")
                return self._make(process, 0, netns, channel, self._zygote_ready, self._zygote_up)
            case "serve":
                return self._make(process, uids.serve, None, self._serve_pipe, self._serve_ready, _nothing)
            case _ as never:
                assert_never(never)

    def _make(
        self,
        process: ProcessConfig,
        uid: int,
        netns: str | None,
        prepare: Callable[[], Awaitable[InheritedDescriptors]],
        ready: Callable[[], Awaitable[None]],
        up: Callable[[bool], Awaitable[None]],
    ) -> Supervised:
        copy = self._hand_over(process, uid)
        program = Program(
            name=process.name,
            argv=module_argv(self._config.python, process.module, [str(copy)]),
            uid=uid,
            netns=netns,
            expose=interpreter_paths(self._config.run_dir, self._config.state_dir),
            memory=getattr(self._config.memory, process.name),
            configuration=Path(process.config).read_bytes() + self._address(process.name),
            locks=process.name in _LOCKING,
        )
        noted = partial(predecessor.note, self._run / "config", identity=program.identity)
        return Supervised(self._config.python, program, self._groups, prepare, ready, up, noted)

    def _address(self, name: str) -> bytes:
        """Return the address of the socket with which a daemon is started, empty if none is configured."""
        listens = name == "serve" and self._config.listen is not None
        return self._config.listen.model_dump_json().encode() if listens and self._config.listen else b""

    def _hand_over(self, process: ProcessConfig, uid: int) -> Path:
        """Copy a daemon's configuration to a file that the daemon can read and cannot change for its next process."""
        directory = self._run / "config"
        copy = directory / f"{process.name}.json"
        copy.unlink(missing_ok=True)
        with open(copy, "xb", opener=lambda name, flags: os.open(name, flags, 0o400)) as target:
            os.fchown(target.fileno(), 0, uid)
            os.fchmod(target.fileno(), 0o440)
            with open(process.config, "rb") as source:
                shutil.copyfileobj(source, target)
        return copy

    def client(self, name: str) -> wire.Client:
        """Return the connection to a daemon.

        Raises:
            ConnectionError: it is down.
        """
        client = self._clients.get(name)
        if client is None or client.closed.is_set():
            raise ConnectionError(f"{name} is down")
        return client

    def connected(self, name: str) -> bool:
        """Return whether there is a connection to a daemon."""
        return (client := self._clients.get(name)) is not None and not client.closed.is_set()

    def zygote(self) -> tuple[wire.Client, int]:
        """Return the connection to the zygote, and its process id.

        Raises:
            ConnectionError: it is down.
        """
        return self.client("zygote"), self._zygote_pid

    async def available(self, seconds: float = _UP_SECONDS) -> None:
        """Wait, but no longer than `seconds`, until every daemon that a new worker needs can be reached."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for name in ("auditd", "vaultd", "zygote"):
                    await self.reachable(name)

    async def reachable(self, name: str) -> None:
        """Wait until a daemon can be reached."""
        while not self.connected(name):  # noqa: ASYNC110 - of many events
            await asyncio.sleep(0.02)

    def pids(self) -> dict[str, int]:
        """Return the daemons' process ids, 0 for one that is down."""
        return {name: daemon.pid for name, daemon in self._supervised.items()}

    async def _connect(self, name: str, path: Path) -> None:
        previous = self._clients.pop(name, None)
        if previous is not None:
            await previous.close()
        client = self._clients[name] = await wire.Client.connect(path, self._uid(name))
        self._look_after(name, client.peer.pid, client)

    def _look_after(self, name: str, pid: int, client: wire.Client) -> None:
        if (former := self._looking.pop(name, None)) is not None:
            former.cancel()
        self._looking[name] = asyncio.create_task(self._end_hung(name, pid, client), name=f"look-after-{name}")

    def heard(self, client: wire.Client) -> None:
        """Observe serve by its own connection, if `client` is one and serve is not observed yet."""
        looking, serve = self._looking.get("serve"), self._supervised.get("serve")
        if serve is not None and serve.pid == client.peer.pid and (looking is None or looking.done()):
            self._look_after("serve", serve.pid, client)

    async def _end_hung(self, name: str, pid: int, client: wire.Client) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # it has ended
            return
        try:
            if (hangs := await ended(pid, client, wire.Ping())) is not None:
                _log.error("%s hangs: %s", name, hangs)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)

    async def _auditd_up(self, restarted: bool) -> None:
        await self._connect("auditd", self._sockets["auditd"])
        if restarted:
            self._reconnect("auditd")
        if restarted and (self._attaching is None or self._attaching.done()):
            # vaultd's channel ended with the old auditd. vaultd then ends by itself; this call is for one that hangs.
            await self._supervised["vaultd"].kick()

    async def _vault_channel(self) -> InheritedDescriptors:
        """Make vaultd's audit channel, and open the files that only root can: the vault's head, and those of its key.

        The other end goes to auditd when auditd is ready, because both can start concurrently.
        """
        ours, theirs = socket.socketpair()
        if self._attaching is not None:
            self._attaching.cancel()
        self._attaching = asyncio.create_task(self._attach_vault(ours), name="vault-channel")
        head = os.open(self._vault_head, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        inherited = {"SALLYPORT_AUDIT_FD": theirs.detach(), "SALLYPORT_VAULT_HEAD_FD": head}
        files = opened(self._config.vault_files)
        return InheritedDescriptors({**inherited, **files, **self._bind("vaultd").fds})

    async def _attach_vault(self, ours: socket.socket) -> None:
        with ours:  # closed in any case: without its other end the channel ends vaultd, which is then restarted
            try:
                async with asyncio.timeout(_UP_SECONDS):
                    await self.reachable("auditd")
                generation = await asyncio.to_thread(self._vault_generation.next)
                await self.attach("auditd", ours, auditd.Attach(auditd.Producer.VAULT, None, generation))
            except (OSError, ValueError, wire.RemoteError) as error:
                _log.error("vaultd gets no audit channel: %s", type(error).__name__)

    async def _vaultd_up(self, restarted: bool) -> None:
        await self._connect("vaultd", self._sockets["vaultd"])
        if restarted:
            self._reconnect("vaultd")
        if self._references is not None:
            self._references.changed()

    async def _control_channel(self, name: str) -> InheritedDescriptors:
        """Make the channel to a daemon that has no socket: only hostd can send to it."""
        ours, theirs = socket.socketpair()
        self._controls[name] = ours
        return InheritedDescriptors({"SALLYPORT_CONTROL_FD": theirs.detach()})

    async def _compiler_ready(self) -> None:
        client = wire.Client(self._controls.pop("compiler"), handler(compiler.REPORTS, self._from_compiler))
        client.start()
        await client.ask(wire.Ping(), timeout=None)
        previous = self._clients.get("compiler")
        self._clients["compiler"] = client
        self._look_after("compiler", self._supervised["compiler"].pid, client)  # not a pid that it reports itself
        if previous is not None:
            await previous.close()

    async def _from_compiler(self, _client: wire.Client, _changed: compiler.Changed, fds: list[int]) -> None:
        close_all(fds)
        self._changed()
        if self._references is not None:
            self._references.changed()

    async def _fetcher_channels(self) -> InheritedDescriptors:
        control = await self._control_channel("fetcher")
        return InheritedDescriptors({**control.fds, **self._bind("fetcher").fds})

    async def _fetcher_ready(self) -> None:
        serve = handler(fetcher.REPORTS, self._supplies.answer)
        client = wire.Client(self._controls.pop("fetcher"), serve, takes=wire.NARROW)
        client.start()
        await client.ask(wire.Ping(), timeout=None)
        previous = self._clients.get("fetcher")
        self._clients["fetcher"] = client
        self._look_after("fetcher", self._supervised["fetcher"].pid, client)
        if previous is not None:
            await previous.close()

    async def _zygote_ready(self) -> None:
        client = wire.Client(self._controls.pop("zygote"), handler(REPORTS, self._from_zygote), takes=wire.NARROW)
        client.start()
        pid = (await client.ask(Identify(), timeout=None)).pid
        await client.ask(self._constants)
        previous = self._clients.get("zygote")
        self._clients["zygote"], self._zygote_pid = client, pid
        self._look_after("zygote", pid, client)
        if previous is not None:
            await previous.answered(_FORK_SECONDS)  # the former zygote completes a fork that it has begun
            await previous.close()

    async def _zygote_up(self, restarted: bool) -> None:
        _log.info("zygote is up%s", " again" if restarted else "")

    async def _serve_pipe(self) -> InheritedDescriptors:
        if self._listener is None:
            raise ConnectionError("the API has no socket")
        self._serve_read, theirs = os.pipe2(os.O_CLOEXEC)
        return InheritedDescriptors({"SALLYPORT_READY_FD": theirs, LISTEN_FD: os.dup(self._listener.fileno())})

    async def _serve_ready(self) -> None:
        """Wait for the byte that serve writes when it listens.

        If serve ends before, wait until cancelled: the caller waits for the process too, and reports its status.
        """
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        pipe = os.fdopen(self._serve_read, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            if not await reader.read(1):
                await loop.create_future()
        finally:
            transport.close()

    async def _from_zygote(self, _client: wire.Client, exited: Exited, fds: list[int]) -> None:
        close_all(fds)
        if exited.status < 0 and exited.pid not in self._killed:
            self._renew_zygote()
        self._killed.discard(exited.pid)

    def killed(self, pid: int) -> None:
        """Note that hostd has killed this worker, so that its death causes no new zygote."""
        self._killed.add(pid)

    def _renew_zygote(self) -> None:
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew(), name="renew-zygote")

    async def _renew(self) -> None:
        """Start a new zygote beside the old one, then replace the old one; workers can be spawned meanwhile."""
        old = self._supervised["zygote"]
        fresh = self._daemon(next(item for item in self._config.processes if item.name == "zygote"))
        await fresh.start()
        self._supervised["zygote"] = fresh
        await old.stop()

    async def fresh_zygote(self) -> None:
        """Wait until a renewal in progress has ended."""
        if self._renewal is not None:
            await asyncio.gather(self._renewal, return_exceptions=True)

    async def forget(self, sandboxes: Sequence[str]) -> None:
        """Delete the state of removed sandboxes in vaultd, when `serve` cannot request it any more."""
        for sandbox in sandboxes:
            try:
                await self.client("vaultd").ask(vaultd.CloseSandbox(sandbox), timeout=_FORGET_SECONDS)
            except (ConnectionError, TimeoutError, wire.RemoteError) as error:
                _log.error("vaultd did not forget %s: %s", sandbox, type(error).__name__)

    async def stop_serve(self) -> None:
        """End serve first, so that no client can create a sandbox while they are removed."""
        if (serve := self._supervised.pop("serve", None)) is not None:
            await serve.stop()

    def end_listening(self) -> None:
        """Refuse the API's clients from now on."""
        if self._listener is not None:
            api_listener.end(self._listener)
            self._listener = None

    async def stop(self) -> None:
        """End all daemons in a fixed order: vaultd keeps what the fetcher still obtains, auditd records what all do."""
        if self._references is not None:
            await self._references.close()
        for task in (self._renewal, self._attaching, *self._looking.values()):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for name in ("serve", "zygote", "compiler", "fetcher", "vaultd", "auditd"):
            if (client := self._clients.pop(name, None)) is not None:
                await client.close()
            if (daemon := self._supervised.pop(name, None)) is not None:
                await daemon.stop()
        for name, sock in self._bound.items():
            self._sockets[name].unlink(missing_ok=True)
            sock.close()
        self._bound.clear()
        await asyncio.to_thread(self._groups.sweep)

    async def attach(self, name: str, sock: socket.socket, request: wire.Request[wire.Done]) -> None:
        """Give one end of a channel to a daemon, bound to the identity in `request`."""
        await self.client(name).ask(request, fds=[sock.fileno()])


async def _nothing(_restarted: bool) -> None:
    return None


class FileCounter:
    """A number in a file that only grows, also after the death of any process and of the host."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def next(self) -> int:
        """Return the next number; it is on disk.

        Raises:
            OSError, ValueError: it cannot be written; no number was used.
        """
        number = int(self._path.read_text()) + 1 if self._path.exists() else 1
        temporary = self._path.with_suffix(".new")
        with temporary.open("w") as file:
            file.write(f"{number}\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._path)
        return number
