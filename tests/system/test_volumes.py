"""Volumes with the published SDK, on both runtimes: what sandboxes and the host see in them, and when they end.

The tests judge on the host: by files, owners, mounts, loop devices and the audit log. They test `runtimes/volumes.py`,
`lifecycle/sandboxes/volumes.py` and `lifecycle/volumes.py`.
"""

import os
import secrets
import shlex
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import OSSFS, PVC, Host, Volume
from opensandbox.sync.manager import SandboxManagerSync
from opensandbox.sync.sandbox import SandboxSync

from testbed.census import daemons, take
from testbed.stack import Stack, StackError
from tests.conftest import ON_RUNC, ON_RUNSC, representatives
from tests.stacks import DISK, beside

pytestmark = [pytest.mark.system, pytest.mark.images]

OTHER = {"runc": "runsc", "runsc": "runc"}
_MIB = 1 << 20


class WithVolumes(Stack):
    """A server that allows a directory of the host, and small named volumes."""

    @property
    def shared(self) -> Path:
        """The allowed directory."""
        return self.directory.parent / "shared"

    @property
    def settings(self) -> str:
        text = super().settings.replace("default_disk =", 'max_volume = "128Mi"\nmax_volumes = 8\ndefault_disk =')
        return f'[storage]\nallowed_host_paths = ["{self.shared}"]\nvolume_default_size = "64Mi"\n{text}'

    def start(self) -> None:
        self.shared.mkdir(exist_ok=True)
        super().start()


@pytest.fixture(scope="module", name="stack")
def _stack() -> Iterator[WithVolumes]:
    with beside(WithVolumes, "volumes", below=DISK) as stack:  # no path of a kernel's file system is for sandboxes
        assert isinstance(stack, WithVolumes)
        yield stack
        assert [] == volumes(stack)


@pytest.fixture(name="data")
def _data(stack: WithVolumes) -> Path:
    """Return a new directory of the host that a call can mount."""
    path = stack.shared / secrets.token_hex(6)
    path.mkdir()
    return path


@contextmanager
def made(stack: Stack, runtime: str, *mounted: Volume, **options: Any) -> Iterator[SandboxSync]:
    sandbox = stack.create(runtime, policy=None, volumes=list(mounted), **options)
    try:
        yield sandbox
    finally:
        sandbox.kill()
        sandbox.close()


def run(sandbox: SandboxSync, command: str) -> tuple[int | None, str]:
    execution = sandbox.commands.run(command)
    text = "".join(message.text for message in (*execution.logs.stdout, *execution.logs.stderr))
    return execution.exit_code, text.strip()


def said(sandbox: SandboxSync, command: str) -> str:
    code, text = run(sandbox, command)
    assert 0 == code, text
    return text


def host(path: Path, place: str = "/mnt/host", **options: Any) -> Volume:
    return Volume(name=f"v{secrets.token_hex(4)}", host=Host(path=str(path)), mount_path=place, **options)


def pvc(name: str, place: str = "/mnt/named", *, sub_path: str | None = None, **options: Any) -> Volume:
    claim = PVC(claim_name=name, **options)
    return Volume(name=f"v{secrets.token_hex(4)}", pvc=claim, mount_path=place, sub_path=sub_path)


def temporary(name: str, place: str = "/mnt/named", **options: Any) -> Volume:
    """Return a volume that ends with its sandbox, if this call makes it."""
    return pvc(name, place, delete_on_sandbox_termination=True, **options)


def refused(stack: Stack, runtime: str, *mounted: Volume, **options: Any) -> tuple[int | None, str]:
    with pytest.raises(SandboxApiException) as caught:
        stack.create(runtime, policy=None, volumes=list(mounted), **options).kill()
    return caught.value.status_code, caught.value.error.code


