"""One demo internet and one running Sallyport for all system and security tests of a session.

These tests need root and the resources that `./run test` prepares (dockerd, runsc, execd, images) and names in the
SALLYPORT_* variables. Without them a system test fails: it is never skipped. For two sessions at once, each needs its
own home, run directory and SALLYPORT_TEST_INTERNET (the prefix of its namespaces).
"""

import gc
import secrets
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # each fixture imports what it needs: the fast tests start without these modules
    from demo.sandboxes import Controls, DemoSandbox, Secrets
    from testbed.internet import Internet
    from testbed.stack import Stack
    from tests.stacks import Governed

RUNTIMES = ("runsc", "runc")
ON_RUNSC = ("runsc", pytest.param("runc", marks=pytest.mark.extended))
"""Parameters of tests that depend on gVisor's files, memory or processes. Only --all runs them on runc too."""
ON_RUNC = ("runc", pytest.param("runsc", marks=pytest.mark.extended))
"""Parameters of tests whose subject is the same on both runtimes: the gateway, the control plane, execd's protocol.

On runc an attacker has the kernel and the network stack of the host, and a sandbox takes less processor time. Only
--all runs these tests on runsc too.
"""


def representatives(cases: Iterable[str], *each_run: str) -> list[Any]:
    """Return parameters of a test that tries `each_run` in each run, and the other cases with --all only.

    Raises:
        ValueError: one of `each_run` is no case, so that a run would not try it; or there is none: a test that runs
            with --all only has the marker `extended` itself, where the check of the threat model sees it.
    """
    found = tuple(cases)
    if not each_run:
        raise ValueError("no representative: mark the test `extended`")
    if unknown := set(each_run) - set(found):
        raise ValueError(f"no case: {', '.join(sorted(unknown))}")
    return [case if case in each_run else pytest.param(case, marks=pytest.mark.extended) for case in found]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that selects every test."""
    parser.addoption("--all", action="store_true", dest="every_test", help="also run the tests marked `extended`")


def pytest_configure(config: pytest.Config) -> None:
    """Set the number of examples that hypothesis tries. There is no deadline: machines differ in speed."""
    from hypothesis import HealthCheck, settings

    calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("small", calm, max_examples=25)
    settings.register_profile("all", calm, max_examples=250)
    settings.load_profile("all" if config.getoption("every_test") else "small")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that run only with --all."""
    if config.getoption("every_test"):
        return
    extended = [item for item in items if item.get_closest_marker("extended")]
    config.hook.pytest_deselected(items=extended)
    items[:] = [item for item in items if not item.get_closest_marker("extended")]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from the tests themselves, which live as long as the session."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the end of the log of each server that a failed test used to its report."""
    report = yield
    module = sys.modules.get("testbed.stack")  # None: no test has used a server
    if module is not None and report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            stack = getattr(value, "stack", value)
            if isinstance(stack, module.Stack) and stack.log.exists():
                report.sections.append((f"log of {name}", stack.tail()))
    return report


@pytest.fixture(scope="module", autouse=True, name="no_garbage")
def _no_garbage(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collect garbage at the end of a system module, so that a connection that it did not close is its own error."""
    yield
    if request.node.get_closest_marker("system"):
        gc.collect()


@pytest.fixture(scope="session", autouse=True, name="shared_trust_store")
def _shared_trust_store() -> None:
    if "httpx" in sys.modules:  # a test of the session uses it
        from tests import trust_store

        trust_store.share()


@pytest.fixture(scope="session", name="values")
def _values() -> "Secrets":
    from demo.sandboxes import Secrets

    return Secrets(
        git=f"ledger-bot:{secrets.token_hex(20)}",
        index=f"index-bot:{secrets.token_hex(20)}",
        api=secrets.token_urlsafe(40),
    )


@pytest.fixture(scope="session", name="directory")
def _directory() -> Iterator[Path]:
    """Make a directory outside pytest's. That one is closed to other users, and the daemons run as other users."""
    with tempfile.TemporaryDirectory(prefix="sallyport-test-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture(scope="session", name="internet")
def _internet(directory: Path, values: "Secrets") -> "Iterator[Internet]":
    from testbed.internet import Internet
    from tests.stacks import INTERNET

    accounts = {"git": values.git, "index": values.index, "api": values.api}
    with Internet(INTERNET, directory / "internet", accounts) as internet:
        yield internet


@pytest.fixture(scope="session", name="controls")
def _controls(internet: "Internet") -> "Controls":
    from testbed.control import run_controls

    return {runtime: run_controls(internet, runtime) for runtime in RUNTIMES}


@pytest.fixture(scope="session", name="code_image")
def _code_image() -> str:
    """Return the name of the code-interpreter image.

    The session's server has this image if a selected test uses this fixture.
    """
    from testbed.stack import CODE_IMAGE

    return CODE_IMAGE


@pytest.fixture(scope="session", name="stack")
def _stack(
    request: pytest.FixtureRequest, directory: Path, internet: "Internet", values: "Secrets"
) -> "Iterator[Stack]":
    from testbed.stack import POLICY, Stack
    from tests.stacks import WithCode, put_secrets, undescribed_records

    policy = directory / "policies.yaml"  # a copy: tests change it while the server runs
    policy.write_text(POLICY.read_text())
    items = request.session.items
    kind = WithCode if any("code_image" in getattr(item, "fixturenames", ()) for item in items) else Stack
    with kind(internet, directory / "sallyport", policy) as stack:
        put_secrets(stack, values)
        yield stack
        assert set() == undescribed_records(stack.audit_records())


@pytest.fixture(scope="session", name="sandboxes")
def _sandboxes(stack: "Stack", values: "Secrets") -> "Iterator[dict[str, DemoSandbox]]":
    """Start one long-lived sandbox on each runtime. A test that breaks a sandbox makes its own."""
    from demo.sandboxes import DemoSandbox

    made: dict[str, DemoSandbox] = {}
    try:
        for runtime in RUNTIMES:
            made[runtime] = DemoSandbox(stack, runtime, values)
        yield made
    finally:
        for sandbox in made.values():
            sandbox.close()


@pytest.fixture(scope="session", name="some_runtimes")
def _some_runtimes(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return the runtimes for which module fixtures prepare, for tests with the parameters ON_RUNC."""
    return RUNTIMES if request.config.getoption("every_test") else ("runc",)


@pytest.fixture(params=RUNTIMES, name="runtime")
def _runtime(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", name="governed")
def _governed(values: "Secrets") -> "Iterator[Governed]":
    """Run a server whose gateways take compiled policies from tests, with its own internet."""
    from tests.stacks import Governed, beside, put_secrets

    with beside(Governed, "governed", values) as stack:
        assert isinstance(stack, Governed)
        put_secrets(stack, values)
        yield stack


@pytest.fixture(name="second")
def _second() -> "Iterator[Stack]":
    """Run a second server beside the session's, with its own Docker and internet, for tests that kill or change it."""
    from tests.stacks import Second, beside

    with beside(Second, "second") as stack:
        yield stack


@pytest.fixture(scope="module", name="unwatched")
def _unwatched(values: "Secrets") -> "Iterator[Stack]":
    """Run a server without the watch, with its own internet. It keeps a sandbox whose layers were removed."""
    from tests.stacks import Unwatched, beside, put_secrets

    with beside(Unwatched, "unwatched") as stack:
        put_secrets(stack, values)
        yield stack
