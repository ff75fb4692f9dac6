"""Confines a gateway worker: an empty file system, and few system calls.

`empty_root` leaves a mount namespace with one mount: an empty read-only directory that only root may enter. No path
exists, also not /proc and /dev. Every import must have happened before.

`install` makes the kernel refuse every system call that `gateway.calls` does not list, in all threads. A refused call
fails with EPERM; a call of another architecture kills the process. `refuse_rings` comes before the event loop.

Both are additional layers: the worker is unprivileged without them. They work on x86-64 and aarch64, and raise OSError
elsewhere.
"""

import ctypes
import errno
import os
import platform
from collections.abc import Callable

from gateway import calls

_SET_MODE_FILTER = 1
_FLAG_TSYNC = 1
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 1 << 14, 1 << 18
_MNT_DETACH = 2


def empty_root() -> None:
    """Move this process, and the threads that it makes later, into its own empty mount namespace.

    Call it with one thread, as root, with no directory open. The caller's old namespace does not change.

    Raises:
        OSError: the kernel refused; the worker must not run. EINVAL on a host whose root is the initial ramdisk.
    """
    pivot_root = calls.number("pivot_root", platform.machine())
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, function: Callable[..., int], *arguments: object) -> None:
        if function(*arguments) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"{name}: {os.strerror(error)}")

    os.unshare(os.CLONE_NEWNS)
    call("mount", libc.mount, None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    # The mount point is needed for a moment only. /proc always exists.
    call("mount", libc.mount, b"empty", b"/proc", b"tmpfs", ctypes.c_ulong(flags), b"mode=0,nr_inodes=1,size=4096")
    os.chdir("/proc")
    call("pivot_root", libc.syscall, ctypes.c_long(pivot_root), b".", b".")
    call("umount", libc.umount2, b".", _MNT_DETACH)  # the old root is mounted over the new one
    os.chdir("/")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_rings() -> None:
    """Refuse io_uring to this process: its requests would bypass the filter of `install`. Needs no_new_privs.

    Raises:
        OSError: the kernel refused; the worker must not run.
    """
    _bind(calls.without_rings(platform.machine()))


def install(pinned: int) -> None:
    """Install the filter in every thread of this process, permanently. Needs no_new_privs.

    Args:
        pinned: the only descriptor that may send datagrams to any address. It cannot be closed.

    Raises:
        OSError: the kernel refused; the worker must not run.
    """
    _bind(calls.assemble(platform.machine(), os.getpid(), pinned))


def _bind(code: bytes) -> None:
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_long(calls.number("seccomp", platform.machine()))
    result = libc.syscall(number, ctypes.c_uint(_SET_MODE_FILTER), ctypes.c_uint(_FLAG_TSYNC), ctypes.byref(program))
    if result != 0:
        error = ctypes.get_errno() or errno.EAGAIN
        raise OSError(error, f"seccomp filter: {os.strerror(error)}")
