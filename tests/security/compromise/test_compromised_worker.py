"""A compromised gateway worker can dial outward, under the guard's rules, and has no other access.

`tests/gateway/test_confine.py` tests each call that its filter refuses, with controls.
`tests/system/test_runtimes_guard.py` tests each of the kernel's tables alone. This module tests `gateway/calls.py` and
`gateway/worker.py`.
"""

import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from opensandbox.exceptions import SandboxException

from lifecycle.posture.capture import Capture
from runtimes.net import netns
from runtimes.net.nft import FLOOR_TABLE, GUARD_TABLE
from runtimes.process import watchdog
from testbed.internet import ADDRESSES, API
from testbed.stack import EMPTY_IMAGE, StackError
from tests.security.compromise.stack import CompromisedStack, Hostile, Refused
from tests.stopping import stop
from tests.system.test_death import until

pytestmark = pytest.mark.system

_IDLE = ["tail", "-f", "/dev/null"]
_STAYS = """
import os, threading
os._exit = lambda status: threading.Event().wait()  # what its birth calls once hostd's channel has ended
value = None
"""
_DIALS = f"""
import socket
try:
    socket.create_connection(("{ADDRESSES[API]}", 443), timeout=3).close()
    value = "connected"
except OSError as error:
    value = type(error).__name__
"""
_ATTEMPTS = {
    "bind": "socket.socket().bind(('0.0.0.0', 0))",
    "bind to the API's port": "socket.socket().bind(('127.0.0.1', PORT))",
    "bind a datagram socket": "socket.socket(type=socket.SOCK_DGRAM).bind(('0.0.0.0', 0))",
    "listen": "socket.socket().listen()",
    "unconnected": f"socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('{ADDRESSES[API]}', 9))",
    "unix": "socket.socket(socket.AF_UNIX)",
    "pair": "socket.socketpair()",
    "packet": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "raw": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "vsock": "socket.socket(socket.AF_VSOCK)",
    "descriptor": "socket.send_fds(process._control._sock, [b'x'], [0])",
    "namespace": "os.unshare(os.CLONE_NEWUSER)",
    "entering one": "os.setns(0, 0)",
    "fork": "os._exit(0) if os.fork() == 0 else None",
    "signal": "os.kill(os.getppid(), 0)",
    **{
        f"clone {flag:#x}": f"called(CLONE, {flag} | 17)"
        for flag in (0x02000000, 0x08000000, 0x00020000, 0x40000000, 0x20000000, 0x10000000, 0x04000000)
    },
}
_CALLED = """
import ctypes, os, socket
CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
libc = ctypes.CDLL(None, use_errno=True)
def called(number, *arguments):
    pid = libc.syscall(number, *map(ctypes.c_long, arguments), 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid < 0:
        raise OSError(ctypes.get_errno(), "")
value = None
"""


@contextmanager
def taken_over(stack: CompromisedStack) -> Iterator[Hostile]:
    """Yield the worker of a sandbox that does nothing."""
    with stack.create("runc", EMPTY_IMAGE, entrypoint=_IDLE) as sandbox:
        worker = stack.hostile(sandbox.id)
        try:
            yield worker
        finally:
            worker.close()
            with suppress(SandboxException):  # the test can end with a stopped server
                sandbox.kill()


def arrives(stack: CompromisedStack, worker: Hostile) -> tuple[str, bool]:
    """Return the result of the worker's dial to the API, and whether a packet of it arrived in the API's network.

    root dials after the worker, so that the capture has all packets that were sent before.
    """
    up = Path(stack.internet.path(stack.internet.up))
    with Capture(stack.internet.path(stack.internet.net), "net0") as wire:
        said = worker.run(_DIALS)
        with netns.inside(up, lambda: socket.create_connection((ADDRESSES[API], 443), timeout=10)) as root:
            own = root.getsockname()[1]

            def ports() -> set[int]:
                frames = [frame for frame in wire.since(0) if frame.destination == ADDRESSES[API]]
                return {int.from_bytes(frame.data[34:36], "big") for frame in frames}

            assert until(lambda: own in ports())
            return said, bool(ports() - {own})


def test_it_has_no_door_but_a_dial(compromised: CompromisedStack) -> None:
    with taken_over(compromised) as worker:
        worker.run(_CALLED.replace("PORT", str(compromised.port)))
        found = {}
        for name, code in _ATTEMPTS.items():
            try:
                worker.run(f"{code.replace('PORT', str(compromised.port))}\nvalue = None")
                found[name] = "open"
            except Refused as refused:
                found[name] = str(refused.number)
        assert dict.fromkeys(_ATTEMPTS, "1") == found
        said, arrived = arrives(compromised, worker)
        assert ("connected", True) == (said, arrived)


