"""`./run bench [NAME...]`: measures, prints a table and the goals, writes one JSON document."""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

from bench import (
    burst,
    create,
    density,
    execd,
    first_code,
    gateway,
    goals,
    listing,
    losses,
    pause,
    policy_change,
    snapshot,
)
from bench.chart import draw
from bench.figures import Figure, describe, machine, table
from bench.fixture import BenchError, BenchStack, CodeStack, DensityStack, Fixture, fixture
from testbed.internet import PREFIX, InternetError
from testbed.stack import StackError

BENCHES: dict[str, Callable[[Fixture, int], list[Figure]]] = {
    "create": create.measure,
    "execd": execd.measure,
    "gateway": gateway.measure,
    "policy_change": policy_change.measure,
    "burst": burst.measure,
    "pause": pause.measure,
    "snapshot": snapshot.measure,
    "list": listing.measure,
    "code": first_code.measure,
}
ON_DEMAND: dict[str, Callable[[Fixture, int], list[Figure]]] = {"density": density.measure, "losses": losses.measure}
"""Benchmarks that take most of the machine's memory, or kill the server's processes. Each runs only if it is named, and
alone."""
ROUNDS = 20


class Interrupted(BaseException):
    """SIGTERM arrived. It unwinds every context manager, like Ctrl-C."""


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted


def main(arguments: list[str], *, prefix: str = PREFIX) -> int:
    """Run the named benchmarks, or all; return the exit status. A missed goal is no failure."""
    known = BENCHES | ON_DEMAND
    parser = argparse.ArgumentParser(prog="./run bench", allow_abbrev=False)
    of_names = f"of {', '.join(known)}; if none is named, all but {', '.join(ON_DEMAND)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=of_names)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"samples of each figure ({ROUNDS})")
    parser.add_argument("--output", type=Path, help="the JSON document; else a new file below the home directory")
    help_only = "a path of the benchmark gateway; may be repeated; else all: %(choices)s"
    parser.add_argument("--only", action="append", choices=goals.WAYS, metavar="WAY", help=help_only)
    of_density = "of the benchmark density (%(default)s); 0: none"
    parser.add_argument("--sandboxes", type=int, default=density.SANDBOXES_WANTED, help=f"idle sandboxes {of_density}")
    parser.add_argument("--slots", type=int, default=density.SLOTS_WANTED, help=f"slots without sandboxes {of_density}")
    of_runtime = "runtime of these sandboxes: %(choices)s (%(default)s)"
    parser.add_argument("--runtime", choices=create.PLAIN, default=density.RUNTIME, help=of_runtime)
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no benchmark {unknown[0]!r}")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if min(options.sandboxes, options.slots) < 0 or 0 < options.sandboxes < density.LEAST:
        parser.error(f"--sandboxes must be 0 or at least {density.LEAST}, --slots at least 0")
    names = options.names or list(BENCHES)
    if options.only and "gateway" not in names:
        parser.error("--only is an option of the benchmark gateway")
    if set(names) & ON_DEMAND.keys() and len(set(names)) > 1:
        parser.error(f"each of {', '.join(ON_DEMAND)} is run alone: name no other")
    benches = known | {
        "gateway": partial(gateway.measure, only=options.only or goals.WAYS),
        "density": partial(
            density.measure,
            runtime=options.runtime,
            sandboxes=options.sandboxes,
            number_of_slots=options.slots,
        ),
    }
    signal.signal(signal.SIGTERM, _interrupt)
    about = machine()
    figures: list[Figure] = []
    try:
        with tempfile.TemporaryDirectory(prefix="sallyport-bench-") as name:
            Path(name).chmod(0o711)
            with fixture(Path(name), prefix, _stack(names)) as made:
                for bench in names:
                    print(f"bench: {bench}, {options.rounds} rounds", file=sys.stderr, flush=True)
                    figures += benches[bench](made, options.rounds)
    except (BenchError, InternetError, StackError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Interrupted):
        return 130
    described = describe(figures)
    judged = goals.judge(described)
    print(table(described))
    if judged:
        print("\ngoals of the gateway, of the medians of this run:", *goals.lines(judged), sep="\n")
    output = options.output or Path(os.environ["SALLYPORT_HOME"], "bench", time.strftime("%Y%m%d-%H%M%S.json"))
    output.parent.mkdir(parents=True, exist_ok=True)
    about["load_after"] = list(os.getloadavg())
    document = {"machine": about, "rounds": options.rounds, "figures": described, "goals": judged}
    output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\nmachine: {about['cpus']} x {about['cpu']}, kernel {about['kernel']}; load {about['load'][0]:.1f} before")
    print(f"JSON: {output}")
    if chart := draw(described):
        output.with_suffix(".svg").write_text(chart)
        print(f"SVG: {output.with_suffix('.svg')}")
    return 0


def _stack(names: list[str]) -> type[BenchStack]:
    if "density" in names:
        return DensityStack
    return CodeStack if "code" in names else BenchStack


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
