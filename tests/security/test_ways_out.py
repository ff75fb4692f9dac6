"""Every way out of a sandbox, tried from inside and from a privileged container in its network: nothing arrives.

The module tests `lifecycle/posture/ways_out.py`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.sandboxes import Controls, DemoSandbox, Secrets
from lifecycle.posture.attempts import ATTEMPTS, Attempt, Control, ProbeError
from testbed.far_end import FarEndWatch, control_targets
from testbed.internet import DNS_ADDRESS, Internet
from testbed.privileged import PrivilegedContainer
from testbed.stack import Stack

DOCUMENT = Path(__file__).parents[2] / "docs" / "threat-model.md"
BROKEN = {
    "is not there": "rm ways_out.py",
    "crashes": "sed -i 's/^PROBES: .*/missing()/' ways_out.py",
    "is killed": "echo 'import os; os.kill(os.getpid(), 9)' >ways_out.py",
    "ends without a report": "echo 'print(1)' >ways_out.py",
    "reports, then fails": "echo 'raise SystemExit(3)' >>ways_out.py",
    "leaves a try out": "sed -i 's/PROBES.name..values()/()/' ways_out.py",
}
"""The commands that break the probe program in a sandbox."""
PRIVILEGED = tuple(attempt for attempt in ATTEMPTS if attempt.privileged and not attempt.noticed)
NOTICED = tuple(attempt for attempt in ATTEMPTS if attempt.noticed)


@pytest.fixture(scope="module", name="watches")
def _watches(internet: Internet, stack: Stack, sandboxes: dict[str, DemoSandbox]) -> Iterator[dict[str, FarEndWatch]]:
    with (
        FarEndWatch(internet, stack, sandboxes["runsc"], sandboxes["runc"]) as runsc,
        FarEndWatch(internet, stack, sandboxes["runc"], sandboxes["runsc"]) as runc,
    ):
        yield {"runsc": runsc, "runc": runc}


def test_the_document_has_the_control_of_each_attempt() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| ([^|]+) \| ([^|]+) \|$", DOCUMENT.read_text(), re.M)

    assert [(one.probe, one.runc.value, one.runsc.value) for one in ATTEMPTS] == rows


@pytest.mark.system
@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.probe)
def test_the_control_of_each_attempt_does_arrive(attempt: Attempt, runtime: str, controls: Controls) -> None:
    """Without a gateway a probe reaches its far end from exactly those kernels that have the interface."""
    assert (controls[runtime][attempt.probe] > 0) == (attempt.control(runtime) is not Control.ABSENT)


@pytest.mark.system
@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.probe)
def test_nothing_arrives_from_the_workload(
    attempt: Attempt,
    runtime: str,
    sandboxes: dict[str, DemoSandbox],
    watches: dict[str, FarEndWatch],
    controls: Controls,
) -> None:
    row = sandboxes[runtime].attack(attempt, watches[runtime], controls)

    assert row.as_expected, row.observed


@pytest.mark.system
@pytest.mark.parametrize("how", BROKEN)
def test_a_probe_that_did_not_run_to_its_end_is_a_failure(
    how: str, sandboxes: dict[str, DemoSandbox], watches: dict[str, FarEndWatch], controls: Controls
) -> None:
    """The broken probe reaches nothing, either."""
    sandbox, attempt = sandboxes["runc"], next(attempt for attempt in ATTEMPTS if attempt.probe == "udp")
    assert (0, "") == sandbox.run(f"cd /tmp && cp ways_out.py kept && {BROKEN[how]}")
    try:
        row = sandbox.attack(attempt, watches["runc"], controls)
    finally:
        sandbox.run("cd /tmp && mv kept ways_out.py")

    assert (False, "0 of") == (row.as_expected, row.observed[:4]), row.observed
    assert sandbox.attack(attempt, watches["runc"], controls).as_expected


@pytest.mark.system
def test_a_probe_that_crashes_in_a_privileged_container_is_a_failure(internet: Internet) -> None:
    targets = control_targets()
    del targets["attacker"]
    with PrivilegedContainer(internet.path(internet.control), targets, DNS_ADDRESS) as container:
        with pytest.raises(ProbeError, match="failed udp KeyError"):
            container.attempt("udp")
        assert {"af-vsock/socket": "opened"} == container.attempt("af-vsock")


@pytest.mark.system
def test_nothing_arrives_from_a_privileged_container_in_the_same_namespace(
    runtime: str,
    sandboxes: dict[str, DemoSandbox],
    watches: dict[str, FarEndWatch],
    controls: Controls,
) -> None:
    rows = sandboxes[runtime].privileged_attacks(PRIVILEGED, watches[runtime], controls)

    assert len(PRIVILEGED) == len(rows)
    assert [] == [row for row in rows if not row.as_expected]


@pytest.mark.system
@pytest.mark.parametrize("attempt", NOTICED, ids=lambda attempt: attempt.probe)
def test_nothing_arrives_from_one_that_changes_the_namespace_and_it_is_cut_off(
    attempt: Attempt, runtime: str, internet: Internet, stack: Stack, values: Secrets, controls: Controls
) -> None:
    sandbox, other = DemoSandbox(stack, runtime, values), DemoSandbox(stack, runtime, values)
    try:
        with FarEndWatch(internet, stack, sandbox, other) as watch:
            rows = sandbox.noticed_attack(attempt, watch, controls)
    finally:
        sandbox.close()
        other.close()

    assert [] == [row for row in rows if not row.as_expected]


@pytest.mark.system
def test_no_form_of_a_secret_can_be_found_in_a_sandbox(runtime: str, sandboxes: dict[str, DemoSandbox]) -> None:
    """The search finds the values that were planted for it, and no secret."""
    sandboxes[runtime].work()
    (row,) = sandboxes[runtime].leak_search()

    assert row.as_expected, row.observed
