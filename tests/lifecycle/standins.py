"""Stand-ins for hostd, vaultd and auditd, and a whole server with them.

The stand-ins are small `wire` servers. They store what they receive, and relay sandbox traffic to a local HTTP server
through the same unix sockets and preamble as a gateway. The real daemons have their own tests. The subject here is
the control plane, with real uvicorn, registry and sockets.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import uvicorn

import wire
from audit.producers import KINDS, SERVE
from audit.records import RecordError, record
from lifecycle.api.app import Server, build
from lifecycle.api.credentials import RouteKeys, Tokens, digest
from lifecycle.config.serve import DatabaseConfig, ServeConfig
from lifecycle.database.engine import SQLite
from lifecycle.database.table import SandboxTable
from lifecycle.egress.policies import Policies
from lifecycle.sandboxes.bounds import CreationBounds, SandboxLimits
from lifecycle.sandboxes.ceilings import Ceilings
from lifecycle.sandboxes.clock import Clock
from lifecycle.sandboxes.quantities import Resources
from lifecycle.serve import http_settings, prepare
from lifecycle.snapshots.snapshot import SnapshotBounds
from policy.compiled import CompiledPolicy
from policy.compiler import Compiler
from policy.document import PolicyDocument
from policy.operator_file import OperatorFile
from runtimes.spec import check_launch
from testbed.ports import reserved_port
from vault.grants import Grant, GrantError, within
from wire.api import auditd, hostd, vaultd
from wire.api.compiler import Compile
from wire.api.provided import Provided
from wire.api.states import HostState
from wire.operations import parameters

KEY = "test-api-key-0123456789"
IMAGE = "base:latest"
SNAPSHOT_BYTES = 4096
DATABASE: DatabaseConfig | None = None
"""The state database of the servers. Fixture `backend` sets it."""

_routes: list[Any] = []
"""The applications of servers that have ended, for reuse: building one takes longer than the rest of a start."""


class HttpServer(uvicorn.Server):
    """uvicorn that ends as soon as `ends` is set, and waits only for existing connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ends = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.ends.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)  # idle connections close in this turn
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)


BOUNDS = CreationBounds(
    launches=4, pending=128, sandboxes=1000, answer_seconds=10.0, queue_seconds=60.0, ceilings=Ceilings()
)


class StandIn:
    """A daemon that answers from `answer`. `fail` makes an operation refuse, `hold` makes it wait.

    `tests/contracts/test_daemons.py` compares the answers with those of the real daemons.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fail: dict[str, wire.RequestError] = {}
        self.fail_all: wire.RequestError | None = None
        """The answer to every operation but `ping`."""
        self.failed: list[str] = []
        """Operations that were answered with an error of `fail` or `fail_all`."""
        self.hold: dict[str, asyncio.Event] = {}
        self.reached: dict[str, asyncio.Event] = {}

    async def handle(self, _client: wire.Client, op: str, parameters: dict[str, Any], fds: list[int]) -> wire.Message:
        assert not fds
        self.calls.append((op, parameters))
        if op in self.reached:
            self.reached[op].set()
        if op in self.hold:
            await self.hold[op].wait()
        error = self.fail.get(op) or (None if op == "ping" else self.fail_all)
        if error is not None:
            self.failed.append(op)
            raise error
        return await self.answer(op, parameters)

    async def answer(self, op: str, given: dict[str, Any]) -> wire.Message:
        """Answer one request. Each kind of daemon implements it."""
        raise NotImplementedError

    def named(self, op: str) -> list[dict[str, Any]]:
        """Return the parameters of all calls of one operation."""
        return [parameters for name, parameters in self.calls if name == op]


def seed(sandbox: str) -> str:
    """Return the seed of the sandbox's placeholders in a `StandInHostd`."""
    return hashlib.sha256(sandbox.encode()).hexdigest()


