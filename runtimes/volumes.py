"""The volumes of sandboxes: what a launch may mount, and the mounts until the sandbox is removed.

- Each volume is opened, checked and mounted below `run/volumes/stages/SANDBOX`, where only root can see it. The
  container gets this mount, so nothing that a sandbox or a program of the host changes meanwhile leads elsewhere.
- The mounts are the record of use. A hostd that follows a killed one finds them, and removes those of sandboxes that it
  does not adopt.
- All work is done one by one in one thread, in the order of the calls. The thread has an umask of its own.

`release` and `sweep` are idempotent.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import wire
from runtimes.engine import trees
from runtimes.engine.host_paths import HostPaths
from runtimes.engine.named_volumes import NamedVolumes, VolumeLimits
from runtimes.spec import HostConfig
from wire.api.hostd import VolumeMount, VolumeState


@dataclass(frozen=True, slots=True)
class Staged:
    """A volume that a container can get: the mount at `source`, whose root is this device and inode."""

    source: str
    target: str
    read_only: bool
    device: int
    inode: int


class Volumes:
    """The volumes of one hostd; `directory` is below its run directory."""

    def __init__(self, directory: Path, host: HostPaths, named: NamedVolumes) -> None:
        self._stages = directory / "stages"
        self._host, self._named = host, named
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="volumes", initializer=_own_umask)

    async def _run[T](self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """End the thread, after the work that it has."""
        self._thread.shutdown(wait=False)

    async def stage(self, sandbox: str, mounts: tuple[VolumeMount, ...]) -> tuple[Staged, ...]:
        """Mount the volumes of a launch.

        Raises:
            wire.RequestError: one of them is refused. The caller then calls `release`.
        """
        if not mounts:
            return ()
        return await self._run(lambda: self._stage(sandbox, mounts))

    async def settle(self, sandbox: str) -> None:
        """Keep the volumes that the launch of `sandbox` has made: its container has started."""
        await self._run(lambda: self._named.settle(sandbox))

    async def release(self, sandbox: str) -> tuple[str, ...]:
        """Unmount the volumes of a removed container, and remove those that end with it. Return what is left."""
        return await self._run(lambda: self._release(sandbox))

    async def sweep(self, keep: frozenset[str]) -> tuple[str, ...]:
        """Release the volumes of all sandboxes but `keep`, and remove what is half-made. Return what is left."""
        return await self._run(lambda: self._sweep(keep))

    async def states(self) -> tuple[VolumeState, ...]:
        """Return every named volume."""
        return await self._run(self._named.states)

    async def remove(self, name: str) -> None:
        """Remove a named volume.

        Raises:
            wire.RequestError: see `NamedVolumes.remove`.
        """
        await self._run(lambda: self._named.remove(name))

    def _stage(self, sandbox: str, mounts: tuple[VolumeMount, ...]) -> tuple[Staged, ...]:
        directory = self._stages / sandbox
        directory.mkdir(mode=0o700)
        return tuple(self._stage_one(sandbox, mount, directory / str(index)) for index, mount in enumerate(mounts))

    def _stage_one(self, sandbox: str, mount: VolumeMount, place: Path) -> Staged:
        if mount.host is not None:
            top = self._host.open(mount.host.path)
        elif mount.named is not None:
            top = self._named.open(mount.named, sandbox)
        else:
            raise wire.RequestError(wire.Code.INVALID, "a volume without a source")
        try:
            found = self._below(top, mount.sub_path)
        finally:
            os.close(top)
        try:
            device, inode = trees.identity(found)
            trees.mount(found, place, read_only=mount.read_only)
        except OSError as error:  # also for a directory that a sandbox has removed since it was opened
            code = wire.Code.SUB_PATH if mount.sub_path else wire.Code.PATH
            raise wire.RequestError(code, f"the volume cannot be mounted: {error.strerror}") from error
        finally:
            os.close(found)
        return Staged(str(place), mount.target, mount.read_only, device, inode)

    def _below(self, top: int, sub_path: str) -> int:
        names = [name for name in sub_path.split("/") if name]
        try:
            return trees.descend(top, names, 0)
        except (trees.NoFile, trees.NotPlain):
            raise wire.RequestError(
                wire.Code.SUB_PATH, "subPath leads over a link, or to no directory and no plain file"
            ) from None
        except OSError as error:
            raise wire.RequestError(wire.Code.SUB_PATH, f"subPath cannot be opened: {error.strerror}") from error

    def _release(self, sandbox: str) -> tuple[str, ...]:
        directory = self._stages / sandbox
        if not directory.is_dir():
            return ()
        for place in directory.iterdir():
            trees.unmount(place)
        if not (left := self._named.free()):
            directory.rmdir()
        return left

    def _sweep(self, keep: frozenset[str]) -> tuple[str, ...]:
        left: list[str] = []
        names = [path.name for path in self._stages.iterdir() if path.name not in keep]
        works: list[Callable[[], tuple[str, ...]]] = [partial(self._release, name) for name in names]
        for work in (*works, self._named.sweep):
            try:
                left += work()
            except OSError as error:  # one damaged volume does not keep hostd from its start
                left.append(f"volumes: {error.strerror}: {error.filename}")
        return tuple(left)


def make_volumes(config: HostConfig) -> Volumes:
    """Return the volumes of a host, in directories that exist."""
    run, state, bounds = Path(config.run_dir) / "volumes", Path(config.state_dir), config.volumes
    docker = [] if config.dockerd is None else [config.dockerd.data_root, config.dockerd.exec_root]
    own = (config.run_dir, config.state_dir, config.docker_socket, *docker)
    limits = VolumeLimits(bounds.default_bytes, bounds.max_bytes, bounds.max_count)
    named = NamedVolumes(state / "hostd" / "volumes", run / "named", run / "stages", limits)
    return Volumes(run, HostPaths(bounds.allowed_host_paths, own), named)


def _own_umask() -> None:
    """Give this thread an umask of its own: directories that it makes in volumes are for every user of a sandbox."""
    os.unshare(os.CLONE_FS)
    os.umask(0o022)
