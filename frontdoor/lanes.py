"""The test suite in lanes, each a session of pytest with a JUnit report; and the static checks beside them.

System tests mostly wait. So four sessions run concurrently, each with its own Sallyport, and the static checks
beside them. The tests that measure times run afterwards, alone.
"""

import os
import signal
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from frontdoor import builds, lock
from frontdoor.places import Places
from frontdoor.steps import BackgroundStep, call, step

_STATICCHECK = "honnef.co/go/tools/cmd/staticcheck@v0.8.2"
_FUZZED = (
    "account.FuzzAccounts",
    "files.FuzzUpload",
    "isolate.FuzzRunReport",
    "server.FuzzPaths",
    "session.FuzzSessionState",
    "stream.FuzzStreamFraming",
    "terminal.FuzzTerminalFrames",
)
_FAST = "not system"
LANES = {
    "fast": ("-m", _FAST),
    "system": ("-m", "system and not (timed or faults or images)", "--ignore", "tests/security"),
    "faults": ("-m", "system and faults and not (timed or images)", "tests/security", "tests/system"),
    "images": ("-m", "system and images and not timed", "tests/contracts", "tests/security", "tests/system"),
    "security": ("-m", "system and not (timed or faults or images)", "tests/security"),
    "timed": ("-m", "system and timed", "tests/system", "tests/vault"),
}
"""The options of pytest that select the tests of each lane; each test is in one lane.

A lane reads only the folders that have its tests: to collect all tests takes ten seconds of a processor.
"""
_FUZZ_INPUTS = "5000x"
_HANGS_SECONDS = 120  # for a test that needs no root, with its fixtures
_NICE = 5
_TESTS_FAILED = 1  # of pytest; a higher status: interrupted, or not run at all


@dataclass(frozen=True)
class Suite:
    """The way to start sessions of pytest: `selected` are options of each, `kept` descriptors that each holds open."""

    python: str
    reports: str
    selected: tuple[str, ...] = ()
    kept: tuple[int, ...] = ()

    def command(self, name: str, *options: str) -> list[str]:
        """Return the command line of a lane.

        A shell's background jobs ignore interrupts; pytest must not. Each session reads the byte code that another one
        wrote: to rewrite the assertions of all test modules takes ten seconds.
        """
        report = f"--junitxml={self.reports}/{name}.xml"
        pytest = (self.python, "-m", "pytest", "-q", "--durations=15", report, *self.selected, *options)
        return ["env", "--default-signal=INT", "--unset=PYTHONDONTWRITEBYTECODE", *pytest]

    def lane(self, name: str, *options: str) -> int:
        """Run a lane and return its exit status. An interrupted lane ends in order before this returns."""
        process = subprocess.Popen(self.command(name, *options), pass_fds=self.kept)
        try:
            status = process.wait()
        except KeyboardInterrupt:
            status = process.wait()
            return status if status > _TESTS_FAILED else 128 + signal.SIGINT
        return status if status >= 0 else 128 - status


def sessions() -> int:
    """Return the number of sessions that run the fast tests; they wait half of their time."""
    return len(os.sched_getaffinity(0)) * 2


def fast_options(*, slow: bool) -> tuple[str, ...]:
    """Return the options of pytest that select and distribute the tests that need no root, the slow ones if wanted."""
    marks = _FAST if slow else f"{_FAST} and not slow"
    return ("-m", marks, "-n", str(sessions()), "--dist", "worksteal", f"--timeout={_HANGS_SECONDS}")


def split(arguments: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the options for each lane, and the arguments that select tests instead of the lanes."""
    return (("--all",), tuple(arguments[1:])) if arguments[:1] == ["--all"] else ((), tuple(arguments))


def run(places: Places, built: builds.Built, arguments: list[str]) -> int:
    """Run all lanes, or with arguments of pytest only the tests that they select; return the exit status."""
    selected, options = split(arguments)
    suite = Suite(places.python, f"{places.home}/reports", selected, kept=(lock.DESCRIPTOR,))
    os.makedirs(suite.reports, exist_ok=True)
    builds.for_tests(places, built, every="--all" in arguments)
    if arguments:
        builds.for_bench(places)
    go = builds.go(places)
    if options:
        return suite.lane("selected", *options)
    with ExitStack() as stack:
        checks = BackgroundStep("checks", lambda: static_checks(go, fuzz=bool(selected)))
        stack.callback(checks.end)
        status = suite.lane("fast", *fast_options(slow=True))
        if status > _TESTS_FAILED:
            return status
        sessions = [BackgroundStep(name, partial(_session, own, suite, name)) for name, own in places.sessions.items()]
        for session in sessions:
            stack.callback(session.end)
        status = suite.lane("system", *LANES["system"]) or status
        for work in (*sessions, checks):
            status = work.wait() or status
        if status > _TESTS_FAILED:
            return status
        return suite.lane("timed", *LANES["timed"]) or status


def _session(places: Places, suite: Suite, name: str) -> int:
    os.environ["SALLYPORT_HOME"], os.environ["SALLYPORT_RUN_DIR"] = places.home, places.run_dir
    os.environ["SALLYPORT_TEST_INTERNET"] = places.internet
    return suite.lane(name, *LANES[name])


def static_checks(go: tuple[str, ...], *, fuzz: bool) -> int:
    """Run linters, type checker and Go's tests, with a lower priority than the tests. Fuzz execd's parsers if wanted.

    Raises:
        Failure: one of them failed; its output has been printed.
    """
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    call(".venv/bin/ruff", "check", ".")
    call(".venv/bin/ruff", "format", "--check", ".")
    call(".venv/bin/lint-imports")
    call(".venv/bin/mypy")
    _execd_tests(go)
    if fuzz:
        for name in _FUZZED:
            step(name, *go, *fuzz_arguments(name), cwd="execd")
    return 0


def _execd_tests(go: tuple[str, ...]) -> None:
    """Run execd's tests with the race detector, and linters. A fuzz test tries the inputs that it names itself."""
    call(*go, "vet", "./...", cwd="execd")
    call(*go, "test", "-race", "./...", cwd="execd", CGO_ENABLED="1")
    call(*go, "run", _STATICCHECK, "./...", cwd="execd")


def fuzz_arguments(name: str) -> tuple[str, ...]:
    """Return the arguments of `go` that fuzz PACKAGE.FUNCTION.

    The number of inputs is limited, not the time: Go before 1.27 can report the end of the time as a failure.
    """
    package, _, function = name.partition(".")
    return ("test", "-run", "^$", "-fuzz", f"^{function}$", "-fuzztime", _FUZZ_INPUTS, f"./internal/{package}")
