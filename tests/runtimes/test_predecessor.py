"""Leftovers are identified by pid and start time. A run directory has one hostd."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from runtimes.process import predecessor


def test_a_noted_process_is_ended(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    predecessor.note(tmp_path, "auditd", process.pid)
    assert ("auditd",) == predecessor.end_all(tmp_path)
    assert -15 == process.wait(timeout=30)
    assert [] == list(tmp_path.iterdir())


def test_a_number_that_was_used_again_is_left_alone(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        (tmp_path / "auditd.pid").write_text(f"{process.pid} 1\n")
        assert () == predecessor.end_all(tmp_path)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("text", ["", "x y", "1", f"{2**22} 5", "-1 5"])
def test_a_broken_note_ends_no_process(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.pid").write_text(text)
    assert () == predecessor.end_all(tmp_path)
    assert [] == list(tmp_path.iterdir())


def test_a_second_hostd_does_not_get_the_lock(tmp_path: Path) -> None:
    first = predecessor.lock(tmp_path)
    with pytest.raises(BlockingIOError):
        predecessor.lock(tmp_path)
    os.close(first)
    os.close(predecessor.lock(tmp_path))


async def test_only_what_was_started_just_the_same_is_adopted(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    predecessor.note(tmp_path, "auditd", process.pid, "one")
    assert predecessor.take(tmp_path, "auditd", "two") is None
    assert predecessor.find(tmp_path, "auditd") is not None
    adopted = predecessor.take(tmp_path, "auditd", "one")
    assert adopted is not None
    assert (process.pid, None) == (adopted.pid, adopted.returncode)
    waiting = [asyncio.create_task(adopted.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    adopted.kill()
    assert [255, 255] == await asyncio.gather(*waiting)
    assert 255 == adopted.returncode
    await process.wait()
    adopted.kill()
    assert predecessor.take(tmp_path, "auditd", "one") is None
    assert predecessor.find(tmp_path, "auditd") is None


def test_what_is_spared_goes_on(tmp_path: Path) -> None:
    processes = {name: subprocess.Popen(["sleep", "1000"]) for name in ("auditd", "zygote")}
    for name, process in processes.items():
        predecessor.note(tmp_path, name, process.pid)
    assert ("zygote",) == predecessor.end_all(tmp_path, ("auditd",), 0.0)
    assert processes["auditd"].poll() is None
    assert ("auditd",) == predecessor.end_all(tmp_path)
    for process in processes.values():
        process.wait(timeout=30)
