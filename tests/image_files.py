"""Makes images as files: Docker archives, and OCI layouts and archives, good ones and wrong ones."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OCI = "application/vnd.oci.image."
DOCKER = "application/vnd.docker."


def digest(text: bytes) -> str:
    return f"sha256:{hashlib.sha256(text).hexdigest()}"


def entry(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """Return an entry of a tar; `fields` are those of `TarInfo`."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mode = 0o755
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def tar(entries: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """Return a tar."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for info, content in entries:
            archive.addfile(info, io.BytesIO(content) if content else None)
    return file.getvalue()


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """Return a tar of plain files."""
    return tar(entry(name, content) for name, content in files.items())


@dataclass
class ImageFile:
    """One image, before it is written in a format. `changes` replaces members of its configuration."""

    layers: list[bytes] = field(default_factory=lambda: [tar_of({"hello": b"hello\n"})])
    architecture: str = "amd64"
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> bytes:
        ids = [digest(layer) for layer in self.layers]
        document = {"architecture": self.architecture, "os": "linux", "config": {"Env": ["PATH=/bin", "TOKEN=s3cret"]}}
        return json.dumps(document | {"rootfs": {"type": "layers", "diff_ids": ids}} | self.changes).encode()

    @property
    def id(self) -> str:
        return digest(self.config)

    def saved(self, *names: str, **changes: Any) -> bytes:
        """Return the archive of `docker save`; `changes` replaces members of its manifest."""
        config = f"{digest(self.config).removeprefix('sha256:')}.json"
        files = {config: self.config} | {f"{number}/layer.tar": layer for number, layer in enumerate(self.layers)}
        layers = [f"{number}/layer.tar" for number in range(len(self.layers))]
        manifest = [{"Config": config, "RepoTags": list(names) or None, "Layers": layers} | changes]
        return tar_of(files | {"manifest.json": json.dumps(manifest).encode()})

    def blobs(self, *, kind: str = OCI, compress: bool = True) -> tuple[bytes, dict[str, bytes]]:
        """Return the manifest, and all blobs by digest."""
        packed = [gzip.compress(layer, mtime=0) if compress else layer for layer in self.layers]
        if kind == OCI:
            types = f"{OCI}manifest.v1+json", f"{OCI}config.v1+json", f"{OCI}layer.v1.tar" + ("+gzip" * compress)
        else:
            types = (
                f"{DOCKER}distribution.manifest.v2+json",
                f"{DOCKER}container.image.v1+json",
                f"{DOCKER}image.rootfs.diff.tar" + (".gzip" * compress),
            )
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": types[0],
                "config": descriptor(self.config, types[1]),
                "layers": [descriptor(layer, types[2]) for layer in packed],
            }
        ).encode()
        return manifest, {digest(one): one for one in (self.config, manifest, *packed)}

    def layout(self, *names: str, others: Iterable["ImageFile"] = ()) -> dict[str, bytes]:
        """Return the files of an OCI layout with this image, and with `others` as other platforms of an index."""
        manifest, blobs = self.blobs()
        top = descriptor(manifest, f"{OCI}manifest.v1+json")
        if others := list(others):
            entries = []
            for image in (*others, self):
                text, more = image.blobs()
                blobs |= more
                platform = {"os": "linux", "architecture": image.architecture}
                entries.append(descriptor(text, f"{OCI}manifest.v1+json") | {"platform": platform})
            index = json.dumps({"schemaVersion": 2, "mediaType": f"{OCI}index.v1+json", "manifests": entries}).encode()
            blobs[digest(index)] = index
            top = descriptor(index, f"{OCI}index.v1+json")
        listed = [top | {"annotations": {"org.opencontainers.image.ref.name": name}} for name in names] or [top]
        files = {
            "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
            "index.json": json.dumps({"schemaVersion": 2, "manifests": listed}).encode(),
        }
        return files | {f"blobs/sha256/{name.removeprefix('sha256:')}": text for name, text in blobs.items()}


def descriptor(text: bytes, kind: str) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest(text), "size": len(text)}


def write(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Write files below a directory, and return it."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory
