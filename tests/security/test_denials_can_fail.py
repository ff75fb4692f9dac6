"""With all layers of a path taken away the far end does receive something: the denial tests are able to fail.

Also the watch is taken away: it would cut such a sandbox off before most of this was tried.
"""

from collections.abc import Iterator

import pytest

from demo.attempts import ATTEMPTS, Attempt, Evidence, FarEnd, arrived
from demo.capture import Capture
from demo.far_end import GATEWAY_CANARY_PORTS, end, probe_environment, sandbox_targets
from demo.internet import Internet
from demo.privileged import PrivilegedContainer
from demo.sandboxes import DemoSandbox, Secrets, wait_for
from demo.stack import Stack
from demo.ungate import Ungated, join_neighbours

pytestmark = pytest.mark.system

NETWORK = tuple(a for a in ATTEMPTS if a.far_end not in (FarEnd.NEIGHBOUR, FarEnd.KERNEL))
FROM_THE_WORKLOAD = {
    "by-address",
    "by-port",
    "forged-host",
    "forged-sni",
    "udp",
    "quic",
    "dns-over-tls",
    "dns-tunnel",
    "metadata",
    "host-ports",
    "gateway-ports",
    "so-mark",
}


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


def _arrivals(attempt: Attempt, internet: Internet, sandbox: DemoSandbox, run: object) -> int:
    assert callable(run)
    counter = f"open-{sandbox.id}"
    with Capture(internet.path(internet.net), Ungated.far) as wire:
        host, gateway = internet.canary_hits("host"), internet.canary_hits(counter)
        result = str(run())

        def count() -> int:
            evidence = Evidence(
                wire.since(0), [], internet.canary_hits("host") - host, internet.canary_hits(counter) - gateway, result
            )
            return arrived(attempt.far_end, evidence)

        return wait_for(count)


@pytest.mark.parametrize(
    "attempt", [a for a in NETWORK if a.probe in FROM_THE_WORKLOAD], ids=lambda attempt: attempt.probe
)
def test_from_an_ungated_workload_it_arrives(attempt: Attempt, unwatched: Stack, open_sandbox: DemoSandbox) -> None:
    environment = probe_environment(sandbox_targets())

    def probe() -> str:
        return open_sandbox.run(f"python3 /tmp/ways_out.py one {attempt.probe}", PROBE_TARGETS=environment)[1]

    assert _arrivals(attempt, unwatched.internet, open_sandbox, probe) > 0


@pytest.mark.parametrize(
    "attempt", [a for a in NETWORK if a.probe not in FROM_THE_WORKLOAD], ids=lambda attempt: attempt.probe
)
def test_from_an_ungated_privileged_container_it_arrives(
    attempt: Attempt, unwatched: Stack, open_sandbox: DemoSandbox
) -> None:
    """What needs capabilities the workload does not have (raw sockets, addresses of its own), or names."""
    resolver = str(sandbox_targets()["dns"]) if attempt.probe == "by-name" else "192.0.2.1"
    with (
        open_sandbox.address_restored(),
        PrivilegedContainer(unwatched.netns(open_sandbox.id, "sbx"), sandbox_targets(), resolver) as container,
    ):
        assert _arrivals(attempt, unwatched.internet, open_sandbox, lambda: container.attempt(attempt.probe)) > 0


def test_without_our_seccomp_profile_the_kernel_doors_open(controls: dict[str, int]) -> None:
    """runc's path to vsock and io_uring; runsc has neither."""
    assert controls["af-vsock"] > 0
    assert controls["io-uring"] > 0


def test_two_sandboxes_on_one_segment_do_reach_one_another(runtime: str, unwatched: Stack, values: Secrets) -> None:
    stack = unwatched
    (attempt,) = (a for a in ATTEMPTS if a.far_end is FarEnd.NEIGHBOUR)
    one, other = DemoSandbox(stack, runtime, values), DemoSandbox(stack, runtime, values)
    try:
        join_neighbours(stack, one.id, other.id)
        with (
            one.address_restored(),
            Capture(stack.netns(other.id, "sbx"), "eth0") as wire,
            PrivilegedContainer(stack.netns(one.id, "sbx"), sandbox_targets(), "192.0.2.1") as container,
        ):
            result = container.attempt(attempt.probe)
            assert wait_for(lambda: arrived(attempt.far_end, Evidence([], wire.since(0), 0, 0, result))) > 0
    finally:
        one.close()
        other.close()
