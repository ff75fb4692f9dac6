"""A process that loses its seccomp listeners, and nothing else. tests/system/test_pause.py has the effect on runsc."""

import errno
import subprocess
import sys

import pytest

from runtimes.engine import listeners

_PROBE = f"""
import ctypes, os, sys
from {listeners.__name__} import refuse
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)  # no_new_privs: a filter needs this or CAP_SYS_ADMIN
if sys.argv[1] == "refuse":
    refuse()
number = {{"x86_64": 317, "aarch64": 277}}[os.uname().machine]
def errors():
    for flags in (8, 0):  # a listener, a filter
        assert -1 == libc.syscall(ctypes.c_long(number), 1, flags, None)
        print(ctypes.get_errno(), flush=True)
errors()
if 0 == os.fork():
    errors()
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("order", ["refuse", "keep"])
def test_only_a_listener_is_refused_and_to_descendants_too(order: str) -> None:
    """EINVAL is what a kernel without listeners reports; EFAULT shows a call that the kernel has accepted."""
    run = subprocess.run([sys.executable, "-c", _PROBE, order], capture_output=True, text=True, timeout=60, check=True)
    first = errno.EINVAL if order == "refuse" else errno.EFAULT
    assert [first, errno.EFAULT] * 2 == [int(word) for word in run.stdout.split()]
