"""Verifies an image and writes it in one form: `config.json` and uncompressed layers. Runs in a jail (`jail`).

- Each part is hashed while it is read, and compared with the digest that names it: configuration and layers with the
  manifest, the uncompressed layers with the configuration.
- The total size is bounded. A layer that grows above the bound ends the work.
- Docker gets only what was written here. It reads no manifest, compression or name of the archive.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from runtimes.images import manifests, sources
from runtimes.images.layers import MOST_ENTRIES, check_entries
from runtimes.images.manifests import Descriptor, Index, Manifest, RefusedImage
from runtimes.images.sources import Source

_MOST_IMAGES: Final = 256
CONFIG: Final = "config.json"
_LAYOUT, _INDEX, _SAVED = "oci-layout", "index.json", "manifest.json"
TOP: Final = "top.json"
"""The manifest, or index, that the registry gave for the name."""
FETCHED: Final = "image"
"""The directory of the fetched image: its manifest, and each blob under its digest."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A verified image.

    Attributes:
        config: the digest of its configuration, which is Docker's id of the image.
        digests: the digest that its name had in the registry or layout, and that of its manifest.
        names: the names that the archive gives it.
        layers: the number of layers that were written.
        size: the bytes of all of them.
    """

    config: str
    digests: tuple[str, ...]
    names: tuple[str, ...]
    layers: int
    size: int


class Unpacker:
    """Writes one image into a directory, at most `most` bytes."""

    def __init__(self, out: Path, architecture: str, most: int) -> None:
        self._out = out
        self._architecture = architecture
        self._most = most
        self._size = self._entries = 0

    def archive(self, source: Source, selected: str) -> Unpacked:
        """Unpack an image of a Docker archive, an OCI archive or an OCI layout; `selected` names one of several.

        Raises:
            RefusedImage: it is not accepted.
        """
        if source.has(_LAYOUT) and source.has(_INDEX):
            return self._layout(source, selected)
        if source.has(_SAVED):
            return self._saved(source, selected)
        raise RefusedImage("this is no image: neither `docker save` nor OCI wrote it")

    def fetched(self, source: Source, pinned: str) -> Unpacked:
        """Unpack what `fetcher` has fetched; `pinned` is the digest that the operator named, or empty.

        Raises:
            RefusedImage: it is not accepted.
        """
        top = sources.read(source, TOP, manifests.MOST_MANIFEST)
        digest = digest_of(top)
        if pinned not in ("", digest):
            raise RefusedImage(f"the registry gave {digest} for {pinned}")
        text = sources.read(source, f"{FETCHED}/{_SAVED}", manifests.MOST_MANIFEST)
        found = manifests.parse_manifest(top)
        if isinstance(found, Index):
            expected = manifests.choose(found, self._architecture).digest
            if expected != digest_of(text):
                raise RefusedImage(f"the registry gave {digest_of(text)} for {expected}")
        elif digest != digest_of(text):
            raise RefusedImage("the registry gave two manifests for one name")
        manifest = manifests.parse_manifest(text)
        if not isinstance(manifest, Manifest):
            raise RefusedImage("an index names another index")
        prefix = f"{FETCHED}/"
        return self._write(source, manifest, lambda one: prefix + one.hex, (digest, digest_of(text)), ())

    def _layout(self, source: Source, selected: str) -> Unpacked:
        text = sources.read(source, _INDEX, manifests.MOST_MANIFEST)
        index = manifests.parse_manifest(text)
        if not isinstance(index, Index):
            raise RefusedImage("the layout's index is no index")
        chosen = manifests.choose(index, self._architecture, selected)
        digests = [chosen.digest]
        found = manifests.parse_manifest(self._blob(source, chosen))
        if isinstance(found, Index):
            inner = manifests.choose(found, self._architecture)
            digests.append(inner.digest)
            found = manifests.parse_manifest(self._blob(source, inner))
        if not isinstance(found, Manifest):
            raise RefusedImage("an index names an index that names another one")
        return self._write(source, found, _blob_name, tuple(digests), chosen.names)

    def _blob(self, source: Source, wanted: Descriptor) -> bytes:
        text = sources.read(source, _blob_name(wanted), manifests.MOST_MANIFEST)
        if digest_of(text) != wanted.digest:
            raise RefusedImage(f"{wanted.digest} has other content than its digest says")
        return text

    def _write(
        self,
        source: Source,
        manifest: Manifest,
        name: Callable[[Descriptor], str],
        digests: tuple[str, ...],
        names: tuple[str, ...],
    ) -> Unpacked:
        with source.open(name(manifest.config)) as stream:
            config = b"".join(_verified(stream, manifest.config))
        diff_ids = manifests.parse_configuration(config, self._architecture).diff_ids
        if len(diff_ids) != len(manifest.layers):
            raise RefusedImage("the manifest has another number of layers than the configuration")
        for number, (layer, diff_id) in enumerate(zip(manifest.layers, diff_ids, strict=True)):
            with source.open(name(layer)) as stream:
                self._layer(number, _verified(stream, layer), manifests.compression_of(layer), diff_id)
        return self._finish(config, tuple(dict.fromkeys(digests)), names, len(diff_ids))

    def _saved(self, source: Source, selected: str) -> Unpacked:
        images = manifests.parse_saved(sources.read(source, _SAVED, manifests.MOST_MANIFEST), _MOST_IMAGES)
        fitting = [one for one in images if not selected or selected in one.names]
        if len(fitting) != 1:
            what = "several images: select one by its name" if fitting else f"no image named {selected[:100]!a}"
            raise RefusedImage(f"the archive has {what}")
        saved = fitting[0]
        config = sources.read(source, saved.config, manifests.MOST_CONFIG)
        stem = saved.config.rpartition("/")[2].removesuffix(".json")
        if len(stem) == 64 and f"sha256:{stem}" != digest_of(config):
            raise RefusedImage("the configuration has other content than its name says")
        diff_ids = manifests.parse_configuration(config, self._architecture).diff_ids
        if len(diff_ids) != len(saved.layers):
            raise RefusedImage("the archive has another number of layers than the configuration")
        for number, (layer, diff_id) in enumerate(zip(saved.layers, diff_ids, strict=True)):
            with source.open(layer) as stream:
                first = stream.read(sources.CHUNK)
                chunks = itertools.chain((first,), _chunks(stream))
                self._layer(number, chunks, sources.compression(first), diff_id)
        return self._finish(config, (), saved.names, len(diff_ids))

    def _layer(self, number: int, chunks: Iterator[bytes], kind: str, diff_id: str) -> None:
        digest = hashlib.sha256()
        with open(self._out / layer_name(number), "xb+") as file:
            for piece in sources.decompressed(chunks, kind):
                self._size += len(piece)
                if self._size > self._most:
                    raise RefusedImage(f"the image is larger than {self._most} bytes")
                digest.update(piece)
                file.write(piece)
            for _ in chunks:  # bytes behind the end of the compressed stream count for the digest
                pass
            if f"sha256:{digest.hexdigest()}" != diff_id:
                raise RefusedImage(f"layer {number} has other content than the configuration says")
            file.flush()
            file.seek(0)
            self._entries += check_entries(file, MOST_ENTRIES - self._entries)

    def _finish(self, config: bytes, digests: tuple[str, ...], names: tuple[str, ...], layers: int) -> Unpacked:
        (self._out / CONFIG).write_bytes(config)
        return Unpacked(digest_of(config), digests, names, layers, self._size)


def layer_name(number: int) -> str:
    """Return the file of a written layer."""
    return f"layer-{number:03}.tar"


def digest_of(text: bytes) -> str:
    """Return the digest of a text, as a registry writes it."""
    return f"sha256:{hashlib.sha256(text).hexdigest()}"


def _blob_name(wanted: Descriptor) -> str:
    return f"blobs/sha256/{wanted.hex}"


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    while chunk := stream.read(sources.CHUNK):
        yield chunk


def _verified(stream: BinaryIO, wanted: Descriptor) -> Iterator[bytes]:
    """Yield the bytes of a part. At its end, compare size and digest.

    Raises:
        RefusedImage: they differ from the descriptor's.
    """
    digest, size = hashlib.sha256(), 0
    for chunk in _chunks(stream):
        size += len(chunk)
        if size > wanted.size:
            break
        digest.update(chunk)
        yield chunk
    if size != wanted.size or f"sha256:{digest.hexdigest()}" != wanted.digest:
        raise RefusedImage(f"{wanted.digest} has other content than its digest says")
