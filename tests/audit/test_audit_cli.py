"""The output of the audit commands for people and for a SIEM."""

import asyncio
import json
import os
import threading
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from audit import cli
from tests.audit.conftest import A, B, NewAuditd


def _tail(log: Path, **options: Any) -> list[str]:
    out = StringIO()
    assert cli.tail(log, out=out, **options) == 0
    return out.getvalue().splitlines()


def test_denied_shows_only_denials(written: Path) -> None:
    lines = _tail(written, denied=True)
    assert len(lines) == 200
    assert all(" DENY " in line and "b.example" in line for line in lines)


def test_one_sandbox_is_shown_alone_with_what_the_control_plane_did_to_it(written: Path) -> None:
    records = [json.loads(line) for line in _tail(written, sandbox=A, output="json")]
    assert {record["sandbox"] for record in records} == {A}
    assert {record["kind"] for record in records} == {"request", "vault.open"}
    assert _tail(written, sandbox="sbx-none") == []
    assert len(_tail(written, sandbox=B)) == 200


def test_ecs_output_is_one_event_per_line(written: Path) -> None:
    events = [json.loads(line) for line in _tail(written, output="ecs")]
    assert len(events) == 410
    assert {event["ecs.version"] for event in events} == {"8.11.0"}


def test_a_damaged_line_is_shown_as_damaged(log_copy: Path) -> None:
    path = log_copy / "audit-000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b"a.example", b"\x1b.example", 1))
    lines = _tail(log_copy)
    assert [line for line in lines if line.startswith("!!")] == [
        "!! audit-000001.jsonl: damaged line: content does not match its hash"
    ]
    assert len(lines) == 410


async def test_follow_shows_what_arrives_across_files(tmp_path: Path, new_auditd: NewAuditd) -> None:
    auditd = await new_auditd(tmp_path, max_file_bytes=65536).start()
    client = await auditd.attach(A)
    await client.accept("dns", "allow", host="first.example")
    read, write = os.pipe()
    done = threading.Event()
    with os.fdopen(read) as reader, os.fdopen(write, "w") as writer:
        follower = asyncio.create_task(
            asyncio.to_thread(cli.tail, auditd.log, follow=True, out=writer, until=done.is_set)
        )
        first = await asyncio.to_thread(reader.readline)
        assert "first.example" in first
        await asyncio.gather(*(client.accept("dns", "deny", reason="x" * 500) for _ in range(200)))
        await asyncio.gather(*(client.accept("dns", "deny", reason="x" * 500) for _ in range(200)))
        await client.accept("dns", "allow", host="last.example")
        for _ in range(400):
            assert "DENY" in await asyncio.to_thread(reader.readline)
        assert "last.example" in await asyncio.to_thread(reader.readline)
        done.set()
        assert await follower == 0
    await auditd.stop()
    assert len(auditd.files()) > 1


@pytest.mark.parametrize("name", [".", "absent"])
def test_tail_of_no_log_is_a_usage_error(tmp_path: Path, name: str) -> None:
    assert cli.tail(tmp_path / name, out=StringIO()) == 2
