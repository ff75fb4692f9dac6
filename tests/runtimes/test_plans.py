"""The directory of launch plans, and the files that launches depend on."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from runtimes.engine.plans import Plans
from runtimes.process.owned_files import OwnedFiles

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
        (lambda path: path.symlink_to(path.rename(path.parents[1] / "moved")), "cannot be read: Too many levels"),
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
    assert ONE == deviation.container
    assert deviation.reason.startswith(f"the launch plan {reason}")


@pytest.mark.system
def test_the_claimed_plan_of_a_former_hostd_is_kept_as_it_is(directory: Path) -> None:
    Plans(directory).write(ONE, {"container": ONE})
    path = _claim(directory)
    plans = Plans(directory)
    plans.adopt(ONE)
    assert () == plans.deviations()
    path.write_text("{}")
    assert ["the launch plan was changed"] == [deviation.reason for deviation in plans.deviations()]
    path.unlink()
    plans = Plans(directory)
    plans.adopt(ONE)
    assert ["the launch plan is gone"] == [deviation.reason for deviation in plans.deviations()]
    plans.forget(ONE)
    plans.forget(ONE)  # Also without a plan.
    assert () == plans.deviations()


@pytest.mark.system
def test_what_is_foreign_is_removed(directory: Path) -> None:
    plans = Plans(directory)
    (directory / f"{'b' * 64}.json").write_text("{}")
    (directory / "link").symlink_to("/etc/passwd")
    (directory / "empty").mkdir()
    found = plans.deviations()
    assert 3 == len(found)
    assert all(deviation.reason.endswith("(removed)") for deviation in found)
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
    reasons = {"open": "the directory is not root's alone", "gone": "the directory cannot be read: No such file"}
    assert plans.directory_changed().startswith(reasons.get(how, "the directory was replaced"))
    with pytest.raises(OSError):
        plans.write(ONE, {})
    assert None is plans.deviations()[0].container


def test_a_kept_file_may_be_touched_but_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "wrapper"
    path.write_text("one")
    kept = OwnedFiles([path])
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
