"""A namespace that remains is distinguished from another process's namespace."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

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


def test_a_namespace_that_was_given_the_number_of_one_that_ended_is_not_left(namespace: str) -> None:
    """The kernel can give an ended namespace's number to the next one."""
    traces = take("no-sandbox", "no-container", [namespace], (), "/nonexistent/docker.sock")
    ended = frozenset({(os.stat(namespace).st_ino, cookie_of(namespace) - 1)})

    assert [] == replace(traces, namespaces=ended).remaining()
