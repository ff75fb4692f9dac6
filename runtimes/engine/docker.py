"""Containers and images, through Docker. The only module that uses the docker package.

- Its blocking calls run in a pool of a few threads; each has a time limit. `image`, with which a launch begins, waits
  for a Docker that is being restarted, and so do `ours` and `remove`, with which a removal ends.
- A container gets no network, only the capabilities of a fixed list, no way to gain privileges, limits, no restarts,
  and only binds of Sallyport and its volumes. From the image it takes only user, work directory and environment.
- An image is refused if Docker could not read its user files (`/etc/passwd`, `/etc/group`) to their end, because then
  Docker would hold the container's lock for ever. If Docker delays an answer for another reason, only the callers for
  that container wait, for some seconds.
- The label `sallyport.snapshot` marks images that are snapshots. No name and no id of such an image is an image's name
  for a caller: only `snapshot_image` returns it.
- The label `sallyport.sandbox` marks containers of Sallyport, `sallyport.instance` those of this server. A container
  is removed only if it has both labels and the matching name, because labels can come from an image.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import posixpath
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from runtimes.engine.printed import Hidden, LogTail, entries, last_lines
from runtimes.process.cgroups import processor_time
from wire.sockets import WrongServer, probe_server

LABEL = "sallyport.sandbox"
INSTANCE_LABEL = "sallyport.instance"
_SOURCE_LABEL = "sallyport.source"
SNAPSHOT_LABEL = "sallyport.snapshot"
SNAPSHOT_BYTES_LABEL = "sallyport.snapshot.bytes"
_SNAPSHOTS = "sallyport-snapshots"
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETUID", "SETGID", "NET_BIND_SERVICE")
ISOLATION_CAPABILITIES = (*CAPABILITIES, "SYS_ADMIN", "SETPCAP")
"""With isolated sessions, on runsc only: there they are capabilities over the sandbox's own kernel. execd uses the
second one to remove both from the bounding set of the programs that it starts."""
_THREADS = 8
_TIMEOUT = 60
_IMPORT_TIMEOUT = 600
_PATIENCE_SECONDS, _PAUSE_SECONDS = 5.0, 0.1
_REMOVAL_SECONDS = 10.0
_LOOKING_THREADS, _LOOK_SECONDS = 4, 5.0
_KILLED = 137  # by SIGKILL
_LATE_SECONDS = 1.0  # between the end of a container and the last event about it
_READING_THREADS = 2  # an output can have megabytes, and must not delay the others
_LOADING_THREADS = 2  # a layer can have gigabytes
_RUNNING = "running"
_USERS = ("/etc/passwd", "/etc/group")
_MOST_USERS = 1 << 20
_LINKS = 8
_NOT_PLAIN = 0x8F280000
"""Bits of the modes in Go's `io/fs`: directory, link, device, pipe, socket, character device, or another special
file."""
_LINK = 0x08000000
_JUDGED_IMAGES = 1024
_DEFAULT_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def snapshot_name(instance: str, snapshot: str) -> str:
    """Return the name of the image of a snapshot of one server."""
    return f"{_SNAPSHOTS}/{instance or 'local'}:{snapshot}"


def container_name(sandbox: str) -> str:
    """Return the name of a sandbox's container."""
    return f"sallyport-{sandbox}"


class DockerError(Exception):
    """Docker refused or did not answer."""


class DockerAway(DockerError):
    """Docker did not answer: it has ended, is being restarted, or took too long."""


class UnknownImage(DockerError):
    """This Docker has no such image."""


class UnusableImage(DockerError):
    """The image cannot be started because of its content; `str()` describes the fault to the image's owner."""


@dataclass(frozen=True, slots=True)
class LocalImage:
    """The parts of an image's configuration that are used to run it."""

    id: str
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    env: tuple[str, ...]
    workdir: str


class ImageInUse(DockerError):
    """A container uses the image."""


@dataclass(frozen=True, slots=True)
class BaseImage:
    """The parts of an image on which another one can be based: `layers` are the digests of its layers, lowest first."""

    layers: tuple[str, ...]
    config: Mapping[str, Any]
    architecture: str
    system: str


@dataclass(frozen=True, slots=True)
class SnapshotImage:
    """A snapshot's image, and the bytes of its layer."""

    snapshot: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What people may know of an image: no value of a variable, which could be a secret."""

    id: str
    tags: tuple[str, ...]
    size: int
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    env_names: tuple[str, ...]
    user: str
    workdir: str
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bind:
    """A host file or directory, mounted read-only."""

    source: Path
    destination: str


@dataclass(frozen=True, slots=True)
class VolumeBind:
    """A mounted volume of the sandbox, by the place of the mount on the host."""

    source: str
    destination: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class ContainerPlan:
    """A container to create. `command[0]` is the program, an absolute path inside."""

    name: str
    sandbox: str
    runtime: str
    image: str
    command: Sequence[str]
    env: Mapping[str, str]
    hostname: str
    binds: Sequence[Bind]
    volumes: Sequence[VolumeBind]
    seccomp: str
    capabilities: Sequence[str]
    cpu_nanos: int
    memory_bytes: int
    pids: int
    processes: int | None
    """The limit of processes of each user inside, if the sandbox has its own kernel, which counts them."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind of a container: one of Sallyport, a volume of the sandbox, or an anonymous volume of its image."""

    source: str
    destination: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of a container on the host.

    `layer` is the directory that has the container's own part of its root file system, None if the storage driver is
    not overlay2; `mounts` are its binds and volumes; `lower` are the directories of its image, topmost first.
    """

    layer: Path | None
    mounts: tuple[Mount, ...]
    lower: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class ContainerState:
    """A container's state as Docker reports it."""

    status: str
    exit_code: int
    oom: bool
    pid: int
    started_at: str
    error: str


