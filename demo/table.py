"""The table of the demo's results."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One attempt: its place, the attempt itself, the expected and the observed result at the far end."""

    place: str
    tried: str
    expected: str
    observed: str
    as_expected: bool


def print_table(rows: list[Row]) -> None:
    """Print all rows, the unexpected ones marked."""
    if not rows:
        return
    titles = Row("where", "tried", "expected", "observed at the far end", True)
    widths = [max(len(getattr(row, name)) for row in (titles, *rows)) for name in ("place", "tried", "expected")]
    print()
    for row in (titles, *rows):
        cells = (row.place, row.tried, row.expected)
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print(f"{'  ' if row.as_expected else '! '}{line}  {row.observed}")
    print()
