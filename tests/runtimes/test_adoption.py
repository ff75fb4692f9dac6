"""The record of a sandbox survives an incomplete write."""

from pathlib import Path
from typing import Any

import pytest

from runtimes.daemons import FileCounter
from runtimes.net import netns
from runtimes.process import predecessor
from runtimes.records import RecordStore, SandboxRecord
from tests.runtimes.test_spec import UIDS


def record(**changes: Any) -> SandboxRecord:
    plain: dict[str, Any] = {
        "sandbox": "sbx-1",
        "runtime": "runc",
        "phase": "running",
        "generation": 3,
        "uid": UIDS.worker_base + 7,
        "slot": 7,
        "sandbox_inode": netns.inode(None),
        "gateway_inode": netns.inode(None),
        "rules": "d" * 64,
        "container": "c" * 64,
        "policy": "digest",
        "selection": '{"policy_name": "agents"}',
        "compiled": {"digest": "d"},
        "seed": "5eed" * 16,
    }
    return SandboxRecord(**(plain | changes))


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    records = RecordStore(tmp_path)
    records.write(record(generation=3))
    records.write(record(generation=4))
    records.write(record(sandbox="sbx-2"))
    assert (record(generation=4), record(sandbox="sbx-2")) == records.read_all()
    claimed = record(sandbox="sbx-2", images=("team/tool:1", "sha256:1"), given={"TOKEN": "a secret of a claim"})
    records.write(claimed)
    assert (record(generation=4), claimed) == records.read_all()
    assert "a secret" not in repr(claimed)
    records.write(record(sandbox="sbx-2"))
    assert {0o600} == {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    records.keep(frozenset(("sbx-2",)))
    assert (record(sandbox="sbx-2"),) == records.read_all()
    records.remove("sbx-2")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", record().model_dump_json()[:-2], '{"sandbox": "sbx-1"}'])
def test_a_broken_record_is_none_and_is_removed(tmp_path: Path, text: str) -> None:
    (tmp_path / "sbx-1.json").write_text(text)
    (tmp_path / "sbx-3.json").write_text(record().model_dump_json())  # It has the name of another sandbox.
    (tmp_path / "sbx-2.new").write_text(text)
    records = RecordStore(tmp_path)
    assert () == records.read_all()
    records.keep(frozenset())
    assert [] == list(tmp_path.iterdir())


def test_a_number_is_never_given_twice(tmp_path: Path) -> None:
    assert [1, 2] == [FileCounter(tmp_path / "n").next() for _ in range(2)]
    (tmp_path / "n.new").write_text("")
    assert 3 == FileCounter(tmp_path / "n").next()
    (tmp_path / "n").write_text("")
    with pytest.raises(ValueError, match="invalid literal"):
        FileCounter(tmp_path / "n").next()


def test_the_code_is_part_of_an_identity() -> None:
    assert 64 == len(predecessor.code())
    assert predecessor.digest("a", "b") != predecessor.digest("ab")
