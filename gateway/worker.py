"""The gateway of one sandbox: wires the parts together and obeys hostd's channel.

- Until the first `configure` everything is refused. `configure` answers with the digest once the policy is in force:
  new connections and names at once, live flows that it no longer permits are cut before the answer.
- A configuration is taken whole or not at all, and only for this sandbox and generation.
- The guard's pidfd became readable: nothing is dialled or asked upstream any more and all flows are cut, until a
  `guard` notification brings a new one.
- The sandbox sent as many bytes as its policy allows: all flows are cut, and nothing more is sent.
- hostd's channel ended: the worker exits, and its listeners with it.

Operations on the control channel: `configure`, `ping`, `guard` (1 fd), `audit` (1 fd: a new channel to auditd),
`vault` (1 fd: a new channel to vaultd). The worker asks for one of the last two with `channel` when its own has ended.
"""

import asyncio
import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import uvloop

import wire
from audit.client import AuditClient, AuditUnavailable
from gateway import confine
from gateway.accept import Acceptor
from gateway.birth import Order
from gateway.budget import RULE, Budget
from gateway.config import ConfigError, GatewayConfig
from gateway.described import of_policy
from gateway.dns_server import DnsServer
from gateway.engine import MakeEngine
from gateway.flows import FlowRegistry
from gateway.ingress import Ingress
from gateway.inside import InsideSockets, Listeners
from gateway.inspection import Inspection
from gateway.ledger import Ledger
from gateway.names import NameBudget
from gateway.ports import AuditRecorder, LeasedSecrets, PolicyDecider, StreamDialler
from gateway.resolver import Resolver
from gateway.upstream import Dialler
from policy.decision import Deny, decide_name
from policy.rules import Limits
from vault.client import VaultClient
from wire.frames import close_all

_DRAIN_SECONDS = 0.5
_ASK_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Guard:
    """Whether the guard of the upstream namespace lives, by its pidfd."""

    def __init__(self, fd: int) -> None:
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self.fd = fd
        self._gone = False

    @property
    def alive(self) -> bool:
        """Asked of the kernel at each call, so there is no moment between its death and our knowing."""
        if not self._gone and self._poll.poll(0):
            self._gone = True
        return not self._gone


