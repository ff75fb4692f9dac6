"""The limit of a sandbox's link: both directions at the operator's rate, on both runtimes, and a changed one is seen.

A limit is judged by a ratio: the same transfer with it and without it, in the same run.
"""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from opensandbox.sync.sandbox import SandboxSync

from runtimes.net import netns, slots
from runtimes.net.plan import PLAN
from testbed.stack import EMPTY_IMAGE, Stack
from tests.conftest import ON_RUNC, representatives
from tests.stacks import Second, beside

pytestmark = [pytest.mark.system, pytest.mark.images]

BANDWIDTH = 2_000_000
CONTENT = os.urandom(16_000_000)
SECONDS = 2.0
PATIENCE = 60.0
CUTS = [f"{change} at {end}" for change in ("removed", "faster") for end in ("gw0", "eth0")]


class Slow(Second):
    """A Sallyport that limits the links of its sandboxes."""

    @property
    def settings(self) -> str:
        return super().settings.replace("[sallyport]\n", f"[sallyport]\nnetwork_bandwidth = {BANDWIDTH}\n", 1)


@pytest.fixture(scope="module", name="slow")
def _slow() -> Iterator[Stack]:
    with beside(Slow, "slow") as stack:
        yield stack


@contextmanager
def sandbox_of(stack: Stack, runtime: str) -> Iterator[SandboxSync]:
    sandbox = stack.create(runtime, image=EMPTY_IMAGE, policy=None, resource={"memory": "512Mi", "cpu": "1"})
    try:
        yield sandbox
    finally:
        try:
            sandbox.kill()
        finally:
            sandbox.close()


def seconds(sandbox: SandboxSync) -> tuple[float, float]:
    """Return the time to send the content into a sandbox, and to read it."""
    began = time.monotonic()
    sandbox.files.write_file("/content", CONTENT)
    sent = time.monotonic()
    assert CONTENT == sandbox.files.read_bytes("/content")
    return sent - began, time.monotonic() - sent


@pytest.mark.parametrize("runtime", ON_RUNC)
def test_a_transfer_takes_as_long_as_the_operator_says(slow: Stack, stack: Stack, runtime: str) -> None:
    """In each direction, and neither much faster nor much slower than the rate: TCP is slowed, not broken."""
    with sandbox_of(stack, runtime) as free, sandbox_of(slow, runtime) as limited:
        without = [min(times) for times in zip(*(seconds(free) for _ in range(3)), strict=True)]
        with_limit = seconds(limited)
    for free_seconds, limited_seconds in zip(without, with_limit, strict=True):
        assert limited_seconds > 3 * free_seconds
        rate = len(CONTENT) / limited_seconds
        assert BANDWIDTH / 4 < rate < BANDWIDTH * 1.2, (without, with_limit)


def _rate(slot: slots.Slot, *, up: bool) -> float:
    """Return the bytes a second that one TCP connection carries, from the sandbox's end or to it."""
    listener = netns.inside(slot.gateway, lambda: socket.create_server((str(PLAN.gateway), PLAN.proxy_port)))
    dialled: list[socket.socket] = []
    dialling = threading.Thread(
        target=lambda: dialled.append(netns.inside(slot.sandbox, lambda: socket.create_connection(("192.0.2.9", 443))))
    )
    dialling.start()
    with listener, closing(listener.accept()[0]) as outer:
        dialling.join()
        with closing(dialled[0]) as inner:
            source, sink = (inner, outer) if up else (outer, inner)
            sending = threading.Thread(target=_send, args=(source,))
            sending.start()
            count, began = 0, time.monotonic()
            while time.monotonic() < began + SECONDS:
                count += len(sink.recv(1 << 20))
            took = time.monotonic() - began
            source.shutdown(socket.SHUT_RDWR)
            sink.close()
            sending.join()
    return count / took


def _send(source: socket.socket) -> None:
    data = bytes(1 << 16)
    try:
        while True:
            source.sendall(data)
    except OSError:
        return


@pytest.mark.parametrize("up", [True, False], ids=["from the sandbox", "to the sandbox"])
def test_a_link_carries_its_rate(tmp_path: Path, up: bool) -> None:
    """A tenth of what the link carries without a limit on this machine, and again without one."""
    free = slots.make(tmp_path, 1, PLAN)
    try:
        most = _rate(free, up=up)
        limited = slots.make(tmp_path, 2, replace(PLAN, bandwidth=int(most / 10)))
        try:
            found = _rate(limited, up=up)
        finally:
            assert () == slots.destroy(limited)
    finally:
        assert () == slots.destroy(free)
    assert most / 25 < found < most / 6


@pytest.mark.parametrize("case", representatives(CUTS, "removed at eth0", "faster at gw0"))
def test_a_changed_limit_cuts_the_sandbox_off(slow: Stack, case: str) -> None:
    change, _, end = case.partition(" at ")
    with sandbox_of(slow, "runc") as sandbox:
        path = slow.netns(sandbox.id, {"gw0": "gw", "eth0": "sbx"}[end])
        arguments = {
            "removed": ["del", "dev", end, "root"],
            "faster": ["replace", "dev", end, "root", "tbf", "rate", "1gbit", "burst", "1mb", "limit", "1mb"],
        }[change]
        subprocess.run(["nsenter", f"--net={path}", "tc", "qdisc", *arguments], check=True, capture_output=True)
        deadline = time.monotonic() + PATIENCE
        while (shown := _status(slow, sandbox.id))["state"] != "Failed":
            assert time.monotonic() < deadline, shown
            time.sleep(0.1)
        assert "ISOLATION_ALARM" == shown["reason"]
        alarms = [record for record in slow.audit_records() if record["kind"] == "alarm"]
        assert any("queue" in str(record) for record in alarms)


def _status(stack: Stack, sandbox: str) -> dict[str, str]:
    headers = {"OPEN-SANDBOX-API-KEY": stack.api_key}
    found: dict[str, str] = httpx.get(f"{stack.base}/v1/sandboxes/{sandbox}", headers=headers).json()["status"]
    return found
