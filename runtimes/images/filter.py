"""The seccomp filter of the jail, as a classic BPF program for x86-64. Pure.

A fetch needs files, sockets and processes. What makes namespaces, mounts or devices, reads other processes or extends
the kernel is refused. So a compromised process cannot become root of a user namespace of its own, which would open more
of the kernel to it.
"""

import struct
from typing import Final

_ARCH_X86_64: Final = 0xC000003E
_X32: Final = 0x40000000
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_CLONE, _CLONE3 = 56, 435
_NEW_NAMESPACES: Final = 0x7E020000

REFUSED: Final = {
    "ptrace": 101,
    "syslog": 103,
    "mknod": 133,
    "personality": 135,
    "modify_ldt": 154,
    "pivot_root": 155,
    "chroot": 161,
    "acct": 163,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "init_module": 175,
    "quotactl": 179,
    "lookup_dcookie": 212,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "mknodat": 259,
    "unshare": 272,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "finit_module": 313,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
}
"""Numbers of the calls that are refused with EPERM."""


def filter_program() -> bytes:
    """Return the instructions of the filter."""
    refused = sorted(REFUSED.values())
    lines: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _ARCH_X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    checks = [(_AT_LEAST, _X32), *((_EQUAL, number) for number in refused)]
    tail = [
        (_EQUAL, 3, 0, _CLONE3),
        (_EQUAL, 3, 0, _CLONE),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    to_refusal = len(checks) - 1 + 3  # from the first check: over the other checks, and over the first lines of `tail`
    lines += [(code, to_refusal - place, 0, number) for place, (code, number) in enumerate(checks)]
    lines += tail
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
