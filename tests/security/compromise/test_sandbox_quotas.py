"""A hostile sandbox uses up each quota that the kernel counts by user; another sandbox and the host still have theirs.

The control runs the same program twice on the host, under one user that no other process has: the second run finds the
quota used up. The module tests `runtimes/process/cgroups.py`.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opensandbox.sync.sandbox import SandboxSync

from runtimes.engine.user_namespace import TERMINALS
from testbed.stack import Stack
from tests.conftest import representatives
from tests.security.compromise import quotas
from tests.system.test_create_and_delete import until

pytestmark = [pytest.mark.system, pytest.mark.images]

PROGRAM = Path(quotas.__file__)
REFUSED = {"asynchronous_io": "ENOSYS", "keys": "EPERM", "fanotify_groups": "EPERM"}
"""Quotas that a sandbox on runc cannot use, with the error.

They are quotas of the whole host, which no user namespace divides, and interfaces that no honest program needs.
"""
OF_THE_HOST = {"asynchronous_io", "terminals"}
"""Quotas that the whole host shares. The control must not use them up on this machine."""
IN_EACH_RUN = ("inotify_watches", "pending_signals", "pipe_pages", "processes")
"""Quotas of four kinds. The layer that divides them, an identity for each sandbox, is the same for all."""
STRANGER = 700009999
_TAKE = """
rm -f /tmp/taken; setsid python3 /tmp/quotas.py take {quota} /tmp/taken </dev/null >/dev/null 2>&1 &
echo $! >/tmp/group; until [ -e /tmp/taken ]; do sleep 0.05; done; cat /tmp/taken
"""
_LEAVE = "kill -KILL -- -$(cat /tmp/group)"


@pytest.fixture(scope="module", params=("runc", pytest.param("runsc", marks=pytest.mark.extended)), name="pair")
def _pair(request: pytest.FixtureRequest, stack: Stack) -> Iterator[tuple[SandboxSync, SandboxSync, str]]:
    made: list[SandboxSync] = []
    try:
        for memory in ("2Gi", "256Mi"):
            made.append(stack.create(request.param, resource={"memory": memory, "cpu": "1"}))
            made[-1].files.write_file("/tmp/quotas.py", PROGRAM.read_text())
        yield made[0], made[1], request.param
    finally:
        for sandbox in made:
            sandbox.kill()
            sandbox.close()


def said(sandbox: SandboxSync, command: str) -> str:
    execution = sandbox.commands.run(command)
    return "".join(message.text for message in (*execution.logs.stdout, *execution.logs.stderr)).strip()


def tried(sandbox: SandboxSync, quota: str) -> str:
    return said(sandbox, f"python3 /tmp/quotas.py try {quota}")


def tried_here(quota: str) -> str:
    """Try the quota on the host, as root without the capabilities that override quotas."""
    bounded = ["setpriv", "--inh-caps=-all", "--bounding-set=-sys_admin,-sys_resource"]
    return subprocess.run(
        [*bounded, sys.executable, str(PROGRAM), "try", quota], capture_output=True, text=True, check=True
    ).stdout.strip()


def _has_keys(uid: int) -> bool:
    lines = Path("/proc/key-users").read_text().splitlines()
    return any(int(line.partition(":")[0]) == uid for line in lines)


def as_stranger(*words: str) -> list[str]:
    user = [f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
    return ["setpriv", *user, "/usr/bin/python3", "-c", PROGRAM.read_text(), *words]


def tried_as_stranger(quota: str) -> str:
    return subprocess.run(as_stranger("try", quota), capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("quota", representatives(quotas.QUOTAS, *IN_EACH_RUN))
def test_what_a_sandbox_takes_of_a_quota_is_still_there_for_another_and_for_the_host(
    quota: str, pair: tuple[SandboxSync, SandboxSync, str]
) -> None:
    hostile, neighbour, runtime = pair
    refused = REFUSED.get(quota) if runtime == "runc" else None
    before = tried(neighbour, quota)
    try:
        taken = int(said(hostile, _TAKE.format(quota=quota)))
        own, after, here = tried(hostile, quota), tried(neighbour, quota), tried_here(quota)
    finally:
        said(hostile, _LEAVE)

    assert "ok" == here
    assert before == after
    if runtime == "runc":
        assert (refused or "ok") == after
        assert (refused is None) == (taken > 0)
        assert "ok" != own  # the sandbox has used up its own quota


def test_terminals_are_bounded_for_each_sandbox(pair: tuple[SandboxSync, SandboxSync, str]) -> None:
    """The limit `kernel.pty.max` applies to the whole host."""
    hostile, _, runtime = pair
    if runtime == "runsc":  # its terminals belong to its own kernel
        assert "ok" == tried(hostile, "terminals")
        return
    taken = int(said(hostile, _TAKE.format(quota="terminals")))
    said(hostile, _LEAVE)
    assert 0 < taken <= TERMINALS


@pytest.mark.parametrize("quota", representatives(sorted(set(quotas.QUOTAS) - OF_THE_HOST), *IN_EACH_RUN))
def test_under_one_user_the_second_program_finds_nothing(quota: str, directory: Path) -> None:
    first = tried_as_stranger(quota)
    assert until(lambda: not _has_keys(STRANGER))  # the kernel frees keys some time after the end of their process
    place = directory / f"taken-{quota}"
    place.mkdir()
    os.chown(place, STRANGER, STRANGER)
    with subprocess.Popen(as_stranger("take", quota, f"{place}/file"), start_new_session=True) as taking:
        try:
            subprocess.run(["sh", "-c", f"until [ -e {place}/file ]; do sleep 0.05; done"], check=True, timeout=120)
            second = tried_as_stranger(quota)
        finally:
            os.killpg(taking.pid, signal.SIGKILL)
    assert "ok" == first
    assert "ok" != second
