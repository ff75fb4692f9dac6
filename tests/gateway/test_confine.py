"""A confined process can dial and use its sockets. All other operations are denied to each of its threads.

It tests `gateway/confine.py`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.calls import assemble

ROOT = Path(__file__).parents[2]
PROBE = """
import ctypes, fcntl, os, resource, socket, struct, sys, threading
from gateway import confine
from gateway import spawn
libc = ctypes.CDLL(None, use_errno=True)
ours, theirs = socket.socketpair()
tcp, udp, pinned = socket.socket(), socket.socket(type=socket.SOCK_DGRAM), socket.socket(type=socket.SOCK_DGRAM)
udp.connect(("127.0.0.1", 9))
held = os.open("/proc/self/ns/net", os.O_RDONLY)
parent, me = os.getppid(), os.getpid()
machine = ("x86_64", "aarch64").index(os.uname().machine)
NUMBERS = {  # on x86-64, on aarch64
    "bpf": (321, 280), "clone": (56, 220), "clone3": (435, 435), "io_uring": (425, 425), "pidfd_getfd": (438, 438),
    "process_vm_readv": (310, 270), "ptrace": (101, 117), "sendmmsg": (307, 269), "close_range": (436, 436),
    "tgkill": (234, 131), "memfd_create": (319, 279), "keyctl": (250, 219), "userfaultfd": (323, 282),
}
def raw(name, *arguments):
    result = libc.syscall(NUMBERS[name][machine], *map(ctypes.c_long, arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result
def born(pid):
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
def thread():
    started = threading.Thread(target=lambda: None)
    started.start()
    started.join()
def option(level, name, value=1):
    socket.socket().setsockopt(level, name, value)
def bound():
    socket.socket().bind(("127.0.0.1", 0))
SPACES = {"cgroup": 0x02000000, "ipc": 0x08000000, "mnt": 0x00020000, "net": 0x40000000, "pid": 0x20000000,
          "user": 0x10000000, "uts": 0x04000000}
CLOSED = {
    "unix": lambda: socket.socket(socket.AF_UNIX).close(),
    "packet": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close(),
    "netlink": lambda: socket.socket(socket.AF_NETLINK).close(),
    "vsock": lambda: socket.socket(socket.AF_VSOCK).close(),
    "raw": lambda: socket.socket(type=socket.SOCK_RAW, proto=1).close(),
    "ping": lambda: socket.socket(type=socket.SOCK_DGRAM, proto=1).close(),
    "mptcp": lambda: socket.socket(proto=262).close(),
    "seqpacket": lambda: socket.socket(type=socket.SOCK_SEQPACKET).close(),
    "socketpair": lambda: [end.close() for end in socket.socketpair()],
    "bind": bound,
    "listen": lambda: socket.socket().listen(),
    "unconnected": lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)),
    "readdressed": lambda: udp.sendto(b"x", ("127.0.0.2", 9)),
    "sendmsg": lambda: udp.sendmsg([b"x"]),
    "sendmmsg": lambda: raw("sendmmsg", udp.fileno(), 0, 0, 0),
    "descriptor": lambda: socket.send_fds(ours, [b"x"], [0]),
    "replaced": lambda: os.dup2(udp.fileno(), 250),
    "range": lambda: raw("close_range", 300, 301, 0),
    "mark": lambda: option(socket.SOL_SOCKET, 36),
    "transparent": lambda: option(socket.IPPROTO_IP, 19),
    "freebind": lambda: option(socket.IPPROTO_IP, 15),
    "reuseport": lambda: option(socket.SOL_SOCKET, socket.SO_REUSEPORT),
    "linger": lambda: option(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 9)),
    "setns": lambda: os.setns(held, 0),
    **{f"unshare-{name}": lambda name=name: os.unshare(SPACES[name]) for name in ("ipc", "uts")},
    **{f"clone-{name}": lambda flag=flag: born(raw("clone", flag | 17, 0, 0, 0, 0)) for name, flag in SPACES.items()},
    "fork": lambda: born(os.fork()),
    "vfork": lambda: born(raw("clone", 17, 0, 0, 0, 0)),
    "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "signal": lambda: os.kill(parent, 0),
    "own signal by kill": lambda: os.kill(me, 0),
    "thread's signal": lambda: raw("tgkill", parent, parent, 0),
    "ptrace": lambda: raw("ptrace", 0x4200, parent, 0, 0),
    "pidfd": lambda: os.close(os.pidfd_open(parent)),
    "memory of another": lambda: raw("process_vm_readv", parent, 0, 0, 0, 0, 0),
    "limit": lambda: resource.prlimit(0, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)),
    "limit of another": lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE),
    "death signal": lambda: spawn.prctl(1, 0),
    "owner": lambda: fcntl.fcntl(udp, fcntl.F_SETOWN, me),
    "interfaces": lambda: fcntl.ioctl(udp, 0x8912, struct.pack("iP", 0, 0)),
    "open": lambda: os.close(os.open("/dev/null", os.O_RDONLY)),
    "stat": lambda: os.stat("/dev/null"),
    "memfd": lambda: os.close(os.memfd_create("x")),
    "io_uring": lambda: os.close(raw("io_uring", 1, ctypes.addressof(ctypes.create_string_buffer(120)))),
    "bpf": lambda: raw("bpf", 0, 0, 0),
    "keyctl": lambda: raw("keyctl", 0, -3, 0),
    "userfaultfd": lambda: os.close(raw("userfaultfd", 1)),
}
OPEN = {
    "tcp4": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 6).close(),
    "tcp6": lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close(),
    "udp4": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 17).close(),
    "udp6": lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close(),
    "connect": lambda: socket.socket(type=socket.SOCK_DGRAM).connect(("127.0.0.1", 9)),
    "send": lambda: ours.send(b"x"),
    "answer": lambda: pinned.sendto(b"x", ("127.0.0.1", 9)),
    "keep-alive": lambda: option(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    "no delay": lambda: option(socket.IPPROTO_TCP, socket.TCP_NODELAY),
    "thread": thread,
    "own signal": lambda: raw("tgkill", me, threading.get_native_id(), 0),
    "own limit": lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
    "random": lambda: os.urandom(8),
}
LAST = {"pinned": lambda: os.close(pinned.fileno())}
def attempt(call):
    try:
        call()
        return "ok"
    except OSError as error:
        return str(error.errno)
