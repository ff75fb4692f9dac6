"""`testbed/docker_exec.py`, with programs that run here instead of in a container."""

import subprocess
from collections.abc import Sequence

import pytest

from testbed.docker_exec import OutputLostError, execute


class Lossy:
    """Run programs, and keep only the first bytes of the output of the first ones, as a busy Docker can."""

    def __init__(self, losses: int, kept: int) -> None:
        self.losses, self.kept, self.runs = losses, kept, 0

    def __call__(self, command: Sequence[str]) -> tuple[int, str]:
        self.runs += 1
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout[: self.kept if self.runs <= self.losses else None] + done.stderr


@pytest.mark.parametrize("kept", [0, 3, 7])
def test_a_program_whose_output_is_lost_runs_again(kept: int) -> None:
    lossy = Lossy(2, kept)
    assert (0, "a  b\n") == execute(lossy, ["printf", "%s\\n", "a  b"])
    assert 3 == lossy.runs


def test_output_that_is_always_lost_is_an_error() -> None:
    lossy = Lossy(3, 0)
    with pytest.raises(OutputLostError, match="printf: status 0, output ''"):
        execute(lossy, ["printf", "a"])
    assert 3 == lossy.runs


@pytest.mark.parametrize("status", [0, 1, 137])
def test_a_program_runs_once_and_its_status_is_kept(status: int) -> None:
    lossy = Lossy(0, 0)
    assert (status, "said") == execute(lossy, ["sh", "-c", f"printf said; exit {status}"])
    assert 1 == lossy.runs


def test_output_without_a_last_newline_and_errors_are_whole() -> None:
    assert (0, "said\nerror\n") == execute(Lossy(0, 0), ["sh", "-c", "echo said; echo error >&2"])
    assert (0, "") == execute(Lossy(0, 0), ["true"])
