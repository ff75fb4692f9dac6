"""A confined process cannot become another program, reach another process, or make a socket of another family."""

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.confine import assemble

ROOT = Path(__file__).parents[2]
PROBE = """
import ctypes, os, socket, sys, threading
from gateway import birth, confine
results = []
libc = ctypes.CDLL(None, use_errno=True)
def probe(name, call):
    try:
        result = call()
        results.append(f"{name}:ok")
    except OSError as error:
        results.append(f"{name}:{error.errno}")
def raw(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
def all_probes(where):
    probe(where + "execve", lambda: os.execv("/bin/true", ["true"]))
    probe(where + "unix", lambda: socket.socket(socket.AF_UNIX).close())
    probe(where + "packet", lambda: socket.socket(socket.AF_PACKET).close())
    probe(where + "netlink", lambda: socket.socket(socket.AF_NETLINK).close())
    probe(where + "inet", lambda: socket.socket(socket.AF_INET).close())
    probe(where + "inet6", lambda: socket.socket(socket.AF_INET6).close())
    probe(where + "unshare", lambda: os.unshare(os.CLONE_NEWNET))
    probe(where + "ptrace", lambda: raw(101, 0, 0, 0, 0))
    probe(where + "io_uring", lambda: raw(425, 1, 0))
    probe(where + "bpf", lambda: raw(321, 0, 0, 0))
go, done = threading.Event(), threading.Event()
def other():
    go.wait()
    all_probes("thread-")
    done.set()
threading.Thread(target=other, daemon=True).start()
if sys.argv[1] == "confined":
    birth.prctl(38, 1)
    confine.install()
    all_probes("")
    go.set()
    done.wait()
else:
    probe("unix", lambda: socket.socket(socket.AF_UNIX).close())
    probe("execve", lambda: os.spawnv(os.P_WAIT, "/bin/true", ["true"]))
print(" ".join(results))
"""


def run(mode: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, mode], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


def test_every_thread_of_a_confined_process_is_bound() -> None:
    refused = ("execve", "unix", "packet", "netlink", "unshare", "ptrace", "io_uring", "bpf")
    expected = {f"{name}:1" for name in refused} | {"inet:ok", "inet6:ok"}
    assert expected | {f"thread-{item}" for item in expected} == set(run("confined"))


def test_without_the_filter_the_same_probes_succeed() -> None:
    assert ["unix:ok", "execve:ok"] == run("free")


def test_a_machine_without_a_filter_is_refused() -> None:
    with pytest.raises(OSError, match="no system call filter"):
        assemble("riscv64")
