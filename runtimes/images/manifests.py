"""Manifests, indexes and configurations of images: what of them is accepted, and how much. Pure.

Formats: Docker's image manifest V2 schema 2, its manifest list, and OCI's image manifest and index. Schema 1 is
refused: its layers have no sizes, and its digest does not cover what a client executes.

- A text that is checked here was hashed by the caller: a digest is verified before its content is read.
- Layers on other servers (`urls`) are refused: their addresses come from the manifest.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Final

MOST_MANIFEST: Final = 4 << 20
MOST_CONFIG: Final = 1 << 20
MOST_LAYERS: Final = 125
"""Docker stacks 125 layers, and the sandbox's own on top."""
_MOST_MANIFESTS: Final = 1024
_MOST_SIZE: Final = 1 << 50
_DOCKER: Final = "application/vnd.docker."
_OCI: Final = "application/vnd.oci.image."
_INDEXES: Final = frozenset((f"{_DOCKER}distribution.manifest.list.v2+json", f"{_OCI}index.v1+json"))
_MANIFESTS: Final = frozenset((f"{_DOCKER}distribution.manifest.v2+json", f"{_OCI}manifest.v1+json"))
_CONFIGS: Final = frozenset((f"{_DOCKER}container.image.v1+json", f"{_OCI}config.v1+json"))
_LAYERS: Final = {
    f"{_DOCKER}image.rootfs.diff.tar": "",
    f"{_DOCKER}image.rootfs.diff.tar.gzip": "gzip",
    f"{_DOCKER}image.rootfs.diff.tar.zstd": "zstd",
    f"{_OCI}layer.v1.tar": "",
    f"{_OCI}layer.v1.tar+gzip": "gzip",
    f"{_OCI}layer.v1.tar+zstd": "zstd",
}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_REF_NAME: Final = "org.opencontainers.image.ref.name"
_IMAGE_NAME: Final = "io.containerd.image.name"


class RefusedImage(Exception):
    """The image is refused; `str()` is a sentence for the operator. It quotes no more than a digest or a short name."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A reference to content by digest and size, in bytes."""

    digest: str
    size: int
    kind: str
    names: tuple[str, ...] = ()
    platform: tuple[str, str] | None = None
    """Operating system and architecture."""

    @property
    def hex(self) -> str:
        """The digest without `sha256:`."""
        return self.digest.removeprefix("sha256:")


@dataclass(frozen=True, slots=True)
class Manifest:
    """One image: its configuration, and its layers from the lowest one on."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """Several manifests, of which a platform selects one."""

    manifests: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class ImageConfiguration:
    """What the configuration of an image says about its content."""

    architecture: str
    diff_ids: tuple[str, ...]
    """The digests of the layers, uncompressed."""


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object of a text.

    Raises:
        RefusedImage: it is none.
    """
    try:
        found = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        raise RefusedImage(f"the {what} is not JSON") from None
    if not isinstance(found, dict):
        raise RefusedImage(f"the {what} is no object")
    return found


def parse_manifest(text: bytes) -> Manifest | Index:
    """Return what the bytes of a manifest say.

    Raises:
        RefusedImage: they are no manifest of an accepted format.
    """
    found = parse_object(text, "manifest")
    if found.get("schemaVersion") == 1 or "fsLayers" in found:
        raise RefusedImage("the manifest has schema version 1, which is not accepted")
    if found.get("schemaVersion") != 2:
        raise RefusedImage("the manifest has an unknown schema version")
    kind = found.get("mediaType") or (f"{_OCI}index.v1+json" if "manifests" in found else f"{_OCI}manifest.v1+json")
    if not isinstance(kind, str):
        raise RefusedImage("the manifest has no media type")
    if kind in _INDEXES and "layers" not in found and "config" not in found:
        return Index(_descriptors(found.get("manifests"), _MOST_MANIFESTS, "manifests"))
    if kind not in _MANIFESTS or "manifests" in found:
        raise RefusedImage("the manifest has a media type that is not accepted")
    config = _descriptor(found.get("config"))
    layers = _descriptors(found.get("layers"), MOST_LAYERS, "layers")
    if config.kind not in _CONFIGS:
        raise RefusedImage("the manifest is of something else than an image")
    if config.size > MOST_CONFIG:
        raise RefusedImage(f"the configuration is larger than {MOST_CONFIG} bytes")
    if wrong := [layer for layer in layers if layer.kind not in _LAYERS]:
        raise RefusedImage(f"layer {wrong[0].digest} has a media type that is not accepted")
    return Manifest(config, layers)


