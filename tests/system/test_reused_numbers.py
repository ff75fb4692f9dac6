"""The removal of a sandbox on runsc ends no process that has got the number of one of its ended processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtimes.engine.wrappers import write_wrappers
from tests.stacks import scratch

pytestmark = pytest.mark.system

OWN_NUMBERS = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def _removed(place: Path, *command: str) -> Any:
    program = [sys.executable, "-m", "tests.system.reused_numbers", os.environ["SALLYPORT_RUNSC"], str(place), *command]
    done = subprocess.run([*OWN_NUMBERS, *program], capture_output=True, text=True, check=False, timeout=120)
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


def test_a_removal_ends_no_process_that_has_the_number_of_an_ended_one() -> None:
    """The control is runsc itself, without the shim: it kills both processes."""
    runsc = os.environ["SALLYPORT_RUNSC"]
    with scratch("control") as place:
        assert [0, [-signal.SIGKILL, -signal.SIGKILL], False] == _removed(place, runsc)
    with scratch("numbers") as place:
        wrapped = write_wrappers(place, place / "plans", sys.executable, {"runsc": runsc})["sallyport-runsc"]["path"]
        assert [0, [-signal.SIGTERM, -signal.SIGTERM], False] == _removed(place, wrapped)
