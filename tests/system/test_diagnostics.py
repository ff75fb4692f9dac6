"""Diagnostics on real sandboxes, read with the published Python SDK and the plain routes: live, and after the removal.

The output is what Docker has logged. It is searched for the values of the caller's environment, at the borders where
Docker divides a line too. It tests `lifecycle/api/routes/diagnostics.py` and `lifecycle/sandboxes/diagnostics.py`.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from opensandbox import SandboxManager
from opensandbox.config import ConnectionConfig
from opensandbox.exceptions import SandboxException
from opensandbox.models.diagnostics import DiagnosticContent
from opensandbox.models.sandboxes import NetworkPolicy, NetworkRule
from opensandbox.sync.manager import SandboxManagerSync
from opensandbox.sync.sandbox import SandboxSync

from runtimes.engine.printed import PART
from testbed.census import daemons
from testbed.internet import API
from testbed.stack import Stack
from tests.conftest import ON_RUNC

pytestmark = pytest.mark.system

SECRET = "s3cr3t/of+the-caller=="
KEY = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n-----END KEY-----\n"
BORDERS = range(0, len(SECRET) + 1, 3)
"""How many bytes of the secret are before the border at which Docker divides a line."""
PROGRAM = f"""
import os, sys, time
secret, key = os.environ["TOKEN"], os.environ["KEY"]
print("to stderr:", secret, file=sys.stderr, flush=True)
print("begin", flush=True)
for before in {[*BORDERS]}:
    print("x" * ({PART} - before) + secret + " after", flush=True)
print(key, flush=True)
sys.stdout.write("\\x1b[31mred\\x9b \\u202e\\r\\n\\ttab " + os.environ["SHORT"] + " " + os.environ["PATH"] + "\\n")
print("end", flush=True)
while not os.path.exists("/tmp/ends"):
    time.sleep(0.1)
sys.exit(3)
"""
ENV = {"TOKEN": SECRET, "KEY": KEY, "SHORT": "abc"}


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return whether `condition` became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Api:
    """The diagnostics of a server, by the SDK and by the plain routes."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.manager = SandboxManagerSync.create(stack.connection)

    def logs(self, sandbox: str, scope: str = "container") -> DiagnosticContent:
        return self.manager.get_diagnostic_logs(sandbox, scope)

    def events(self, sandbox: str, scope: str = "all") -> list[str]:
        content = self.manager.get_diagnostic_events(sandbox, scope)
        assert len((content.content or "").encode()) == content.content_length
        lines = (content.content or "").split("\n")
        return [line.split()[2].rstrip(":") for line in lines if line != "(no events)"]

    def call(self, sandbox: str, what: str) -> httpx.Response:
        return httpx.get(
            f"{self.stack.base}/v1/sandboxes/{sandbox}{what}",
            headers={"OPEN-SANDBOX-API-KEY": self.stack.api_key},
            timeout=60,
            trust_env=False,
        )

    def text(self, sandbox: str, what: str) -> str:
        answer = self.call(sandbox, f"/diagnostics/{what}")
        assert (200, "true") == (answer.status_code, answer.headers["deprecation"]), answer.text
        return answer.text


@pytest.fixture(name="api")
def _api(stack: Stack) -> Iterator[Api]:
    api = Api(stack)
    yield api
    api.manager.close()


def printing(stack: Stack, runtime: str, **options: Any) -> SandboxSync:
    """Create a sandbox whose entrypoint prints its secrets."""
    return stack.create(runtime, entrypoint=["python3", "-c", PROGRAM], env=ENV, **options)


def whole(text: object) -> bool:
    """Return whether `text` has the last line of each stream. Docker copies the two streams independently."""
    return ended(text) and "to stderr: [env TOKEN]" in str(text)


def ended(text: object) -> bool:
    """Return whether `text` has the last line of standard output."""
    return "end" in str(text).split("\n")


