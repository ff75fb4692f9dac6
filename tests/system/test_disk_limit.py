"""A sandbox writes to its own disk only. A full disk is full inside, and nothing outside changes."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from opensandbox.sync.sandbox import SandboxSync

from runtimes.engine import disk
from testbed.stack import Stack
from tests.conftest import ON_RUNSC

pytestmark = [pytest.mark.system, pytest.mark.images]

SIZE = 128 << 20
FILL = """
import os
try:
    with open("/fill", "wb", buffering=0) as file:
        while True:
            if file.write(bytes(1 << 20)) < 1 << 20:
                raise OSError(28, "short")
except OSError as error:
    print(error.errno, os.stat("/fill").st_size)
"""
MANY = """
import os
made, number = 0, 0
os.mkdir("/many")
try:
    while made < 30000:
        open(f"/many/{made}", "x").close()
        made += 1
except OSError as error:
    number = error.errno
print(number, made, os.statvfs("/").f_files)
"""
MAPPED = """
import mmap, os
fd = os.open("/mapped", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 256 << 20)
view = mmap.mmap(fd, 256 << 20)
child = os.fork()
if not child:
    for place in range(0, 256 << 20, 4096):
        view[place] = 1
    os._exit(0)
status = os.waitpid(child, 0)[1]
print("signal", os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
os.unlink("/mapped")
"""


@pytest.fixture(name="small")
def _small(stack: Stack, runtime: str) -> Iterator[SandboxSync]:
    sandbox = stack.create(runtime, resource={"memory": "512Mi", "cpu": "1", "disk": "128Mi"})
    try:
        yield sandbox
    finally:
        sandbox.kill()
        sandbox.close()


def printed(sandbox: SandboxSync, command: str) -> str:
    execution = sandbox.commands.run(command)
    return "".join(message.text for message in (*execution.logs.stdout, *execution.logs.stderr)).strip()


def used(stack: Stack) -> int:
    """Return the bytes that this server and its Docker daemon use. Their file system has other users too."""
    command = ["du", "--summarize", "--total", "--one-file-system", "--block-size=1", *map(str, stack.stores)]
    # Files appear and disappear. du reports that, continues and ends with 1.
    return int(subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()[-1].split()[0])


def inodes(stack: Stack) -> int:
    """Return the files and directories of this server and its Docker daemon."""
    command = ["du", "--inodes", "--summarize", "--total", "--one-file-system", *map(str, stack.stores)]
    return int(subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()[-1].split()[0])


def behind_loops() -> list[str]:
    """Return the files behind this machine's loop devices."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # It belongs to another process and disappeared in the meantime.
            found.append(path.read_text().strip())
    return found


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_full_disk_is_an_error_inside_and_nothing_outside(stack: Stack, small: SandboxSync) -> None:
    neighbour = stack.create("runc", resource={"memory": "256Mi", "disk": "128Mi"})
    try:
        before = used(stack)
        number, written = map(int, printed(small, f"python3 -c '{FILL}'").split())
        assert 28 == number
        assert SIZE * 0.85 < written < SIZE
        assert used(stack) - before < SIZE // 4
        assert "ok" == printed(neighbour, "dd if=/dev/zero of=/there bs=1M count=90 conv=fsync 2>/dev/null && echo ok")
    finally:
        neighbour.kill()
        neighbour.close()


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_what_is_deleted_can_be_written_again(small: SandboxSync) -> None:
    for _ in range(3):
        number, written = map(int, printed(small, f"python3 -c '{FILL}'").split())
        assert (28, True) == (number, written > SIZE * 0.85)
        assert "" == printed(small, "rm /fill; sync")


def test_a_write_through_memory_ends_its_process_not_the_sandbox(small: SandboxSync) -> None:
    assert "signal 7" == printed(small, f"python3 -c '{MAPPED}'")
    assert "alive" == printed(small, "echo alive")


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_inodes_run_out_for_the_sandbox_alone(stack: Stack, small: SandboxSync, runtime: str) -> None:
    """On runc the bytes are on its disk. On runsc files are in its own kernel's memory, whose limit applies."""
    before = inodes(stack)
    number, made, room = map(int, printed(small, f"python3 -c '{MANY}'").split())
    if runtime == "runc":
        assert 28 == number
        assert 0.8 * room < made < room < 30000
    else:
        assert (0, 30000) == (number, made)

    assert abs(inodes(stack) - before) < 1000 < made
    assert "full" == printed(small, "touch /many/more 2>/dev/null && echo room || echo full") or runtime == "runsc"
    assert f"{made}" == printed(small, "ls /many | grep -c '^[0-9]'; rm -r /many").strip()
    assert "made" == printed(small, "touch /again && echo made")


def test_root_cannot_grow_its_disk(small: SandboxSync, runtime: str) -> None:
    """Every way to the device or to other space: none opens a block device, mounts, or finds another file system."""
    probe = """
import os, stat
found = []
for directory, _, names in os.walk("/dev"):
    found += [name for name in names if stat.S_ISBLK(os.lstat(os.path.join(directory, name)).st_mode)]
try:
    os.mknod("/loop", stat.S_IFBLK | 0o600, os.makedev(7, 0)); os.open("/loop", os.O_RDWR); found.append("made")
except OSError: pass
size = os.statvfs("/").f_blocks * os.statvfs("/").f_frsize
print(found, size)
"""
    found, _, size = printed(small, f"python3 -c '{probe}'").rpartition(" ")
    assert ("[]", True) == (found, int(size) <= SIZE), runtime


def test_the_disk_goes_with_its_sandbox(stack: Stack, runtime: str) -> None:
    before = set((stack.state / "hostd" / "disks").iterdir())
    sandbox = stack.create(runtime, resource={"memory": "256Mi", "disk": "128Mi"})
    name = f"/hostd/disks/{sandbox.id}.img"
    try:
        assert 1 == len([file for file in behind_loops() if name in file])
        printed(sandbox, f"python3 -c '{FILL}'")
    finally:
        sandbox.kill()
        sandbox.close()
    assert [] == [file for file in behind_loops() if name in file]
    assert set() == set((stack.state / "hostd" / "disks").iterdir()) - before


@pytest.mark.parametrize("size", ["17Gi", "1Mi", "much"])
def test_a_size_that_cannot_be_is_refused(stack: Stack, size: str) -> None:
    answer = httpx.post(
        f"{stack.base}/v1/sandboxes",
        headers={"OPEN-SANDBOX-API-KEY": stack.api_key},
        json={"image": {"uri": "sallyport/empty"}, "resourceLimits": {"disk": size}, "entrypoint": ["/bin/true"]},
        timeout=60,
    )
    assert (400, "SANDBOX::INVALID_PARAMETER") == (answer.status_code, answer.json()["code"])


def test_the_doctors_disk_is_removed_although_another_process_copied_its_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the daemon of another server, whose mount namespace was created at that moment."""
    attach, copies = disk.Disks.attach, list[subprocess.Popen[bytes]]()

    def copied(self: disk.Disks, sandbox: str, layer: Path) -> int:
        held = attach(self, sandbox, layer)
        copies.append(
            subprocess.Popen(["unshare", "--mount", "sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE)
        )
        (output,) = (copy.stdout for copy in copies)
        assert output is not None
        assert b"\n" == output.readline()
        assert str(layer) in Path(f"/proc/{copies[0].pid}/mountinfo").read_text()
        return held

    monkeypatch.setattr(disk.Disks, "attach", copied)
    try:
        assert "can be made and unmade" in disk.probe(tmp_path)
    finally:
        for copy in copies:
            copy.kill()
            copy.communicate()
