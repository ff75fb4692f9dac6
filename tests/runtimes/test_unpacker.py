"""Images of each form are verified part by part, and what is written is exactly what was verified.

The work of the jail, without the jail: `runtimes.images.jail.perform`. The fetcher's program is a script.
"""

import contextlib
import gzip
import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from runtimes.images import sources, workshop
from runtimes.images.fetcher import Fetcher, keep_login
from runtimes.images.jail import JailOrder, Report, Task, perform
from runtimes.images.manifests import RefusedImage
from runtimes.images.sources import Archive, Directory
from runtimes.images.unpacker import FETCHED, TOP, Unpacked, Unpacker
from tests.image_files import DOCKER, OCI, ImageFile, descriptor, digest, entry, tar, tar_of, write

MOST = 1 << 20
MANIFEST = f"{OCI}manifest.v1+json"


def _unpack(tmp_path: Path, archive: bytes, selected: str = "", most: int = MOST) -> Unpacked:
    path, out = tmp_path / "archive", tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
    path.write_bytes(archive)
    out.mkdir()
    fd = os.open(path, os.O_RDONLY)
    try:
        return Unpacker(out, "amd64", most).archive(Archive(fd), selected)
    finally:
        os.close(fd)


def _refused(tmp_path: Path, archive: bytes, match: str | None = None, **options: Any) -> None:
    with pytest.raises(RefusedImage, match=match):
        _unpack(tmp_path, archive, **options)


def test_a_docker_archive_is_unpacked(tmp_path: Path) -> None:
    image = ImageFile([tar_of({"a": b"1"}), tar_of({"b": b"2"})])
    found = _unpack(tmp_path, image.saved("a:1", "a:2"))
    assert (image.id, (), ("a:1", "a:2"), 2) == (found.config, found.digests, found.names, found.layers)
    (out,) = tmp_path.glob("out-*")
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {"config.json": image.config, "layer-000.tar": image.layers[0], "layer-001.tar": image.layers[1]} == written
    assert sum(map(len, image.layers)) == found.size


@pytest.mark.parametrize("others", [[], [ImageFile(architecture="arm64")]], ids=["one platform", "two platforms"])
@pytest.mark.parametrize("compressed", [gzip.compress, zstandard.compress, bytes], ids=["gzip", "zstd", "plain"])
def test_an_oci_archive_is_unpacked(
    tmp_path: Path, others: list[ImageFile], compressed: Callable[[bytes], bytes]
) -> None:
    image = ImageFile()
    found = _unpack(tmp_path, tar_of(image.layout("a", others=others)))
    assert (image.id, ("a",), 1 + len(others)) == (found.config, found.names, len(found.digests))
    packed = compressed(image.layers[0])
    assert image.layers[0] == b"".join(sources.decompressed(iter([packed[:7], packed[7:]]), _kind(packed)))


def _kind(packed: bytes) -> str:
    return sources.compression(packed)


def test_a_layer_that_docker_save_writes_as_a_link_is_found(tmp_path: Path) -> None:
    image = ImageFile([tar_of({"a": b"1"})] * 2)
    config = f"{image.id.removeprefix('sha256:')}.json"
    manifest = [{"Config": config, "RepoTags": ["a:1"], "Layers": ["0/layer.tar", "1/layer.tar"]}]
    archive = tar(
        [
            entry(config, image.config),
            entry("0/layer.tar", image.layers[0]),
            entry("1/layer.tar", type=b"2", linkname="../0/layer.tar"),
            entry("manifest.json", json.dumps(manifest).encode()),
        ]
    )
    assert 2 == _unpack(tmp_path, archive).layers


