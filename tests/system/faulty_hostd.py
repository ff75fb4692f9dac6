"""The real hostd, with a fault at any function of a launch, removal or restart that a test selects.

The variable FAULT (`label:number:mode`) of a sandbox's environment gives a launch its fault. The operation `fault`
gives one to the removal, the change or the restart of a sandbox, or to the addition or removal of an image. `faulted`
returns the steps that were seen under a label, and `digest` the policy that a sandbox's worker reports. The steps are
found by wrapping, not listed.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wire
from runtimes import hostd, sandboxes, workers
from runtimes.daemons import Daemons
from runtimes.engine import containers
from runtimes.engine.docker import Docker, DockerError
from runtimes.images.store import ImageStore
from runtimes.net import netns, slot_pool, slots
from runtimes.process import supervisor
from runtimes.process.cgroups import Cgroups
from runtimes.process.freezer import Freezer
from runtimes.volumes import Volumes
from wire.api import worker

# These functions only call the steps, or only read. A fault in them is a fault of a step inside, or of none.
_DRIVERS = frozenset(
    [
        *("_launch", "_make", "_whole", "_ended", "_unmake", "_leave", "_watch", "_respawn", "_get", "_describe"),
        *("_put_in_force", "_recompile", "_follow", "_change_pause", "_settle_pause"),
    ]
)
_PLUMBING = frozenset(["in_thread", "inside", "inode", "list_rules", "unmount", "unmount_below", "processes"])

# These functions create and return something, and fail only in a step inside. So "done, but an error" is not possible.
_WHOLE = frozenset(
    [
        "slots.make",
        "netns.create",
        "netns.create_gateway",
        "netns.create_sandbox",
        "sandboxes.spawn_worker",
        "Sandboxes._spawn",
        "Cgroups.create",
        "sandboxes.plan_container",
    ]
)


@dataclass
class Fault:
    """A fault at step `number` (from 0; -1: none): refused, unanswered (done, but an error), killed-before,
    killed-after, docker-killed (dockerd is killed before the step).
    """

    number: int
    mode: str
    op: str = "launch"
    seen: list[str] = field(default_factory=list)
    fired: bool = False

    def meets(self, name: str) -> bool:
        if self.fired:
            return False
        self.seen.append(name)
        self.fired = len(self.seen) - 1 == self.number
        return self.fired


_current: ContextVar[Fault | None] = ContextVar("fault", default=None)
_labelled: dict[str, Fault] = {}
_waiting: dict[str, Fault] = {}


def _failure(name: str) -> Exception:
    if name.startswith("Docker."):
        return DockerError("injected")
    if name.startswith(("Client.", "Daemons.", "Worker.")):
        return ConnectionError("injected")
    return netns.NftError("injected") if name == "netns.load_rules" else OSError("injected")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_docker() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    os.kill(int(Path(config["run_dir"], "docker.pid").read_text()), signal.SIGKILL)


def _stepped(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    async def slowly(fault: Fault, arguments: Any, options: Any) -> Any:
        if fault.mode == "docker-killed":
            _kill_docker()
            return await work(*arguments, **options)
        if fault.mode == "killed-before":
            _kill()
        if fault.mode == "refused":
            raise _failure(name)
        result = await work(*arguments, **options)
        if fault.mode == "killed-after":
            _kill()
        if name in _WHOLE:
            return result
        raise _failure(name)

    def stepped(*arguments: Any, **options: Any) -> Any:
        fault = _current.get()
        if fault is None or not fault.meets(name):
            return work(*arguments, **options)
        if asyncio.iscoroutinefunction(work):
            return slowly(fault, arguments, options)
        if fault.mode == "docker-killed":
            _kill_docker()
            return work(*arguments, **options)
        if fault.mode == "killed-before":
            _kill()
        if fault.mode == "refused":
            raise _failure(name)
        result = work(*arguments, **options)
        if fault.mode == "killed-after":
            _kill()
        if name in _WHOLE:
            return result
        raise _failure(name)

    return stepped


def _wrap(owner: Any, title: str, names: Callable[[str], bool]) -> None:
    for name, work in list(vars(owner).items()):
        ours = getattr(work, "__module__", "").startswith(("runtimes", "wire"))
        if ours and hasattr(work, "__code__") and names(name):
            setattr(owner, name, _stepped(f"{title}.{name}", work))


def _with_fault(op: str, work: Callable[..., Any], name_of: Callable[[Any], str]) -> Callable[..., Any]:
    async def run(self: Any, subject: Any, *rest: Any, **options: Any) -> Any:
        name = name_of(subject)
        if op == "launch":
            text = subject.env.get("FAULT", "")
            if text:
                label, number, mode = text.split(":")
                _current.set(_labelled.setdefault(label, Fault(int(number), mode)))
        elif (fault := _waiting.get(name)) is not None and fault.op == op:
            _current.set(_waiting.pop(name))
        else:
            _current.set(None)
        return await work(self, subject, *rest, **options)

    return run


def _inside(op: str, outer: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return `outer`, or within the operation `op` with its fault `inner`, whose steps are those of `op`."""

    async def run(self: Any, *arguments: Any, **options: Any) -> Any:
        fault = _current.get()
        return await (inner if fault is not None and fault.op == op else outer)(self, *arguments, **options)

    return run


