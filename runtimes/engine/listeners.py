"""Refuses seccomp listeners to the real runtime. The shim does this for each container of a runtime that loses one.

gVisor's systrap hands system calls to its stub processes with a seccomp listener where the kernel has one, and with
futexes elsewhere. A freeze of the container interrupts each stub that waits for its listener. The kernel then forgets
the notification, but still counts it. gVisor takes the error of the next read (ENOENT) for the end of the stub, so
programs in the sandbox die of SIGSEGV after a resume. A futex survives a freeze.

The kernel reports EINVAL, as one without listeners does. The filter is inherited by the sandbox's kernel and its stubs;
it is no defence. It works on x86-64 and aarch64.
"""

import ctypes
import errno
import os
import struct

_CALLS = {"x86_64": (0xC000003E, 317), "aarch64": (0xC00000B7, 277)}
"""The architecture as the kernel names it for filters, and the number of the system call seccomp."""
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _OPERATION, _FLAGS = 0, 4, 16, 24
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse() -> None:
    """Refuse seccomp listeners to this process and its descendants, permanently. Needs CAP_SYS_ADMIN.

    Raises:
        OSError: the kernel refused, or the machine has no known numbers.
    """
    machine = os.uname().machine
    if machine not in _CALLS:
        raise OSError(errno.ENOSYS, f"the numbers of system calls of {machine} are not known")
    code = _assembled(*_CALLS[machine])
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), ctypes.byref(program), 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _assembled(architecture: int, number: int) -> bytes:
    """Return the instructions. A comparison that fails jumps to the last one."""
    conditions = (
        (_ARCHITECTURE, _EQUAL, architecture),
        (_NUMBER, _EQUAL, number),
        (_OPERATION, _EQUAL, _SET_MODE_FILTER),
        (_FLAGS, _ANY_BIT, _NEW_LISTENER),
    )
    code = b""
    for place, (offset, test, value) in enumerate(conditions):
        behind = 2 * (len(conditions) - place) - 1
        code += struct.pack("HBBI", _LOAD, 0, 0, offset) + struct.pack("HBBI", test, 0, behind, value)
    fail = struct.pack("HBBI", _RETURN, 0, 0, _FAIL | errno.EINVAL)
    return code + fail + struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)
