"""What a sandbox writes harms neither the host nor others when a snapshot is taken, and nothing secret is in it.

It tests `runtimes/snapshots/upper.py` and `runtimes/snapshots/checkpoint.py` with real sandboxes, and the names of
snapshots in `runtimes/engine/docker.py`.
"""

import io
import json
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from opensandbox.exceptions import SandboxException

from demo.sandboxes import DemoSandbox, Secrets
from testbed.stack import Stack
from tests.conftest import ON_RUNC
from tests.stacks import removed
from tests.system.test_snapshots import closing_manager, ready, restore, run, settled

pytestmark = [pytest.mark.system, pytest.mark.images]

REFUSED = {
    "a sparse file of a terabyte": ("truncate -s 1T /srv/huge", "larger than"),
    "a name that means a removal": ("touch /srv/.wh.passwd", ".wh."),
    "a path longer than the kernel takes": (
        'python3 -c \'import os; [(os.mkdir("d"*200), os.chdir("d"*200)) for _ in range(40)]\'',
        "path is too long",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_snapshot_can_have_fails_and_leaves_nothing(stack: Stack, runtime: str, what: str) -> None:
    """The snapshot is failed with the reason. The source runs on; no image, layer or frozen container is left."""
    program, reason = REFUSED[what]
    with closing_manager(stack) as manager, removed(stack.create(runtime, policy=None)) as sandbox:
        assert 0 == sandbox.commands.run(f"cd /srv && {program}").exit_code
        snapshot = settled(manager, sandbox.create_snapshot())
        assert ("Failed", "snapshot_runtime_failed") == (snapshot.status.state, snapshot.status.reason)
        assert reason in (snapshot.status.message or "")
        assert "alive" == (sandbox.commands.run("echo alive").text or "").strip()
        assert [] == _left(stack, snapshot.id)
        manager.delete_snapshot(snapshot.id)


def _left(stack: Stack, snapshot: str) -> list[str]:
    """Return what this host has of a snapshot, and every note of a frozen container."""
    images = stack.docker("images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    places = [stack.state / "hostd" / "snapshots", stack.run / "frozen"]
    return [name for name in images if snapshot in name] + [str(path) for place in places for path in place.iterdir()]


@pytest.mark.extended
@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_hundred_thousand_links_are_taken_within_the_limits(stack: Stack, runtime: str) -> None:
    """Or refused; the source is not frozen for long, and the server answers meanwhile."""
    program = """
import os
os.makedirs("/srv/links"); open("/srv/links/0", "w").close()
for number in range(1, 20000):
    os.link("/srv/links/0", f"/srv/links/{number}")
for number in range(5000):
    os.symlink("l" * 100, f"/srv/links/s{number}")
print("done")
"""
    with closing_manager(stack) as manager, removed(stack.create(runtime, policy=None)) as sandbox:
        run(sandbox, program)
        snapshot = ready(manager, sandbox)
        with removed(restore(stack, snapshot, runtime)) as restored:
            shown = restored.commands.run("ls /srv/links | wc -l; stat -c %h /srv/links/19999").text
        manager.delete_snapshot(snapshot)
    assert ["25000", "20000"] == (shown or "").split()


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_no_secret_token_key_or_policy_is_in_a_snapshot(stack: Stack, runtime: str, values: Secrets) -> None:
    """After the use of a secret. As a control, a mark that the sandbox wrote is found in the same bytes."""
    mark = f"mark-{time.time_ns()}"
    sandbox = DemoSandbox(stack, runtime, values)
    try:
        with closing_manager(stack) as manager:
            inner = stack.connect(sandbox.id)
            inner.files.write_file("/srv/mark", mark)
            inner.commands.run("curl -sS https://api.bank.example/v1/me > /srv/answer; pip config list > /srv/pip 2>&1")
            inner.commands.run("env > /tmp/environment-is-the-sandboxes-own; rm /tmp/environment-is-the-sandboxes-own")
            headers = inner.get_endpoint(44772).headers
            snapshot = ready(manager, inner)
            inner.close()
            layer = _top_layer(stack, snapshot)
            config = stack.docker("inspect", f"{_image(stack, snapshot)}").stdout.encode()
            manager.delete_snapshot(snapshot)
    finally:
        sandbox.close()
    plan = [*(stack.run / "sandboxes").glob("*/launch")]
    assert mark.encode() in layer
    canaries = [values.git, values.index, values.api, *(headers or {}).values(), stack.api_key]
    canaries += ["BEGIN PRIVATE KEY", "BEGIN EC PRIVATE KEY", "default: deny-all"]
    found = [canary[:12] for canary in canaries if canary.encode() in layer + config]
    assert [] == found
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        names = {member.name.removeprefix("./") for member in archive.getmembers()}
    assert "srv/mark" in names
    ours = (
        "opt/opensandbox",
        "etc/hosts",
        "etc/hostname",
        "etc/resolv.conf",
        "etc/machine-id",
        "dev/",
        "proc/",
        "sys/",
    )
    assert [] == [name for name in names if name.startswith(ours)]
    assert all(path.read_bytes().strip() not in layer for path in plan)


def _image(stack: Stack, snapshot: str) -> str:
    images = stack.docker("images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    return next(name for name in images if name.endswith(f":{snapshot}"))


def _top_layer(stack: Stack, snapshot: str) -> bytes:
    """Return a tar of the files of a snapshot's own layer."""
    found = json.loads(stack.docker("inspect", _image(stack, snapshot)).stdout)[0]
    upper = Path(found["GraphDriver"]["Data"]["UpperDir"])
    return subprocess.run(["tar", "-C", str(upper), "-cf", "-", "."], capture_output=True, check=True).stdout


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_create_call_cannot_name_a_snapshot_as_its_image(stack: Stack, runtime: str) -> None:
    """By no tag, id, short id or digest; the list of images does not have it. As a control, the restore works."""
    with closing_manager(stack) as manager, removed(stack.create(runtime, policy=None)) as sandbox:
        sandbox.commands.run("echo private > /srv/private")
        snapshot = ready(manager, sandbox)
        name = _image(stack, snapshot)
        ident = json.loads(stack.docker("inspect", name).stdout)[0]["Id"]
        names = [name, ident, ident.removeprefix("sha256:"), ident[7:19]]
        for uri in names:
            with pytest.raises(SandboxException, match="IMAGE_PULL_FAILED") as caught:
                stack.create(runtime, uri, policy=None)
            assert "sallyport-snapshots/" not in str(caught.value).replace(name, "")
        with removed(restore(stack, snapshot, runtime)) as restored:
            assert "private" == (restored.commands.run("cat /srv/private").text or "").strip()
        manager.delete_snapshot(snapshot)
