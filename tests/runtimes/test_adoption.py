"""A sandbox is adopted only if it is exactly as it was written down; what is written down survives being cut short."""

import os
from pathlib import Path
from typing import Any

import pytest

from runtimes import adoption, netns, predecessor, slots
from runtimes.adoption import Unfit, examine
from runtimes.daemons import Counter
from runtimes.docker import State
from runtimes.records import Record, Records
from runtimes.spec import Uids

UIDS = Uids()


def record(**changes: Any) -> Record:
    plain: dict[str, Any] = {
        "sandbox": "sbx-1",
        "runtime": "runc",
        "phase": "running",
        "generation": 3,
        "uid": UIDS.worker_base + 7,
        "slot": 7,
        "sandbox_inode": netns.inode(None),
        "gateway_inode": netns.inode(None),
        "container": "c" * 64,
        "policy": "digest",
        "selection": {"policy_name": "agents"},
        "compiled": {"digest": "d"},
    }
    return Record(**(plain | changes))


def state(**changes: Any) -> State:
    plain: dict[str, Any] = {"exit_code": 0, "oom": False, "started_at": "", "error": ""}
    return State(**(plain | {"status": "running", "pid": os.getpid()} | changes))


@pytest.fixture(name="run")
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory in which the paths of slot 7 are our own namespace, said to be mounted."""
    (tmp_path / "sandboxes" / "sbx-1").mkdir(parents=True)
    (tmp_path / "netns").mkdir()
    for path in slots.paths(tmp_path / "netns", 7):
        path.symlink_to("/proc/self/ns/net")
    mounted = tuple(str(path) for path in slots.paths(tmp_path / "netns", 7))
    monkeypatch.setattr(adoption.netns, "mounted", lambda inodes: mounted)
    return tmp_path


def test_a_sandbox_as_it_was_written_down_is_adopted(run: Path) -> None:
    slot = examine(record(), state(), run, UIDS)
    assert (7, netns.inode(None)) == (slot.index, slot.sandbox_inode)


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": "launching"},
        {"phase": "removing"},
        {"slot": None},
        {"slot": 8},
        {"slot": -1},
        {"uid": UIDS.worker_base},
        {"uid": None},
        {"sandbox_inode": 1},
        {"gateway_inode": 1},
        {"sandbox_inode": None},
        {"sandbox": "sbx-2"},
    ],
)
def test_a_record_that_does_not_match_adopts_nothing(run: Path, changes: dict[str, Any]) -> None:
    with pytest.raises((Unfit, OSError)):
        examine(record(**changes), state(), run, UIDS)


@pytest.mark.parametrize("now", [None, state(status="exited"), state(pid=0), state(status="paused")])
def test_a_container_that_does_not_run_is_not_adopted(run: Path, now: State | None) -> None:
    with pytest.raises(Unfit):
        examine(record(), now, run, UIDS)


def test_a_container_in_another_namespace_is_not_adopted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption.netns, "of_process", lambda pid: 1)
    with pytest.raises(Unfit, match="another namespace"):
        examine(record(), state(), run, UIDS)


def test_a_namespace_that_is_not_mounted_is_not_adopted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption.netns, "mounted", lambda inodes: ())
    with pytest.raises(Unfit, match="namespaces"):
        examine(record(), state(), run, UIDS)


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.write(record(generation=3))
    records.write(record(generation=4))
    records.write(record(sandbox="sbx-2"))
    assert (record(generation=4), record(sandbox="sbx-2")) == records.read_all()
    assert {0o600} == {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    records.keep(frozenset(("sbx-2",)))
    assert (record(sandbox="sbx-2"),) == records.read_all()
    records.remove("sbx-2")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", record().model_dump_json()[:-2], '{"sandbox": "sbx-1"}'])
def test_a_broken_record_is_none_and_is_removed(tmp_path: Path, text: str) -> None:
    (tmp_path / "sbx-1.json").write_text(text)
    (tmp_path / "sbx-3.json").write_text(record().model_dump_json())  # under another's name
    (tmp_path / "sbx-2.new").write_text(text)
    records = Records(tmp_path)
    assert () == records.read_all()
    records.keep(frozenset())
    assert [] == list(tmp_path.iterdir())


def test_a_number_is_never_given_twice(tmp_path: Path) -> None:
    assert [1, 2] == [Counter(tmp_path / "n").next() for _ in range(2)]
    (tmp_path / "n.new").write_text("")
    assert 3 == Counter(tmp_path / "n").next()
    (tmp_path / "n").write_text("")
    with pytest.raises(ValueError, match="invalid literal"):
        Counter(tmp_path / "n").next()


def test_the_code_is_part_of_an_identity() -> None:
    assert 64 == len(predecessor.code())
    assert predecessor.digest("a", "b") != predecessor.digest("ab")
