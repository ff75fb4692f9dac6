"""execd in images that are small, empty, or have traps for a process that starts a program in them; 64 MiB each.

The traps are a library that records the program into which it was loaded: by the environment, by the loader's own file,
and as a module for names of users. The control is that the image's programs do load it. A hostile image has everything
that an image's configuration can contain, and a file system whose links lead to a directory of the host.
"""

import contextlib
import io
import json
import os
import stat
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from opensandbox.exceptions import SandboxException
from opensandbox.models.execd import RunCommandOpts
from opensandbox.models.filesystem import WriteEntry
from opensandbox.sync.sandbox import SandboxSync

from testbed.stack import EMPTY_IMAGE, IMAGE, Stack

pytestmark = [pytest.mark.system, pytest.mark.images]

SMALL, USER, TRAPPED, HOSTILE = "small-root", "small-user", "trapped", "hostile"
NODES = {"mem": (1, 1), "kmsg": (1, 11), "tun": (10, 200), "fuse": (10, 229), "kvm": (10, 232), "loops": (10, 237)}
"""Character devices, by number; `disk` is the block device of the first loop."""
_LIBRARY = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void note(void) {
    char name[4096];
    ssize_t n = readlink("/proc/self/exe", name, sizeof name - 1);
    int fd = open("/loaded-into", O_WRONLY | O_CREAT | O_APPEND, 0666);
    if (n > 0) { name[n] = '\\n'; (void)!write(fd, name, n + 1); }
    close(fd);
}
"""


@pytest.fixture(scope="module", name="images")
def _images(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    small, work = os.environ["SALLYPORT_SMALL_IMAGE"], tmp_path_factory.mktemp("images")
    path = "ENV PATH=/bin"
    assert 0 == stack.docker("import", "-c", path, small, SMALL).returncode
    for_user = work / "user.tar"
    for_user.write_bytes(Path(small).read_bytes())
    with tarfile.open(for_user, "a") as archive:
        _directory(archive, "tmp", 0, 0o555)
        _directory(archive, "work", 1234, 0o755)
    assert 0 == stack.docker("import", "-c", path, "-c", "USER 1234:1235", str(for_user), USER).returncode
    _trap(stack, work)
    stack.permit_images(SMALL, USER, TRAPPED)


def _directory(archive: tarfile.TarFile, name: str, owner: int, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, mode, owner, owner
    archive.addfile(entry)


def _trap(stack: Stack, work: Path) -> None:
    (work / "trap.c").write_text(_LIBRARY)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", work / "trap.so", work / "trap.c"], check=True)
    library = (work / "trap.so").read_bytes()
    files = {
        "trap.so": library,
        "usr/lib/x86_64-linux-gnu/libnss_trap.so.2": library,
        "etc/ld.so.preload": b"/trap.so\n",
        "etc/nsswitch.conf": b"passwd: trap files\ngroup: trap files\nhosts: trap\n",
    }
    with tarfile.open(work / "trap.tar", "w") as written:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            written.addfile(entry, io.BytesIO(content))
    made = stack.docker("create", "--network", "none", IMAGE, "/bin/true")
    container = made.stdout.strip()
    assert 0 == made.returncode, made.stderr
    try:
        with (work / "trap.tar").open("rb") as archive:
            command = ["docker", "-H", f"unix://{stack.run / 'docker.sock'}", "cp", "-", f"{container}:/"]
            subprocess.run(command, stdin=archive, check=True)
        traps = "ENV LD_PRELOAD=/trap.so LD_LIBRARY_PATH=/ LD_AUDIT=/trap.so BASH_ENV=/trap.so ENV=/trap.so"
        committed = stack.docker("commit", "-c", traps, container, TRAPPED)
        assert 0 == committed.returncode, committed.stderr
    finally:
        stack.docker("rm", "-f", container)


@contextmanager
def made(stack: Stack, runtime: str, image: str, memory: str = "64Mi") -> Iterator[SandboxSync]:
    sandbox = stack.create(runtime, image=image, resource={"memory": memory, "cpu": "1", "pids": "128"})
    try:
        yield sandbox
    finally:
        with contextlib.suppress(SandboxException):
            sandbox.kill()
        sandbox.close()


def output(execution: Any) -> str:
    return "".join(message.text for message in execution.logs.stdout)


def test_nothing_of_an_image_runs_in_execd(runtime: str, stack: Stack, images: None) -> None:
    with made(stack, runtime, TRAPPED) as sandbox:
        assert "hello\n" == output(sandbox.commands.run("cat /etc/hostname >/dev/null; echo hello"))
        sandbox.files.write_files([WriteEntry(path="/data/file", data="x", mode=640, owner="games", group="games")])
        assert "games" == sandbox.files.get_file_info(["/data/file"])["/data/file"].owner
        sandbox.files.create_directories([WriteEntry(path="/data/open", mode=777)])
        sandbox.files_with_identity(1234, 1234).write_file("/data/open/own", "x")
        sandbox.get_metrics()
        into = set(sandbox.files.read_file("/loaded-into").split())
    assert {"/usr/bin/bash", "/usr/bin/cat"} <= into
    assert set() == {program for program in into if "opensandbox" in program}


@pytest.mark.parametrize("image", [SMALL, USER])
def test_a_small_image_is_a_whole_sandbox(image: str, runtime: str, stack: Stack, images: None) -> None:
    """Without bash, glibc and a writable /tmp. As root, and as a user of the image."""
    home = "/home" if image == SMALL else "/work"
    with made(stack, runtime, image) as sandbox:
        assert "hello\n" == output(sandbox.commands.run("echo hello"))
        assert ("0\n" if image == SMALL else "1234\n") == output(sandbox.commands.run("id -u"))
        sandbox.files.write_file(f"{home}/file", "content")
        assert "content" == sandbox.files.read_file(f"{home}/file")
        session = sandbox.commands.create_session(working_directory=home)
        sandbox.commands.run_in_session(session, "export KEPT=1; mkdir -p sub; cd sub")
        kept = sandbox.commands.run_in_session(session, "echo $KEPT $PWD")
        assert f"1 {home}/sub" == output(kept)
        listed = output(sandbox.commands.run_in_session(session, ": marker; tr '\\0' ' ' </proc/$$/cmdline"))
        assert (True, False) == (listed.startswith("sh -c "), "marker" in listed)
        run = sandbox.commands.run("echo behind", opts=RunCommandOpts(background=True))
        assert "behind\n" == _logs(sandbox, str(run.id))
        with_identity = sandbox.files_with_identity(1234, 1235)
        if image == SMALL:
            sandbox.commands.run("mkdir -m 777 /open")
            with_identity.write_file("/open/own", "x")
            assert "1234\n" == output(sandbox.commands.run("stat -c %u /open/own"))
        else:
            with_identity.write_file("/work/own", "x")
            with pytest.raises(SandboxException):
                sandbox.files_with_identity(1, 1).write_file("/work/other", "x")


def _logs(sandbox: SandboxSync, run: str) -> str:
    deadline = time.monotonic() + 60
    while sandbox.commands.get_command_status(run).running:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return str(sandbox.commands.get_background_command_logs(run).content)


def test_an_empty_image_is_a_sandbox(runtime: str, stack: Stack) -> None:
    with made(stack, runtime, EMPTY_IMAGE) as sandbox:
        execution = sandbox.commands.run("echo hello")
        assert (127, True) == (execution.exit_code, execution.error is not None)
        sandbox.files.write_file("/deep/file", "content")
        assert "content" == sandbox.files.read_file("/deep/file")
        assert sandbox.get_metrics().memory_total_in_mib <= 64


def test_a_hostile_workload_ends_in_limits(runtime: str, stack: Stack, images: None) -> None:
    """An endless line, larger than the memory, for a client that does not read, and a fork bomb: /ping answers."""
    with made(stack, runtime, SMALL, memory="256Mi") as sandbox:
        endpoint = sandbox.get_endpoint(44772)
        base = f"http://{endpoint.endpoint}"
        with httpx.Client(headers=endpoint.headers, timeout=60) as client:

            def answers(times: int) -> bool:
                return all(client.get(f"{base}/ping").status_code == 200 for _ in range(times))

            line = {"command": "dd if=/dev/zero bs=1M count=270 2>/dev/null | tr '\\0' x"}
            with client.stream("POST", f"{base}/command", json=line) as stream:
                head = next(stream.iter_text())
                assert answers(5)
            run = head.partition('"text":"')[2].partition('"')[0]
            assert "finished" == _ended(client, f"{base}/command/status/{run}")
            bomb = {"command": "b() { b | b & b; }; b", "background": True, "timeout": 1500}
            assert 200 == client.post(f"{base}/command", json=bomb).status_code
            assert answers(20)


def _ended(client: httpx.Client, status: str) -> str:
    """Wait for the end of a command whose client has disconnected."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        answer = client.get(status)
        if answer.status_code != httpx.codes.OK:
            return answer.text
        if not answer.json()["running"]:
            return "finished"
        time.sleep(0.05)
    return "running"


