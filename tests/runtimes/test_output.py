"""The output of child processes: bounded, in one line each, with their names, also after hostd was killed."""

import asyncio
import fcntl
import itertools
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtimes.process.adopted import Adopted, readable_within
from runtimes.process.output import LINE_CHARACTERS, Output, OutputPace, pipe

_FLOOD = """
import os
for _ in range(100):
    try: os.write(2, (b"x" * 99 + b"\\n") * 10000)
    except BlockingIOError: pass
"""


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what another process writes
            await asyncio.sleep(0.01)


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "hostd.output"]


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


async def _written(data: bytes) -> None:
    """Write `data` and close the end."""
    reading, writing = pipe()
    output = Output("child", reading, OutputPace(100, 0.0), lambda: 0.0)
    os.write(writing, data)
    os.close(writing)
    output.close()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"one\ntwo\n", ["child| one", "child| two"]),
        (b"without an end", ["child| without an end"]),
        (b"\x1b]0;title\x07\x1b[2J\n", [r"child| \x1b]0;title\x07\x1b[2J"]),
        (b"a\rhostd: ERROR: forged\n", [r"child| a\rhostd: ERROR: forged"]),
        ("\u202egnp\x85\u2028\n".encode(), [r"child| \u202egnp\x85\u2028"]),
        (b"\xff\xfe\n", [r"child| \xff\xfe"]),
        ("Größe\n".encode(), ["child| Größe"]),
        (b"y" * 5000 + b"\nz\n", [f"child| {'y' * LINE_CHARACTERS}...", "child| z"]),
        (b"\x00" * 5000 + b"\n", ["child| " + (r"\x00" * LINE_CHARACTERS)[:LINE_CHARACTERS] + "..."]),
    ],
)
async def test_a_line_is_one_line_that_can_be_printed(
    data: bytes, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    await _written(data)
    assert said == _said(caplog)


async def test_a_line_is_cut_however_many_pieces_it_comes_in(caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = pipe()
    output = Output("child", reading, OutputPace(10, 0.0), lambda: 0.0)
    for _ in range(40):
        os.write(writing, b"y" * 500)
        output._take(os.read(reading, 65536))
    assert len(output._partial) <= LINE_CHARACTERS + 1
    os.write(writing, b"\nz\n")
    os.close(writing)
    output.close()
    assert [f"child| {'y' * LINE_CHARACTERS}...", "child| z"] == _said(caplog)


async def test_lines_beyond_the_pace_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    now = itertools.chain([0.0] * 8, itertools.repeat(10.0))
    reading, writing = pipe()
    output = Output("child", reading, OutputPace(2, 0.1), lambda: next(now))
    os.write(writing, b"".join(b"%d\n" % n for n in range(10)))
    os.close(writing)
    output.close()
    assert ["child| 0", "child| 1", "child| (5 lines left out) 7", "child| (2 lines left out)"] == _said(caplog)


async def test_a_child_that_floods_is_not_held_up_and_its_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """The program writes 100 MB without a pause. It ends at once, and the log has as many lines as the rate allows."""
    reading, writing = pipe()
    output = Output("child", reading, OutputPace(20, 0.0))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _FLOOD, stderr=writing)
    os.close(writing)
    assert 0 == await process.wait()
    await _until(lambda: output._fd < 0)
    said = _said(caplog)
    assert 21 == len(said)
    assert "lines left out" in said[-1]


async def test_the_end_of_a_child_ends_its_output(caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = pipe()
    output = Output("child", reading, OutputPace(20, 0.0))
    os.write(writing, b"last words")
    os.close(writing)
    await _until(lambda: output._fd < 0)
    output.close()
    assert ["child| last words"] == _said(caplog)


async def test_a_process_that_outlived_hostd_is_heard_again(caplog: pytest.LogCaptureFixture) -> None:
    """The lines in between are lost, and the program does not end."""
    reading, writing = pipe()
    program = "import logging\nwhile line := input(): logging.error(line); print(line, flush=True)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-c", program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writing
    )
    os.close(writing)
    assert process.stdin is not None and process.stdout is not None
    os.close(reading)
    process.stdin.write(b"lost\n")
    assert b"lost\n" == await process.stdout.readline()
    output = Output.of(Adopted(process.pid, os.pidfd_open(process.pid)), "child", OutputPace(20, 0.0))
    assert output is not None
    process.stdin.write(b"heard\n\n")
    assert 0 == await process.wait()
    await _until(lambda: output._fd < 0)
    assert ["child| ERROR:root:heard"] == _said(caplog)


@pytest.mark.parametrize("kind", ["file", "fifo", "null"])
async def test_only_a_pipe_is_taken_for_output(tmp_path: Path, kind: str) -> None:
    """A compromised daemon can have replaced it with any object."""
    os.mkfifo(tmp_path / "fifo")
    path = Path("/dev/null") if kind == "null" else tmp_path / kind
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT), "wb") as file:
        process = await asyncio.create_subprocess_exec("sleep", "1000", stderr=file)
    try:
        assert Output.of(Adopted(process.pid, os.pidfd_open(process.pid)), "child", OutputPace(1, 0.0)) is None
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("number", [100, 1500])
def test_the_end_of_a_process_is_seen_at_any_number_of_descriptor(number: int) -> None:
    """hostd has several descriptors for each sandbox; `select` refuses those above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    process = subprocess.Popen(["sleep", "1000"])
    low = os.pidfd_open(process.pid)
    high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, number)
    try:
        assert not readable_within(high, 0)
        process.kill()
        assert readable_within(high, 30)
    finally:
        os.close(high)
        os.close(low)
        process.kill()
        process.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
