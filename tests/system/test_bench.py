"""The benchmarks run and give complete figures. The values of the figures are not tested."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bench.figures import Figure, Goal, describe, quantile, table
from tests.stacks import INTERNET

_PROGRAM = """
import sys, bench.execd, bench.gateway, bench.main, bench.peers
bench.gateway.SECONDS, bench.gateway.CONNECTIONS, bench.peers.BULK_BYTES = 1, (1, 4), 10_000_000
bench.execd.OPERATIONS, bench.execd.TRANSFERS, bench.execd.TRANSFER_BYTES = 4, 1, 100_000
bench.execd.SETTLE_SECONDS = 0.5
arguments = ["create", "execd", "gateway", "policy_change", "--rounds", "1"]
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
    wanted |= {"policy change: last flow ended at the client", "policy change: last flow ended at the far end"}
    wanted |= {
        f"execd {runtime}: {what}" for runtime in ("runc", "runsc") for what in ("echo", "bash alone", "start to /ping")
    }
    wanted |= {f"execd runsc: {what}: the SDK against canned answers" for what in ("echo", "small file")}
    assert wanted <= set(figures)
    assert all(row["n"] == (4 if "small file" in name else 1) for name, row in figures.items())
    differences = ("ours", "when idle")
    assert all(row["min"] > 0 for name, row in figures.items() if not name.endswith(differences))
    assert all(figures[row["peer"]] for row in figures.values() if "peer" in row)
    assert {"cpus", "kernel", "load", "versions"} <= set(document["machine"])
    assert [] == [name for name in figures if name not in done.stdout]
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
