"""The gateway of one sandbox: wires the parts together and obeys hostd's channel.

- Until the first `configure` everything is refused. `configure` answers with the digest once the policy is in force:
  new connections and names at once, live flows that it no longer permits are cut before the answer.
- A configuration is taken whole or not at all, and only for this sandbox and generation.
- The guard's pidfd became readable: nothing is dialled or asked upstream any more and all flows are cut, until a
  `guard` notification brings a new one.
- The sandbox sent as many bytes as its policy allows: all flows are cut, and nothing more is sent.
- The sandbox is paused: all flows are cut before the answer, and no query is sent upstream. New flows wait for the
  resume. Policies and revocations take effect meanwhile.
- hostd's channel ended: the worker exits, and its listeners with it.

`wire.api.worker` has the requests on hostd's channel. The worker asks for a new channel to a daemon when its own has
ended.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import uvloop

import wire
from audit.client import AuditClient, AuditUnavailable
from audit.shared_ring import map_ring
from gateway import confine
from gateway.accept import Acceptor
from gateway.budget import RULE, Budget
from gateway.config import GatewayConfig
from gateway.described import of_policy
from gateway.dns.names import NameBudget
from gateway.dns.resolver import Resolver
from gateway.dns.server import DnsServer
from gateway.engines.port import MakeEngine
from gateway.flows import FlowRegistry
from gateway.ingress import Ingress
from gateway.inside import InsideSockets, Listeners
from gateway.inspection import Inspection
from gateway.ledger_page import map_ledger
from gateway.ports import AuditRecorder, DatabaseSessions, LeasedSecrets, PolicyDecider, StreamDialler
from gateway.spawn import Order
from gateway.state import Guard, WorkerState
from gateway.upstream import UpstreamDialler
from policy.decision import Deny, decide_name
from vault.client import VaultClient
from wire.api import worker
from wire.api.worker import ChannelName
from wire.errors import ConfigError
from wire.frames import close_all
from wire.patience import Patience
from wire.routes import reaches_ipv6
from wire.serving import handler

_DRAIN_SECONDS = 0.5
_CUT_SECONDS = 2.0
_ASK_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Worker:
    """The composition; make it inside the running loop."""

    def __init__(self, order: Order, inside: InsideSockets, listeners: Listeners, make_engine: MakeEngine) -> None:
        fds = order.descriptors
        self._order = order
        self._listeners = listeners
        self._configuring = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._registry = FlowRegistry()
        self._audit = AuditClient.from_fd(fds.audit, ring=map_ring(fds.ring, fds.cursor, fds.wake))
        state = self._state = WorkerState(Guard(fds.guard), VaultClient.from_fd(fds.vault, self._revoked))
        control = socket.socket(fileno=fds.control)
        served = handler(worker.CONTROL, self._handle)
        self._control = wire.Client(control, served, gives=wire.NARROW, descriptors=True)
        ledger = self._ledger = map_ledger(fds.ledger)
        self._names = NameBudget(ledger)
        excepted = order.constants.allowed_addresses
        self._resolver = Resolver(
            (), time.monotonic, lambda: state.may_resolve, self._may_ask, self._turn, lambda: reaches_ipv6(excepted)
        )
        dialler = UpstreamDialler(self._resolver, state, time.monotonic)
        self._dns = DnsServer(self._resolver, self._audit, state, time.monotonic, self._names)
        self._secrets = LeasedSecrets(state)
        budget = Budget(ledger, state, time.monotonic, self._spent)
        recorder = AuditRecorder(self._audit, state)
        self._streams = StreamDialler(dialler, budget, recorder)
        self._inspection = Inspection(
            make_engine,
            PolicyDecider(state),
            budget,
            self._secrets,
            DatabaseSessions(state, self._secrets),
            recorder,
            self._streams,
            state,
            ledger,
        )
        self._acceptor = Acceptor(self._audit, dialler, self._registry, state, self._inspection, budget, self._bounded)
        self._ingress = Ingress(socket.socket(fileno=fds.ingress), inside, self._audit, state)

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
        self._spawn(self._keep(ChannelName.AUDIT, lambda: self._audit.wait_closed()), "keep-audit")
        self._spawn(self._keep(ChannelName.VAULT, lambda: self._state.vault.closed.wait()), "keep-vault")
        self._control.start()
        ended = self._spawn(self._control.closed.wait(), "control")
        await asyncio.wait([ended, *services], return_when=asyncio.FIRST_COMPLETED)
        for service in services:
            if service.done() and not service.cancelled() and service.exception() is not None:
                _log.error("%s ended: %s", service.get_name(), type(service.exception()).__name__)
        self._cut_all()
        await self._audit.close(_DRAIN_SECONDS)

    async def _keep(self, channel: ChannelName, ended: Callable[[], Awaitable[object]]) -> None:
        """Ask hostd for a new channel to auditd or vaultd whenever the present one has ended."""
        while True:
            await ended()
            with contextlib.suppress(ConnectionError, wire.RemoteError, TimeoutError):
                await self._control.ask(worker.RequestChannel(channel))
            await asyncio.sleep(_ASK_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _may_ask(self, host: str) -> Deny | None:
        if self._state.config is None:
            return Deny("unconfigured", "no policy is active yet")
        decision = decide_name(self._state.config.policy, host)
        return decision if isinstance(decision, Deny) else self._bounded(host)

    def _bounded(self, host: str) -> Deny | None:
        if self._state.config is None:
            return Deny("unconfigured", "no policy is active yet")
        return self._names.admit(self._state.config.policy, host, time.monotonic())

    def _turn(self) -> float | None:
        return None if self._state.config is None else self._names.take(self._state.config.policy.dns, time.monotonic())

    def _spent(self) -> None:
        cut = self._cut_all()
        reason = "the sandbox has sent as many bytes as its policy allows"
        self._audit.note("flow", "deny", rule=RULE, reason=reason, count=cut)

    def _cut_all(self) -> int:
        """Abort every flow, and end the idle upstream connections; return the number of flows."""
        if self._inspection.engine is not None:
            self._inspection.engine.drop_idle()
        return self._registry.cut_all()

    def _watch_guard(self) -> None:
        asyncio.get_running_loop().add_reader(self._state.guard.fd, self._guard_gone)

    def _guard_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._state.guard.fd)
        if self._state.guard.alive:
            self._watch_guard()
            return
        cut = self._cut_all()
        _log.error("the guard is gone: dialling stopped, %d flows cut", cut)
        self._audit.note("gateway.guard", "deny", reason="the guard is gone", count=cut)

    async def _revoked(self, secrets: frozenset[str] | None) -> None:
        self._secrets.drop(secrets)
        engine = self._inspection.engine
        if engine is not None:
            engine.revoke(secrets)

    async def _handle(
        self,
        _client: wire.Client,
        request: worker.Beat | worker.Configure | worker.Rebind | worker.Guarded | worker.Pause | worker.Resume,
        fds: list[int],
    ) -> worker.Pulse | worker.Confirmed | None:
        expected = 1 if isinstance(request, worker.Rebind | worker.Guarded) else 0
        if len(fds) != expected:
            close_all(fds)
            raise wire.RequestError(wire.Code.INVALID, f"{expected} descriptors belong to this request")
        match request:
            case worker.Beat():
                self._ledger.beat()
                digest = self._state.config.policy.digest if self._state.config is not None else None
                return worker.Pulse(digest, len(self._registry))
            case worker.Configure():
                async with self._configuring:
                    return worker.Confirmed(await self._configure(request))
            case worker.Guarded():
                self._guarded(fds[0])
            case worker.Pause():
                await self._pause()
            case worker.Resume():
                self._resume()
            case worker.Rebind(ChannelName.AUDIT):
                await self._audit.rebind(fds[0])
            case worker.Rebind():
                former, self._state.vault = self._state.vault, VaultClient.from_fd(fds[0], self._revoked)
                await self._revoked(None)
                await former.close()
        return None

    async def _pause(self) -> None:
        """Cut every flow and let new ones wait. Everything that is not cut here rests on `moving`."""
        self._state.moving.clear()
        self._resolver.discard()
        cut = self._cut_all()
        try:
            async with Patience(_CUT_SECONDS):
                await self._registry.emptied()
        except TimeoutError:
            raise wire.RequestError(wire.Code.TIMEOUT, "a flow did not end") from None
        self._audit.note("gateway.pause", "info", count=cut)

    def _resume(self) -> None:
        if not self._state.moving.is_set():
            self._audit.note("gateway.resume", "info")
            self._state.moving.set()

    def _guarded(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(self._state.guard.fd)
        os.close(self._state.guard.fd)
        self._state.guard = Guard(fd)
        self._watch_guard()

    async def _configure(self, request: worker.Configure) -> str:
        try:
            config = GatewayConfig.of(request, self._order.constants)
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
        self._state.config = config
        self._names.placeholders = config.known
        put_in_place()
        self._resolver.discard()
        self._resolver.set_upstreams(config.constants.dns_upstreams)
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
