"""The command lines of the lanes; a lane's end and an interrupt reach the caller as an exit status."""

import itertools
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from frontdoor.lanes import LANES, Suite, fast_options, fuzz_arguments, split
from tests.conftest import representatives

ROOT = Path(__file__).resolve().parents[2]


def test_a_lane_is_a_session_of_pytest_with_a_report() -> None:
    suite = Suite("/c/.venv/bin/python", "/h/reports", ("--all",))
    assert [
        *(
            "env",
            "--default-signal=INT",
            "--unset=PYTHONDONTWRITEBYTECODE",
            "/c/.venv/bin/python",
            "-m",
            "pytest",
            "-q",
            "--durations=15",
        ),
        *("--junitxml=/h/reports/timed.xml", "--all", "-m", "system and timed"),
    ] == suite.command("timed", "-m", "system and timed")


def test_arguments_select_lanes_or_tests() -> None:
    assert ((), ()) == split([])
    assert (("--all",), ()) == split(["--all"])
    assert (("--all",), ("-k", "x")) == split(["--all", "-k", "x"])
    assert ((), ("tests/policy", "--all")) == split(["tests/policy", "--all"])


MARKERS = {
    "tests/system": ("system", "timed", "faults", "images"),
    "tests/security": ("system", "faults", "images"),
    "tests/vault": ("system", "timed"),
    "tests/contracts": ("system", "images"),
    "tests": ("system",),
}
"""The markers of the tests below each folder; those of `tests` are in every other folder."""


@pytest.mark.parametrize(
    ("directory", "marked"),
    [
        (directory, marked)
        for directory, markers in MARKERS.items()
        for count in range(len(markers) + 1)
        for marked in itertools.combinations(markers, count)
    ],
)
def test_each_test_is_in_one_lane(directory: str, marked: tuple[str, ...]) -> None:
    """Markers that no system test has change nothing."""
    markers = {name: name in marked for name in MARKERS["tests/system"]}
    lanes = [
        name
        for name, (_, expression, *where) in LANES.items()
        if eval(expression, {}, markers)  # noqa: S307 - our own expressions
        and (not where or (directory in where) is (where[0] != "--ignore"))
    ]
    assert 1 == len(lanes)
    assert ("fast" in lanes) is not markers["system"]


def test_no_folder_has_a_marker_that_is_not_listed() -> None:
    for module in (ROOT / "tests").rglob("test_*.py"):
        path = module.relative_to(ROOT).as_posix()
        listed = next(markers for folder, markers in MARKERS.items() if path.startswith(f"{folder}/"))
        text = module.read_text()
        assert set() == {name for name in MARKERS["tests/system"] if f"pytest.mark.{name}" in text} - set(listed), path


def test_the_fast_tests_are_those_without_the_marker_system() -> None:
    assert ("-m", "not system", "-n") == fast_options(slow=True)[:3]
    assert ("-m", "not system and not slow", "-n") == fast_options(slow=False)[:3]


def test_a_case_that_does_not_exist_represents_nothing() -> None:
    kept, other = representatives(("a", "b"), "a")
    assert ("a", ("b",), ["extended"]) == (kept, other.values, [mark.name for mark in other.marks])
    with pytest.raises(ValueError, match="no case: c"):
        representatives(("a", "b"), "a", "c")
    with pytest.raises(ValueError, match="no representative"):
        representatives(("a", "b"))


def test_a_fuzz_test_is_named_by_package_and_function() -> None:
    assert "-fuzz ^FuzzPaths$ -fuzztime 5000x ./internal/server" == " ".join(fuzz_arguments("server.FuzzPaths")[3:])


@pytest.mark.parametrize(("code", "status"), [("", 0), ("raise SystemExit(1)", 1), ("import os; os.abort()", 134)])
def test_the_status_of_a_lane_is_that_of_its_session(tmp_path: Path, code: str, status: int) -> None:
    assert status == _Program(tmp_path, code).lane("x")


def test_an_interrupted_lane_ends_before_its_caller_goes_on(tmp_path: Path) -> None:
    """The session also gets the signal, although an ancestor process ignored it, and it ends in order."""
    session = (
        "import time\ntry:\n print('up', flush=True); time.sleep(60)\nexcept KeyboardInterrupt:\n print('ended')\n"
    )
    program = (
        f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"from tests.frontdoor.test_lanes import _Program; from pathlib import Path\n"
        f"print(_Program(Path({str(tmp_path)!r}), {session!r}).lane('x'), flush=True)"
    )
    command = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", sys.executable, "-u", "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert "up\n" == process.stdout.readline()
        subprocess.run(["kill", "-INT", "--", f"-{process.pid}"], check=True)
        assert ["ended\n", f"{128 + signal.SIGINT}\n"] == process.stdout.readlines()


class _Program(Suite):
    """A suite whose sessions run a program of the test instead of pytest."""

    def __init__(self, directory: Path, code: str) -> None:
        super().__init__(sys.executable, str(directory))
        (directory / "session.py").write_text(code)

    def command(self, name: str, *options: str) -> list[str]:
        head = super().command(name, *options)
        return [*head[: head.index("-m")], f"{self.reports}/session.py"]
