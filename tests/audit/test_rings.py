"""Records through a ring and a real auditd: order, identity, and no loss by the death of any process."""

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from audit.client import AuditClient, AuditUnavailable
from audit.drain import DAMAGED, INVALID
from audit.shared_ring import HEAD_BYTES, ROOM, map_ring
from runtimes.rings import RingFiles, Rings
from tests import ring_state
from tests.audit.conftest import A, Auditd, B, NewAuditd
from tests.stopping import stop
from wire import Client, RemoteError
from wire.api.auditd import AttachRing, CloseRing, CloseSandbox

pytestmark = pytest.mark.slow


class Producer:
    """One worker with a ring, and the auditds that take its records."""

    def __init__(self, directory: Path, sandbox: str, generation: int) -> None:
        self.key = sandbox, generation
        self.ring: RingFiles = Rings(directory).create(self.key)
        self.clients: list[AuditClient] = []

    async def attach(self, auditd: Auditd) -> None:
        assert auditd.control is not None
        await auditd.control.ask(AttachRing(*self.key), fds=self.ring.for_auditd)

    def worker(self, channel: int | None = None, **options: Any) -> AuditClient:
        """A worker; without a channel only the ring reaches auditd."""
        ring = map_ring(os.dup(self.ring.records), os.dup(self.ring.position), self.ring.wake)
        if channel is None:
            ours, theirs = socket.socketpair()
            theirs.close()
            channel = ours.detach()
        self.clients.append(AuditClient.from_fd(channel, ring=ring, **options))
        return self.clients[-1]

    async def drained(self) -> None:
        await asyncio.to_thread(ring_state.drained, self.ring)


type NewProducer = Callable[..., Producer]


@pytest.fixture
async def producers(tmp_path: Path) -> AsyncIterator[NewProducer]:
    made: list[Producer] = []

    def make(sandbox: str, generation: int = 1) -> Producer:
        made.append(Producer(tmp_path / "rings", sandbox, generation))
        return made[-1]

    yield make
    for producer in made:
        for client in producer.clients:
            await client.close(0)
        producer.ring.close()


@pytest.fixture
async def one(auditd: Auditd, producers: NewProducer) -> Producer:
    producer = producers(A, 3)
    await producer.attach(auditd)
    return producer


async def test_records_notes_and_counts_arrive_in_their_order_with_the_identity_of_the_ring(
    auditd: Auditd, one: Producer
) -> None:
    worker = one.worker()
    await worker.accept("request", "allow", host="a.example", path="/v1?x=1", method="GET")
    worker.note("request", status=200)
    worker.count("dns", "deny", rule="dns-rate")
    await worker.accept("dns", "allow", host="\u202eä.example")
    await one.drained()
    found = auditd.said(producer="gateway")
    assert ["request", "request", "dns", "dns"] == [record["kind"] for record in found]
    assert [(A, A, 3)] * 4 == [(item["chain"], item["sandbox"], item["generation"]) for item in found]
    assert ("/v1", "\\u{202e}\u00e4.example") == (found[0]["path"], found[3]["host"])
    assert [1, 2, 3, 4] == [record["seq"] for record in found]
    assert [] == auditd.verify().findings


async def test_accept_returns_while_auditd_is_stopped_and_waits_only_when_the_ring_is_full(
    auditd: Auditd, one: Producer
) -> None:
    """The control: a ring without room refuses, and takes records again when auditd runs."""
    worker = one.worker(timeout=0.2)
    assert auditd.process is not None
    stop(auditd.process.pid)
    accepted = 0
    try:
        with pytest.raises(AuditUnavailable, match="full"):
            while True:
                await worker.accept("dns", "allow", host=f"{accepted}.example", reason="x" * 400)
                accepted += 1
    finally:
        auditd.process.send_signal(signal.SIGCONT)
    assert 400 < accepted < ROOM // 400
    await one.worker().accept("dns", "allow", host="after.example")
    await one.drained()
    hosts = [record["host"] for record in auditd.said(kind="dns")]
    assert [*(f"{number}.example" for number in range(accepted)), "after.example"] == hosts


