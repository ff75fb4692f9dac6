"""Slots and cgroups on a real kernel."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtimes.net import netns, netstate, slots
from runtimes.net.plan import PLAN, slot_plan
from runtimes.net.slots import Slot
from runtimes.process.cgroups import Cgroups, GroupLimits, Processor, remove_container_groups
from runtimes.process.cpu_weight import Computing, CpuWeight, process_seconds
from testbed.traces import alive, cookie_of
from testbed.with_parent import with_parent
from tests.stopping import stop
from wire.gateway_limits import GatewayLimits

pytestmark = pytest.mark.system


@pytest.fixture
def slot(tmp_path: Path) -> Iterator[Slot]:
    made = slots.make(tmp_path, 7, PLAN)
    yield made
    slots.destroy(made)


def _listener(slot: Slot, port: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
    def make() -> socket.socket:
        sock = socket.socket(socket.AF_INET, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("0.0.0.0", port))
        sock.settimeout(60)
        if kind == socket.SOCK_STREAM:
            sock.listen(16)
        return sock

    return netns.inside(slot.gateway, make)


def _dial(slot: Slot, address: str, port: int) -> str:
    def dial() -> str:
        with socket.socket() as sock:
            sock.settimeout(2)
            try:
                sock.connect((address, port))
            except OSError as error:
                return type(error).__name__
            return "connected"

    return netns.inside(slot.sandbox, dial)


def _send(slot: Slot, address: str, port: int, source: str | None = None) -> None:
    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            if source is not None:
                sock.setsockopt(socket.SOL_IP, 19, 1)  # IP_TRANSPARENT: any source address.
                sock.bind((source, 0))
            sock.sendto(b"hello", (address, port))

    netns.inside(slot.sandbox, send)


def test_a_slot_has_one_link_and_no_way_out(slot: Slot) -> None:
    assert ("eth0", "lo") == netns.links(slot.sandbox)
    assert ("gw0", "lo") == netns.links(slot.gateway)
    listing = netns.inside(
        slot.gateway,
        lambda: subprocess.run(["ip", "-json", "route"], capture_output=True, text=True, check=True).stdout,
    )
    (route,) = json.loads(listing)
    route.pop("flags")  # The kernel can set the carrier of a new link later.
    wanted = {"dst": "192.0.2.0/30", "dev": "gw0", "protocol": "kernel", "scope": "link", "prefsrc": "192.0.2.1"}
    assert wanted == route
    for path in (slot.sandbox, slot.gateway):
        assert "0" == netns.inside(path, lambda: Path("/proc/sys/net/ipv4/ip_forward").read_text().strip())
        assert "1" == netns.inside(path, lambda: Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").read_text().strip())


@pytest.mark.parametrize(
    ("address", "port"), [("8.8.8.8", 443), ("10.1.2.3", 22), ("192.0.2.1", 80), ("1.1.1.1", 65535)]
)
def test_tcp_to_any_address_arrives_at_the_proxy(slot: Slot, address: str, port: int) -> None:
    with _listener(slot, PLAN.proxy_port) as listener:
        assert "connected" == _dial(slot, address, port)
        accepted, peer = listener.accept()
        with accepted:
            original = accepted.getsockopt(socket.SOL_IP, 80, 16)
    assert str(PLAN.inside) == peer[0]
    assert (address, port) == (socket.inet_ntoa(original[4:8]), int.from_bytes(original[2:4]))


def test_the_proxy_port_itself_cannot_be_dialled(slot: Slot) -> None:
    with _listener(slot, PLAN.proxy_port):
        assert "ConnectionRefusedError" == _dial(slot, str(PLAN.gateway), PLAN.proxy_port)
        assert "connected" == _dial(slot, str(PLAN.gateway), 443)


def test_dns_arrives_whatever_resolver_was_meant(slot: Slot) -> None:
    with _listener(slot, PLAN.dns_port, socket.SOCK_DGRAM) as resolver:
        for address in (str(PLAN.gateway), "8.8.8.8"):
            _send(slot, address, 53)
            assert (b"hello", str(PLAN.inside)) == (lambda got: (got[0], got[1][0]))(resolver.recvfrom(64))


def test_other_udp_spoofed_sources_and_broadcasts_arrive_nowhere(slot: Slot) -> None:
    with _listener(slot, 5353, socket.SOCK_DGRAM) as other, _listener(slot, 53, socket.SOCK_DGRAM) as resolver:
        _send(slot, str(PLAN.gateway), 5353)
        _send(slot, "192.0.2.3", 5353)
        _send(slot, str(PLAN.gateway), 53, source="192.0.2.77")
        _send(slot, str(PLAN.gateway), 53)  # The control follows the others in the same queue.
        assert str(PLAN.inside) == resolver.recvfrom(64)[1][0]
        for sock in (other, resolver):
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recvfrom(64)


def test_datagrams_beyond_the_rate_are_dropped_and_counted(slot: Slot) -> None:
    count, began = 8 * PLAN.datagram_rate, time.monotonic()

    def flood() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for number in range(count):
                sock.sendto(b"hello", (str(PLAN.gateway), 53 if number % 2 else 5353))

    netns.inside(slot.sandbox, flood)
    passed = count - _counted(slot, "over_datagrams")
    assert 2 * PLAN.datagram_rate <= passed <= (3 + time.monotonic() - began) * PLAN.datagram_rate
    assert 0 == _counted(slot, "over_connections")


def test_connections_beyond_the_rate_are_dropped_and_counted(slot: Slot) -> None:
    count, began = 8 * PLAN.syn_rate, time.monotonic()
    netns.inside(slot.sandbox, lambda: _flood(count))
    passed = count - _counted(slot, "over_connections")
    assert 2 * PLAN.syn_rate <= passed <= (3 + time.monotonic() - began) * PLAN.syn_rate
    assert 0 == _counted(slot, "over_datagrams")


def test_an_operator_can_permit_more_connections(tmp_path: Path) -> None:
    """What the default rate drops passes under a higher one."""
    wide = slot_plan(GatewayLimits(connection_rate=8 * PLAN.syn_rate))
    made = slots.make(tmp_path, 7, wide)
    try:
        netns.inside(made.sandbox, lambda: _flood(8 * PLAN.syn_rate))
        assert 0 == _counted(made, "over_connections")
    finally:
        assert () == slots.destroy(made)


def _flood(count: int) -> None:
    for _ in range(count):
        with socket.socket() as sock:
            sock.setblocking(False)
            sock.connect_ex(("8.8.8.8", 443))


def _counted(slot: Slot, name: str) -> int:
    return netstate.gateway(slot.gateway, slot.gateway_inode, ()).counters[name]


def test_with_every_rule_flushed_there_is_still_nowhere_to_go(slot: Slot) -> None:
    with _listener(slot, PLAN.proxy_port) as listener:
        netns.load_rules(slot.gateway, "flush ruleset\n")
        assert _dial(slot, "8.8.8.8", 443) in ("TimeoutError", "OSError")
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_the_gateway_answers_no_echo_and_its_neighbour_is_static(slot: Slot) -> None:
    def command(*words: str) -> str:
        return netns.inside(
            slot.sandbox, lambda: subprocess.run(words, capture_output=True, text=True, check=False).stdout
        )

    assert f"{PLAN.gateway} lladdr {PLAN.gateway_mac} PERMANENT" in command("ip", "neigh", "show", "dev", "eth0")
    assert "default via 192.0.2.1" in command("ip", "route")


def test_what_exists_already_is_never_adopted(tmp_path: Path, slot: Slot) -> None:
    with pytest.raises(FileExistsError):
        slots.make(tmp_path, 7, PLAN)
    assert ("eth0", "lo") == netns.links(slot.sandbox)


@pytest.mark.parametrize("line", range(0, 30, 4))
def test_a_ruleset_that_fails_leaves_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: int) -> None:
    lines = slots.nft.render_gateway(PLAN).splitlines()
    broken = "\n".join([*lines[:line], "nonsense", *lines[line:]])
    monkeypatch.setattr(slots.nft, "render_gateway", lambda _plan: broken)
    with pytest.raises(netns.NftError):
        slots.make(tmp_path, 7, PLAN)
    assert [] == list(tmp_path.iterdir())
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_destroying_ends_the_processes_inside_and_leaves_nothing(tmp_path: Path) -> None:
    slot = slots.make(tmp_path, 0, PLAN)
    inmate = netns.inside(slot.sandbox, lambda: subprocess.Popen(["sleep", "1000"]))
    assert (inmate.pid,) == netns.processes(slot.inodes)
    made = [(netns.inode(path), cookie_of(str(path))) for path in (slot.sandbox, slot.gateway)]
    assert () == slots.destroy(slot)
    assert -9 == inmate.wait(timeout=60)
    assert [] == [inode for inode, cookie in made if alive(inode, cookie)]
    assert [] == list(tmp_path.iterdir())


def test_a_predecessors_slots_are_swept_and_foreign_files_are_not(tmp_path: Path) -> None:
    slots.make(tmp_path, 1, PLAN)
    (tmp_path / "foreign").write_text("")
    assert (f"foreign file {tmp_path}/foreign",) == slots.sweep(tmp_path)
    assert ["foreign"] == [path.name for path in tmp_path.iterdir()]


def test_a_group_limits_kills_and_goes(tmp_path: Path) -> None:
    cgroups = Cgroups(str(tmp_path))
    directories = cgroups.create("worker", GroupLimits(pids=7))
    try:
        limits = [(path / "pids.max").read_text() for path in directories if (path / "pids.max").exists()]
        assert ["7\n"] == limits
        above = [directory.parents[1] for directory in directories]
        files = [path / name for path in above for name in ("cpu.shares", "cpu.weight") if (path / name).exists()]
        assert (
            [{"cpu.shares": 1024, "cpu.weight": 100}[file.name] for file in files]
            == [int(file.read_text()) for file in files]
            != []
        )
        inmate = subprocess.Popen(["sleep", "1000"])
        for directory in directories:
            (directory / "cgroup.procs").write_text(str(inmate.pid))
    finally:
        assert () == cgroups.remove("worker")
    assert -9 == inmate.wait(timeout=60)
    assert () == cgroups.sweep()


def test_a_process_that_computes_without_a_pause_weighs_less_until_it_pauses(tmp_path: Path) -> None:
    cgroups, container = Cgroups(str(tmp_path)), f"{os.getpid():064x}"
    worker = cgroups.create("sandbox.1", GroupLimits())
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    groups = [Path(line.split(" ")[4], "docker", container) for line in lines if " - cgroup" in line]
    with subprocess.Popen(with_parent("python3", "-c", "while True: pass")) as busy:
        try:
            for group in groups:
                group.mkdir(parents=True)
            files = [path / name for path in (*groups, *worker) for name in ("cpu.shares", "cpu.weight")]
            weights = [file for file in files if file.exists()]
            usual = [int(file.read_text()) for file in weights]
            assert len(weights) == 2
            one, cpu_weight = (Computing(container, busy.pid, "sandbox.1"),), CpuWeight(Processor(cgroups), tuple)
            until = process_seconds(busy.pid) + 1.0
            cpu_weight.look(one, 0.0)
            while process_seconds(busy.pid) < until:
                time.sleep(0.01)
            cpu_weight.look(one, 1.0)
            assert [weight // 16 for weight in usual] == [int(file.read_text()) for file in weights]
            stop(busy.pid)
            for now in (3.0, 5.0):
                cpu_weight.look(one, now)
            assert usual == [int(file.read_text()) for file in weights]
        finally:
            busy.kill()
            assert () == cgroups.remove("sandbox.1")
            assert () == remove_container_groups(container)
    assert () == cgroups.sweep()
