"""The system calls of a confined worker, and the filter (classic BPF) that permits only these. Pure.

The list was measured: the calls of workers under each kind of traffic, and the equivalent calls of other C libraries
and kernels for memory, threads and clocks. `tests/system/calls.py` records calls. The worker's system tests fail if the
filter refuses a call that a worker needs. Arguments are restricted as follows:

- A socket is TCP or UDP over IPv4 or IPv6. `bind` and `listen` are refused: the listeners exist before the filter.
- A datagram can be sent only to the address that its socket is connected to. The DNS listener is the exception. Its
  descriptor is pinned: it can be neither closed nor replaced.
- A message has no control data, so a worker cannot send a descriptor.
- `clone` makes threads only. A filter cannot read the flags of `clone3`, so `clone3` fails with ENOSYS. C libraries
  then use `clone`.
- Socket options are those that a relay needs: no mark, no transparent proxying, no SO_LINGER.
- No call is permitted for namespaces, programs, other processes, files by path, or new kernel interfaces.

Linux 5.11 and later caches which calls need no check of arguments, and does not run the filter for them.
"""

import errno
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_LD_W_ABS, _AND, _JEQ, _JGE, _RET = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
REFUSE = _ERRNO | errno.EPERM
"""The action for any other call: EPERM. A call missing from the list then causes an error, not the worker's death."""
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# name -> (number on x86-64, number on aarch64); None if the call does not exist there
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
    # existing sockets
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
    # signals to itself
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
    # its own identity
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
"""These calls fail with ENOSYS, as on a kernel without them."""
_CONFINING = {"seccomp": (317, 277), "pivot_root": (155, 41), "io_uring_setup": (425, 425)}

# Linux's numbers, equal on both architectures
AF_INET, AF_INET6 = 2, 10
SOCK_STREAM, SOCK_DGRAM, SOCK_NONBLOCK, SOCK_CLOEXEC = 1, 2, 0o4000, 0o2000000
SOL_SOCKET, SO_KEEPALIVE, SO_BINDTODEVICE = 1, 9, 25
IPPROTO_TCP, IPPROTO_UDP = 6, 17
TCP_NODELAY, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT, TCP_USER_TIMEOUT = 1, 4, 5, 6, 18

_TYPE = 0xFFFFFFFF & ~(SOCK_NONBLOCK | SOCK_CLOEXEC)
_FIONREAD, _FIONBIO, _FIOCLEX = 0x541B, 0x5421, 0x5451
_F_DUPFD, _F_GETFD, _F_SETFD, _F_GETFL, _F_SETFL, _F_DUPFD_CLOEXEC = 0, 1, 2, 3, 4, 1030
_AT_EMPTY_PATH = 0x1000
_SO_PASSRIGHTS = 83
_THREAD = 0x10F00  # CLONE_VM, FS, FILES, SIGHAND, THREAD
_OF_A_THREAD = 0x017C0000  # CLONE_SYSVSEM, SETTLS, PARENT_SETTID, CHILD_CLEARTID, DETACHED, CHILD_SETTID
_PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA = 15, 16, 0x53564D41


@dataclass(frozen=True, slots=True)
class Argument:
    """A condition on one argument of a call.

    Attributes:
        index: the argument's position, from 0.
        values: the lower 32 bits of the argument, after `mask`, must equal one of these.
        unlike: they must equal none of `values`.
        wide: all 64 bits must be 0; for a pointer that must be NULL.
    """

    index: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    unlike: bool = False
    wide: bool = False


type Rule = tuple[Argument, ...]
"""Conditions on the arguments of one call. All of them must hold."""