def volumes(stack: Stack) -> list[str]:
    """Return the names of the volumes, as the operator's command lists them."""
    return [line.split(" ", 1)[0] for line in stack.sallyport("volume", "list").splitlines()]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def mounts(stack: Stack) -> list[str]:
    """Return the places of all volumes that are mounted."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if f" {stack.run}/volumes/" in line]


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_path_of_the_host_is_read_and_written(stack: WithVolumes, runtime: str, data: Path) -> None:
    """A user inside has the same number on the host. A file is mounted as a file."""
    (data / "given").write_text("from the host\n")
    (data / "given").chmod(0o600)
    (data / "one").write_text("one\n")
    fresh = data / "fresh" / "deep: x, y"
    mounted = (host(data), host(data / "one", "/etc/app.conf"), host(fresh, "/mnt/fresh: x, y"))
    with made(stack, runtime, *mounted) as sandbox:
        assert "from the host" == said(sandbox, "cat /mnt/host/given")
        said(sandbox, "cd /mnt/host; echo inside >made; chown 1000:1001 made; mkdir dir; echo >'/mnt/fresh: x, y/x'")
        assert "one" == said(sandbox, "cat /etc/app.conf; echo more >>/etc/app.conf")
        (data / "later").write_text("later\n")
        assert "later" == said(sandbox, "cat /mnt/host/later")
        assert "0 0 600" == said(sandbox, "stat -c '%u %g %a' /mnt/host/given")
    status = (data / "made").stat()
    assert ("inside\n", 1000, 1001) == ((data / "made").read_text(), status.st_uid, status.st_gid)
    assert (0, "one\nmore\n") == ((data / "dir").stat().st_uid, (data / "one").read_text())
    assert (0o755, 0) == (stat.S_IMODE(fresh.stat().st_mode), fresh.stat().st_uid)
    assert (fresh / "x").exists()


def test_a_read_only_volume_cannot_be_written_by_any_means(stack: WithVolumes, runtime: str, data: Path) -> None:
    """Root inside cannot remount it either. The control writes through a volume of the same directory."""
    (data / "given").write_text("given\n")
    with made(stack, runtime, host(data, "/mnt/ro", read_only=True), host(data, "/mnt/rw")) as sandbox:
        assert "given" == said(sandbox, "cat /mnt/ro/given")
        attempts = (
            *("echo x >/mnt/ro/new", "echo x >>/mnt/ro/given", "rm /mnt/ro/given", "mv /mnt/ro/given /mnt/ro/other"),
            *("chmod 777 /mnt/ro/given", "chown 1 /mnt/ro/given", "mkdir /mnt/ro/dir", "ln /mnt/ro/given /mnt/ro/hard"),
            *("touch /mnt/ro/given", "truncate -s 0 /mnt/ro/given", "mount -o remount,rw /mnt/ro"),
            *("mount -o remount,bind,rw /mnt/ro", "mount --bind /mnt/rw /mnt/ro", "umount /mnt/ro"),
        )
        for attempt in attempts:
            code, text = run(sandbox, attempt)
            assert 0 != code, (attempt, text)
        assert {"given": "given\n"} == {path.name: path.read_text() for path in data.iterdir()}
        said(sandbox, "echo x >/mnt/rw/control")
    assert "x\n" == (data / "control").read_text()


def test_devices_and_set_user_id_bits_have_no_effect(stack: WithVolumes, runtime: str, data: Path) -> None:
    """A sandbox reads no disk of the host through a node in a volume, and makes no node.

    On runc the node of a device that a sandbox may use is closed too. On runsc it leads to the sandbox's own kernel.
    """
    os.mknod(data / "disk", stat.S_IFBLK | 0o666, os.stat(data).st_dev)
    os.mknod(data / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    for name in ("disk", "null"):
        (data / name).chmod(0o666)
    with made(stack, runtime, host(data)) as sandbox:
        said(sandbox, "echo x >/dev/null")
        assert 0 != run(sandbox, "head -c 1 /mnt/host/disk")[0]
        assert 0 != run(sandbox, "mknod /mnt/host/made c 1 3")[0]
        if runtime == "runc":
            assert 0 != run(sandbox, "cat </mnt/host/null")[0]
            assert {"nosuid", "nodev"} <= set(said(sandbox, "grep ' /mnt/host ' /proc/mounts").split()[3].split(","))
    assert not (data / "made").exists()


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_sub_path_shows_its_subtree_only(stack: WithVolumes, runtime: str, data: Path) -> None:
    (data / "a" / "b").mkdir(parents=True)
    (data / "secret").write_text("canary\n")
    (data / "a" / "b" / "given").touch()
    (data / "link").symlink_to(data)
    with made(stack, runtime, host(data, sub_path="a/b"), host(data, "/mnt/new", sub_path="n/e/w")) as sandbox:
        assert "given" == said(sandbox, "ls /mnt/host")
        said(sandbox, "touch /mnt/new/made; cd /mnt/host; ln -s ../../secret link")
        for path in ("/mnt/host/../secret", "/mnt/host/link", "/mnt/host/../../secret"):
            assert 0 != run(sandbox, f"cat {path}")[0]
    assert (data / "n" / "e" / "w" / "made").exists()
    for sub_path in ("link", "link/a", "a/b/link", "secret/x"):
        assert (400, "VOLUME::INVALID_SUB_PATH") == refused(stack, runtime, host(data, sub_path=sub_path))


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_volume_below_another_is_seen_in_it_in_any_order(stack: WithVolumes, runtime: str, data: Path) -> None:
    (data / "inner").mkdir()
    (data / "inner" / "hidden").touch()
    mounted = (temporary("inner", "/mnt/host/inner"), host(data))
    for order in (mounted, mounted[::-1]):
        with made(stack, runtime, *order) as sandbox:
            assert "inner" == said(sandbox, "ls /mnt/host")
            assert "" == said(sandbox, "ls -A /mnt/host/inner; touch /mnt/host/inner/mark")
    assert ["hidden"] == os.listdir(data / "inner")


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_what_the_operator_does_not_allow_is_refused(stack: WithVolumes, runtime: str, data: Path) -> None:
    (data / "out").symlink_to("/etc")
    wrong = ("/etc", "/", str(stack.run), str(stack.state), str(stack.directory), "/proc", f"{data}/out", "/var/run")
    for path in wrong:
        assert (400, "VOLUME::HOST_PATH_NOT_ALLOWED") == refused(stack, runtime, host(Path(path))), path
    os.mkfifo(data / "pipe")
    assert (400, "VOLUME::INVALID_HOST_PATH") == refused(stack, runtime, host(data / "pipe"))
    ossfs = OSSFS(bucket="abc", endpoint="oss.example.org", access_key_id="i", access_key_secret="s")
    volume = Volume(name="o", ossfs=ossfs, mount_path="/o")
    assert (400, "VOLUME::UNSUPPORTED_BACKEND") == refused(stack, runtime, volume)
    assert [] == mounts(stack)
    assert () == stack.sandboxes()


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_named_volume_outlives_its_sandbox(stack: WithVolumes, runtime: str) -> None:
    """The next sandbox, on the other runtime, has its files, with the same users."""
    name = f"kept-{runtime}"
    with made(stack, runtime, pvc(name)) as sandbox:
        assert "" == said(sandbox, "ls -A /mnt/named")
        said(sandbox, "echo kept >/mnt/named/file; chown 7:8 /mnt/named/file; echo root >/mnt/named/root")
        with pytest.raises(StackError, match=r"in use by sandboxes: 1 \(busy\)"):
            stack.sallyport("volume", "remove", name)
    assert [] == mounts(stack)
    with made(
        stack, OTHER[runtime], pvc(name, create_if_not_exists=False, delete_on_sandbox_termination=True)
    ) as sandbox:
        assert "kept" == said(sandbox, "cat /mnt/named/file")
        assert "7 8\n0 0" == said(sandbox, "stat -c '%u %g' /mnt/named/file /mnt/named/root")
    assert [name] == volumes(stack)
    assert f"volume {name} is removed\n" == stack.sallyport("volume", "remove", name)
    assert [] == volumes(stack)
    records = stack.audit_records()
    assert [(name, "uid:0")] * 2 == [
        (item["volume"], item["actor"])
        for item in records
        if item["kind"] == "volume.remove" and item["volume"] == name
    ]
    assert f"pvc:{name} /mnt/named rw" in [text for item in records for text in item.get("volumes", ())]
    missing = pvc(name, create_if_not_exists=False)
    assert (400, "VOLUME::PVC_NOT_FOUND") == refused(stack, runtime, missing)


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_full_volume_is_full_inside_and_nothing_else_changes(stack: WithVolumes, runtime: str) -> None:
    fill = "dd if=/dev/zero of=/mnt/named/fill bs=1M"
    with made(stack, runtime, temporary("full", storage="96Mi")) as sandbox:
        disk = stack.state / "hostd" / "volumes" / "full" / "disk"
        before = disk.stat()
        code, text = run(sandbox, fill)
        assert 0 != code
        assert "No space left on device" in text
        held = int(said(sandbox, "stat -c %s /mnt/named/fill"))
        assert 70 * _MIB < held < 96 * _MIB
        assert 96 * _MIB == before.st_size <= before.st_blocks * 512
        assert before.st_blocks == disk.stat().st_blocks, "it takes space beyond what was allocated"
        said(sandbox, "rm /mnt/named/fill; echo again >/mnt/named/file; echo x >/root-file")
    assert [] == volumes(stack)
    assert (400, "SANDBOX::INVALID_PARAMETER") == refused(stack, runtime, pvc("big", storage="1Gi"))


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_sandboxes_share_a_volume_that_both_name_while_they_run(stack: WithVolumes, runtime: str, data: Path) -> None:
    """Also across runtimes, with the host, and through a sub-path. A third sandbox sees nothing of it."""
    volume = temporary("shared")
    with (
        made(stack, runtime, volume, host(data)) as one,
        made(stack, OTHER[runtime], pvc("shared"), host(data)) as other,
        made(stack, runtime, pvc("shared", sub_path="below")) as part,
        made(stack, runtime, temporary("different")) as third,
    ):
        for place in ("/mnt/named", "/mnt/host"):
            for number, (writer, reader) in enumerate(((one, other), (other, one)) * 2):
                said(
                    writer,
                    f"echo {number} >{place}/file; mkdir -p {place}/below; echo {number} >{place}/below/{number}",
                )
                assert str(number) == said(reader, f"cat {place}/file")
                assert str(number) == said(reader, f"cat {place}/below/{number}")
        assert "0 1 2 3" == said(part, "echo $(ls /mnt/named)")
        said(part, "echo part >/mnt/named/part")
        assert "part" == said(other, "cat /mnt/named/below/part")
        assert "" == said(third, "ls -A /mnt/named")
        said(one, "exec 3>/mnt/named/lock; rm /mnt/named/file")
        assert 0 != run(other, "cat /mnt/named/file")[0]
        assert "3\n" == (data / "file").read_text()
    assert [] == volumes(stack)


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_volume_of_the_call_ends_with_its_sandbox_in_each_way(stack: WithVolumes, runtime: str) -> None:
    """By DELETE, by expiry, by a failed entrypoint, and by a refusal of the second volume. Others stay."""
    with made(stack, runtime, pvc("kept", "/mnt/kept"), temporary("own")):
        assert ["kept", "own"] == volumes(stack)
    assert ["kept"] == volumes(stack)
    failed = refused(stack, runtime, temporary("own"), entrypoint=["/no/such/program"])
    assert (500, "DOCKER::SANDBOX_START_FAILED") == failed
    assert ["kept"] == volumes(stack)
    missing = pvc("missing", "/mnt/missing", create_if_not_exists=False)
    assert (400, "VOLUME::PVC_NOT_FOUND") == refused(stack, runtime, pvc("new"), temporary("own", "/o"), missing)
    assert ["kept"] == volumes(stack)
    sandbox = stack.create(runtime, policy=None, volumes=[temporary("own"), temporary("kept", "/k")])
    assert ["kept", "own"] == volumes(stack)
    sandbox.renew(timedelta(seconds=1))
    assert until(lambda: () == stack.sandboxes())
    sandbox.close()
    assert until(lambda: ["kept"] == volumes(stack))
    assert [] == mounts(stack)
    stack.sallyport("volume", "remove", "kept")


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_pause_keeps_a_volume_and_its_open_files(stack: WithVolumes, runtime: str) -> None:
    loop = "while :; do date +%s.%N >>/mnt/named/ticks; sleep 0.05; done"
    with made(stack, runtime, temporary("paused")) as sandbox:
        said(sandbox, f"nohup sh -c {shlex.quote(loop)} >/dev/null 2>&1 &")
        ticks = next(Path(place) for place in mounts(stack) if "/stages/" in place) / "ticks"
        assert until(lambda: ticks.exists() and ticks.stat().st_size > 100)
        manager = SandboxManagerSync.create(stack.connection)
        sandbox.pause()
        before = ticks.read_bytes()
        assert "Paused" == manager.get_sandbox_info(sandbox.id).status.state
        with pytest.raises(StackError, match="busy"):
            stack.sallyport("volume", "remove", "paused")
        assert before == ticks.read_bytes()
        manager.resume_sandbox(sandbox.id)
        assert until(lambda: len(ticks.read_bytes()) > len(before) + 100)
        manager.close()
    assert [] == volumes(stack)


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_an_attacker_inside_cannot_race_a_sub_path(stack: WithVolumes, runtime: str, data: Path) -> None:
    """One sandbox has the whole volume and exchanges a directory and links all the time. Others mount the directory."""
    (data / "x" / "y").mkdir(parents=True)
    (data / "x" / "y" / "mark").touch()
    swap = """
