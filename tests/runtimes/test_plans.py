"""The directory of launch plans, and the files that launches depend on."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from runtimes.kept_files import KeptFiles
from runtimes.plans import Plans

ONE = "a" * 64


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    path = tmp_path / "plans"
    path.mkdir(mode=0o700)
    return path


def _claim(directory: Path) -> Path:
    return (directory / f"{ONE}.json").rename(directory / f"{ONE}.claimed")


@pytest.mark.system
def test_a_plan_is_right_before_and_after_it_is_claimed(directory: Path) -> None:
    plans = Plans(directory)
    plans.write(ONE, {"container": ONE})
    assert () == plans.deviations()
    _claim(directory)
    assert () == plans.deviations()
    plans.forget(ONE)
    assert [] == list(directory.iterdir())
    assert () == plans.deviations()


@pytest.mark.system
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.write_text("{}"), "was changed"),
        (lambda path: path.unlink(), "is gone"),
        (lambda path: path.chmod(0o644), "is not root's alone"),
        (lambda path: path.with_suffix(".json").write_bytes(path.read_bytes()), "can be used again"),
        (lambda path: path.rename(path.with_suffix(".json")), "can be used again"),
    ],
)
def test_a_claimed_plan_may_not_change(directory: Path, change: Callable[[Path], object], reason: str) -> None:
    plans = Plans(directory)
    plans.write(ONE, {"container": ONE})
    path = _claim(directory)
    assert () == plans.deviations()
    change(path)
    (deviation,) = plans.deviations()
    assert (ONE, f"the launch plan {reason}") == (deviation.container, deviation.reason)


@pytest.mark.system
def test_what_is_foreign_is_removed(directory: Path) -> None:
    plans = Plans(directory)
    (directory / f"{'b' * 64}.json").write_text("{}")
    (directory / "link").symlink_to("/etc/passwd")
    assert 2 == len(plans.deviations())
    assert [] == list(directory.iterdir())
    assert () == plans.deviations()


@pytest.mark.system
@pytest.mark.parametrize("how", ["replaced", "link", "open", "gone"])
def test_into_a_changed_directory_no_plan_is_written(directory: Path, how: str) -> None:
    plans = Plans(directory)
    moved = directory.with_name("moved")
    if how == "open":
        directory.chmod(0o755)
    else:
        directory.rename(moved)
    if how == "replaced":
        directory.mkdir(mode=0o700)
    if how == "link":
        directory.symlink_to(moved)
    assert plans.directory_changed()
    with pytest.raises(OSError):
        plans.write(ONE, {})
    assert None is plans.deviations()[0].container


def test_a_kept_file_may_be_touched_but_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "wrapper"
    path.write_text("one")
    kept = KeptFiles([path])
    os.utime(path, (1, 1))
    assert () == kept.changed()
    path.chmod(0o777)
    assert ("wrapper",) == kept.changed()
    path.chmod(0o644)
    assert () == kept.changed()
    path.write_text("two")
    assert ("wrapper",) == kept.changed()
    path.write_text("one")
    assert () == kept.changed()
    path.unlink()
    assert ("wrapper",) == kept.changed()