def checks(pid: int, pinned: int) -> Mapping[str, tuple[Rule, ...]]:
    """Return the rules of each call whose arguments are checked. At least one rule of a call must hold.

    Args:
        pid: the worker's process id; it may send signals to itself.
        pinned: the descriptor of the DNS listener.
    """
    inet = Argument(0, (AF_INET, AF_INET6))
    relay = (TCP_NODELAY, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT, TCP_USER_TIMEOUT)
    return {
        "sendto": ((Argument(4, (0,), wide=True),), (Argument(0, (pinned,)),)),
        "close": ((Argument(0, (pinned,), unlike=True),),),
        "ioctl": ((Argument(1, (_FIONBIO, _FIOCLEX, _FIONREAD)),),),
        "socket": (
            (inet, Argument(1, (SOCK_STREAM,), _TYPE), Argument(2, (0, IPPROTO_TCP))),
            (inet, Argument(1, (SOCK_DGRAM,), _TYPE), Argument(2, (0, IPPROTO_UDP))),
        ),
        "setsockopt": (
            (Argument(1, (IPPROTO_TCP,)), Argument(2, relay)),
            (Argument(1, (SOL_SOCKET,)), Argument(2, (SO_KEEPALIVE, SO_BINDTODEVICE, _SO_PASSRIGHTS))),
        ),
        "fcntl": ((Argument(1, (_F_GETFL, _F_SETFL, _F_GETFD, _F_SETFD, _F_DUPFD, _F_DUPFD_CLOEXEC)),),),
        "newfstatat": ((Argument(3, (_AT_EMPTY_PATH,)),),),
        "clone": ((Argument(0, (_THREAD,), 0xFFFFFFFF & ~_OF_A_THREAD),),),
        "prctl": ((Argument(0, (_PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA)),),),
        "prlimit64": ((Argument(0, (0,)), Argument(2, (0,), wide=True)),),
        "tgkill": ((Argument(0, (pid,)),),),
    }


def number(name: str, machine: str) -> int:
    """Return the number of the call `name` on `machine` (as `platform.machine()` names it).

    Raises:
        OSError: the machine is not supported.
        KeyError: the call is not in the tables, or does not exist on that machine.
    """
    column = _machine(machine)[1]
    found = ({**_PLAIN, **_CHECKED, **_ABSENT, **_CONFINING})[name][column]
    if found is None:
        raise KeyError(name)
    return found


def _machine(name: str) -> tuple[int, int]:
    if name not in _MACHINES:
        raise OSError(errno.ENOSYS, f"there is no system call filter for the machine {name}; use x86_64 or aarch64")
    return _MACHINES[name]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def assemble(machine: str, pid: int, pinned: int, refuse: int = REFUSE) -> bytes:
    """Return the filter's instructions.

    Args:
        machine: as `platform.machine()` names it.
        pid, pinned: see `checks`.
        refuse: the action for calls that are not on the list.

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
    """Return a filter that refuses only io_uring. Install it before the event loop is made, which would use io_uring.

    Raises:
        OSError: there is no filter for that machine.
    """
    refused = _instruction(_JEQ, number("io_uring_setup", machine), 0, 1), _instruction(_RET, REFUSE)
    return b"".join((*_head(machine), *refused, _instruction(_RET, _ALLOW)))


def _head(machine: str) -> list[bytes]:
    """Kill the process for a call of another architecture, and load the call's number."""
    return [
        _instruction(_LD_W_ABS, _ARCH),
        _instruction(_JEQ, _machine(machine)[0], 1, 0),
        _instruction(_RET, _KILL),
        _instruction(_LD_W_ABS, _NUMBER),
        _instruction(_JGE, _X32, 0, 1),
        _instruction(_RET, _KILL),
    ]


def _rule(rule: Rule) -> Iterable[bytes]:
    """Allow the call if the rule holds, otherwise continue after the rule."""
    code = [_instruction(_RET, _ALLOW)]
    for argument in reversed(rule):
        code = [*_argument(argument, len(code)), *code]
    return code


def _argument(argument: Argument, behind: int) -> list[bytes]:
    """Continue if the condition holds, otherwise skip the next `behind` instructions."""
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
