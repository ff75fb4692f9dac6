"""hostd ends the chains of removed sandboxes, and keeps anchors of the log, with a real auditd."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from audit import cli
from audit.client import AuditUnavailable
from audit.shared_ring import map_ring
from runtimes import chains
from runtimes.alarms import Breach
from runtimes.chains import Chains
from runtimes.process import bounded_log
from runtimes.process.bounded_log import BoundedLog
from runtimes.rings import OUTLIVES_SECONDS, Rings
from tests import ring_state
from tests.audit.conftest import A, Auditd, B
from wire import Client, codec
from wire.api.auditd import Anchor, AttachRing


class Host:
    """The parts of hostd that `Chains` uses."""

    def __init__(self, directory: Path) -> None:
        self.auditd = Auditd(directory)
        self.sandboxes: set[str] = set()
        self.alarms: list[str] = []
        self.anchors = directory / "anchors.jsonl"
        self.rings = Rings(directory / "rings")
        self.chains = self.again()

    def again(self) -> Chains:
        """A hostd that was killed and started again."""
        self.chains = Chains(self, self.rings, self.anchors, lambda: self.sandboxes, self._tell)  # type: ignore[arg-type]
        return self.chains

    def client(self, name: str) -> Client:
        if self.auditd.control is None:
            raise ConnectionError(f"{name} is down")
        return self.auditd.control

    def _tell(self, finding: Breach) -> None:
        self.alarms.append(finding.rule)

    def open_chains(self) -> set[str]:
        found = self.auditd.verify()
        return found.heads.keys() - {"control"}

    def kept(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in BoundedLog(self.anchors, 0).read()]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - it is another process's state
            await asyncio.sleep(0.01)


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    monkeypatch.setattr(chains, "_RETRY_SECONDS", 0.01)
    host = Host(tmp_path)
    await host.auditd.start()
    yield host
    await host.chains.stop()
    await host.auditd.stop(signal.SIGKILL)


async def test_the_chain_of_a_sandbox_ends_when_it_is_gone_and_no_other(host: Host) -> None:
    host.sandboxes = {A, B}
    host.chains.start()
    for name in (A, B):
        await (await host.auditd.attach(name)).accept("dns", "allow", host="a.example")
    host.sandboxes.discard(A)
    host.chains.wake()
    await until(lambda: host.open_chains() == {B})
    with pytest.raises(AuditUnavailable):
        await host.auditd.clients[0].accept("dns", "allow", host="late.example")
    await host.auditd.clients[1].accept("dns", "allow", host="b.example")


async def test_a_sandbox_that_goes_while_auditd_is_down_has_its_chain_ended_when_it_is_back(host: Host) -> None:
    host.sandboxes = {A}
    host.chains.start()
    await (await host.auditd.attach(A)).accept("dns", "allow", host="a.example")
    await host.auditd.stop(signal.SIGKILL)
    host.sandboxes.clear()
    host.chains.wake()
    assert {A} == host.open_chains()
    await host.auditd.start()
    await until(lambda: host.open_chains() == set())


async def test_a_hostd_that_was_killed_ends_the_chains_of_what_it_does_not_find_again(host: Host) -> None:
    for name in (A, B):
        await (await host.auditd.attach(name)).accept("dns", "allow", host="a.example")
    host.sandboxes = {B}
    host.again().start()
    await until(lambda: host.open_chains() == {B})


async def test_what_was_anchored_is_what_the_log_says_and_only_root_reads_it(host: Host) -> None:
    host.sandboxes = {A, B}
    await (await host.auditd.attach(A)).accept("dns", "allow", host="a.example")
    host.chains.start()
    await until(host.kept)
    await (await host.auditd.attach(B)).accept("dns", "allow", host="b.example")
    host.chains.wake()
    await until(lambda: len(host.kept()) == 2)
    assert [{"control", A}, {B}] == [set(anchor["heads"]) for anchor in host.kept()]
    assert 0o600 == host.anchors.stat().st_mode & 0o777
    assert 0 == cli.verify(host.auditd.log, kept=[host.anchors], out=StringIO())


async def test_the_last_round_anchors_what_was_written_before_the_stop(host: Host) -> None:
    host.sandboxes = {A}
    host.chains.start()
    await until(host.kept)
    await (await host.auditd.attach(A)).accept("dns", "allow", host="a.example")
    await host.chains.stop()
    assert 1 == host.kept()[-1]["heads"][A][0]


async def test_another_log_and_a_shorter_one_are_alarms(host: Host, tmp_path: Path) -> None:
    host.chains.start()
    await until(host.kept)
    await host.chains.stop()
    first = host.kept()[0]
    host.anchors.write_text(json.dumps(first | {"offset": first["offset"] + 100_000}) + "\n")
    host.again().start()
    await until(lambda: host.alarms == ["audit.shortened"])
    await host.chains.stop()
    host.anchors.write_text(json.dumps(first | {"identity": "0" * 64}) + "\n")
    host.again().start()
    await until(lambda: host.alarms == ["audit.shortened", "audit.replaced"])


@pytest.mark.parametrize(
    "change",
    [
        {"more": 1},
        {"heads": {"../x": {"seq": 1, "hash": "0" * 64}}},
        {"heads": {"sbx-a": {"seq": 0.5, "hash": "0" * 64}}},
        {"heads": {"sbx-a": {"seq": -1, "hash": "0" * 64}}},
        {"heads": {"sbx-a": {"seq": 1, "hash": "x"}}},
        {"identity": "F" * 64},
        {"heads": []},
        {"file": True},
        {"offset": -1},
        {"log": "x" * 65},
        {"ts": 5},
        {"version": 2},
    ],
)
def test_what_a_compromised_auditd_answers_is_an_anchor_or_nothing(change: dict[str, Any]) -> None:
    places = {"file": 1, "offset": 2, "heads": {"sbx-a": {"seq": 1, "hash": "0" * 64}}}
    good = {"version": 1, "ts": "t", **dict.fromkeys(("identity", "key", "log"), "f" * 64), **places}
    assert 1 == codec.decode(Anchor, good).heads["sbx-a"].seq
    with pytest.raises(codec.CodecError):
        codec.decode(Anchor, good | change)


def test_kept_lines_stay_within_their_bound_and_begin_whole(tmp_path: Path) -> None:
    lines = BoundedLog(tmp_path / bounded_log.ANCHORS_NAME, 1000)
    for number in range(100):
        lines.append(b"changed %d\n" % number, b"whole %d\n" % number)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert 2 == len(sizes)
    assert max(sizes) <= 1000
    assert b"changed 99\n" == lines.read()[-1]
    assert 2 == sum(line.startswith(b"whole") for line in lines.read())


def test_a_line_that_a_crash_cut_off_is_not_one(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"one\ntw")
    lines = BoundedLog(path, 1000)
    assert [b"one\n"] == lines.read()
    lines.append(b"three\n", b"first\n")
    assert b"three\n" == lines.read()[-1]


async def test_the_ring_of_an_ended_worker_is_written_before_its_chain_ends_and_then_removed(host: Host) -> None:
    host.sandboxes = {A}
    ring = host.rings.create((A, 1))
    writer = map_ring(os.dup(ring.records), os.dup(ring.position), ring.wake)
    await host.client("auditd").ask(AttachRing(A, 1), fds=ring.for_auditd)
    assert writer.put(b'{"kind":"dns","decision":"allow","host":"a.example"}')
    await host.auditd.stop(signal.SIGKILL)
    await host.auditd.start()  # it has no ring yet
    host.rings.ended((A, 1))
    host.sandboxes = set()
    host.chains.start()
    await until(lambda: not host.rings.left())
    await until(lambda: host.auditd.said(kind="checkpoint", closed=True))
    assert [1] == [record["seq"] for record in host.auditd.said(host="a.example")]
    ring.close()


async def test_the_ring_of_a_worker_that_may_live_is_attached_and_stays(tmp_path: Path, host: Host) -> None:
    """The worker of a killed hostd can write for a moment. Its ring is removed when that moment is over."""
    now = 0.0
    host.rings = Rings(tmp_path / "rings")
    ring = host.rings.create((A, 1))
    host.rings = Rings(tmp_path / "rings", lambda: now)  # that of the next hostd
    host.again()
    host.chains.start()
    await until(lambda: ring_state.is_open(ring))
    writer = map_ring(os.dup(ring.records), os.dup(ring.position), ring.wake)
    assert writer.put(b'{"kind":"dns","decision":"allow","host":"late.example"}')
    await until(lambda: host.auditd.said(host="late.example"))
    assert [(A, 1)] == host.rings.left()
    now = OUTLIVES_SECONDS
    host.chains.wake()
    await until(lambda: not host.rings.left())
    assert not writer.put(b"{}")
    ring.close()
