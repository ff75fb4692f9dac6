"""What of manifests, indexes and configurations is accepted."""

import json
from typing import Any

import pytest

from runtimes.images import manifests
from runtimes.images.manifests import Index, Manifest, RefusedImage
from tests.image_files import DOCKER, OCI, ImageFile, descriptor


def _changed(text: bytes, **changes: Any) -> bytes:
    return json.dumps(json.loads(text) | changes).encode()


def _manifest(kind: str = OCI) -> bytes:
    return ImageFile().blobs(kind=kind)[0]


@pytest.mark.parametrize("kind", [OCI, DOCKER])
def test_a_manifest_of_either_format_is_read(kind: str) -> None:
    found = manifests.parse_manifest(_manifest(kind))
    assert isinstance(found, Manifest)
    assert ["gzip"] == [manifests.compression_of(layer) for layer in found.layers]


def test_a_manifest_of_schema_1_is_refused() -> None:
    old = json.dumps({"schemaVersion": 1, "name": "a", "tag": "b", "fsLayers": [], "history": []}).encode()
    with pytest.raises(RefusedImage, match="schema version 1"):
        manifests.parse_manifest(old)
    with pytest.raises(RefusedImage, match="schema version 1"):
        manifests.parse_manifest(_changed(_manifest(), fsLayers=[]))


LAYER = descriptor(b"a", f"{OCI}layer.v1.tar")


@pytest.mark.parametrize(
    "changes",
    [
        {"schemaVersion": 3},
        {"mediaType": "application/vnd.docker.plugin.v1+json"},
        {"manifests": []},
        {"layers": []},
        {"layers": [LAYER] * (manifests.MOST_LAYERS + 1)},
        {"layers": [LAYER | {"urls": ["http://169.254.169.254/"]}]},
        {"layers": [LAYER | {"mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"}]},
        {"layers": [LAYER | {"digest": "sha512:" + "a" * 128}]},
        {"layers": [LAYER | {"digest": "sha256:../../../etc/passwd"}]},
        {"layers": [LAYER | {"size": -1}]},
        {"layers": [LAYER | {"size": True}]},
        {"layers": "a"},
        {"config": descriptor(b"a", "application/vnd.cncf.helm.config.v1+json")},
        {"config": LAYER | {"mediaType": f"{OCI}config.v1+json", "size": manifests.MOST_CONFIG + 1}},
        {"config": None},
    ],
)
def test_a_manifest_with_anything_else_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RefusedImage):
        manifests.parse_manifest(_changed(_manifest(), **changes))


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"schemaVersion": 2}'])
def test_what_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(RefusedImage):
        manifests.parse_manifest(text)


def _index(*platforms: tuple[str, str] | None) -> Index:
    found = []
    for number, platform in enumerate(platforms):
        one = descriptor(bytes([number]), f"{OCI}manifest.v1+json")
        found.append(one | ({} if platform is None else {"platform": {"os": platform[0], "architecture": platform[1]}}))
    index = manifests.parse_manifest(json.dumps({"schemaVersion": 2, "manifests": found}).encode())
    assert isinstance(index, Index)
    return index


def test_of_an_index_the_host_s_platform_is_chosen() -> None:
    index = _index(("linux", "arm64"), ("windows", "amd64"), ("linux", "amd64"), ("unknown", "unknown"))
    assert index.manifests[2] == manifests.choose(index, "amd64")
    assert index.manifests[0] == manifests.choose(index, "arm64")
    with pytest.raises(RefusedImage, match="linux/riscv64"):
        manifests.choose(index, "riscv64")


def test_of_several_images_one_is_selected_by_its_name() -> None:
    names = ({"org.opencontainers.image.ref.name": name} for name in ("a", "b"))
    found = [
        descriptor(name["org.opencontainers.image.ref.name"].encode(), f"{OCI}manifest.v1+json") | {"annotations": name}
        for name in names
    ]
    index = manifests.parse_manifest(json.dumps({"schemaVersion": 2, "manifests": found}).encode())
    assert isinstance(index, Index)
    assert index.manifests[1] == manifests.choose(index, "amd64", "b")
    with pytest.raises(RefusedImage, match="several"):
        manifests.choose(index, "amd64")
    with pytest.raises(RefusedImage, match="named c"):
        manifests.choose(index, "amd64", "c")


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "arm64"},
        {"os": "windows"},
        {"rootfs": {"type": "base", "diff_ids": []}},
        {"rootfs": {"type": "layers", "diff_ids": []}},
        {"rootfs": {"type": "layers", "diff_ids": ["sha256:1"]}},
        {"rootfs": {"type": "layers", "diff_ids": ["sha256:" + "a" * 64] * 126}},
        {"rootfs": None},
    ],
)
def test_a_configuration_of_something_else_is_refused(changes: dict[str, Any]) -> None:
    config = ImageFile().config
    assert 1 == len(manifests.parse_configuration(config, "amd64").diff_ids)
    with pytest.raises(RefusedImage):
        manifests.parse_configuration(_changed(config, **changes), "amd64")


@pytest.mark.parametrize(
    "text", [b"{}", b"[]", b"[1]", b'[{"Config": "a"}]', b'[{"Config": "a", "Layers": [1]}]', b"x"]
)
def test_a_list_of_saved_images_has_its_form(text: bytes) -> None:
    with pytest.raises(RefusedImage):
        manifests.parse_saved(text, 2)
    with pytest.raises(RefusedImage):
        manifests.parse_saved(json.dumps([{"Config": "a", "Layers": ["b"]}] * 3).encode(), 2)
