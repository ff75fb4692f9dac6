"""Where an image is fetched and unpacked, and how it goes from there to Docker.

- Everything is on one disk of bounded size, which exists while an image is added. One image is added at a time.
- The work is done in a jail (`jail`). Its processes are dead before hostd opens a file of it.
- hostd parses nothing of an image. It hashes the configuration, and passes opaque files to Docker under fixed names:
  the archive that Docker reads is written here, so it names no other image, link or path.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import re
import stat
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import wire
from runtimes.engine.disk import DiskError, Disks
from runtimes.images.jail import OUT, SOURCE, JailOrder, Report, Task
from runtimes.images.manifests import MOST_CONFIG, MOST_LAYERS
from runtimes.images.references import check_image_digest
from runtimes.images.unpacker import CONFIG, Unpacked, digest_of, layer_name
from runtimes.process.cgroups import Cgroups, GroupLimits
from runtimes.process.finish import finished
from runtimes.spec import HostConfig
from wire import codec

_NAME: Final = "images"
"""Of the disk and of the control group."""
_LIMITS: Final = GroupLimits(memory_bytes=768 << 20, pids=64, cpus=1.0)
_SECONDS: Final = 1800.0
_LEAST_DISK: Final = 64 << 20
_SPARE: Final = 0.1
"""The share of the host's free space that is not used."""
_MOST_REPORT: Final = 256 * 1024
_PIPE: Final = 256 * 1024
_BLOCK: Final = 1 << 20
_LAYOUT: Final = ("oci-layout", "index.json")
_BLOB = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MOST_BLOBS: Final = 4096
_MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_ROOT: Final = Path(__file__).resolve().parents[2]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verified:
    """An image on the work disk, ready for Docker."""

    id: str
    image: Unpacked
    directory: Path

    def archive(self) -> Iterator[bytes]:
        """Yield the archive that Docker loads."""
        return _archive(self.directory, self.image.layers)


