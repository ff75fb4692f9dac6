"""Retired files: each chain keeps its own verified share, independently of the amount that other chains write."""

import json
import os
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from audit import cli, shares
from audit.batch import ChainEntry
from audit.chain import ZERO, ChainHead, LineError, seal
from audit.shares import Kept, Retention
from audit.sinks import file as file_sink
from audit.sinks.file import Log
from tests.audit.conftest import A, B, verify
from tests.audit.test_epochs import private_keys

pytestmark = pytest.mark.slow

RETENTION = Retention(max_files=2, sandbox_share=65536, control_share=1 << 20, closed_sandboxes=2)
C = f"sbx-{'c' * 24}"


def opened(directory: Path, retention: Retention = RETENTION) -> Log:
    return Log.open(
        directory, boot="one", clock=lambda: "2026-01-01T00:00:00.000Z", max_file_bytes=65536, retention=retention
    )


def write(log: Log, sandbox: str, first: int, count: int, size: int = 400) -> None:
    for number in range(first, first + count):
        said = {"kind": "dns", "decision": "deny", "producer": "gateway", "sandbox": sandbox}
        log.append([ChainEntry(sandbox, {**said, "host": f"{number}.example", "reason": "x" * size})])


def retire(log: Log) -> None:
    while log.retirable:
        log.retire()


def shown(directory: Path, sandbox: str) -> list[str]:
    out = StringIO()
    assert cli.tail(directory, sandbox=sandbox, output="json", out=out) == 0
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    return [record["host"] for record in records if record["kind"] == "dns"]


def flooded(directory: Path) -> Log:
    """Return a log in which one sandbox wrote few records and another one then filled thirty files."""
    log = opened(directory)
    write(log, A, 0, 5)
    write(log, B, 0, 3000, 500)
    write(log, A, 5, 1)
    retire(log)
    return log


def test_a_sandbox_that_floods_the_log_pushes_out_its_own_records_only(tmp_path: Path) -> None:
    log = flooded(tmp_path / "log")
    log.close()
    assert [f"{number}.example" for number in range(6)] == shown(tmp_path / "log", A)
    newest = shown(tmp_path / "log", B)
    assert [f"{number}.example" for number in range(3000 - len(newest), 3000)] == newest
    assert 100 < len(newest) < 1000
    found = verify(tmp_path / "log")
    assert [] == found.findings
    assert any("retired by policy: the beginnings of" in note for note in found.notes)


def test_the_disk_that_a_log_takes_has_a_bound(tmp_path: Path) -> None:
    log = opened(tmp_path / "log")
    sizes = []
    for step in range(8):
        write(log, A, 1000 * step, 1000, 500)
        retire(log)
        sizes.append(sum(path.stat().st_size for path in (tmp_path / "log").rglob("*") if path.is_file()))
    log.close()
    control = sum(path.stat().st_size for path in (tmp_path / "log/chains").glob("control.*"))
    assert sizes[-1] - control < 2 * 65536 + 3 * 65536 + 50_000


def test_closed_sandboxes_go_as_a_whole_and_the_oldest_first(tmp_path: Path) -> None:
    log = opened(tmp_path / "log")
    names = [f"sbx-{number}" for number in range(5)]
    for name in names:
        write(log, name, 0, 3)
        log.close_chain(name)
        write(log, A, 0, 150)
    write(log, A, 0, 500)
    retire(log)
    log.close()
    assert [0, 0, 0, 3, 3] == [len(shown(tmp_path / "log", name)) for name in names]
    found = verify(tmp_path / "log")
    assert [] == found.findings
    assert "retired by policy: 3 chains of closed sandboxes" in found.notes


def test_a_chain_that_ends_and_begins_again_is_verified_in_both_lives(tmp_path: Path) -> None:
    log = opened(tmp_path / "log")
    for _ in range(3):
        write(log, A, 0, 3)
        log.close_chain(A)
        write(log, B, 0, 150)
    write(log, B, 0, 500)
    retire(log)
    log.close()
    assert 9 == len(shown(tmp_path / "log", A))
    assert [] == verify(tmp_path / "log").findings


def test_a_restarted_writer_goes_on_with_what_is_kept(tmp_path: Path) -> None:
    flooded(tmp_path / "log").close()
    for step in range(3):
        log = opened(tmp_path / "log")
        write(log, A, 6 + step, 1)
        write(log, B, 0, 400, 500)
        retire(log)
        log.close()
        assert [] == verify(tmp_path / "log").findings
    assert [f"{number}.example" for number in range(9)] == shown(tmp_path / "log", A)


class Crash(Exception):
    """An exception that simulates the end of the process."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["split", "write_atomically", "sync_directory", "sweep", "unlink", "sign_anchor"])
def test_a_crash_while_a_file_is_retired_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    log = opened(tmp_path / "log")
    write(log, A, 0, 5)
    write(log, B, 0, 400, 500)
    assert log.retirable
    places: dict[str, Any] = {"unlink": Path, "write_atomically": shares, "sync_directory": shares}
    place = places.get(step, file_sink)
    real = getattr(place, step)

    def crash(*arguments: Any, **named: Any) -> Any:
        if when == "after":
            real(*arguments, **named)
        raise Crash

    monkeypatch.setattr(place, step, crash)
    with pytest.raises(Crash):
        retire(log)
    left = Path(shutil.copytree(tmp_path / "log", tmp_path / "left"))
    monkeypatch.undo()
    assert [] == verify(left).findings
    assert [f"{number}.example" for number in range(5)] == shown(left, A)

    again = opened(left)
    retire(again)
    again.close()
    assert [] == verify(left).findings
    assert [f"{number}.example" for number in range(5)] == shown(left, A)
    assert {"chains", "chains.json"} <= {path.name for path in left.iterdir()}


def _segments(log: Path, chain: str) -> list[Path]:
    return sorted((log / "chains").glob(f"{chain}.*"))


def _edit(log: Path) -> None:
    path = _segments(log, A)[0]
    path.write_bytes(path.read_bytes().replace(b"3.example", b"4.example"))


def _cut(log: Path) -> None:
    path = _segments(log, A)[0]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def _behead(log: Path) -> None:
    path = _segments(log, A)[0]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))


def _swap(log: Path) -> None:
    one, two = _segments(log, A)[0], _segments(log, B)[0]
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def _disown(log: Path) -> None:
    """Remove the sandbox's chain from `chains.json`."""
    data = json.loads((log / "chains.json").read_bytes())
    del data["chains"][A]
    (log / "chains.json").write_text(json.dumps(data))


