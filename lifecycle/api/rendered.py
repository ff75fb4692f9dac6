"""The JSON text of sandboxes, kept until their rows change: most lists and gets show the same rows again."""

import json
from collections.abc import Iterable
from typing import Any

from fastapi.responses import Response

from lifecycle.api import models
from lifecycle.sandboxes.registry import Sandbox

_MOST = 4096
_MOST_BYTES = 16 * 1024
"""A longer text is not kept."""


class Rendered:
    """The texts of the last sandboxes that were shown."""

    def __init__(self) -> None:
        self._texts: dict[str, tuple[Sandbox, bytes]] = {}

    def one(self, row: Sandbox) -> bytes:
        """Return the text of one sandbox."""
        kept = self._texts.get(row.id)
        if kept is not None and (kept[0] is row or kept[0] == row):
            return kept[1]
        text = _encoded(models.shown(row))
        if len(text) <= _MOST_BYTES:
            if len(self._texts) >= _MOST:
                self._texts.clear()
            self._texts[row.id] = row, text
        return text

    def page(self, rows: Iterable[Sandbox], pagination: dict[str, Any]) -> bytes:
        """Return the text of a page of sandboxes."""
        return b'{"items":[%b],"pagination":%b}' % (b",".join(map(self.one, rows)), _encoded(pagination))


def answer(text: bytes) -> Response:
    """Return the answer that has a JSON text."""
    return Response(text, media_type="application/json")


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
