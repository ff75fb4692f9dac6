"""A namespace that remains is distinguished from another process's namespace."""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runtimes.net import netns
from testbed import namespaces
from testbed.internet import ip
from testbed.traces import cookie_of, take

pytestmark = pytest.mark.system

NAME = f"{os.environ.get('SALLYPORT_TEST_INTERNET', 'spdemo')}-traces"


@pytest.fixture(name="namespace")
def _namespace() -> Iterator[str]:
    namespaces.make(NAME)
    yield f"/run/netns/{NAME}"
    namespaces.remove(NAME)


def test_a_namespace_is_left_as_long_as_something_keeps_it(namespace: str) -> None:
    traces = take("no-sandbox", "no-container", [namespace], (), "/nonexistent/docker.sock")
    inode = os.stat(namespace).st_ino

    assert [f"network namespace {inode}"] == traces.remaining()
    ip("netns", "delete", NAME)
    assert [] == traces.remaining()


def test_a_thread_that_visits_a_namespace_makes_its_process_no_trace_but_keeps_the_namespace(namespace: str) -> None:
    """Threads of the daemons visit the namespaces of sandboxes. The control is a process that is inside."""
    inode, leave, entered = os.stat(namespace).st_ino, threading.Event(), threading.Event()

    def visit() -> None:
        netns.enter(Path(namespace))
        entered.set()
        leave.wait()

    inside = subprocess.Popen(["ip", "netns", "exec", NAME, "sleep", "60"])
    visitor = threading.Thread(target=visit)
    visitor.start()
    try:
        assert entered.wait(60)
        assert until(lambda: os.stat(f"/proc/{inside.pid}/ns/net").st_ino == inode)
        traces = take("no-sandbox", "no-container", [namespace], (), "/nonexistent/docker.sock")
        assert {inside.pid} == {pid for pid, _ in traces.processes}
        inside.kill()
        inside.wait()
        ip("netns", "delete", NAME)
        assert [f"network namespace {inode}"] == traces.remaining()
    finally:
        inside.kill()
        inside.wait()
        leave.set()
        visitor.join()
    assert [] == traces.remaining()


def until(condition: Callable[[], bool]) -> bool:
    """Return whether `condition` became true in time."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_namespace_that_was_given_the_number_of_one_that_ended_is_not_left(namespace: str) -> None:
    """The kernel can give an ended namespace's number to the next one."""
    traces = take("no-sandbox", "no-container", [namespace], (), "/nonexistent/docker.sock")
    ended = frozenset({(os.stat(namespace).st_ino, cookie_of(namespace) - 1)})

    assert [] == replace(traces, namespaces=ended).remaining()
