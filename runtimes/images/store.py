"""The images of this host: adds, lists and removes them, and says which of them a sandbox may be started from.

- One list has the images of the settings and those that the operator has added (`catalogue`). Nothing else can be
  started, whatever Docker has.
- Only root can change the list. `serve` can ask for names.
- One image is added at a time. It is remembered before Docker gets it, so that a crash leaves nothing behind.
- A record is written before an image is fetched, added, or gets a name. A removal also happens without a log.
- The bytes of a removed image go when no container uses it: at once, or with the removal of its last sandbox.
"""

import asyncio
import contextlib
import errno
import logging
import os
import stat
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import wire
from runtimes.daemons import Daemons
from runtimes.engine.docker import Docker, DockerAway, DockerError, LocalImage, UnknownImage
from runtimes.images.catalogue import MOST_ENTRIES, MOST_NAMES, Catalogue, CatalogueEntry, CatalogueFile, Leaving
from runtimes.images.jail import Task
from runtimes.images.references import Pattern, Reference
from runtimes.images.workshop import Verified, Workshop, credentials_pipe, tag_of
from runtimes.process.cgroups import Cgroups
from runtimes.process.finish import finished
from runtimes.spec import HostConfig
from wire.api.auditd import Entry, Record
from wire.api.hostd import (
    AddImage,
    AliasImage,
    ImageOrigin,
    ListedImage,
    RemovedImage,
    ShownImage,
)
from wire.api.vaultd import WriteLogin

_MOST_WAITING: Final = 8
_FREE_SECONDS: Final = 1.0
_MOST_FREE_SECONDS: Final = 60.0
"""Between two attempts to remove images while Docker does not answer: the pause doubles."""
_RECORD_SECONDS: Final = 10.0
_LISTED: Final = 100
_CONFIGURED: Final = "the settings"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Found:
    """An image that is ready to be added."""

    id: str
    digests: tuple[str, ...]
    names: tuple[str, ...]
    size: int
    verified: Verified | None


