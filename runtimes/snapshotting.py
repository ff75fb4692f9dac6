"""Takes and removes snapshots of sandboxes: hostd's part.

A snapshot is an image: the layers of the sandbox's image, and one with what the sandbox has written.

- The source is frozen while its files are read, and not longer than a limit: with the kernel's freezer on runc, by
  its own kernel on runsc. Its flows are not cut. A file names the frozen container. The next hostd thaws it.
- A child process reads the files (`snapshots.capture`) and writes a layer into a directory of root. hostd gives the
  layer to Docker, which unpacks it. No file of a sandbox is unpacked here.
- The image gets its name when all of it is there. So an image of this name is a whole snapshot, and after a failure,
  or a death at any step, there is none. `recover` removes what a killed hostd has left.
- Mounts of Sallyport are not captured: their places are those of the container's launch plan.
- Number and sizes have limits, here also for a caller that does not respect them.
"""

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import wire
from runtimes.engine.docker import Docker, DockerError, ImageInUse, Layout, UnknownImage
from runtimes.process.finish import finished
from runtimes.process.freezer import Freezer, NoProcesses
from runtimes.sandbox import HostSandbox
from runtimes.sandboxes import Sandboxes
from runtimes.snapshots import capture
from runtimes.snapshots.image import MOST_LAYERS, CapturedLayer, archive
from runtimes.spec import HostConfig, sandbox_users
from wire.api.hostd import HeldSnapshot, Runtime
from wire.ids import SNAPSHOT_ID

_CONCURRENT = 2
_FROZEN_SECONDS = 60.0
"""The limit of the time in which the source is frozen."""
_RUNSC_SECONDS = 30.0
_REMOVALS, _REMOVAL_PAUSE = 5, 1.0
_LEAST_BYTES = 64 * 1024
_MOST_ANSWER = 64 << 20
_CHECKPOINT = "checkpoint"
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_DEFAULT_EXEC_ROOT = "/var/run/docker"

_libc = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger(__name__)


class Freezing:
    """Freezes the processes of containers while their files are read.

    Args:
        notes: a directory with a file for each container that can be frozen.
        root: runsc's directory of containers.
    """

    def __init__(self, freezer: Freezer, runsc: str, root: Path, notes: Path) -> None:
        self._freezer = freezer
        self._runsc = runsc
        self._root = root
        self._notes = notes

    @contextlib.asynccontextmanager
    async def frozen(self, sandbox: HostSandbox) -> AsyncIterator[None]:
        """Freeze a sandbox. At the end of the context it runs, whatever happens inside.

        Raises:
            wire.RequestError: it has no process, or cannot be frozen.
        """
        container = sandbox.container or ""
        note = self._notes / sandbox.id
        note.write_text(f"{sandbox.runtime} {container}")
        try:
            await self._freeze(sandbox.runtime, container)
            yield
        finally:
            await finished(self._thaw(sandbox.runtime, container))
            note.unlink(missing_ok=True)

    async def recover(self) -> None:
        """Thaw every container that a killed hostd has frozen for a snapshot."""
        for note in list(self._notes.iterdir()):
            with contextlib.suppress(ValueError, OSError):
                runtime, container = note.read_text().split(" ")
                _log.warning("%s was frozen for a snapshot and runs again", note.name)
                await self._thaw(Runtime(runtime), container)
            note.unlink(missing_ok=True)

    async def checkpoint(self, container: str, directory: Path) -> None:
        """Write a file system checkpoint of a frozen sandbox on runsc into a new directory.

        Raises:
            wire.RequestError: runsc did not do it.
        """
        await self.run("fscheckpoint", f"--image-path={directory}", "--leave-running", container)

    async def _freeze(self, runtime: Runtime, container: str) -> None:
        if runtime is Runtime.RUNSC:
            await self.run("pause", container)
            return
        try:
            await self._freezer.freeze(container)
        except NoProcesses:
            raise wire.RequestError(wire.Code.NOT_RUNNING, "no process of the sandbox is left") from None
        except (OSError, TimeoutError) as error:
            raise wire.RequestError(wire.Code.HOST, f"it cannot be frozen: {type(error).__name__}") from None

    async def _thaw(self, runtime: Runtime, container: str) -> None:
        if runtime is Runtime.RUNSC:
            with contextlib.suppress(wire.RequestError):  # also if it was not paused, or has ended
                await self.run("resume", container)
            return
        with contextlib.suppress(FileNotFoundError):
            await asyncio.to_thread(self._freezer.thaw, container)

    async def run(self, command: str, *arguments: str) -> None:
        """Run a command of runsc.

        Raises:
            wire.RequestError: it failed, or took too long.
        """
        process = await asyncio.create_subprocess_exec(
            self._runsc,
            f"--root={self._root}",
            command,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_RUNSC_SECONDS):
                _, said = await process.communicate()
        except TimeoutError:
            raise wire.RequestError(wire.Code.TIMEOUT, f"runsc {command} took too long") from None
        finally:
            if process.returncode is None:
                process.kill()
                await finished(process.wait())
        if process.returncode != 0:
            _log.warning("runsc %s failed: %s", command, said.decode(errors="replace").strip()[-300:])
            raise wire.RequestError(wire.Code.HOST, f"runsc {command} failed")


