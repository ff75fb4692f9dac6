"""A kill at any step of a snapshot leads to a complete one or to none, and never leaves its source frozen.

It tests `runtimes/snapshotting.py` and `lifecycle/snapshots/service.py` with processes that are killed.
"""

import itertools
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from opensandbox.sync.sandbox import SandboxSync

from runtimes.process.freezer import Freeze, Freezer
from testbed.stack import EMPTY_IMAGE, Stack
from tests.stacks import removed
from tests.system.test_pause import until
from tests.system.test_snapshots import closing_manager, restore

pytestmark = [pytest.mark.system, pytest.mark.images]

_BYTES = 96 << 20
_FINISH = {"Ready", "Failed"}


def _processes(word: str) -> list[int]:
    """Return the processes that have a word in their command line."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return found


def _victims(stack: Stack, victim: str) -> list[int]:
    run = os.fspath(stack.run)
    if victim == "dockerd":
        return [int((stack.run / "docker.pid").read_text())]
    module = {"hostd": "runtimes.hostd", "serve": "lifecycle.serve"}[victim]
    return [pid for pid in _processes(module) if run.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _loading(stack: Stack) -> bool:
    """Return whether the layer is complete and hostd gives it to Docker."""
    layers = list((stack.state / "hostd" / "snapshots").glob("*/layer.tar"))
    return (bool(layers) and not (stack.run / "frozen").exists()) or (bool(layers) and not _notes(stack))


def _notes(stack: Stack) -> list[Path]:
    return list((stack.run / "frozen").iterdir())


READ, LOADED = "while its files are read", "while Docker loads it"
MOMENTS: dict[str, Callable[[Stack], bool]] = {
    READ: lambda stack: bool(_notes(stack)),
    LOADED: _loading,
}


IN_EACH_RUN = {("hostd", READ)}


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        pytest.param(*case, marks=[] if case in IN_EACH_RUN else pytest.mark.extended)
        for case in itertools.product(("hostd", "serve", "dockerd"), MOMENTS)
    ],
)
def test_a_kill_at_any_step_leads_to_a_whole_snapshot_or_to_none(second: Stack, victim: str, moment: str) -> None:
    """A failed one has left nothing; a ready one can be restored; the source runs and is not frozen."""
    for runtime in ("runc", "runsc"):
        with removed(_source(second, runtime)) as sandbox:
            _kill_during_a_snapshot(second, sandbox, runtime, victim, moment)


def _kill_during_a_snapshot(stack: Stack, sandbox: SandboxSync, runtime: str, victim: str, moment: str) -> None:
    name = sandbox.create_snapshot().id
    assert until(lambda: MOMENTS[moment](stack), 30)
    for pid in _victims(stack, victim):
        os.kill(pid, signal.SIGKILL)
    assert until(stack.healthy, 60)
    assert until(lambda: _state(stack, name) in _FINISH, 90), stack.tail()
    assert Freeze.THAWED is Freezer().state(stack.container(sandbox.id))
    assert until(lambda: _answers(stack, sandbox.id), 60)
    assert until(lambda: [] == _notes(stack), 10)
    assert until(lambda: [] == list((stack.state / "hostd" / "snapshots").iterdir()), 30)
    print(victim, moment, runtime, _state(stack, name))
    if _state(stack, name) == "Ready":
        with removed(restore(stack, name, runtime)) as restored:
            assert _BYTES == restored.files.get_file_info(["/srv-data"])["/srv-data"].size
    else:
        assert until(lambda: name not in stack.docker("images", "--format", "{{.Tag}}").stdout.split(), 90)
    with closing_manager(stack) as manager:
        manager.delete_snapshot(name)


def _source(stack: Stack, runtime: str) -> SandboxSync:
    sandbox = stack.create(runtime, EMPTY_IMAGE, policy=None)
    sandbox.files.write_file("/srv-data", secrets.token_bytes(_BYTES))
    return sandbox


def _state(stack: Stack, snapshot: str) -> str:
    try:
        with closing_manager(stack) as manager:
            return manager.get_snapshot(snapshot).status.state
    except Exception:  # noqa: BLE001 - the server can be restarting
        time.sleep(0.1)
        return ""


def _answers(stack: Stack, sandbox: str) -> bool:
    try:
        inner = stack.connect(sandbox)
        try:
            return bool(inner.is_healthy())
        finally:
            inner.close()
    except Exception:  # noqa: BLE001 - its gateway can be restarting
        return False
