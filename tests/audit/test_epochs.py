"""auditd cannot sign for a former epoch: its keys, their remains after a crash, and the findings of verification."""

import json
import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from audit import cli, keys
from audit.batch import ChainEntry
from audit.chain import ZERO, ChainHead, SignedAnchor, extend_log, seal, seal_checkpoint, sign_anchor
from audit.keys import KeyUnusable
from audit.records import canonical
from audit.ring import certificate
from audit.shares import Retention
from audit.sinks.file import Log
from tests.audit.conftest import ROOT, A, verify


def opened(directory: Path) -> Log:
    clock = iter(range(10_000))
    return Log.open(
        directory,
        boot="one",
        clock=lambda: f"2026-01-01T{next(clock) // 3600:02}:00:00.000Z",
        max_file_bytes=1 << 20,
        retention=Retention(),
    )


def said(host: str) -> ChainEntry:
    return ChainEntry(A, {"kind": "dns", "decision": "allow", "producer": "gateway", "sandbox": A, "host": host})


def next_epoch(log: Log) -> None:
    log.prepare_epoch()
    log.begin_epoch()
    log.destroy_former()


def lines(directory: Path) -> list[bytes]:
    return (directory / "audit-000001.jsonl").read_bytes().splitlines(keepends=True)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of three epochs, closed in order, with a record in each."""
    directory = tmp_path / "log"
    writer = opened(directory)
    for host in ("one.example", "two.example"):
        writer.append([said(host)])
        next_epoch(writer)
    writer.append([said("three.example")])
    writer.close()
    return directory


def private_keys(directory: Path) -> list[Ed25519PrivateKey]:
    """Return every private key that a process with auditd's uid can find in the directory."""
    found = []
    for path in directory.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            found += [Ed25519PrivateKey.from_private_bytes(data)] if len(data) == 32 and any(data) else []
    return found


def rewrite(directory: Path, change: Callable[[dict[str, Any]], None], sign: Ed25519PrivateKey) -> None:
    """Do what auditd can do: change records, and correct every hash and each signature that `sign` can make."""
    heads: dict[str, ChainHead] = {}
    state, out = ZERO, []
    for line in lines(directory):
        record = json.loads(line)
        before = dict(record)
        del record["hash"], record["seq"], record["prev"]
        change(record)
        record |= {"log": state} if "log" in record else {}
        if "heads" in record:
            record["heads"] = {chain: [head.seq, head.hash] for chain, head in heads.items()}
        head = heads.get(record["chain"], ChainHead())
        if record["kind"] == "checkpoint" and _changed(record, before, head):
            del record["signature"], record["key"]
            again, heads[record["chain"]] = seal_checkpoint(sign, record, head)
        else:
            again, heads[record["chain"]] = seal(record, head)
        state = extend_log(state, again)
        out.append(again)
    (directory / "audit-000001.jsonl").write_bytes(b"".join(out))
    size = sum(map(len, out))
    anchor = SignedAnchor(1, 1, size, state, json.loads(out[-1])["ts"], "one", True)
    (directory / "heads.json").write_bytes(sign_anchor(sign, anchor))


def _changed(record: dict[str, Any], before: dict[str, Any], head: ChainHead) -> bool:
    return before != {**record, "seq": before["seq"], "prev": before["prev"], "hash": before["hash"]} or (
        (before["seq"], before["prev"]) != (head.seq + 1, head.hash)
    )


def put_in_place_of(host: str) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        if record.get("host") == host:
            record["host"] = "other.example"

    return change


def test_a_log_of_several_epochs_verifies(log: Path) -> None:
    found = verify(log)
    assert ([], 2) == (found.findings, found.epoch)
    assert 3 == len({json.loads(line)["key"] for line in lines(log) if b'"checkpoint"' in line})


def test_one_private_key_is_left(log: Path) -> None:
    (key,) = private_keys(log)
    public = (log / "keys/public.pem").read_bytes()
    assert public != key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    assert ["epochs.jsonl", "public.pem", "signing.key"] == sorted(path.name for path in (log / "keys").iterdir())


