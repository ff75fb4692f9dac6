"""The rehearsal before the fork leaves nothing that a fork would copy, and no generator that workers would share."""

import os
import subprocess
import sys
from ipaddress import IPv4Address

from gateway.config import WorkerConstants
from gateway.rehearsal import rehearse
from testbed.pki import make_authority

_FORKS = """
import os, ssl
from ipaddress import IPv4Address
from cryptography.hazmat.primitives.asymmetric import ec
from gateway.config import WorkerConstants
from gateway.rehearsal import rehearse

rehearse(WorkerConstants("", (), IPv4Address("192.0.2.2")))
for _ in range(2):
    if (pid := os.fork()) == 0:
        key = ec.generate_private_key(ec.SECP256R1()).private_numbers().private_value
        os.write(1, f"{ssl.RAND_bytes(16).hex()} {key:x}\\n".encode())
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_it_leaves_no_thread_and_no_descriptor() -> None:
    constants = WorkerConstants(make_authority("Roots").pem, (), IPv4Address("192.0.2.2"))
    rehearse(constants)
    before = _held()
    rehearse(constants)
    assert before == _held()


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_forks_draw_different_numbers_from_both_copies_of_openssl() -> None:
    """Already by OpenSSL's own detection of a fork: a worker also adds seeds of its own."""
    done = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, text=True, check=True)
    first, second = (line.split() for line in done.stdout.splitlines())
    assert [True, True] == [one != other for one, other in zip(first, second, strict=True)]
