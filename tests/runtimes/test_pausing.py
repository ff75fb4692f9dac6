"""The order of a pause and a resume, and what happens when a part of it fails or another program is faster.

The kernel, the worker and Docker are replaced. tests/system/test_pause.py has the real ones.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

import wire
from runtimes.engine.docker import ContainerState, DockerError
from runtimes.pausing import Pausing
from runtimes.process.freezer import Freeze, NoProcesses
from runtimes.sandbox import HostSandbox
from wire.api.hostd import Runtime

ERRORS = (
    wire.RemoteError(wire.Code.TIMEOUT, "a flow did not end"),
    ConnectionResetError(),
    TimeoutError(),
)


@dataclass
class Host:
    """A replacement of freezer, worker and Docker, which notes the calls. `fails` has the errors of calls."""

    frozen: Freeze = Freeze.THAWED
    status: str = "running"
    calls: list[str] = field(default_factory=list)
    fails: dict[str, BaseException] = field(default_factory=dict)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    def state(self, _container: str) -> Freeze:
        return self.frozen

    async def freeze(self, _container: str) -> None:
        self._call("freeze")
        self.frozen = Freeze.FROZEN

    def thaw(self, _container: str) -> None:
        self._call("thaw")
        self.frozen = Freeze.THAWED

    async def pause(self) -> None:
        self._call("pause")

    async def resume(self) -> None:
        self._call("resume")

    def kill(self) -> None:
        self.calls.append("kill")


@dataclass
class Containers:
    """A replacement of Docker, for the container of a `Host`."""

    host: Host

    async def unpause(self, _container: str) -> None:
        self.host._call("unpause")
        self.host.status = "running"
        self.host.frozen = Freeze.THAWED

    async def state(self, _container: str) -> ContainerState:
        return ContainerState(self.host.status, 0, False, 1, "", "")


def parts(runtime: Runtime = Runtime.RUNC, **changes: Any) -> tuple[Host, Pausing, HostSandbox]:
    host = Host(**changes)
    worker: Any = host
    freezer: Any = host
    docker: Any = Containers(host)
    sandbox = HostSandbox("sbx-1", 1, runtime, container="c", running=True, worker=worker)
    return host, Pausing(freezer, docker), sandbox


async def test_processes_stop_before_the_worker_and_run_after_it() -> None:
    host, pausing, sandbox = parts()
    await pausing.pause(sandbox)
    assert (["freeze", "pause"], True) == (host.calls, sandbox.paused)
    assert not pausing.differs(sandbox, by_docker=False)
    host.calls.clear()
    await pausing.resume(sandbox)
    assert (["resume", "thaw"], False) == (host.calls, sandbox.paused)
    assert not pausing.differs(sandbox, by_docker=False)


@pytest.mark.parametrize("op", ["pause", "resume"])
async def test_both_can_be_repeated(op: str) -> None:
    _, pausing, sandbox = parts()
    for _ in range(2):
        await getattr(pausing, op)(sandbox)
    assert (op == "pause") is sandbox.paused


@pytest.mark.parametrize(
    ("error", "code"),
    [(NoProcesses(), "not_running"), (OSError("no freezer"), "host"), (TimeoutError(), "host")],
    ids=["none", "error", "time-out"],
)
async def test_a_sandbox_that_cannot_be_frozen_runs(error: Exception, code: str) -> None:
    host, pausing, sandbox = parts(fails={"freeze": error})
    with pytest.raises(wire.RequestError) as refused:
        await pausing.pause(sandbox)
    assert (code, False, ["freeze"]) == (refused.value.code, sandbox.paused, host.calls)


@pytest.mark.parametrize("error", ERRORS, ids=["refused", "ended", "time-out"])
async def test_a_worker_that_does_not_confirm_is_killed(error: Exception) -> None:
    """The next worker is made for the state of the sandbox: the change is complete."""
    host, pausing, sandbox = parts(fails={"pause": error, "resume": error})
    await pausing.pause(sandbox)
    assert (["freeze", "pause", "kill"], True) == (host.calls, sandbox.paused)
    host.calls.clear()
    await pausing.resume(sandbox)
    assert (["resume", "kill", "thaw"], False) == (host.calls, sandbox.paused)


async def test_without_a_worker_the_processes_are_frozen_and_thawed() -> None:
    host, pausing, sandbox = parts()
    sandbox.worker = None
    await pausing.pause(sandbox)
    await pausing.resume(sandbox)
    assert ["freeze", "thaw"] == host.calls


async def test_a_sandbox_that_cannot_be_thawed_stays_paused() -> None:
    host, pausing, sandbox = parts()
    await pausing.pause(sandbox)
    host.fails["thaw"] = OSError()
    host.calls.clear()
    with pytest.raises(wire.RequestError) as refused:
        await pausing.resume(sandbox)
    assert ("host", True) == (refused.value.code, sandbox.paused)
    assert ["resume", "thaw", "pause"] == host.calls


async def test_a_sandbox_that_has_ended_cannot_be_resumed() -> None:
    _, pausing, sandbox = parts(fails={"thaw": FileNotFoundError()})
    await pausing.pause(sandbox)
    with pytest.raises(wire.RequestError) as refused:
        await pausing.resume(sandbox)
    assert "not_running" == refused.value.code


@pytest.mark.parametrize("runtime", Runtime)
async def test_a_pause_by_docker_is_completed_and_can_be_resumed(runtime: Runtime) -> None:
    """runsc must run to answer Docker. runc thaws the container itself, and refuses if it is thawed already."""
    host, pausing, sandbox = parts(runtime, status="paused")
    host.frozen = Freeze.FROZEN if runtime is Runtime.RUNC else Freeze.THAWED
    assert pausing.differs(sandbox, by_docker=True)
    await pausing.settle(sandbox)
    assert (["freeze", "pause"], True) == (host.calls, sandbox.paused)
    assert not pausing.differs(sandbox, by_docker=True)
    host.calls.clear()
    await pausing.resume(sandbox)
    first = ["unpause"] if runtime is Runtime.RUNC else ["thaw", "unpause"]
    assert ["resume", *first, "thaw"] == host.calls
    assert not sandbox.paused_by_docker
    assert not pausing.differs(sandbox, by_docker=False)


async def test_docker_refuses_to_end_its_pause() -> None:
    """The sandbox stays paused, unless Docker has ended the pause meanwhile."""
    host, pausing, sandbox = parts(status="paused", fails={"unpause": DockerError("no")})
    await pausing.settle(sandbox)
    with pytest.raises(wire.RequestError):
        await pausing.resume(sandbox)
    assert sandbox.paused
    host.status = "running"
    await pausing.resume(sandbox)
    assert not sandbox.paused


async def test_a_sandbox_that_another_program_thawed_runs_with_its_gateway() -> None:
    host, pausing, sandbox = parts()
    await pausing.pause(sandbox)
    host.frozen = Freeze.THAWED
    assert pausing.differs(sandbox, by_docker=False)
    host.calls.clear()
    await pausing.settle(sandbox)
    assert (["resume", "thaw"], False) == (host.calls, sandbox.paused)


@pytest.mark.parametrize("was_paused", [False, True], ids=["resumed", "paused"])
async def test_what_docker_said_before_a_change_has_no_effect(was_paused: bool) -> None:
    """A list that began before a resume says that Docker holds the container."""
    host, pausing, sandbox = parts()
    if was_paused:
        await pausing.pause(sandbox)
    assert pausing.differs(sandbox, by_docker=True)
    assert pausing.differs(sandbox, by_docker=True)  # a question changes nothing
    host.calls.clear()
    await pausing.settle(sandbox)
    assert ([], was_paused, False) == (host.calls, sandbox.paused, sandbox.paused_by_docker)


async def test_a_pause_by_docker_of_a_paused_sandbox_is_undone_by_its_resume() -> None:
    host, pausing, sandbox = parts()
    await pausing.pause(sandbox)
    host.status = "paused"
    assert pausing.differs(sandbox, by_docker=True)
    await pausing.settle(sandbox)
    host.calls.clear()
    await pausing.resume(sandbox)
    assert (["resume", "unpause", "thaw"], "running") == (host.calls, host.status)


async def test_a_docker_that_does_not_answer_is_no_difference() -> None:
    """Otherwise each list would hold the sandbox's lock while it waits for Docker. The kernel's state still counts."""
    host, pausing, sandbox = parts(status="paused")
    assert not pausing.differs(sandbox, by_docker=None)
    await pausing.settle(sandbox)
    assert sandbox.paused_by_docker
    assert not pausing.differs(sandbox, by_docker=None)
    sandbox.paused_by_docker, host.frozen = False, Freeze.THAWED
    assert pausing.differs(sandbox, by_docker=None)


@pytest.mark.parametrize("state", Freeze)
def test_a_new_hostd_reads_the_state_from_the_kernel(state: Freeze) -> None:
    """A freeze that hostd's death interrupted is a pause: the kernel completes it."""
    _, pausing, sandbox = parts(frozen=state)
    assert (state is not Freeze.THAWED) is pausing.was_paused(sandbox)
