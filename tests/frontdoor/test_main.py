"""Each command is documented and exists; the bootstrap and the commands agree."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from frontdoor import packages
from frontdoor.main import COMMANDS, main, usage

ROOT = Path(__file__).resolve().parents[2]


def test_usage_names_every_command() -> None:
    assert {*COMMANDS, "sallyport"} == set(re.findall(r"^  ([a-z]+)", usage(), re.MULTILINE))


def test_the_bootstrap_knows_every_command() -> None:
    text = (ROOT / "run").read_text()
    cases = " ".join(re.findall(r"^  ([a-z| -]+)\)", text[text.index("case $command") :], re.MULTILINE))
    assert {*COMMANDS, "sallyport"} == set(re.findall(r"[a-z]+", cases)) - {"help", "h"}


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["help"], 0), (["-h"], 0), (["frobnicate"], 2)])
def test_help_is_printed_and_an_unknown_command_refused(
    arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bootstrap prints the same, and needs no environment for it."""
    assert status == main(arguments)
    printed = capsys.readouterr()
    done = subprocess.run([ROOT / "run", *arguments], capture_output=True, text=True, check=False)
    assert (status, *printed) == (done.returncode, done.stdout, done.stderr)
    assert usage() == printed.err + printed.out


def test_only_one_run_at_a_time_has_the_lock_and_what_it_becomes_keeps_it(tmp_path: Path) -> None:
    program = (
        "import os; import frontdoor.lock as lock; from frontdoor import places, steps\n"
        "lock.only_one(places.find(os.environ, '', 0)); print('held', flush=True); steps.become('cat')"
    )
    command = [sys.executable, "-c", program]
    environment = os.environ | {"SALLYPORT_HOME": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert "held\n" == first.stdout.readline()
        second = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert (1, True) == (second.returncode, f"another ./run is at work (lock {tmp_path}/lock)" in second.stderr)
        first.communicate("")
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert (0, "held\n") == (done.returncode, done.stdout)


def test_the_packages_are_named_by_the_bootstrap_too() -> None:
    assert {"docker.io", "python3-venv", "nftables"} < set(packages.PACKAGES)
    needed = re.search(r"needed=\((.*)\)", (ROOT / "run").read_text())
    assert needed is not None
    assert set(needed[1].split()) < set(packages.PACKAGES)


def test_the_installation_of_postgresql_makes_no_server(tmp_path: Path) -> None:
    """The package's scripts read such a file from that directory. It does not stay."""
    assert packages.POSTGRESQL in packages.TEST_PACKAGES
    with packages._no_cluster(tmp_path / "made"):
        assert ["create_main_cluster = false\n"] == [path.read_text() for path in (tmp_path / "made").glob("*.conf")]
    assert [] == [*(tmp_path / "made").iterdir()]
