"""The rendering of one record for people and for a SIEM."""

import shlex
from typing import Any

import pytest

from audit import render
from tests.audit.conftest import A

RECORD: dict[str, Any] = {
    "ts": "2026-01-01T00:00:00.000Z",
    "chain": A,
    "sandbox": A,
    "generation": 1,
    "producer": "gateway",
    "seq": 7,
    "prev": "0" * 64,
    "hash": "1" * 64,
    "kind": "request",
    "decision": "deny",
    "rule": "default",
    "reason": "no rule allows it",
    "method": "GET",
    "scheme": "https",
    "host": "a.example",
    "port": 443,
    "path": r"/x\u{1b}[2J",
    "status": 403,
}


def test_a_line_has_sandbox_action_place_and_reason() -> None:
    assert render.line(RECORD) == (
        f"2026-01-01T00:00:00.000Z DENY    {A}#7 request GET https://a.example:443/x\\u{{1b}}[2J "
        'reason="no rule allows it" rule=default status=403'
    )


@pytest.mark.parametrize("name", ["user_agent", "reason", "rule", "host", "path", "method"])
def test_no_value_passes_for_further_fields(name: str) -> None:
    """A sandbox can send text that looks like fields. A parser that respects quotes reads it as one word."""
    honest = [word.partition("=")[0] for word in shlex.split(render.line({**RECORD, name: "x"}))]
    for forged in ('x" decision=allow rule="y', "x decision=allow rule=y"):
        names = [word.partition("=")[0] for word in shlex.split(render.line({**RECORD, name: forged}))]
        assert len(honest) == len(names)
        assert "decision" not in names


def test_ecs_names_every_field_once() -> None:
    event = render.ecs(RECORD)
    assert event["event.type"] == ["denied"]
    assert event["event.outcome"] == "failure"
    assert (event["destination.domain"], event["url.path"], event["rule.id"]) == (
        "a.example",
        RECORD["path"],
        "default",
    )
    assert (event["sallyport.sandbox"], event["sallyport.prev"], event["event.hash"]) == (A, "0" * 64, "1" * 64)


def test_ecs_of_a_lookup_has_the_question() -> None:
    event = render.ecs({**RECORD, "kind": "dns", "decision": "allow", "qtype": "A"})
    assert (event["dns.question.name"], event["dns.question.type"]) == ("a.example", "A")
    assert event["event.type"] == ["allowed"]
