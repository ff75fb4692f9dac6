"""Every way to change a finished log makes verification fail with a reason. The unchanged log passes."""

import hashlib
import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from audit import cli
from audit.chain import ZERO, ChainHead, extend_log, seal
from tests.audit.conftest import A, B, verify

type Lines = list[bytes]


def _load(log: Path, number: int) -> Lines:
    return (log / f"audit-{number:06d}.jsonl").read_bytes().splitlines(keepends=True)


def _store(log: Path, number: int, lines: Lines) -> None:
    (log / f"audit-{number:06d}.jsonl").write_bytes(b"".join(lines))


def _newest(log: Path) -> int:
    return len(list(log.glob("audit-*.jsonl")))


def _edit(log: Path) -> None:
    lines = _load(log, 2)
    lines[5] = lines[5].replace(b"example", b"exbmple")
    _store(log, 2, lines)


def _delete(log: Path) -> None:
    lines = _load(log, 2)
    del lines[5]
    _store(log, 2, lines)


def _delete_a_whole_sandbox(log: Path) -> None:
    for number in range(1, _newest(log) + 1):
        _store(log, number, [line for line in _load(log, number) if f'"chain":"{B}"'.encode() not in line])


def _reorder(log: Path) -> None:
    lines = _load(log, 2)
    lines[5], lines[7] = lines[7], lines[5]
    _store(log, 2, lines)


def _reorder_between_chains(log: Path) -> None:
    lines = _load(log, 2)
    place = next(n for n in range(3, len(lines)) if (b"a.example" in lines[n]) and (b"b.example" in lines[n + 1]))
    lines[place], lines[place + 1] = lines[place + 1], lines[place]
    _store(log, 2, lines)


def _duplicate(log: Path) -> None:
    lines = _load(log, 2)
    _store(log, 2, [*lines[:6], lines[5], *lines[6:]])


def _insert_new_chain(log: Path) -> None:
    record = json.loads(_load(log, 2)[5])
    for name in ("hash", "seq", "prev"):
        del record[name]
    line, _ = seal({**record, "chain": "sbx-new", "sandbox": "sbx-new"}, ChainHead())
    lines = _load(log, 2)
    _store(log, 2, [*lines[:5], line, *lines[5:]])


def _truncate_line(log: Path) -> None:
    _store(log, _newest(log), _load(log, _newest(log))[:-1])


def _truncate_byte(log: Path) -> None:
    lines = _load(log, _newest(log))
    _store(log, _newest(log), [*lines[:-1], lines[-1][:-1]])


def _truncate_inner_file(log: Path) -> None:
    _store(log, 2, _load(log, 2)[:-1])


def _empty_newest(log: Path) -> None:
    _store(log, _newest(log), [])


def _drop_first(log: Path) -> None:
    (log / "audit-000001.jsonl").unlink()


def _drop_middle(log: Path) -> None:
    (log / "audit-000002.jsonl").unlink()


def _drop_newest(log: Path) -> None:
    (log / f"audit-{_newest(log):06d}.jsonl").unlink()


def _drop_all(log: Path) -> None:
    for path in log.glob("audit-*.jsonl"):
        path.unlink()


def _swap_files(log: Path) -> None:
    one, two = _load(log, 1), _load(log, 2)
    _store(log, 1, two)
    _store(log, 2, one)


def _exchange(record: dict[str, Any]) -> None:
    other = {A: B, B: A}
    record["chain"] = other.get(record["chain"], record["chain"])
    if "sandbox" in record:
        record["sandbox"] = other.get(record["sandbox"], record["sandbox"])


def _swap_sandboxes(log: Path) -> None:
    """Exchange the names of two sandboxes in each line and compute its hash again."""
    for number in range(1, _newest(log) + 1):
        lines = []
        for line in _load(log, number):
            swapped = line.replace(A.encode(), b"@").replace(B.encode(), A.encode()).replace(b"@", B.encode())
            lines.append(_rehash_line(swapped))
        _store(log, number, lines)


def _swap_sandboxes_consistently(log: Path) -> None:
    _rewrite(log, _exchange)


def _rehash_line(line: bytes) -> bytes:
    body = line[: line.rindex(b',"hash":"')] + b"}"
    return body[:-1] + b',"hash":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def _rewrite(log: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change records and make all data consistent again, except the signatures, which need the key."""
    heads: dict[str, ChainHead] = {}
    state = ZERO
    for number in range(1, _newest(log) + 1):
        lines = []
        for line in _load(log, number):
            record = json.loads(line)
            for name in ("hash", "seq", "prev"):
                del record[name]
            change(record)
            if "log" in record:
                record["log"] = state
            if "heads" in record:
                record["heads"] = {chain: [head.seq, head.hash] for chain, head in heads.items()}
            chain = record["chain"]
            again, heads[chain] = seal(record, heads.get(chain, ChainHead()))
            state = extend_log(state, again)
            lines.append(again)
        _store(log, number, lines)


def _rehash(log: Path) -> None:
    def allow(record: dict[str, Any]) -> None:
        if record.get("path") == "/7":
            record["decision"] = "allow"

    _rewrite(log, allow)


