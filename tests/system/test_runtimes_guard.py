"""The guard's rules on a real kernel, by dialling process and destination.

It tests `runtimes/net/guard.py`.
"""

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest

from runtimes.net import netns
from runtimes.net.guard import GuardError, NetGuard
from runtimes.net.nft import GuardPlan, render_floor, render_guard
from wire.gateway_limits import GatewayLimits

pytestmark = pytest.mark.system

_FIRST, _LAST = 700001000, 700005093
_LOOPBACK = (ip_network("127.0.0.0/8"),)


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "upstream"
    netns.create_sandbox(path)
    yield path
    netns.delete(path)


def _dials(path: Path, uid: int, address: str, port: int) -> bool:
    command = ["setpriv", f"--reuid={uid}", "--clear-groups", "bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}"]
    done = netns.inside(path, lambda: subprocess.run(command, capture_output=True, timeout=60, check=False))
    return done.returncode == 0


def _listener(path: Path) -> socket.socket:
    return netns.inside(path, lambda: socket.create_server(("127.0.0.1", 0)))


@pytest.mark.parametrize("uid", [_FIRST, _LAST])
def test_a_worker_reaches_no_local_address(upstream: Path, uid: int) -> None:
    with _listener(upstream) as listener:
        port = listener.getsockname()[1]
        assert _dials(upstream, uid, "127.0.0.1", port)
        netns.load_rules(upstream, render_guard(GuardPlan(_FIRST, _LAST), "test").replace("flags owner;", ""))
        assert not _dials(upstream, uid, "127.0.0.1", port)


@pytest.mark.parametrize("uid", [0, _FIRST - 1, _LAST + 1])
def test_no_other_process_is_affected(upstream: Path, uid: int) -> None:
    netns.load_rules(upstream, render_guard(GuardPlan(_FIRST, _LAST), "test").replace("flags owner;", ""))
    with _listener(upstream) as listener:
        assert _dials(upstream, uid, "127.0.0.1", listener.getsockname()[1])


def test_a_range_that_the_operator_named_is_open(upstream: Path) -> None:
    plan = GuardPlan(_FIRST, _LAST, allowed=(ip_network("127.0.0.0/8"),))
    netns.load_rules(upstream, render_guard(plan, "test").replace("flags owner;", ""))
    with _listener(upstream) as listener:
        assert _dials(upstream, _FIRST, "127.0.0.1", listener.getsockname()[1])


def test_a_workers_connections_are_counted(upstream: Path) -> None:
    plan = GuardPlan(_FIRST, _LAST, allowed=(ip_network("127.0.0.0/8"),), connections=2)
    netns.load_rules(upstream, render_guard(plan, "test").replace("flags owner;", ""))
    with _listener(upstream) as listener:
        port = listener.getsockname()[1]
        held = " ".join(f"exec {fd}<>/dev/tcp/127.0.0.1/{port} && echo {fd};" for fd in range(3, 9))
        command = ["setpriv", f"--reuid={_FIRST}", "--clear-groups", "bash", "-c", held]
        done = netns.inside(
            upstream, lambda: subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        )
        assert ["3", "4"] == done.stdout.split()


_SERVES = """
listener = socket.create_server(("127.0.0.1", 0))
listener.settimeout(3)
print(listener.getsockname()[1], flush=True)
try:
    listener.accept()
    print("reached")
except TimeoutError:
    print("alone")
"""
_DIALS = """
refused = 0
for _ in range(int(sys.argv[2])):
    with socket.socket() as sock:
        sock.settimeout(20)
        refused += sock.connect_ex(("127.0.0.1", int(sys.argv[1]))) == errno.EHOSTUNREACH
print(refused)
"""
_ACCEPTS = [
    *(sys.executable, "-c"),
    """
import socket
listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
print(listener.getsockname()[1], flush=True)
while True:
    listener.accept()[0].close()
""",
]
_INHERITS = """
sock = socket.socket(type=socket.SOCK_DGRAM)
sock.bind(("127.0.0.1", int(sys.argv[1])))
try:
    sock.sendto(b"inherited", ("127.0.0.1", int(sys.argv[2])))
except OSError as error:
    print(error.errno)
"""