class StandInHostd(StandIn):
    """A stand-in that stores sandboxes in a dict and relays their ingress to 127.0.0.1:`backend`."""

    def __init__(self, run_dir: Path, policy_file: Path | None) -> None:
        super().__init__()
        file = OperatorFile(PolicyDocument()) if policy_file is None else OperatorFile.read(policy_file)
        self.compiler = Compiler(file)
        """The product's compiler, which reads the operator's file itself."""
        self.sandboxes: dict[str, hostd.HostSandboxState] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        """The policy of each sandbox's gateway."""
        self.listeners: dict[str, asyncio.Server] = {}
        self.backend = 0
        self.refusals = 0
        """The number of coming connections that find no listener."""
        self.slow: dict[str, asyncio.Event] = {}
        """By sandbox: the event that its removal waits for."""
        self.deaf: dict[str, asyncio.Event] = {}
        """By sandbox: the event that its gateway waits for before it takes a configuration."""
        self.printed: dict[str, str] = {}
        """The output of each sandbox's entrypoint."""
        self.outdated: set[str] = set()
        """The sandboxes whose image was removed or replaced."""
        self.hidden: dict[str, dict[str, str]] = {}
        """The variables of claims, by sandbox. Outputs do not show their values."""
        self.gone: set[str] = set()
        """The sandboxes whose gateway has ended. The next gateway begins with the policy in `policies`."""
        self.snapshots: dict[str, int | None] = {}
        """The bytes of each snapshot; None while it is being taken."""
        self.used: dict[str, str] = {}
        """The snapshots that sandboxes began with, by sandbox."""
        self.ports: list[int] = []
        self._run_dir = run_dir
        self._relays: set[asyncio.Task[None]] = set()

    async def answer(self, op: str, given: dict[str, Any]) -> wire.Message:
        request = hostd.OPERATIONS.read(op, given)
        match request:
            case wire.Ping():
                return {}
            case hostd.DescribeImage(name):
                if name != IMAGE:
                    raise wire.RequestError(wire.Code.UNKNOWN_IMAGE, f"no image {name}")
                return parameters(hostd.ImageDescription("sha256:1", (), (), (), "/"))
            case hostd.Images():
                return parameters(hostd.ImageNames((IMAGE,)))
            case hostd.Launch():
                return parameters(await self._launch(request))
            case hostd.Configure():
                return parameters(await self.configure(request))
            case hostd.Claimable(names):
                fit = tuple(name for name in names if name in self.sandboxes and name not in self.outdated)
                return parameters(hostd.ClaimableSandboxes(fit))
            case hostd.ClaimMember(sandbox, selection, env):
                if sandbox in self.outdated:
                    raise wire.RequestError(wire.Code.UNKNOWN_IMAGE, "the image may not be started any more")
                self.hidden[sandbox] = dict(env)
                return parameters(await self.configure(hostd.Configure(sandbox, selection, False)))
            case hostd.Pause(sandbox):
                self._freeze(sandbox, HostState.PAUSED)
            case hostd.Resume(sandbox):
                self._freeze(sandbox, HostState.RUNNING)
            case hostd.Remove(sandbox, lines):
                return parameters(hostd.Removed((), await self._remove(sandbox, lines)))
            case hostd.Inspect(sandbox):
                if sandbox not in self.sandboxes:
                    raise wire.RequestError(wire.Code.UNKNOWN_SANDBOX, sandbox)
                return parameters(hostd.Inspected(self.sandboxes[sandbox], None))
            case hostd.ReadOutput(sandbox):
                if sandbox not in self.sandboxes:
                    raise wire.RequestError(wire.Code.UNKNOWN_SANDBOX, sandbox)
                return parameters(self._printed(sandbox, request.lines))
            case hostd.ListVolumes():
                return parameters(hostd.VolumesListed(()))
            case hostd.RemoveVolume(name):
                raise wire.RequestError(wire.Code.UNKNOWN_VOLUME, name)
            case hostd.List():
                return parameters(hostd.Listed(tuple(self.sandboxes.values())))
            case hostd.TakeSnapshot(sandbox, snapshot):
                return parameters(self._take(sandbox, snapshot))
            case hostd.RemoveSnapshot(snapshot):
                if snapshot in self.used.values():
                    raise wire.RequestError(wire.Code.BUSY, "a sandbox uses the snapshot")
                self.snapshots.pop(snapshot, None)
            case hostd.ListSnapshots():
                held = (hostd.HeldSnapshot(name, size) for name, size in self.snapshots.items())
                return parameters(hostd.HeldSnapshots(tuple(held)))
            case _:
                raise wire.RequestError(wire.Code.FORBIDDEN, op)
        return {}

    def _take(self, sandbox: str, snapshot: str) -> hostd.SnapshotTaken:
        if sandbox not in self.sandboxes:
            raise wire.RequestError(wire.Code.UNKNOWN_SANDBOX, sandbox)
        if self.sandboxes[sandbox].state is not HostState.RUNNING:
            raise wire.RequestError(wire.Code.NOT_RUNNING, "the sandbox does not run")
        if snapshot in self.snapshots:
            raise wire.RequestError(wire.Code.EXISTS, "there is a snapshot of this id")
        self.snapshots[snapshot] = SNAPSHOT_BYTES
        return hostd.SnapshotTaken(SNAPSHOT_BYTES)

    async def _launch(self, launch: hostd.Launch) -> hostd.PolicyInForce:
        try:
            check_launch(launch)
        except ValueError as error:
            raise wire.RequestError(wire.Code.INVALID, str(error)) from None
        if launch.snapshot is not None:
            if self.snapshots.get(launch.snapshot) is None:
                raise wire.RequestError(wire.Code.UNKNOWN_IMAGE, "there is no such image on this host")
            self.used[launch.sandbox] = launch.snapshot
        name = launch.sandbox
        policy, provided = await self._compiled(launch.selection, name)
        self.policies[name] = policy
        path = str(self._run_dir / "ingress" / f"{name}.sock")
        self.listeners[name] = await asyncio.start_unix_server(self._ingress, path)
        self.sandboxes[name] = hostd.HostSandboxState(name, HostState.RUNNING, worker_pid=1)
        return hostd.PolicyInForce(policy["digest"], provided)

    def _freeze(self, sandbox: str, state: HostState) -> None:
        if sandbox not in self.sandboxes:
            raise wire.RequestError(wire.Code.UNKNOWN_SANDBOX, sandbox)
        if self.sandboxes[sandbox].state not in (HostState.RUNNING, HostState.PAUSED):
            raise wire.RequestError(wire.Code.NOT_RUNNING, "no process of the sandbox is left")
        self.change(sandbox, state=state)

    async def configure(self, request: hostd.Configure) -> hostd.PolicyInForce:
        """Put a policy in force, or refuse it. Tests replace this method."""
        sandbox = request.sandbox
        if sandbox not in self.policies:
            raise wire.RequestError(wire.Code.UNKNOWN_SANDBOX, sandbox)
        policy, provided = await self._compiled(request.selection, sandbox)
        if sandbox in self.deaf:
            await self.deaf[sandbox].wait()
        if request.decided or sandbox not in self.gone:
            self.policies[sandbox] = policy
        if sandbox in self.gone:
            raise wire.RequestError(wire.Code.UNAVAILABLE, "the sandbox has no gateway worker now")
        return hostd.PolicyInForce(policy["digest"], provided)

    async def _compiled(self, selection: str, sandbox: str) -> tuple[dict[str, Any], Provided]:
        answer = await self.compiler.handle(None, Compile(selection, seed(sandbox)), [])
        return CompiledPolicy.from_json(json.loads(answer.policy)).to_json(), answer.provided

    def _printed(self, sandbox: str, lines: int) -> hostd.Printed:
        text = self.printed.get(sandbox, "")
        for name, value in self.hidden.get(sandbox, {}).items():
            text = text.replace(value, f"[env {name}]") if len(value) >= hostd.LEAST_HIDDEN else text
        written = text.removesuffix("\n").split("\n")
        return hostd.Printed("\n".join(written[-lines:]), False)

    async def _remove(self, sandbox: str, lines: int = 0) -> hostd.Printed | None:
        if sandbox in self.slow:
            await self.slow[sandbox].wait()
        printed = self._printed(sandbox, lines) if lines and sandbox in self.sandboxes else None
        self.sandboxes.pop(sandbox, None)
        self.used.pop(sandbox, None)
        listener = self.listeners.pop(sandbox, None)
        if listener is not None:
            listener.close()
        return printed

    def change(self, sandbox: str, **changes: Any) -> None:
        """Change fields of the sandbox's state."""
        self.sandboxes[sandbox] = replace(self.sandboxes[sandbox], **changes)

    async def _ingress(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)
        port = int.from_bytes(await reader.readexactly(2), "big")
        self.ports.append(port)
        if port == 9 or self.refusals > 0 or any(one.state is HostState.PAUSED for one in self.sandboxes.values()):
            self.refusals = max(0, self.refusals - 1)
            writer.write(b"\x01")
            writer.close()
            return
        inner, outer = await asyncio.open_connection("127.0.0.1", self.backend)
        writer.write(b"\x00")

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()

        both = {asyncio.ensure_future(pump(reader, outer)), asyncio.ensure_future(pump(inner, writer))}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pumping in both:
                pumping.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            for side in (outer, writer):
                side.close()
                with contextlib.suppress(OSError):
                    await side.wait_closed()

    async def close(self) -> None:
        for event in (*self.slow.values(), *self.deaf.values()):
            event.set()
        for name in list(self.listeners):
            await self._remove(name)
        for relay in list(self._relays):
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)