def _drop_statement(log: Path) -> None:
    (log / "chains.json").unlink()


@pytest.mark.parametrize("attack", [_edit, _cut, _behead, _swap, _disown, _drop_statement])
def test_what_is_kept_cannot_be_changed_unnoticed(tmp_path: Path, attack: Callable[[Path], None]) -> None:
    flooded(tmp_path / "log").close()
    assert 0 == cli.verify(tmp_path / "log", out=StringIO())
    attack(tmp_path / "log")
    assert 1 == cli.verify(tmp_path / "log", out=StringIO())


def _resigned(log: Path, change: Callable[[Kept], None]) -> None:
    """Change the statement about kept records as auditd could: its present key signs it again."""
    kept = shares.parse_kept((log / "chains.json").read_bytes())
    change(kept)
    shares.write_kept(log, private_keys(log)[0], kept)


def _renamed(log: Path) -> None:
    """Store the records of one sandbox under the name of another one."""

    def change(kept: Kept) -> None:
        kept.chains[C] = kept.chains.pop(A)

    for path in _segments(log, A):
        path.rename(path.with_name(path.name.replace(A, C)))
    _resigned(log, change)


def _without(chain: str) -> Callable[[Path], None]:
    return lambda log: _resigned(log, lambda kept: kept.chains.pop(chain) and None)


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (_renamed, f"chains/{C} line 1: this is a line of chain {A}"),
        (_without("control"), "nothing is kept of the control chain, which never goes as a whole"),
        (_without(A), f"nothing is kept of chain {A}, which was open"),
        (lambda log: _resigned(log, lambda _: None), None),
    ],
    ids=["renamed", "no control chain", "no sandbox's chain", "control"],
)
def test_what_is_kept_has_each_chain_under_its_own_name(
    tmp_path: Path, attack: Callable[[Path], None], why: str | None
) -> None:
    """The check also applies to a statement that the key of the log has signed."""
    flooded(tmp_path / "log").close()
    attack(tmp_path / "log")
    findings = verify(tmp_path / "log").findings
    assert (why is None) == (findings == [])
    assert why is None or any(text.endswith(why) for text in findings), findings


NAMES = ["", "..", "../x", "a/b", "A", "-a", "a b", "a\n", "a\0", "é", "a" * 64]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_name_of_a_chain_is_read_from_no_statement(name: str) -> None:
    """The check is necessary because names become paths."""
    one = {"seq": 0, "hash": ZERO, "segments": [{"file": 1, "size": 1, "seq": 1, "hash": ZERO}]}
    said = {"file": 2, "began": 1, "expired": 0, "policy": {}}
    assert ["a" * 63] == list(shares.parse_kept(json.dumps({**said, "chains": {"a" * 63: one}}).encode()).chains)
    with pytest.raises(ValueError, match="not a chain's share"):
        shares.parse_kept(json.dumps({**said, "chains": {name: one}}).encode())


@pytest.mark.parametrize("name", NAMES)
def test_a_line_of_no_chain_is_split_into_no_file(tmp_path: Path, name: str) -> None:
    said = {"kind": "dns", "decision": "deny", "producer": "gateway", "ts": "2026-01-01T00:00:00.000Z"}
    line, _ = seal(said | {"chain": name}, ChainHead())
    (tmp_path / "file").write_bytes(line)
    with pytest.raises(LineError, match="a line has no chain"):
        shares.split(tmp_path, 1, tmp_path / "file", Kept(), RETENTION, Ed25519PrivateKey.generate())
    assert [] == list((tmp_path / "chains").iterdir())


def test_a_segment_that_was_deleted_makes_the_log_unusable(tmp_path: Path) -> None:
    flooded(tmp_path / "log").close()
    os.unlink(_segments(tmp_path / "log", A)[0])
    assert 2 == cli.verify(tmp_path / "log", out=StringIO())


def test_an_anchor_holds_after_its_file_is_retired(tmp_path: Path) -> None:
    log = opened(tmp_path / "log")
    write(log, A, 0, 5)
    write(log, B, 0, 5)
    log.close()
    kept = tmp_path / "anchor"
    assert 0 == cli.anchor(tmp_path / "log", output=kept)
    log = opened(tmp_path / "log")
    write(log, B, 5, 1000, 500)
    retire(log)
    log.close()
    assert 0 == cli.verify(tmp_path / "log", anchors=[kept], out=StringIO())
    forged = json.loads(kept.read_text())
    forged["heads"][A][1] = "1" * 64
    kept.write_text(json.dumps(forged) + "\n")
    out = StringIO()
    assert 1 == cli.verify(tmp_path / "log", anchors=[kept], out=out)
    assert f"chain {A}: sequence 5 is not as it was anchored" in out.getvalue()
