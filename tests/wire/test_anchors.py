"""An anchor is one line of text, and is parsed from it."""

import json
from typing import Any

import pytest

from wire.anchors import AnchorError, line, read_line
from wire.api.auditd import Anchor, Head

ANCHOR = Anchor(
    version=1,
    ts="2026-01-01T00:00:00.000Z",
    identity="a" * 64,
    key="b" * 64,
    file=7,
    offset=81234,
    log="c" * 64,
    heads={"control": Head(412, "d" * 64), "sbx-1": Head(17, "e" * 64)},
)
BODY: dict[str, Any] = json.loads(line(ANCHOR))


def test_an_anchor_comes_back_from_its_line() -> None:
    assert ANCHOR == read_line(line(ANCHOR))
    assert [412, "d" * 64] == BODY["heads"]["control"]
    assert 1 == line(ANCHOR).count(b"\n") and line(ANCHOR).endswith(b"\n")


@pytest.mark.parametrize("name", BODY)
def test_an_anchor_has_all_of_its_members(name: str) -> None:
    with pytest.raises(AnchorError):
        read_line(json.dumps({key: value for key, value in BODY.items() if key != name}).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"more": 1},
        {"file": -1},
        {"log": "x"},
        {"heads": {"sbx-1": [1]}},
        {"heads": {"sbx-1": [-1, "a" * 64]}},
    ],
)
def test_another_body_is_no_anchor(change: dict[str, Any]) -> None:
    with pytest.raises(AnchorError):
        read_line(json.dumps({**BODY, **change}).encode())


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_text_that_is_no_object_is_no_anchor(text: bytes) -> None:
    with pytest.raises(AnchorError):
        read_line(text)
