"""The kept JSON texts of sandboxes: always those of the row that is shown, and bounded."""

import json
from dataclasses import replace

import pytest

from lifecycle.api import models, rendered
from lifecycle.api.rendered import Rendered
from lifecycle.sandboxes.registry import Sandbox, State

ROW = Sandbox("one", State.RUNNING, "R", "é", 1795569600.0, 1.0, None, "image", ("true",), "runc", {"team": "größe"})


def test_a_text_is_that_of_its_row() -> None:
    texts = Rendered()
    for row in (ROW, ROW, replace(ROW), replace(ROW, metadata={"team": "b"}), ROW):
        assert models.shown(row) == json.loads(texts.one(row))
    assert texts.one(ROW) is texts.one(replace(ROW))
    page = json.loads(texts.page([ROW, replace(ROW, id="two")], {"page": 1}))
    assert {"items": [models.shown(ROW), models.shown(replace(ROW, id="two"))], "pagination": {"page": 1}} == page


def test_only_some_short_texts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendered, "_MOST", 3)
    texts = Rendered()
    long = replace(ROW, entrypoint=("x" * 20_000,))
    assert texts.one(long) is not texts.one(long)
    for number in range(10):
        texts.one(replace(ROW, id=f"row{number}"))
    assert len(texts._texts) <= 3