async def test_records_in_a_ring_survive_the_death_of_worker_and_auditd(auditd: Auditd, one: Producer) -> None:
    assert auditd.process is not None
    stop(auditd.process.pid)
    for number in range(10):
        await one.worker().accept("dns", "allow", host=f"{number}.example")
    await auditd.restart(signal.SIGKILL)
    await one.attach(auditd)
    await one.drained()
    found = [(record["host"], record["generation"]) for record in auditd.said(kind="dns")]
    assert [(f"{number}.example", 3) for number in range(10)] == found
    assert all("accepted" not in record or record["accepted"] < record["ts"] for record in auditd.said(kind="dns"))


@pytest.mark.parametrize("host", ["late.example", "späte.example"])
async def test_a_record_that_waited_has_the_time_at_which_it_was_accepted(
    auditd: Auditd, one: Producer, host: str
) -> None:
    """Both ways of reading a record. A record that was written at once has no such field."""
    assert auditd.process is not None
    worker = one.worker()
    stop(auditd.process.pid)
    before = time.time()
    await worker.accept("dns", "allow", host=host)
    after = time.time()
    await asyncio.sleep(0.2)  # the time that is measured
    auditd.process.send_signal(signal.SIGCONT)
    await one.drained()
    (record,) = auditd.said(host=host)
    accepted = datetime.fromisoformat(record["accepted"]).timestamp()
    assert before - 0.001 <= accepted <= after
    assert datetime.fromisoformat(record["ts"]).timestamp() - accepted > 0.19
    assert [] == auditd.verify().findings


async def test_a_worker_that_outlives_its_hostd_harms_no_record_of_the_next_worker(
    auditd: Auditd, one: Producer, producers: NewProducer
) -> None:
    former, following = one.worker(), producers(A, 4)
    await former.accept("dns", "allow", host="first.example")
    await following.attach(auditd)
    worker = following.worker()
    for number in range(500):
        await former.accept("dns", "allow", host=f"{number}.former.example")
        await worker.accept("dns", "allow", host=f"{number}.next.example")
    await one.drained()
    await following.drained()
    for name, generation in (("former", 3), ("next", 4)):
        hosts = [record["host"] for record in auditd.said(kind="dns", generation=generation)]
        assert [f"{number}.{name}.example" for number in range(500)] == [host for host in hosts if name in host]
    assert [] == auditd.said(kind="gap")
    assert [] == auditd.verify().findings


async def test_the_ring_of_an_ended_worker_is_written_and_forgotten(auditd: Auditd, one: Producer) -> None:
    assert auditd.control is not None
    worker = one.worker(timeout=0.2)
    for number in range(300):
        await worker.accept("dns", "allow", host=f"{number}.example")
    await auditd.control.ask(CloseRing(*one.key))
    assert 300 == len(auditd.said(kind="dns"))
    with pytest.raises(AuditUnavailable):
        await worker.accept("dns", "allow", host="late.example")
    await auditd.control.ask(CloseRing(*one.key))  # a second time is no error


async def test_a_ring_that_is_attached_twice_gives_each_record_once(auditd: Auditd, one: Producer) -> None:
    worker = one.worker()
    for number in range(100):
        await worker.accept("dns", "allow", host=f"{number}.example")
        if number % 10 == 0:
            await one.attach(auditd)
    await one.drained()
    assert [f"{number}.example" for number in range(100)] == [record["host"] for record in auditd.said(kind="dns")]