def _load(path: Path, plan: GuardPlan, *layers: str) -> None:
    for layer in layers:
        text = render_guard(plan, "test").replace("flags owner;", "") if layer == "guard" else render_floor(plan)
        netns.load_rules(path, text)


def _as(uid: int, code: str, *arguments: object) -> list[str]:
    become = f"import errno, os, socket, sys\nos.setgroups([])\nos.setresuid({uid}, {uid}, {uid})\n"
    return [sys.executable, "-c", become + code, *map(str, arguments)]


@pytest.mark.parametrize(("dial_rate", "refused"), [(GatewayLimits().dial_rate, True), (2000, False)])
def test_a_workers_new_connections_have_a_rate_that_the_operator_sets(
    upstream: Path, dial_rate: int, refused: bool
) -> None:
    """2000 connections at once: as many as a worker with `dial_rate = 2000` may begin in a second, and as are open if
    the server is slow."""
    limits = GatewayLimits(connections=2000, dial_rate=dial_rate)
    _load(upstream, GuardPlan(_FIRST, _LAST, allowed=_LOOPBACK).widened(limits), "guard")
    with netns.inside(upstream, lambda: subprocess.Popen(_ACCEPTS, stdout=subprocess.PIPE, text=True)) as server:
        assert server.stdout is not None
        dials = _as(_FIRST, _DIALS, int(server.stdout.readline()), 2000)
        done = netns.inside(
            upstream, lambda: subprocess.run(dials, capture_output=True, text=True, timeout=120, check=True)
        )
        server.kill()
    assert refused == (int(done.stdout) > 0)


def _serves(path: Path, uid: int) -> str:
    """Return the view of a server under `uid` of a client that has a second."""
    with netns.inside(path, lambda: subprocess.Popen(_as(uid, _SERVES), stdout=subprocess.PIPE, text=True)) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with contextlib.suppress(TimeoutError):
            netns.inside(path, lambda: socket.create_connection(("127.0.0.1", port), timeout=1)).close()
        return server.stdout.readline().strip()


@pytest.mark.parametrize(
    ("layers", "seen"),
    [((), "reached"), (("guard",), "alone"), (("floor",), "alone"), (("guard", "floor"), "alone")],
    ids=["neither", "guard", "floor", "both"],
)
def test_a_worker_that_listens_is_reached_by_no_client(upstream: Path, layers: tuple[str, ...], seen: str) -> None:
    """Also if the operator allowed the address: each table alone drops its answers."""
    _load(upstream, GuardPlan(_FIRST, _LAST, allowed=_LOOPBACK), *layers)
    assert seen == _serves(upstream, _FIRST)
    assert "reached" == _serves(upstream, _LAST + 1)


@pytest.mark.parametrize(
    ("layers", "dials"),
    [((), True), (("guard",), True), (("guard", "floor"), True), (("floor",), False)],
    ids=["neither", "guard", "both", "floor"],
)
def test_a_worker_dials_with_the_guards_word_only(upstream: Path, layers: tuple[str, ...], dials: bool) -> None:
    """Without the guard the floor drops its packets. Other users are not affected."""
    _load(upstream, GuardPlan(_FIRST, _LAST, allowed=_LOOPBACK), *layers)
    with _listener(upstream) as listener:
        port = listener.getsockname()[1]
        assert dials == _dials(upstream, _FIRST, "127.0.0.1", port)
        assert _dials(upstream, _LAST + 1, "127.0.0.1", port)


def test_no_mark_of_the_hosts_stands_for_the_guards_word(upstream: Path) -> None:
    """A rule of the host sets all bits before the floor's check."""
    rule = "table inet host { chain output { type filter hook output priority mangle; meta mark set 0xffffffff; }; }"
    netns.load_rules(upstream, rule)
    _load(upstream, GuardPlan(_FIRST, _LAST, allowed=_LOOPBACK), "floor")
    with _listener(upstream) as listener:
        assert not _dials(upstream, _FIRST, "127.0.0.1", listener.getsockname()[1])