class StandInVaultd(StandIn):
    """A stand-in that stores grants, inline secrets, their bounds and the names to sign for, per sandbox."""

    def __init__(self) -> None:
        super().__init__()
        self.grants: dict[str, list[Grant]] = {}
        self.inline: dict[str, dict[str, str]] = {}
        self.bounds: dict[str, set[Grant]] = {}
        self.names: dict[str, list[str]] = {}

    async def answer(self, op: str, given: dict[str, Any]) -> wire.Message:
        request = vaultd.CONTROL.read(op, given)
        match request:
            case wire.Ping():
                return {}
            case vaultd.OpenSandbox():
                return parameters(self._open(request))
            case vaultd.Regrant():
                self._regrant(request)
            case vaultd.Narrow():
                self._narrow(request)
            case vaultd.CloseSandbox(sandbox):
                self.grants.pop(sandbox, None)
                self.inline.pop(sandbox, None)
            case _:
                raise wire.RequestError(wire.Code.FORBIDDEN, op)
        return {}

    def _open(self, request: vaultd.OpenSandbox) -> vaultd.Opened:
        self.grants[request.sandbox] = _grants(request.grants)
        self.names[request.sandbox] = [*(request.names or ())]
        self.inline[request.sandbox] = _texts(request.inline)
        self.bounds[request.sandbox] = set()
        return vaultd.Opened("-----BEGIN CERTIFICATE-----\nsandbox root\n-----END CERTIFICATE-----\n")

    def _regrant(self, request: vaultd.Regrant) -> None:
        sandbox, keep = request.sandbox, request.keep or ()
        values, granted = self._values(sandbox), set(_grants(request.grants))
        inline = None if request.inline is None else _texts(request.inline)
        if set(keep) - values.keys():
            raise wire.RequestError(wire.Code.UNKNOWN_SECRET, "no inline secret of a name that is to be kept")
        after = values if inline is None else {name: values[name] for name in keep} | inline
        if {grant.secret for grant in granted if grant.secret.startswith("inline:")} - after.keys():
            raise wire.RequestError(wire.Code.UNKNOWN_SECRET, "no inline secret of a name that is granted")
        said = granted if request.bounds is None else set(_grants(request.bounds))
        kept = self.bounds[sandbox] if request.bounds is None else within(said, self.bounds[sandbox])
        bound = {place for place in kept if place.secret not in (inline or {})}
        bound |= {place for place in said if place.secret in (inline or {})}
        if beyond := {grant for grant in granted if grant.secret.startswith("inline:")} - within(granted, bound):
            raise wire.RequestError(wire.Code.NOT_BOUND, f"{len(beyond)} values were not given for a host")
        if max(len(request.grants), len(after)) > vaultd.MOST_GRANTS:
            raise wire.RequestError(wire.Code.FULL, "too many grants or inline secrets")
        self.inline[sandbox] = after
        self.names[sandbox] = [*(request.names or ())]
        self.bounds[sandbox] = {place for place in bound if place.secret in after}
        self.grants[sandbox] = _grants(request.grants)

    def _narrow(self, request: vaultd.Narrow) -> None:
        sandbox, keep = request.sandbox, request.keep
        values, left = self._values(sandbox), _grants(request.grants)
        if request.bounds is not None:
            self.bounds[sandbox] = set(within(_grants(request.bounds), self.bounds[sandbox]))
        self.inline[sandbox] = {name: value for name, value in values.items() if keep is None or name in keep}
        self.grants[sandbox] = [grant for grant in self.grants[sandbox] if grant in left]

    def _values(self, sandbox: str) -> dict[str, str]:
        if sandbox not in self.inline:
            raise wire.RequestError(wire.Code.UNKNOWN_SANDBOX, "the sandbox is not open")
        return self.inline[sandbox]


