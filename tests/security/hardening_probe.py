"""A probe of a process's environment: the doors (interfaces of the kernel) that are open to it, and its properties.

    python3 hardening_probe.py

It prints one JSON object and uses only the standard library. It tries each door in its own child process, so that
changes end with the child. It writes nothing through an open door. The value of a door is `open` or the name of the
error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import re
import resource
import signal
import socket
import struct
from collections.abc import Callable

MARK = ctypes.create_string_buffer(8)  # the parent of each child has this buffer at the same address
LIBC = ctypes.CDLL(None, use_errno=True)
_X86 = platform.machine() == "x86_64"
_COMMON = {"io_uring_setup": 425, "open_tree": 428, "fsopen": 430, "pidfd_getfd": 438}
NUMBERS = _COMMON | (
    {
        "add_key": 248,
        "keyctl": 250,
        "bpf": 321,
        "perf_event_open": 298,
        "userfaultfd": 323,
        "unshare": 272,
        "setns": 308,
        "mount": 165,
        "process_vm_readv": 310,
        "open_by_handle_at": 304,
        "init_module": 175,
        "kexec_load": 246,
        "ptrace": 101,
    }
    if _X86
    else {
        "add_key": 217,
        "keyctl": 219,
        "bpf": 280,
        "perf_event_open": 241,
        "userfaultfd": 282,
        "unshare": 97,
        "setns": 268,
        "mount": 40,
        "process_vm_readv": 270,
        "open_by_handle_at": 265,
        "init_module": 105,
        "kexec_load": 104,
        "ptrace": 117,
    }
)
NAMESPACES = {"mnt": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000, "net": 0x40000000}
FAMILIES = {
    "packet": (17, socket.SOCK_RAW),
    "vsock": (40, socket.SOCK_STREAM),
    "alg": (38, socket.SOCK_SEQPACKET),
    "xdp": (44, socket.SOCK_RAW),
    "key": (15, socket.SOCK_RAW),
    "can": (29, socket.SOCK_RAW),
    "tipc": (30, socket.SOCK_STREAM),
}
NETLINKS = {"sock_diag": 4, "xfrm": 6, "audit": 9, "netfilter": 12, "uevent": 15, "generic": 16}
KERNEL_FILES = (
    "/proc/sysrq-trigger",
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/vm/overcommit_memory",
    "/proc/irq/default_smp_affinity",
    "/proc/1/oom_score_adj",
    "/proc/1/mem",
    "/sys/kernel/uevent_helper",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/cgroup.procs",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/memory/release_agent",
    "/sys/fs/cgroup/devices/devices.allow",
    "/sys/fs/cgroup/pids/pids.max",
)
SECRETS_OF_THE_KERNEL = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/kmsg", "/proc/1/environ", "/dev/mem")


def call(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char]) -> None:
    """Make a system call by number.

    Raises:
        OSError: the kernel refused it.
    """
    # Pass whole words: with plain ints the upper half of an argument on the stack would be undefined.
    words = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    if LIBC.syscall(NUMBERS[name], *words) < 0:
        raise OSError(ctypes.get_errno(), name)


def zeros(size: int) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(size)


def bpf() -> None:
    """Make an array map."""
    call("bpf", 0, struct.pack("<IIII", 2, 4, 4, 1) + bytes(56), 72)


def perf() -> None:
    """Count this process's own time."""
    attributes = struct.pack("<IIQ", 1, 112, 1) + bytes(96)
    call("perf_event_open", attributes, 0, -1, -1, 0)


def setns() -> None:
    """Join this process's own network namespace again."""
    fd = os.open("/proc/self/ns/net", os.O_RDONLY)
    call("setns", fd, NAMESPACES["net"])


def peek_at_another() -> None:
    """Read the memory of another process."""
    pid = os.getppid()
    local = zeros(8)
    vector, far = (struct.pack("<QQ", ctypes.addressof(place), 8) for place in (local, MARK))
    call("process_vm_readv", pid, vector, 1, far, 1, 0)


def take_a_descriptor() -> None:
    """Take a descriptor of another process."""
    fd = os.pidfd_open(os.getppid())
    call("pidfd_getfd", fd, 1, 0)


def by_handle() -> None:
    """Open a file by a handle, independently of mounts."""
    handle = struct.pack("<Ii", 8, 1) + struct.pack("<II", 2, 0) + bytes(120)
    try:
        call("open_by_handle_at", os.open("/etc/hosts", os.O_RDONLY), handle, os.O_RDONLY)
    except OSError as error:
        if error.errno not in (errno.ESTALE, errno.EINVAL):
            raise  # the kernel examined the stale handle: the door is open


def load_module() -> None:
    """Load an empty module."""
    try:
        call("init_module", b"", 0, b"\0")
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise  # the kernel examined the module: the door is open


def a_node() -> None:
    """Make a block device."""
    os.mknod("/tmp/hardening-node", 0o60600, os.makedev(8, 0))
    os.unlink("/tmp/hardening-node")


def tun() -> None:
    """Make a network interface."""
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22x", b"tun9", 0x1001))


