"""`./run chaos`: a complete Sallyport beside the demo internet, killed part by part under load, and judged.

    python -m demo.chaos [--minutes N] [--seed N] [--parts worker,auditd,...] [--out DIR]

Prints each kill, a table of recoveries by part and by pair, the findings, and the path of a JSON document with all of
it. The last line is `chaos: ok ...` or `chaos: FAILED ...`, and the exit status agrees with it.
"""

import argparse
import json
import logging
import math
import os
import secrets
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from demo.chaos.judge import BOUND, Outage, Verdict, judge
from demo.chaos.kills import Part
from demo.chaos.run import Settings, run
from testbed.internet import API, PREFIX, Internet
from testbed.stack import Stack

POLICY = Path(__file__).with_name("policy.yaml")
_MINUTES = 10.0
_MOST_MINUTES = 15.0
_BEGAN = time.monotonic()


class Interrupted(BaseException):
    """SIGTERM arrived. It unwinds every context manager, like Ctrl-C."""


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted


def say(text: str) -> None:
    """Print progress with the time since the start."""
    print(f"chaos: {time.monotonic() - _BEGAN:6.1f} s  {text}", flush=True)


def figures(values: Iterable[float | None]) -> dict[str, Any]:
    """Return median, 95th percentile and maximum of `values`, in seconds. A None (no recovery) counts as infinite."""
    found = sorted(math.inf if value is None else value for value in values)
    if not found:
        return {}
    last = found[min(len(found) - 1, math.ceil(len(found) * 0.95) - 1)]
    named = {"median": statistics.median_low(found), "p95": last, "worst": found[-1]}
    return {name: None if math.isinf(value) else round(value, 2) for name, value in named.items()}


def recoveries(outages: Iterable[Outage]) -> dict[str, dict[str, Any]]:
    """Return the figures of all single kills, of all kills in pairs, of each part alone, and of each pair."""
    groups: dict[str, list[Outage]] = {"alone": [], "in pairs": []}
    for outage in sorted(outages, key=lambda outage: (len(outage.parts), sorted(outage.parts))):
        groups["alone" if len(outage.parts) == 1 else "in pairs"].append(outage)
        groups.setdefault(" and ".join(sorted(outage.parts)), []).append(outage)
    return {
        name: {
            "kills": len(group),
            "all": figures(outage.all for outage in group),
            "served": figures(outage.served for outage in group),
            "api": figures(outage.api for outage in group),
            "processes": figures(outage.whole for outage in group),
            "create": figures(outage.created for outage in group if outage.created is not None),
        }
        for name, group in groups.items()
    }


def print_verdict(verdict: Verdict, table: dict[str, dict[str, Any]]) -> None:
    """Print the findings and the times of the recoveries."""

    def cell(values: dict[str, Any], kills: int) -> str:
        if kills == 1:  # then all three are equal
            values = dict(list(values.items())[:1])
        shown = ("-" if value is None else f"{value:.2f}" for value in values.values())
        return " ".join(f"{text:>6}" for text in shown).ljust(21)

    titles = ("all back", "sandboxes served", "API answers", "processes there", "a new one")
    print(f"\n  {'seconds: median, p95, worst':32}{'  '.join(f'{title:21}' for title in titles)}")
    for name, row in table.items():
        columns = ("all", "served", "api", "processes", "create")
        cells = "  ".join(cell(row[column], row["kills"]) for column in columns)
        print(f"  {name:24} {row['kills']:4d}   {cells}".rstrip())
    print()
    for name, count in verdict.counts.items():
        print(f"  {count:8d}  {name}")
    print()
    for name, found in verdict.findings.items():
        print(f"{'! ' if found else '  '}{name}: {f'{len(found)} findings' if found else 'yes'}")
        for line in found:
            print(f"      {line[:300]}")
    print()


def report(
    verdict: Verdict, table: dict[str, dict[str, Any]], settings: Settings, machine: dict[str, Any]
) -> dict[str, Any]:
    """Return all results as one JSON document. Times are seconds; null: no recovery."""
    return {
        "seed": settings.seed,
        "seconds": settings.seconds,
        "bound": BOUND,
        "machine": machine,
        "good": verdict.good,
        "findings": verdict.findings,
        "counts": verdict.counts,
        "recoveries": table,
        "kills": [asdict(outage) for outage in verdict.outages],
    }


