"""One demo internet and one running Sallyport for all system and security tests of a session.

These tests need root and what `./run test` prepares (dockerd, runsc, execd, images); it names them in SALLYPORT_*
variables. Without them a system test fails: it is never skipped. Two sessions at once need a home, a run directory,
SALLYPORT_TEST_INTERNET (prefix of namespaces) and SALLYPORT_TEST_PORT each.
"""

import os
import secrets
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from demo.control import run_controls
from demo.internet import API, GIT, INDEX, Internet
from demo.sandboxes import DemoSandbox, Secrets
from demo.stack import IMAGE, POLICY, Stack, code_image
from policy.compiled import CompiledPolicy

RUNTIMES = ("runsc", "runc")
INTERNET = os.environ.get("SALLYPORT_TEST_INTERNET", "spdemo")
PORT = int(os.environ.get("SALLYPORT_TEST_PORT", "18090"))

# How long an example takes is the machine's affair.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that selects every test."""
    parser.addoption("--all", action="store_true", dest="every_test", help="also run the tests marked `extended`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what runs with --all only."""
    if config.getoption("every_test"):
        return
    extended = [item for item in items if item.get_closest_marker("extended")]
    config.hook.pytest_deselected(items=extended)
    items[:] = [item for item in items if not item.get_closest_marker("extended")]


@pytest.fixture(scope="session", name="values")
def _values() -> Secrets:
    return Secrets(
        git=f"ledger-bot:{secrets.token_hex(20)}",
        index=f"index-bot:{secrets.token_hex(20)}",
        api=secrets.token_urlsafe(40),
    )


@pytest.fixture(scope="session", name="directory")
def _directory() -> Iterator[Path]:
    """Not below pytest's own directory: that is closed to everyone else, and our daemons are somebody else."""
    with tempfile.TemporaryDirectory(prefix="sallyport-test-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture(scope="session", name="internet")
def _internet(directory: Path, values: Secrets) -> Iterator[Internet]:
    accounts = {"git": values.git, "index": values.index, "api": values.api}
    with Internet(INTERNET, directory / "internet", accounts) as internet:
        yield internet


@pytest.fixture(scope="session", name="controls")
def _controls(internet: Internet) -> dict[str, int]:
    return run_controls(internet)


class WithCode(Stack):
    """A Sallyport that has the code-interpreter image, too, under the name its SDK documents."""

    @property
    def settings(self) -> str:
        return super().settings + code_image()


@pytest.fixture(scope="session", name="stack")
def _stack(directory: Path, internet: Internet, values: Secrets) -> Iterator[Stack]:
    policy = directory / "policies.yaml"  # a copy: tests change it while the server runs
    policy.write_text(POLICY.read_text())
    with WithCode(internet, directory / "sallyport", policy, port=PORT) as stack:
        put_secrets(stack, values)
        yield stack


def put_secrets(stack: Stack, values: Secrets) -> None:
    """Store the secrets that the demo's policy injects."""
    for name, host, value in (
        ("git-login", GIT, values.git),
        ("index-login", INDEX, values.index),
        ("api-token", API, values.api),
    ):
        stack.sallyport("vault", "put", name, "--host", host, stdin=value)


@pytest.fixture(scope="session", name="sandboxes")
def _sandboxes(stack: Stack, values: Secrets) -> Iterator[dict[str, DemoSandbox]]:
    """One long-lived sandbox on each runtime; tests that break one make their own."""
    made: dict[str, DemoSandbox] = {}
    try:
        for runtime in RUNTIMES:
            made[runtime] = DemoSandbox(stack, runtime, values)
        yield made
    finally:
        for sandbox in made.values():
            sandbox.close()


@pytest.fixture(params=RUNTIMES, name="runtime")
def _runtime(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


class Second(Stack):
    """A Sallyport of its own, with the empty image only: one that may be killed."""

    @property
    def settings(self) -> str:
        head, _, tail = super().settings.partition(f'[[sallyport.images]]\nname = "{IMAGE}"')
        return head + tail.partition("\n\n")[2]


class Unwatched(Stack):
    """A Sallyport whose hostd does not look for changes: sandboxes stay when their layers are taken away."""

    slots_ahead = 0

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.unwatched", str(self.config)]


class Governed(Stack):
    """A Sallyport whose hostd can be given a compiled policy, as the product's cannot."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.governed", str(self.config)]

    def configure(self, sandbox: str, policy: CompiledPolicy, **limits: int) -> None:
        """Give a sandbox's gateway another policy and limits, past the API; returns when they are in force.

        The registry gets its digest, too: else `serve` would soon put the registry's back.
        """
        with closing(sqlite3.connect(self.state / "lifecycle" / "sallyport.db", timeout=10)) as database, database:
            database.execute("UPDATE sandboxes SET policy_digest = ? WHERE id = ?", (policy.digest, sandbox))
        self.host("configure", sandbox=sandbox, selection={"given": policy.to_json(), "limits": limits})


@pytest.fixture(scope="module", name="governed")
def _governed(values: Secrets) -> Iterator[Governed]:
    """A server whose gateways are given policies, with an internet of its own."""
    with beside(Governed, "governed", values) as stack:
        assert isinstance(stack, Governed)
        put_secrets(stack, values)
        yield stack


@pytest.fixture(name="second")
def _second() -> Iterator[Stack]:
    """A second server beside the session's, with its own Docker and internet, for tests that kill or bend one."""
    with beside(Second, "second") as stack:
        yield stack


@pytest.fixture(scope="module", name="unwatched")
def _unwatched(values: Secrets) -> Iterator[Stack]:
    """A server that lets a sandbox without its layers be, with an internet of its own."""
    with beside(Unwatched, "unwatched") as stack:
        put_secrets(stack, values)
        yield stack


@contextmanager
def beside(kind: type[Stack], name: str, values: Secrets | None = None) -> Iterator[Stack]:
    """Run a server of `kind` beside the session's; the far end accepts `values`."""
    run = Path(f"{os.environ['SALLYPORT_RUN_DIR']}-{name}")
    far = values or Secrets(git="a:b", index="a:b", api="c")
    accounts = {"git": far.git, "index": far.index, "api": far.api}
    with (
        tempfile.TemporaryDirectory(prefix=f"sallyport-{name}-") as directory,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        place = Path(directory)
        place.chmod(0o711)
        monkeypatch.setenv("SALLYPORT_HOME", str(place / "home"))
        monkeypatch.setenv("SALLYPORT_RUN_DIR", str(run))
        with Internet(f"{INTERNET}-{name}", place / "internet", accounts) as internet:
            try:
                with kind(internet, place / "stack", port=PORT + 1) as stack:
                    yield stack
            finally:
                subprocess.run(["rm", "-rf", str(run), str(place / "home")], check=False)