def parts(secret: str, size: int = 6) -> list[str]:
    return [secret[place : place + size] for place in range(len(secret) - size + 1)]


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_the_output_is_complete_and_has_no_value_of_the_environment(api: Api, stack: Stack, runtime: str) -> None:
    """Of any number of lines, so that a read begins anywhere in the output. What is kept is the same."""
    sandbox = printing(stack, runtime)
    try:
        assert until(lambda: whole(api.logs(sandbox.id).content))
        live = api.logs(sandbox.id)
        text = str(live.content)
        assert len(text.encode()) == live.content_length
        assert ("logs", "inline", False, None) == (live.kind, live.delivery, live.truncated, live.warnings)
        lines = text.split("\n")
        assert "begin" in lines
        assert ["[env KEY]"] * 3 == [line for line in lines if "KEY" in line]
        assert "to stderr: [env TOKEN]" in text  # its line can be within one of standard output
        assert "\\u{1b}[31mred\\u{9b} \\u{202e}" in lines
        assert any(line.startswith("\ttab abc /usr/") for line in lines)
        every = [api.text(sandbox.id, f"logs?tail={number}") for number in range(1, 2 * len(BORDERS) + 12)]
        every += [api.text(sandbox.id, what) for what in ("logs?since=1h", "summary", "inspect", "events")]
        assert text == every[-4]
        assert any("[env TOKEN]" in one for one in every)
        found = [(place, part) for place, one in enumerate([text, *every]) for part in parts(SECRET) if part in one]
        assert [] == found
        assert not any("MIIEvQ" in one for one in (text, *every))
        with suppress(SandboxException):
            api.logs(sandbox.id, "network")
            raise AssertionError("a scope that this server does not have")
    finally:
        sandbox.kill()
        sandbox.close()
    stored = api.logs(sandbox.id, "all")
    assert text[-1000:] == str(stored.content)[-1000:]
    assert stored.warnings
    assert not any(part in str(stored.content) for part in parts(SECRET))
    for path in (stack.state / "lifecycle").glob("sallyport.db*"):
        assert not any(part.encode() in path.read_bytes() for part in (SECRET, "MIIEvQIBADANBgkq"))


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_the_life_of_a_sandbox_is_told_by_its_events(api: Api, stack: Stack, runtime: str) -> None:
    """Pauses, a policy, a replaced gateway, the end of the entrypoint and the removal, across a death of `serve`."""
    rule = NetworkRule(action="allow", target=API)
    sandbox = printing(stack, runtime, policy=None, network_policy=NetworkPolicy(defaultAction="deny", egress=[rule]))
    try:
        sandbox.pause()
        sandbox.close()
        sandbox = SandboxSync.resume(sandbox.id, connection_config=stack.connection)
        sandbox.patch_egress_rules([NetworkRule(action="deny", target="other.example")])
        os.kill(stack.worker_pid(sandbox.id), signal.SIGKILL)
        assert until(lambda: "GATEWAY_REPLACED" in api.events(sandbox.id, "network"))
        os.kill(daemons(stack)["lifecycle.serve"], signal.SIGKILL)
        assert until(stack.healthy)
        sandbox.commands.run("touch /tmp/ends")
        assert until(lambda: "CONTAINER_EXITED_ERROR" in api.events(sandbox.id))
        assert "Exit code:        3\n" in api.text(sandbox.id, "inspect")
        assert ended(api.logs(sandbox.id).content)
    finally:
        sandbox.kill()
        sandbox.close()
    told = api.events(sandbox.id)
    expected = ["CONTAINER_STARTING", "CONTAINER_RUNNING", "CONTAINER_PAUSING", "CONTAINER_PAUSED"]
    expected += ["CONTAINER_RUNNING", "POLICY_CHANGED", "GATEWAY_REPLACED", "CONTAINER_EXITED_ERROR"]
    expected += ["REMOVING", "REMOVED"]
    following = iter(told)
    assert all(reason in following for reason in expected), told  # in this order
    assert {*told} <= {*expected, "GATEWAY_DOWN"}
    assert 404 == api.call(sandbox.id, "").status_code
    assert "Removed: deleted by the API." in api.text(sandbox.id, "inspect")
    assert ended(api.logs(sandbox.id).content)


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_the_asynchronous_sdk_reads_the_same(api: Api, stack: Stack, runtime: str) -> None:
    sandbox = printing(stack, runtime)

    async def read() -> tuple[DiagnosticContent, DiagnosticContent]:
        config = ConnectionConfig(domain=f"127.0.0.1:{stack.port}", api_key=stack.api_key)
        manager = await SandboxManager.create(config)
        try:
            logs = await manager.get_diagnostic_logs(sandbox.id, "all")
            return logs, await manager.get_diagnostic_events(sandbox.id, "runtime")
        finally:
            await manager.close()

    try:
        assert until(lambda: whole(api.logs(sandbox.id).content))
        logs, events = asyncio.run(read())
        assert logs.content == api.logs(sandbox.id).content
        assert sandbox.get_diagnostic_logs("container").content == logs.content
        assert "CONTAINER_RUNNING" in str(events.content)
    finally:
        sandbox.kill()
        sandbox.close()


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_the_output_of_a_sandbox_that_was_cut_off_is_kept(api: Api, stack: Stack, runtime: str) -> None:
    """Its container is removed at once. Its output is read before."""
    sandbox = printing(stack, runtime)
    try:
        assert until(lambda: ended(api.logs(sandbox.id).content))
        changed = ("ip", "addr", "add", "192.0.2.77/32", "dev", "eth0")
        namespace = f"--net={stack.netns(sandbox.id, 'sbx')}"
        assert 0 == subprocess.run(["nsenter", namespace, *changed], check=False).returncode
        assert until(lambda: "ISOLATION_ALARM" in api.events(sandbox.id, "network"))
        cut = str(api.logs(sandbox.id).content)
        assert ended(cut)
        assert "\nEVENTS\n" in api.text(sandbox.id, "summary")
    finally:
        sandbox.kill()
        sandbox.close()
    for text in (cut, str(api.logs(sandbox.id).content)):
        assert ended(text)
        assert not any(part in text for part in parts(SECRET))
