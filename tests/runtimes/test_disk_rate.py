"""The files that limit a disk, on stand-ins of both cgroup hierarchies. The effect is in `system/test_disk_rate.py`."""

from pathlib import Path

import pytest

from runtimes.engine.disk_rate import DiskRate

CONTAINER = "c" * 64
RATE = 8_000_000


def legacy(tmp_path: Path) -> tuple[Path, str]:
    """Make the controller of cgroup v1 with a container; return its mount point and the text of mountinfo."""
    (tmp_path / "blkio" / "docker" / CONTAINER).mkdir(parents=True)
    return tmp_path / "blkio", f"1 2 0:1 / {tmp_path}/blkio rw - cgroup cgroup rw,blkio\n"


def written(group: Path) -> list[str]:
    return [(group / f"blkio.throttle.{kind}_bps_device").read_text() for kind in ("read", "write")]


def test_under_v1_the_container_and_the_device_are_limited(tmp_path: Path) -> None:
    """The number is noted before, and the note goes with the limit of the device."""
    root, mountinfo = legacy(tmp_path)
    rate = DiskRate(tmp_path / "notes", RATE, mountinfo)
    rate.limit(CONTAINER, "7:2")
    for group in (root, root / "docker" / CONTAINER):
        assert 2 * [f"7:2 {RATE}"] == written(group)
    assert ["7:2"] == [path.name for path in (tmp_path / "notes").iterdir()]
    rate.clear("7:3")
    assert 2 * [f"7:2 {RATE}"] == written(root)
    rate.clear("7:2")
    assert 2 * ["7:2 0"] == written(root)
    assert [] == list((tmp_path / "notes").iterdir())


def test_a_limit_that_is_not_complete_is_noted(tmp_path: Path) -> None:
    _, mountinfo = legacy(tmp_path)
    rate = DiskRate(tmp_path / "notes", RATE, mountinfo)
    with pytest.raises(FileNotFoundError):
        rate.limit("d" * 64, "7:2")
    assert ["7:2"] == [path.name for path in (tmp_path / "notes").iterdir()]


def test_the_next_start_keeps_what_it_adopts_and_writes_no_other_text(tmp_path: Path) -> None:
    """Also without the setting. A file that is no number is reported and not used."""
    root, mountinfo = legacy(tmp_path)
    former = DiskRate(tmp_path / "notes", RATE, mountinfo)
    for number in ("7:2", "7:3"):
        former.limit(CONTAINER, number)
    (tmp_path / "notes" / "8").touch()
    later = DiskRate(tmp_path / "notes", None, mountinfo)
    assert ("disk limit of 8",) == later.sweep(frozenset({"7:2"}))
    assert {"7:2", "8"} == {path.name for path in (tmp_path / "notes").iterdir()}
    assert 2 * ["7:3 0"] == written(root)


def test_a_limit_that_cannot_be_removed_stays_noted(tmp_path: Path) -> None:
    """The kernel's answer for a device that is gone is in `system/test_disk_rate.py`."""
    root, mountinfo = legacy(tmp_path)
    rate = DiskRate(tmp_path / "notes", RATE, mountinfo)
    rate.limit(CONTAINER, "7:2")
    limit = root / "blkio.throttle.read_bps_device"
    limit.unlink()
    limit.mkdir()
    with pytest.raises(IsADirectoryError):
        rate.clear("7:2")
    assert ("disk limit of 7:2",) == rate.sweep()


def test_without_a_rate_nothing_is_written(tmp_path: Path) -> None:
    root, mountinfo = legacy(tmp_path)
    rate = DiskRate(tmp_path / "notes", None, mountinfo)
    rate.limit(CONTAINER, "7:2")
    rate.clear("7:2")
    assert ((), ["docker"]) == (rate.sweep(), [path.name for path in root.iterdir()])


def test_under_v2_the_containers_group_is_enough(tmp_path: Path) -> None:
    group = tmp_path / "system.slice" / f"docker-{CONTAINER}.scope"
    group.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpu io memory\n")
    rate = DiskRate(tmp_path / "notes", RATE, f"1 2 0:1 / {tmp_path} rw - cgroup2 cgroup2 rw\n")
    rate.limit(CONTAINER, "7:2")
    assert f"7:2 rbps={RATE} wbps={RATE}" == (group / "io.max").read_text()
    assert not (tmp_path / "notes").exists()


@pytest.mark.parametrize("controllers", [None, "cpu memory\n"])
def test_a_host_without_the_controller_is_refused(tmp_path: Path, controllers: str | None) -> None:
    (tmp_path / "cgroup.controllers").write_text(controllers or "")
    mountinfo = "" if controllers is None else f"1 2 0:1 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    with pytest.raises(OSError, match="disk_bandwidth needs the controller"):
        DiskRate(tmp_path / "notes", RATE, mountinfo)
    DiskRate(tmp_path / "notes", None, mountinfo)