@pytest.mark.parametrize("host", ["one.example", "two.example"])
def test_a_record_of_a_former_epoch_cannot_be_rewritten_with_the_key_that_is_left(log: Path, host: str) -> None:
    (key,) = private_keys(log)
    rewrite(log, put_in_place_of(host), key)
    assert any("is signed by the key of epoch 3, in epoch" in text for text in verify(log).findings)


def test_records_of_the_present_epoch_are_what_anchors_are_for(log: Path, tmp_path: Path) -> None:
    """The limit of signatures: the present key can sign its epoch's records again. A kept anchor detects the change."""
    kept = tmp_path / "anchor.json"
    assert 0 == cli.anchor(log, output=kept)
    assert 0 == cli.verify(log, anchors=[kept], out=StringIO())
    (key,) = private_keys(log)
    rewrite(log, put_in_place_of("three.example"), key)
    assert [] == verify(log).findings
    out = StringIO()
    assert 1 == cli.verify(log, anchors=[kept], out=out)
    assert "is not as it was anchored" in out.getvalue()


def test_a_log_that_was_cut_or_replaced_is_found_by_an_anchor(log: Path, tmp_path: Path) -> None:
    kept = tmp_path / "anchor.json"
    assert 0 == cli.anchor(log, output=kept)
    shutil.rmtree(log)
    for hosts in ((), ("one.example", "two.example", "three.example", "more.example") * 3):
        writer = opened(log)
        for host in hosts:
            writer.append([said(host)])
        writer.close()
        assert [] == verify(log).findings
        out = StringIO()
        assert 1 == cli.verify(log, anchors=[kept], out=out)
        assert "the log anchored at" in out.getvalue()
        assert "is not as it was anchored" in out.getvalue()


def test_an_anchor_is_given_of_a_log_that_verifies_only(log: Path) -> None:
    (key,) = private_keys(log)
    rewrite(log, put_in_place_of("one.example"), key)
    out = StringIO()
    assert 1 == cli.anchor(log, out=out)
    assert "" == out.getvalue()


@pytest.mark.parametrize("content", [b"", b"x", b"{}\n", b'{"version":1}\n'])
def test_what_is_no_anchor_is_not_taken_for_one(log: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "anchor").write_bytes(content)
    assert 2 == cli.verify(log, anchors=[tmp_path / "anchor"], out=StringIO())
    assert 2 == cli.verify(log, anchors=[tmp_path / "absent"], out=StringIO())


def test_a_certificate_that_the_key_before_did_not_sign_is_found(log: Path) -> None:
    path = log / "keys/epochs.jsonl"
    certificates = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(certificates[0] + certificates[0])
    assert ["keys/epochs.jsonl line 2: the key before it did not certify this one"] == verify(log).findings[:1]


def test_a_certificate_with_a_signature_of_another_key_is_found(log: Path) -> None:
    path = log / "keys/epochs.jsonl"
    certificates = [json.loads(line) for line in path.read_bytes().splitlines()]
    other = Ed25519PrivateKey.generate()
    forged = json.loads(certificate(other, other.public_key())) | {"key": certificates[1]["key"]}
    path.write_bytes(canonical(certificates[0]) + b"\n" + canonical(forged) + b"\n")
    assert ["keys/epochs.jsonl line 2: the key before it did not certify this one"] == verify(log).findings[:1]


class Crash(Exception):
    """An exception that simulates the end of the process."""


STEPS = ("_create", "_append", "certificate", "_overwrite", "sync_directory")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [*STEPS, "begin_epoch", "destroy_former"])
def test_a_crash_at_any_step_of_a_change_leaves_one_key_that_signs_and_a_log_that_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    writer = opened(tmp_path / "log")
    writer.append([said("one.example")])
    before = private_keys(tmp_path / "log")
    place: Any = Log if step in ("begin_epoch", "destroy_former") else keys
    real = getattr(place, step)

    def crash(*arguments: Any, **named: Any) -> Any:
        if when == "after":
            real(*arguments, **named)
        raise Crash

    monkeypatch.setattr(place, step, crash)
    with pytest.raises(Crash):
        next_epoch(writer)
    left = Path(shutil.copytree(tmp_path / "log", tmp_path / "left"))
    monkeypatch.undo()
    assert [] == verify(left).findings

    again = opened(left)
    again.append([said("two.example")])
    again.close()
    assert [] == verify(left).findings
    after = private_keys(left)
    assert (1, 1) == (len(before), len(after))
    assert before[0].private_bytes_raw() != after[0].private_bytes_raw()
    assert [1, 2] == [json.loads(line)["seq"] for line in lines(left) if b'"dns"' in line]


