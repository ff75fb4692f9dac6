"""The system calls of a confined worker, and the filter (classic BPF) that has no other. Pure.

The list is what workers were seen to call on the way of each kind of traffic, and beside it what another C library or
kernel takes for the same: memory, threads, clocks. `tests/system/calls.py` notes calls; the worker's system tests fail
when a call of an honest worker is refused. Doors are closed by argument:

- A socket is TCP or UDP over IPv4 or IPv6. Nothing is bound and nothing listens: listeners are older than the filter.
- A datagram goes to the address that its socket is connected to. Only the DNS listener answers anyone: its descriptor
  is pinned, it can be neither closed nor replaced.
- No message has control data: a worker cannot pass a descriptor on.
- `clone` makes threads only. A filter cannot read the flags of `clone3`: it is absent, and C libraries fall back.
- Socket options are those of a relay: no mark, no transparency, no lingering.
- There is no call for namespaces, programs, other processes, files by path, new kernel interfaces.

Linux 5.11 and later knows which calls have no argument check, and does not run the filter for them.
"""

import errno
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_LD_W_ABS, _AND, _JEQ, _JGE, _RET = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
REFUSE = _ERRNO | errno.EPERM
"""What becomes of any other call: an error, so that a mistake shows as one and not as a lost worker."""
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# name -> number on x86-64, on aarch64 (None: does not exist there)
_PLAIN: dict[str, tuple[int, int | None]] = {
    # the event loop
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "poll": (7, None),
    "ppoll": (271, 73),
    "dup": (32, 23),
    "fstat": (5, 80),
    # sockets that are there
    "accept": (43, 202),
    "accept4": (288, 242),
    "connect": (42, 203),
    "getpeername": (52, 205),
    "getsockname": (51, 204),
    "getsockopt": (55, 209),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "shutdown": (48, 210),
    # memory
    "brk": (12, 214),
    "madvise": (28, 233),
    "map_shadow_stack": (453, 453),
    "membarrier": (324, 283),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    # threads
    "exit": (60, 93),
    "exit_group": (231, 94),
    "futex": (202, 98),
    "futex_requeue": (456, 456),
    "futex_wait": (455, 455),
    "futex_waitv": (449, 449),
    "futex_wake": (454, 454),
    "get_robust_list": (274, 100),
    "getcpu": (309, 168),
    "gettid": (186, 178),
    "restart_syscall": (219, 128),
    "rseq": (334, 293),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    # its own signals
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    # time
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "gettimeofday": (96, 169),
    "nanosleep": (35, 101),
    "time": (201, None),
    # what it is
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getrandom": (318, 278),
    "getresgid": (120, 150),
    "getresuid": (118, 148),
    "getrusage": (98, 165),
    "getuid": (102, 174),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "uname": (63, 160),
}
_CHECKED = {
    "sendto": (44, 206),
    "close": (3, 57),
    "ioctl": (16, 29),
    "socket": (41, 198),
    "setsockopt": (54, 208),
    "fcntl": (72, 25),
    "newfstatat": (262, 79),
    "clone": (56, 220),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "tgkill": (234, 131),
}
_ABSENT = {"clone3": (435, 435)}
"""Answered as by a kernel that does not have it."""
_CONFINING = {"seccomp": (317, 277), "pivot_root": (155, 41), "io_uring_setup": (425, 425)}