def choose(index: Index, architecture: str, selected: str = "") -> Descriptor:
    """Return the manifest of an index for Linux on `architecture`.

    Args:
        selected: the image's name in the index, where there are several images.

    Raises:
        RefusedImage: there is none, or more than one.
    """
    linux = [one for one in index.manifests if one.kind in _MANIFESTS | _INDEXES]
    fitting = [one for one in linux if one.platform in (None, ("linux", architecture))]
    if selected:
        fitting = [one for one in fitting if selected in one.names]
    if not fitting:
        named = f" named {selected[:100]}" if selected else ""
        raise RefusedImage(f"there is no image{named} for linux/{architecture}")
    exact = [one for one in fitting if one.platform is not None] or fitting
    if len({one.digest for one in exact}) > 1 and (exact[0].platform is None or not _variants(exact)):
        raise RefusedImage("there are several images: select one by its name")
    return exact[0]


def _variants(found: list[Descriptor]) -> bool:
    """Return whether these are variants of one image: they have no names that differ."""
    return len({one.names for one in found}) == 1 and not found[0].names


def parse_configuration(text: bytes, architecture: str) -> ImageConfiguration:
    """Return the relevant part of a configuration.

    Raises:
        RefusedImage: it is no configuration, or is for another platform.
    """
    found = parse_object(text, "configuration")
    system, processor = found.get("os", "linux"), found.get("architecture")
    if system != "linux" or processor != architecture:
        named = "/".join(str(part)[:20] for part in (system, processor))
        raise RefusedImage(f"the image is for {named}, not for linux/{architecture}")
    root = found.get("rootfs")
    if not isinstance(root, dict) or root.get("type") != "layers" or not isinstance(root.get("diff_ids"), list):
        raise RefusedImage("the configuration does not list its layers")
    ids = root["diff_ids"]
    if not 1 <= len(ids) <= MOST_LAYERS or not all(isinstance(one, str) and _DIGEST.fullmatch(one) for one in ids):
        raise RefusedImage(f"an image has from 1 to {MOST_LAYERS} layers")
    return ImageConfiguration(architecture, tuple(ids))


@dataclass(frozen=True, slots=True)
class Saved:
    """One image of a Docker archive: the names of its parts in the archive."""

    config: str
    layers: tuple[str, ...]
    names: tuple[str, ...]


def parse_saved(text: bytes, most: int) -> tuple[Saved, ...]:
    """Return the images that `manifest.json` of a Docker archive lists.

    Raises:
        RefusedImage: it is no such list, or has more than `most` images.
    """
    try:
        found = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        raise RefusedImage("manifest.json is not JSON") from None
    if not isinstance(found, list) or not 1 <= len(found) <= most:
        raise RefusedImage(f"an archive has from 1 to {most} images")
    return tuple(map(_saved, found))


def _saved(found: object) -> Saved:
    if not isinstance(found, dict) or not isinstance(found.get("Config"), str):
        raise RefusedImage("manifest.json names no configuration")
    layers, names = _texts(found.get("Layers")), _texts(found.get("RepoTags") or [])
    if not 1 <= len(layers) <= MOST_LAYERS:
        raise RefusedImage(f"an image has from 1 to {MOST_LAYERS} layers")
    return Saved(found["Config"], layers, names)


def _texts(found: object) -> tuple[str, ...]:
    if not isinstance(found, list) or len(found) > 256 or not all(isinstance(one, str) for one in found):
        raise RefusedImage("manifest.json has something else than a list of names")
    return tuple(found)


def compression_of(layer: Descriptor) -> str:
    """Return the compression of a layer of a parsed manifest: `gzip`, `zstd`, or an empty text."""
    return _LAYERS[layer.kind]


def _descriptors(found: object, most: int, what: str) -> tuple[Descriptor, ...]:
    if not isinstance(found, list) or not 1 <= len(found) <= most:
        raise RefusedImage(f"{what}: from 1 to {most}")
    return tuple(_descriptor(one) for one in found)


def _descriptor(found: object) -> Descriptor:
    if not isinstance(found, dict):
        raise RefusedImage("a descriptor is no object")
    digest, size, kind = found.get("digest"), found.get("size"), found.get("mediaType")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise RefusedImage("a descriptor has no SHA-256")
    if type(size) is not int or not 0 <= size <= _MOST_SIZE or not isinstance(kind, str):
        raise RefusedImage(f"the descriptor of {digest} has no size or no media type")
    if found.get("urls"):
        raise RefusedImage(f"{digest} is to be fetched from another address than the registry's")
    return Descriptor(digest, size, kind, _names(found.get("annotations")), _platform(found.get("platform")))


def _names(found: object) -> tuple[str, ...]:
    if not isinstance(found, dict):
        return ()
    named = (found.get(key) for key in (_REF_NAME, _IMAGE_NAME))
    return tuple(name for name in named if isinstance(name, str) and len(name) <= 256)


def _platform(found: object) -> tuple[str, str] | None:
    if not isinstance(found, dict):
        return None
    system, architecture = found.get("os"), found.get("architecture")
    if not isinstance(system, str) or not isinstance(architecture, str):
        raise RefusedImage("a platform has no operating system or no architecture")
    return system, architecture
