"""Directories of probes: those of a killed process are removed by the next probe, with their mounts."""

import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtimes.checks.scratch import scratch

HOLDER = """
import pathlib, subprocess, sys, time
from runtimes.checks.scratch import scratch
with scratch(pathlib.Path(sys.argv[1])) as directory:
    for place in [directory / name for name in sys.argv[2:]]:
        place.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
    print(directory, flush=True)
    time.sleep(60)
"""


def held(parent: Path, *mounts: str) -> tuple[subprocess.Popen[str], Path]:
    """Start a process that holds a directory in `parent`, and return it with the directory."""
    command = [sys.executable, "-c", HOLDER, str(parent), *mounts]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def mount_points(parent: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"{parent.name}/" in line]


def test_a_directory_is_removed_at_its_end_and_after_an_error(tmp_path: Path) -> None:
    with scratch(tmp_path) as directory:
        (directory / "file").touch()
        assert 0o700 == directory.stat().st_mode & 0o777
    with pytest.raises(KeyError), scratch(tmp_path):
        raise KeyError
    assert [] == os.listdir(tmp_path)


def test_a_directory_in_use_stays_and_that_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    (other := tmp_path / "sallyport-other").mkdir()
    process, first = held(tmp_path)
    try:
        with scratch(tmp_path) as second:
            assert {first, second, other} == set(tmp_path.iterdir())
    finally:
        kill(process)
    assert {first, other} == set(tmp_path.iterdir())
    with scratch(tmp_path) as third:
        assert {third, other} == set(tmp_path.iterdir())
    assert {other} == set(tmp_path.iterdir())


def test_a_link_with_the_name_of_a_directory_is_not_followed(tmp_path: Path) -> None:
    (kept := tmp_path / "kept").mkdir()
    (tmp_path / "sallyport-doctor-link").symlink_to(kept)
    with scratch(tmp_path):
        pass
    assert kept.is_dir()


def test_a_directory_that_another_process_removes_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def removed(prefix: str, dir: Path) -> str:
        made.append(real(prefix=prefix, dir=dir))
        if len(made) < 3:
            os.rmdir(made[-1])
        return made[-1]

    real = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", removed)
    with scratch(tmp_path) as directory:
        assert [3, made[-1]] == [len(made), str(directory)]


def test_many_at_once_do_not_remove_each_other(tmp_path: Path) -> None:
    def use(number: int) -> bool:
        with scratch(tmp_path) as directory:
            (directory / "file").write_text(str(number))
            return directory.is_dir() and str(number) == (directory / "file").read_text()

    with ThreadPoolExecutor(16) as threads:
        assert [True] * 400 == list(threads.map(use, range(400)))
    assert [] == os.listdir(tmp_path)


@pytest.mark.system
@pytest.mark.parametrize("name", ["plain", "with a blank"])
def test_the_mounts_of_a_killed_process_are_removed_too(tmp_path: Path, name: str) -> None:
    (parent := tmp_path / name).mkdir()
    process, directory = held(parent, "outer", "outer/inner")
    kill(process)
    assert directory.is_dir() and 2 == len([line for line in mount_points(tmp_path) if "tmpfs" in line])
    with scratch(parent):
        assert not directory.exists()
    assert [] == mount_points(tmp_path)
