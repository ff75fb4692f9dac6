"""A producer receives whether its record is in the log, and the log has the number of notes that were lost."""

import asyncio
import signal
import socket

import pytest

from audit.client import AuditClient, AuditUnavailable
from audit.records import RecordError
from tests.audit.conftest import A, Auditd
from tests.stopping import stop
from wire import Client, Code, Message, RequestError


async def _pair(handler: object) -> tuple[AuditClient, Client]:
    """Return a client whose peer is `handler`, in place of an auditd with a fault."""
    ours, theirs = socket.socketpair()
    peer = Client(theirs, handler)  # type: ignore[arg-type]
    peer.start()
    return AuditClient.from_fd(ours.detach(), timeout=0.2, queue=10), peer


async def test_accept_returns_once_the_record_is_in_the_file(auditd: Auditd) -> None:
    client = await auditd.attach(A)
    seq = await client.accept("request", "allow", host="a.example", port=443, path="/x?token=hunter2", rule="r/1")
    (found,) = auditd.said(kind="request")
    assert (found["seq"], found["path"], found["sandbox"], found["producer"]) == (seq, "/x", A, "gateway")


@pytest.mark.parametrize("durable", [False, True])
async def test_accept_raises_when_auditd_is_dead(auditd: Auditd, durable: bool) -> None:
    client = await auditd.attach(A)
    await client.accept("dns", "allow", durable=durable, host="control.example")
    assert auditd.process is not None
    auditd.process.kill()
    await client.wait_closed()
    with pytest.raises(AuditUnavailable):
        await client.accept("dns", "allow", durable=durable, host="a.example")
    assert not client.available


async def test_accept_raises_when_auditd_is_frozen(auditd: Auditd) -> None:
    client = await auditd.attach(A, timeout=1)
    await client.accept("dns", "allow", host="control.example")
    assert auditd.process is not None
    stop(auditd.process.pid)
    try:
        with pytest.raises(AuditUnavailable):
            await client.accept("dns", "allow", host="a.example")
    finally:
        auditd.process.send_signal(signal.SIGCONT)


async def test_accept_raises_when_the_record_is_refused() -> None:
    async def refuse(_client: Client, _op: str, _parameters: Message, _fds: list[int]) -> Message:
        raise RequestError(Code.UNAVAILABLE, "disk full")

    client, peer = await _pair(refuse)
    with pytest.raises(AuditUnavailable):
        await client.accept("dns", "allow", host="a.example")
    await client.close()
    await peer.close()


async def test_accept_raises_on_an_answer_that_confirms_nothing() -> None:
    async def nothing(_client: Client, _op: str, _parameters: Message, _fds: list[int]) -> Message:
        return {}

    client, peer = await _pair(nothing)
    with pytest.raises(AuditUnavailable):
        await client.accept("dns", "allow", host="a.example")
    await client.close()
    await peer.close()


async def test_an_unknown_field_is_a_programming_error_here_not_at_auditd(auditd: Auditd) -> None:
    client = await auditd.attach(A)
    with pytest.raises(RecordError):
        await client.accept("dns", "allow", nonsense="x")
    with pytest.raises(RecordError):
        client.note("dns", nonsense="x")


async def test_notes_arrive_in_order(auditd: Auditd) -> None:
    client = await auditd.attach(A)
    for number in range(500):
        client.note("request", status=number)
    assert await client.drain()
    assert [r["status"] for r in auditd.said(kind="request")] == list(range(500))
    assert client.lost == 0


async def test_overflowing_notes_are_counted_exactly_in_the_log(auditd: Auditd) -> None:
    client = await auditd.attach(A, queue=100)
    for number in range(1000):  # the loop does not let the sender run
        client.note("request", status=number)
    assert await client.drain()
    assert len(auditd.said(kind="request")) == 100
    assert [(gap["count"], gap["sandbox"]) for gap in auditd.said(kind="gap")] == [(900, A)]


async def test_a_flood_of_one_event_is_few_records_with_its_exact_number(auditd: Auditd) -> None:
    client = await auditd.attach(A)
    for number in range(5000):
        client.count("dns", "deny", rule="dns-rate" if number % 5 else "dns-format")
    assert await client.drain()
    told = [(record["rule"], record["count"]) for record in auditd.said(kind="dns")]
    assert [("dns-format", 1), ("dns-rate", 4000), ("dns-format", 999)] == told
    client.count("dns", "deny", rule="dns-rate")
    assert await client.drain()
    assert 4001 == sum(record["count"] for record in auditd.said(kind="dns", rule="dns-rate"))


async def test_counted_events_that_do_not_fit_are_lost_in_their_number(auditd: Auditd) -> None:
    client = await auditd.attach(A, queue=1)
    for _ in range(100):
        client.count("dns", "deny", rule="dns-rate")
    assert await client.drain()
    said = sum(record["count"] for record in auditd.said(kind="dns"))
    assert 100 == said + sum(gap["count"] for gap in auditd.said(kind="gap"))


async def test_notes_survive_a_restart_of_auditd_and_every_loss_is_counted(auditd: Auditd) -> None:
    client = AuditClient.from_fd(await auditd.attach_fd(A))
    client.note("request", status=1)
    assert await client.drain()
    assert auditd.process is not None
    auditd.process.kill()
    await client.wait_closed()
    for _ in range(10):
        client.note("request", status=2)
    await auditd.restart()
    await client.rebind(await auditd.attach_fd(A, generation=1))
    assert await client.drain()
    gaps = sum(gap["count"] for gap in auditd.said(kind="gap", producer="gateway"))
    assert len(auditd.said(kind="request", status=2)) + gaps == 10
    await client.accept("dns", "allow", host="a.example")
    await client.close()


async def test_refused_notes_are_kept_and_sent_again() -> None:
    taken: list[Message] = []
    refusing = True

    async def handler(_client: Client, _op: str, parameters: Message, _fds: list[int]) -> Message:
        if refusing:
            raise RequestError(Code.UNAVAILABLE, "disk full")
        taken.extend(parameters["entries"])
        return {"seq": 1}

    client, peer = await _pair(handler)
    for number in range(15):
        client.note("request", status=number)
    assert not await client.drain(0.1)
    refusing = False
    assert await client.drain(5)
    statuses = [item["fields"].get("status") for item in taken if item["kind"] == "request"]
    assert statuses == list(range(10))
    assert [item["fields"]["count"] for item in taken if item["kind"] == "gap"] == [5]
    await client.close()
    await peer.close()


async def test_concurrent_accepts_each_get_their_own_number(auditd: Auditd) -> None:
    client = await auditd.attach(A)
    seqs = await asyncio.gather(*(client.accept("dns", "allow", host=f"{n}.example") for n in range(300)))
    by_host = {record["host"]: record["seq"] for record in auditd.said(kind="dns")}
    assert [by_host[f"{n}.example"] for n in range(300)] == seqs
