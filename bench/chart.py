"""A chart of the benchmark `gateway` for the documents, as SVG. Pure."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bench.goals import OURS, WAYS

_CHARTED = ("requests, ", "new TLS connections", "down", "up")
_LEFT, _RIGHT, _BAR, _GAP, _TOP = 190, 110, 16, 6, 34
_WIDTH = 720


def draw(described: Sequence[Mapping[str, Any]]) -> str:
    """Return bars of requests, new connections and bytes of each path, a group for each quantity; empty without any.

    Args:
        described: rows of `figures.describe`.
    """
    groups: dict[str, list[tuple[str, float]]] = {}
    for row in described:
        what, _, way = row["name"].partition(": ")
        if what.startswith(_CHARTED) and way in WAYS:
            groups.setdefault(f"{what} ({row['unit']})", []).append((way, row["median"]))
    if not groups:
        return ""
    parts, y = [], 0
    for title, bars in groups.items():
        parts.append(_text(4, y + 22, title, 'font-weight="bold"'))
        y += _TOP
        longest = max(value for _, value in bars)
        for way, value in bars:
            length = (_WIDTH - _LEFT - _RIGHT) * value / longest
            colour = "#3b6ea5" if way in OURS else "#9aa5b1"
            parts.append(_text(_LEFT - 8, y + _BAR - 4, way, 'text-anchor="end"'))
            parts.append(f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR}" fill="{colour}"/>')
            parts.append(_text(_LEFT + length + 6, y + _BAR - 4, f"{value:,.0f}", ""))
            y += _BAR + _GAP
    size = f'width="{_WIDTH}" height="{y + 8}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, *parts, "</svg>", ""])


def _text(x: float, y: float, content: str, attributes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(content)}</text>'
