"""The start of a daemon beside other servers, whose namespaces appear and disappear while it leaves them.

It tests `runtimes/process/enter.py`.
"""

import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtimes.net import netns
from runtimes.process.daemon_groups import DaemonGroups
from runtimes.process.supervisor import InheritedDescriptors, Program, start_process

pytestmark = pytest.mark.system

CAP_SYS_RESOURCE = 24
_ENTER = """
import os, sys
sys.path.insert(0, {root!r})
from runtimes.process import enter
os.unshare(os.CLONE_NEWNS)
enter._mount("none", "/", "", enter._MS_REC | enter._MS_PRIVATE)
before = enter._namespaces()
print(len(before), flush=True)
sys.stdin.readline()
enter._forget_namespaces()
print(len(enter._namespaces()), flush=True)
"""


def test_a_namespace_that_goes_meanwhile_does_not_stop_a_daemon(tmp_path: Path) -> None:
    """Its owner deletes it between the reading of the mount table and the unmount, for twenty daemons at once."""
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for number in range(8):
                netns.create(tmp_path / f"{number}-gw", {})
            for number in range(8):
                netns.delete(tmp_path / f"{number}-gw")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        root = str(Path(__file__).resolve().parents[2])
        daemons = [
            subprocess.Popen(
                [sys.executable, "-c", _ENTER.format(root=root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(20)
        ]
        ends = [daemon.communicate("\n", timeout=60) for daemon in daemons]
    finally:
        stop.set()
        thread.join()

    assert [] == [errors for _, errors in ends if errors]
    assert {"0"} == {printed.split()[1] for printed, _ in ends}
    assert any(int(printed.split()[0]) for printed, _ in ends)


async def test_a_daemon_that_takes_more_memory_than_it_may_is_ended_and_another_is_not(tmp_path: Path) -> None:
    """The kernel enforces the limit from the first instruction on. A group is used again with another limit."""
    groups = DaemonGroups(str(tmp_path))
    ends = []
    for memory in (512 << 20, 64 << 20, 512 << 20):
        grows = (sys.executable, "-c", "held = b'x' * (200 << 20)")
        program = Program("grows", grows, 0, memory=memory)
        group = groups.create(program.name, program.memory)
        process, output = await start_process(sys.executable, program, group, InheritedDescriptors())
        ends.append(await process.wait())
        output.close()
    groups.sweep()
    assert ([0, -9, 0], False) == (ends, group.exists())


async def test_a_daemon_with_secrets_may_lock_its_memory(tmp_path: Path) -> None:
    """Root raises the limit if it may (CAP_SYS_RESOURCE). Otherwise the daemon starts with the limit that there is."""
    groups = DaemonGroups(str(tmp_path))
    mine = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capabilities = int(Path("/proc/self/status").read_text().split("CapEff:\t")[1].split()[0], 16)
    raised = (resource.RLIM_INFINITY,) * 2 if capabilities >> CAP_SYS_RESOURCE & 1 else mine
    for locks, expected in ((True, raised), (False, mine)):
        told = tmp_path / f"told-{locks}"
        report = f"import resource; open({str(told)!r}, 'w').write(str(resource.getrlimit(resource.RLIMIT_MEMLOCK)))"
        program = Program("locks", (sys.executable, "-c", report), 0, memory=512 << 20, locks=locks)
        group = groups.create(program.name, program.memory)
        process, output = await start_process(sys.executable, program, group, InheritedDescriptors())
        assert 0 == await process.wait()
        output.close()
        assert str(expected) == told.read_text()
    groups.sweep()
