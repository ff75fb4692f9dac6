"""The census of the host: a child of a daemon that has not executed its program yet is not a process of its own."""

import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import pytest

from testbed.census import programs

FORKING = """
import os, sys
child = os.fork()
if not child:
    sys.stdin.readline()
    os.execv("/bin/sleep", ["sleep", "60"])
print(child, flush=True)
os.waitpid(child, 0)
"""


def release(parent: subprocess.Popen[str]) -> None:
    assert parent.stdin
    parent.stdin.write("\n")
    parent.stdin.flush()


@pytest.mark.parametrize(("daemon", "stays"), [("runtimes.hostd", False), ("gateway.zygote", True)])
def test_a_child_counts_when_it_stays_a_fork_and_not_before_it_executes_its_program(
    daemon: str, stays: bool, tmp_path: Path
) -> None:
    command = (sys.executable, "-c", FORKING, daemon, f"{tmp_path}/config.json")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        later = Timer(0.3, release, (parent,))
        try:
            assert {parent.pid, child} == set(programs(tmp_path, time.monotonic()))
            later.start()
            assert ({parent.pid, child} if stays else {parent.pid}) == set(programs(tmp_path, time.monotonic() + 20))
        finally:
            later.cancel()
            subprocess.run(("kill", str(child)), check=False)  # the parent waits for it