def test_one_of_several_images_is_selected_by_its_name(tmp_path: Path) -> None:
    one, other = ImageFile(), ImageFile([tar_of({"b": b"2"})])
    files = {"0.tar": one.layers[0], "1.tar": other.layers[0], "0.json": one.config, "1.json": other.config}
    manifest = [{"Config": f"{n}.json", "RepoTags": [f"i:{n}"], "Layers": [f"{n}.tar"]} for n in (0, 1)]
    archive = tar_of(files | {"manifest.json": json.dumps(manifest).encode()})
    assert other.id == _unpack(tmp_path, archive, "i:1").config
    _refused(tmp_path, archive, "several images")
    _refused(tmp_path, archive, "no image named", selected="i:2")


_OTHER = {"type": "layers", "diff_ids": [digest(b"x")]}
_TWO = [tar_of({"a": b"1"}), tar_of({"b": b"1"})]


def _renamed() -> bytes:
    name = f"{'a' * 64}.json"
    manifest = json.dumps([{"Config": name, "Layers": ["0/layer.tar"]}]).encode()
    return tar_of({name: ImageFile().config, "0/layer.tar": ImageFile().layers[0], "manifest.json": manifest})


WRONG: dict[str, tuple[str, bytes]] = {
    "a layer with other content": ("layer 0 has other content", ImageFile(changes={"rootfs": _OTHER}).saved()),
    "a configuration with another name": ("other content than its name", _renamed()),
    "fewer layers than the configuration": ("another number of layers", ImageFile(_TWO).saved(Layers=["0/layer.tar"])),
    "a missing layer": ("has no", ImageFile().saved(Layers=["9/layer.tar"])),
    "another platform": ("linux/arm64", ImageFile(architecture="arm64").saved()),
    "a layer outside of the root": ("outside of the root", ImageFile([tar([entry("../x", b"x")])]).saved()),
    "a device": ("device node", ImageFile([tar([entry("dev/mem", type=b"3", devmajor=1, devminor=1)])]).saved()),
    "no image": ("no image", tar_of({"a": b"b"})),
    "a compressed archive": ("gunzip", gzip.compress(ImageFile().saved())),
    "no tar": ("no complete tar", b"x" * 4096),
    "an entry outside": ("outside of itself", tar([entry("../../x", b"y"), entry("manifest.json", b"[]")])),
    "an absolute entry": ("outside of itself", tar([entry("/x", b"y")])),
    "two entries of one name": ("two entries", tar([entry("manifest.json", b"[]"), entry("./manifest.json", b"[]")])),
    "a device in the archive": ("no file", tar([entry("x", type=b"3")])),
    "a hard link in the archive": ("no file", tar([entry("x", b"y"), entry("z", type=b"1", linkname="x")])),
    "a link out of the archive": ("has no", tar([entry("manifest.json", type=b"2", linkname="../../etc/passwd")])),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_archive_that_lies_is_refused(tmp_path: Path, what: str) -> None:
    match, archive = WRONG[what]
    _refused(tmp_path, archive, "no image" if what == "a link out of the archive" else match)


@pytest.mark.parametrize("part", ["config", "layer", "manifest"])
def test_each_part_of_a_layout_has_the_content_of_its_digest(tmp_path: Path, part: str) -> None:
    image = ImageFile()
    files = image.layout()
    manifest = image.blobs()[0]
    named = {
        "config": image.id,
        "manifest": digest(manifest),
        "layer": json.loads(manifest)["layers"][0]["digest"],
    }[part]
    place = f"blobs/sha256/{named.removeprefix('sha256:')}"
    same = files[place].replace(b", ", b" ,", 1) if part != "layer" else files[place][:9] + b"\x07" + files[place][10:]
    assert (len(same), False) == (len(files[place]), same == files[place])
    for wrong in (same, files[place] + b" ", files[place][:-1], b""):
        _refused(tmp_path, tar_of(files | {place: wrong}))
    _refused(tmp_path, tar_of({name: text for name, text in files.items() if name != place}))


def test_the_size_of_an_image_is_bounded(tmp_path: Path) -> None:
    """Also of one that is small while it is compressed."""
    layer = tar_of({"zeros": bytes(MOST)})
    _refused(tmp_path, ImageFile([layer]).saved(), "larger than")
    packed = tar_of(ImageFile([layer]).layout())
    assert len(packed) < MOST // 2
    _refused(tmp_path, packed, "larger than")
    assert 1 == _unpack(tmp_path, packed, most=2 * MOST).layers


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_layer_that_is_compressed_wrongly_is_refused(kind: str) -> None:
    """Or it is not the layer: zstd gives the part that there is, which has another digest."""
    content = os.urandom(4096)
    whole = (gzip.compress if kind == "gzip" else zstandard.compress)(content)
    for wrong in (whole[:-9], whole[:20], b"x" * 100, whole + b"rubbish"):
        with contextlib.suppress(RefusedImage):
            assert content != b"".join(sources.decompressed(iter([wrong]), kind))
            assert "zstd" == kind
    with pytest.raises(RefusedImage):
        sources.compression(b"BZh91AY")


def test_a_directory_is_read_without_its_links(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    place = tmp_path / "layout"
    (place / "blobs").mkdir(parents=True)
    (place / "link").symlink_to(tmp_path / "secret")
    (place / "up").symlink_to(tmp_path)
    os.mkfifo(place / "pipe")
    found = Directory(place)
    assert [] == [name for name in ("link", "up/secret", "pipe", "blobs", "../secret/.", "none") if found.has(name)]


def _fetched(tmp_path: Path, image: ImageFile, top: bytes | None = None, **changed: bytes) -> Path:
    manifest, blobs = image.blobs(kind=DOCKER)
    files = {name.removeprefix("sha256:"): text for name, text in blobs.items()} | {"manifest.json": manifest}
    write(tmp_path / FETCHED, files | changed)
    (tmp_path / TOP).write_bytes(manifest if top is None else top)
    (tmp_path / "out").mkdir(exist_ok=True)
    return tmp_path


def _unpack_fetched(place: Path, pinned: str = "") -> Unpacked:
    return Unpacker(place / "out", "amd64", MOST).fetched(Directory(place), pinned)


def test_a_fetched_image_is_the_one_that_was_named(tmp_path: Path) -> None:
    image = ImageFile()
    manifest = image.blobs(kind=DOCKER)[0]
    assert (digest(manifest),) == _unpack_fetched(_fetched(tmp_path, image), digest(manifest)).digests
    with pytest.raises(RefusedImage, match="the registry gave"):
        _unpack_fetched(tmp_path, digest(b"another"))
    with pytest.raises(RefusedImage, match="two manifests"):
        _unpack_fetched(_fetched(tmp_path, image, **{"manifest.json": ImageFile([tar_of({"x": b"y"})]).blobs()[0]}))


def test_of_a_fetched_index_the_manifest_is_one_of_it(tmp_path: Path) -> None:
    image, other = ImageFile(), ImageFile([tar_of({"x": b"y"})])
    manifest = image.blobs(kind=DOCKER)[0]
    platform = {"platform": {"os": "linux", "architecture": "amd64"}}
    index = json.dumps({"schemaVersion": 2, "manifests": [descriptor(manifest, MANIFEST) | platform]}).encode()
    found = _unpack_fetched(_fetched(tmp_path, image, index), digest(index))
    assert (digest(index), digest(manifest)) == found.digests
    with pytest.raises(RefusedImage, match="the registry gave"):
        _unpack_fetched(_fetched(tmp_path, other, index), digest(index))


SKOPEO = """#!/bin/sh
echo "$@" >> calls
printf '%s ' "$@" | grep -q canary && exit 9
case "$2" in
inspect) for last; do :; done; cat "${last##*[:@]}.json" ;;
copy) exit 0 ;;
esac
"""


def _fetcher(tmp_path: Path, script: str = SKOPEO) -> Fetcher:
    program = tmp_path / "skopeo"
    program.write_text(script)
    program.chmod(0o755)
    os.chdir(tmp_path)
    return Fetcher(str(program), tmp_path, "amd64", MOST)


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_image_is_fetched_by_the_digest_of_its_manifest(tmp_path: Path) -> None:
    manifest = ImageFile().blobs()[0]
    (tmp_path / "1.json").write_bytes(manifest)
    _fetcher(tmp_path).fetch("r.example.com/a/b:1")
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert "--insecure-policy inspect --raw --no-creds docker://r.example.com/a/b:1" == first
    assert f"docker://r.example.com/a/b@{digest(manifest)} dir:{tmp_path / FETCHED}" == " ".join(second.split()[-2:])
    assert manifest == (tmp_path / TOP).read_bytes()


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        (b'{"schemaVersion": 1, "fsLayers": []}', "schema version 1"),
        (b'{"schemaVersion": 2, "manifests": []}', "from 1 to"),
        (b"nothing", "not JSON"),
        (
            ImageFile().blobs()[0].replace(b'"layers": [{', b'"layers": [{"urls": ["http://10.0.0.1/"], '),
            "another ad",
        ),
    ],
)
def test_an_image_is_not_fetched_if_its_manifest_is_refused(tmp_path: Path, manifest: bytes, why: str) -> None:
    (tmp_path / "1.json").write_bytes(manifest)
    with pytest.raises(RefusedImage, match=why):
        _fetcher(tmp_path).fetch("r.example.com/a/b:1")
    assert 1 == len((tmp_path / "calls").read_text().splitlines())


