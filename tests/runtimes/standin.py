"""Small stand-ins for compiler, zygote and worker: `python -m tests.runtimes.standin CONFIG.json`.

The configuration's `kind` selects one. They implement the same operations as the real processes, and nothing else.
`tests/contracts/daemons.py` compares both. hostd's tests observe effects at the far end (a listener in the gateway
namespace, a kernel, Docker).
"""

import asyncio
import hashlib
import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import wire
from runtimes.net.plan import PLAN
from wire.api import compiler, worker, zygote
from wire.frames import close_all
from wire.operations import parameters
from wire.serving import handler


def _inherited(name: str) -> socket.socket:
    return socket.socket(fileno=int(os.environ[name]))


def digest(selection: dict[str, Any]) -> str:
    """The digest of the policy of a selection."""
    return hashlib.sha256(json.dumps(selection, sort_keys=True).encode()).hexdigest()


async def _compiler() -> None:
    """A compiler that does not compile: any object and its digest are the policy, or with `answer` that text."""

    async def handle(_client: wire.Client, request: compiler.Compile, fds: list[int]) -> compiler.CompiledText:
        close_all(fds)
        selection = json.loads(request.selection)
        if not isinstance(selection, dict):
            raise wire.RequestError(wire.Code.INVALID, "selection: not an object")
        return compiler.CompiledText(selection.get("answer", json.dumps(selection | {"digest": digest(selection)})))

    serve = handler(compiler.CONTROL, handle)
    control = await wire.serve_connection(_inherited("SALLYPORT_CONTROL_FD"), serve)
    await control.tell(compiler.Changed())
    await control.closed.wait()


async def _zygote() -> None:
    children: set[asyncio.Task[None]] = set()
    prepared: list[zygote.Prepare] = []

    async def watch(client: wire.Client, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        if not client.closed.is_set():
            await client.tell(zygote.Exited(process.pid, status))

    async def handle(
        client: wire.Client, request: zygote.Prepare | zygote.Fork | zygote.Identify, fds: list[int]
    ) -> zygote.Forked | zygote.Identity | None:
        try:
            if isinstance(request, zygote.Identify):
                return zygote.Identity(os.getpid())
            if isinstance(request, zygote.Prepare):
                prepared.append(request)
                return None
            if not prepared:
                raise wire.RequestError(wire.Code.UNAVAILABLE, "fork comes after prepare")
            if len(fds) != zygote.DESCRIPTORS:
                raise wire.RequestError(wire.Code.INVALID, f"fork takes {zygote.DESCRIPTORS} descriptors")
            order = {**parameters(request), "fds": fds}
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.runtimes.standin", "worker", json.dumps(order), pass_fds=fds
            )
            task = asyncio.create_task(watch(client, process))
            children.add(task)
            task.add_done_callback(children.discard)
            return zygote.Forked(process.pid)
        finally:
            close_all(fds)

    serve = handler(zygote.OPERATIONS, handle)
    control = await wire.serve_connection(_inherited("SALLYPORT_CONTROL_FD"), serve, descriptors=True)
    await control.closed.wait()
    os._exit(0)  # It ends like the real one: its workers stay alive. An orderly end of asyncio would kill them.


def _gateway_listener(netns_fd: int) -> socket.socket:
    made: list[socket.socket] = []

    def inside() -> None:
        os.setns(netns_fd, os.CLONE_NEWNET)
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((str(PLAN.gateway), PLAN.proxy_port))
        listener.listen(16)
        made.append(listener)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    return made[0]


async def _worker(order: dict[str, Any]) -> None:
    for directory in order["cgroup"]:
        Path(directory, "cgroup.procs").write_text(str(os.getpid()))
    control_fd, _audit, _vault, netns_fd, *_others = order["fds"]
    listener = _gateway_listener(netns_fd)
    os.close(netns_fd)
    os.setgroups([])
    os.setresgid(order["gid"], order["gid"], order["gid"])
    os.setresuid(order["uid"], order["uid"], order["uid"])
    policy: dict[str, Any] = {}
    channels: list[str] = []
    moving = asyncio.Event()
    moving.set()

    async def handle(
        _client: wire.Client,
        request: worker.Beat | worker.Configure | worker.Rebind | worker.Guarded | worker.Pause | worker.Resume,
        fds: list[int],
    ) -> worker.Pulse | worker.Confirmed | None:
        close_all(fds)
        if len(fds) != (1 if isinstance(request, worker.Rebind | worker.Guarded) else 0):
            raise wire.RequestError(wire.Code.INVALID, "descriptors do not belong to this operation")
        match request:
            case worker.Beat():
                return worker.Pulse(policy.get("digest"), 0)
            case worker.Configure():
                return worker.Confirmed(configure(request))
            case worker.Guarded():
                channels.append("guard")
            case worker.Pause():
                moving.clear()
            case worker.Resume():
                moving.set()
            case worker.Rebind(channel):
                if policy.get("deaf"):
                    raise wire.RequestError(wire.Code.FORBIDDEN, "told to be deaf")
                channels.append(channel)
        return None

    def configure(request: worker.Configure) -> str:
        if (request.sandbox, request.generation) != (order["sandbox"], order["generation"]):
            raise wire.RequestError(wire.Code.INVALID, "this configuration is of another sandbox or generation")
        given = json.loads(request.policy)
        if given.get("refuse"):
            raise wire.RequestError(wire.Code.FORBIDDEN, "told to refuse")
        if "digest" not in given:
            raise wire.RequestError(wire.Code.INVALID, "gateway has no policy")
        policy.clear()
        policy.update(given)
        return str(given["digest"])

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await moving.wait()
        if not policy:  # as the real worker, which denies
            writer.close()
            return
        original = writer.get_extra_info("socket").getsockopt(socket.SOL_IP, 80, 16)
        port, address = int.from_bytes(original[2:4]), socket.inet_ntoa(original[4:8])
        note = policy.get("note")
        parts = (order["sandbox"], order["generation"], f"{address}:{port}", note, ", ".join(channels))
        writer.write((" ".join(map(str, parts)).strip() + "\n").encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(accept, sock=listener)
    serve = handler(worker.CONTROL, handle)
    control = await wire.serve_connection(socket.socket(fileno=control_fd), serve, descriptors=True)
    async with server:
        await control.closed.wait()


def main(arguments: list[str]) -> None:
    if arguments[0] == "worker":
        asyncio.run(_worker(json.loads(arguments[1])))
        return
    config = json.loads(Path(arguments[0]).read_text())
    match config["kind"]:
        case "zygote":
            asyncio.run(_zygote())
        case "compiler":
            asyncio.run(_compiler())


if __name__ == "__main__":
    main(sys.argv[1:])