class ImageStore:
    """The images of one hostd. `load` reads the list; `import_configured` and `stop` frame its life."""

    def __init__(self, config: HostConfig, docker: Docker, daemons: Daemons, cgroups: Cgroups) -> None:
        self._config = config
        self._docker = docker
        self._daemons = daemons
        self._workshop = Workshop(config, cgroups)
        self._file = CatalogueFile(Path(config.state_dir) / "hostd" / "images.json")
        self._catalogue = Catalogue()
        self._patterns = tuple(map(Pattern.parse, config.registries.allowed))
        self._instance = cgroups.parent.name
        self._adding, self._changing = asyncio.Lock(), asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._imported = asyncio.Event()
        self._freeing: asyncio.Task[None] | None = None
        self._again = False

    async def load(self) -> None:
        """Read the list, and remove what an interrupted addition left on the host."""
        if residue := await asyncio.to_thread(self._workshop.sweep):
            _log.warning("an interrupted addition of an image left: %s", "; ".join(residue))
        self._catalogue = await asyncio.to_thread(self._file.read)

    async def import_configured(self) -> None:
        """Import the images of the settings where they are missing or changed; drop those that are not in them now.

        Raises:
            DockerError, OSError: one of them cannot be imported.
        """
        try:
            async with self._changing:
                wanted: list[CatalogueEntry] = []
                for image in self._config.images:
                    ident = await self._docker.import_image(image.name, Path(image.tar), image.env)
                    wanted.append(await self._configured(image.name, image.tar, ident))
                await self._write(_reconciled(self._catalogue, wanted))
        finally:
            self._imported.set()
        self.free()

    async def _configured(self, name: str, tar: str, ident: str) -> CatalogueEntry:
        reference = Reference.parse(name)
        former = self._catalogue.owner(reference.key)
        facts = await self._docker.image_facts(ident)
        same = former is not None and former.id == ident
        return CatalogueEntry(
            name=reference.key,
            aliases=() if former is None or former.name != reference.key else former.aliases,
            id=ident,
            source=tar,
            configured=True,
            added=former.added if same and former is not None else _now(),
            size=facts.size,
            tags=(f"{name.removesuffix(':latest')}:latest" if ":" not in name.rpartition("/")[2] else name,),
        )

    async def image(self, name: str) -> LocalImage:
        """Return the image that may be started under a name.

        Raises:
            UnknownImage: there is none.
        """
        try:
            return await self._docker.image(await self.id_of(name))
        except UnknownImage:
            if self._imported.is_set():
                raise
        await self._imported.wait()  # an adopting hostd imports after it listens
        return await self._docker.image(await self.id_of(name))

    async def id_of(self, name: str) -> str:
        """Return the id that the list has for a name. Docker is not asked for it.

        Raises:
            UnknownImage: there is none.
        """
        if (entry := self._catalogue.find(name)) is None and not self._imported.is_set():
            await self._imported.wait()
            entry = self._catalogue.find(name)
        if entry is None:
            raise UnknownImage("no such image")
        return entry.id

    def names(self) -> tuple[str, ...]:
        """Return names of images that may be started, those of the settings first; not all if there are very many."""
        return tuple(self._catalogue.names())[:_LISTED]

    async def listed(self) -> tuple[ListedImage, ...]:
        """Return all images, those of the settings first."""
        entries = sorted(self._catalogue.entries, key=lambda entry: (not entry.configured, entry.name))
        return tuple([await self._listed(entry) for entry in entries])

    async def _listed(self, entry: CatalogueEntry) -> ListedImage:
        try:
            present = (await self._docker.image_facts(entry.id)).id == entry.id
        except UnknownImage:
            present = False
        return ListedImage(
            name=Reference.parse(entry.name).familiar,
            aliases=tuple(Reference.parse(name).familiar for name in entry.aliases),
            digest=entry.id,
            digests=entry.digests,
            source=entry.source,
            configured=entry.configured,
            added=entry.added,
            size=entry.size,
            present=present,
        )

    async def show(self, name: str) -> ShownImage:
        """Return one image.

        Raises:
            wire.RequestError: there is none.
        """
        entry = self._known(name)
        facts = await self._docker.image_facts(entry.id)
        return ShownImage(
            listed=await self._listed(entry),
            entrypoint=facts.entrypoint,
            cmd=facts.cmd,
            env_names=facts.env_names,
            user=facts.user,
            workdir=facts.workdir,
            layers=facts.layers,
            sandboxes=await self._docker.users_of(entry.id),
        )

    def _known(self, name: str) -> CatalogueEntry:
        if (entry := self._catalogue.find(name)) is None:
            raise wire.RequestError(wire.Code.UNKNOWN_IMAGE, "there is no such image: sallyport image list")
        return entry

    async def add(self, request: AddImage, actor: str) -> ListedImage:
        """Add an image. An addition that has begun is completed, also if its caller no longer waits.

        Raises:
            wire.RequestError: it is refused; nothing is left of it.
        """
        if len(self._tasks) >= _MOST_WAITING:
            raise wire.RequestError(wire.Code.BUSY, f"{_MOST_WAITING} images are being added")
        return await self._whole(self._add(request, actor))

    async def _whole[T](self, work: Coroutine[object, object, T]) -> T:
        task = asyncio.create_task(work, name="image")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.info("an image was not added: %s", error)

    async def _add(self, request: AddImage, actor: str) -> ListedImage:
        names = [_name(text) for text in request.names]
        wanted = self._permitted(request.source) if request.origin is ImageOrigin.REGISTRY else None
        if wanted is not None and not names:
            names = [wanted]
        async with self._adding:
            self._check_free(names, replace=request.replace)
            if request.origin is ImageOrigin.DOCKER:
                found = await self._of_docker(request.source)
                names = names or [_name(request.source)]
                return await self._enter(found, names, request, f"docker: {request.source}", actor)
            async with self._workshop.open() as work:
                if wanted is not None:
                    found = await self._of_registry(work, wanted, actor)
                    source = wanted.familiar
                else:
                    found = await self._of_file(work, Path(request.source), request.selected)
                    names, source = names or _only(found.names), request.source
                return await self._enter(found, names, request, source, actor)

    def _permitted(self, source: str) -> Reference:
        wanted = _name(source)
        if not any(pattern.permits(wanted) for pattern in self._patterns):
            raise wire.RequestError(
                wire.Code.FORBIDDEN,
                "sallyport.registry.allowed does not name it; nothing was sent. An archive needs ./ or / at its "
                "beginning",
            )
        return wanted

    async def _of_docker(self, source: str) -> _Found:
        try:
            facts = await self._docker.image_facts(_name(source).familiar)
        except UnknownImage:
            raise wire.RequestError(wire.Code.UNKNOWN_IMAGE, "Docker has no such image") from None
        return _Found(facts.id, (), (), facts.size, None)

    async def _of_registry(self, work: Path, wanted: Reference, actor: str) -> _Found:
        secret = self._config.registries.secrets.get(wanted.registry)
        await self._record("image.fetch", source=wanted.familiar, secret=secret, actor=actor)
        login = None if secret is None else await self._login(secret, *wanted.endpoint)
        await self._workshop.fetch(work, wanted.key, login)
        return _found(await self._workshop.unpack(work, Task.UNPACK_FETCHED, wanted.digest or ""))

    async def _login(self, secret: str, host: str, port: int) -> int:
        """Return a pipe with a registry's credentials. hostd passes it on, and does not read it."""
        reading, writing = credentials_pipe()
        try:
            await self._daemons.client("vaultd").ask(WriteLogin(secret, host, port), fds=[writing])
        except wire.RemoteError as error:
            os.close(reading)
            raise wire.RequestError(wire.Code(error.code), f"secret {secret}: {error.message}") from None
        except BaseException as error:
            os.close(reading)
            if isinstance(error, OSError):
                raise wire.RequestError(wire.Code.UNAVAILABLE, "the vault does not answer") from None
            raise
        finally:
            os.close(writing)
        return reading

    async def _of_file(self, work: Path, path: Path, selected: str) -> _Found:
        if not path.is_absolute():
            raise wire.RequestError(wire.Code.INVALID, "the path of an image is absolute")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise wire.RequestError(wire.Code.INVALID, f"{path}: {error.strerror}"[:300]) from None
        try:
            mode = os.fstat(fd).st_mode
            if stat.S_ISDIR(mode):
                await self._workshop.copy_layout(work, path)
                return _found(await self._workshop.unpack(work, Task.UNPACK_LAYOUT, selected))
            if not stat.S_ISREG(mode):
                raise wire.RequestError(wire.Code.INVALID, "the image is neither a file nor a directory")
            return _found(await self._workshop.unpack(work, Task.UNPACK_ARCHIVE, selected, fd))
        finally:
            os.close(fd)

    async def _enter(
        self, found: _Found, names: Sequence[Reference], request: AddImage, source: str, actor: str
    ) -> ListedImage:
        if not names:
            raise wire.RequestError(wire.Code.INVALID, "the archive has no name, or several: give one with --name")
        async with self._changing:
            self._check_free(names, replace=request.replace)
            former = self._catalogue.owner(names[0].key)
            inherited = () if former is None or former.name != names[0].key else former.aliases
            keys = tuple(dict.fromkeys((*(name.key for name in names), *inherited)))
            if len(keys) > MOST_NAMES or len(self._catalogue.entries) >= MOST_ENTRIES:
                raise wire.RequestError(wire.Code.FULL, "there are too many images, or names of this one")
            await self._record("image.add", image=names[0].familiar, digest=found.id, source=source[:512], actor=actor)
            repository, tag = tag_of(self._instance, found.id)
            await self._put(found, repository, tag)
            entry = CatalogueEntry(
                name=keys[0],
                aliases=keys[1:],
                id=found.id,
                digests=found.digests,
                source=source,
                configured=False,
                added=_now(),
                size=found.size,
                tags=(f"{repository}:{tag}",),
            )
            await self._write(self._catalogue.with_entry(entry))
        _log.info("image %s was added: %s", names[0].familiar, found.id)
        self.free()
        return await self._listed(entry)

    async def _put(self, found: _Found, repository: str, tag: str) -> None:
        """Give Docker the image, and our tag to it. After a failure the image is removed again."""
        pending = Leaving(id=found.id, tags=(f"{repository}:{tag}",))
        await self._write(Catalogue(self._catalogue.entries, (*self._catalogue.leaving, pending)))
        try:
            if found.verified is not None:
                await self._docker.load(found.verified.archive)
            if (await self._docker.image_facts(found.id)).id != found.id:
                raise wire.RequestError(wire.Code.DOCKER, "Docker has another image than was verified")
            await self._docker.tag_image(found.id, repository, tag)
        except BaseException as error:
            self.free()
            if isinstance(error, UnknownImage):
                raise wire.RequestError(wire.Code.DOCKER, "Docker has not loaded the image") from None
            if isinstance(error, DockerError):
                raise wire.RequestError(wire.Code.DOCKER, f"Docker: {error}"[:300]) from None
            if isinstance(error, ValueError | OSError):
                raise wire.RequestError(wire.Code.HOST, "the verified image cannot be read") from None
            raise

    def _check_free(self, names: Sequence[Reference], *, replace: bool) -> None:
        for name in names:
            if (owner := self._catalogue.owner(name.key)) is None:
                continue
            if owner.configured and owner.name == name.key:
                raise wire.RequestError(wire.Code.EXISTS, f"{name.familiar} is an image of the settings")
            if not replace:
                raise wire.RequestError(wire.Code.EXISTS, f"there is an image {name.familiar}; see --replace")

    async def alias(self, request: AliasImage, actor: str) -> ListedImage:
        """Give an image a further name.

        Raises:
            wire.RequestError: it is refused.
        """
        alias = _name(request.alias)
        async with self._changing:
            entry = self._known(request.name)
            if alias.key in entry.names:
                return await self._listed(entry)
            self._check_free([alias], replace=request.replace)
            owner = self._catalogue.owner(alias.key)
            if owner is not None and owner.name == alias.key:
                raise wire.RequestError(wire.Code.EXISTS, f"{alias.familiar} is an image's own name: remove it first")
            if len(entry.names) >= MOST_NAMES:
                raise wire.RequestError(wire.Code.FULL, f"an image has {MOST_NAMES} names at most")
            await self._record(
                *("image.alias",),
                image=Reference.parse(entry.name).familiar,
                digest=entry.id,
                alias=alias.familiar,
                actor=actor,
            )
            changed = entry.model_copy(update={"aliases": (*entry.aliases, alias.key)})
            await self._write(self._catalogue.with_entry(changed))
            return await self._listed(changed)

    async def remove(self, name: str, actor: str) -> RemovedImage:
        """Remove an image with its names, or only an alias. Its bytes go when no container uses it.

        Raises:
            wire.RequestError: there is none, or it is from the settings.
        """
        async with self._changing:
            entry, key = self._known(name), _name(name).key
            alias = key if key in entry.aliases else None
            if entry.configured and alias is None:
                raise wire.RequestError(
                    wire.Code.FORBIDDEN, "it is an image of the settings: remove it from sallyport.images"
                )
            await self._record_if_possible(
                "image.remove",
                image=Reference.parse(entry.name).familiar,
                digest=entry.id,
                alias=None if alias is None else Reference.parse(alias).familiar,
                actor=actor,
            )
            if alias is not None:
                kept = tuple(one for one in entry.aliases if one != alias)
                await self._write(self._catalogue.with_entry(entry.model_copy(update={"aliases": kept})))
                return RemovedImage((Reference.parse(alias).familiar,), (), False)
            await self._write(self._catalogue.without(entry))
            try:
                await self._free()
            except DockerAway:
                self.free()
            sandboxes = await self._users(entry.id)
            freed = entry.id not in self._catalogue.needed() and all(
                one.id != entry.id for one in self._catalogue.leaving
            )
        _log.info("image %s was removed", entry.name)
        return RemovedImage(tuple(Reference.parse(one).familiar for one in entry.names), sandboxes, freed)

    async def _users(self, ident: str) -> tuple[str, ...]:
        try:
            return await self._docker.users_of(ident)
        except DockerError:
            return ()

    def free(self) -> None:
        """Remove the bytes of images that are not used, soon. Called after an image or a sandbox was removed."""
        if not self._catalogue.leaving:
            return
        if self._freeing is None or self._freeing.done():
            self._freeing = asyncio.create_task(self._free_later(), name="free-images")
        else:
            self._again = True

    async def _free_later(self) -> None:
        """Free images until nothing is left that only waits for Docker."""
        pause = _FREE_SECONDS
        while True:
            self._again = False
            try:
                async with self._changing:
                    await self._free()
            except (DockerAway, wire.RequestError) as error:
                _log.warning("images stay for now: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MOST_FREE_SECONDS)
            else:
                if not self._again:
                    return

    async def _free(self) -> None:
        """Remove what no container and no other image needs.

        Raises:
            DockerAway: Docker did not answer. What is left stays in the list of what is to be removed.
            wire.RequestError: the list cannot be written.
        """
        kept = []
        for one in self._catalogue.leaving:
            try:
                gone = await self._freed(one)
            except DockerAway:
                raise
            except DockerError as error:
                _log.info("an image stays for now: %s", error)
                gone = False
            if not gone:
                kept.append(one)
        await self._write(Catalogue(self._catalogue.entries, tuple(kept)))

    def _needed_tags(self) -> frozenset[str]:
        return frozenset(tag for entry in self._catalogue.entries for tag in entry.tags)

    async def _untag(self, image: Leaving, needed: frozenset[str]) -> None:
        """Remove our tags of an image, if they are its tags and not `needed`."""
        for tag in image.tags:
            with contextlib.suppress(UnknownImage):
                if tag not in needed and (await self._docker.image_facts(tag)).id == image.id:
                    await self._docker.remove_image(tag)

    async def _freed(self, image: Leaving) -> bool:
        """Remove an image that is not in the list, or its tags that the list does not need.

        Return whether nothing is left to do.
        """
        if image.id in self._catalogue.needed():
            await self._untag(image, self._needed_tags())
            return True
        with contextlib.suppress(UnknownImage):
            if await self._docker.users_of(image.id):
                return False
            await self._untag(image, frozenset())
            if not (await self._docker.image_facts(image.id)).tags:  # others' tags stay, and the image with them
                await self._docker.remove_image(image.id)
        return True

    async def _write(self, catalogue: Catalogue) -> None:
        try:
            await finished(asyncio.to_thread(self._file.write, catalogue))
        except OSError as error:
            what = "no space left" if error.errno == errno.ENOSPC else error.strerror
            raise wire.RequestError(wire.Code.STORAGE, f"the list of images cannot be written: {what}") from None
        self._catalogue = catalogue

    async def _record(self, kind: str, **fields: str | None) -> None:
        """Write a record before what it permits.

        Raises:
            wire.RequestError: the log did not take it.
        """
        record = Record(Entry(kind, "info", {name: text for name, text in fields.items() if text is not None}), True)
        try:
            await self._daemons.client("auditd").ask(record, timeout=_RECORD_SECONDS)
        except (OSError, wire.FrameError, wire.RemoteError) as error:
            _log.warning("auditd did not take a record: %s", error or type(error).__name__)
            raise wire.RequestError(wire.Code.AUDIT_UNAVAILABLE, "the audit log did not accept the record") from None

    async def _record_if_possible(self, kind: str, **fields: str | None) -> None:
        try:
            await self._record(kind, **fields)
        except wire.RequestError:
            _log.error("not in the audit log: %s of %s", kind, fields.get("image"))

    async def stop(self) -> None:
        """End additions that are in progress. What they have made is removed."""
        tasks = [*self._tasks, *([] if self._freeing is None else [self._freeing])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reconciled(catalogue: Catalogue, wanted: Sequence[CatalogueEntry]) -> Catalogue:
    """Return the list with exactly the images of the settings that are `wanted`."""
    names = {entry.name for entry in wanted}
    for former in catalogue.entries:
        if former.configured and former.name not in names:
            catalogue = catalogue.without(former)
    for entry in wanted:
        owner = catalogue.owner(entry.name)
        if owner is not None and not owner.configured:
            _log.warning("the settings take the name %s from an added image", entry.name)
        catalogue = catalogue.with_entry(entry)
    return catalogue


def _found(verified: Verified) -> _Found:
    image = verified.image
    return _Found(verified.id, image.digests, image.names, image.size, verified)


def _only(names: Sequence[str]) -> list[Reference]:
    """Return the only name that an archive has; none if it has several."""
    return [_name(names[0])] if len(names) == 1 else []


def _name(text: str) -> Reference:
    try:
        return Reference.parse(text)
    except ValueError as error:
        raise wire.RequestError(wire.Code.INVALID, f"{text[:100]!a}: {error}") from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