def _texts(inline: Mapping[str, vaultd.Value]) -> dict[str, str]:
    return {name: value.text for name, value in inline.items()}


def _grants(forms: Iterable[vaultd.GrantForm]) -> list[Grant]:
    try:
        return [Grant.of(form) for form in forms]
    except GrantError as error:
        raise wire.RequestError(wire.Code.INVALID, str(error)) from None


class StandInAuditd(StandIn):
    """A stand-in that stores records of the kinds that `serve` may send."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[dict[str, Any]] = []

    async def answer(self, op: str, given: dict[str, Any]) -> wire.Message:
        request = auditd.CONTROL.read(op, given)
        if isinstance(request, wire.Ping):
            return {}
        if not isinstance(request, auditd.Record):
            raise wire.RequestError(wire.Code.FORBIDDEN, op)
        asked = request.entry
        if asked.kind not in KINDS[SERVE]:
            raise wire.RequestError(wire.Code.INVALID, "a kind of another producer")
        try:
            self.records.append(record(asked.kind, asked.decision, **asked.fields))
        except RecordError as error:
            raise wire.RequestError(wire.Code.INVALID, str(error)) from None
        return parameters(auditd.Accepted(len(self.records)))


@dataclass
class World:
    """A running server and its stand-ins. `offset` and `step` move the server's clock."""

    config: ServeConfig
    policies: Policies
    hostd: StandInHostd
    vaultd: StandInVaultd
    auditd: StandInAuditd
    tokens: Tokens = field(default_factory=lambda: Tokens(b"k" * 32))
    route_keys: RouteKeys = field(default_factory=lambda: RouteKeys("a", {"a": b"a" * 32, "b": b"b" * 32}))
    offset: float = 0.0
    step: float = 0.0
    start_seconds: float = 0.0
    server: Server | None = None
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def domain(self) -> str:
        return f"127.0.0.1:{self.port}"

    def clock(self) -> Clock:
        """Return this world's clock.

        `offset` seconds were added to the elapsed time, and the time of day was set by `step` seconds.
        """
        return Clock(lambda: time.time() + self.offset + self.step, lambda: time.monotonic() + self.offset)

    def build(self) -> Server:
        """Compose the server. By default it does not wait for entrypoints, because stand-ins have none."""
        return build(
            self.config,
            self.policies,
            self.tokens,
            self.route_keys,
            clock=self.clock(),
            start_seconds=self.start_seconds,
        )

    def client(self, key: str | None = KEY, **options: Any) -> httpx.AsyncClient:
        headers = {} if key is None else {"OPEN-SANDBOX-API-KEY": key}
        options = {"timeout": 20, "trust_env": False, "verify": False} | options  # reading roots for plain HTTP is slow
        return httpx.AsyncClient(base_url=self.url, headers=headers, **options)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["World"]:
        """Run the server. A test can enter this again, for a restart on the same state."""
        server = self.build()
        routes = _routes.pop() if _routes else server.edge.api
        routes.state.context = server.context
        server = replace(server, edge=replace(server.edge, api=routes))
        listener = _listener(self.port)
        self.port = listener.getsockname()[1]
        running = HttpServer(http_settings(server.edge, self.config))
        running.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        async with server.running():
            task = asyncio.create_task(running.serve(sockets=[listener]))
            await server.adopted.wait()
            self.server = server
            try:
                yield self
            finally:
                running.ends.set()
                await task
                listener.close()
                _routes.append(routes)