def test_the_guards_word_leaves_the_hosts_mark_as_it_was(upstream: Path) -> None:
    host = """
table inet host {
    chain early { type filter hook output priority mangle; meta mark set 0x42; }
    chain late { type filter hook output priority 100; meta mark 0x42 counter; meta mark != 0x42 counter; }
}
"""
    netns.load_rules(upstream, host)
    _load(upstream, GuardPlan(_FIRST, _LAST, allowed=_LOOPBACK), "guard", "floor")
    with _listener(upstream) as listener:
        assert _dials(upstream, _FIRST, "127.0.0.1", listener.getsockname()[1])
    listed = netns.inside(
        upstream,
        lambda: subprocess.run(["nft", "list", "chain", "inet", "host", "late"], capture_output=True, text=True),
    ).stdout
    kept, changed = map(int, re.findall(r"counter packets (\d+)", listed))
    assert kept > 0
    assert 0 == changed


@pytest.mark.parametrize(
    ("layers", "arrives"), [((), True), (("guard",), False), (("floor",), False)], ids=["neither", "guard", "floor"]
)
def test_a_worker_inherits_no_flow_of_another_process(upstream: Path, layers: tuple[str, ...], arrives: bool) -> None:
    """A process of the host has asked a server at a private address. The worker takes over its port."""
    _load(upstream, GuardPlan(_FIRST, _LAST), *layers)

    def flow() -> tuple[socket.socket, socket.socket]:
        server, client = (socket.socket(type=socket.SOCK_DGRAM) for _ in range(2))
        for sock in (server, client):
            sock.settimeout(2)
            sock.bind(("127.0.0.1", 0))
        return server, client

    # The flow is tracked before the worker sends, because the question was answered.
    netns.load_rules(
        upstream, "table inet tracked { chain output { type filter hook output priority 0; ct state new; }; }"
    )
    server, client = netns.inside(upstream, flow)
    with server:
        client.sendto(b"question", server.getsockname())
        server.sendto(b"answer", server.recvfrom(100)[1])
        assert b"answer" == client.recv(100)
        mine = client.getsockname()[1]
        client.close()
        command = _as(_FIRST, _INHERITS, mine, server.getsockname()[1])
        netns.inside(upstream, lambda: subprocess.run(command, capture_output=True, check=True, timeout=60))
        try:
            arrived = b"inherited" == server.recv(100)
        except TimeoutError:
            arrived = False
    assert arrives == arrived


def test_a_floor_takes_the_place_of_one_that_is_there(upstream: Path) -> None:
    _load(upstream, GuardPlan(_FIRST, _FIRST), "floor")
    _load(upstream, GuardPlan(_FIRST, _LAST), "floor")
    listed = netns.list_rules(upstream, "ruleset")
    assert (1, 2) == (listed.count("table inet"), listed.count(f"{_FIRST}-{_LAST}"))


async def test_a_floor_that_cannot_be_noted_is_laid_and_the_guard_renewed(upstream: Path, tmp_path: Path) -> None:
    """Only `./run clean` reads the note."""
    announced: asyncio.Queue[int] = asyncio.Queue()
    (tmp_path / "floor").mkdir()
    guard = NetGuard(tmp_path / "guard.nft", upstream, announced.put)
    await guard.start(GuardPlan(_FIRST, _LAST))
    try:
        await guard.renew()
        async with asyncio.timeout(30):
            await announced.get()
        assert (2, True) == (guard.lives, guard.in_force)
        assert "sallyport_floor" in await guard.listed()
    finally:
        await guard.stop()
        await guard.remove_floor()


async def test_a_second_server_of_one_upstream_namespace_is_refused_and_changes_nothing(
    upstream: Path, tmp_path: Path
) -> None:
    """The first server's table is not taken for the second's, and the first server's floor stays."""
    (tmp_path / "second").mkdir()
    announced: asyncio.Queue[int] = asyncio.Queue()
    first, second = (
        NetGuard(place / "guard.nft", upstream, announced.put) for place in (tmp_path, tmp_path / "second")
    )
    await first.start(GuardPlan(_FIRST, _LAST))
    try:
        before = await first.listed()
        with pytest.raises(GuardError, match="another server"):
            await second.start(GuardPlan(_LAST + 1, _LAST + 9))
        assert not second.in_force
        assert (before, 1) == (await first.listed(), first.lives)
    finally:
        await first.stop()
        await first.remove_floor()
