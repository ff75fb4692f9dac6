"""A layer with an entry that could reach outside of the sandbox's file system is refused."""

import io
import tarfile
from typing import Any

import pytest

from runtimes.images.layers import check_entries
from runtimes.images.manifests import RefusedImage
from tests.image_files import entry, tar, tar_of

FIFO, DEVICE, BLOCK, HARD, SOFT = (tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE)


def _count(layer: bytes, most: int = 100) -> int:
    return check_entries(io.BytesIO(layer), most)


def test_an_ordinary_layer_is_accepted() -> None:
    entries = [
        entry("./", type=tarfile.DIRTYPE),
        entry("bin/sh", b"x"),
        entry("etc/.wh.old"),
        entry("bin/bash", type=HARD, linkname="bin/sh"),
        entry("etc/mtab", type=SOFT, linkname="/proc/mounts"),
        entry("usr/lib/x", type=SOFT, linkname="../../lib/x"),
        entry("dev/null", type=DEVICE, devmajor=1, devminor=3),
        entry("run/pipe", type=FIFO),
        entry("a" * 300, b"long"),
    ]
    assert len(entries) == _count(tar(entries))
    assert 0 == _count(tar([]))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("../x", {}),
        ("/etc/passwd", {}),
        ("a/../../x", {}),
        ("a/../b", {}),
        ("a", {"type": HARD, "linkname": "../x"}),
        ("a", {"type": HARD, "linkname": "/etc/shadow"}),
        ("a/b", {"type": SOFT, "linkname": "../../x"}),
        ("a", {"type": SOFT, "linkname": ".."}),
        ("dev/sda", {"type": BLOCK, "devmajor": 8, "devminor": 0}),
        ("dev/null", {"type": BLOCK, "devmajor": 1, "devminor": 3}),
        ("dev/mem", {"type": DEVICE, "devmajor": 1, "devminor": 1}),
        ("dev/kvm", {"type": DEVICE, "devmajor": 10, "devminor": 232}),
        ("a", {"type": b"Z"}),
        ("a/" * 3000, {}),
    ],
)
def test_an_entry_that_reaches_outside_is_refused(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RefusedImage):
        _count(tar([entry("ok", b"x"), entry(name, **fields)]))


def test_the_number_of_entries_is_bounded() -> None:
    layer = tar(entry(str(number)) for number in range(6))
    assert 6 == _count(layer, 6)
    with pytest.raises(RefusedImage):
        _count(layer, 5)


@pytest.mark.parametrize("cut", [1, 511, 512, 600, 1023])
def test_an_incomplete_tar_is_refused(cut: int) -> None:
    whole = tar_of({"a": b"x" * 600})
    with pytest.raises(RefusedImage):
        _count(whole[:cut])


def test_what_is_no_tar_is_refused() -> None:
    for text in (b"", b"x" * 2048, b"\x1f\x8b" + bytes(600)):
        with pytest.raises(RefusedImage):
            _count(text)


def test_nothing_follows_the_end() -> None:
    """Another reader of the tar could find entries there."""
    layer = tar_of({"a": b"x"})
    hidden = tar([entry("../../etc/cron.d/x", b"evil")])
    assert 1 == _count(layer + bytes(10240))
    for end in (hidden, bytes(512) + hidden):
        with pytest.raises(RefusedImage, match="behind its end"):
            _count(layer + end)
    broken = bytearray(layer[:1024]) + b"no header".ljust(512, b"x") + hidden
    with pytest.raises(RefusedImage):
        _count(bytes(broken))
