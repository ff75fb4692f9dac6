"""The benchmarks run and give complete figures. The values of the figures are not tested."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bench import goals
from bench.chart import draw
from bench.figures import Figure, Goal, describe, quantile, table
from bench.main import main
from tests.stacks import INTERNET

_PROGRAM = """
import sys, bench.burst, bench.execd, bench.gateway, bench.listing, bench.main, bench.peers, bench.snapshot
bench.gateway.SECONDS, bench.gateway.CONNECTIONS, bench.peers.BULK_BYTES = 1, (1, 4), 10_000_000
bench.gateway.NEW_CONNECTIONS = 2
bench.execd.OPERATIONS, bench.execd.TRANSFERS, bench.execd.TRANSFER_BYTES = 4, 1, 100_000
bench.execd.SETTLE_SECONDS = 0.5
bench.listing.SECONDS, bench.burst.AT_ONCE, bench.snapshot.BYTES = 1, 2, 1_000_000
arguments = ["create", "execd", "gateway", "policy_change", "burst", "pause", "snapshot", "list", "--rounds", "1"]
sys.exit(bench.main.main(arguments, prefix=sys.argv[1]))
"""


@pytest.mark.extended
@pytest.mark.system
def test_every_benchmark_gives_a_table_and_a_document() -> None:
    """Except that of code, which `test_code_interpreter.py` runs, because the import of its image takes long."""
    run = Path(f"{os.environ['SALLYPORT_RUN_DIR']}-bench")
    with tempfile.TemporaryDirectory(prefix="sallyport-bench-home-") as home:
        Path(home).chmod(0o711)
        environment = {**os.environ, "SALLYPORT_HOME": home, "SALLYPORT_RUN_DIR": str(run)}
        command = [sys.executable, "-c", _PROGRAM, f"{INTERNET}-bench"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        subprocess.run(["rm", "-rf", str(run)], check=False)
        assert 0 == done.returncode, done.stderr[-2000:]
        (path,) = Path(home, "bench").glob("*.json")
        document = json.loads(path.read_text())
        chart = path.with_suffix(".svg").read_text()
    figures = {row["name"]: row for row in document["figures"]}
    wanted = {f"create {runtime}: {what}" for runtime in ("runc", "runsc") for what in ("to the first result", "ours")}
    ways = ("no gateway", "spliced", "inspected", "injected", "injected, each head new", "Envoy", "mitmproxy")
    wanted |= {f"{what}, 4 connections: {way}" for way in ways for what in ("requests", "p50", "p99")}
    wanted |= {f"{what}: {way}" for way in ways[1:] for what in ("memory", "processor time of a request, 1 connection")}
    wanted |= {f"up: {way}" for way in ("no gateway", "spliced", "injected", "Envoy", "mitmproxy")}
    wanted |= {f"p99 at half load: {way}" for way in ("no gateway", "injected", "Envoy")}
    wanted |= {"policy change: last flow ended at the client", "policy change: last flow ended at the far end"}
    wanted |= {f"{op} {runtime}" for op in ("pause", "resume") for runtime in ("runc", "runsc")}
    wanted |= {f"2 creates at once {runtime}: p99 by p50" for runtime in ("runc", "runsc")}
    wanted |= {f"snapshot of 1 MB and its restore {runtime}" for runtime in ("runc", "runsc")}
    wanted |= {
        f"{call}{more}" for call in ("get", "list, 20 of 1000") for more in ("", ": processor time of a request")
    }
    wanted |= {
        f"execd {runtime}: {what}" for runtime in ("runc", "runsc") for what in ("echo", "bash alone", "start to /ping")
    }
    wanted |= {f"execd runsc: {what}: the SDK against canned answers" for what in ("echo", "small file")}
    assert wanted <= set(figures)
    several = {"small file": 4, "2 creates at once": 2}
    for name, row in figures.items():
        samples = next((number for part, number in several.items() if part in name and row["unit"] == "ms"), 1)
        assert samples == row["n"], name
    differences = ("ours", "when idle")
    assert all(row["min"] > 0 for name, row in figures.items() if not name.endswith(differences))
    assert all(figures[row["peer"]] for row in figures.values() if "peer" in row)
    assert {"cpus", "kernel", "load", "versions"} <= set(document["machine"])
    assert [] == [name for name in figures if name not in done.stdout]
    measured = {goal["figure"] for goal in document["goals"] if goal["met"] is not None}
    assert {
        goal.figure for goal in goals.GOALS if "16 conn" not in goal.figure and "256" not in goal.figure
    } == measured
    assert "goals of the gateway" in done.stdout
    assert str(path) in done.stdout
    assert [] == [way for way in ways if f">{way}</text>" not in chart]


def test_a_figure_is_read_beside_its_peer_and_its_goal() -> None:
    peer = Figure("peer", "ms", [1, 2, 3])
    one = Figure("one", "ms", [2, 4, 9], "peer", Goal("median", 4))
    other = Figure("other", "ms", [2, 4, 9], None, Goal("p99", 4))

    described = describe([one, peer, other])

    assert [2.0, None, None] == [row.get("ratio") for row in described]
    assert [True, False] == [row["goal"]["met"] for row in described if "goal" in row]
    lines = table(described).splitlines()
    assert "2.00 x peer" in lines[1]
    assert lines[1].endswith("median <= 4: met")
    assert lines[3].endswith("p99 <= 4: MISSED")


@pytest.mark.parametrize(("share", "expected"), [(0.5, 10), (0.95, 19), (0.99, 20), (1.0, 20), (0.0, 1)])
def test_quantiles_are_samples_by_nearest_rank(share: float, expected: int) -> None:
    assert expected == quantile(list(range(1, 21)), share)


def _described(**medians: float) -> list[dict[str, object]]:
    return describe([Figure(name.replace("_", " "), "ms", [value]) for name, value in medians.items()])


@pytest.mark.parametrize(
    ("goal", "ours", "met", "value"),
    [
        (goals.Comparison("ours", "other", least=2.0), 20, True, 2.0),
        (goals.Comparison("ours", "other", least=2.0), 19, False, 1.9),
        (goals.Comparison("ours", "other", most=2.0), 20, True, 2.0),
        (goals.Comparison("ours", "other", most=2.0), 21, False, 2.1),
        (goals.Comparison("ours", "other", added=2.0), 12, True, 2),
        (goals.Comparison("ours", "other", added=2.0), 13, False, 3),
    ],
)
def test_a_goal_compares_two_figures_of_the_run(goal: goals.Comparison, ours: int, met: bool, value: float) -> None:
    """Its bound is included. Without one of the figures it is not measured."""
    rows = {str(row["name"]): row for row in _described(ours=ours, other=10)}
    judged = goal.judged(rows)
    assert (met, value) == (judged["met"], judged["value"])
    for name in rows:
        assert goal.judged({name: rows[name]})["met"] is None


def test_the_goals_are_judged_only_if_the_run_has_their_figures() -> None:
    assert [] == goals.judge(_described(**{"create runc: ours": 1.0}))
    judged = goals.judge(
        _described(**{"p50, 1 connection: injected": 3.0, "p50, 1 connection: Envoy": 2.0, "down: spliced": 1.0})
    )
    assert len(goals.GOALS) == len(judged)
    assert {"p50, 1 connection: injected": False} == {
        goal["figure"]: goal["met"] for goal in judged if goal["met"] is not None
    }
    printed = goals.lines(judged)
    assert len(goals.GOALS) == len(printed)
    (missed,) = (line.split() for line in printed if "MISSED" in line)
    assert [
        "MISSED",
        "1.50",
        "x",
        "<=",
        "1",
        "x",
        "p50,",
        "1",
        "connection:",
        "injected,",
        "against",
        "Envoy",
    ] == missed
    assert len(goals.GOALS) - 1 == sum("not measured" in line for line in printed)


def test_the_chart_has_a_group_for_each_quantity() -> None:
    names = {"requests, 1 connection: injected": 5.0, "down: Envoy": 7.0, "memory: Envoy": 9.0, "up: another": 1.0}
    chart = draw(_described(**names))
    assert [True, True, False, False] == [text in chart for text in (">injected<", ">Envoy<", "memory", "another")]
    assert ">down (ms)<" in chart
    assert "" == draw(_described(**{"memory: Envoy": 9.0}))


@pytest.mark.parametrize("arguments", [["create", "--only", "Envoy"], ["gateway", "--only", "nothing"]])
def test_paths_are_selected_of_the_gateway_and_by_their_names(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert 2 == ended.value.code
