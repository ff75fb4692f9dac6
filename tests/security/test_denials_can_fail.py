"""Without any layer of a path, traffic does arrive at the far end. So the tests of denials are able to fail.

The traffic comes from the workload itself if its kernel permits it, as the table of attempts says; otherwise from a
privileged container. The watch is off, too, because it would stop such a sandbox before the end of the tests.
"""

from collections.abc import Callable, Iterator

import pytest

from demo.sandboxes import DemoSandbox, Secrets
from lifecycle.posture.attempts import ATTEMPTS, Attempt, Control, Evidence, FarEnd, Report, arrived, refused, report
from lifecycle.posture.capture import Capture
from testbed.far_end import GATEWAY_CANARY_PORTS, end, probe_environment, sandbox_targets, wait_for
from testbed.internet import Internet
from testbed.privileged import PrivilegedContainer
from testbed.stack import Stack
from testbed.ungate import Ungated, join_neighbours
from tests.conftest import ON_RUNSC

pytestmark = pytest.mark.system

ALONE = tuple(attempt for attempt in ATTEMPTS if attempt.far_end is not FarEnd.NEIGHBOUR)
PRIVILEGED = tuple(
    attempt for attempt in ALONE if attempt.privileged and {attempt.runc, attempt.runsc} != {Control.WORKLOAD}
)


@pytest.fixture(scope="module", params=["runsc", "runc"], name="open_sandbox")
def _open_sandbox(request: pytest.FixtureRequest, unwatched: Stack, values: Secrets) -> Iterator[DemoSandbox]:
    internet, stack = unwatched.internet, unwatched
    sandbox = DemoSandbox(stack, request.param, values)
    try:
        canary = internet.start_canary(stack.netns(sandbox.id, "gw"), f"open-{sandbox.id}", *GATEWAY_CANARY_PORTS)
        try:
            with Ungated(internet, stack, sandbox.id):
                yield sandbox
        finally:
            end(canary)
    finally:
        sandbox.close()


def _arrivals(
    attempt: Attempt, internet: Internet, sandbox: DemoSandbox, run: Callable[[], Report]
) -> tuple[int, Report]:
    """Return how much of an attempt arrived, and the probe's own report."""
    counter = f"open-{sandbox.id}"
    with Capture(internet.path(internet.net), Ungated.far) as wire:
        host, gateway = internet.canary_hits("host"), internet.canary_hits(counter)
        seen = run()

        def count() -> int:
            evidence = Evidence(
                wire.since(0), [], internet.canary_hits("host") - host, internet.canary_hits(counter) - gateway, seen
            )
            return arrived(attempt.far_end, evidence)

        return 0 if refused(seen) else wait_for(count), seen


@pytest.mark.parametrize("attempt", ALONE, ids=lambda attempt: attempt.probe)
def test_from_an_ungated_workload_it_arrives_where_its_kernel_lets_it(
    attempt: Attempt, unwatched: Stack, open_sandbox: DemoSandbox
) -> None:
    """If nothing arrives, the kernel refused each try, and the table of attempts says so."""
    count, seen = _arrivals(attempt, unwatched.internet, open_sandbox, lambda: open_sandbox.attempt(attempt.probe))

    assert (count > 0) == (attempt.control(open_sandbox.runtime) is Control.WORKLOAD), seen
    assert count or refused(seen), seen


@pytest.mark.parametrize("attempt", PRIVILEGED, ids=lambda attempt: attempt.probe)
def test_from_an_ungated_privileged_container_it_arrives(
    attempt: Attempt, unwatched: Stack, open_sandbox: DemoSandbox
) -> None:
    """The attempt needs what the workload does not have: capabilities for raw sockets, marks, addresses and rules."""
    with (
        open_sandbox.address_restored(),
        PrivilegedContainer(unwatched.netns(open_sandbox.id, "sbx"), sandbox_targets(), "192.0.2.1") as container,
    ):
        count, seen = _arrivals(attempt, unwatched.internet, open_sandbox, lambda: container.attempt(attempt.probe))

    assert count > 0, seen


@pytest.mark.parametrize("runtime", ON_RUNSC)
def test_two_sandboxes_on_one_segment_do_reach_one_another(runtime: str, unwatched: Stack, values: Secrets) -> None:
    """The traffic comes from the workload itself, and from a privileged container in its network."""
    stack = unwatched
    (attempt,) = (a for a in ATTEMPTS if a.far_end is FarEnd.NEIGHBOUR)
    one, other = DemoSandbox(stack, runtime, values), DemoSandbox(stack, runtime, values)
    try:
        join_neighbours(stack, one.id, other.id)
        container = stack.container(one.id)
        environment = f"PROBE_TARGETS={probe_environment(sandbox_targets())}"
        probe = ("python3", "/tmp/ways_out.py", "one", attempt.probe)
        with Capture(stack.netns(other.id, "sbx"), "eth0") as wire:

            def frames(mark: int, seen: Report) -> int:
                return wait_for(lambda: arrived(attempt.far_end, Evidence([], wire.since(mark), 0, 0, seen)))

            assert Control.WORKLOAD is attempt.control(runtime)
            # docker exec, because execd is reached through the gateway
            done = stack.docker("exec", "-e", environment, container, *probe)
            assert frames(0, report(attempt.probe, done.returncode, done.stdout + done.stderr)) > 0
            with (
                one.address_restored(),
                PrivilegedContainer(stack.netns(one.id, "sbx"), sandbox_targets(), "192.0.2.1") as privileged,
            ):
                assert frames(wire.mark(), privileged.attempt(attempt.probe)) > 0
    finally:
        one.close()
        other.close()
