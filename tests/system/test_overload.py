"""A real worker with 400 streams that gets a small part of a processor is slow, and has no other fault.

The load is a control group of the worker and some endless loops. Together they can use a quarter of a processor.
"""

import asyncio
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import wire
from policy.compiled import CompiledPolicy
from policy.facts import Scheme
from policy.names import HostPattern
from policy.rules import Action, Endpoint, Precedence, Rule, RuleList
from runtimes.process.cgroups import Cgroups
from runtimes.workers import WorkerIdentity, WorkerProcess
from testbed.with_parent import with_parent
from tests.stopping import stop
from tests.system.test_worker_flow import (  # noqa: F401 - fixtures are found by their names
    PREFIX,
    UID,
    WEB,
    Gate,
    Rig,
    auditd,
    internet,
    namespaces,
    rig,
    vaultd,
    within,
    worker,
)

pytestmark = [pytest.mark.system, pytest.mark.faults]

STREAMS = 400
LOOPS = 3
PATIENCE = 150.0
HOST = "good.example.com"
REQUEST = f"GET /x HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()


@pytest.fixture(name="web")
def _web(rig: Rig) -> Iterator[None]:  # noqa: F811
    """A web server of the test internet that answers every request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    listener = within(f"{PREFIX}-up", lambda: socket.create_server((WEB, 80), backlog=1024))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(asyncio.start_server(serve, sock=listener), loop).result(10)
    yield

    async def end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(end(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    listener.close()
    loop.close()


@contextlib.contextmanager
def starved(pid: int, share: float = 0.25) -> Iterator[None]:
    """Let the worker share so much of a processor with endless loops during the block."""
    quota = str(int(100_000 * share))
    root = next((one for one in Cgroups("/none").hierarchies.roots if (one / "cpu.cfs_quota_us").exists()), None)
    version = 1 if root is not None or Path("/sys/fs/cgroup/cpu").is_dir() else 2
    root = root or Path("/sys/fs/cgroup/cpu" if version == 1 else "/sys/fs/cgroup")
    group = root / f"{PREFIX}-starved"
    group.mkdir()
    loops = [subprocess.Popen(with_parent(sys.executable, "-c", "while True: pass")) for _ in range(LOOPS)]
    try:
        if version == 1:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text(quota)
        else:
            (group / "cpu.max").write_text(f"{quota} 100000")
        for member in (*(loop.pid for loop in loops), pid):
            (group / "cgroup.procs").write_text(str(member))
        yield
    finally:
        # The limit is removed first, because a process that is moved while it is throttled can stay stopped.
        (group / ("cpu.cfs_quota_us" if version == 1 else "cpu.max")).write_text("-1" if version == 1 else "max 100000")
        for loop in loops:
            loop.kill()
            loop.wait()
        (root / "cgroup.procs").write_text(str(pid))
        deadline = time.monotonic() + 10
        while (group / "cgroup.procs").read_text().strip():
            assert time.monotonic() < deadline
        group.rmdir()


@contextlib.contextmanager
def watched(gate: Gate) -> Iterator[threading.Event]:
    """hostd's liveness check of the worker. The event is set when it would replace the worker."""
    replaced, stop = threading.Event(), threading.Event()

    async def watch() -> None:
        control = wire.Client(socket.socket(fileno=os.dup(gate.control.sock.fileno())))
        control.start()
        identity = WorkerIdentity(gate.rig.sandbox, gate.rig.generation, UID, Path("/none"))
        none: Any = None
        eye = WorkerProcess(identity, gate.pid, control, none, none, gate.ledger, none, none, none, 0.0)
        ended = asyncio.create_task(eye.ended())
        ended.add_done_callback(lambda task: None if task.cancelled() else replaced.set())
        await asyncio.to_thread(stop.wait)
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)
        await control.close()

    thread = threading.Thread(target=asyncio.run, args=(watch(),))
    thread.start()
    try:
        yield replaced
    finally:
        stop.set()
        thread.join(30)
        gate.control.sock.setblocking(True)


