"""The goals of the benchmark `gateway`: each compares two figures of the same run. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.figures import of_connections

CONNECTIONS = (1, 16, 256)
BARE, ENVOY, MITMPROXY, SQUID = "no gateway", "Envoy", "mitmproxy", "Squid"
SPLICED, INSPECTED, INJECTED, NEW_HEADS = "spliced", "inspected", "injected", "injected, each head new"
OURS = (SPLICED, INSPECTED, INJECTED, NEW_HEADS)
WAYS = (BARE, *OURS, ENVOY, MITMPROXY, SQUID)
HALF_LOAD = "p99 at half load"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A goal for the median of a figure, compared with that of `peer`.

    Attributes:
        least, most: of `figure` divided by `peer`. One of them is given, or `added`.
        added: how much more than `peer` the figure may be, in its own unit.
    """

    figure: str
    peer: str
    least: float | None = None
    most: float | None = None
    added: float | None = None

    def judged(self, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the goal with its value and whether it is met: None if a figure is missing."""
        bound = {"at_least": self.least, "at_most": self.most, "adds_at_most": self.added}
        goal: dict[str, Any] = {"figure": self.figure, "peer": self.peer}
        goal |= {name: number for name, number in bound.items() if number is not None}
        if self.figure not in rows or self.peer not in rows:
            return {**goal, "value": None, "unit": "", "met": None}
        ours, peers = rows[self.figure]["median"], rows[self.peer]["median"]
        if self.added is not None:
            value, unit, met = ours - peers, rows[self.figure]["unit"], ours - peers <= self.added
        else:
            value, unit = ours / peers, "x"
            met = value >= self.least if self.least is not None else self.most is not None and value <= self.most
        return {**goal, "value": value, "unit": unit, "met": met}


def _goals() -> Iterator[Comparison]:
    for what in (f"requests, {of_connections(number)}" for number in CONNECTIONS):
        yield Comparison(f"{what}: {INJECTED}", f"{what}: {ENVOY}", least=1.0)
        yield Comparison(f"{what}: {INJECTED}", f"{what}: {MITMPROXY}", least=20.0)
        yield Comparison(f"{what}: {NEW_HEADS}", f"{what}: {ENVOY}", least=0.5)
        yield Comparison(f"{what}: {SPLICED}", f"{what}: {ENVOY}", least=1.5)
    yield Comparison(f"p50, 1 connection: {INJECTED}", f"p50, 1 connection: {ENVOY}", most=1.0)
    yield Comparison(f"{HALF_LOAD}: {INJECTED}", f"{HALF_LOAD}: {BARE}", added=2.0)
    yield Comparison(f"new TLS connections: {INJECTED}", f"new TLS connections: {ENVOY}", least=0.8)
    yield Comparison(f"down: {SPLICED}", f"down: {BARE}", least=0.85)
    yield Comparison(f"up: {SPLICED}", f"up: {BARE}", least=0.85)


GOALS = tuple(_goals())


def judge(described: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return every goal with its value; none if the run has no figure of any goal.

    Args:
        described: rows of `figures.describe`.
    """
    rows = {str(row["name"]): row for row in described}
    if not any(name in rows for goal in GOALS for name in (goal.figure, goal.peer)):
        return []
    return [goal.judged(rows) for goal in GOALS]


def lines(judged: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line of text for each goal."""
    return [_line(goal) for goal in judged]


def _line(goal: Mapping[str, Any]) -> str:
    state = {True: "met", False: "MISSED", None: "not measured"}[goal["met"]]
    seen = "" if goal["met"] is None else f"{goal['value']:.2f} {goal['unit']}"
    wanted = next(
        f"{sign} {goal[name]:g} {unit}"
        for name, sign, unit in (("at_least", ">=", "x"), ("at_most", "<=", "x"), ("adds_at_most", "<= +", "ms"))
        if name in goal
    )
    return f"  {state:12} {seen:>12}  {wanted:10}  {goal['figure']}, against {goal['peer'].rpartition(': ')[2]}"
