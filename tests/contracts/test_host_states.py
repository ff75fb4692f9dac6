"""hostd describes a sandbox with one list of states. The control plane knows exactly the states of that list."""

from typing import Any

import pytest

from lifecycle.sandboxes.reaper import condition
from lifecycle.sandboxes.registry import State
from runtimes.engine.docker import ContainerState, DockerError
from runtimes.sandbox import HostSandbox, describe
from wire import codec
from wire.api.hostd import HostSandboxState, Listed, Runtime
from wire.api.states import HostState
from wire.operations import parameters

DOCKER = ("created", "running", "paused", "restarting", "removing", "exited", "dead")
"""The states of a container in Docker's API."""

SHOWN: dict[HostState, State | None] = {
    HostState.CREATING: None,
    HostState.CREATED: None,
    HostState.RUNNING: State.RUNNING,
    HostState.PAUSED: State.PAUSED,
    HostState.RESTARTING: State.RUNNING,
    HostState.REMOVING: None,
    HostState.EXITED: State.TERMINATED,
    HostState.DEAD: State.TERMINATED,
    HostState.GONE: State.FAILED,
    HostState.UNKNOWN: None,
    HostState.ALARM: State.FAILED,
}
"""The state that the API shows for each; None: the former state."""


class Container:
    """A replacement for `runtimes.engine.docker.Docker`: one container, in the state `status`."""

    def __init__(self, status: str | DockerError | None) -> None:
        self.status = status

    async def state(self, _container: str) -> ContainerState | None:
        if isinstance(self.status, DockerError):
            raise self.status
        return None if self.status is None else ContainerState(self.status, 0, False, 0, "", "")


async def described(status: str | DockerError | None, **changes: Any) -> HostSandboxState:
    """Return hostd's description of a sandbox with a container in that state."""
    docker: Any = Container(status)
    return await describe(HostSandbox("sbx-1", 1, Runtime.RUNC, **({"container": "c"} | changes)), docker)


async def test_hostd_sends_the_states_of_the_list_and_all_of_them() -> None:
    """Docker's states, and hostd's own. A state that only a later release of Docker has is `unknown`, with a reason."""
    sent = [await described(status) for status in DOCKER]
    assert list(DOCKER) == [item.state for item in sent]
    sent += [await described(None), await described(DockerError("no answer")), await described("", container=None)]
    sent += [
        await described("running", alarm="why"),
        *[await described(word) for word in ("hibernating", "alarm", "gone")],
    ]
    assert ["gone", "unknown", "creating", "alarm", "unknown", "unknown", "unknown"] == [
        item.state for item in sent[len(DOCKER) :]
    ]
    assert set(HostState) == {item.state for item in sent}
    assert "hibernating" in sent[-3].reason


@pytest.mark.parametrize("state", HostState)
def test_the_control_plane_decides_on_each_state(state: HostState) -> None:
    shown = condition(HostSandboxState("sbx", state, exit_code=0, worker_pid=1))
    assert SHOWN[state] == (None if shown is None else shown[0])


def test_a_running_sandbox_without_a_worker_is_cut_off() -> None:
    shown = condition(HostSandboxState("sbx", HostState.RUNNING))
    assert shown is not None and (State.RUNNING, "GATEWAY_DOWN") == shown[:2]


@pytest.mark.parametrize("word", ["stopped", "failed", "lost", "cut", "degraded", "RUNNING", "", None])
def test_an_answer_with_a_word_that_hostd_does_not_send_is_refused(word: str | None) -> None:
    item = parameters(HostSandboxState("sbx", HostState.RUNNING))
    assert Listed((HostSandboxState("sbx", HostState.RUNNING),)) == codec.decode(Listed, {"sandboxes": [item]})
    with pytest.raises(codec.CodecError, match="state"):
        codec.decode(Listed, {"sandboxes": [item | {"state": word}]})
