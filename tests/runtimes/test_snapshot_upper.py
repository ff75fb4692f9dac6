"""An upper directory is captured with the ids of the sandbox, and nothing in it leads elsewhere."""

import os
import socket
import stat
import struct
import tarfile
from pathlib import Path

import pytest

from runtimes.snapshots.attributes import ACCESS_LISTS, CAPABILITY, is_opaque, kept
from runtimes.snapshots.capture import chosen
from runtimes.snapshots.layer import CaptureRefused, Layer
from runtimes.snapshots.upper import capture

BASE = min(os.getuid(), os.getgid())


def captured(root: Path, base: int = BASE, left_out: tuple[str, ...] = ()) -> dict[str, tarfile.TarInfo]:
    """Capture a directory; return the members of the layer."""
    path = root.parent / "layer.tar"
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        layer = Layer(out, 1 << 30)
        capture(fd, layer, base, chosen(list(left_out)))
        layer.close()
    finally:
        os.close(fd)
        os.close(out)
    with tarfile.open(path, errors="surrogateescape") as found:
        return {member.name: member for member in found.getmembers()}


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def test_every_kind_of_file_is_captured(root: Path) -> None:
    """A socket is left out, and hides what the image has there. A whiteout is one in the layer too."""
    (root / "d").mkdir()
    (root / "d" / "f").write_bytes(b"content")
    os.link(root / "d" / "f", root / "e")
    os.symlink("/etc/shadow", root / "link")
    os.symlink("loop", root / "loop")
    os.mkfifo(root / "pipe")
    os.mknod(root / "gone", stat.S_IFCHR)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(root / "socket"))
    found = captured(root)
    assert {"d", "d/f", "e", "link", "loop", "pipe", ".wh.gone", ".wh.socket"} == found.keys()
    assert ("/etc/shadow", "d/f") == (found["link"].linkname, found["e"].linkname)
    assert {os.getuid() - BASE} == {member.uid for name, member in found.items() if ".wh." not in name}


def test_names_of_any_bytes_are_captured(root: Path) -> None:
    """Newlines, bytes that are not UTF-8, and names of 255 bytes."""
    names = [b"new\nline", b"\xff\xfe", b"n" * 255, b" ", b"-rf", b"*"]
    for name in names:
        Path(os.fsdecode(os.path.join(os.fsencode(root), name))).write_bytes(name)
    assert set(map(os.fsdecode, names)) == captured(root).keys()


def test_holes_stay_holes(root: Path, tmp_path: Path) -> None:
    """The layer's own file has them too."""
    with (root / "sparse").open("wb") as file:
        file.seek(32 << 20)
        file.write(b"x" * 4096)
        file.truncate(64 << 20)
    found = captured(root)
    assert 64 << 20 == found["sparse"].size
    assert (tmp_path / "layer.tar").stat().st_blocks * 512 < 1 << 20


def test_mounts_of_sallyport_and_what_is_below_them_are_left_out(root: Path) -> None:
    """A name that only begins like one of them is captured."""
    for path in ("opt/opensandbox/launch", "etc/hosts", "etc/hosts2", "dev/x", "proc/x", "devices/x", ".dockerenv"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"x")
    found = captured(root, left_out=("/etc/hosts",))
    assert {"opt", "etc", "etc/hosts2", "devices", "devices/x"} == found.keys()


def test_an_owner_outside_of_the_range_is_refused(root: Path) -> None:
    """One below it and one above it."""
    (root / "f").write_bytes(b"")
    for base in (os.getuid() + 1, os.getuid() - 65536):
        with pytest.raises(CaptureRefused):
            captured(root, base)


def test_a_name_that_means_a_removal_is_refused(root: Path) -> None:
    """As a file and as a directory."""
    (root / ".wh.passwd").mkdir()
    with pytest.raises(CaptureRefused, match=r"\.wh\."):
        captured(root)


def test_ids_in_attributes_are_those_of_the_sandbox() -> None:
    """Capabilities lose their user namespace, access lists have other ids, attributes of the host are dropped."""

    def mapped(number: int) -> int:
        return number - 1000

    third = struct.pack("<IIIIII", 0x03000001, 0x400, 0, 0, 0, 1000)
    entries = struct.pack("<IHHIHHI", 2, 1, 7, 0xFFFFFFFF, 2, 6, 1005)
    found = kept(
        {
            b"user.x": b"1",
            CAPABILITY: third,
            ACCESS_LISTS[0]: entries,
            b"security.selinux": b"x",
            b"trusted.overlay.origin": b"x",
        },
        mapped,
    )
    assert {
        b"user.x": b"1",
        CAPABILITY: struct.pack("<IIIII", 0x02000001, 0x400, 0, 0, 0),
        ACCESS_LISTS[0]: struct.pack("<IHHIHHI", 2, 1, 7, 0xFFFFFFFF, 2, 6, 5),
    } == found
    with pytest.raises(CaptureRefused):
        kept({CAPABILITY: third}, lambda number: number)


def test_marks_of_overlayfs_that_are_not_known_are_refused() -> None:
    """Only an opaque directory has a meaning in the layer."""
    assert (True, False) == (is_opaque({b"trusted.overlay.opaque": b"y"}), is_opaque({b"trusted.overlay.origin": b"x"}))
    for name, value in ((b"redirect", b"/x"), (b"metacopy", b""), (b"opaque", b"x"), (b"overlay.opaque", b"y")):
        with pytest.raises(CaptureRefused):
            is_opaque({b"trusted.overlay." + name: value})
