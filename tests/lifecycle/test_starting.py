"""The wait for the entrypoint of a new sandbox, with an execd and a hostd whose answers the test determines."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

import wire
from lifecycle.api.errors import ApiError
from lifecycle.daemon_clients import Unreachable
from lifecycle.sandboxes.starting import Reached, Starting
from wire.api.hostd import HostSandboxState, Printed
from wire.api.states import HostState

NAME = "sbx-" + "1" * 24


@dataclass
class Host:
    """What execd answers, one after the other; the last answer stays. Also hostd's answers."""

    answers: list[Reached]
    state_now: HostSandboxState | Exception = field(default_factory=lambda: HostSandboxState(NAME, HostState.RUNNING))
    printed: Printed | Exception = field(default_factory=lambda: Printed("", False))
    asked: int = 0

    async def reached(self, sandbox: str) -> Reached:
        assert NAME == sandbox
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def state(self, _sandbox: str) -> HostSandboxState:
        if isinstance(self.state_now, Exception):
            raise self.state_now
        return self.state_now

    async def output(self, _sandbox: str, _lines: int) -> Printed:
        if isinstance(self.printed, Exception):
            raise self.printed
        return self.printed


def starting(host: Host, seconds: float = 30.0) -> Starting:
    hostd: Any = host
    return Starting(hostd, host.reached, seconds)


async def test_the_wait_ends_when_the_entrypoint_was_started() -> None:
    host = Host([Reached.NOTHING, Reached.NOTHING, Reached.SERVING, Reached.STARTED])
    await starting(host).wait(NAME, started=True)
    assert 4 == host.asked


@pytest.mark.parametrize("answer", [Reached.SERVING, Reached.STARTED])
async def test_an_entrypoint_after_a_hook_is_not_waited_for(answer: Reached) -> None:
    host = Host([Reached.NOTHING, answer, Reached.STARTED])
    await starting(host).wait(NAME, started=False)
    assert 2 == host.asked


@pytest.mark.parametrize("answer", [Reached.NOTHING, Reached.SERVING])
async def test_an_entrypoint_that_takes_long_is_not_a_failure(answer: Reached) -> None:
    began = time.monotonic()
    await starting(Host([answer]), 0.3).wait(NAME, started=True)
    assert 0.3 <= time.monotonic() - began


@pytest.mark.parametrize("state", [HostState.EXITED, HostState.DEAD])
@pytest.mark.parametrize("hooks", [False, True])
async def test_one_that_has_ended_is_refused_with_its_code_and_the_end_of_its_output(
    state: HostState, hooks: bool
) -> None:
    """Its text is hostile: it has no control characters, no line ends, and a limit."""
    text = "x" * 5000 + "\n\x1b[31mno such\r\nprogram\u202e\n"
    host = Host([Reached.NOTHING], HostSandboxState(NAME, state, exit_code=127), Printed(text, False))
    with pytest.raises(ApiError) as refused:
        await starting(host).wait(NAME, started=not hooks)
    assert (500, "DOCKER::SANDBOX_START_FAILED") == (refused.value.status, refused.value.code)
    message = refused.value.message
    assert message.startswith("The entrypoint ended with exit code 127; the end of its output: xxx")
    assert message.endswith("no such program\\u{202e}")
    assert message.isprintable()
    assert "The entrypoint ended with exit code 127." == refused.value.stored  # without the output
    assert len(message) < 1200


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (HostSandboxState(NAME, HostState.EXITED, exit_code=3), "ended with exit code 3; it has written nothing"),
        (HostSandboxState(NAME, HostState.EXITED, exit_code=137, oom=True), "was ended at its memory limit; it has"),
    ],
)
async def test_the_refusal_says_how_it_ended(state: HostSandboxState, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        await starting(Host([Reached.NOTHING], state)).wait(NAME, started=True)
    assert message in refused.value.message


@pytest.mark.parametrize(
    "error", [Unreachable("hostd", TimeoutError()), wire.RemoteError(wire.Code.DOCKER, "no")], ids=["hostd", "docker"]
)
async def test_one_that_has_ended_is_refused_also_without_its_output(error: Exception) -> None:
    host = Host([Reached.NOTHING], HostSandboxState(NAME, HostState.EXITED, exit_code=3))
    host.printed = error
    with pytest.raises(ApiError) as refused:
        await starting(host).wait(NAME, started=True)
    assert refused.value.message == "The entrypoint ended with exit code 3; its output cannot be read"


@pytest.mark.parametrize(
    "state",
    [
        HostSandboxState(NAME, HostState.EXITED, exit_code=0),
        Unreachable("hostd", TimeoutError()),
        wire.RemoteError(wire.Code.UNKNOWN_SANDBOX, "no"),
    ],
    ids=["done", "unreachable", "unknown"],
)
async def test_an_end_without_an_error_and_an_unknown_one_are_left_to_the_observer(
    state: HostSandboxState | Exception,
) -> None:
    async with asyncio.timeout(10):
        await starting(Host([Reached.NOTHING], state)).wait(NAME, started=True)
