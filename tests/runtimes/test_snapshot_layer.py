"""A layer has exactly the entries that were added, as an independent reader of tar finds them."""

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes.snapshots.layer import MOST_PATH, Attributes, CaptureRefused, Layer, TooLarge, checked_path

PLAIN = Attributes(0o644, 0, 0, 0)
_NAMES = st.binary(min_size=1, max_size=300).filter(
    lambda name: not set(name) & set(b"/\0") and name not in (b".", b"..") and not name.startswith(b".wh.")
)


def written(path: Path, most: int = 1 << 30) -> Layer:
    return Layer(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), most)


def members(path: Path) -> dict[bytes, tarfile.TarInfo]:
    with tarfile.open(path, errors="surrogateescape") as archive:
        return {os.fsencode(member.name): member for member in archive.getmembers()}


@given(
    name=_NAMES,
    target=st.binary(min_size=1, max_size=300).filter(lambda text: b"\0" not in text),
    mode=st.integers(0, 0o7777),
    uid=st.integers(0, 2**32 - 2),
    mtime=st.integers(-(2**40), 2**62),
    value=st.binary(max_size=400),
    content=st.binary(max_size=2000),
)
def test_every_name_number_and_value_is_exact(
    tmp_path_factory: pytest.TempPathFactory,
    name: bytes,
    target: bytes,
    mode: int,
    uid: int,
    mtime: int,
    value: bytes,
    content: bytes,
) -> None:
    """Names and targets of any bytes, large owners, times with nanoseconds, binary extended attributes."""
    path = tmp_path_factory.getbasetemp() / "layer.tar"
    layer = written(path)
    attributes = Attributes(mode, uid, uid, mtime, {b"user.x": value})
    layer.file(name, attributes, len(content), [(0, [content])] if content else [])
    layer.symlink(name + b"2", attributes, target)
    digest = layer.close()
    data = path.read_bytes()
    assert (f"sha256:{hashlib.sha256(data).hexdigest()}", len(data)) == (digest, layer.bytes)
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as archive:
        file, link = archive.getmembers()
        assert (name, mode, uid, uid) == (os.fsencode(file.name), file.mode, file.uid, file.gid)
        found = archive.extractfile(file)
        assert found is not None
        assert content == found.read()
    assert (name + b"2", target) == (os.fsencode(link.name), os.fsencode(link.linkname))
    whole, _, rest = file.pax_headers["mtime"].removeprefix("-").partition(".")
    assert abs(mtime) == int(whole) * 10**9 + int(rest)
    assert (mtime < 0) == file.pax_headers["mtime"].startswith("-")
    assert b"SCHILY.xattr.user.x=" + value + b"\n" in data


def test_holes_are_zeros_in_the_layer_and_listed(tmp_path: Path) -> None:
    """Also a hole at the end, and a file without data. The layer's own file has holes there."""
    path = tmp_path / "layer.tar"
    layer = written(path)
    layer.file(b"f", PLAIN, 3 << 20, [(1 << 20, [b"x" * 4096])])
    layer.file(b"g", PLAIN, 1 << 20, [])
    layer.file(b"small", PLAIN, 100, [(50, [b"y"])])
    layer.close()
    assert {b"f": [(0, 1 << 20), ((1 << 20) + 4096, (2 << 20) - 4096)], b"g": [(0, 1 << 20)]} == layer.holes
    with tarfile.open(path) as archive:
        found = archive.extractfile("f")
        assert found is not None
        assert bytes(1 << 20) + b"x" * 4096 + bytes((2 << 20) - 4096) == found.read()
    assert path.stat().st_blocks * 512 < 1 << 20


def test_removed_names_and_opaque_directories_have_the_marks_of_layers(tmp_path: Path) -> None:
    """As every reader of OCI layers expects them."""
    layer = written(tmp_path / "layer.tar")
    layer.directory(b"d", PLAIN)
    layer.opaque(b"d")
    layer.whiteout(b"d/gone")
    layer.whiteout(b"top")
    layer.fifo(b"pipe", PLAIN)
    layer.file(b"one", PLAIN, 0, [])
    layer.link(b"two", PLAIN, b"one")
    layer.close()
    found = members(tmp_path / "layer.tar")
    assert {b"d", b"d/.wh..wh..opq", b"d/.wh.gone", b".wh.top", b"pipe", b"one", b"two"} == found.keys()
    assert (True, True) == (found[b"pipe"].isfifo(), found[b"two"].islnk())
    assert "one" == found[b"two"].linkname


@pytest.mark.parametrize(
    "path",
    [
        b"",
        b"/a",
        b"a/",
        b"a//b",
        b"..",
        b"a/../b",
        b"./a",
        b"a\0b",
        b".wh.a",
        b"a/.wh..wh..opq",
        b"a" * (MOST_PATH + 1),
    ],
)
def test_a_path_that_is_not_plain_is_refused(path: bytes) -> None:
    """No path leads out of the layer, means a removal, or is longer than the kernel takes."""
    with pytest.raises(CaptureRefused):
        checked_path(path)


def test_a_layer_over_its_limit_is_refused(tmp_path: Path) -> None:
    """Zeros of holes count, and are not written."""
    layer = written(tmp_path / "layer.tar", 1 << 20)
    with pytest.raises(TooLarge):
        layer.file(b"f", PLAIN, 1 << 50, [])
    assert (tmp_path / "layer.tar").stat().st_size <= 1 << 20


def test_parts_of_a_file_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Parts that overlap, or continue after the size of the file."""
    for extents in ([(0, [b"xx"])], [(0, [b"x"]), (0, [b"x"])]):
        with pytest.raises(CaptureRefused):
            written(tmp_path / "layer.tar").file(b"f", PLAIN, 1, extents)