import os
while True:
    for target in ("/etc", "../../../..", "/proc/self/root"):
        os.rename("x", "was"); os.symlink(target, "x"); os.unlink("x"); os.rename("was", "x")
        os.rename("x/y", "x/was"); os.symlink(target, "x/y"); os.unlink("x/y"); os.rename("x/was", "x/y")
"""
    with made(stack, runtime, host(data)) as attacker:
        attacker.files.write_file("/tmp/swap.py", swap)
        said(attacker, "cd /mnt/host && nohup python3 /tmp/swap.py >/dev/null 2>&1 &")
        outcomes = set()
        for _ in range(8):
            try:
                with made(stack, OTHER[runtime], host(data, sub_path="x/y")) as victim:
                    outcomes.add(frozenset(said(victim, "ls -A /mnt/host").split()))
            except SandboxApiException as error:
                # The second one if the attacker removes the directory after its mount, before the container has it.
                refusals = {(400, "VOLUME::INVALID_SUB_PATH"), (500, "DOCKER::SANDBOX_START_FAILED")}
                assert (error.status_code, error.error.code) in refusals
    assert outcomes <= {frozenset({"mark"}), frozenset()}, "it saw something else than the directory"


@pytest.mark.parametrize("runtime", ON_RUNC)
@pytest.mark.parametrize("victim", representatives(("runtimes.hostd", "lifecycle.serve"), "runtimes.hostd"))
def test_a_death_keeps_the_volumes_of_sandboxes_that_run(stack: WithVolumes, runtime: str, victim: str) -> None:
    """After their end everything ends with them, as if there had been no death."""
    with made(stack, runtime, temporary("own"), pvc("kept", "/mnt/kept")) as sandbox:
        said(sandbox, "echo before >/mnt/named/file")
        pid = daemons(stack)[victim]
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: daemons(stack).get(victim) not in (None, pid))
        assert until(lambda: works(sandbox))
        assert "before" == said(sandbox, "cat /mnt/named/file; echo after >>/mnt/named/file; echo x >/mnt/kept/file")
        assert ["kept", "own"] == volumes(stack)
    assert ["kept"] == volumes(stack)
    assert [] == mounts(stack)
    stack.sallyport("volume", "remove", "kept")


def works(sandbox: SandboxSync) -> bool:
    try:
        return "yes" == said(sandbox, "echo yes")
    except Exception:  # noqa: BLE001 - the way in is closed meanwhile
        return False


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_restart_of_the_server_keeps_named_volumes_only(stack: WithVolumes, runtime: str) -> None:
    """The end of the server removes its sandboxes. The next server mounts the volume again."""
    sandbox = stack.create(runtime, policy=None, volumes=[pvc("kept"), temporary("own", "/o")])
    said(sandbox, "echo kept >/mnt/named/file")
    sandbox.close()
    stack.stop()
    assert [] == mounts(stack)
    assert ["kept"] == sorted(path.name for path in (stack.state / "hostd" / "volumes").iterdir())
    stack.start()
    with made(stack, runtime, pvc("kept", create_if_not_exists=False)) as again:
        assert "kept" == said(again, "cat /mnt/named/file")
    stack.sallyport("volume", "remove", "kept")


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_nothing_is_left_of_volumes(stack: WithVolumes, runtime: str, data: Path) -> None:
    """The census of the host is the same before and after, and no trace of the sandbox is left."""
    with made(stack, runtime):  # Docker makes some mounts of its own for the first one
        pass
    before = take(stack)
    with made(stack, runtime, host(data), host(data, "/ro", read_only=True), temporary("own")) as one:
        traces = stack.traces(one.id)
        said(one, "echo x | tee /mnt/host/file /mnt/named/file")
        assert 4 == len(mounts(stack))
    assert [] == traces.remaining()
    assert {} == take(stack).beyond(before)