def attempts(where):
    probes = CLOSED | OPEN | (LAST if sys.argv[1] == "confined" else {})
    return {where + name: attempt(call) for name, call in probes.items()}
results = {}
go, done = threading.Event(), threading.Event()
def other():
    go.wait()
    results.update(attempts("thread: "))
    done.set()
threading.Thread(target=other, daemon=True).start()
if sys.argv[1] == "confined":
    spawn.prctl(38, 1)
    confine.install(pinned.fileno())
results.update(attempts(""))
go.set()
done.wait()
results["clone3"] = attempt(lambda: raw("clone3", 0, 0))
print(repr((results, list(CLOSED | LAST), list(OPEN))), flush=True)
os._exit(0)
"""


def run(mode: str) -> tuple[dict[str, str], list[str], list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, mode], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    results, closed, opened = eval(done.stdout)  # noqa: S307 - what this very test printed
    return results, closed, opened


def test_every_thread_of_a_confined_process_finds_every_door_closed() -> None:
    results, closed, opened = run("confined")

    expected = dict.fromkeys(closed, "1") | dict.fromkeys(opened, "ok")
    assert expected | {f"thread: {name}": value for name, value in expected.items()} | {"clone3": "38"} == results


@pytest.mark.system
def test_without_the_filter_the_same_doors_are_open() -> None:
    results, closed, opened = run("free")

    assert [] == [name for name in closed if results.get(name) == "1"]
    assert dict.fromkeys(opened, "ok") == {name: results[name] for name in opened}
    assert "38" != results["clone3"]


def test_a_machine_without_a_filter_is_refused() -> None:
    with pytest.raises(OSError, match="no system call filter"):
        assemble("riscv64", 1, 3)