@pytest.mark.parametrize("kills", [6, pytest.param(50, marks=pytest.mark.extended)])
async def test_each_record_is_in_the_log_exactly_once_whenever_auditd_is_killed(
    tmp_path: Path, new_auditd: NewAuditd, producers: NewProducer, kills: int
) -> None:
    auditd = await new_auditd(tmp_path, max_file_bytes=1 << 20).start()
    both = [producers(name) for name in (A, B)]
    accepted: list[str] = []
    stopping = False
    chance = random.Random(kills)

    async def produce(client: AuditClient, name: str) -> None:
        number = 0
        while not stopping:
            number += 1
            host = f"{number}.{name}.example"
            await client.accept("dns", "allow", host=host, reason="x" * (number % 300))
            accepted.append(host)
            if number % 20 == 0:
                await asyncio.sleep(0.001)

    for producer in both:
        await producer.attach(auditd)
    work = [asyncio.create_task(produce(one.worker(timeout=30), one.key[0][-1])) for one in both]
    for _ in range(kills):
        await asyncio.sleep(chance.uniform(0.01, 0.06))  # kills at a random moment
        await auditd.restart(signal.SIGKILL)
        for producer in both:
            await producer.attach(auditd)
    stopping = True
    await asyncio.gather(*work)
    for producer in both:
        await producer.drained()
    assert sorted(accepted) == sorted(record["host"] for record in auditd.said(kind="dns"))
    for name in (A, B):
        mine = [host for host in accepted if host.endswith(f".{name[-1]}.example")]
        assert mine == [record["host"] for record in auditd.said(kind="dns", chain=name)]
    assert len(accepted) > 100
    assert [] == auditd.verify().findings


async def test_a_closed_sandbox_has_all_records_of_its_ring(auditd: Auditd, one: Producer) -> None:
    assert auditd.control is not None
    worker = one.worker(timeout=0.2)
    for number in range(300):
        await worker.accept("dns", "allow", host=f"{number}.example")
    await auditd.control.ask(CloseSandbox(A))
    assert 300 == len(auditd.said(kind="dns", chain=A))
    assert [True] == [record["closed"] for record in auditd.said(kind="checkpoint", chain=A)]
    with pytest.raises(AuditUnavailable):
        await worker.accept("dns", "allow", host="late.example")
    await auditd.stop()
    assert ([], ["control"]) == (auditd.verify().findings, sorted(auditd.verify().heads))


async def test_an_orderly_stop_writes_what_is_in_the_rings(auditd: Auditd, one: Producer) -> None:
    worker = one.worker()
    for number in range(300):
        await worker.accept("dns", "allow", host=f"{number}.example")
    await auditd.stop()
    assert 300 == len(auditd.said(kind="dns"))
    assert not ring_state.is_open(one.ring)


async def test_records_that_the_gateway_may_not_write_are_a_gap_and_the_others_follow(
    auditd: Auditd, one: Producer
) -> None:
    ring = map_ring(os.dup(one.ring.records), os.dup(one.ring.position), one.ring.wake)
    wrong = [
        b'{"kind":"secret.release","decision":"allow"}',
        b'{"kind":"dns","decision":"allow","producer":"vault"}',
        b'{"kind":"dns","decision":"allow","sandbox":"%s"}' % B.encode(),
        b'{"kind":"dns","decision":"allow","chain":"control"}',
        b'{"kind":"dns","decision":"allow","seq":1}',
        b'{"kind":"dns","decision":"perhaps"}',
        b'{"kind":"dns","decision":"allow","nonsense":1}',
        b'{"kind":"dns"}',
        b"[]",
        b"\xff" * 100,
        b"",
        b"[" * 60000,
    ]
    for content in wrong:
        assert ring.put(content)
    assert ring.put(b'{"kind":"dns","decision":"allow","host":"after.example"}')
    await one.drained()
    assert ["after.example"] == [record["host"] for record in auditd.said(kind="dns")]
    gaps = auditd.said(kind="gap", chain=A)
    assert [("auditd", INVALID, 1)] * len(wrong) == [(gap["producer"], gap["reason"], gap["count"]) for gap in gaps]
    assert [] == auditd.said(chain="control", kind="dns")
    assert [] == auditd.verify().findings


