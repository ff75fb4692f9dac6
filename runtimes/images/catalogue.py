"""The list of the images that may be started: one file of hostd, and every name is looked up in it.

- A name leads to an id of Docker, never to Docker's own names. So no other user of Docker can put another image under
  a name of the list.
- An image that has left the list is remembered until its bytes are gone. So is one that is about to be loaded: after a
  crash it is removed.
- The file is replaced as a whole. A file that cannot be read counts as empty, is kept beside, and is reported.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from runtimes.images.references import Reference

MOST_ENTRIES = 1000
MOST_NAMES = 32
_log = logging.getLogger(__name__)


class CatalogueEntry(BaseModel):
    """One image.

    Attributes:
        name: its complete name (`Reference.key`).
        aliases: further names in this form.
        id: Docker's, which is the digest of its configuration.
        digests: those of its name in the registry or archive, and of its manifest.
        source: where it is from, for people.
        configured: whether it is from the settings.
        added: RFC 3339.
        size: in bytes, unpacked.
        tags: Docker's tags that Sallyport made for it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    aliases: tuple[str, ...] = ()
    id: str
    digests: tuple[str, ...] = ()
    source: str
    configured: bool
    added: str
    size: int
    tags: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Name and aliases."""
        return (self.name, *self.aliases)

    def answers(self, wanted: Reference) -> bool:
        """Return whether a name means this image; with a digest, only if it has that digest."""
        if wanted.digest is None or wanted.key in self.names:
            return wanted.key in self.names
        if wanted.digest not in (self.id, *self.digests):
            return False
        known = [Reference.parse(name) for name in self.names]
        return any(one.path == wanted.path and wanted.tag in (None, one.tag) for one in known)


class Leaving(BaseModel):
    """An image that is not in the list any more, or not yet. It is removed with these tags."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str
    tags: tuple[str, ...] = ()


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: int
    images: tuple[CatalogueEntry, ...]
    leaving: tuple[Leaving, ...]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The images that may be started, and those whose bytes are to be removed."""

    entries: tuple[CatalogueEntry, ...] = ()
    leaving: tuple[Leaving, ...] = ()

    def find(self, name: str) -> CatalogueEntry | None:
        """Return the image of a name as a caller wrote it; None if there is none."""
        try:
            wanted = Reference.parse(name)
        except ValueError:
            return None
        return next((entry for entry in self.entries if entry.answers(wanted)), None)

    def owner(self, key: str) -> CatalogueEntry | None:
        """Return the image that has this complete name."""
        return next((entry for entry in self.entries if key in entry.names), None)

    def with_entry(self, entry: CatalogueEntry) -> "Catalogue":
        """Return the list with `entry`, which takes its names from others. One that loses its own name leaves."""
        kept: list[CatalogueEntry] = []
        leaving = [one for one in self.leaving if one.id != entry.id]
        for former in self.entries:
            if former.name in entry.names:
                if former.id != entry.id:
                    leaving.append(Leaving(id=former.id, tags=former.tags))
                continue
            aliases = tuple(name for name in former.aliases if name not in entry.names)
            kept.append(former.model_copy(update={"aliases": aliases}))
        return Catalogue((*kept, entry), tuple(leaving))

    def without(self, entry: CatalogueEntry) -> "Catalogue":
        """Return the list without `entry`, whose bytes are to be removed."""
        gone = Leaving(id=entry.id, tags=entry.tags)
        return Catalogue(tuple(one for one in self.entries if one != entry), (*self.leaving, gone))

    def needed(self) -> frozenset[str]:
        """Return the ids of the images of the list."""
        return frozenset(entry.id for entry in self.entries)

    def names(self) -> Iterator[str]:
        """Return every name in its short form, those of the settings first."""
        for entry in sorted(self.entries, key=lambda one: not one.configured):
            yield from (Reference.parse(name).familiar for name in entry.names)


class CatalogueFile:
    """The file of the list."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Catalogue:
        """Return what the file says."""
        try:
            document = _Document.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return Catalogue()
        except (ValidationError, OSError) as error:
            _log.error("the list of images cannot be read, and begins empty: %s: %s", self._path, type(error).__name__)
            self._path.rename(self._path.with_suffix(".damaged"))
            return Catalogue()
        return Catalogue(document.images, document.leaving)

    def write(self, catalogue: Catalogue) -> None:
        """Replace the file.

        Raises:
            OSError: the former file is still there.
        """
        document = _Document(version=1, images=catalogue.entries, leaving=catalogue.leaving)
        temporary = self._path.with_suffix(".new")
        with open(temporary, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(document.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