def _plain(value: object) -> object:
    return (
        value.decode("latin-1")
        if isinstance(value, bytes)
        else sorted(value)
        if isinstance(value, frozenset)
        else str(value)
    )


def arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="./run chaos", description="kill every part of Sallyport under load")
    parser.add_argument(
        "--minutes", type=float, default=_MINUTES, help=f"of killing (default %(default)s, at most {_MOST_MINUTES:g})"
    )
    parser.add_argument("--seed", type=int, default=None, help="repeats the order of an earlier run")
    parser.add_argument("--parts", default=",".join(Part), help="what to kill (default: %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="directory for verdict.json, facts.json and server.log; else a new one, below the home directory, for "
        "verdict.json alone",
    )
    parser.add_argument("--internet", default=PREFIX, help="prefix of its namespaces")
    options = parser.parse_args(words)
    if not 0 < options.minutes <= _MOST_MINUTES:
        parser.error(
            f"--minutes: above 0, at most {_MOST_MINUTES:g}: in longer runs the clients ask for more names in an hour "
            "than the gateway permits"
        )
    try:
        options.parts = tuple(Part(name.strip()) for name in options.parts.split(","))
    except ValueError as error:
        parser.error(str(error))
    return options


def main(words: list[str]) -> int:
    """Do the run; return 0 if there is no finding."""
    options = arguments(words)
    signal.signal(signal.SIGTERM, _interrupt)
    for name in ("opensandbox", "httpx"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are findings, not lines of output
    seed = secrets.randbits(32) if options.seed is None else options.seed
    settings = Settings(options.minutes * 60, options.parts, seed)
    say(f"seed {seed}; {options.minutes:g} minutes; {', '.join(options.parts)}")
    token = secrets.token_urlsafe(40)
    machine: dict[str, Any] = {"cpus": os.cpu_count(), "load_before": os.getloadavg()}
    try:
        with tempfile.TemporaryDirectory(prefix="sallyport-chaos-") as name:
            place = Path(name)
            place.chmod(0o711)
            accounts = {"git": "a:b", "index": "a:b", "api": token}
            with (
                Internet(options.internet, place / "internet", accounts) as internet,
                Stack(internet, place / "sallyport", POLICY) as stack,
            ):
                stack.sallyport("vault", "put", "api-token", "--host", API, stdin=token)
                try:
                    facts = run(stack, token, settings, say)
                finally:
                    if options.out is not None:
                        options.out.mkdir(parents=True, exist_ok=True)
                        shutil.copy(stack.log, options.out / "server.log")
    except (KeyboardInterrupt, Interrupted):
        print("chaos: FAILED (interrupted)")
        return 1
    except Exception as error:  # noqa: BLE001 - the verdict: whatever failed, it says so and exits 1
        print(f"chaos: FAILED ({type(error).__name__}: {error})")
        return 1
    verdict = judge(facts)
    table = recoveries(verdict.outages)
    print_verdict(verdict, table)
    machine["load_after"] = os.getloadavg()
    out = options.out or Path(os.environ["SALLYPORT_HOME"], "chaos", time.strftime("%Y%m%d-%H%M%S"))
    out.mkdir(parents=True, exist_ok=True)
    (out / "verdict.json").write_text(json.dumps(report(verdict, table, settings, machine), indent=1) + "\n")
    if options.out is not None:
        found = asdict(replace(facts, secret_forms=()))
        (out / "facts.json").write_text(json.dumps(found, default=_plain) + "\n")
    print(f"JSON: {out / 'verdict.json'}")
    elapsed = time.monotonic() - _BEGAN
    wrong = [name for name, found in verdict.findings.items() if found]
    if wrong:
        print(f"chaos: FAILED ({'; '.join(wrong)}), seed {seed}, {elapsed:.0f} s")
        return 1
    count = verdict.counts
    times = figures(outage.all for outage in verdict.outages)
    print(
        f"chaos: ok, {count['kills']} kills, {count['questions']} questions, wire and log agree one to one, "
        f"all back within {BOUND:g} s (median {times['median']}, worst {times['worst']}), seed {seed}, {elapsed:.0f} s"
    )
    return 0
