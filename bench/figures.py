"""Figures: samples of one quantity, their summary, a table of them and one JSON document. Pure except `machine`."""

import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HEAD = ("", "n", "min", "median", "p95", "p99", "max", "unit", "ratio", "goal")


@dataclass(frozen=True, slots=True)
class Goal:
    """An upper limit, inclusive, for a figure: `of` is `median` or `p99`."""

    of: str
    limit: float


@dataclass(frozen=True, slots=True)
class Figure:
    """Samples of one quantity.

    Attributes:
        peer: the name of the figure of the same run with which this one is compared.
    """

    name: str
    unit: str
    values: Sequence[float]
    peer: str | None = None
    goal: Goal | None = None

    def summary(self) -> dict[str, float]:
        """Return count, extremes and quantiles."""
        ordered = sorted(self.values)
        return {
            "n": len(ordered),
            "min": ordered[0],
            "median": statistics.median(ordered),
            "p95": quantile(ordered, 0.95),
            "p99": quantile(ordered, 0.99),
            "max": ordered[-1],
        }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile of sorted samples."""
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


def of_connections(number: int) -> str:
    """Return the part of a figure's name that says how many connections are open."""
    return "1 connection" if number == 1 else f"{number} connections"


def describe(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Return each figure with its summary, its ratio to its peer and whether its goal is met, ready for JSON."""
    medians = {figure.name: figure.summary()["median"] for figure in figures}
    described = []
    for figure in figures:
        row: dict[str, Any] = {"name": figure.name, "unit": figure.unit, **figure.summary()}
        if figure.peer is not None:
            row |= {"peer": figure.peer, "ratio": row["median"] / medians[figure.peer]}
        if figure.goal is not None:
            met = row[figure.goal.of] <= figure.goal.limit
            row["goal"] = {"of": figure.goal.of, "at_most": figure.goal.limit, "met": met}
        described.append({**row, "values": list(figure.values)})
    return described


def table(described: Sequence[dict[str, Any]]) -> str:
    """Return figures as a text table."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for row in described:
        goal = row.get("goal")
        ratio = row.get("ratio")
        rows.append(
            (
                row["name"],
                str(row["n"]),
                *(f"{row[key]:.1f}" for key in _HEAD[2:7]),
                row["unit"],
                "" if ratio is None else f"{ratio:.2f} x {row['peer']}",
                "" if goal is None else f"{goal['of']} <= {goal['at_most']:g}: {'met' if goal['met'] else 'MISSED'}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    left = (0, 7, 8, 9)
    lines = []
    for cells_of_row in rows:
        cells = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells_of_row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Return a description of the host and the versions with which was measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())
    memory = int(Path("/proc/meminfo").read_text().split()[1]) >> 10
    return {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": model,
        "cpus": os.cpu_count(),
        "memory_mib": memory,
        "kernel": platform.release(),
        "load": list(os.getloadavg()),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("mitmproxy", "opensandbox", "uvloop")},
            "dockerd": _first_line("dockerd", "--version"),
            "runc": _first_line("runc", "--version"),
            "runsc": _first_line(os.environ["SALLYPORT_RUNSC"], "--version"),
        },
    }


def _first_line(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.partition("\n")[0]
