"""Measurement of the changed conditions that the fast tests detect: mutmut over an area, and the score by module.

`python -m tests.mutation_score AREA --workdir DIRECTORY [--sample N] [--seed N]`. The scores and the accepted
survivors, with reasons, are in docs/mutation.md.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NO_MUTANT = "no-mutant-has-this-name"  # with this name mutmut writes the mutants, measures the tests, and ends


@dataclass(frozen=True, slots=True)
class Area:
    """Modules of one package, and the tests that must detect a change in them.

    Attributes:
        package: the package.
        tests: the arguments by which pytest selects the tests.
        modules: file names; empty for the whole package.
        marker: the marker expression of the tests that run. Tests of the shim's plans run as root only.
    """

    package: str
    tests: tuple[str, ...]
    modules: tuple[str, ...] = ()
    marker: str = "not system"


AREAS = {
    "policy": Area("policy", ("tests/policy",)),
    "gateway": Area(
        "gateway",
        ("tests/gateway", "--ignore=tests/gateway/mitm"),
        (
            "budget.py",
            "tls/authority.py",
            "dns/queries.py",
            "scrub/decode.py",
            "dns/message.py",
            "engines/http1/framing.py",
            "exchange.py",
            "scrub/forms.py",
            "tls/hello.py",
            "inject.py",
            "ledger.py",
            "scrub/grpc.py",
            "dns/names.py",
            "ports.py",
            "response_head.py",
            "scrub/stream.py",
            "scrub/searched.py",
            "translate.py",
        ),
    ),
    "wire": Area("wire", ("tests/wire",), ("anchors.py", "codec.py", "ids.py", "operations.py")),
    "vault": Area(
        "vault",
        ("tests/vault",),
        ("custody.py", "envelope.py", "grants.py", "keyring.py", "secret.py", "stores/directory.py"),
    ),
    "audit": Area("audit", ("tests/audit",), ("chain.py", "records.py", "shares.py", "verifier.py")),
    "shim": Area(
        "runtimes",
        (
            "tests/runtimes",
            "--ignore=tests/runtimes/test_watchdog.py",
            "--deselect=tests/runtimes/test_profile.py::test_the_shim_starts_without_slow_modules",  # no mutmut there
        ),
        ("engine/profile.py", "engine/shim.py", "engine/plans.py", "engine/seccomp.py", "spec.py"),
        marker="not timed",
    ),
}


def prepare(area: Area, place: Path) -> None:
    """Copy the checkout to `place`, with the area's mutmut configuration."""
    kept = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    for name in kept:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    copied = sorted({Path(name).parts[0] for name in kept} - {area.package})
    lines = [
        "",
        "[tool.mutmut]",
        f"source_paths = {json.dumps([area.package])}",
        f"only_mutate = {json.dumps([f'{area.package}/{name}' for name in area.modules])}",
        f"also_copy = {json.dumps(copied)}",
        f"pytest_add_cli_args_test_selection = {json.dumps(list(area.tests))}",
        f'pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "tests.uncached", "-m", "{area.marker}"]',
        "track_dependencies = false",
        "use_git_change_detection = false",
    ]
    with (place / "pyproject.toml").open("a") as settings:
        settings.write("\n".join(lines) + "\n")


def results(place: Path) -> dict[str, str]:
    """Return the status of each mutant, with mutmut's names for both."""
    printed = subprocess.run(
        [sys.executable, "-m", "mutmut", "results", "--all", "true"],
        cwd=place,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return dict(line.strip().rsplit(": ", 1) for line in printed.splitlines() if ": " in line)


def drawn(names: Sequence[str], count: int, seed: int) -> list[str]:
    """Draw `count` mutants, the same for the same seed; all if there are not more."""
    if not count or count >= len(names):
        return sorted(names)
    return sorted(random.Random(seed).sample(sorted(names), count))


def table(found: dict[str, str]) -> list[str]:
    """Return the score of each module. A mutant is killed if a test fails or takes many times its normal time."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, status in found.items():
        counts[name.partition(".x")[0]][status] += 1
    counts["all"] = sum(counts.values(), Counter())
    lines = ["| module | mutants | killed | survived | score |", "|---|---|---|---|---|"]
    for module, one in counts.items():
        killed = one["killed"] + one["timeout"]
        lines.append(
            f"| {module} | {one.total()} | {killed} | {one.total() - killed} | {100 * killed / one.total():.0f} % |"
        )
    return lines


def main() -> int:
    """Run one area."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("--workdir", type=Path, required=True, help="an empty directory, which keeps the mutants")
    parser.add_argument("--sample", type=int, default=0, help="draw so many mutants (0: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    options.workdir.mkdir(parents=True, exist_ok=True)
    print(f"the mutants are in {options.workdir}")
    if not (options.workdir / "mutants").exists():
        prepare(AREAS[options.area], options.workdir)
    log = options.workdir / "mutmut.log"
    run = [sys.executable, "-m", "mutmut", "run", "--max-children", str(options.jobs)]
    with log.open("w") as output:
        subprocess.run([*run, NO_MUTANT], cwd=options.workdir, stdout=output, stderr=output, check=False)
        chosen = drawn(list(results(options.workdir)), options.sample, options.seed)
        status = subprocess.run([*run, *chosen], cwd=options.workdir, stdout=output, stderr=output, check=False)
    if status.returncode:
        print(f"mutmut failed: see {log}", file=sys.stderr)
        return 1
    found = {name: result for name, result in results(options.workdir).items() if name in set(chosen)}
    survivors = sorted(name for name, result in found.items() if result not in ("killed", "timeout"))
    print("\n".join([*table(found), "", *(f"{name}: {found[name]}" for name in survivors)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