def _rehash_tail(log: Path) -> None:
    """Change the host of a record behind the last signed checkpoint, without the shutdown's checkpoint."""
    lines = _load(log, _newest(log))[:-1]
    record = json.loads(lines[-1])
    record["host"] = "other.example"
    lines[-1] = _rehash_line(json.dumps(record, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    _store(log, _newest(log), lines)


def _append_copy(log: Path) -> None:
    record = json.loads(_load(log, _newest(log))[-1])
    head = ChainHead(record["seq"], record["hash"])
    said = {"chain": "control", "kind": "alarm", "decision": "deny", "producer": "root", "ts": record["ts"]}
    line, _ = seal(said, head)
    _store(log, _newest(log), [*_load(log, _newest(log)), line])


def _half_line_after_the_end(log: Path) -> None:
    _store(log, _newest(log), [*_load(log, _newest(log)), b'{"chain":"con'])


def _drop_heads(log: Path) -> None:
    (log / "heads.json").unlink()


def _unsigned_heads(log: Path) -> None:
    data = json.loads((log / "heads.json").read_bytes())
    (log / "heads.json").write_text(json.dumps({**data, "offset": data["offset"] - 10}))


ATTACKS: list[tuple[Callable[[Path], None], str]] = [
    (_edit, "content does not match its hash"),
    (_delete, "follows"),
    (_delete_a_whole_sandbox, "says about the lines before"),
    (_reorder, "follows"),
    (_reorder_between_chains, "says about the lines before"),
    (_duplicate, "follows"),
    (_insert_new_chain, "says about the lines before"),
    (_truncate_line, "the end of the log is missing"),
    (_truncate_byte, "the end of the log is missing"),
    (_truncate_inner_file, "says about the lines before"),
    (_empty_newest, "the end of the log is missing"),
    (_drop_first, "file 1 is missing"),
    (_drop_middle, "file 2 is missing"),
    (_drop_newest, "the end of the log is missing"),
    (_drop_all, "the end of the log is missing"),
    (_swap_files, "this is the content of file"),
    (_swap_sandboxes, "does not continue the line before it"),
    (_swap_sandboxes_consistently, "not signed by this log's key"),
    (_rehash, "not signed by this log's key"),
    (_rehash_tail, "not the one that was signed|the end of the log is missing"),
    (_append_copy, "lines follow after the signed end"),
    (_half_line_after_the_end, "half a line follows"),
    (_drop_heads, "heads.json is missing"),
    (_unsigned_heads, "heads.json is missing or not signed"),
]


def test_the_untouched_log_passes(log_copy: Path) -> None:
    """The control of all tests below."""
    out = StringIO()
    assert cli.verify(log_copy, out=out) == 0
    assert out.getvalue().startswith("ok: ")
    assert verify(log_copy).notes == []


@pytest.mark.parametrize(("attack", "why"), ATTACKS, ids=[attack.__name__[1:] for attack, _ in ATTACKS])
def test_a_changed_log_fails_with_a_reason(attack: Callable[[Path], None], why: str, log_copy: Path) -> None:
    attack(log_copy)
    out = StringIO()
    assert cli.verify(log_copy, out=out) == 1
    assert re.search(f"TAMPERED: .*(?:{why})", out.getvalue()), out.getvalue()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_single_changed_byte_in_any_file_is_detected(data: st.DataObject, log_copy: Path) -> None:
    path = log_copy / f"audit-{data.draw(st.integers(1, _newest(log_copy))):06d}.jsonl"
    original = path.read_bytes()
    damaged = bytearray(original)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    try:
        assert verify(log_copy).findings != []
    finally:
        path.write_bytes(original)


def _misfiled(sandbox: str | None) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        if record["chain"] == A and record.get("path", "").startswith("/7x"):
            del record["sandbox"]
            record |= {} if sandbox is None else {"sandbox": sandbox}

    return change


@pytest.mark.parametrize("sandbox", [B, f"{A}x", A.upper(), None])
def test_a_record_in_the_chain_of_another_sandbox_is_found(log_copy: Path, sandbox: str | None) -> None:
    """The record is otherwise consistent: all hashes are computed again."""
    assert f"chain {A} holds a record of sandbox" not in str(verify(log_copy).findings)
    _rewrite(log_copy, _misfiled(sandbox))
    assert f"chain {A} holds a record of sandbox {sandbox}" in str(verify(log_copy).findings)


def _filed_under(chain: str) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        if record["kind"] == "request" and record["chain"] == A:
            record["chain"] = chain

    return change


@pytest.mark.parametrize("chain", [B, "control", "", "../x", f'{A}"', f"{A}\\", f"{A}\n"])
def test_a_chain_under_another_name_is_found(log_copy: Path, chain: str) -> None:
    _rewrite(log_copy, _filed_under(chain))
    findings = str(verify(log_copy).findings)
    why = "gateway does not write into chain control" if chain == "control" else f"holds a record of sandbox {A}"
    assert why in findings


def test_another_key_than_the_one_kept_elsewhere_fails(log_copy: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    other = Ed25519PrivateKey.generate().public_key()
    kept = tmp_path / "kept.pem"
    kept.write_bytes(other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert cli.verify(log_copy, key=kept, out=StringIO()) == 1
    assert cli.verify(log_copy, key=log_copy / "keys/public.pem", out=StringIO()) == 0


def test_what_is_no_log_is_neither_right_nor_tampered(tmp_path: Path) -> None:
    assert cli.verify(tmp_path, out=StringIO()) == 2
    assert cli.verify(tmp_path / "absent", out=StringIO()) == 2