def test_an_image_that_is_too_large_is_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_bytes(ImageFile().blobs()[0])
    with pytest.raises(RefusedImage, match="larger"):
        replace(_fetcher(tmp_path), most=10).fetch("r.example.com/a/b:1")


def test_the_reason_of_a_failed_fetch_has_no_query(tmp_path: Path) -> None:
    said = """echo 'time="x" level=fatal msg="Get https://s.example.com/a?X-Amz-Signature=canary: no"' >&2; exit 1"""
    with pytest.raises(RefusedImage) as refused:
        _fetcher(tmp_path, f"#!/bin/sh\n{said}\n").fetch("r.example.com/a/b:1")
    assert "canary" not in str(refused.value)
    assert "https://s.example.com/a?..." in str(refused.value)


def test_a_login_is_read_once_and_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtimes.images.fetcher._LOGIN", str(tmp_path / "login"))
    reading, writing = workshop.credentials_pipe()
    os.write(writing, b"x" * 100_000)
    os.close(writing)
    assert 0o400 == stat.S_IMODE(os.stat(keep_login(reading)).st_mode)
    assert 100_000 == (tmp_path / "login").stat().st_size


ORDER = JailOrder(
    *(Task.UNPACK_LAYOUT, (), None, "/", "/work", 1, {}, "/roots", "/usr/bin/skopeo", "", "amd64", None, MOST, MOST)
)


def test_the_work_ends_with_a_report(tmp_path: Path) -> None:
    image = ImageFile()
    write(tmp_path / "source", image.layout())
    report = perform(ORDER, tmp_path)
    assert report.image is not None
    assert ("", image.id) == (report.refused, report.image.config)
    again = perform(ORDER, tmp_path)
    assert again.image is None
    assert "cannot be written" in again.refused


def test_docker_gets_an_archive_without_a_name(tmp_path: Path) -> None:
    """hostd writes it, of plain files; and a link in their place is no file."""
    image = ImageFile([tar_of({"a": b"1"}), tar_of({"b": b"2"})])
    write(tmp_path / "source", image.layout("other/image:1"))
    report = perform(ORDER, tmp_path)
    assert isinstance(report, Report)
    assert report.image is not None
    verified = workshop.Verified(image.id, report.image, tmp_path / "out")
    found = _unpack(tmp_path, b"".join(verified.archive()))
    assert (image.id, (), 2) == (found.config, found.names, found.layers)
    layer = tmp_path / "out" / "layer-001.tar"
    layer.unlink()
    layer.symlink_to("/etc/passwd")
    with pytest.raises(OSError):
        list(verified.archive())
