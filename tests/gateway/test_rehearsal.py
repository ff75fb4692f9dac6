"""The rehearsal before the fork leaves nothing that a fork would copy."""

import os
from ipaddress import IPv4Address

from gateway.config import WorkerConstants
from gateway.rehearsal import rehearse
from testbed.pki import make_authority


def test_it_leaves_no_thread_and_no_descriptor() -> None:
    constants = WorkerConstants(make_authority("Roots").pem, (), IPv4Address("192.0.2.2"))
    rehearse(constants)
    before = _held()
    rehearse(constants)
    assert before == _held()


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