_TYPE = 0xFFFFFFFF & ~(socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
_FIONREAD, _FIONBIO, _FIOCLEX = 0x541B, 0x5421, 0x5451
_F_DUPFD, _F_GETFD, _F_SETFD, _F_GETFL, _F_SETFL, _F_DUPFD_CLOEXEC = 0, 1, 2, 3, 4, 1030
_AT_EMPTY_PATH = 0x1000
_SO_PASSRIGHTS = 83
_THREAD = 0x10F00  # CLONE_VM, FS, FILES, SIGHAND, THREAD
_OF_A_THREAD = 0x017C0000  # CLONE_SYSVSEM, SETTLS, PARENT_SETTID, CHILD_CLEARTID, DETACHED, CHILD_SETTID
_PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA = 15, 16, 0x53564D41
_IPPROTO_TCP, _SOL_SOCKET = socket.IPPROTO_TCP, socket.SOL_SOCKET


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument, counted from 0: its lower half, of which `mask`, is one of `values`; or, `unlike`, none of them.

    A pointer is compared whole (`wide`) with the only value NULL.
    """

    index: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    unlike: bool = False
    wide: bool = False


type Rule = tuple[Argument, ...]
"""What has to be true of a call's arguments, all of it."""


def checks(pid: int, pinned: int) -> Mapping[str, tuple[Rule, ...]]:
    """Return the rules of each call that has any; one of them has to be true.

    Args:
        pid: of the worker; it may send signals to itself.
        pinned: the descriptor of the DNS listener.
    """
    inet = Argument(0, (socket.AF_INET, socket.AF_INET6))
    relay = (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    return {
        "sendto": ((Argument(4, (0,), wide=True),), (Argument(0, (pinned,)),)),
        "close": ((Argument(0, (pinned,), unlike=True),),),
        "ioctl": ((Argument(1, (_FIONBIO, _FIOCLEX, _FIONREAD)),),),
        "socket": (
            (inet, Argument(1, (socket.SOCK_STREAM,), _TYPE), Argument(2, (0, socket.IPPROTO_TCP))),
            (inet, Argument(1, (socket.SOCK_DGRAM,), _TYPE), Argument(2, (0, socket.IPPROTO_UDP))),
        ),
        "setsockopt": (
            (Argument(1, (_IPPROTO_TCP,)), Argument(2, relay)),
            (Argument(1, (_SOL_SOCKET,)), Argument(2, (socket.SO_KEEPALIVE, socket.SO_BINDTODEVICE, _SO_PASSRIGHTS))),
        ),
        "fcntl": ((Argument(1, (_F_GETFL, _F_SETFL, _F_GETFD, _F_SETFD, _F_DUPFD, _F_DUPFD_CLOEXEC)),),),
        "newfstatat": ((Argument(3, (_AT_EMPTY_PATH,)),),),
        "clone": ((Argument(0, (_THREAD,), 0xFFFFFFFF & ~_OF_A_THREAD),),),
        "prctl": ((Argument(0, (_PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA)),),),
        "prlimit64": ((Argument(0, (0,)), Argument(2, (0,), wide=True)),),
        "tgkill": ((Argument(0, (pid,)),),),
    }


def number(name: str, machine: str) -> int:
    """Return the number of a call that the filter or the confinement knows.

    Raises:
        OSError: nothing is known of that machine.
        KeyError: the call is not known, or does not exist there.
    """
    column = _machine(machine)[1]
    found = ({**_PLAIN, **_CHECKED, **_ABSENT, **_CONFINING})[name][column]
    if found is None:
        raise KeyError(name)
    return found


def _machine(name: str) -> tuple[int, int]:
    if name not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no system call filter for {name}")
    return _MACHINES[name]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def assemble(machine: str, pid: int, pinned: int, refuse: int = REFUSE) -> bytes:
    """Return the filter's instructions.

    Args:
        machine: as `platform.machine()` names it.
        pid, pinned: as of `checks`.
        refuse: what becomes of calls that are not on the list.

    Raises:
        OSError: there is no filter for that machine.
    """
    column = _machine(machine)[1]
    program = _head(machine)
    rules = checks(pid, pinned)
    for name, numbers in _CHECKED.items():
        body = [*(item for rule in rules[name] for item in _rule(rule)), _instruction(_RET, refuse)]
        program += [_instruction(_JEQ, numbers[column], 0, len(body)), *body]
    for plain in _PLAIN.values():
        if (value := plain[column]) is not None:
            program += [_instruction(_JEQ, value, 0, 1), _instruction(_RET, _ALLOW)]
    for absent in _ABSENT.values():
        program += [_instruction(_JEQ, absent[column], 0, 1), _instruction(_RET, _ERRNO | errno.ENOSYS)]
    program.append(_instruction(_RET, refuse))
    return b"".join(program)


def without_rings(machine: str) -> bytes:
    """Return a filter that refuses io_uring alone: it stands before the event loop is made, which would use it.

    Raises:
        OSError: there is no filter for that machine.
    """
    refused = _instruction(_JEQ, number("io_uring_setup", machine), 0, 1), _instruction(_RET, REFUSE)
    return b"".join((*_head(machine), *refused, _instruction(_RET, _ALLOW)))


def _head(machine: str) -> list[bytes]:
    """Kill what is called by another architecture's numbers, and load the number."""
    return [
        _instruction(_LD_W_ABS, _ARCH),
        _instruction(_JEQ, _machine(machine)[0], 1, 0),
        _instruction(_RET, _KILL),
        _instruction(_LD_W_ABS, _NUMBER),
        _instruction(_JGE, _X32, 0, 1),
        _instruction(_RET, _KILL),
    ]


def _rule(rule: Rule) -> Iterable[bytes]:
    """Allow the call if the rule is true; else go on behind it."""
    code = [_instruction(_RET, _ALLOW)]
    for argument in reversed(rule):
        code = [*_argument(argument, len(code)), *code]
    return code


def _argument(argument: Argument, behind: int) -> list[bytes]:
    """Go on with the next instruction if it is as it has to be, else `behind` instructions farther."""
    low = _ARGUMENTS + 8 * argument.index
    code = []
    if argument.wide:
        code += [_instruction(_LD_W_ABS, low + 4), _instruction(_JEQ, 0, 0, behind + 2)]
    code.append(_instruction(_LD_W_ABS, low))
    if argument.mask != 0xFFFFFFFF:
        code.append(_instruction(_AND, argument.mask))
    for place, value in enumerate(argument.values):
        left = len(argument.values) - place - 1
        if argument.unlike:
            code.append(_instruction(_JEQ, value, left + behind, 0))
        elif left:
            code.append(_instruction(_JEQ, value, left, 0))
        else:
            code.append(_instruction(_JEQ, value, 0, behind))
    return code
