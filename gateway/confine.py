"""What no gateway worker ever needs is not there: no file system, and few system calls.

`empty_root` leaves a mount namespace with one mount, an empty read-only directory that only root may enter: no path
leads anywhere, /proc and /dev neither. What is to be imported must have been before.

`install` is a short classic BPF program, assembled here, for all threads. A refused call fails with EPERM, so a mistake
shows as an error that is handled, not as a lost worker; a call of another architecture kills.

- No new program (`execve`), no other process (`ptrace`, `process_vm_*`, `pidfd_getfd`), no namespace or mount change,
  no new kernel interface (bpf, io_uring, keyring, perf, userfaultfd), no module or kexec.
- New sockets are IPv4 and IPv6 only.

They are layers more: the worker is unprivileged without them. x86-64 and aarch64; elsewhere installing fails.
"""

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Callable

_SET_MODE_FILTER = 1
_FLAG_TSYNC = 1
_LD_W_ABS, _JEQ, _JGE, _RET = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT = 0, 4, 16
_X32 = 0x40000000

# name -> number on x86-64, on aarch64 (None: does not exist there)
_DENIED: dict[str, tuple[int, int | None]] = {
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "setns": (308, 268),
    "unshare": (272, 97),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "fsconfig": (431, 431),
    "mount_setattr": (442, 442),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "personality": (135, 92),
    "swapon": (167, 224),
    "reboot": (169, 142),
}
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 1 << 14, 1 << 18
_MNT_DETACH = 2
_MACHINES = {"x86_64": (0xC000003E, 0, 317, 41), "aarch64": (0xC00000B7, 1, 277, 198)}


def empty_root() -> None:
    """Put this process, and the threads it makes from now on, into an empty mount namespace of its own.

    Call it with one thread, as root, with no directory open. Nothing of it shows in the namespace it was called in.

    Raises:
        OSError: the kernel refused; the worker must not run. EINVAL on a host whose root is the initial ramdisk.
    """
    machine = platform.machine()
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, function: Callable[..., int], *arguments: object) -> None:
        if function(*arguments) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"{name}: {os.strerror(error)}")

    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no empty root for {machine}")
    pivot_root = _DENIED["pivot_root"][_MACHINES[machine][1]]
    os.unshare(os.CLONE_NEWNS)
    call("mount", libc.mount, None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    # Any directory would do, it is only where the new root stands for a moment; /proc is always there.
    call("mount", libc.mount, b"empty", b"/proc", b"tmpfs", ctypes.c_ulong(flags), b"mode=0,nr_inodes=1,size=4096")
    os.chdir("/proc")
    call("pivot_root", libc.syscall, ctypes.c_long(pivot_root or 0), b".", b".")
    call("umount", libc.umount2, b".", _MNT_DETACH)  # the old root lies upon the new one
    os.chdir("/")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def assemble(machine: str) -> bytes:
    """The filter's instructions for a machine name as `platform.machine()` gives it.

    Raises:
        OSError: there is no filter for that machine.
    """
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no system call filter for {machine}")
    architecture, column, _seccomp, socket_number = _MACHINES[machine]
    refuse = _instruction(_RET, _ERRNO | errno.EPERM)
    program = [
        _instruction(_LD_W_ABS, _OFFSET_ARCH),
        _instruction(_JEQ, architecture, 1, 0),
        _instruction(_RET, _KILL),
        _instruction(_LD_W_ABS, _OFFSET_NUMBER),
        _instruction(_JGE, _X32, 0, 1),
        _instruction(_RET, _KILL),
    ]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            program += [_instruction(_JEQ, number, 0, 1), refuse]
    program += [
        _instruction(_JEQ, socket_number, 0, 4),
        _instruction(_LD_W_ABS, _OFFSET_ARGUMENT),
        _instruction(_JEQ, socket.AF_INET, 2, 0),
        _instruction(_JEQ, socket.AF_INET6, 1, 0),
        refuse,
        _instruction(_RET, _ALLOW),
    ]
    return b"".join(program)


def install() -> None:
    """Bind every thread of this process for ever. Needs no_new_privs.

    Raises:
        OSError: the kernel refused; the worker must not run.
    """
    machine = platform.machine()
    code = assemble(machine)
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    number = _MACHINES[machine][2]
    result = libc.syscall(
        ctypes.c_long(number), ctypes.c_uint(_SET_MODE_FILTER), ctypes.c_uint(_FLAG_TSYNC), ctypes.byref(program)
    )
    if result != 0:
        error = ctypes.get_errno() or errno.EAGAIN
        raise OSError(error, f"seccomp filter: {os.strerror(error)}")
