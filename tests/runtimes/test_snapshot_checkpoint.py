"""A checkpoint of runsc is captured exactly, or refused: each sentence of the table is a fault of a hostile one."""

import io
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtimes.snapshots.checkpoint import capture, check_manifest
from runtimes.snapshots.layer import CaptureRefused, Layer

_PAGE = 4096


def content(size: int, *segments: tuple[int, int, int]) -> bytes:
    return struct.pack("<Q", size) + b"".join(struct.pack("<QQQ", *segment) for segment in segments)


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, data: bytes | None = None, **fields: Any
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = kind
    data = data if data is not None else content(0) if kind == tarfile.REGTYPE else b""
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def archive(*entries: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    data = b""
    for info, body in (entry("./", tarfile.DIRTYPE), *entries):
        data += info.tobuf(format, "utf-8", "surrogateescape") + body + bytes(-len(body) % 512)
    return data + bytes(1024)


def directory(name: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, tarfile.DIRTYPE)


def captured(
    tmp_path: Path, data: bytes, left_out: Callable[[bytes], bool] = lambda path: False, store: bytes = b""
) -> dict[str, tarfile.TarInfo]:
    """Capture an archive; return the members of the layer."""
    (tmp_path / "store").write_bytes(store)
    fd = os.open(tmp_path / "store", os.O_RDONLY)
    out = os.open(tmp_path / "layer.tar", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        layer = Layer(out, 1 << 30)
        capture(io.BytesIO(data), fd, layer, left_out)
        layer.close()
    finally:
        os.close(fd)
        os.close(out)
    with tarfile.open(tmp_path / "layer.tar", errors="surrogateescape") as found:
        return {member.name: member for member in found.getmembers()}


def test_files_links_and_removals_are_captured(tmp_path: Path) -> None:
    """Data comes from its places in the store. runsc writes all removals as links of one."""
    store = b"a" * _PAGE + b"b" * _PAGE
    places = ((_PAGE, 2 * _PAGE, _PAGE), (3 * _PAGE, 4 * _PAGE, 0))
    data = archive(
        directory("./d/"),
        entry(
            "./d/f",
            data=content(3 * _PAGE + 5, *places),
            mode=0o4755,
            uid=7,
        ),
        entry("./hard", tarfile.LNKTYPE, linkname="./d/f"),
        entry("./soft", tarfile.SYMTYPE, linkname="../../x"),
        entry("./pipe", tarfile.FIFOTYPE),
        entry("./gone", tarfile.CHRTYPE),
        entry("./d/gone", tarfile.LNKTYPE, linkname="./gone"),
        entry("./never-written", data=content(_PAGE, (0, _PAGE, 1 << 40))),
    )
    found = captured(tmp_path, data, store=store)
    assert {"d", "d/f", "hard", "soft", "pipe", ".wh.gone", "d/.wh.gone", "never-written"} == found.keys()
    assert (0o4755, 7, "d/f") == (found["d/f"].mode, found["d/f"].uid, found["hard"].linkname)
    with tarfile.open(tmp_path / "layer.tar") as layer:
        file, empty = layer.extractfile("d/f"), layer.extractfile("never-written")
        assert file is not None
        assert empty is not None
        assert bytes(_PAGE) + b"b" * _PAGE + bytes(_PAGE) + b"a" * 5 == file.read()
        assert bytes(_PAGE) == empty.read()


def test_a_file_that_is_left_out_is_captured_under_its_other_name(tmp_path: Path) -> None:
    """A hard link from a captured place to one that is left out keeps the content, and further links their target."""
    data = archive(
        directory("./opt/"),
        entry("./opt/x", data=content(5, (0, _PAGE, 0))),
        entry("./a", tarfile.LNKTYPE, linkname="./opt/x"),
        entry("./b", tarfile.LNKTYPE, linkname="./opt/x"),
    )
    found = captured(tmp_path, data, lambda path: path.startswith(b"opt"), b"hello" + bytes(_PAGE))
    assert ({"a", "b"}, 5, "a") == (found.keys(), found["a"].size, found["b"].linkname)


def test_extended_attributes_and_opaque_directories_are_captured(tmp_path: Path) -> None:
    """Those of users are kept; those of overlays decide what the image shows."""
    item, _ = directory("./d/")
    item.pax_headers = {"SCHILY.xattr.user.a": "1", "SCHILY.xattr.trusted.overlay.opaque": "y"}
    found = captured(tmp_path, archive((item, b"")))
    assert {"d", "d/.wh..wh..opq"} == found.keys()
    assert "1" == found["d"].pax_headers["SCHILY.xattr.user.a"]
    assert not any("overlay" in key for key in found["d"].pax_headers)


def _with_pax(**headers: str) -> bytes:
    item, data = entry("./f")
    item.pax_headers = {key.replace("__", "."): value for key, value in headers.items()}
    return archive((item, data))


def _damaged() -> bytes:
    data = bytearray(archive(entry("./f")))
    data[512 + 100] ^= 1
    return bytes(data)


REFUSED: dict[str, bytes] = {
    "nothing": b"",
    "an archive without its root": archive()[512:],
    "an archive that ends early": archive(entry("./f"))[:-1024],
    "a second archive behind the first": archive() + archive(),
    "one more byte": archive() + b"x",
    "a damaged header": _damaged(),
    "a header of GNU's format": archive(entry("./" + "n" * 200), format=tarfile.GNU_FORMAT),
    "a size as a binary number": archive(entry("./f", size=1 << 40), format=tarfile.GNU_FORMAT),
    "an absolute path": archive(entry("/etc/passwd")),
    "a path upwards": archive(directory("./d/"), entry("./d/../f")),
    "a path of two dots": archive(directory("./../")),
    "a path without its directory": archive(entry("./d/f")),
    "a path below a file": archive(entry("./d"), entry("./d/f")),
    "a path below a link": archive(entry("./d", tarfile.SYMTYPE, linkname="/etc"), entry("./d/passwd")),
    "a path twice": archive(entry("./f"), entry("./f")),
    "a directory that replaces a link": archive(entry("./d", tarfile.SYMTYPE, linkname="/etc"), directory("./d/")),
    "a name that means a removal": archive(entry("./.wh.f")),
    "a name that means an opaque directory": archive(entry("./.wh..wh..opq")),
    "a link to a file that is not there": archive(entry("./l", tarfile.LNKTYPE, linkname="./f")),
    "a link to a directory": archive(directory("./d/"), entry("./l", tarfile.LNKTYPE, linkname="./d")),
    "a link out of the layer": archive(entry("./l", tarfile.LNKTYPE, linkname="/etc/shadow")),
    "a link upwards": archive(entry("./l", tarfile.LNKTYPE, linkname="./../f")),
    "a block device": archive(entry("./sda", tarfile.BLKTYPE, devmajor=8)),
    "a character device": archive(entry("./mem", tarfile.CHRTYPE, devmajor=1, devminor=1)),
    "a sparse file": archive(entry("./f", tarfile.GNUTYPE_SPARSE)),
    "a contiguous file": archive(entry("./f", tarfile.CONTTYPE)),
    "a directory with content": archive(entry("./d/", tarfile.DIRTYPE, b"x")),
    "a removal with content": archive(entry("./f", tarfile.CHRTYPE, b"x")),
    "a file without its size": archive(entry("./f", data=b"")),
    "a file with half a place": archive(entry("./f", data=content(1)[:-1])),
    "places that overlap": archive(entry("./f", data=content(_PAGE, (0, 2 * _PAGE, 0), (_PAGE, 3 * _PAGE, 0)))),
    "places in no order": archive(entry("./f", data=content(_PAGE, (_PAGE, 2 * _PAGE, 0), (0, _PAGE, 0)))),
    "an empty place": archive(entry("./f", data=content(_PAGE, (0, 0, 0)))),
    "a place within a page": archive(entry("./f", data=content(_PAGE, (0, _PAGE, 1)))),
    "a place beyond all files": archive(entry("./f", data=content(_PAGE, (0, _PAGE, (1 << 63) + _PAGE)))),
    "a file larger than any": archive(entry("./f", data=content(1 << 62))),
    "a global header": tarfile.TarInfo.create_pax_global_header({"path": "./x"}) + archive(),
    "a header of an unknown kind": _with_pax(GNU__sparse__size="1"),
    "a redirection to another directory": _with_pax(SCHILY__xattr__trusted__overlay__redirect="/x"),
    "a mark of only metadata": _with_pax(SCHILY__xattr__trusted__overlay__metacopy="x"),
    "an access list that is none": _with_pax(SCHILY__xattr__system__posix_acl_access="x"),
    "capabilities that are none": _with_pax(SCHILY__xattr__security__capability="x"),
    "an owner that is none": archive(entry("./f", uid=(1 << 32) - 1)),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_not_exactly_understood_is_refused(tmp_path: Path, fault: str) -> None:
    """No such entry is passed over, corrected or guessed."""
    with pytest.raises(CaptureRefused):
        captured(tmp_path, REFUSED[fault])


def test_an_archive_without_a_fault_is_accepted(tmp_path: Path) -> None:
    """The control of the table: its forms without their faults."""
    good = archive(directory("./d/"), entry("./d/f"), entry("./l", tarfile.LNKTYPE, linkname="./d/f"))
    assert {"d", "d/f", "l"} == captured(tmp_path, good).keys()
    assert {"f"} == captured(tmp_path, archive(entry("./f"), format=tarfile.USTAR_FORMAT)).keys()
    with pytest.raises(CaptureRefused):
        check_manifest(b"\x08\x02")
    check_manifest(b"\x08\x01\x12")