@cache
def _migrated() -> bytes:
    """Return an SQLite file as the first start of a server leaves it. To migrate one takes 30 ms of a processor."""
    with tempfile.TemporaryDirectory(prefix="slp", dir="/dev/shm") as directory:
        path = Path(directory) / "state.db"
        rows = SandboxTable(SQLite(path), "srv-" + "0" * 24)
        rows.open()
        rows.close()
        return path.read_bytes()


@contextlib.asynccontextmanager
async def world(policy: str | None = None, *, ingress: bool = True, **changes: Any) -> AsyncIterator[World]:
    """Start stand-ins and describe a server.

    `changes` are fields of `ServeConfig`, `policy` is YAML. Without `ingress` the sandboxes contain no program: for
    tests that make no requests to one but run many worlds.
    """
    # In memory, because each write of the registry waits for the disk. Effects of a power cut are not tested here.
    with tempfile.TemporaryDirectory(prefix="slp", dir="/dev/shm") as text:
        directory = Path(text)
        (directory / "ingress").mkdir()
        (directory / "state").mkdir()
        if DATABASE is None:
            (directory / "state" / "sallyport.db").write_bytes(_migrated())
        config = ServeConfig(
            host="127.0.0.1",
            run_dir=directory,
            state_dir=directory / "state",
            database=DATABASE,
            policy_file=None,
            key_digests=(digest(KEY),),
            route_keys=None,
            limits=SandboxLimits(
                ("runc", "runsc"),
                "runc",
                defaults=Resources(1_000_000_000, 512 << 20, 256, 1 << 30),
                maxima=Resources(4_000_000_000, 4 << 30, 4096, 8 << 30),
                max_timeout=None,
                env={},
            ),
            daemon_uids=dict.fromkeys(("hostd", "vaultd", "auditd"), os.getuid()),
            bounds=BOUNDS,
            snapshots=SnapshotBounds(1000, 1 << 30),
            allowed_hosts=(),
            external_base="",
            ignored_fields=(),
            proxy_connections=128,
            renew_interval=None,
            diagnostics_retention=86400,
            keep_alive=30,
            concurrency=1024,
            backlog=2048,
            graceful_shutdown=1,
            log_level="INFO",
        )
        config = replace(config, **changes)
        path = None if policy is None else directory / "policies.yaml"
        if path is not None and policy is not None:
            path.write_text(policy)
        policies = Policies.read(path)
        hostd, vaultd, auditd = StandInHostd(directory, path), StandInVaultd(), StandInAuditd()
        tasks = [
            await wire.serve_unix(
                wire.bind_unix(directory / name), daemon.handle, allowed_uids=frozenset({os.getuid()})
            )
            for name, daemon in (("hostd.sock", hostd), ("vault.sock", vaultd), ("audit.sock", auditd))
        ]
        backend = await _backend(hostd) if ingress else None
        try:
            with reserved_port() as port:
                yield World(config, policies, hostd, vaultd, auditd, port=port)
        finally:
            await hostd.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if backend is not None:
                backend.ends.set()
                await backend.finished.wait()  # type: ignore[attr-defined]


