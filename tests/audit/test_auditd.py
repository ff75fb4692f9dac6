"""auditd as a process: identity, ordering, kills, restarts, rotation, and its behaviour when it cannot write."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from audit.batch import ChainEntry as Line
from audit.chain import SignedAnchor, read_anchor
from audit.client import AuditClient, AuditUnavailable
from audit.keys import load_public
from audit.ring import Ring, read_ring
from audit.shares import Retention
from audit.sinks.file import Log, sync
from audit.verifier import Verifier
from tests.audit.conftest import ROOT, A, Auditd, B, NewAuditd, retired, run, verify
from wire import Client, Code, RemoteError
from wire.api.auditd import MOST_RECORDS, Accepted, CloseSandbox, Entry, Record, Records

pytestmark = pytest.mark.slow


def _append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


async def test_a_channel_cannot_speak_for_another_sandbox(auditd: Auditd) -> None:
    client = await auditd.attach(A, generation=3)
    with pytest.raises(AuditUnavailable, match="invalid"):
        await client.accept("dns", "allow", sandbox=B, host="b.example")
    await client.accept("dns", "allow", sandbox=A, host="a.example")
    (found,) = auditd.said(kind="dns")
    assert (found["sandbox"], found["chain"], found["generation"]) == (A, A, 3)


@pytest.mark.parametrize(
    "fields",
    [{"generation": 9}, {"producer": "vault"}, {"chain": "control"}, {"seq": 1}, {"ts": "x"}, {"hash": "x"}],
)
async def test_a_channel_cannot_set_what_auditd_sets(auditd: Auditd, fields: dict[str, Any]) -> None:
    raw = await _raw(auditd)
    with pytest.raises(RemoteError, match="invalid"):
        await raw.ask(Record(Entry("dns", "allow", fields)))
    await raw.close()
    assert auditd.said(kind="dns") == []


ENTRY: dict[str, Any] = {"kind": "dns", "decision": "allow", "fields": {}}


async def _raw(auditd: Auditd) -> Client:
    import socket

    client = Client(socket.socket(fileno=await auditd.attach_fd(A)))
    client.start()
    return client


@pytest.mark.parametrize(
    ("op", "parameters"),
    [
        ("attach", {"sandbox": B, "generation": 1, "producer": "gateway"}),
        ("close_sandbox", {"sandbox": B}),
        ("record", {"entry": ENTRY | {"kind": "checkpoint"}, "durable": False}),
        ("record", {"entry": ENTRY | {"fields": []}, "durable": False}),
        ("record", {"entry": ENTRY | {"fields": {"port": 2.5}}, "durable": False}),
        ("record", {"entry": ENTRY | {"fields": {"host": None}}, "durable": False}),
        ("record", {"entry": ENTRY | {"fields": {"host": {}}}, "durable": False}),
        ("record", {"entry": ENTRY | {"kind": ["dns"]}, "durable": False}),
        ("record", {"entry": ENTRY | {"producer": "vault"}, "durable": False}),
        ("record", {"entry": {"kind": "dns", "decision": "allow"}, "durable": False}),
        ("record", {"entry": ENTRY, "durable": 1}),
        ("record", {"entry": ENTRY}),
        ("records", {"entries": []}),
        ("records", {"entries": [ENTRY] * (MOST_RECORDS + 1)}),
        ("records", {"entries": [1]}),
        ("heads", {}),
    ],
)
async def test_a_channel_can_only_record(auditd: Auditd, op: str, parameters: dict[str, Any]) -> None:
    raw = await _raw(auditd)
    before = len(auditd.records())
    with pytest.raises(RemoteError, match=r"invalid|unknown_op"):
        await raw.call(op, **parameters)
    assert len(auditd.records()) == before
    assert await raw.call("record", entry=ENTRY, durable=False) == {"seq": 1}  # the control
    await raw.close()


async def test_a_channel_has_one_request_of_many_records_at_a_time(auditd: Auditd) -> None:
    raw = await _raw(auditd)
    many = Records((Entry("dns", "allow"),) * MOST_RECORDS)
    answers = await asyncio.gather(*(raw.ask(many) for _ in range(20)), return_exceptions=True)
    taken = [answer for answer in answers if isinstance(answer, Accepted)]
    assert taken != []
    assert all(isinstance(a, Accepted) or (isinstance(a, RemoteError) and a.code == Code.BUSY) for a in answers)
    await raw.close()
    assert len(auditd.said(kind="dns")) == MOST_RECORDS * len(taken)


@pytest.mark.parametrize(
    "identity",
    [
        {"sandbox": "control"},
        {"sandbox": "../x"},
        {"sandbox": ""},
        {"sandbox": 5},
        {"producer": "A b"},
        {"generation": 0},
        {"generation": True},
    ],
)
async def test_an_identity_that_is_not_one_is_refused(auditd: Auditd, identity: dict[str, Any]) -> None:
    import socket

    assert auditd.control is not None
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(RemoteError, match="invalid"):
        await auditd.control.call(
            "attach", fds=[theirs.fileno()], **({"sandbox": A, "generation": 1, "producer": "gateway"} | identity)
        )


async def test_control_plane_records_go_to_the_control_chain(auditd: Auditd) -> None:
    assert auditd.control is not None
    await AuditClient(auditd.control).accept("alarm", "deny", sandbox=A, rule="isolation.link")
    (found,) = auditd.said(kind="alarm")
    assert ("control", A, "root") == (found["chain"], found["sandbox"], found["producer"])


async def test_a_peer_with_another_uid_is_not_served(tmp_path: Path, new_auditd: NewAuditd) -> None:
    allowed = await new_auditd(tmp_path).start()
    await allowed.stop()
    config = json.loads(allowed.config.read_text()) | {"uids": [os.getuid() + 1]}
    allowed.config.write_text(json.dumps(config))
    with pytest.raises((ConnectionError, AssertionError, TimeoutError)):
        await allowed.start()
    await allowed.stop()


async def test_hostile_values_stay_one_record_with_exact_fields(auditd: Auditd) -> None:
    client = await auditd.attach(A)
    hostile = 'x"}\n{"kind":"dns","decision":"allow"}\r\n\\'
    await client.accept("request", "deny", host=hostile, path="/" + hostile, reason="\x1b[31m\u202e\ud800" * 9)
    (found,) = auditd.said(kind="request")
    assert found["host"] == 'x"}\\u{a}{"kind":"dns","decision":"allow"}\\u{d}\\u{a}\\'
    assert all(0x20 <= byte <= 0x7E or byte == 0x0A for path in auditd.files() for byte in path.read_bytes())
    assert auditd.verify().findings == []


async def test_close_sandbox_ends_the_chain_signed_and_cuts_its_channels(auditd: Auditd) -> None:
    a, b = await auditd.attach(A), await auditd.attach(B)
    await a.accept("dns", "allow", host="a.example")
    assert auditd.control is not None
    assert await auditd.control.ask(CloseSandbox(A)) == Accepted(2)
    with pytest.raises(AuditUnavailable):
        await a.accept("dns", "allow", host="late.example")
    await b.accept("dns", "allow", host="b.example")
    assert [r["closed"] for r in auditd.said(kind="checkpoint", chain=A)] == [True]
    await auditd.stop()
    assert (auditd.verify().findings, sorted(auditd.verify().heads)) == ([], ["control", B])


async def test_a_closed_sandbox_that_comes_back_begins_a_new_chain(auditd: Auditd) -> None:
    assert auditd.control is not None
    for _ in range(2):
        assert await (await auditd.attach(A)).accept("dns", "allow", host="a.example") == 1
        assert await auditd.control.ask(CloseSandbox(A)) == Accepted(2)
    await auditd.stop()
    assert auditd.verify().findings == []


async def test_a_flooding_producer_waits_for_itself_only(auditd: Auditd) -> None:
    flooder, other = await auditd.attach(A, timeout=60), await auditd.attach(B)
    flood = asyncio.gather(*(flooder.accept("dns", "deny", reason="x" * 500) for _ in range(3000)))
    await asyncio.sleep(0)
    for _ in range(5):
        await other.accept("dns", "allow", host="b.example")
    assert not flood.done()
    await flood
    assert len(auditd.said(chain=A, kind="dns")) == 3000


async def test_rotation_keeps_the_chains(tmp_path: Path, new_auditd: NewAuditd) -> None:
    auditd = await new_auditd(tmp_path, max_file_bytes=65536).start()
    clients = [await auditd.attach(name) for name in (A, B)]
    for _ in range(10):
        await asyncio.gather(*(c.accept("dns", "deny", reason="x" * 500) for c in clients for _ in range(60)))
    await auditd.stop()
    assert len(auditd.files()) > 5
    assert [r["seq"] for r in auditd.said(chain=A)] == list(range(1, 601))
    assert auditd.verify().findings == []


async def test_retired_files_are_not_missed_but_later_ones_are(tmp_path: Path, new_auditd: NewAuditd) -> None:
    auditd = await new_auditd(tmp_path, max_file_bytes=65536, max_files=2).start()
    client = await auditd.attach(A)
    for _ in range(10):
        await asyncio.gather(*(client.accept("dns", "deny", reason="x" * 500) for _ in range(100)))
    await auditd.restart()
    await retired(auditd, 2)
    await auditd.stop()
    assert len(auditd.files()) == 2
    assert auditd.files()[0].name != "audit-000001.jsonl"
    assert auditd.verify().findings == []
    auditd.files()[0].unlink()
    assert auditd.verify().findings != []


async def test_many_records_of_one_chain_are_signed_in_between(auditd: Auditd) -> None:
    client = await auditd.attach(A)
    for _ in range(5):
        await asyncio.gather(*(client.accept("dns", "allow") for _ in range(500)))
    assert len(auditd.said(chain=A, kind="checkpoint")) == 2
    assert auditd.verify().findings == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_a_restart_continues_sequence_and_chain(auditd: Auditd, number: int) -> None:
    await (await auditd.attach(A)).accept("dns", "allow", host="one.example")
    await auditd.restart(number)
    await (await auditd.attach(A)).accept("dns", "allow", host="two.example")
    await auditd.stop()
    assert [r["seq"] for r in auditd.said(chain=A)] == [1, 2]
    assert auditd.verify().findings == []
    assert auditd.said(kind="gap") == []  # no record was lost, so there is no gap


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.extended)])
async def test_no_accepted_record_is_lost_by_killing_auditd(tmp_path: Path, new_auditd: NewAuditd, kills: int) -> None:
    """auditd is killed while it writes or changes files. The log verifies after each kill."""
    auditd = await new_auditd(tmp_path, max_file_bytes=65536).start()
    acknowledged: set[str] = set()
    randomness = random.Random(8)
    count = 0

    async def produce(client: AuditClient) -> None:
        nonlocal count
        while True:
            count += 1
            host = f"{count}.example"
            try:
                await client.accept("dns", "allow", durable=count % 50 == 0, host=host, reason="x" * 200)
            except AuditUnavailable:
                return
            acknowledged.add(host)

    for kill in range(1, kills + 1):
        clients = [await auditd.attach(name) for name in (A, A, B)]
        producers = asyncio.gather(*(produce(client) for client in clients))
        async with asyncio.timeout(60):
            while len(acknowledged) < 20 * kill:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.005)
        await asyncio.sleep(randomness.uniform(0.01, 0.06))  # kills at a random moment
        assert auditd.process is not None
        auditd.process.kill()
        await auditd.process.wait()
        await producers
        assert auditd.verify().findings == []
        await auditd.restart()
    await auditd.stop()
    recorded = {record["host"] for record in auditd.said(kind="dns")}
    assert acknowledged - recorded == set()
    assert len(auditd.files()) > 1
    assert auditd.verify().findings == []


async def test_a_torn_last_line_is_noted_by_verify_and_kept_as_a_record(auditd: Auditd) -> None:
    await (await auditd.attach(A)).accept("dns", "allow", durable=True, host="one.example")
    await auditd.stop(signal.SIGKILL)
    torn = b'{"chain":"' + A.encode() + b'","decision":"al'
    _append(auditd.files()[-1], torn)
    found = auditd.verify()
    assert (found.findings, len(found.notes)) == ([], 1)
    assert "incomplete last line" in found.notes[0]
    await auditd.start()
    await (await auditd.attach(A)).accept("dns", "allow", host="two.example")
    await auditd.stop()
    assert [r["torn"] for r in auditd.said(kind="gap")] == [torn.decode()]
    assert [r["seq"] for r in auditd.said(chain=A)] == [1, 2]
    assert auditd.verify().findings == []


def _change(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"one.example", b"two.example"))


def _cut(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))


@pytest.mark.parametrize(
    "attack",
    [_change, _cut, Path.unlink, lambda path: (path.parent / "heads.json").unlink()],
    ids=["change", "cut", "drop", "heads"],
)
async def test_a_log_changed_while_auditd_was_down_never_verifies_again(auditd: Auditd, attack: Any) -> None:
    await (await auditd.attach(A)).accept("dns", "allow", host="one.example")
    await auditd.stop()
    attack(auditd.files()[-1])
    await auditd.start()
    await (await auditd.attach(A)).accept("dns", "allow", host="later.example")  # auditd continues to record
    await auditd.restart()
    await auditd.stop()
    assert any("auditd found the log changed" in text for text in auditd.verify().findings)
    assert len(auditd.said(host="later.example")) == 1


@pytest.mark.parametrize("attack", [lambda path: os.truncate(path, 100), Path.unlink], ids=["cut", "drop"])
async def test_a_log_changed_under_a_running_auditd_is_noticed(auditd: Auditd, attack: Any) -> None:
    client = await auditd.attach(A)
    await client.accept("dns", "allow", host="one.example")
    attack(auditd.files()[-1])
    await client.accept("dns", "allow", host="two.example")
    await auditd.stop()
    assert 1 == sum(path.read_bytes().count(b'"two.example"') for path in auditd.files())
    assert any("auditd found the log changed" in text for text in auditd.verify().findings)


def _open(directory: Path, *, boot: str = "one", clock: Any = lambda: "2026-01-01T00:00:00.000Z") -> Log:
    return Log.open(directory, boot=boot, clock=clock, max_file_bytes=1 << 20, retention=Retention())


def _entry(host: str) -> Line:
    return Line(A, {"kind": "dns", "decision": "allow", "producer": "gateway", "sandbox": A, "host": host})


def _snapshot(log: Log, directory: Path, copy: Path) -> Path:
    """Return a copy of the log after a crash: all lines until now are synced and anchored."""
    mark = log.mark()
    sync(mark)
    log.write_anchor(mark)
    return Path(shutil.copytree(directory, copy))


@pytest.mark.parametrize("garbage", [b"", b"\0" * 4096, b"\0\n" * 50, b'{"chain":"x"}\nhalf'])
def test_a_crash_of_the_host_shows_as_a_gap(tmp_path: Path, garbage: bytes) -> None:
    log = _open(tmp_path / "log")
    log.append([_entry("one.example")])
    left = _snapshot(log, tmp_path / "log", tmp_path / "left")
    log.append([_entry("lost.example")])
    _append(left / "audit-000001.jsonl", garbage)
    again = _open(left, boot="two")
    again.append([_entry("two.example")])
    again.close()
    log.close()
    records = [json.loads(line) for line in (left / "audit-000001.jsonl").read_bytes().splitlines()]
    gaps = [r for r in records if r["kind"] == "gap" and "host stopped" in r["reason"]]
    assert sorted(gap["chain"] for gap in gaps) == ["control", A]
    assert len([r for r in records if "torn" in r]) == (1 if garbage else 0)
    assert verify(left).findings == []


@pytest.fixture(name="signed")
def _signed(tmp_path: Path) -> tuple[Path, SignedAnchor]:
    """Return a log of several chains with an anchor and a line after it.

    One chain is closed; another one was started again.
    """
    log = _open(tmp_path / "log")
    for number in range(30):
        log.append([_entry(f"{number}.example")])
        text = '","chain":"sbx-other'
        said = {"kind": "dns", "decision": "allow", "producer": "gateway", "sandbox": "sbx-c", "address": text}
        log.append([Line("sbx-c", {**said, "host": text})])
    log.append([Line(B, {"kind": "dns", "decision": "allow", "producer": "gateway", "sandbox": B})])
    log.close_chain(A)
    log.close_chain(B)
    log.append([_entry("again.example")])
    mark = log.mark()
    sync(mark)
    log.write_anchor(mark)
    log.append([_entry("later.example")])
    left = Path(shutil.copytree(tmp_path / "log", tmp_path / "left"))
    log.close()
    anchor = read_anchor(_ring(left).key, (left / "heads.json").read_bytes())
    assert anchor is not None
    return left, anchor


def _ring(log: Path) -> Ring:
    epochs = log / "keys/epochs.jsonl"
    ring, problem = read_ring(load_public(log / "keys/public.pem"), epochs.read_bytes() if epochs.exists() else b"")
    assert problem is None
    return ring


def _began(left: Path, anchor: SignedAnchor, lines: list[bytes]) -> Verifier:
    """Return a verifier that has read the header."""
    verifier = Verifier(_ring(left), anchor)
    verifier.begin_file(1)
    verifier.line(lines[0])
    return verifier


def test_a_log_is_continued_from_what_was_signed_as_if_each_line_had_been_read(
    signed: tuple[Path, SignedAnchor],
) -> None:
    left, anchor = signed
    lines = (left / "audit-000001.jsonl").read_bytes().splitlines(keepends=True)
    slow, quick = _began(left, anchor, lines), _began(left, anchor, lines)
    rest = iter(lines[1:])

    assert quick.trust(rest)
    assert {A, "sbx-c", "control"} == quick.heads.keys()
    quick.lines(rest)
    slow.lines(lines[1:])
    for verifier in (quick, slow):
        verifier.finish()
        verifier.checkpoints = 0
    assert [] == slow.findings
    assert slow == quick


def test_of_lines_that_are_not_those_that_were_signed_nothing_is_taken_over(signed: tuple[Path, SignedAnchor]) -> None:
    left, anchor = signed
    data = (left / "audit-000001.jsonl").read_bytes()
    lines = data.splitlines(keepends=True)
    begin = len(lines[0])
    for place in range(begin, anchor.offset, 97):
        changed = data[begin:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        found = _began(left, anchor, lines)
        assert not found.trust(changed.splitlines(keepends=True))
        assert _began(left, anchor, lines) == found
    for other in (lines[1:-9], [lines[2], lines[1], *lines[3:]], [*lines[1:3], lines[2], *lines[3:]]):
        assert not _began(left, anchor, lines).trust(other)


def test_the_same_garbage_without_a_crash_of_the_host_is_tampering(tmp_path: Path) -> None:
    log = _open(tmp_path / "log")
    left = _snapshot(log, tmp_path / "log", tmp_path / "left")
    log.close()
    _append(left / "audit-000001.jsonl", b"\0\n" * 50)
    _open(left, boot="one").close()
    assert verify(left).findings != []


def test_an_orderly_stop_before_a_reboot_is_no_gap(tmp_path: Path) -> None:
    log = _open(tmp_path / "log")
    log.append([_entry("one.example")])
    log.close()
    _open(tmp_path / "log", boot="two").close()
    assert verify(tmp_path / "log").notes == []
    assert verify(tmp_path / "log").findings == []


def test_a_clock_that_jumps_back_is_marked_and_the_sequence_goes_on(tmp_path: Path) -> None:
    times = iter([f"2026-01-01T00:00:{second:02}.000Z" for second in (10, 10, 11, 5, 5, 6, 7)])
    log = _open(tmp_path / "log", clock=lambda: next(times))
    seqs = [log.append([_entry("a.example")]) for _ in range(4)]
    log.close()
    assert seqs == [[1], [2], [3], [4]]
    records = [json.loads(line) for line in (tmp_path / "log/audit-000001.jsonl").read_bytes().splitlines()]
    assert [r["clock_back"] for r in records if "clock_back" in r] == ["2026-01-01T00:00:11.000Z"]
    assert verify(tmp_path / "log").findings == []


def test_a_failed_sync_leads_to_a_new_file_and_a_gap(tmp_path: Path) -> None:
    log = _open(tmp_path / "log")
    log.append([_entry("one.example")])
    log.distrust("the disk failed to sync")
    log.append([_entry("two.example")])
    log.close()
    found = verify(tmp_path / "log")
    assert (found.findings, len(found.notes)) == ([], 2)
    assert (tmp_path / "log/audit-000002.jsonl").exists()


def test_two_writers_of_one_directory_are_refused(tmp_path: Path) -> None:
    log = _open(tmp_path / "log")
    with pytest.raises(OSError, match="unavailable"):
        _open(tmp_path / "log")
    log.close()


def test_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    _open(tmp_path / "log").close()
    modes = {p.name: oct(p.stat().st_mode & 0o777) for p in sorted((tmp_path / "log").rglob("*")) if p.is_file()}
    assert modes == {
        "audit-000001.jsonl": "0o600",
        "heads.json": "0o600",
        "lock": "0o600",
        "public.pem": "0o644",
        "signing.key": "0o600",
    }


@pytest.mark.parametrize(
    "change",
    [{"nonsense": 1}, {"sync": "never"}, {"max_file_bytes": 1}, {"uids": "0"}, {"uids": [True]}],
)
def test_a_wrong_configuration_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    config = {"directory": str(tmp_path / "log"), "uids": [0]} | change
    (tmp_path / "c.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "audit.auditd", str(tmp_path / "c.json")], cwd=ROOT, capture_output=True, timeout=20
    )
    assert done.returncode == 1
    assert not (tmp_path / "log").exists()


async def test_sync_always_and_durable_answer_too(tmp_path: Path, new_auditd: NewAuditd) -> None:
    auditd = await new_auditd(tmp_path, sync="always").start()
    client = await auditd.attach(A)
    assert [await client.accept("dns", "allow", durable=durable) for durable in (False, True)] == [1, 2]
    client.note("dns")
    assert await client.drain()
    await auditd.stop()
    assert auditd.verify().findings == []


@pytest.fixture
def ext4_disk(tmp_path: Path) -> Iterator[Path]:
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 32 << 20)
    run("mkfs.ext4", "-q", image)
    run("mount", "-o", "loop", image, disk)
    yield disk
    subprocess.run(["fsfreeze", "-u", disk], check=False, capture_output=True, timeout=30)
    run("umount", "-l", disk)


@pytest.mark.system
async def test_a_full_disk_refuses_records_and_recovers_by_itself(small_disk: Path, new_auditd: NewAuditd) -> None:
    """No record is accepted that is not stored. Later the log has the number of refused ones, and verifies."""
    (small_disk / "ballast").write_bytes(b"x" * 400_000)
    auditd = await new_auditd(small_disk).start()
    client = await auditd.attach(A)
    accepted = refused = 0
    for _ in range(3000):
        try:
            await client.accept("dns", "allow", durable=True, reason="x" * 500)
            accepted += 1
        except AuditUnavailable:
            refused += 1
    assert accepted > 100
    assert refused > 100
    with pytest.raises(AuditUnavailable):
        await client.accept("dns", "allow", reason="x" * 500)
    (small_disk / "ballast").unlink()
    await client.accept("dns", "allow", host="recovered.example")
    await auditd.stop()
    assert len(auditd.said(kind="dns")) == accepted + 1
    assert [gap["count"] for gap in auditd.said(kind="gap")] == [refused + 1]
    assert auditd.verify().findings == []


@pytest.mark.system
async def test_a_disk_that_fills_while_files_are_changed_and_auditd_is_killed_loses_nothing(
    small_disk: Path, new_auditd: NewAuditd
) -> None:
    """Without space auditd can neither start a file, nor sign a head, nor restart. With space it continues."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 400_000)
    auditd = await new_auditd(small_disk, max_file_bytes=65536).start()
    acknowledged: set[str] = set()

    async def produce(client: AuditClient, first: int) -> None:
        for number in range(first, first + 1000):
            with contextlib.suppress(AuditUnavailable):
                await client.accept("dns", "allow", durable=number % 5 == 0, host=f"{number}.example", reason="x" * 500)
                acknowledged.add(f"{number}.example")

    clients = [await auditd.attach(name) for name in (A, A, B)]
    await asyncio.gather(*(produce(client, 1000 * number) for number, client in enumerate(clients)))
    assert len(auditd.files()) > 2
    assert 100 < len(acknowledged) < 2900
    assert auditd.verify().findings == []
    await auditd.stop(signal.SIGKILL)
    with pytest.raises(AssertionError):
        await auditd.start()
    assert auditd.process is not None
    assert auditd.process.returncode == 1
    assert auditd.verify().findings == []
    ballast.unlink()
    await auditd.start()
    await (await auditd.attach(A)).accept("dns", "allow", durable=True, host="after.example")
    await auditd.stop()
    assert {record["host"] for record in auditd.said(kind="dns")} == acknowledged | {"after.example"}
    assert auditd.verify().findings == []