def _without_users(tar: Path) -> None:
    """Write the small image, without its file of users."""
    with tarfile.open(os.environ["SALLYPORT_SMALL_IMAGE"]) as small, tarfile.open(tar, "w") as archive:
        for entry in small:
            if entry.name != "./etc/passwd":
                archive.addfile(entry, small.extractfile(entry) if entry.isreg() else None)


@pytest.fixture(scope="module", name="host_directory")
def _hostile(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Import the hostile image. Return the directory to which its links lead."""
    work, target = tmp_path_factory.mktemp("hostile"), tmp_path_factory.mktemp("host")
    tar = work / "hostile.tar"
    _without_users(tar)
    links = {
        "opt": f"{target}",
        "etc/hosts": f"{target}/hosts",
        "etc/resolv.conf": f"{'../' * 12}{target}/resolv",
        "etc/ssl/certs/java": f"{target}/java",
    }
    with tarfile.open(tar, "a") as archive:
        for name, goal in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, goal
            archive.addfile(entry)
        for name, number in {**NODES, "disk": (7, 0)}.items():
            entry = tarfile.TarInfo(f"nodes/{name}")
            entry.type, entry.mode = tarfile.BLKTYPE if name == "disk" else tarfile.CHRTYPE, 0o666
            entry.devmajor, entry.devminor = number
            archive.addfile(entry)
        users = b"root:x:0:0:root:/:/bin/sh\nevil:x:0:0::/:/bin/sh\n"
        entry = tarfile.TarInfo("etc/passwd")
        entry.size = len(users)
        archive.addfile(entry, io.BytesIO(users))
    says = (
        "USER evil",
        "WORKDIR /opt/work",
        'VOLUME ["/data", "/opt/opensandbox", "/etc"]',
        "HEALTHCHECK --interval=1s CMD touch /checked",
        "ONBUILD RUN touch /built",
        'ENTRYPOINT ["/proc/self/exe"]',
        'CMD ["/bin/sh"]',
        "LABEL sallyport.sandbox=sbx-other sallyport.instance=other",
        "ENV PATH=/bin SSL_CERT_FILE=/evil.pem OPENSANDBOX_ID=sbx-other EXECD_ENVS=/evil",
    )
    changes = [word for said in says for word in ("-c", said)]
    imported = stack.docker("import", *changes, str(tar), HOSTILE)
    assert 0 == imported.returncode, imported.stderr
    stack.permit_images(HOSTILE)
    yield target
    stack.remove_images(HOSTILE)


def test_what_an_image_says_and_where_its_links_lead_is_of_no_use_to_it(
    runtime: str, stack: Stack, host_directory: Path
) -> None:
    volumes = stack.docker("volume", "ls", "-q").stdout
    with made(stack, runtime, HOSTILE) as sandbox:
        container = stack.container(str(sandbox.id))
        (told,) = json.loads(stack.docker("inspect", container).stdout)
        assert sandbox.id == told["Config"]["Labels"]["sallyport.sandbox"]
        assert "other" != told["Config"]["Labels"]["sallyport.instance"]
        assert told["State"].get("Health") is None
        environment = output(sandbox.commands.run("env")).split()
        assert {f"OPENSANDBOX_ID={sandbox.id}", "SSL_CERT_FILE=/opt/opensandbox/ca-bundle.pem"} <= set(environment)
        assert "nameserver 192.0.2.1" in output(sandbox.commands.run("cat /etc/resolv.conf"))
        assert "/opt/opensandbox/execd" in output(sandbox.commands.run("tr '\\0' ' ' </proc/1/cmdline"))
        tried = "for node in /nodes/*; do (exec 3<$node) 2>/dev/null && echo $node; done; echo end"
        # On runsc these are gVisor's own. runc lets every user open a tun, but no process here can create an interface
        # with it.
        own = {"/nodes/tun", *(["/nodes/fuse"] if runtime == "runsc" else [])}
        assert {"end"} == set(output(sandbox.commands.run(tried)).split()) - own
        made_one = "tunctl -f /nodes/tun -t tun9 || echo refused; cut -d: -f1 /proc/net/dev | tr -d ' ' | tail -n +3"
        assert {"refused", "eth0", "lo"} == set(output(sandbox.commands.run(made_one)).split())
        sandbox.files.write_file("/data/file", "x")
        assert "volumes" not in output(sandbox.commands.run("cat /proc/self/mountinfo"))
        assert [] == output(sandbox.commands.run("ls -d /checked /built 2>/dev/null")).split()
    assert [] == list(host_directory.iterdir())
    assert volumes == stack.docker("volume", "ls", "-q").stdout


def test_outside_of_a_sandbox_those_nodes_open(tmp_path: Path) -> None:
    """The control."""
    for name in ("kmsg", "loops"):
        os.mknod(tmp_path / name, stat.S_IFCHR | 0o600, os.makedev(*NODES[name]))
        os.close(os.open(tmp_path / name, os.O_RDONLY))


@pytest.mark.parametrize("kind", ["a pipe", "a link to a device"])
def test_an_image_with_an_unreadable_users_file_is_refused_at_once(kind: str, stack: Stack, tmp_path: Path) -> None:
    """Docker would wait or read without end, and hold the container's lock."""
    tar, image = tmp_path / "unreadable.tar", "unreadable"
    _without_users(tar)
    with tarfile.open(tar, "a") as archive:
        users, zeros = tarfile.TarInfo("etc/passwd"), tarfile.TarInfo("zeros")
        users.type, users.linkname = (tarfile.FIFOTYPE, "") if kind == "a pipe" else (tarfile.SYMTYPE, "../zeros")
        zeros.type, zeros.devmajor, zeros.devminor = tarfile.CHRTYPE, 1, 5
        for entry in (users, zeros):
            archive.addfile(entry)
    assert 0 == stack.docker("import", "-c", "ENV PATH=/bin", str(tar), image).returncode
    stack.permit_images(image)
    before = stack.sandboxes()
    try:
        with pytest.raises(SandboxException, match="/etc/passwd of the image is no plain file"):
            stack.create("runc", image=image)
        assert before == stack.sandboxes()
    finally:
        stack.remove_images(image)