@dataclass
class Seen:
    """One request as the program in the sandbox received it."""

    method: str
    raw_path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value.decode() for key, value in self.headers if key.lower() == name.encode()]


class Program:
    """The HTTP server "in the sandbox": it records requests and answers by path."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.release = asyncio.Event()
        self.cut = asyncio.Event()
        self.init_status = 200
        """The answer to an init."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path.startswith("/never"):
            await _gone(receive)
            return
        if path.startswith("/wait"):
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            release = asyncio.ensure_future(self.release.wait())
            gone = asyncio.ensure_future(_gone(receive))
            done, pending = await asyncio.wait({release, gone}, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            if gone in done:
                self.cut.set()
                return
            await send({"type": "http.response.body", "body": b"second", "more_body": False})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.seen.append(Seen(scope["method"], scope["raw_path"], scope["query_string"], list(scope["headers"]), body))
        headers = [
            (b"content-type", b"text/plain"),
            (b"set-cookie", b"a=1"),
            (b"set-cookie", b"b=2"),
            (b"server", b"x"),
        ]
        status = 200
        if path == "/internal/init":
            status = self.init_status
        if path.startswith("/moved"):
            status, headers = 302, [*headers, (b"location", b"/there?x=1")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else b"pong:" + body})

    async def _websocket(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        self.seen.append(Seen("WS", scope["raw_path"], scope["query_string"], list(scope["headers"]), b""))
        if scope["path"] == "/refuse":
            await send({"type": "websocket.close", "code": 1008})
            return
        subprotocols = scope["subprotocols"]
        await send({"type": "websocket.accept", "subprotocol": subprotocols[0] if subprotocols else None})
        while (message := await receive())["type"] == "websocket.receive":
            if message.get("text") == "bye":
                await send({"type": "websocket.close", "code": 4321, "reason": "done"})
                return
            kind = "text" if message.get("text") is not None else "bytes"
            await send({"type": "websocket.send", kind: message[kind]})


def _listener(port: int) -> socket.socket:
    """Listen on loopback, with the socket options that `serve` sets."""
    listener = socket.create_server(("127.0.0.1", port))
    prepare(listener)
    return listener


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _backend(hostd: StandInHostd) -> HttpServer:
    program = Program()
    hostd.program = program  # type: ignore[attr-defined]
    listener = _listener(0)
    hostd.backend = listener.getsockname()[1]
    server = HttpServer(
        uvicorn.Config(
            program, http="h11", ws="websockets-sansio", lifespan="off", log_config=None, timeout_graceful_shutdown=1
        )
    )
    finished = asyncio.Event()
    server.finished = finished  # type: ignore[attr-defined]

    async def run() -> None:
        try:
            await server.serve(sockets=[listener])
        finally:
            listener.close()
            finished.set()

    hostd.backend_task = asyncio.create_task(run())  # type: ignore[attr-defined]
    return server