def answers(streams: list[socket.socket]) -> Counter[str]:
    """Send a request on each stream at once. Return the number of answers of each status."""
    for stream in streams:
        stream.sendall(REQUEST)
    return collected(streams)


def collected(streams: list[socket.socket]) -> Counter[str]:
    selector = selectors.DefaultSelector()
    received: dict[socket.socket, bytes] = {}
    for stream in streams:
        received[stream] = b""
        selector.register(stream, selectors.EVENT_READ)
    open_ones, deadline = set(streams), time.monotonic() + PATIENCE
    while open_ones and time.monotonic() < deadline:
        for key, _ in selector.select(1.0):
            stream = cast(socket.socket, key.fileobj)
            try:
                part = stream.recv(65536)
            except ConnectionError:
                part = b""
            received[stream] += part
            head, end, body = received[stream].partition(b"\r\n\r\n")
            if not part or (end and len(body) >= int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])):
                selector.unregister(stream)
                open_ones.discard(stream)
    selector.close()
    return Counter(map(_kind, received.values()))


def _kind(data: bytes) -> str:
    status = data[9:12].decode() or "cut"
    return f"{status} later" if b"\r\nretry-after: " in data.lower() else status


RULES = CompiledPolicy(
    "test",
    (
        RuleList(
            "test",
            Precedence.DENY_WINS,
            rules=(Rule("r", Action.ALLOW, (HostPattern(HOST),), endpoints=(Endpoint(80, Scheme.HTTP),)),),
        ),
    ),
)


@pytest.mark.extended
def test_a_worker_that_gets_little_of_a_processor_is_kept_and_ends_what_it_accepted(
    rig: Rig,  # noqa: F811
    web: None,
    tmp_path: Path,
) -> None:
    """Each request is answered by the server, or refused before it was accepted, with a time to retry."""
    with worker(rig, tmp_path, limits={"dial_rate": 1000}) as gate, contextlib.ExitStack() as stack:
        gate.configure(RULES)
        streams = [stack.enter_context(gate.dial(port=80)) for _ in range(STREAMS)]
        assert {"200": STREAMS} == answers(streams)
        with watched(gate) as replaced, starved(gate.pid):
            seen = answers(streams) + answers(streams)
            print(seen)
            assert not replaced.is_set()
        assert 2 * STREAMS == seen["200"] + seen["503 later"], seen
        assert seen["200"] >= STREAMS, seen
        assert {"200": STREAMS} == answers(streams)


@pytest.mark.extended
def test_a_worker_that_gets_next_to_nothing_of_a_processor_is_kept(
    rig: Rig,  # noqa: F811
    web: None,
    tmp_path: Path,
) -> None:
    """It answers no ping for half a minute, and answers all its requests when it can run again."""
    with worker(rig, tmp_path, limits={"dial_rate": 1000}) as gate, contextlib.ExitStack() as stack:
        gate.configure(RULES)
        streams = [stack.enter_context(gate.dial(port=80)) for _ in range(STREAMS)]
        assert {"200": STREAMS} == answers(streams)
        with watched(gate) as replaced:
            with starved(gate.pid, 0.02):
                for stream in streams:
                    stream.sendall(REQUEST)
                assert not replaced.wait(30)
            seen = collected(streams)
            assert not replaced.is_set()
        assert STREAMS == seen["200"] + seen["503 later"], seen
        assert {"200": STREAMS} == answers(streams)


def test_a_worker_that_is_stopped_is_found(rig: Rig, tmp_path: Path) -> None:  # noqa: F811
    """The control: the check does detect a worker that hangs."""
    with worker(rig, tmp_path) as gate:
        gate.configure(RULES)
        with watched(gate) as replaced:
            stop(gate.pid)
            try:
                assert replaced.wait(PATIENCE)
            finally:
                os.kill(gate.pid, signal.SIGCONT)