class Docker:
    """One Docker daemon, by its socket."""

    def __init__(self, socket: str, instance: str = "") -> None:
        """Connect to the daemon.

        Args:
            instance: distinguishes the containers of this server from those of another one on the same Docker.

        Raises:
            DockerError: there is no Docker at `socket`, or its server runs as another user than this process, which
                is root.
        """
        # Imported late, so that the import, which takes half a second, runs concurrently with other work.
        import docker
        import docker.errors
        import requests.exceptions

        self._errors: Any = docker.errors
        self._broken = (docker.errors.DockerException, requests.exceptions.RequestException, OSError)
        try:
            probe_server(socket, os.geteuid())
        except WrongServer as error:
            raise DockerError(str(error)) from None
        except OSError as error:
            raise DockerError(f"no Docker answers at {socket}") from error
        try:
            self._api: Any = docker.APIClient(base_url=f"unix://{socket}", version="auto", timeout=_TIMEOUT)
            self._slow: Any = docker.APIClient(base_url=f"unix://{socket}", version="auto", timeout=_IMPORT_TIMEOUT)
        except self._broken as error:
            raise DockerError(f"no Docker answers at {socket}") from error
        self._instance = instance
        self._pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="docker")
        self._looking = ThreadPoolExecutor(max_workers=_LOOKING_THREADS, thread_name_prefix="docker-look")
        self._reading = ThreadPoolExecutor(max_workers=_READING_THREADS, thread_name_prefix="docker-read")
        self._loading = ThreadPoolExecutor(max_workers=_LOADING_THREADS, thread_name_prefix="docker-load")
        self._looks: dict[str, asyncio.Task[Any]] = {}
        self._judged: set[str] = set()

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._looking.shutdown(wait=False, cancel_futures=True)
        self._reading.shutdown(wait=False, cancel_futures=True)
        self._loading.shutdown(wait=False, cancel_futures=True)
        self._api.close()
        self._slow.close()

    async def _run[T](self, call: Callable[[], T], patience: float = 0.0, pool: ThreadPoolExecutor | None = None) -> T:
        """Run `call`; while Docker does not answer, repeat it for `patience` seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + patience
        while True:
            try:
                return await loop.run_in_executor(pool or self._pool, call)
            except self._errors.ImageNotFound as error:
                raise UnknownImage("no such image") from error
            except self._errors.APIError as error:
                raise DockerError(str(error.explanation or error)[:500]) from error
            except self._broken as error:
                if loop.time() >= until:
                    raise DockerAway(f"docker: {type(error).__name__}") from error
            await asyncio.sleep(_PAUSE_SECONDS)

    async def version(self) -> dict[str, Any]:
        """Return the daemon's version information."""
        return await self._run(self._api.version)

    async def runtimes(self) -> tuple[str, ...]:
        """Return the names of the runtimes that the daemon knows."""
        information = await self._run(self._api.info)
        return tuple(sorted(information.get("Runtimes") or {}))

    async def image(self, name: str) -> LocalImage:
        """Return the configuration of image `name`; wait for a Docker that is being restarted.

        Raises:
            UnknownImage: it is not here, or a snapshot. Nothing is pulled.
        """
        found = await self._run(lambda: self._api.inspect_image(name), _PATIENCE_SECONDS)
        config = found.get("Config") or {}
        if SNAPSHOT_LABEL in (config.get("Labels") or {}):
            raise UnknownImage("no such image")
        return self._local(found)

    async def snapshot_image(self, snapshot: str) -> LocalImage:
        """Return the configuration of the image of a snapshot of this server.

        Raises:
            UnknownImage: it is not here, or the image of this name is none of this server.
        """
        name = snapshot_name(self._instance, snapshot)
        found = await self._run(lambda: self._api.inspect_image(name), _PATIENCE_SECONDS)
        labels = (found.get("Config") or {}).get("Labels") or {}
        if (labels.get(SNAPSHOT_LABEL), labels.get(INSTANCE_LABEL)) != (snapshot, self._instance):
            raise UnknownImage("no such image")
        return self._local(found)

    @staticmethod
    def _local(found: Mapping[str, Any]) -> LocalImage:
        config = found.get("Config") or {}
        return LocalImage(
            id=found["Id"],
            entrypoint=tuple(config.get("Entrypoint") or ()),
            cmd=tuple(config.get("Cmd") or ()),
            env=tuple(config.get("Env") or ()),
            workdir=config.get("WorkingDir") or "/",
        )

    async def base_image(self, container: str) -> BaseImage:
        """Return the image of a container as a base.

        Raises:
            UnknownImage: it was removed.
            DockerError: Docker refused, or did not answer.
        """

        def inspect() -> Mapping[str, Any]:
            image = self._api.inspect_container(container)["Image"]
            found: Mapping[str, Any] = self._api.inspect_image(image)
            return found

        found = await self._run(inspect)
        return BaseImage(
            tuple((found.get("RootFS") or {}).get("Layers") or ()),
            dict(found.get("Config") or {}),
            str(found.get("Architecture")),
            str(found.get("Os")),
        )

    async def load(self, archive: Callable[[], Iterator[bytes]]) -> None:
        """Load images from an archive in the form of `docker save`. Layers that are here already can be missing.

        Raises:
            DockerError: Docker refused it, or did not answer. It is not known whether an image was loaded.
        """

        def post() -> None:
            url = self._slow._url("/images/load")
            answer = self._slow.post(url, data=archive(), params={"quiet": 1}, stream=True, timeout=_IMPORT_TIMEOUT)
            self._slow._raise_for_status(answer)
            for line in answer.iter_lines():
                if problem := json.loads(line or "{}").get("error"):
                    raise DockerError(f"docker load: {problem}"[:500])

        await self._run(post, pool=self._loading)

    async def snapshots(self) -> tuple[SnapshotImage, ...]:
        """Return the snapshots of this server that are images."""
        filters = {"label": [SNAPSHOT_LABEL, f"{INSTANCE_LABEL}={self._instance}"]}
        found = await self._run(lambda: self._api.images(filters=filters))
        result = {}
        for item in found:
            labels = item.get("Labels") or {}
            name, size = labels[SNAPSHOT_LABEL], labels.get(SNAPSHOT_BYTES_LABEL, "")
            if snapshot_name(self._instance, name) in (item.get("RepoTags") or ()):
                result[name] = SnapshotImage(name, int(size) if size.isdigit() else 0)
        return tuple(result.values())

    async def remove_snapshot(self, snapshot: str) -> None:
        """Remove the image of a snapshot, if it exists.

        Raises:
            ImageInUse: a container uses it.
            DockerError: Docker refused, or did not answer.
        """
        name = snapshot_name(self._instance, snapshot)
        try:
            await self._run(lambda: self._api.remove_image(name))
        except UnknownImage:
            pass
        except DockerError as error:
            if getattr(error.__cause__, "status_code", None) == 409:
                raise ImageInUse("a container uses the image") from error
            raise

    async def top_layer(self, snapshot: str) -> Path | None:
        """Return the directory of a snapshot's own layer; None if the storage driver is not overlay2."""
        name = snapshot_name(self._instance, snapshot)
        found = (await self._run(lambda: self._api.inspect_image(name))).get("GraphDriver") or {}
        upper = (found.get("Data") or {}).get("UpperDir")
        return Path(upper) if found.get("Name") == "overlay2" and upper else None

    async def image_facts(self, name: str) -> ImageFacts:
        """Return what people may know of the image `name`, which can be an id.

        Raises:
            UnknownImage: it is not here.
        """
        found = await self._run(lambda: self._api.inspect_image(name), _PATIENCE_SECONDS)
        config = found.get("Config") or {}
        return ImageFacts(
            id=found["Id"],
            tags=tuple(found.get("RepoTags") or ()),
            size=int(found.get("Size") or 0),
            entrypoint=tuple(config.get("Entrypoint") or ()),
            cmd=tuple(config.get("Cmd") or ()),
            env_names=tuple(text.partition("=")[0] for text in config.get("Env") or ()),
            user=config.get("User") or "",
            workdir=config.get("WorkingDir") or "/",
            layers=tuple((found.get("RootFS") or {}).get("Layers") or ()),
        )

    async def tag_image(self, ident: str, repository: str, tag: str) -> None:
        """Give an image another tag."""
        await self._run(lambda: self._api.tag(ident, repository, tag, force=True))

    async def remove_image(self, name: str) -> None:
        """Remove a tag of an image, and the image with its last tag. A missing one is no error.

        Raises:
            DockerError: a container uses it.
        """
        with contextlib.suppress(UnknownImage):
            await self._run(lambda: self._slow.remove_image(name))

    async def users_of(self, ident: str) -> tuple[str, ...]:
        """Return the sandboxes, and the names of other containers, that were made of the image with id `ident`."""
        found = await self._run(lambda: self._api.containers(all=True, filters={"ancestor": ident}))
        of_it = [item for item in found if item.get("ImageID") == ident]
        return tuple(str((item.get("Labels") or {}).get(LABEL) or (item.get("Names") or ["?"])[0]) for item in of_it)

    async def import_image(self, name: str, tar: Path, env: Mapping[str, str]) -> str:
        """Import the root file system `tar` as `name` with `env`, unless exactly this was imported before.

        Return the image's id.

        Preconditions: `env` has passed `bounds.image_environment`.
        """
        status = await asyncio.to_thread(tar.stat)
        variables = [f'ENV {key}="{value}"' for key, value in env.items()]
        source = f"{status.st_size}:{status.st_mtime_ns}"
        if variables:
            source += ":" + hashlib.sha256("\n".join(variables).encode()).hexdigest()
        try:
            found = await self._run(lambda: self._api.inspect_image(name))
            if ((found.get("Config") or {}).get("Labels") or {}).get(_SOURCE_LABEL) == source:
                return str(found["Id"])
        except UnknownImage:
            pass
        repository, separator, tag = name.rpartition(":")
        if not separator or "/" in tag:
            repository, tag = name, "latest"
        changes = [f"LABEL {_SOURCE_LABEL}={source}", f"ENV {_DEFAULT_PATH}", *variables, "WORKDIR /"]
        await self._run(
            lambda: self._slow.import_image_from_file(str(tar), repository=repository, tag=tag, changes=changes)
        )
        return str((await self._run(lambda: self._api.inspect_image(name)))["Id"])

    async def create(self, plan: ContainerPlan) -> str:
        """Create a container without starting it; return its id.

        Raises:
            UnknownImage, DockerError: it was not created.
        """
        ulimits = [{"Name": "core", "Soft": 0, "Hard": 0}]  # a crash must not reach the host's core handler
        if plan.processes is not None:
            ulimits.append({"Name": "nproc", "Soft": plan.processes, "Hard": plan.processes})
        period, quota = processor_time(plan.cpu_nanos)
        host = self._api.create_host_config(
            network_mode="none",
            binds=[f"{bind.source}:{bind.destination}:ro" for bind in plan.binds],
            mounts=[
                {
                    "Type": "bind",
                    "Source": volume.source,
                    "Target": volume.destination,
                    "ReadOnly": volume.read_only,
                    "BindOptions": {"Propagation": "rprivate"},
                }
                for volume in plan.volumes
            ],
            cap_drop=["ALL"],
            cap_add=list(plan.capabilities),
            security_opt=["no-new-privileges:true", f"seccomp={plan.seccomp}"],
            pids_limit=plan.pids,
            mem_limit=plan.memory_bytes,
            memswap_limit=plan.memory_bytes,
            cpu_period=period,
            cpu_quota=quota,
            restart_policy={"Name": "no"},
            log_config={"Type": "json-file", "Config": {"max-size": "10m", "max-file": "2"}},
            ipc_mode="private",
            cgroupns="private",
            shm_size=64 * 1024 * 1024,
            ulimits=ulimits,
            runtime=plan.runtime,
        )
        created = await self._run(
            lambda: self._api.create_container(
                image=plan.image,
                entrypoint=list(plan.command[:1]),
                command=list(plan.command[1:]),
                environment=[f"{name}={value}" for name, value in plan.env.items()],
                hostname=plan.hostname,
                labels={LABEL: plan.sandbox, INSTANCE_LABEL: self._instance},
                name=plan.name,
                host_config=host,
                healthcheck={"test": ["NONE"]},
                stop_signal="SIGKILL",
                use_config_proxy=False,
            )
        )
        return str(created["Id"])

    async def judge_users(self, container: str, image: str) -> None:
        """Check the user files in a created container of `image`, which Docker and runc read at its start.

        Raises:
            UnusableImage: one of them is not a plain file, or too large; the container must not be started.
            DockerError: Docker refused, or did not answer.
        """
        if image in self._judged:
            return
        for path in _USERS:
            await self._run(lambda path=path: self._judge_file(container, path))  # type: ignore[misc]
        if len(self._judged) >= _JUDGED_IMAGES:
            self._judged.clear()
        self._judged.add(image)

    def _judge_file(self, container: str, path: str) -> None:
        """Check one file, following links inside the container as Docker does. A missing file is accepted."""
        named = path
        for _ in range(_LINKS):
            url = self._api._url("/containers/{0}/archive", container)
            answer = self._api.head(url, params={"path": path}, timeout=_TIMEOUT)
            if answer.status_code == 404:
                return
            answer.raise_for_status()
            found = json.loads(base64.b64decode(answer.headers["x-docker-container-path-stat"]))
            if not found["mode"] & _NOT_PLAIN and found["size"] <= _MOST_USERS:
                return
            if not found["mode"] & _LINK:
                break
            path = posixpath.join(posixpath.dirname(path), found["linkTarget"])
        raise UnusableImage(f"{named} of the image is no plain file, or too large")

    async def layout(self, container: str) -> Layout:
        """Return the layout of a created container."""
        found = await self._run(lambda: self._api.inspect_container(container))
        mounts = tuple(
            Mount(str(item["Source"]), str(item["Destination"]), not item.get("RW", True))
            for item in found.get("Mounts") or ()
        )
        driver = found.get("GraphDriver") or {}
        upper, work = ((driver.get("Data") or {}).get(name) for name in ("UpperDir", "WorkDir"))
        if driver.get("Name") != "overlay2" or not upper or not work or Path(upper).parent != Path(work).parent:
            return Layout(None, mounts)
        lower = str((driver.get("Data") or {}).get("LowerDir") or "")
        return Layout(Path(upper).parent, mounts, tuple(map(Path, filter(None, lower.split(":")))))

    async def storage(self) -> str:
        """Return the name of the daemon's storage driver."""
        information = await self._run(self._api.info)
        return str(information.get("Driver"))

    async def start(self, container: str) -> None:
        """Start a created container."""
        await self._run(lambda: self._api.start(container))

    async def unpause(self, container: str) -> None:
        """Undo a `docker pause` of another program."""
        await self._run(lambda: self._api.unpause(container))

    async def state(self, container: str) -> ContainerState | None:
        """Return the container's state, None if there is no such container.

        Raises:
            DockerError: Docker does not answer within seconds.
        """
        try:
            found = await self._look(container, lambda: self._api.inspect_container(container))
        except DockerError as error:
            if isinstance(error.__cause__, self._errors.NotFound):
                return None
            raise
        state = found["State"]
        killed = state["Status"] in ("exited", "dead") and int(state["ExitCode"]) == _KILLED
        return ContainerState(
            status=str(state["Status"]),
            exit_code=int(state["ExitCode"]),
            oom=bool(state["OOMKilled"]) or (killed and await self._reached_memory(container, state["FinishedAt"])),
            pid=int(state["Pid"]),
            started_at=str(state["StartedAt"]),
            error=str(state["Error"])[:500],
        )

    async def _reached_memory(self, container: str, finished: str) -> bool:
        """Return whether Docker has an event of the container's memory limit. Waits for a late one at most a second.

        containerd reports the limit and the end in any order. The state has only a limit that was reported first.
        """
        late = datetime.fromisoformat(finished).timestamp() + _LATE_SECONDS
        # Here and not in Docker, which would keep a thread. The clock may have been set back since the end.
        await asyncio.sleep(min(max(late - time.time(), 0.0), _LATE_SECONDS))

        def reached() -> bool:
            filters = {"container": container, "event": "oom"}
            events = self._api.events(since=0, until=f"{time.time():.3f}", filters=filters, decode=True)
            with contextlib.closing(events):
                return any(True for _ in events)

        return bool(await self._look(f"the memory of {container}", reached))

    async def output(
        self, container: str, query: LogTail, own: Mapping[str, str], more: Mapping[str, str], seconds: float
    ) -> tuple[str, bool]:
        """Return the last lines that a container has written, and whether some of them are missing.

        The values of its environment and of `more` are replaced, except those of the image and those in `own`.

        Raises:
            DockerError: Docker refused, or does not answer in time; also if there is no such container.
        """
        what = f"output of {container}: {query}"
        read = partial(self._read_output, container, query, own, more)
        text, dropped = await self._look(what, read, pool=self._reading, seconds=seconds)
        return str(text), bool(dropped)

    def _read_output(
        self, container: str, query: LogTail, own: Mapping[str, str], more: Mapping[str, str]
    ) -> tuple[str, bool]:
        hidden = Hidden.of(self._given(container, own), more)
        url = self._api._url("/containers/{0}/logs", container)
        asked = {"stdout": 1, "stderr": 1, "follow": 0, "tail": entries(query, hidden)}
        asked["timestamps"] = int(query.since is not None)
        with self._api.get(url, params=asked, stream=True, timeout=_TIMEOUT) as answer:
            self._api._raise_for_status(answer)
            return last_lines(answer.raw.read, query, hidden)

    def _given(self, container: str, own: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a container that are neither its image's nor `own`."""
        found = self._api.inspect_container(container)
        try:
            image = self._api.inspect_image(found["Image"])
        except self._errors.ImageNotFound:
            image = {}
        known = {*((image.get("Config") or {}).get("Env") or ()), *(f"{name}={text}" for name, text in own.items())}
        variables = [item for item in found["Config"].get("Env") or () if item not in known]
        return dict(item.split("=", 1) for item in variables if "=" in item)

    async def _look(
        self,
        what: str,
        call: Callable[[], Any],
        *,
        pool: ThreadPoolExecutor | None = None,
        seconds: float | None = None,
    ) -> Any:
        """Run `call` in the pool for queries, and wait some seconds; callers with the same `what` share one answer.

        Args:
            seconds: the limit of the wait, if it is not the usual one.

        Raises:
            DockerError: Docker refused, or does not answer in time.
        """
        look = self._looks.get(what)
        if look is None:
            look = self._looks[what] = asyncio.create_task(
                self._run(call, pool=pool or self._looking), name="docker-look"
            )
            look.add_done_callback(lambda ended: self._looked(what, ended))
        try:
            async with asyncio.timeout(_LOOK_SECONDS if seconds is None else seconds):
                return await asyncio.shield(look)
        except TimeoutError:
            raise DockerError("docker did not answer in time") from None

    def _looked(self, what: str, ended: asyncio.Task[Any]) -> None:
        del self._looks[what]
        if not ended.cancelled():
            ended.exception()  # marks the exception as retrieved, because all callers may have stopped waiting

    async def running(self) -> frozenset[str]:
        """Return the ids of this server's containers that run: one call, for any number.

        Raises:
            DockerError: Docker does not answer within seconds.
        """
        filters = {"label": f"{INSTANCE_LABEL}={self._instance}", "status": "running"}
        found = await self._look(_RUNNING, lambda: self._api.containers(filters=filters))
        return frozenset(str(item["Id"]) for item in found)

    async def remove(self, container: str) -> None:
        """Kill and remove a container, if it exists, and its anonymous volumes; wait for a Docker that is restarted."""
        try:
            await self._run(lambda: self._api.remove_container(container, force=True, v=True), _REMOVAL_SECONDS)
        except DockerError as error:
            if not isinstance(error.__cause__, self._errors.NotFound):
                raise

    async def ours(self, sandbox: str | None = None) -> tuple[tuple[str, str], ...]:
        """Return (container id, sandbox id) of this server's containers in any state.

        Waits for a Docker that is being restarted.
        """
        labels = [LABEL if sandbox is None else f"{LABEL}={sandbox}", f"{INSTANCE_LABEL}={self._instance}"]
        found = await self._run(lambda: self._api.containers(all=True, filters={"label": labels}), _REMOVAL_SECONDS)
        ours = ((str(item["Id"]), str(item["Labels"][LABEL]), item.get("Names")) for item in found)
        # A container that is being removed may have no name any more.
        return tuple((ident, name) for ident, name, names in ours if not names or f"/{container_name(name)}" in names)