class Snapshotting:
    """The snapshots of one hostd.

    Args:
        staging: a directory of root on the host's disk, for layers that are being made.
        instance: the name of this server among those on the same Docker.
    """

    def __init__(
        self,
        config: HostConfig,
        docker: Docker,
        sandboxes: Sandboxes,
        freezing: Freezing,
        staging: Path,
        instance: str,
    ) -> None:
        self._config = config
        self._limits = config.snapshots
        self._docker = docker
        self._sandboxes = sandboxes
        self._freezing = freezing
        self._staging = staging
        self._instance = instance
        self._turns = asyncio.Semaphore(_CONCURRENT)
        self._taking: dict[str, int] = {}
        """The snapshots that are being taken, and the bytes that are reserved for each."""
        self._tasks: set[asyncio.Task[int]] = set()

    def recover(self) -> None:
        """Remove the layers that a former hostd has left incomplete."""
        for path in self._staging.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    async def stop(self) -> None:
        """Cancel what is being taken. Nothing of it is left."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def take(self, sandbox: str, snapshot: str) -> int:
        """Take a snapshot; return its bytes. It is completed also if the caller leaves.

        Raises:
            wire.RequestError: it was not taken, and nothing of it is left.
        """
        if snapshot in self._taking:
            raise wire.RequestError(wire.Code.EXISTS, "there is a snapshot of this id")
        self._taking[snapshot] = 0
        task = asyncio.create_task(self._take(sandbox, snapshot), name=f"snapshot-{snapshot}")
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(task, snapshot))
        await asyncio.wait({task})
        if task.cancelled():
            raise wire.RequestError(wire.Code.UNAVAILABLE, "the host is stopping")
        return task.result()

    def _ended(self, task: asyncio.Task[int], snapshot: str) -> None:
        self._tasks.discard(task)
        self._taking.pop(snapshot, None)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, because the caller may have left

    async def remove(self, snapshot: str) -> None:
        """Remove a snapshot, if it exists.

        Raises:
            wire.RequestError: it is in use or being taken (`busy`), or Docker refused.
        """
        if snapshot in self._taking:
            raise wire.RequestError(wire.Code.BUSY, "the snapshot is being taken")
        try:
            await self._docker.remove_snapshot(snapshot)
        except ImageInUse:
            raise wire.RequestError(wire.Code.BUSY, "a sandbox uses the snapshot") from None
        except DockerError as error:
            raise wire.RequestError(wire.Code.DOCKER, str(error)) from error

    async def list(self) -> tuple[HeldSnapshot, ...]:
        """Return all snapshots.

        Raises:
            wire.RequestError: Docker does not answer.
        """
        taking = dict(self._taking)
        try:
            held = {image.snapshot: image.bytes for image in await self._docker.snapshots()}
        except DockerError as error:
            raise wire.RequestError(wire.Code.DOCKER, str(error)) from error
        names = [name for name in {**held, **taking} if SNAPSHOT_ID.fullmatch(name)]
        return tuple(HeldSnapshot(name, None if name in taking else held[name]) for name in names)

    async def _take(self, sandbox: str, snapshot: str) -> int:
        directory = self._staging / snapshot
        began = time.monotonic()
        async with self._turns:
            most = await self._reserve(snapshot)
            try:
                directory.mkdir(mode=0o700)
                return await self._make(sandbox, snapshot, directory, most, began)
            except (DockerError, OSError, wire.RequestError) as error:
                _log.warning("snapshot %s of %s failed: %s: %s", snapshot, sandbox, type(error).__name__, error)
                if isinstance(error, wire.RequestError):
                    raise
                code = wire.Code.DOCKER if isinstance(error, DockerError) else wire.Code.HOST
                raise wire.RequestError(code, str(error)[:300]) from error
            finally:
                await finished(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))

    async def _reserve(self, snapshot: str) -> int:
        """Return how many bytes a new snapshot can have."""
        held = await self.list()
        used = sum(item.bytes or 0 for item in held) + sum(self._taking.values())
        if len(held) > self._limits.count:  # this one is among them
            raise wire.RequestError(wire.Code.FULL, f"this host keeps {self._limits.count} snapshots at most")
        most = min(self._limits.bytes_each, self._limits.bytes_total - used)
        if most < _LEAST_BYTES:
            raise wire.RequestError(
                wire.Code.FULL, f"all snapshots of this host have {self._limits.bytes_total} bytes at most"
            )
        self._taking[snapshot] = most
        return most

    async def _make(self, sandbox: str, snapshot: str, directory: Path, most: int, began: float) -> int:
        with contextlib.suppress(UnknownImage):
            await self._docker.snapshot_image(snapshot)
            raise wire.RequestError(wire.Code.EXISTS, "there is a snapshot of this id")
        base, layer, holes, froze = await self._sandboxes.capture(
            sandbox, lambda source: self._capture(source, directory, most)
        )
        captured = time.monotonic()
        try:
            await self._docker.load(lambda: archive(self._instance, snapshot, base, layer))
            await self._docker.snapshot_image(snapshot)
            if holes and (top := await self._docker.top_layer(snapshot)) is not None:
                await asyncio.to_thread(dig, top, holes)
        except BaseException:
            await finished(self._undo(snapshot))
            raise
        timing = {"frozen": froze, "captured": captured - began, "loaded": time.monotonic() - captured}
        shown = {f"{name}_ms": round(seconds * 1000, 1) for name, seconds in timing.items()}
        _log.info("snapshot %s of %s has %d bytes: %s", snapshot, sandbox, layer.bytes, json.dumps(shown))
        return layer.bytes

    async def _undo(self, snapshot: str) -> None:
        """Remove the image, also one that a Docker that does not answer is still loading."""
        for attempt in range(_REMOVALS):
            try:
                await self._docker.remove_snapshot(snapshot)
            except DockerError as error:
                _log.warning("snapshot %s is not removed yet: %s", snapshot, error)
                if attempt + 1 < _REMOVALS:
                    await asyncio.sleep(_REMOVAL_PAUSE)
            else:
                return

    async def _capture(self, sandbox: HostSandbox, directory: Path, most: int) -> tuple[Any, CapturedLayer, Any, float]:
        container = sandbox.container or ""
        base = await self._docker.base_image(container)
        if len(base.layers) >= MOST_LAYERS:
            raise wire.RequestError(wire.Code.IMAGE, f"its image has {MOST_LAYERS} layers already")
        layout = await self._docker.layout(container)
        plan = self._plan(sandbox, layout, directory, most)
        out = directory / "layer.tar"
        child = await asyncio.create_subprocess_exec(
            self._config.python,
            "-IS",
            capture.__file__,
            json.dumps(plan),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_MOST_ANSWER,
        )
        try:
            async with asyncio.timeout(_FROZEN_SECONDS), self._freezing.frozen(sandbox):
                began = time.monotonic()
                if sandbox.runtime is Runtime.RUNSC:
                    await self._freezing.checkpoint(container, directory / _CHECKPOINT)
                answer = await _answer(child)
                froze = time.monotonic() - began
        except TimeoutError:
            raise wire.RequestError(wire.Code.TIMEOUT, "its files could not be read in time") from None
        finally:
            if child.returncode is None:
                child.kill()
            await finished(child.wait())
            await finished(asyncio.to_thread(shutil.rmtree, directory / _CHECKPOINT, ignore_errors=True))
        if "refused" in answer:
            code = wire.Code.TOO_LARGE if answer["too_large"] else wire.Code.IMAGE
            raise wire.RequestError(code, str(answer["refused"])[:300])
        return base, CapturedLayer(out, str(answer["digest"]), int(answer["bytes"])), answer["holes"], froze

    def _plan(self, sandbox: HostSandbox, layout: Layout, directory: Path, most: int) -> dict[str, Any]:
        if layout.layer is None or sandbox.slot_index is None:
            raise wire.RequestError(wire.Code.IMAGE, "the storage driver of Docker is not overlay2")
        if sandbox.runtime is Runtime.RUNSC:
            source = layout.layer / "diff" / f".gvisor.filestore.{sandbox.container}"
        else:
            source = layout.layer / "sallyport" / "diff"
        return {
            "parent": os.getpid(),
            "kind": "checkpoint" if sandbox.runtime is Runtime.RUNSC else "upper",
            "source": str(source),
            "checkpoint": str(directory / _CHECKPOINT),
            "out": str(directory / "layer.tar"),
            "base": sandbox_users(sandbox.slot_index),
            "most": most,
            "left_out": [mount.destination for mount in layout.mounts],
        }


async def _answer(child: asyncio.subprocess.Process) -> dict[str, Any]:
    """Let the child begin, and return its answer.

    Raises:
        wire.RequestError: it ended without one.
    """
    assert child.stdin is not None and child.stdout is not None  # noqa: S101 - both are pipes
    try:
        child.stdin.write(b"\n")
        await child.stdin.drain()
        line = await child.stdout.readline()
        answer = json.loads(line)
    except (OSError, ValueError):
        answer = None
    if not isinstance(answer, dict):
        raise wire.RequestError(wire.Code.HOST, "its files cannot be read")
    return answer


def dig(directory: Path, holes: Mapping[str, list[tuple[int, int]]]) -> None:
    """Make holes again in files below a directory, where they have zeros. A file that is not there is passed over."""
    for path, found in holes.items():
        with contextlib.suppress(OSError):
            fd = _beneath(directory, os.fsencode(path))
            try:
                for offset, length in found:
                    arguments = (
                        ctypes.c_int(fd),
                        _PUNCH_HOLE | _KEEP_SIZE,
                        ctypes.c_long(offset),
                        ctypes.c_long(length),
                    )
                    _libc.fallocate(*arguments)
            finally:
                os.close(fd)


def _beneath(directory: Path, path: bytes) -> int:
    """Open a file below a directory for writing. No link is followed."""
    *parents, name = path.split(b"/")
    at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            following = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = following
        return os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)


def runsc_root(config: HostConfig) -> Path:
    """Return the directory in which Docker lets runsc keep its containers."""
    root = config.dockerd.exec_root if config.dockerd is not None else _DEFAULT_EXEC_ROOT
    return Path(root) / "runtime-runc" / "moby"
