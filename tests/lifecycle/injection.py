"""Faults in the calls of the control plane: each call to a daemon and each write to the registry is a step.

A request carries its `Injection` in a context variable. The tasks that it starts (a creation's task, a write that
outlives its caller) therefore count their steps with it. Background tasks count none. The steps are found by running
an operation; there is no list of them.

A kill is simulated by its effects: from the step on, the server's actions have no effect, as after a SIGKILL.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import wire
from lifecycle import daemon_clients
from lifecycle.sandboxes import registry
from wire.operations import Request, operation

ERRORS = ("refused", "unreached", "unanswered", "outage")
LEAVES = ("left-before", "left-after")
KILLS = ("killed-before", "killed-after")
CRASHES = ("crashed-before", "crashed-during")
REGISTRY = "registry"


@dataclass
class Injection:
    """One fault: at step `number` (from 0; -1 means none) of one request, in one of the modes above."""

    number: int = -1
    mode: str = ""
    seen: list[str] = field(default_factory=list)
    fired: bool = False
    leave: Callable[[], object] = lambda: None
    """Disconnects the caller of the request."""
    crash: Callable[[], object] = lambda: None
    """Ends the state database, without a warning."""
    recover: Callable[[], object] = lambda: None
    """Starts it again, after the request has ended."""


current: ContextVar[Injection | None] = ContextVar("injection", default=None)


def failure(place: str) -> Exception:
    """Return the exception that a call to a broken `place` raises."""
    return (
        registry.RegistryError("injected") if place == REGISTRY else daemon_clients.Unreachable(place, TimeoutError())
    )


@dataclass
class Injector:
    """A layer between one server and its calls.

    If `really` is set, it kills the process. Otherwise it simulates the effects of a kill.
    """

    really: bool = False
    dead: bool = False
    out: set[str] = field(default_factory=set)
    """The places that do not answer until they are removed from this set."""

    async def step[T](self, place: str, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """Execute one step, with the fault if it is due."""
        if self.dead:
            raise asyncio.CancelledError
        if place in self.out:
            raise failure(place)
        injection = current.get()
        if injection is None or injection.fired:
            return await work()
        injection.seen.append(f"{place}.{name}")
        if len(injection.seen) - 1 != injection.number:
            return await work()
        injection.fired = True
        match injection.mode:
            case "refused":
                raise failure(place) if place == REGISTRY else wire.RemoteError("injected", "refused")
            case "unreached":
                raise failure(place)
            case "unanswered":
                await work()
                raise failure(place)
            case "outage":
                self.out.add(place)
                raise failure(place)
            case "left-before":
                injection.leave()
                return await work()
            case "left-after":
                result = await work()
                injection.leave()
                return result
            case "crashed-before":
                await asyncio.to_thread(injection.crash)
                return await work()
            case "crashed-during":
                working = asyncio.ensure_future(work())
                await asyncio.to_thread(injection.crash)
                return await working
            case "killed-before":
                self._die()
            case "killed-after":
                await work()
                self._die()
        raise AssertionError(injection.mode)

    def _die(self) -> None:
        if self.really:
            os.kill(os.getpid(), signal.SIGKILL)
        self.dead = True
        raise asyncio.CancelledError

    def install(self, replace: Callable[[Any, str, Any], None] = setattr) -> None:
        """Intercept the calls of every `Daemon` and `Registry`."""
        ask = daemon_clients.Daemon.ask

        async def asked(
            daemon: daemon_clients.Daemon, request: Request[Any], timeout: float = daemon_clients.CALL_TIMEOUT
        ) -> Any:
            return await self.step(daemon.name, operation(request), lambda: ask(daemon, request, timeout))

        replace(daemon_clients.Daemon, "ask", asked)
        for name in ("admit", "put", "update", "delete", "call"):
            replace(registry.Registry, name, self._write(name, getattr(registry.Registry, name)))

    def _write(self, name: str, write: Callable[..., Awaitable[Any]]) -> Any:
        async def stepped(database: registry.Registry, *arguments: Any) -> Any:
            return await self.step(REGISTRY, name, lambda: write(database, *arguments))

        return stepped
