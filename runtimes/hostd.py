"""hostd: the only process with root's power over the host. `python -m runtimes.hostd HOST.json`

This module composes directories, dockerd, guard, daemons, sandboxes, and the socket with its closed set of operations.

- Only root and serve can connect. Requests are decoded strictly; an unknown operation is refused.
- It speaks HTTP to Docker only, and holds no secret.
- The watchdog passes it the API's socket, and it passes the socket to each `serve`. If the port is taken, the start
  fails at once.
- On SIGINT and SIGTERM it removes all sandboxes and ends everything that it started.
- After a SIGKILL the workers, the zygote and the guard end, because their channels end, and the sandboxes are closed.
  From then on the kernel denies the workers everything (`guard`), and `watchdog` kills those that remain. The watchdog
  starts the next hostd. It adopts the daemons and sandboxes that match their records, and removes everything else.
- Parts that do not depend on each other start concurrently: a sandbox stays closed until its parts are back.

The module is long because no other module knows all parts. Each operation is a check and one call.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any, BinaryIO

import wire
from runtimes.adoption import Leftovers, adopt_or_remove
from runtimes.alarms import Alarms
from runtimes.bounds import IMAGE_NAME
from runtimes.chains import Chains
from runtimes.checks.doctor import StartRefused, diagnose, refusal, runtimes_known
from runtimes.checks.watch import Watch
from runtimes.daemons import ADOPTABLE, Daemons
from runtimes.engine import shim, user_namespace, wrappers
from runtimes.engine.disk import Disks
from runtimes.engine.disk_rate import DiskRate
from runtimes.engine.docker import Docker, DockerError, UnknownImage
from runtimes.engine.dockerd import Dockerd
from runtimes.images.store import ImageStore
from runtimes.ledgers import Ledgers
from runtimes.net.drops import Drops
from runtimes.net.guard import GuardError, NetGuard
from runtimes.net.netns import NftError
from runtimes.net.nft import rules_digest
from runtimes.operator import Operator, worker_constants
from runtimes.pausing import Pausing
from runtimes.process import predecessor
from runtimes.process.bounded_log import ANCHORS_NAME
from runtimes.process.cgroups import Cgroups, Processor
from runtimes.process.cpu_weight import CpuWeight
from runtimes.process.finish import together
from runtimes.process.freezer import Freezer
from runtimes.process.owned_files import OwnedFiles
from runtimes.process.supervisor import NotReady
from runtimes.process.watchdog import BEAT_SECONDS, READY_FD, dump_nothing
from runtimes.records import RecordStore
from runtimes.rings import Rings
from runtimes.sandboxes import Sandboxes
from runtimes.snapshotting import Freezing, Snapshotting, runsc_root
from runtimes.spec import HostConfig, check_launch
from runtimes.volumes import Volumes, make_volumes
from wire import serving
from wire.api.auditd import Entry, Record
from wire.api.hostd import (
    IMAGE_REQUESTS,
    OPERATIONS,
    AddImage,
    AliasImage,
    Claimable,
    ClaimableSandboxes,
    ClaimMember,
    Configure,
    DescribeImage,
    Diagnosis,
    Doctor,
    HeldSnapshots,
    ImageDescription,
    ImageNames,
    Images,
    Inspect,
    Launch,
    List,
    Listed,
    ListedImages,
    ListImages,
    ListSnapshots,
    ListVolumes,
    Pause,
    PolicyInForce,
    ReadOutput,
    Remove,
    RemoveImage,
    RemoveSnapshot,
    RemoveVolume,
    Resume,
    ShowImage,
    SnapshotTaken,
    TakeSnapshot,
    VolumesListed,
)
from wire.frames import close_all

_RECORD_SECONDS = 5.0
_GATED_SECONDS = 5.0
"""Adopted sandboxes get this time to have their gateways back before other work begins."""

_M_ARENA_MAX, _HEAPS = -8, 2
"""Of glibc's malloc. Its default is eight heaps for each processor. The short-lived threads that enter namespaces would
use all of them, and each heap keeps its largest size."""

_log = logging.getLogger("hostd")


def make_directories(config: HostConfig) -> None:
    """Make run and state directories with their owners and modes."""
    run, state, uids = Path(config.run_dir), Path(config.state_dir), config.uids
    wanted = (
        (run, 0, 0, 0o711),
        (run / "ingress", 0, 0, 0o711),
        (run / "plans", 0, 0, 0o700),
        (run / "netns", 0, 0, 0o700),
        (run / "sandboxes", 0, 0, 0o711),
        (run / "records", 0, 0, 0o700),
        (run / "runtimes", 0, 0, 0o755),
        (run / "config", 0, 0, 0o711),
        (run / "image-jail", 0, 0, 0o700),
        (run / "volumes", 0, 0, 0o700),
        (run / "volumes" / "stages", 0, 0, 0o700),
        (run / "volumes" / "named", 0, 0, 0o700),
        (run / "frozen", 0, 0, 0o700),
        (state, 0, 0, 0o711),
        (state / "hostd", 0, 0, 0o700),
        (state / "hostd" / "disks", 0, 0, 0o700),
        (state / "hostd" / "image-work", 0, 0, 0o700),
        (state / "hostd" / "volumes", 0, 0, 0o700),
        (state / "hostd" / "ledgers", 0, 0, 0o700),
        (state / "hostd" / "snapshots", 0, 0, 0o700),
        (state / "audit", uids.auditd, uids.auditd, 0o700),
        (state / "vault", uids.vaultd, uids.vaultd, 0o700),
        (state / "lifecycle", uids.serve, uids.serve, 0o700),
    )
    for path, uid, gid, mode in wanted:
        path.mkdir(parents=path in (run, state), exist_ok=True)
        if path.is_symlink():
            raise NotADirectoryError(f"{path} is a symbolic link")
        os.chown(path, uid, gid)
        os.chmod(path, mode)
        if uid != 0:
            _hand_over(path, uid)


def _hand_over(directory: Path, uid: int) -> None:
    """Give a daemon the plain files and directories that root made in its directory before, such as a key."""
    for _, directories, files, fd in os.fwalk(directory):
        for name in (*directories, *files):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if status.st_uid == 0 and (stat.S_ISDIR(status.st_mode) or status.st_nlink == 1):
                os.chown(name, uid, uid, dir_fd=fd, follow_symlinks=False)


class Host:
    """Everything of one hostd, from `start` to `stop`."""

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._run = Path(config.run_dir)
        upstream = Path(config.upstream_netns) if config.upstream_netns is not None else None
        self._cgroups = Cgroups(config.run_dir)
        self._freezer = Freezer()
        self._records = RecordStore(self._run / "records")
        self._serving = serving.handler(OPERATIONS, self._answer)
        self._dockerd: Dockerd | None = None
        self._docker: Docker | None = None
        self._guard = NetGuard(self._run / "config" / "guard.nft", upstream, self._guard_changed)
        constants = worker_constants(config)
        self._daemons = Daemons(config, constants, self._reconnect, self._document_changed)
        self._operator = Operator(config, self._daemons, constants.upstream_roots)
        self._sandboxes: Sandboxes | None = None
        self._images: ImageStore | None = None
        self._volumes: Volumes | None = None
        self._snapshotting: Snapshotting | None = None
        self._alarms = Alarms(self._daemons)
        self._chains: Chains | None = None
        self._watch: Watch | None = None
        self._watching = asyncio.Event()
        self._adopted = 0
        self._cpu_weight: CpuWeight | None = None
        self._wrappers: tuple[Path, ...] = ()
        self._server: asyncio.Task[None] | None = None
        self._lock = -1

    @property
    def succeeds(self) -> bool:
        """Whether a former hostd was killed here and left parts to adopt or to remove."""
        return predecessor.any_left(self._run / "config")

    async def _guard_changed(self, pidfd: int) -> None:
        if self._sandboxes is not None:
            await self._sandboxes.guard_changed(pidfd)

    def _reconnect(self, daemon: str) -> None:
        if self._sandboxes is not None:
            self._sandboxes.reconnect(daemon)

    def _document_changed(self) -> None:
        if self._sandboxes is not None:
            self._sandboxes.document_changed()

    async def start(self) -> None:
        """Start everything. At a first start the socket is the last part before serve.

        Raises:
            StartRefused, DockerError, GuardError, NftError, NotReady, OSError: hostd cannot run; call `stop`.
        """
        config, succeeds = self._config, self.succeeds
        if not succeeds:
            await refusal(config)
        make_directories(config)
        try:
            self._lock = predecessor.lock(self._run)
        except BlockingIOError:
            raise StartRefused(f"another server runs in {self._run}") from None
        self._daemons.listen()
        notes = self._run / "config"
        spared = (*ADOPTABLE, "dockerd", "guard")  # each is adopted, or ended when its successor is started
        if ended := await asyncio.to_thread(predecessor.end_all, notes, spared, 0.0):
            _log.warning("ended what a predecessor left running: %s", ", ".join(ended))
        if succeeds:  # sandboxes are closed and the API is down: both are restored concurrently
            await together(self._start_parts(watched=False), self._daemons.start_serve())
            docker, sandboxes = self._parts()
            await sandboxes.gated(_GATED_SECONDS)
            await self._start_watch(sandboxes, docker)
            await self._check_late(adopted=self._adopted)
        else:
            await self._start_parts(watched=True)
            await self._daemons.start_serve()
        _log.info("ready: %s, %d sandboxes adopted", self._run / "hostd.sock", self._adopted)

    async def _start_parts(self, *, watched: bool) -> None:
        """Start or adopt what sandboxes need, adopt those that fit, and listen; `watched`: after the watch began."""
        config, uids = self._config, self._config.uids
        await together(
            self._daemons.start(),
            self._guard.start(config.guard_plan),
            self._start_docker(),
        )
        docker = self._connected()
        own = Path(config.state_dir) / "hostd"
        self._volumes = volumes = make_volumes(config)
        freezing = Freezing(self._freezer, config.runsc, runsc_root(config), self._run / "frozen")
        await freezing.recover()
        leftovers = Leftovers(
            self._cgroups,
            self._freezer,
            Disks(own / "disks"),
            DiskRate(own / "disk-limits", config.disk_bandwidth),
            Ledgers(own / "ledgers"),
            self._records,
            volumes,
        )
        fit = await adopt_or_remove(self._run, uids, rules_digest(config.slot_plan), docker, leftovers)
        self._adopted = len(fit)
        self._images = ImageStore(config, docker, self._daemons, self._cgroups)
        await self._images.load()
        rings = Rings(self._run / "rings")
        self._sandboxes = Sandboxes(
            config,
            self._operator,
            docker,
            self._images,
            self._daemons,
            self._guard,
            self._cgroups,
            Pausing(self._freezer, docker),
            self._records,
            rings,
            volumes,
        )
        self._snapshotting = Snapshotting(
            config, docker, self._sandboxes, freezing, own / "snapshots", self._cgroups.parent.name
        )
        self._snapshotting.recover()
        for record, slot in fit:
            self._sandboxes.adopt(record, slot)
        self._sandboxes.document_changed()  # it may have changed since their records
        self._chains = Chains(self._daemons, rings, own / ANCHORS_NAME, self._sandboxes.names, self._alarms.report)
        self._sandboxes.gone = self._gone
        self._chains.start()
        self._cpu_weight = CpuWeight(Processor(self._cgroups), self._sandboxes.computing)
        self._cpu_weight.start()
        if watched:
            await self._images.import_configured()
            await self._start_watch(self._sandboxes, docker)
        listener = wire.bind_unix(self._run / "hostd.sock", 0o660, (0, uids.serve))
        self._server = await wire.serve_unix(listener, self.handle, allowed_uids=frozenset((0, uids.serve)))

    def _gone(self) -> None:
        """A sandbox was removed completely: its chain can be closed, and its image may be unused now."""
        if self._chains is not None:
            self._chains.wake()
        if self._images is not None:
            self._images.free()

    async def _start_watch(self, sandboxes: Sandboxes, docker: Docker) -> None:
        """Begin to watch, then allow launches. Adopted sandboxes have their gateways back before.

        These steps run one after the other: the reference slot and the checks would delay the gateways.
        """
        self._alarms.start()
        programs = (Path(shim.__file__), Path(user_namespace.__file__))
        files = OwnedFiles((*self._wrappers, *programs, self._guard.rules_file))
        drops = Drops(self._daemons)
        self._watch = Watch(self._run / "netns", sandboxes, docker, self._guard, self._alarms, drops, files)
        await self._watch.start(self._config.uids.workers, self._config.slot_plan)
        sandboxes.slots.prepare(self._watch.judge_idle)
        self._watching.set()

    async def _check_late(self, *, adopted: int) -> None:
        """Import images and run the checks of a first start, after the sandboxes have their gateways back.

        Each adopted sandbox was examined itself. So a check that fails under load, or a missing image file, closes no
        sandbox. Without adopted sandboxes it refuses the start, like a first start.
        """
        try:
            await self._image_store().import_configured()
            await refusal(self._config)
        except (StartRefused, DockerError, OSError) as reason:
            if not adopted:
                raise
            _log.error("this host lacks something: %s; run: sallyport doctor", reason)

    async def _start_docker(self) -> None:
        config = self._config
        entries = wrappers.write_wrappers(self._run / "runtimes", self._run / "plans", config.python, config.programs)
        self._wrappers = tuple(Path(entry["path"]) for entry in entries.values())
        if config.dockerd is not None:
            daemon_json = self._run / "config" / "daemon.json"
            wrappers.write_daemon_json(daemon_json, entries)
            self._dockerd = Dockerd(config.dockerd, config.docker_socket, daemon_json)
            await self._dockerd.start()
        self._docker = await asyncio.to_thread(Docker, config.docker_socket, self._cgroups.parent.name)
        known = await runtimes_known(config, self._docker)
        if not known.ok:
            raise StartRefused(f"{known.detail}: {known.remedy}")

    def _image_store(self) -> ImageStore:
        if self._images is None:
            raise wire.RequestError(wire.Code.UNAVAILABLE, "the host is starting")
        return self._images

    def _connected(self) -> Docker:
        if self._docker is None:
            raise DockerError("no Docker")
        return self._docker

    async def stop(self, *, remove: bool) -> None:
        """End everything that `start` started or adopted.

        Args:
            remove: remove all sandboxes first. Else they stay closed, and the next start adopts them.
        """
        await self._daemons.stop_serve()
        if remove:
            self._daemons.end_listening()
        if self._server is not None:
            self._server.cancel()
            await asyncio.gather(self._server, return_exceptions=True)
            (self._run / "hostd.sock").unlink(missing_ok=True)
        if self._watch is not None:
            await self._watch.stop()
        if self._cpu_weight is not None:
            await self._cpu_weight.stop()
        if self._images is not None:
            await self._images.stop()
        if self._snapshotting is not None:
            await self._snapshotting.stop()
        if self._sandboxes is not None:
            self._sandboxes.closing = True
            if remove:
                names = self._sandboxes.names()
                if residue := await self._sandboxes.remove_all():
                    _log.error("left behind: %s", "; ".join(residue))
                await self._daemons.forget(names)
            else:
                await self._sandboxes.release()
            await self._sandboxes.slots.close()
        if self._chains is not None:
            await self._chains.stop()
        await self._alarms.stop()
        await self._daemons.stop()
        await self._guard.stop()
        if self._volumes is not None:
            self._volumes.close()
        if self._docker is not None:
            self._docker.close()
        if self._dockerd is not None:
            await self._dockerd.stop()
        if self._lock >= 0:
            left = await asyncio.to_thread(self._cgroups.sweep)
            await asyncio.to_thread(predecessor.end_all, self._run / "config")
            try:
                if left:
                    raise NftError("; ".join(left))
                await self._guard.remove_floor()
            except NftError as error:
                _log.error("the floor under the guard stays: %s", error)
            os.close(self._lock)

    async def handle(
        self, client: wire.Client, op: str, parameters: wire.Message, fds: list[int]
    ) -> wire.Message | None:
        """Answer one request."""
        self._daemons.heard(client)
        return await self._serving(client, op, parameters, fds)

    async def _answer(self, client: wire.Client, request: wire.Request[Any], fds: list[int]) -> object:
        close_all(fds)
        if isinstance(request, IMAGE_REQUESTS):
            return await self._change_images(client.peer.uid, request)
        match request:
            case Doctor():
                return Diagnosis(tuple(await diagnose(self._config, self._docker)))
            case DescribeImage(name):
                return await self._image(name)
            case Images():
                return ImageNames(self._image_store().names())
            case Launch():
                return await self._launch(request)
            case Configure(sandbox, selection, decided):
                return await self._parts()[1].configure(sandbox, selection, decided=decided)
            case Claimable(names):
                return ClaimableSandboxes(await self._parts()[1].claimable(names))
            case ClaimMember(sandbox, selection, env):
                return await self._parts()[1].claim(sandbox, selection, env)
            case Pause(sandbox):
                await self._parts()[1].pause(sandbox)
                return wire.Done()
            case Resume(sandbox):
                await self._parts()[1].resume(sandbox)
                return wire.Done()
            case Remove(sandbox, lines):
                return await self._parts()[1].remove(sandbox, lines=lines)
            case List():
                return Listed(await self._parts()[1].list())
            case Inspect(sandbox):
                return await self._parts()[1].inspect(sandbox)
            case ReadOutput(sandbox, lines, since):
                return await self._parts()[1].output(sandbox, lines, since)
            case ListVolumes():
                return VolumesListed(await self._operators_volumes(client).states())
            case RemoveVolume(name):
                await self._remove_volume(self._operators_volumes(client), name, client.peer.uid)
                return wire.Done()
            case TakeSnapshot(sandbox, snapshot):
                return SnapshotTaken(await self._snapshots().take(sandbox, snapshot))
            case RemoveSnapshot(snapshot):
                await self._snapshots().remove(snapshot)
                return wire.Done()
            case ListSnapshots():
                return HeldSnapshots(await self._snapshots().list())
            case _:
                raise TypeError(f"{type(request).__name__} is not asked of hostd")

    async def _change_images(self, uid: int, request: wire.Request[Any]) -> object:
        """Answer a request about the list of images, of root only: `serve` cannot change what may be started."""
        if uid != 0:
            raise wire.RequestError(wire.Code.FORBIDDEN, f"uid {uid} may not do this")
        images, actor = self._image_store(), f"uid:{uid}"
        try:
            match request:
                case AddImage():
                    return await images.add(request, actor)
                case AliasImage():
                    return await images.alias(request, actor)
                case ListImages():
                    return ListedImages(await images.listed())
                case ShowImage(name):
                    return await images.show(name)
                case RemoveImage(name):
                    return await images.remove(name, actor)
                case _:
                    raise TypeError(f"{type(request).__name__} is not about images")
        except UnknownImage:
            raise wire.RequestError(wire.Code.UNKNOWN_IMAGE, "Docker does not have this image") from None
        except DockerError as error:
            raise wire.RequestError(wire.Code.DOCKER, str(error)[:300]) from error

    def _parts(self) -> tuple[Docker, Sandboxes]:
        if self._docker is None or self._sandboxes is None:
            raise wire.RequestError(wire.Code.UNAVAILABLE, "the host is starting")
        return self._docker, self._sandboxes

    def _operators_volumes(self, client: wire.Client) -> Volumes:
        """Return the volumes for an operation that only root may request, not `serve`."""
        if client.peer.uid != 0:
            raise wire.RequestError(wire.Code.FORBIDDEN, f"uid {client.peer.uid} may not do this")
        self._parts()
        if self._volumes is None:
            raise wire.RequestError(wire.Code.UNAVAILABLE, "the host is starting")
        return self._volumes

    async def _remove_volume(self, volumes: Volumes, name: str, uid: int) -> None:
        """Record the removal of a volume, then remove it."""
        record = Record(Entry("volume.remove", "info", {"volume": name, "actor": f"uid:{uid}"}))
        try:
            await self._daemons.client("auditd").ask(record, timeout=_RECORD_SECONDS)
        except (OSError, wire.RemoteError) as error:
            raise wire.RequestError(wire.Code.AUDIT_UNAVAILABLE, "the audit log does not accept records") from error
        await volumes.remove(name)

    def _snapshots(self) -> Snapshotting:
        if self._snapshotting is None:
            raise wire.RequestError(wire.Code.UNAVAILABLE, "the host is starting")
        return self._snapshotting

    async def _image(self, name: str) -> ImageDescription:
        if not IMAGE_NAME.fullmatch(name):
            raise wire.RequestError(wire.Code.UNKNOWN_IMAGE, "this is no image's name")
        try:
            image = await self._image_store().image(name)
        except UnknownImage:
            raise wire.RequestError(wire.Code.UNKNOWN_IMAGE, "there is no such image on this host") from None
        except DockerError as error:
            raise wire.RequestError(wire.Code.DOCKER, str(error)) from error
        return ImageDescription(
            id=image.id, entrypoint=image.entrypoint, cmd=image.cmd, env=image.env, workdir=image.workdir
        )

    async def _launch(self, launch: Launch) -> PolicyInForce:
        try:
            check_launch(launch)
        except ValueError as error:
            raise wire.RequestError(wire.Code.INVALID, str(error)) from None
        _, sandboxes = self._parts()
        await self._watching.wait()
        return await sandboxes.launch(launch)


async def run(config: HostConfig) -> int:
    """Run until SIGINT or SIGTERM; return the exit status."""
    watchdog = _watchdog()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # the watchdog has blocked them
    try:
        host = Host(config)
    except (OSError, ValueError) as error:
        _log.error("cannot run: %s; run: sallyport doctor", error)
        return 1
    # A start that adopts is completed, so that everything that it adopted is then removed in order.
    patient = host.succeeds
    starting = asyncio.create_task(host.start(), name="start")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done() and not patient:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        await starting
        beating = None if watchdog is None else asyncio.create_task(_beat(watchdog), name="beat")
        await stopping
        del beating
    except (
        StartRefused,
        DockerError,
        GuardError,
        NftError,
        NotReady,
        OSError,
        ValueError,
        wire.RemoteError,
    ) as error:
        _log.error("cannot run: %s; run: sallyport doctor", str(error) or type(error).__name__)
        return 1
    finally:
        stopping.cancel()
        await host.stop(remove=stop.is_set())
    return 0


async def _beat(watchdog: BinaryIO) -> None:
    """Send the watchdog a byte when hostd is ready, and then at an interval while it works."""
    while True:
        watchdog.write(b"1")  # the pipe does not block
        await asyncio.sleep(BEAT_SECONDS)


def _watchdog() -> BinaryIO | None:
    """Return the pipe to the watchdog, if there is one. After the first byte the watchdog restarts hostd."""
    number = os.environ.pop(READY_FD, "")
    if not number.isdigit():
        return None
    os.set_inheritable(int(number), False)
    return os.fdopen(int(number), "wb", buffering=0)


def main(arguments: list[str]) -> int:
    """Run hostd with the configuration file that `arguments` names."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(levelname)s: %(message)s")
    if len(arguments) != 1:
        _log.error("usage: python -m runtimes.hostd HOST.json")
        return 64
    if os.geteuid() != 0:
        _log.error("hostd must be started by root")
        return 77
    dump_nothing()
    os.umask(0o077)
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _HEAPS)
    try:
        config = HostConfig.model_validate_json(Path(arguments[0]).read_bytes())
    except (OSError, ValueError) as error:
        _log.error("configuration: %s", error)
        return 78
    return asyncio.run(run(config))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