@pytest.mark.system
async def test_a_disk_that_hangs_means_no_answer_and_recovers_by_itself(ext4_disk: Path, new_auditd: NewAuditd) -> None:
    """A frozen file system blocks write(2) itself. Producers reach their timeout and deny."""
    auditd = await new_auditd(ext4_disk).start()
    client = await auditd.attach(A, timeout=2)
    await client.accept("dns", "allow", durable=True, host="before.example")
    await asyncio.to_thread(run, "fsfreeze", "-f", ext4_disk)
    for durable in (False, True):
        with pytest.raises(AuditUnavailable):
            await client.accept("dns", "allow", durable=durable, host="frozen.example")
    await asyncio.to_thread(run, "fsfreeze", "-u", ext4_disk)
    async with asyncio.timeout(60):
        while True:
            try:
                await client.accept("dns", "allow", durable=True, host="after.example")
                break
            except AuditUnavailable:
                continue
    await auditd.stop()
    assert len(auditd.said(host="after.example")) >= 1
    assert auditd.verify().findings == []


@pytest.mark.system
async def test_a_file_system_that_went_read_only_refuses_records(ext4_disk: Path, new_auditd: NewAuditd) -> None:
    """ext4 after an error. Only a new mount, and so a new auditd, can write again."""
    auditd = await new_auditd(ext4_disk).start()
    client = await auditd.attach(A)
    await client.accept("dns", "allow", durable=True, host="before.example")
    await asyncio.to_thread(run, "mount", "-o", "remount,abort", ext4_disk)
    for durable in (False, True, False):
        with pytest.raises(AuditUnavailable):
            await client.accept("dns", "allow", durable=durable, host="refused.example")
    assert auditd.verify().findings == []


@pytest.mark.system
async def test_auditd_needs_no_privilege(tmp_path: Path, new_auditd: NewAuditd) -> None:
    """auditd runs as hostd starts it: with its own uid and directory, and with a socket for clients of other uids."""
    uid = 700000003
    base = tmp_path / "base"
    base.mkdir()
    for path in (tmp_path, *tmp_path.parents[:3]):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(0o711)
    os.chown(base, uid, uid)
    auditd = new_auditd(base, uid=uid)
    auditd.config.chmod(0o644)
    await auditd.start()
    await (await auditd.attach(A)).accept("dns", "allow", durable=True, host="a.example")
    assert await auditd.stop() == 0
    assert {path.stat().st_uid for path in auditd.log.rglob("*")} == {uid}
    assert auditd.verify().findings == []
