"""A snapshot has exactly the files of its source, and nothing else; a restore begins with exactly these.

It tests `runtimes/snapshotting.py`, `runtimes/snapshots/capture.py`, `runtimes/snapshots/image.py` and
`lifecycle/snapshots/service.py` with the published SDK.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from opensandbox.exceptions import SandboxException
from opensandbox.models.sandboxes import SnapshotInfo
from opensandbox.sync.manager import SandboxManagerSync
from opensandbox.sync.sandbox import SandboxSync

from testbed.internet import API, Internet
from testbed.stack import Stack
from tests.conftest import ON_RUNSC
from tests.stacks import removed
from tests.system.snapshot_content import DESCRIBE, MAKE
from tests.system.test_pause import until

pytestmark = [pytest.mark.system, pytest.mark.images]
_PATIENCE = 120.0


@contextmanager
def closing_manager(stack: Stack) -> Iterator[SandboxManagerSync]:
    """Use a manager of the SDK."""
    manager = SandboxManagerSync.create(stack.connection)
    try:
        yield manager
    finally:
        manager.close()


def run(sandbox: SandboxSync, program: str) -> str:
    """Run a Python program in a sandbox; return what it printed."""
    sandbox.files.write_file("/root/program.py", program)
    done = sandbox.commands.run("python3 /root/program.py 2>&1; rm /root/program.py")
    assert done.exit_code == 0, done.text
    return done.text or ""


def described(sandbox: SandboxSync) -> dict[str, dict[str, Any]]:
    """Return a description of every file of a sandbox."""
    print(run(sandbox, DESCRIBE))
    found: dict[str, dict[str, Any]] = json.loads(sandbox.files.read_file("/tmp/describe.json"))
    sandbox.commands.run("rm /tmp/describe.json")
    return found


def settled(manager: SandboxManagerSync, snapshot: SnapshotInfo) -> SnapshotInfo:
    """Wait until a snapshot is not being created any more, as clients do."""
    deadline = time.monotonic() + _PATIENCE
    while snapshot.status.state == "Creating":
        assert time.monotonic() < deadline
        time.sleep(0.05)
        snapshot = manager.get_snapshot(snapshot.id)
    return snapshot


def restore(stack: Stack, snapshot: str, runtime: str, policy: str | None = None, **options: Any) -> SandboxSync:
    """Begin a sandbox with a snapshot."""
    extensions = {"sallyport.runtime": runtime, **({"sallyport.policy": policy} if policy else {})}
    return SandboxSync.create(
        snapshot_id=snapshot,
        connection_config=stack.connection,
        extensions=extensions,
        timeout=timedelta(hours=1),
        **options,
    )


def ready(manager: SandboxManagerSync, sandbox: SandboxSync) -> str:
    """Take a snapshot; return its id."""
    snapshot = settled(manager, sandbox.create_snapshot())
    assert "Ready" == snapshot.status.state, snapshot.status.message
    return snapshot.id


def exact(found: dict[str, dict[str, Any]], source: str) -> dict[str, dict[str, Any]]:
    """Return a description without what the runtime of the source does not keep."""
    if source == "runsc":
        for item in found.values():
            if "mtime" in item:
                item["mtime"] = (item["mtime"] + 5 * 10**8) // 10**9  # runsc rounds to seconds
    return found


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("runsc", "runc"),
        *(
            pytest.param(*pair, marks=pytest.mark.extended)
            for pair in (("runc", "runsc"), ("runc", "runc"), ("runsc", "runsc"))
        ),
    ],
)
def test_a_restored_sandbox_has_exactly_the_files_of_its_source(stack: Stack, source: str, target: str) -> None:
    """Owner, mode, type, size, content, links, extended attributes, times, holes; and nothing that was removed."""
    with closing_manager(stack) as manager, removed(stack.create(source)) as sandbox:
        print(run(sandbox, MAKE))
        before = described(sandbox)
        began = time.monotonic()
        snapshot = sandbox.create_snapshot("exact")
        assert ("Creating", "snapshot_accepted") == (snapshot.status.state, snapshot.status.reason)
        ready = settled(manager, snapshot)
        print("took", time.monotonic() - began)
        assert ("Ready", "snapshot_runtime_ready") == (ready.status.state, ready.status.reason), ready.status.message
        assert "in tmp" == sandbox.files.read_file("/tmp/kept")
        with removed(restore(stack, snapshot.id, target)) as restored:
            after = described(restored)
        before, after = exact(before, source), exact(after, source)
        differing = {
            path: (before.get(path), after.get(path))
            for path in before.keys() | after.keys()
            if before.get(path) != after.get(path)
        }
        assert {} == dict(list(differing.items())[:20])
        manager.delete_snapshot(snapshot.id)


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_snapshot_of_a_restored_sandbox_has_the_files_of_both(stack: Stack, runtime: str) -> None:
    """What the first one wrote, what the second one wrote, and not what the second one removed."""
    with closing_manager(stack) as manager, removed(stack.create(runtime, policy=None)) as first:
        first.commands.run("mkdir /srv/d; echo 1 > /srv/d/one; echo 2 > /srv/two; rm /etc/issue")
        one = ready(manager, first)
        with removed(restore(stack, one, runtime)) as second:
            second.commands.run("rm -r /srv/d; mkdir /srv/d; echo 3 > /srv/d/three; echo 4 >> /srv/two")
            two = ready(manager, second)
        with removed(restore(stack, two, runtime)) as third:
            shown = third.commands.run("cd /srv; ls d; cat d/three two; ls /etc/issue 2>&1").text
        for snapshot in (two, one):
            manager.delete_snapshot(snapshot)
    assert "three\n3\n2\n4\nls: cannot access '/etc/issue': No such file or directory" == (shown or "").strip()


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_the_source_keeps_its_processes_and_connections(stack: Stack, runtime: str) -> None:
    """A program that counts goes on, and the output of a command that began before arrives to its end."""
    counting = "import time\nfor n in range(10**9): print(n, flush=True); time.sleep(0.01)"
    with closing_manager(stack) as manager, removed(stack.create(runtime, policy=None)) as sandbox:
        sandbox.files.write_file("/root/count.py", counting)
        sandbox.commands.run("nohup python3 /root/count.py > /root/counted 2>&1 &")
        with ThreadPoolExecutor(1) as pool:
            streamed = pool.submit(sandbox.commands.run, "for n in 1 2 3 4 5 6 7 8; do echo $n; sleep 0.5; done")
            snapshot = ready(manager, sandbox)
            assert [str(number) for number in range(1, 9)] == (streamed.result().text or "").split()
        before = int((sandbox.commands.run("tail -n 1 /root/counted").text or "0").strip())
        after = int((sandbox.commands.run("sleep 0.5; tail -n 1 /root/counted").text or "0").strip())
        manager.delete_snapshot(snapshot)
    assert after > before


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_restores_at_once_differ_in_everything_that_identifies_a_sandbox(stack: Stack, runtime: str) -> None:
    """Id, CA, token, machine id and host name. Each has the files; each reaches nothing without a policy."""
    with closing_manager(stack) as manager, removed(stack.create(runtime, policy=None)) as source:
        source.commands.run("echo kept > /srv/kept; rm -f /etc/machine-id; echo x > /srv/x")
        snapshot = ready(manager, source)
        with ThreadPoolExecutor(3) as pool:
            restored = list(pool.map(lambda _: restore(stack, snapshot, runtime), range(3)))
        try:
            show = "cat /srv/kept; cat /etc/machine-id /etc/hostname; sha256sum < /opt/opensandbox/ca-bundle.pem"
            shown = [(one.commands.run(show).text or "").splitlines() for one in (source, *restored)]
            tokens = {json.dumps(one.get_endpoint(44772).headers) for one in (source, *restored)}
            with pytest.raises(SandboxException, match="DELETE_CONFLICT"):
                manager.delete_snapshot(snapshot)
            reached = restored[0].commands.run(
                f"curl -sS -m 5 https://{API}/v1/me -o /dev/null -w '%{{http_code}}' 2>&1"
            )
        finally:
            for one in restored:
                one.kill()
                one.close()
        manager.delete_snapshot(snapshot)
    assert [["kept"]] * 4 == [lines[:1] for lines in shown]
    for column in range(1, 4):
        assert 4 == len({lines[column] for lines in shown}), column
    assert 4 == len(tokens)
    assert "200" not in (reached.text or "")


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_restore_has_the_policy_of_its_own_call(stack: Stack, runtime: str, internet: Internet) -> None:
    """The source's policy does not come with its files: the control with the policy is answered."""
    with closing_manager(stack) as manager, removed(stack.create(runtime)) as source:
        ask = f"curl -sS -m 8 https://{API}/v1/me -o /dev/null -w '%{{http_code}}' 2>&1"
        with_policy = source.commands.run(ask).text
        snapshot = ready(manager, source)
        with removed(restore(stack, snapshot, runtime, "agents")) as restored:
            again = restored.commands.run(ask).text
        with removed(restore(stack, snapshot, runtime)) as restored:
            without = restored.commands.run(ask).text
        manager.delete_snapshot(snapshot)
    assert ("200", "200") == (with_policy, again)
    assert "200" not in (without or "")


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_removal_of_the_source_ends_its_snapshot(stack: Stack, runtime: str) -> None:
    """The snapshot is failed and nothing of it is left; the removal does not wait for it."""
    with closing_manager(stack) as manager, removed(stack.create(runtime, policy=None)) as sandbox:
        sandbox.commands.run("head -c 300000000 /dev/urandom > /srv/data")
        snapshot = sandbox.create_snapshot()
        frozen, staged = stack.run / "frozen", stack.state / "hostd" / "snapshots"
        assert until(lambda: any(frozen.iterdir()), 30)
        sandbox.kill()
        ended = settled(manager, snapshot)
        left = [*frozen.iterdir(), *staged.iterdir()]
        manager.delete_snapshot(snapshot.id)
    assert ("Failed", "snapshot_runtime_failed") == (ended.status.state, ended.status.reason)
    assert [] == left