class Worker:
    """The composition; make it inside the running loop."""

    def __init__(self, order: Order, inside: InsideSockets, listeners: Listeners, make_engine: MakeEngine) -> None:
        fds = order.descriptors
        self._order = order
        self._listeners = listeners
        self._config: GatewayConfig | None = None
        self._configuring = asyncio.Lock()
        self._guard = Guard(fds.guard)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._registry = FlowRegistry()
        self._audit = AuditClient.from_fd(fds.audit)
        self._vault = VaultClient.from_fd(fds.vault, self._revoked)
        control = socket.socket(fileno=fds.control)
        self._control = wire.Client(control, self._handle, gives=wire.NARROW, descriptors=True)
        ledger = self._ledger = Ledger.from_fd(fds.ledger)
        self._names = NameBudget(ledger)
        self._resolver = Resolver((), time.monotonic, lambda: self._guard.alive, self._may_ask, self._turn)
        dialler = Dialler(self._resolver, self._active, lambda: self._guard.alive, time.monotonic)
        self._dns = DnsServer(self._resolver, self._audit, self._active, time.monotonic, self._names)
        self._secrets = LeasedSecrets(lambda: self._vault)
        budget = Budget(ledger, self._limits, time.monotonic, self._spent)
        recorder = AuditRecorder(self._audit, self._active)
        self._streams = StreamDialler(dialler, budget, recorder)
        self._inspection = Inspection(
            make_engine,
            PolicyDecider(self._active),
            budget,
            self._secrets,
            recorder,
            self._streams,
            lambda: self._vault,
            ledger,
        )
        self._acceptor = Acceptor(
            self._audit, dialler, self._registry, self._active, self._inspection.ready, budget, self._bounded
        )
        self._ingress = Ingress(socket.socket(fileno=fds.ingress), inside, self._audit, self._active)

    async def run(self) -> None:
        """Serve until hostd's channel ends."""
        self._watch_guard()
        self._dns.start_udp(self._listeners.dns_udp)
        services = [
            self._spawn(self._acceptor.serve(self._listeners.proxy), "accept"),
            self._spawn(self._dns.serve_tcp(self._listeners.dns_tcp), "dns-accept"),
            self._spawn(self._ingress.serve(), "ingress-accept"),
            self._spawn(self._inspection.keep(), "identity"),
        ]
        self._spawn(self._keep("audit", lambda: self._audit.wait_closed()), "keep-audit")
        self._spawn(self._keep("vault", lambda: self._vault.closed.wait()), "keep-vault")
        self._control.start()
        ended = self._spawn(self._control.closed.wait(), "control")
        await asyncio.wait([ended, *services], return_when=asyncio.FIRST_COMPLETED)
        for service in services:
            if service.done() and not service.cancelled() and service.exception() is not None:
                _log.error("%s ended: %s", service.get_name(), type(service.exception()).__name__)
        self._registry.cut_all()
        await self._audit.close(_DRAIN_SECONDS)

    async def _keep(self, channel: str, ended: Callable[[], Awaitable[object]]) -> None:
        """Ask hostd for a new channel to auditd or vaultd whenever the present one has ended."""
        while True:
            await ended()
            with contextlib.suppress(ConnectionError, wire.RemoteError, TimeoutError):
                await self._control.call("channel", name=channel)
            await asyncio.sleep(_ASK_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _active(self) -> GatewayConfig | None:
        return self._config

    def _may_ask(self, host: str) -> Deny | None:
        if self._config is None:
            return Deny("unconfigured", "no policy is active yet")
        decision = decide_name(self._config.policy, host)
        return decision if isinstance(decision, Deny) else self._bounded(host)

    def _bounded(self, host: str) -> Deny | None:
        if self._config is None:
            return Deny("unconfigured", "no policy is active yet")
        return self._names.admit(self._config.policy, host, time.monotonic())

    def _turn(self) -> float | None:
        return None if self._config is None else self._names.take(self._config.policy.dns, time.monotonic())

    def _limits(self) -> Limits | None:
        return self._config.policy.limits if self._config is not None else None

    def _spent(self) -> None:
        cut = self._registry.cut_all()
        reason = "the sandbox has sent as many bytes as its policy allows"
        self._audit.note("flow", "deny", rule=RULE, reason=reason, count=cut)

    def _watch_guard(self) -> None:
        asyncio.get_running_loop().add_reader(self._guard.fd, self._guard_gone)

    def _guard_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._guard.fd)
        if self._guard.alive:
            self._watch_guard()
            return
        cut = self._registry.cut_all()
        _log.error("the guard is gone: dialling stopped, %d flows cut", cut)
        self._audit.note("gateway.guard", "deny", reason="the guard is gone", count=cut)

    async def _revoked(self, secrets: frozenset[str] | None) -> None:
        self._secrets.drop(secrets)
        engine = self._inspection.engine
        if engine is not None:
            engine.revoke(secrets)

    async def _handle(
        self, _client: wire.Client, op: str, parameters: wire.Message, fds: list[int]
    ) -> wire.Message | None:
        if op in ("guard", "audit", "vault") and len(fds) == 1 and not parameters:
            await self._replace(op, fds[0])
            return None
        close_all(fds)
        if fds:
            raise wire.RequestError(wire.Code.INVALID, "descriptors do not belong to this operation")
        match op:
            case "configure":
                async with self._configuring:
                    return {"digest": await self._configure(parameters)}
            case "ping":
                self._ledger.beat()  # seen by hostd even while hostd cannot read the answer
                digest = self._config.policy.digest if self._config is not None else None
                return {"digest": digest, "flows": len(self._registry)}
            case _:
                raise wire.RequestError(wire.Code.UNKNOWN_OP, "not an operation of a worker")

    async def _replace(self, op: str, fd: int) -> None:
        match op:
            case "guard":
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._guard.fd)
                os.close(self._guard.fd)
                self._guard = Guard(fd)
                self._watch_guard()
            case "audit":
                await self._audit.rebind(fd)
            case _:
                former, self._vault = self._vault, VaultClient.from_fd(fd, self._revoked)
                await self._revoked(None)
                await former.close()

    async def _configure(self, parameters: wire.Message) -> str:
        if set(parameters) != {"gateway"}:
            raise wire.RequestError(wire.Code.INVALID, "configure takes gateway")
        try:
            config = GatewayConfig.from_json(parameters["gateway"])
        except ConfigError as error:
            raise wire.RequestError(wire.Code.INVALID, str(error)) from error
        if (config.sandbox, config.generation) != (self._order.sandbox, self._order.generation):
            raise wire.RequestError(wire.Code.INVALID, "this configuration is of another sandbox or generation")
        try:
            put_in_place = self._inspection.prepare(config)
        except ValueError as error:
            raise wire.RequestError(wire.Code.INVALID, "upstream_roots cannot be read") from error
        try:
            await self._audit.accept("gateway.configure", "info", **of_policy(config, None))
        except AuditUnavailable as error:
            raise wire.RequestError(wire.Code.AUDIT_UNAVAILABLE, "the change could not be recorded") from error
        self._config = config
        put_in_place()
        self._resolver.discard()
        self._resolver.set_upstreams(config.dns_upstreams)
        cut = self._registry.recheck() + self._streams.recheck()
        if self._inspection.engine is not None:
            cut += self._inspection.engine.recheck()
        if cut:
            self._audit.note("gateway.configure", "deny", reason="flows no longer permitted were cut", count=cut)
        return config.policy.digest


def run(order: Order, inside: InsideSockets, listeners: Listeners, make_engine: MakeEngine) -> int:
    """Run the worker in this process, confined from here on; returns its exit code.

    The loop makes its own descriptors, a socket pair among them, when it begins to run: it is confined from within. It
    is not closed: its process ends, and it would begin to run again for that.
    """

    async def main() -> None:
        confine.install(listeners.dns_udp.fileno())
        await Worker(order, inside, listeners, make_engine).run()

    confine.refuse_rings()
    uvloop.new_event_loop().run_until_complete(main())
    return 0
