"""Keeps a daemon running: start or adopt, wait until it answers, start again when it ends.

- The user is dropped before the daemon's first instruction (`enter`), never by the daemon itself.
- Restarts back off, by two seconds at most, so that a daemon that ends again and again does not delay the recovery of
  the others.
- A daemon that a former hostd left running is adopted if hostd would start it in exactly the same way and it answers.
- hostd reads a daemon's standard error and logs it within bounds (`output`).
- Callbacks run after each start and restart, before the next end of the daemon is handled.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import wire
from runtimes.process import predecessor
from runtimes.process.adopted import Adopted, AdoptedProcess
from runtimes.process.daemon_groups import DaemonGroups
from runtimes.process.output import DAEMON, Output, pipe
from runtimes.process.watchdog import outrank

_READY_SECONDS = 60.0
_STOP_SECONDS = 10.0
_ADOPT_SECONDS = 3.0
_CALM_SECONDS = 10.0
_BACKOFF = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)
_ROOT = Path(__file__).resolve().parents[2]

_log = logging.getLogger(__name__)


class NotReady(Exception):
    """A daemon ended, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program to start.

    Attributes:
        netns: its network namespace; None: hostd's own.
        expose: paths that it must be able to read.
        memory: its limit, in bytes.
        configuration: the text of its file, to decide whether a process that runs is the same.
        locks: it locks its memory.
    """

    name: str
    argv: tuple[str, ...]
    uid: int
    netns: str | None = None
    expose: tuple[str, ...] = ()
    memory: int = 0
    configuration: bytes = field(default=b"", repr=False)
    locks: bool = False

    @property
    def identity(self) -> str:
        """A digest that is equal for two processes that were started from the same code in the same way."""
        parts = (self.argv, self.uid, self.netns, self.expose, self.memory, self.configuration)
        return predecessor.digest(predecessor.code(), *parts)


@dataclass(frozen=True, slots=True)
class InheritedDescriptors:
    """Descriptors for the child by the name of the environment variable that has their number.

    hostd closes them when the child has them.
    """

    fds: dict[str, int] = field(default_factory=dict)


type Noted = Callable[[str, int], None]
type Prepare = Callable[[], Awaitable[InheritedDescriptors]]
type Ready = Callable[[], Awaitable[None]]
type Up = Callable[[bool], Awaitable[None]]


def interpreter_paths(run_dir: str, state_dir: str) -> tuple[str, ...]:
    """Return the paths that every daemon must be able to read."""
    return (sys.base_prefix, sys.prefix, str(_ROOT), run_dir, state_dir)


async def start_process(
    python: str, program: Program, cgroup: Path, inheritance: InheritedDescriptors
) -> tuple[asyncio.subprocess.Process, Output]:
    """Start `program` in control group `cgroup`, through `enter`; return its process and its output."""
    order = {
        "cgroup": str(cgroup),
        "netns": program.netns,
        "uid": program.uid,
        "gid": program.uid,
        "locks": program.locks,
        "expose": list(program.expose),
        "argv": list(program.argv),
    }
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    environment |= {name: str(fd) for name, fd in inheritance.fds.items()}
    reading, writing = pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            "-IS",
            str(_ROOT / "runtimes" / "process" / "enter.py"),
            json.dumps(order),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            pass_fds=tuple(inheritance.fds.values()),
            env=environment,
            cwd=_ROOT,
            start_new_session=True,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        for fd in (writing, *inheritance.fds.values()):
            os.close(fd)
    outrank(process.pid)
    return process, Output(program.name, reading, DAEMON)


async def ping(path: Path, uid: int) -> None:
    """Wait until the daemon at `path`, of user `uid`, answers `ping`. The caller limits the time."""
    while True:
        try:
            client = await wire.Client.connect(path, uid)
        except OSError:
            await asyncio.sleep(0.02)
            continue
        try:
            await client.ask(wire.Ping(), timeout=5)
            return
        except (ConnectionError, TimeoutError, wire.RemoteError):
            await asyncio.sleep(0.05)
        finally:
            await client.close()


class Supervised:
    """One daemon, kept running from `start` to `stop`."""

    def __init__(
        self,
        python: str,
        program: Program,
        groups: DaemonGroups,
        prepare: Prepare,
        ready: Ready,
        up: Up,
        noted: Noted,
    ) -> None:
        self._python = python
        self._groups = groups
        self.program = program
        self._prepare = prepare
        self._ready = ready
        self._up = up
        self._noted = noted
        self._process: AdoptedProcess | None = None
        self._output: Output | None = None
        self._monitor: asyncio.Task[None] | None = None
        self.restarts = 0

    @property
    def pid(self) -> int:
        """The daemon's process id, 0 when it is not running."""
        return 0 if self._process is None or self._process.returncode is not None else self._process.pid

    async def start(self) -> None:
        """Start the daemon and wait until it answers.

        Raises:
            NotReady: it does not answer; it has been ended.
        """
        try:
            await self._launch(restarted=False)
        except BaseException:
            await self.stop()
            raise
        self._keep_from_now()

    async def adopt(self, process: Adopted, ready: Ready) -> bool:
        """Adopt a process that runs already. Return False if it does not answer; then it has been ended."""
        self._process = process
        self._hear(Output.of(process, self.program.name, DAEMON))
        try:
            async with asyncio.timeout(_ADOPT_SECONDS):
                await ready()
                await self._up(False)
        except (OSError, wire.RemoteError) as error:  # ConnectionError and TimeoutError are OSErrors
            _log.warning("%s cannot be adopted: %s", self.program.name, type(error).__name__)
            process.kill()
            await process.wait()
            self._process = None
            return False
        _log.info("%s was adopted (process %d)", self.program.name, process.pid)
        self._keep_from_now()
        return True

    def _hear(self, output: Output | None) -> None:
        if self._output is not None:
            self._output.close()
        self._output = output

    def _keep_from_now(self) -> None:
        self._monitor = asyncio.create_task(self._keep(), name=f"supervise-{self.program.name}")

    async def _launch(self, *, restarted: bool) -> None:
        cgroup = await asyncio.to_thread(self._groups.create, self.program.name, self.program.memory)
        process, output = await start_process(self._python, self.program, cgroup, await self._prepare())
        self._process = process
        self._hear(output)
        self._noted(self.program.name, process.pid)
        ready = asyncio.ensure_future(self._ready())
        ended = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait((ready, ended), timeout=_READY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done() or ended.done() or ready.exception() is not None:
                raise NotReady(f"{self.program.name} did not become ready (status {process.returncode})")
        finally:
            for task in (ready, ended):
                task.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)
        await self._up(restarted)

    async def _keep(self) -> None:
        attempt = 0
        while True:
            began = time.monotonic()
            if self._process is not None:
                status = await self._process.wait()
                _log.warning("%s ended with status %s", self.program.name, status)
            attempt = 0 if time.monotonic() - began > _CALM_SECONDS else attempt
            await asyncio.sleep(_BACKOFF[min(attempt, len(_BACKOFF) - 1)])
            attempt += 1
            self.restarts += 1
            try:
                await self._launch(restarted=True)
            except (NotReady, OSError, wire.RemoteError, TimeoutError) as error:
                _log.warning("%s does not come back: %s", self.program.name, type(error).__name__)
                await self._end(signal.SIGKILL)

    async def _end(self, first: int) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(first)
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
        await process.wait()

    async def kick(self) -> None:
        """Kill the daemon, so that it is started again."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """End the daemon, first with SIGTERM, and do not start it again."""
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.gather(self._monitor, return_exceptions=True)
            self._monitor = None
        await self._end(signal.SIGTERM)
        self._hear(None)


def module_argv(python: str, module: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a module of Sallyport."""
    return (python, "-m", module, *arguments)
