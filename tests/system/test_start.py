"""A create call whose entrypoint cannot be started says so at once. Hooks run before the entrypoint and beside it.

It tests `lifecycle/sandboxes/starting.py`.
"""

import time
from typing import Any

import pytest
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import LifecycleHook, PeriodicLifecycleHook, SandboxLifecycle

from lifecycle.sandboxes import starting
from testbed.census import take
from testbed.stack import EMPTY_IMAGE, IMAGE, Stack
from tests.conftest import ON_RUNSC
from tests.system.test_create_and_delete import settled, until

pytestmark = [pytest.mark.system, pytest.mark.images]

IDLE = ["tail", "-f", "/dev/null"]


@pytest.fixture(scope="module", autouse=True)
def _warm(stack: Stack) -> None:
    """Docker and runsc keep some things of their first containers."""
    for runtime in ("runc", "runsc"):
        made = stack.create(runtime, EMPTY_IMAGE)
        made.kill()
        made.close()


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({"entrypoint": ["/no/such-program"]}, 127, "/no/such-program"),
        ({"entrypoint": ["no-such-program"], "image": EMPTY_IMAGE}, 127, "no-such-program"),
        ({"entrypoint": ["/etc/passwd"]}, 126, "/etc/passwd"),
        (
            {
                "entrypoint": IDLE,
                "lifecycle": SandboxLifecycle(
                    periodic=[PeriodicLifecycleHook(name="n", schedule="when it rains", command=["true"])]
                ),
            },
            2,
            "schedule",
        ),
    ],
    ids=["missing", "empty-image", "not-executable", "schedule"],
)
@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_start_that_fails_is_the_answer_of_the_create_call(
    stack: Stack, runtime: str, options: dict[str, Any], code: int, said: str
) -> None:
    """With the exit code and the output. A start that takes longer is no failure: see the next test."""
    before = take(stack)
    with pytest.raises(SandboxApiException) as refused:
        stack.create(runtime, **{"image": IMAGE, **options})
    assert "DOCKER::SANDBOX_START_FAILED" in str(refused.value)
    assert f"exit code {code};" in str(refused.value)
    assert said in str(refused.value)
    assert {} == settled(stack, before)


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_hooks_run_before_the_entrypoint_and_beside_it(stack: Stack, runtime: str) -> None:
    """The create call does not wait for the first one. The entrypoint does."""
    tick = PeriodicLifecycleHook(name="t", schedule="@every 1s", command=_shell("echo tick >>/tmp/log").command)
    first = _shell("until [ -e /tmp/go ]; do sleep 0.05; done; echo before >>/tmp/log")
    hooks = SandboxLifecycle(preStart=first, periodic=[tick])
    entrypoint = ["sh", "-c", "echo main ${OPENSANDBOX_LIFECYCLE-none} >>/tmp/log; exec tail -f /dev/null"]
    made = stack.create(runtime, lifecycle=hooks, entrypoint=entrypoint)
    try:
        time.sleep(1.5)
        assert [] == _lines(made)
        made.files.write_file("/tmp/go", "")
        assert until(lambda: "tick" in _lines(made))
        assert ["before", "main none"] == [line for line in _lines(made) if line != "tick"]
    finally:
        made.kill()
        made.close()


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_a_hook_that_fails_ends_the_sandbox(stack: Stack, runtime: str) -> None:
    hooks = SandboxLifecycle(preStart=_shell(f"sleep {starting.SECONDS / 2}; exit 4"))
    made = stack.create(runtime, lifecycle=hooks, entrypoint=["touch", "/tmp/never"])
    try:
        assert until(lambda: "Failed" == made.get_info().status.state)
    finally:
        made.kill()
        made.close()


def _shell(text: str) -> LifecycleHook:
    return LifecycleHook(command=["sh", "-c", text])


def _lines(made: Any) -> list[str]:
    printed = made.commands.run("cat /tmp/log 2>/dev/null || true").logs.stdout
    return [line for message in printed for line in message.text.splitlines()]
