"""Hardens a process that holds keys. Call it before the process reads the first key.

- Not dumpable: no core, no ptrace or /proc/<pid>/mem by its own uid, `environ` readable by root only.
- No core file, no new privileges.
- Memory is locked if the limits allow it: best effort, and never so that a later allocation could fail. hostd raises
  the limit where it may (`runtimes.process.enter`).
"""

import ctypes
import resource

_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
NOT_LOCKED = "memory is not locked: the limit on locked memory is too low (systemd: LimitMEMLOCK=infinity)"
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4


def harden() -> bool:
    """Harden this process; return whether memory is locked.

    Raises:
        OSError: the kernel refused a required part.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for option, value in ((_PR_SET_DUMPABLE, 0), (_PR_SET_NO_NEW_PRIVS, 1)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {option} failed")
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    # With a finite limit, MCL_FUTURE would make allocations above the limit fail.
    flags = _MCL_CURRENT | _MCL_ONFAULT | (_MCL_FUTURE if hard == resource.RLIM_INFINITY else 0)
    return bool(libc.mlockall(flags) == 0)
