"""The image of a snapshot: the layers of the sandbox's image and one more, with the configuration of that image.

The archive has the form of `docker save`. Docker has the lower layers already, so they are only named. The
configuration is the image's, not the container's: no variable, argument or label of the sandbox is in it.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtimes.engine.docker import (
    INSTANCE_LABEL,
    SNAPSHOT_BYTES_LABEL,
    SNAPSHOT_LABEL,
    BaseImage,
    snapshot_name,
)

MOST_LAYERS = 100
"""Docker's overlay2 has at most 128 layers, and a container needs two of them."""
_BLOCK = 512
_CHUNK = 1 << 20
_COPIED = ("User", "ExposedPorts", "Env", "Entrypoint", "Cmd", "Volumes", "WorkingDir", "StopSignal", "Shell")


@dataclass(frozen=True, slots=True)
class CapturedLayer:
    """A captured layer: its file, digest and size in bytes."""

    path: Path
    digest: str
    bytes: int


def archive(instance: str, snapshot: str, base: BaseImage, layer: CapturedLayer) -> Iterator[bytes]:
    """Return the archive of a snapshot's image, in pieces."""
    labels = {
        SNAPSHOT_LABEL: snapshot,
        INSTANCE_LABEL: instance,
        SNAPSHOT_BYTES_LABEL: str(layer.bytes),
    }
    document: dict[str, Any] = {
        "architecture": base.architecture,
        "os": base.system,
        "created": "1970-01-01T00:00:00Z",
        "config": {**{name: base.config[name] for name in _COPIED if name in base.config}, "Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [*base.layers, layer.digest]},
        "history": [{"created_by": "sallyport snapshot"} for _ in (*base.layers, layer.digest)],
    }
    config = json.dumps(document).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    layers = [f"{digest.removeprefix('sha256:')}/layer.tar" for digest in (*base.layers, layer.digest)]
    manifest = [{"Config": name, "RepoTags": [snapshot_name(instance, snapshot)], "Layers": layers}]
    yield from _entry(name, config)
    yield from _entry("manifest.json", json.dumps(manifest).encode())
    yield _header(layers[-1], layer.bytes)
    with layer.path.open("rb") as file:
        while data := file.read(_CHUNK):
            yield data
    yield bytes(-layer.bytes % _BLOCK) + bytes(2 * _BLOCK)


def _entry(name: str, content: bytes) -> Iterator[bytes]:
    yield _header(name, len(content)) + content + bytes(-len(content) % _BLOCK)


def _header(name: str, size: int) -> bytes:
    length = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    head = name.encode().ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + length + b"00000000000\0"
    head = (head + b" " * 8 + b"0" + bytes(100) + b"ustar  \0").ljust(_BLOCK, b"\0")
    return head[:148] + b"%06o\0 " % sum(head) + head[156:]