def route_change() -> None:
    """Add a route over netlink."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        body = struct.pack("<BBBBBBBBI", 2, 32, 0, 0, 254, 4, 0, 1, 0)
        body += struct.pack("<HH4s", 8, 1, socket.inet_aton("198.51.100.1")) + struct.pack("<HHI", 8, 4, 1)
        sock.send(struct.pack("<IHHII", 16 + len(body), 24, 0x605, 1, 0) + body)
        answer = sock.recv(4096)
        failed = -struct.unpack_from("<i", answer, 16)[0]
        if failed:
            raise OSError(failed, "route")


def past_a_user_namespace(door: Callable[[], None]) -> Callable[[], None]:
    """Return a function that tries a door with every capability of its own user namespace."""

    def beyond() -> None:
        with contextlib.suppress(OSError):
            call("unshare", NAMESPACES["user"])
        door()

    return beyond


def opened(path: str, flags: int) -> Callable[[], None]:
    return lambda: os.close(os.open(path, flags))


def some_bytes(path: str) -> Callable[[], None]:
    def read() -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):  # the file is readable but has no more data at the moment
            if not os.read(fd, 16):
                raise OSError(errno.ENODATA, path)

    return read


def made(family: int, kind: int, protocol: int = 0) -> Callable[[], None]:
    return lambda: socket.socket(family, kind, protocol).close()


DOORS: dict[str, Callable[[], None]] = {
    "keyctl": lambda: call("keyctl", 0, -3, 1),
    "add_key": lambda: call("add_key", b"user\0", b"probe\0", b"x", 1, -2),
    "bpf": bpf,
    "perf_event_open": perf,
    "userfaultfd": lambda: call("userfaultfd", 1),
    "io_uring": lambda: call("io_uring_setup", 4, zeros(120)),
    "open_by_handle_at": by_handle,
    "process_vm_readv": peek_at_another,
    "pidfd_getfd": take_a_descriptor,
    "ptrace init": lambda: call("ptrace", 0x4206, 1, 0, 0),
    "fsopen": lambda: call("fsopen", b"tmpfs\0", 0),
    "mount": lambda: call("mount", b"none\0", b"/mnt\0", b"tmpfs\0", 0, 0),
    "remount /proc/sys": lambda: call("mount", b"none\0", b"/proc/sys\0", 0, 0x1020, 0),
    "setns": setns,
    "init_module": load_module,
    "kexec_load": lambda: call("kexec_load", 0, 0, 0, 0),
    "mknod": a_node,
    "tun": tun,
    "route": route_change,
    "chroot": lambda: os.chroot("/tmp"),
    "sethostname": lambda: socket.sethostname(socket.gethostname()),
    "nice -5": lambda: os.setpriority(os.PRIO_PROCESS, 0, -5),
    "raw icmp": made(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    "raw icmp6": made(socket.AF_INET6, socket.SOCK_RAW, 58),
    "raw ip": made(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW),
    "raw ip from a user namespace": past_a_user_namespace(made(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)),
    "packet from a user namespace": past_a_user_namespace(made(*FAMILIES["packet"])),
    "route from a user namespace": past_a_user_namespace(route_change),
    "ping socket": made(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP),
    "sctp": made(socket.AF_INET, socket.SOCK_STREAM, 132),
    **{f"unshare {name}": lambda flag=flag: call("unshare", flag) for name, flag in NAMESPACES.items()},  # type: ignore[misc]
    **{f"family {name}": made(family, kind) for name, (family, kind) in FAMILIES.items()},
    **{f"netlink {name}": made(socket.AF_NETLINK, socket.SOCK_RAW, number) for name, number in NETLINKS.items()},
    **{f"write {path}": opened(path, os.O_WRONLY) for path in KERNEL_FILES},
    **{f"read {path}": some_bytes(path) for path in SECRETS_OF_THE_KERNEL},
}


def tried(door: Callable[[], None]) -> str:
    """Try a door in a child process. Return `open` or the name of the error or signal."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            door()
            outcome = "open"
        except OSError as error:
            outcome = errno.errorcode.get(error.errno or 0, str(error.errno))
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            outcome = f"broken probe: {type(error).__name__}: {error}"
        os.write(writing, outcome.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        outcome = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return outcome


def status_of(pid: str) -> dict[str, str]:
    """Return capabilities, NoNewPrivs, Seccomp and Groups of a process."""
    with open(f"/proc/{pid}/status") as file:
        fields = dict(line.rstrip("\n").split(":", 1) for line in file if ":" in line)
    return {key: value.strip() for key, value in fields.items() if re.match(r"Cap|NoNewPrivs|Seccomp$|Groups", key)}


def descriptors() -> dict[str, str]:
    """Return this process's own descriptors and their targets."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def nodes() -> dict[str, str]:
    """Return the device nodes below /dev with their major and minor numbers."""
    found = {}
    for directory, _, names in os.walk("/dev"):
        for name in names:
            path = os.path.join(directory, name)
            mode = os.lstat(path).st_mode
            if mode & 0o170000 in (0o020000, 0o060000):
                found[path] = f"{os.major(os.lstat(path).st_rdev)}:{os.minor(os.lstat(path).st_rdev)}"
    return found


def main() -> None:
    """Try all doors and print all results."""
    with open("/proc/self/mountinfo") as file:
        mounts = [line.split() for line in file]
    with open("/proc/1/cmdline") as file:
        command = file.read().split("\0")
    namespaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")}
    print(
        json.dumps(
            {
                "doors": {name: tried(door) for name, door in DOORS.items()},
                "self": status_of("self"),
                "init": status_of("1"),
                "descriptors": descriptors(),
                "nodes": nodes(),
                "mounts": {line[4]: line[5].split(",") for line in mounts},
                "propagation": [line[4] for line in mounts if re.match("shared|master", line[6])],
                "kinds": {line[4]: line[line.index("-") + 1] for line in mounts},
                "namespaces": namespaces,
                "command": command,
                "environment": dict(os.environ),
                "pids": [name for name in os.listdir("/proc") if name.isdigit()],
                "core": resource.getrlimit(resource.RLIMIT_CORE)[1],
                "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            }
        )
    )


if __name__ == "__main__":
    main()
