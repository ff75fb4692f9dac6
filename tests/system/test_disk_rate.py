"""The limit of a sandbox's disk: what its processes wait for, and what the kernel writes later from the page cache.

A limit is judged by a ratio: the same work in the same sandbox with the limit, and after the host has lifted it.
It tests `runtimes/engine/disk_rate.py`.
"""

import ctypes
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opensandbox.sync.sandbox import SandboxSync

from runtimes.engine.disk import Disks, mount_points
from runtimes.process.cgroups import container_group, controller_mounts
from testbed.stack import Stack
from tests.conftest import ON_RUNC
from tests.stacks import beside

pytestmark = [pytest.mark.system, pytest.mark.images]  # one lane: limits in the root group are the whole host's

RATE = 8_000_000
SIZE = 32 << 20
FASTER = 3
PATIENCE = 120.0
WAIT = f"""
import json, mmap, os, time
data = os.urandom(1 << 20)
def timed(work):
    began = time.monotonic()
    work()
    return time.monotonic() - began
def write():
    fd = os.open("/file", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for _ in range({SIZE >> 20}):
        os.write(fd, data)
    os.fsync(fd)
    os.close(fd)
def read():
    fd = os.open("/file", os.O_RDONLY | os.O_DIRECT)
    into = mmap.mmap(-1, 1 << 20)
    while os.readv(fd, [into]):
        pass
    os.close(fd)
print(json.dumps([timed(write), timed(read)]))
"""
LATER = f"data = bytes(range(256)) * 4096; file = open('/later', 'wb'); [file.write(data) for _ in range({SIZE >> 20})]"


class Slow(Stack):
    """A Sallyport that limits the disks of its sandboxes."""

    @property
    def settings(self) -> str:
        return super().settings.replace("[sallyport]\n", f"[sallyport]\ndisk_bandwidth = {RATE}\n", 1)


@pytest.fixture(scope="module", name="slow")
def _slow() -> Iterator[Stack]:
    before = limited(legacy())  # those of another server on this host
    with beside(Slow, "disk") as stack:
        yield stack
        assert set() == set(limited(legacy())) - set(before)


def legacy() -> Path:
    """Return the mount point of cgroup v1's controller, on which these tests run."""
    _, found = controller_mounts(Path("/proc/self/mountinfo").read_text())
    return found["blkio"]


def limited(group: Path) -> list[str]:
    """Return the loop devices that a group limits."""
    files = [group / f"blkio.throttle.{kind}_bps_device" for kind in ("read", "write")]
    return [line for file in files for line in file.read_text().splitlines() if line.startswith("7:")]


@contextmanager
def sandbox_of(stack: Stack, runtime: str) -> Iterator[SandboxSync]:
    sandbox = stack.create(runtime, policy=None, resource={"memory": "1Gi", "cpu": "1", "disk": "512Mi"})
    try:
        yield sandbox
    finally:
        sandbox.kill()
        sandbox.close()


def wait_for_hostd(stack: Stack) -> None:
    """Wait until the next hostd serves. `serve` has answered in the meantime."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            stack.sandboxes()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return


def number_of(stack: Stack, sandbox: SandboxSync) -> str:
    found = Disks(stack.state / "hostd" / "disks").number(sandbox.id)
    assert found is not None
    return found


def lift(stack: Stack, sandbox: SandboxSync, number: str) -> None:
    for group in (legacy(), container_group(legacy(), stack.container(sandbox.id))):
        for kind in ("read", "write"):
            (group / f"blkio.throttle.{kind}_bps_device").write_text(f"{number} 0")


def ran(sandbox: SandboxSync, program: str) -> str:
    sandbox.files.write_file("/program.py", program)
    execution = sandbox.commands.run("python3 /program.py")
    assert execution.error is None, execution.error
    return "".join(message.text for message in execution.logs.stdout)


def test_processes_wait_for_their_disk(slow: Stack) -> None:
    """For `fsync` and for direct reads, on runc. gVisor keeps what its processes write in memory of its own."""
    with sandbox_of(slow, "runc") as sandbox:
        with_limit = json.loads(ran(sandbox, WAIT))
        lift(slow, sandbox, number_of(slow, sandbox))
        without = json.loads(ran(sandbox, WAIT))
    for slow_seconds, fast_seconds in zip(with_limit, without, strict=True):
        assert slow_seconds > FASTER * fast_seconds
        assert slow_seconds > SIZE / RATE / 2


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_the_page_cache_is_written_at_the_rate_too(slow: Stack, runtime: str) -> None:
    """What no process waits for. The control group of cgroup v1 alone does not bound it."""
    with sandbox_of(slow, runtime) as sandbox:
        number = number_of(slow, sandbox)
        seconds = []
        for place in range(3):  # The first writes to a new disk are slow without a limit, too.
            if place == 2:
                lift(slow, sandbox, number)
            flush(number)
            # A new file each time: one that is replaced would be written when it is closed.
            ran(sandbox, LATER.replace("/later", f"/later{place}"))
            seconds.append(flush(number))
    _, with_limit, without = seconds
    assert with_limit > FASTER * without, seconds
    assert with_limit > SIZE / RATE / 2, seconds


def flush(number: str) -> float:
    """Write the page cache of a device. Return the seconds."""
    fd = os.open(mount_points({number})[0], os.O_RDONLY)
    try:
        began = time.monotonic()
        assert 0 == ctypes.CDLL(None).syncfs(fd)
        return time.monotonic() - began
    finally:
        os.close(fd)


def test_a_removal_waits_for_no_limit_and_leaves_none(slow: Stack, runtime: str) -> None:
    """Although the page cache is full. The device number can belong to another disk at once."""
    with sandbox_of(slow, runtime) as sandbox:
        number = number_of(slow, sandbox)
        assert 2 == sum(line.startswith(f"{number} ") for line in limited(legacy()))
        ran(sandbox, LATER.replace(f"range({SIZE >> 20})", f"range({(SIZE >> 20) * 8})"))
        began = time.monotonic()
    assert time.monotonic() - began < SIZE * 8 / RATE / 2
    assert 0 == sum(line.startswith(f"{number} ") for line in limited(legacy()))
    assert [] == list((slow.state / "hostd" / "disk-limits").iterdir())


def test_the_next_start_removes_what_a_killed_one_left(slow: Stack) -> None:
    """Limits of sandboxes that it adopts stay. Those of others go, also of a device that is gone."""
    directory = slow.state / "hostd" / "disk-limits"
    with sandbox_of(slow, "runc") as sandbox:
        number = number_of(slow, sandbox)
        slow.kill()
        (directory / "7:255").touch()
        slow.start()
        wait_for_hostd(slow)
        assert [number] == [path.name for path in directory.iterdir()]
        assert 2 == sum(line.startswith(f"{number} ") for line in limited(legacy()))
