"""The guard's rules for IPv6 on a real kernel, between two namespaces: each address answers without the guard.

It tests `runtimes/net/nft.py` and `runtimes/net/guard.py`.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from runtimes.net import netns
from runtimes.net.nft import GuardPlan, render_floor, render_guard

pytestmark = pytest.mark.system

_FIRST, _LAST = 700001000, 700005093
_NEAR, _FAR = "2606:2800:1::1", "2606:2800:1::2"
_PUBLIC = "2606:2800:2::1"
_RESOLVER = "fd00:53::53"
_EXCEPTED = "fd00:20::7"
_CLOSED = {
    "unique local": "fd00::1",
    "metadata": "fd20:ce::254",
    "site-local": "fec0::1",
    "documentation": "2001:db8::1",
    "newer documentation": "3fff::1",
    "discard": "100::1",
    "not allocated": "4000::1",
    "compatible": "::10.0.0.7",
    "translated": "::ffff:0:10.0.0.7",
    "NAT64": "64:ff9b::93.184.216.34",
    "local NAT64": "64:ff9b:1::1",
    "6to4": "2002:5db8:d822::1",
    "Teredo": "2001:0:5db8:d822:0:0:f5ff:fffe",
    "ISATAP": "2606:2800::5efe:5db8:d822",
    "ISATAP of a public address": "2606:2800::200:5efe:5db8:d822",
    "a resolver on another port": _RESOLVER,
    "own": _NEAR,
    "loopback": "::1",
    "link-local": "fe80::2%near0",
    "mapped": "::ffff:10.0.0.7",
}
_PORT = 443
_DIALS = f"""
import encodings.idna, os, socket, sys, threading
uid = int(sys.argv[1])
os.setgroups([])
os.setresuid(uid, uid, uid)

def dial(address):
    try:
        socket.create_connection((address, {_PORT}), timeout=5).close()
        print(address + "\\n", end="")
    except OSError:
        pass

threads = [threading.Thread(target=dial, args=(address,)) for address in sys.argv[2:]]
for thread in threads:
    thread.start()
"""


def _run(path: Path, *command: str) -> None:
    netns.inside(path, lambda: subprocess.run(command, check=True, capture_output=True, timeout=30))


def _enable_ipv6() -> None:
    for place in ("all", "default", "lo"):
        Path(f"/proc/sys/net/ipv6/conf/{place}/disable_ipv6").write_text("0")


def _listener() -> socket.socket:
    return socket.create_server(("::", _PORT), family=socket.AF_INET6, dualstack_ipv6=True)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A namespace with a link to another one, which has every address of this module and a listener on each."""
    directory = tmp_path_factory.mktemp("guard")
    path, far = directory / "near", directory / "far"
    netns.create_sandbox(path)
    netns.create_sandbox(far)
    try:
        for place in (path, far):
            netns.inside(place, _enable_ipv6)
        with open(far, "rb") as peer:
            link = ("ip", "link", "add", "near0", "type", "veth", "peer", "name", "far0", "netns")
            netns.inside(
                path,
                lambda: subprocess.run([*link, f"/proc/self/fd/{peer.fileno()}"], check=True, pass_fds=[peer.fileno()]),
            )
        for place, device, address, local in ((path, "near0", _NEAR, "fe80::1"), (far, "far0", _FAR, "fe80::2")):
            for added in (f"{address}/64", f"{local}/64"):
                _run(place, "ip", "-6", "addr", "add", added, "dev", device, "nodad")
            _run(place, "ip", "link", "set", "lo", "up")
            _run(place, "ip", "link", "set", device, "up")
        for address in (_PUBLIC, _EXCEPTED, *_CLOSED.values()):
            if address not in (_NEAR, "::1") and not address.startswith(("fe80", "::ffff:10")):
                _run(far, "ip", "-6", "addr", "add", f"{address}/128", "dev", "lo", "nodad")
        _run(path, "ip", "-6", "route", "add", "default", "via", _FAR)
        _run(path, "ip", "-6", "route", "add", "::/3", "via", _FAR)
        _run(path, "ip", "addr", "add", "10.0.0.1/24", "dev", "near0")
        _run(far, "ip", "addr", "add", "10.0.0.7/24", "dev", "far0")
        with netns.inside(path, _listener), netns.inside(far, _listener):
            yield path
    finally:
        for place in (path, far):
            netns.delete(place)


@pytest.fixture
def unguarded(near: Path) -> Iterator[Path]:
    yield near
    netns.load_rules(near, "flush ruleset\n")


def _load(path: Path, plan: GuardPlan, *layers: str) -> None:
    for layer in layers:
        text = render_guard(plan, "test").replace("flags owner;", "") if layer == "guard" else render_floor(plan)
        netns.load_rules(path, text)


def _dialled(path: Path, uid: int, *addresses: str) -> set[str]:
    """Return the addresses that accept a connection of `uid`."""
    command = [sys.executable, "-c", _DIALS, str(uid), *addresses]
    done = netns.inside(path, lambda: subprocess.run(command, check=True, capture_output=True, text=True, timeout=300))
    return set(done.stdout.split())


@pytest.mark.parametrize("layers", [("guard",), ("guard", "floor")], ids=["guard", "both"])
def test_a_worker_reaches_public_ipv6_addresses_and_no_others(unguarded: Path, layers: tuple[str, ...]) -> None:
    everything = {_PUBLIC, *_CLOSED.values()}
    assert everything == _dialled(unguarded, _FIRST, *everything)
    _load(unguarded, GuardPlan(_FIRST, _LAST, resolvers=((ip_address(_RESOLVER), 53),)), *layers)
    assert {_PUBLIC} == _dialled(unguarded, _FIRST, *everything)
    assert everything == _dialled(unguarded, _LAST + 1, *everything)


def test_the_floor_alone_lets_no_ipv6_packet_of_a_worker_out(unguarded: Path) -> None:
    _load(unguarded, GuardPlan(_FIRST, _LAST), "floor")
    assert set() == _dialled(unguarded, _LAST, _PUBLIC, *_CLOSED.values())
    assert {_PUBLIC} == _dialled(unguarded, _LAST + 1, _PUBLIC)


def test_a_resolver_and_an_excepted_network_are_open(unguarded: Path) -> None:
    plan = GuardPlan(_FIRST, _LAST, resolvers=((ip_address(_RESOLVER), _PORT),), allowed=(ip_network("fd00:20::/64"),))
    _load(unguarded, plan, "guard", "floor")
    opened = {_RESOLVER, _EXCEPTED}
    assert opened == _dialled(unguarded, _FIRST, *opened, "fd00:53::54", "fd00:21::7", *set(_CLOSED.values()) - opened)


def test_a_workers_ipv6_connections_are_counted(unguarded: Path) -> None:
    _load(unguarded, GuardPlan(_FIRST, _LAST, connections=2), "guard", "floor")
    held = f"""
import encodings.idna, os, socket
os.setgroups([])
os.setresuid({_FIRST}, {_FIRST}, {_FIRST})
held = []
for number in range(6):
    try:
        held.append(socket.create_connection(("{_PUBLIC}", {_PORT}), timeout=10))
        print(number)
    except OSError:
        pass
"""
    command = [sys.executable, "-c", held]
    done = netns.inside(
        unguarded, lambda: subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    )
    assert ["0", "1"] == done.stdout.split()