def test_what_it_tried_to_serve_is_reached_by_no_client(compromised: CompromisedStack) -> None:
    """Judged in the upstream namespace. The control is a server of root's there."""
    upstream = Path(compromised.internet.path(compromised.internet.up))
    serve = "import socket; held = socket.create_server(('127.0.0.1', 0)); value = held.getsockname()[1]"
    with netns.inside(upstream, lambda: socket.create_server(("127.0.0.1", 0))) as control:
        netns.inside(upstream, lambda: socket.create_connection(control.getsockname(), timeout=5)).close()
    with taken_over(compromised) as worker:
        before = _listening(upstream)
        with pytest.raises(Refused):
            worker.run(serve)
        assert before == _listening(upstream)


def _listening(upstream: Path) -> list[str]:
    """Return the sockets of the upstream namespace that wait for a client or a datagram, as the kernel lists them."""

    def read() -> list[str]:
        rows = [
            line.split()
            for table in ("tcp", "tcp6", "udp", "udp6")
            for line in Path(f"/proc/thread-self/net/{table}").read_text().splitlines()[1:]
        ]
        return sorted(row[1] for row in rows if row[3] in ("0A", "07"))

    return netns.inside(upstream, read)


def without_guard(stack: CompromisedStack) -> None:
    """Kill the guard's process and wait until its table was removed."""
    pid = int((stack.run / "config" / "guard.pid").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not _has(stack, GUARD_TABLE))


def _has(stack: CompromisedStack, table: str) -> bool:
    listed = netns.list_rules(Path(stack.internet.path(stack.internet.up)), "-t", "tables")
    return f"table inet {table}\n" in listed


def _answers(stack: CompromisedStack) -> bool:
    try:
        stack.sandboxes()
    except (OSError, StackError):
        return False
    return True


def hostd(stack: CompromisedStack) -> int:
    assert stack._process is not None
    return stack._process.pid


def stops(pid: int) -> Callable[[], None]:
    stop(pid)
    return lambda: os.kill(pid, signal.SIGCONT)


def test_it_dials_nothing_while_the_guard_is_dead(compromised: CompromisedStack) -> None:
    """hostd is stopped, so that the guard does not restart. The compromised worker ignores the guard's pidfd."""
    with taken_over(compromised) as worker:
        said, arrived = arrives(compromised, worker)
        assert ("connected", True) == (said, arrived)
        go_on = stops(hostd(compromised))
        try:
            without_guard(compromised)
            said, arrived = arrives(compromised, worker)
            assert ("connected" != said, False) == (True, arrived)
        finally:
            go_on()
        assert until(lambda: _has(compromised, GUARD_TABLE))
        assert until(lambda: arrives(compromised, worker)[0] == "connected")


def test_without_the_floor_it_dials_while_the_guard_is_dead(compromised: CompromisedStack) -> None:
    """The control: the floor is the layer that drops the packets."""
    upstream = Path(compromised.internet.path(compromised.internet.up))
    with taken_over(compromised) as worker:
        go_on = stops(hostd(compromised))
        try:
            netns.load_rules(upstream, f"delete table inet {FLOOR_TABLE}")
            without_guard(compromised)
            said, arrived = arrives(compromised, worker)
            assert ("connected", True) == (said, arrived)
        finally:
            go_on()


def test_it_dials_nothing_after_the_death_of_hostd_and_the_watchdog_ends_it(compromised: CompromisedStack) -> None:
    """The worker continues after its channel has ended, and hostd is not restarted.

    The test then calls the function with which a watchdog ends workers before it starts the next hostd.
    """
    host = compromised.run / "launch" / "host.json"
    with taken_over(compromised) as worker:
        worker.run(_STAYS)
        compromised.kill()
        try:
            assert until(lambda: not _has(compromised, GUARD_TABLE))
            said, arrived = arrives(compromised, worker)
            assert ("connected" != said, False) == (True, arrived)
            assert _has(compromised, FLOOR_TABLE)

            pidfd = os.pidfd_open(worker.pid)
            watchdog.ending(host)()
            assert until(lambda: bool(select.select([pidfd], [], [], 0)[0]))
            os.close(pidfd)
        finally:
            compromised.start()
            assert until(lambda: _answers(compromised))
    assert _has(compromised, GUARD_TABLE)
    compromised.stop()
    assert not _has(compromised, FLOOR_TABLE)