class Workshop:
    """The place of one hostd. `open` makes the disk."""

    def __init__(self, config: HostConfig, cgroups: Cgroups) -> None:
        self._config = config
        self._cgroups = cgroups
        self._directory = Path(config.state_dir) / "hostd" / "image-work"
        self._disks = Disks(self._directory, sparse=True)
        self._jail_root = Path(config.run_dir) / "image-jail"
        self.architecture = _MACHINES.get(os.uname().machine, os.uname().machine)

    def sweep(self) -> tuple[str, ...]:
        """Remove what a killed hostd left; return what is left of it."""
        return (*self._cgroups.remove(_NAME), *self._disks.sweep())

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Path]:
        """Make the work disk, and remove it at the end.

        Raises:
            wire.RequestError: the host has no room for it.
        """
        uid, most = self._config.uids.image_fetcher, self._config.registries.max_bytes
        found = os.statvfs(self._directory)
        free = int(found.f_bavail * found.f_frsize * (1 - _SPARE))
        size = min(2 * most + _LEAST_DISK, free)
        if size < _LEAST_DISK:
            raise wire.RequestError(wire.Code.DISK, "the host has no room to unpack an image")
        try:
            work = await finished(asyncio.to_thread(self._disks.prepare, _NAME, size))
        except DiskError as error:
            raise wire.RequestError(wire.Code.DISK, str(error)) from None
        try:
            os.chown(work, uid, uid)
            yield work
        finally:
            if residue := await finished(asyncio.to_thread(self._disks.detach, _NAME)):
                _log.error("an image's work left: %s", "; ".join(residue))

    async def fetch(self, work: Path, name: str, login: int | None) -> None:
        """Fetch an image from its registry; `login` is a pipe with the credentials, which is closed.

        Raises:
            wire.RequestError: it is refused.
        """
        await self._run(Task.FETCH, work, name, login=login)

    async def unpack(self, work: Path, task: Task, name: str, archive: int | None = None) -> Verified:
        """Verify an image, and return it.

        Args:
            name: the digest that must match, or the name of one of several images; empty for none.
            archive: the descriptor of the archive.

        Raises:
            wire.RequestError: it is refused.
        """
        report = await self._run(task, work, name, stdin=archive)
        if report.image is None:
            raise wire.RequestError(wire.Code.INTERNAL, "the image was not unpacked")
        image = report.image
        try:
            for digest in (image.config, *image.digests):
                check_image_digest(digest)
            ident = await asyncio.to_thread(_identity, work / OUT)
        except (ValueError, OSError) as error:
            raise wire.RequestError(wire.Code.IMAGE, f"the unpacked image is not complete: {error}"[:200]) from None
        if ident != image.config or not 1 <= image.layers <= MOST_LAYERS:
            raise wire.RequestError(wire.Code.IMAGE, "the unpacked image is not the one that was reported")
        return Verified(ident, image, work / OUT)

    async def copy_layout(self, work: Path, path: Path) -> None:
        """Copy an OCI layout to the work disk: the files of its form, and no other.

        Raises:
            wire.RequestError: it is no layout, or too large.
        """
        most, uid = self._config.registries.max_bytes, self._config.uids.image_fetcher
        try:
            await finished(asyncio.to_thread(_copy_layout, path, work / SOURCE, uid, most))
        except ValueError as error:
            raise wire.RequestError(wire.Code.IMAGE, str(error)) from None
        except OSError as error:
            raise wire.RequestError(wire.Code.IMAGE, f"the layout cannot be read: {error.strerror}") from None

    async def _run(
        self, task: Task, work: Path, name: str, *, stdin: int | None = None, login: int | None = None
    ) -> Report:
        config = self._config
        try:
            groups = await asyncio.to_thread(self._cgroups.create, _NAME, _LIMITS)
            order = JailOrder(
                task=task,
                groups=tuple(map(str, groups)),
                netns=config.upstream_netns,
                root=str(self._jail_root),
                work=str(work),
                uid=config.uids.image_fetcher,
                files=network_files(config) if task is Task.FETCH else {},
                roots=config.upstream_roots,
                skopeo=config.registries.skopeo,
                name=name,
                architecture=self.architecture,
                login=login,
                most=config.registries.max_bytes,
                file_size=2 * config.registries.max_bytes + _LEAST_DISK,
            )
            text = await self._report(order, stdin)
        finally:
            if login is not None:
                os.close(login)
            if residue := await finished(asyncio.to_thread(self._cgroups.remove, _NAME)):
                _log.error("an image's work left: %s", "; ".join(residue))
        try:
            report = codec.decode(Report, json.loads(text))
        except ValueError:
            raise wire.RequestError(wire.Code.IMAGE, "the image could not be read: it needs too much memory") from None
        if report.refused:
            raise wire.RequestError(wire.Code.IMAGE, _plain(report.refused))
        return report

    async def _report(self, order: JailOrder, stdin: int | None) -> bytes:
        python = self._config.python or sys.executable
        process = await asyncio.create_subprocess_exec(
            *(python, "-m", "runtimes.images.jail", json.dumps(codec.encode(order))),
            stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=() if order.login is None else (order.login,),
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
            cwd=_ROOT,
            start_new_session=True,
        )
        assert process.stdout is not None  # noqa: S101 - narrows: it is a pipe
        try:
            async with asyncio.timeout(_SECONDS):
                text = await process.stdout.read(_MOST_REPORT)
                while more := await process.stdout.read(_MOST_REPORT):
                    text += more
                    if len(text) > _MOST_REPORT:
                        break
                return text
        except TimeoutError:
            raise wire.RequestError(wire.Code.TIMEOUT, f"it took longer than {_SECONDS:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await finished(process.wait())


def credentials_pipe() -> tuple[int, int]:
    """Return the ends of a pipe that holds a login without a reader: for reading, and for writing."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE)
    os.set_blocking(writing, False)
    return reading, writing


def network_files(config: HostConfig) -> Mapping[str, str]:
    """Return the files of `/etc` for a fetch: the gateways' resolvers and names.

    Raises:
        wire.RequestError: no resolver listens on port 53, the only port that `resolv.conf` can mean.
    """
    resolvers = [address for address, port in config.resolvers if port == 53]
    if not resolvers:
        raise wire.RequestError(wire.Code.UNAVAILABLE, "sallyport.dns_upstreams has no resolver on port 53")
    hosts = [f"{address} {name}" for name, addresses in config.host_addresses.items() for address in addresses]
    return {
        "resolv.conf": "".join(f"nameserver {address}\n" for address in resolvers[:3]),
        "hosts": "".join(f"{line}\n" for line in ("127.0.0.1 localhost", *hosts)),
        "nsswitch.conf": "hosts: files dns\n",
    }


def _plain(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)[:500]


def _identity(out: Path) -> str:
    with _open_part(out, CONFIG) as file:
        text = file.read(MOST_CONFIG + 1)
    if len(text) > MOST_CONFIG:
        raise ValueError("its configuration is too large")
    return digest_of(text)


def _open_part(directory: Path, name: str) -> BinaryIO:
    """Open a plain file in a directory that an untrusted process wrote.

    Raises:
        OSError, ValueError: it is no plain file there.
    """
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    finally:
        os.close(place)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError("a part is no plain file")
    return os.fdopen(fd, "rb")


def _archive(directory: Path, layers: int) -> Iterator[bytes]:
    names = [layer_name(number) for number in range(layers)]
    manifest = json.dumps([{"Config": CONFIG, "RepoTags": None, "Layers": names}]).encode()
    yield from _entry("manifest.json", len(manifest), io.BytesIO(manifest))
    for name in (CONFIG, *names):
        with _open_part(directory, name) as file:
            yield from _entry(name, os.fstat(file.fileno()).st_size, file)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _entry(name: str, size: int, content: BinaryIO) -> Iterator[bytes]:
    header = tarfile.TarInfo(name)
    header.size, header.mode = size, 0o600
    yield header.tobuf(tarfile.GNU_FORMAT)
    left = size
    while left:
        block = content.read(min(_BLOCK, left))
        if not block:
            raise ValueError("a part has become shorter")
        left -= len(block)
        yield block
    yield bytes(-size % tarfile.BLOCKSIZE)


def _copy_layout(path: Path, target: Path, uid: int, most: int) -> None:
    blobs = target / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    left = most
    for name in _LAYOUT:
        left -= _copy(path, name, target / name, uid, left)
    found = sorted(name for name in os.listdir(path / "blobs" / "sha256") if _BLOB.fullmatch(name))
    if len(found) > _MOST_BLOBS:
        raise ValueError(f"the layout has more than {_MOST_BLOBS} blobs")
    for name in found:
        left -= _copy(path / "blobs" / "sha256", name, blobs / name, uid, left)
    for directory in (target, target / "blobs", blobs):
        os.chown(directory, uid, uid)


def _copy(directory: Path, name: str, target: Path, uid: int, most: int) -> int:
    copied = 0
    with _open_part(directory, name) as source, open(target, "xb") as copy:
        while block := source.read(_BLOCK):
            copied += len(block)
            if copied > most:
                raise ValueError("the layout is too large")
            copy.write(block)
        os.fchown(copy.fileno(), uid, uid)
    return copied


def tag_of(instance: str, ident: str) -> tuple[str, str]:
    """Return the repository and the tag under which an image with id `ident` stays in Docker."""
    return f"sallyport-image-{hashlib.sha256(instance.encode()).hexdigest()[:12]}", ident.removeprefix("sha256:")
