"""A workload that exceeds its sandbox's memory is ended, or its sandbox is. The sandbox's state then has the reason.

It tests `runtimes/process/cgroups.py`.
"""

import time
from collections.abc import Iterator

import pytest
from opensandbox.models.execd import RunCommandOpts
from opensandbox.sync.sandbox import SandboxSync

from testbed.stack import Stack

pytestmark = pytest.mark.system

SECONDS = 60.0
EAT = "python3 -c 'held = []\nwhile True: held.append(bytearray(1 << 20))'"


@pytest.fixture(name="small")
def _small(stack: Stack, runtime: str) -> Iterator[SandboxSync]:
    sandbox = stack.create(runtime, resource={"memory": "64Mi", "cpu": "1", "disk": "64Mi"})
    try:
        yield sandbox
    finally:
        sandbox.kill()
        sandbox.close()


def said(sandbox: SandboxSync, command: str) -> str:
    return "".join(message.text for message in sandbox.commands.run(command).logs.stdout).strip()


def test_beyond_its_memory_the_workload_ends_or_the_sandbox_is_failed_with_the_reason(
    small: SandboxSync, runtime: str
) -> None:
    """runc's kernel ends the process. runsc is one process for the host, and ends as a whole."""
    assert "here" == said(small, "echo here")
    if runtime == "runc":
        assert "137" == said(small, f"{EAT}; echo $?")
        assert "here" == said(small, "echo here")
        return
    small.commands.run(EAT, opts=RunCommandOpts(background=True))
    deadline = time.monotonic() + SECONDS
    while (status := small.get_info().status).state == "Running" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ("Failed", "OOM") == (status.state, status.reason)
