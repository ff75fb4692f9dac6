"""While `serve` is down, no other process can take the API's port, and no request is lost."""

import http.client
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtimes.process import predecessor
from testbed.stack import Stack
from tests.stopping import stop

pytestmark = [pytest.mark.system, pytest.mark.faults]

WORKER = 700001000

_THIEF = """
import os, socket, sys
port, uid = int(sys.argv[1]), int(sys.argv[2])
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
ends = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"),
        (socket.AF_INET6, "::ffff:127.0.0.1")]
options = [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)]
print("begun", flush=True)
os.set_blocking(0, False)
tried = 0
while True:
    try:
        if not os.read(0, 1): break
    except BlockingIOError: pass
    for family, host in ends:
        for chosen in options:
            with socket.socket(family) as sock:
                for option in chosen: sock.setsockopt(socket.SOL_SOCKET, option, 1)
                if family == socket.AF_INET6: sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                try:
                    sock.bind((host, port))
                    sock.listen()
                except OSError: pass
                else: print("took", host, chosen, flush=True)
    tried += 1
    if tried == 1: print("tried", flush=True)
"""


@contextmanager
def _thief(port: int, uid: int = WORKER) -> Iterator[subprocess.Popen[str]]:
    """Start a process with a worker's uid in the API's namespace, without a worker's other restrictions."""
    command = [sys.executable, "-c", _THIEF, str(port), str(uid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "begun\n" == process.stdout.readline()
        yield process
        process.kill()


def _took(thief: subprocess.Popen[str]) -> list[str]:
    """End the attempts after at least one whole round. Return those that took the port."""
    assert thief.stdin is not None and thief.stdout is not None
    lines = []
    while (line := thief.stdout.readline()) != "tried\n":
        lines.append(line)
    thief.stdin.close()
    return [*lines, *thief.stdout]


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _killed(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    assert [pidfd] == select.select([pidfd], [], [], 60)[0]
    os.close(pidfd)


def _hostd(watchdog: int) -> int:
    children = Path(f"/proc/{watchdog}/task/{watchdog}/children").read_text().split()
    return next(int(pid) for pid in children if b"runtimes.hostd" in Path(f"/proc/{pid}/cmdline").read_bytes())


def _adopted(stack: Stack) -> None:
    """Wait until the second hostd is ready; `serve` answers all the time."""
    deadline = time.monotonic() + 120
    while stack.log.read_text(errors="replace").count("hostd: INFO: ready: ") < 2:
        assert time.monotonic() < deadline, stack.tail()
        time.sleep(0.05)


def _asked(port: int) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", "/health")
    return connection


def _of(stack: Stack, name: str) -> int:
    found = predecessor.find(stack.run / "config", name)
    assert found is not None
    return found.pid


@pytest.mark.extended
def test_the_port_is_never_free_while_serve_is_started_again(second: Stack) -> None:
    """hostd is stopped meanwhile, so `serve` is down for as long as the thief and the client need."""
    assert second._process is not None
    former = _of(second, "serve")
    with _thief(second.port) as thief:
        with _stopped(_hostd(second._process.pid)):
            _killed(former)
            request = _asked(second.port)
            assert [] == _took(thief)
        assert 200 == request.getresponse().status
        request.close()
    assert former != _of(second, "serve")


@pytest.mark.extended
def test_the_port_is_never_free_while_hostd_and_serve_are_started_again(second: Stack) -> None:
    """The watchdog holds the port; it is stopped meanwhile."""
    assert second._process is not None
    watchdog = second._process.pid
    serve, hostd = _of(second, "serve"), _hostd(watchdog)
    with _thief(second.port) as thief:
        with _stopped(watchdog):
            for pid in (hostd, serve):
                _killed(pid)
            request = _asked(second.port)
            assert [] == _took(thief)
        assert 200 == request.getresponse().status
        request.close()


def test_the_port_is_never_free_while_a_killed_server_is_started_again(second: Stack) -> None:
    """Only `serve` holds the port. The next server takes it over, and keeps it when that `serve` is killed, too."""
    serve = _of(second, "serve")
    with _thief(second.port) as thief:
        second.kill()
        second.start()
        _adopted(second)
        assert serve == _of(second, "serve")
        assert second._process is not None
        with _stopped(_hostd(second._process.pid)):
            _killed(serve)
            request = _asked(second.port)
            assert [] == _took(thief)
        assert 200 == request.getresponse().status
        request.close()
