"""The output of a long step is shown only if it fails. A background step's output is shown at its end."""

import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from frontdoor.steps import Failure, call, step

ROOT = Path(__file__).resolve().parents[2]


def test_a_step_shows_its_output_only_when_it_fails(capfd: pytest.CaptureFixture[str]) -> None:
    step("title", "sh", "-c", "echo $WORD; echo more >&2", WORD="seen")
    assert ("", ["run: title ...", "run: title: done in 0 s"]) == _lines(capfd)
    with pytest.raises(Failure, match=r"^title: failed$") as failure:
        step("title", "sh", "-c", "seq 60; exit 3")
    assert 1 == failure.value.status
    assert ("", ["run: title ...", *map(str, range(21, 61))]) == _lines(capfd)


def test_a_call_shows_its_output_and_fails_with_its_status(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Failure) as failure:
        call("sh", "-c", "pwd; exit 3", cwd="/")
    assert (3, ("/\n", "")) == (failure.value.status, capfd.readouterr())
    with pytest.raises(Failure) as failure:
        call("sh", "-c", "kill -KILL $$")
    assert 128 + signal.SIGKILL == failure.value.status


def test_work_beside_shows_its_output_when_it_is_waited_for() -> None:
    """It does not affect other steps, because it is a separate process."""
    done = _program("""
        def work():
            os.environ["WORD"] = "beside"
            call("echo", "printed")
            raise Failure("the reason", 3)

        beside = BackgroundStep("checks", work)
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # it has printed all by now
        print("before", flush=True)
        print(beside.wait(), os.environ.get("WORD"))
    """)
    assert ("before\nprinted\nrun: the reason\n3 None\n", "run: checks:\n") == (done.stdout, done.stderr)


def test_work_that_is_no_longer_wanted_is_ended() -> None:
    done = _program("""
        beside = BackgroundStep("checks", lambda: time.sleep(60) or 0)
        beside.end()
        beside.end()
        print(open(f"/proc/self/task/{os.getpid()}/children").read())
    """)
    assert ("\n", "") == (done.stdout, done.stderr)


def _program(text: str) -> subprocess.CompletedProcess[str]:
    head = "import os, time\nfrom frontdoor.steps import BackgroundStep, Failure, call\n"
    command = [sys.executable, "-c", head + dedent(text)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)


def test_a_program_that_is_become_has_the_signals_of_a_shells_child() -> None:
    """CPython ignores SIGPIPE. The program must not inherit that."""
    program = "from frontdoor.steps import become; become('grep', 'SigIgn', '/proc/self/status')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    ignored = int(done.stdout.split()[1], 16)
    assert [] == [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if ignored >> (number - 1) & 1]


def _lines(capfd: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    out, err = capfd.readouterr()
    return out, err.splitlines()