def test_each_start_begins_an_epoch(tmp_path: Path) -> None:
    opened(tmp_path / "log").close()
    first = private_keys(tmp_path / "log")[0].private_bytes_raw()
    opened(tmp_path / "log").close()
    (second,) = private_keys(tmp_path / "log")
    assert first != second.private_bytes_raw()
    assert [] == verify(tmp_path / "log").findings


def test_a_log_of_the_former_format_goes_on_and_its_key_is_destroyed(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    writer = opened(directory)
    writer.append([said("one.example")])
    writer.close()
    key = private_keys(directory)[0]
    (directory / "keys/signing.key").unlink()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (directory / "keys/signing.pem").write_bytes(pem)
    anchor = json.loads((directory / "heads.json").read_bytes())
    fields = {name: value for name, value in anchor.items() if name not in ("version", "key", "signature")}
    (directory / "heads.json").write_bytes(_former_anchor(key, fields))
    assert [] == verify(directory).findings

    again = opened(directory)
    again.append([said("two.example")])
    again.close()
    assert [] == verify(directory).findings
    assert not (directory / "keys/signing.pem").exists()
    assert key.private_bytes_raw() not in [one.private_bytes_raw() for one in private_keys(directory)]


def _former_anchor(key: Ed25519PrivateKey, fields: dict[str, Any]) -> bytes:
    body = {"version": 1, **fields}
    signature = key.sign(b"sallyport-audit-anchor-v1\0" + canonical(body))
    return canonical({**body, "signature": b64encode(signature).decode()}) + b"\n"


def test_a_log_without_its_key_is_not_continued_with_another(log: Path) -> None:
    (log / "keys/signing.key").unlink()
    with pytest.raises(KeyUnusable):
        opened(log)


def test_a_log_whose_oldest_files_a_former_version_deleted_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "log"
    writer = Log.open(
        directory,
        boot="one",
        clock=lambda: "2026-01-01T00:00:00.000Z",
        max_file_bytes=4096,
        retention=Retention(),
    )
    for number in range(200):
        writer.append([said(f"{number}.example")])
    writer.close()
    (key,) = private_keys(directory)
    (directory / "audit-000001.jsonl").unlink()
    fields = json.loads((directory / "heads.json").read_bytes()) | {"first": 2}
    fields = {name: value for name, value in fields.items() if name not in ("version", "key", "signature")}
    (directory / "heads.json").write_bytes(_former_anchor(key, fields))
    assert [] == verify(directory).findings
    opened(directory).close()
    found = verify(directory)
    assert [] == found.findings
    assert "files before 2 were deleted by a former version" in found.notes
    (directory / "chains.json").unlink()
    assert ["chains.json, which says what is kept of the files before 2, is missing"] == verify(directory).findings


_CHILD = """
import sys
from pathlib import Path
from tests.audit.test_epochs import next_epoch, opened, said
log = opened(Path(sys.argv[1]))
log.append([said("one.example")])
print("began", flush=True)
sys.stdin.readline()
next_epoch(log)
log.append([said("two.example")])
print("changed", flush=True)
sys.stdin.readline()
"""


def test_a_process_has_no_former_key_in_its_memory(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path / "log")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert b"began\n" == child.stdout.readline()
        former = (tmp_path / "log/keys/signing.key").read_bytes()
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert b"changed\n" == child.stdout.readline()
        present = (tmp_path / "log/keys/signing.key").read_bytes()
        assert (0, True) == (_count(child.pid, former), _count(child.pid, present) > 0)
        child.stdin.write(b"\n")


def _count(pid: int, needle: bytes) -> int:
    """Return the number of occurrences of a text in the memory of a process."""
    found = 0
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            if rights.startswith("rw"):
                begin, end = (int(part, 16) for part in span.split("-"))
                memory.seek(begin)
                found += memory.read(end - begin).count(needle)
    return found