@pytest.mark.parametrize("damage", [(0, b"\xff" * 8), (0, (ROOM + 1).to_bytes(8, "little")), (HEAD_BYTES, b"\xff" * 8)])
async def test_a_damaged_ring_is_a_gap_and_harms_no_other_sandbox(
    auditd: Auditd, one: Producer, producers: NewProducer, damage: tuple[int, bytes]
) -> None:
    other = producers(B)
    await other.attach(auditd)
    assert auditd.process is not None
    stop(auditd.process.pid)
    await one.worker().accept("dns", "allow", host="lost.example")
    os.pwrite(one.ring.records, damage[1], damage[0])
    auditd.process.send_signal(signal.SIGCONT)
    await other.worker().accept("dns", "allow", host="b.example")
    await other.drained()
    await one.drained()
    assert ["b.example"] == [record["host"] for record in auditd.said(kind="dns")]
    assert [(A, DAMAGED)] == [(gap["chain"], gap["reason"]) for gap in auditd.said(kind="gap")]


async def test_a_worker_that_takes_back_its_wake_up_hides_nothing(auditd: Auditd, one: Producer) -> None:
    assert auditd.process is not None
    stop(auditd.process.pid)
    await one.worker().accept("dns", "allow", host="a.example")
    os.eventfd_read(one.ring.wake)
    auditd.process.send_signal(signal.SIGCONT)
    await one.drained()
    assert ["a.example"] == [record["host"] for record in auditd.said(kind="dns")]


async def test_with_sync_always_no_ring_is_open_and_records_are_requests(
    tmp_path: Path, new_auditd: NewAuditd, producers: NewProducer
) -> None:
    auditd = await new_auditd(tmp_path, sync="always").start()
    producer = producers(A)
    await producer.attach(auditd)
    worker = producer.worker(await auditd.attach_fd(A))
    assert 1 == await worker.accept("dns", "allow", host="a.example")
    assert not ring_state.is_open(producer.ring)


async def test_a_ring_is_attached_by_hostd_alone_with_its_three_files(
    tmp_path: Path, new_auditd: NewAuditd, producers: NewProducer
) -> None:
    auditd = await new_auditd(tmp_path).start()
    producer = producers(A)
    assert auditd.control is not None
    wrong = [producer.ring.for_auditd[:2], (*producer.ring.for_auditd, producer.ring.wake), (producer.ring.wake,) * 3]
    for fds in wrong:
        with pytest.raises(RemoteError, match="invalid"):
            await auditd.control.ask(AttachRing(A, 1), fds=fds)
    await producer.attach(auditd)
    assert ring_state.is_open(producer.ring)
    await auditd.stop()
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    other = await new_auditd(elsewhere, host_uid=os.getuid() + 1).start()
    control: Client | None = other.control
    assert control is not None
    with pytest.raises(RemoteError, match="forbidden"):
        await control.ask(AttachRing(A, 1))


@pytest.mark.system
async def test_on_a_full_disk_the_rings_are_closed_and_later_every_record_is_there(
    small_disk: Path, new_auditd: NewAuditd, producers: NewProducer
) -> None:
    # What it frees has room for all records of a full ring, which are longer in the log.
    (small_disk / "ballast").write_bytes(b"x" * 600_000)
    auditd = await new_auditd(small_disk).start()
    producer = producers(A)
    await producer.attach(auditd)
    worker = producer.worker(await auditd.attach_fd(A))
    accepted: list[str] = []
    refused = 0
    for number in range(4000):
        try:
            await worker.accept("dns", "allow", host=f"{number}.example", reason="x" * 500)
            accepted.append(f"{number}.example")
        except AuditUnavailable:
            refused += 1
            if refused == 200:
                break
    assert 200 == refused
    assert not ring_state.is_open(producer.ring)
    (small_disk / "ballast").unlink()
    await producer.drained()
    assert ring_state.is_open(producer.ring)
    assert sorted(accepted) == sorted(record["host"] for record in auditd.said(kind="dns"))
    assert [refused] == [gap["count"] for gap in auditd.said(kind="gap")]
    await auditd.stop()
    assert [] == auditd.verify().findings