def _install() -> None:
    # A process that is killed at each step would wait longer each time.
    supervisor._BACKOFF = sandboxes._RESPAWN_BACKOFF = (0.0,)  # type: ignore[assignment]
    slot_pool.AHEAD = 0  # Each launch creates its own, step by step.

    def public(name: str) -> bool:
        return not name.startswith("_")

    _wrap(Docker, "Docker", lambda name: public(name) and name not in ("close", "version", "runtimes", "state"))
    _wrap(netns, "netns", lambda name: public(name) and name not in _PLUMBING)
    _wrap(slots, "slots", lambda name: name in ("make", "destroy"))
    _wrap(containers, "containers", lambda name: name == "end_processes")
    _wrap(Cgroups, "Cgroups", lambda name: name in ("create", "remove"))
    _wrap(Daemons, "Daemons", lambda name: name in ("attach",))
    _wrap(workers.WorkerProcess, "Worker", lambda name: name in ("configure", "end", "pause", "resume"))
    _wrap(Freezer, "Freezer", lambda name: name in ("freeze", "thaw", "end"))
    _wrap(Volumes, "Volumes", lambda name: name in ("stage", "settle", "release"))
    _wrap(wire.Client, "Client", lambda name: name == "call")
    _wrap(
        sandboxes.Sandboxes, "Sandboxes", lambda name: name.startswith("_") and name[1] != "_" and name not in _DRIVERS
    )
    for name in ("write_files", "plan_container", "remove_container_groups", "spawn_worker"):
        setattr(sandboxes, name, _stepped(f"sandboxes.{name}", getattr(sandboxes, name)))
    cls: Any = sandboxes.Sandboxes
    cls.launch = _with_fault("launch", cls.launch, lambda spec: spec.sandbox)
    cls.remove = _with_fault("remove", cls.remove, str)
    cls.pause = _with_fault("pause", cls.pause, str)
    cls.resume = _with_fault("resume", cls.resume, str)
    cls.configure = _inside("claim", _with_fault("configure", cls.configure, str), cls.configure)
    cls.claim = _with_fault("claim", cls.claim, str)
    images: Any = ImageStore
    images.add = _with_fault("image-add", images.add, lambda request: request.names[0])
    images.remove = _with_fault("image-remove", images.remove, str)
    cls._respawn = _with_fault("respawn", cls._respawn, lambda sandbox: sandbox.id)
    handle: Any = hostd.Host.handle

    async def handled(host: Any, client: wire.Client, op: str, parameters: wire.Message, fds: list[int]) -> Any:
        match op:
            case "fault":
                fault = Fault(parameters["number"], parameters["mode"], parameters["of"])
                _waiting[parameters["sandbox"]] = _labelled[parameters["label"]] = fault
                return {}
            case "faulted":
                fault = _labelled[parameters["label"]]
                return {"seen": fault.seen, "fired": fault.fired}
            case "digest":
                found = host._sandboxes._known.get(parameters["sandbox"])
                if found is None or found.worker is None:
                    return {"digest": None}
                return {"digest": (await found.worker.control.ask(worker.Beat())).digest}
        return await handle(host, client, op, parameters, fds)

    hostd.Host.handle = handled  # type: ignore[method-assign]


if __name__ == "__main__":
    _install()
    raise SystemExit(hostd.main(sys.argv[1:]))
