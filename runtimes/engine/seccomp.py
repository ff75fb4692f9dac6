"""The seccomp profile of runc containers, in Docker's format. Pure.

- It is an allowlist. Other calls fail with EPERM, except two that fail with ENOSYS: clone3, so that libc falls back
  to clone, and io_setup, so that databases work without it (its quota is shared by the whole host).
- `socket()` can open only AF_UNIX, AF_INET, AF_INET6 and NETLINK_ROUTE: no vsock, packet, alg, xdp or netfilter
  socket.
- It forbids io_uring (which opens sockets without this filter), namespaces, mounts, bpf, keyrings, ptrace,
  userfaultfd and perf.
- It has one architecture. 32-bit calls are forbidden, because their `socketcall` hides its arguments from a filter.

runsc does not use it: its own kernel has none of these.
"""

import json
from typing import Any

_FILES = """
access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fremovexattr
fsetxattr fstat fstatfs fsync ftruncate futimesat getcwd getdents getdents64 getxattr inotify_add_watch inotify_init
inotify_init1 inotify_rm_watch ioctl lchown lgetxattr link linkat listxattr llistxattr lremovexattr lseek lsetxattr
lstat mkdir mkdirat mknod mknodat name_to_handle_at newfstatat open openat openat2 pread64 preadv preadv2 pwrite64
pwritev pwritev2 read readahead readlink readlinkat readv removexattr rename renameat renameat2 rmdir sendfile
setxattr splice stat statfs statx symlink symlinkat sync sync_file_range syncfs tee truncate umask unlink unlinkat
utime utimensat utimes vmsplice write writev
"""

_MEMORY = """
brk madvise membarrier memfd_create memfd_secret mincore mlock mlock2 mlockall mmap mprotect mremap msync munlock
munlockall munmap pkey_alloc pkey_free pkey_mprotect remap_file_pages map_shadow_stack
"""

_PROCESSES = """
alarm arch_prctl capget capset execve execveat exit exit_group fork futex futex_requeue futex_wait futex_waitv
futex_wake get_robust_list get_thread_area getcpu getegid geteuid getgid getgroups getitimer getpgid getpgrp getpid
getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid gettid getuid ioprio_get ioprio_set kill
landlock_add_rule landlock_create_ruleset landlock_restrict_self pause pidfd_open pidfd_send_signal prctl prlimit64
restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend
rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr
sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam
sched_setscheduler sched_yield seccomp set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid
setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid sigaltstack
sysinfo tgkill time times tkill uname vfork wait4 waitid
"""

_EVENTS_AND_TIME = """
clock_getres clock_gettime clock_nanosleep epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait
epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 gettimeofday nanosleep pipe pipe2 poll ppoll pselect6 select
signalfd signalfd4 timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create
timerfd_gettime timerfd_settime
"""

_IPC_AND_SOCKETS = """
accept accept4 bind connect getpeername getsockname getsockopt listen mq_getsetattr mq_notify mq_open
mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd recvfrom recvmmsg recvmsg semctl semget semop
semtimedop sendmmsg sendmsg sendto setsockopt shmat shmctl shmdt shmget shutdown
"""

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
ALLOWED_FAMILIES = (AF_UNIX, AF_INET, AF_INET6)
_NETLINK_ROUTE = 0
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
_CLONE_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_ENOSYS = 38


def _argument(index: int, value: int, op: str = "SCMP_CMP_EQ", value_two: int = 0) -> dict[str, Any]:
    return {"index": index, "value": value, "valueTwo": value_two, "op": op}


def _allow(names: list[str], *arguments: dict[str, Any]) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": list(arguments)}


def profile() -> dict[str, Any]:
    """Return the profile in the format of Docker's API (`seccomp=` and its JSON)."""
    names = sorted({*(_FILES + _MEMORY + _PROCESSES + _EVENTS_AND_TIME + _IPC_AND_SOCKETS).split()})
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "syscalls": [
            _allow(names),
            *(_allow(["socket"], _argument(0, family)) for family in ALLOWED_FAMILIES),
            _allow(["socket"], _argument(0, AF_NETLINK), _argument(2, _NETLINK_ROUTE)),
            _allow(["socketpair"], _argument(0, AF_UNIX)),
            _allow(["clone"], _argument(0, _CLONE_NAMESPACES, "SCMP_CMP_MASKED_EQ", 0)),
            # fs.aio-max-nr is one limit for the host. Programs that use libaio fall back to threads.
            {"names": ["io_setup"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS, "args": []},
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS, "args": []},
            *(_allow(["personality"], _argument(0, value)) for value in _PERSONALITIES),
        ],
    }


def profile_json() -> str:
    """Return the profile as compact JSON; the bytes are always the same."""
    return json.dumps(profile(), separators=(",", ":"), sort_keys=True)
