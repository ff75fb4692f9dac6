"""To the host and to other sandboxes, root of a sandbox on runc is a user that no other process has."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from opensandbox.sync.sandbox import SandboxSync

from runtimes.engine.user_namespace import RANGE
from runtimes.spec import sandbox_users
from testbed.stack import Stack
from tests.runtimes.test_spec import UIDS

pytestmark = pytest.mark.system

_LOCK = 'python3 -c \'import fcntl, time; f = open("/dev/null"); fcntl.flock(f, 6); print("locked")\''
_HOLD = (
    'python3 -c \'import fcntl, time; f = open("/dev/null"); fcntl.flock(f, 6); open("/tmp/held", "w"); '
    "time.sleep(600)' & echo $! >/tmp/holder; until [ -e /tmp/held ]; do sleep 0.05; done"
)


@pytest.fixture(scope="module", name="pair")
def _pair(stack: Stack) -> Iterator[tuple[SandboxSync, SandboxSync]]:
    made: list[SandboxSync] = []
    try:
        made.append(stack.create("runc"))
        made.append(stack.create("runc"))
        yield made[0], made[1]
    finally:
        for sandbox in made:
            sandbox.kill()
            sandbox.close()


def said(sandbox: SandboxSync, command: str) -> str:
    execution = sandbox.commands.run(command)
    return "".join(message.text for message in (*execution.logs.stdout, *execution.logs.stderr)).strip()


def first_process(stack: Stack, sandbox: SandboxSync) -> Path:
    container = stack.container(str(sandbox.id))
    return Path("/proc", stack.docker("inspect", "-f", "{{.State.Pid}}", container).stdout.strip())


def test_each_sandbox_is_another_user_to_the_host(stack: Stack, pair: tuple[SandboxSync, SandboxSync]) -> None:
    users = [first_process(stack, sandbox).stat().st_uid for sandbox in pair]

    assert 2 == len(set(users))
    for sandbox, user in zip(pair, users, strict=True):
        assert user in range(sandbox_users(0), sandbox_users(UIDS.workers), RANGE)
        assert ["0", str(user), str(RANGE)] == said(sandbox, "cat /proc/self/uid_map").split()
        assert ["0", str(user), str(RANGE)] == said(sandbox, "cat /proc/self/gid_map").split()


def test_the_image_belongs_to_root_in_each_sandbox_and_can_be_changed(pair: tuple[SandboxSync, SandboxSync]) -> None:
    for sandbox in pair:
        assert "0:0" == said(sandbox, "stat -c %u:%g /etc/passwd")
        assert "" == said(sandbox, "touch /etc/passwd && chown 1000:1000 /usr/bin/env && echo a >>/etc/passwd")
        assert "1000:1000" == said(sandbox, "stat -c %u:%g /usr/bin/env")
        assert "a" == said(sandbox, "tail -n 1 /etc/passwd")


def test_a_lock_on_a_device_is_not_seen_by_a_neighbour(pair: tuple[SandboxSync, SandboxSync]) -> None:
    one, other = pair
    said(one, _HOLD)
    try:
        assert "BlockingIOError" in said(one, _LOCK)  # the control: the first lock is held
        assert "locked" == said(other, _LOCK)
    finally:
        said(one, "kill -KILL $(cat /tmp/holder)")


def test_nothing_of_a_sandboxs_mounts_is_on_the_host(pair: tuple[SandboxSync, SandboxSync]) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    assert "/dev/sallyport" not in mounts
    assert not os.path.exists("/dev/sallyport")
    for sandbox in pair:
        assert "/dev/sallyport/user" not in said(sandbox, "cat /proc/self/mountinfo")
