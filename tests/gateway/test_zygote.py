"""A fork request is exactly one valid request, or nothing is forked."""

import subprocess
import sys
from ipaddress import IPv4Address
from typing import Any

import pytest

from gateway.config import WorkerConstants
from gateway.spawn import Descriptors, Order
from gateway.zygote import Common, common, order
from testbed.pki import make_authority
from wire import Code, RequestError
from wire.api.zygote import DESCRIPTORS, OPERATIONS, Fork, Prepare

REQUEST: dict[str, Any] = {
    "sandbox": "sbx-1",
    "generation": 1,
    "uid": 700001000,
    "gid": 700001000,
    "cgroup": ["/sys/fs/cgroup/x"],
}
FORK = Fork("sbx-1", 1, 700001000, 700001000, ("/sys/fs/cgroup/x",))
FDS = list(range(3, 3 + DESCRIPTORS))
CONSTANTS = WorkerConstants("pem", (), IPv4Address("192.0.2.2"))
COMMON = Common(CONSTANTS, None)


def test_a_whole_request_is_an_order() -> None:
    expected = Order("sbx-1", 1, 700001000, 700001000, ("/sys/fs/cgroup/x",), CONSTANTS, Descriptors(*FDS))
    assert FORK == OPERATIONS.read("fork", REQUEST)
    assert expected == order(FORK, FDS, COMMON)


def test_what_workers_have_in_common_is_read_once_and_comes_before_a_fork() -> None:
    assert COMMON == common(Prepare("pem", (), "192.0.2.2"))  # its roots cannot be read: each worker refuses them
    with pytest.raises(RequestError) as refused:
        order(FORK, FDS, None)
    assert Code.UNAVAILABLE is refused.value.code


def test_the_roots_are_read_before_the_fork() -> None:
    pem = make_authority("Roots").pem
    read = common(Prepare(pem, (), "192.0.2.2"))
    assert read.trusted is not None
    assert pem == read.trusted.roots_pem
    assert read.trusted is order(FORK, FDS, read).trusted


@pytest.mark.parametrize("changes", [{"inside": "x"}, {"limits": {"surprise": 1}}, {"dns_upstreams": ("name:53",)}])
def test_constants_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        common(Prepare(**({"upstream_roots": "pem", "dns_upstreams": (), "inside": "192.0.2.2"} | changes)))
    assert Code.INVALID is refused.value.code


@pytest.mark.parametrize(
    "changes",
    [
        {"uid": 0},
        {"gid": 0},
        {"uid": 2**32 - 1},
        {"uid": "700001000"},
        {"uid": True},
        {"generation": 0},
        {"generation": None},
        {"sandbox": "a/b"},
        {"sandbox": ""},
        {"cgroup": "/x"},
        {"cgroup": ["relative"]},
        {"cgroup": [1]},
        {"surprise": 1},
    ],
)
def test_anything_else_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        OPERATIONS.read("fork", REQUEST | changes)
    assert Code.INVALID is refused.value.code


@pytest.mark.parametrize("fds", [[], FDS[:7], [*FDS, 18]])
def test_another_number_of_descriptors_is_refused(fds: list[int]) -> None:
    with pytest.raises(RequestError) as refused:
        order(FORK, fds, COMMON)
    assert Code.INVALID is refused.value.code


BUFFERS = """
import resource, sys
from gateway.spawn import keep_heap
if sys.argv[1] == "kept":
    keep_heap()
for round in range(3):
    if round == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        buffers = [bytes(256 * 1024) for _ in range(8)]
        del buffers
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_worker_keeps_the_pages_of_its_buffers() -> None:
    """Each page that the kernel has to clear again costs more than the bytes that are put into it."""
    faults = [
        int(subprocess.run([sys.executable, "-c", BUFFERS, one], capture_output=True, check=True).stdout)
        for one in ("kept", "returned")
    ]
    assert 10 * faults[0] < faults[1]
